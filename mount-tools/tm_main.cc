// SPDX-License-Identifier: Apache-2.0
// tm_main (tensormount/c.h): what is set once for the whole process, then the command line (cli.h).
// Apart from cli.cc so that tests can run the command line in a process of their own.
#include <malloc.h>

#include "tensormount/c.h"

#include "base/mapping.h"
#include "mount-tools/cli.h"

int tm_main(int argc, char** argv) {
  // What is freed while a checkpoint is opened is used again, rather than given back to the kernel
  // to be cleared anew. A mount trims once it serves.
  // By default glibc begins with mapping blocks of over 128 KiB by themselves and unmapping them
  // when they are freed.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 128 << 20);
  // Foreign files may be cut short while they are read.
  // A read of a mapping beyond the new end is SIGBUS; the guard turns it into an error of that
  // read.
  tensormount::EnableMappingGuard();
  return tensormount::tools::Main(argc, argv);
}
