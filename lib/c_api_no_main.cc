// SPDX-License-Identifier: Apache-2.0
// tm_main (tensormount/c.h) for the library without the command: programs that save and load need
// neither libfuse nor a command line. This function is not in the target c_api, because the library
// of the Python wheel has the tm_main of mount-tools/tm_main.cc, which runs the command.
#include <cstdio>

#include "tensormount/c.h"

int tm_main(int /*argc*/, char** /*argv*/) {
  constexpr const char* kWhy =
      "this library does not contain the command-line tool: run the program tensormount";
  tm_set_last_error(TM_UNSUPPORTED, 0, kWhy);
  std::fprintf(stderr, "tensormount: UNSUPPORTED: %s\n", kWhy);
  return 2;
}
