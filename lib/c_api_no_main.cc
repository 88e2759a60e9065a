// SPDX-License-Identifier: Apache-2.0
// tm_main (tensormount/c.h) of the library that has no command in it: programs that save and load
// need neither libfuse nor a command line. Not in the layer c_api, because the library of the
// Python wheel has the real one (mount-tools/tm_main.cc).
#include <cstdio>

#include "tensormount/c.h"

int tm_main(int /*argc*/, char** /*argv*/) {
  constexpr const char* kWhy = "the command is not in this library: run the program tensormount";
  tm_set_last_error(TM_UNSUPPORTED, 0, kWhy);
  std::fprintf(stderr, "tensormount: UNSUPPORTED: %s\n", kWhy);
  return 2;
}
