// SPDX-License-Identifier: Apache-2.0
// main(): what is set once for the whole process, then the command line (cli.h). Apart from it so
// that tests can run the command line in a process of their own.
#include <malloc.h>

#include "base/mapping.h"
#include "mount-tools/cli.h"

int main(int argc, char** argv) {
  // What is freed while a checkpoint is opened is used again, rather than given back to the kernel
  // to be cleared anew. A mount trims once it serves.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 128 << 20);
  // Foreign files may be cut short while they are read.
  tensormount::EnableMappingGuard();
  return tensormount::tools::Main(argc, argv);
}
