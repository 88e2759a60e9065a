// SPDX-License-Identifier: Apache-2.0
#include "base/mapping.h"
#include "mount-tools/cli.h"

int main(int argc, char** argv) {
  // Files of others may be cut short while they are read.
  tensormount::EnableMappingGuard();
  return tensormount::tools::Main(argc, argv);
}
