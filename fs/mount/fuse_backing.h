// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FUSE_BACKING_H_
#define TENSORMOUNT_FS_MOUNT_FUSE_BACKING_H_

#include <string>

#include "fs/mount/open_modes.h"

namespace tensormount::fs {

// Registers files with the kernel through a mount's descriptor of /dev/fuse. Uses the ioctl
// directly with every version of libfuse, because the call of libfuse 3.17 hides the error. Tests
// implement BackingRegistrar by a fake kernel that checks the rules of open_modes.h.
class FuseBacking : public BackingRegistrar {
 public:
  // To be called before the first Register(). The caller keeps the descriptor and must keep it
  // open.
  void SetDevice(int device) { device_ = device; }
  Result<int> Register(int descriptor) override;
  void Unregister(int id) noexcept override;

 private:
  int device_ = -1;
};

// The stack depth to request at INIT so that files of `source` can use passthrough
// (FuseShim::Options::passthrough_depth): 2 if `source` is on overlayfs, else 1. The kernel refuses
// to stack filesystems deeper than 2.
unsigned PassthroughDepth(const std::string& source);
// Why this process cannot register files, as a message; empty: no known obstacle. Lets --tier
// passthrough fail before it mounts.
std::string PassthroughObstacle();

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FUSE_BACKING_H_
