// SPDX-License-Identifier: Apache-2.0
// tm_main (tensormount/c.h): changes settings of the process, then runs the command line (cli.h).
// It is not in cli.cc, because tests run the command line in their own process, without these
// settings.
#include <malloc.h>

#include "tensormount/c.h"

#include "base/mapping.h"
#include "mount-tools/cli.h"
#include "remote/remote.h"

int tm_main(int argc, char** argv) {
  // Keeps freed memory for reuse while a checkpoint is opened. By default glibc maps each block of
  // over 128 KiB and unmaps it when it is freed, so the kernel clears new pages each time. A mount
  // changes these settings after its start (mount.cc).
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 128 << 20);
  // A foreign file may be truncated during a read. A mapping beyond the new end raises SIGBUS; the
  // guard converts it to an error of the read.
  tensormount::EnableMappingGuard();
  tensormount::AddRemoteFileSystems();
  return tensormount::tools::Main(argc, argv);
}
