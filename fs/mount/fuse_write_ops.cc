// SPDX-License-Identifier: Apache-2.0
// Operations that change something, and what only files below .staging/ have.
#include <cerrno>

#include "fs/mount/fuse_bridge_internal.h"

namespace tensormount::fs {

namespace {

// Whatever would change something. With the mount read-only the kernel refuses most before us.
void Refuse(fuse_req_t req) {
  BridgeOf(req).vfs.stats().Count(Op::kRefused, {}, true);
  fuse_reply_err(req, EROFS);
}

void OpFlush(fuse_req_t req, fuse_ino_t, fuse_file_info*) { fuse_reply_err(req, 0); }

}  // namespace

bool IsStaged(NodeId) { return false; }

void OpenStaged(fuse_req_t req, fuse_ino_t, fuse_file_info*) { Refuse(req); }

void ReadStaged(fuse_req_t req, std::size_t, off_t, fuse_file_info*) { fuse_reply_err(req, EBADF); }

void SeekStaged(fuse_req_t req, off_t, int, fuse_file_info*) { fuse_reply_err(req, EBADF); }

void AddWriteOps(fuse_lowlevel_ops& ops) {
  ops.flush = OpFlush;
  ops.setattr = [](fuse_req_t r, fuse_ino_t, struct stat*, int, fuse_file_info*) { Refuse(r); };
  ops.mknod = [](fuse_req_t r, fuse_ino_t, const char*, mode_t, dev_t) { Refuse(r); };
  ops.mkdir = [](fuse_req_t r, fuse_ino_t, const char*, mode_t) { Refuse(r); };
  ops.unlink = [](fuse_req_t r, fuse_ino_t, const char*) { Refuse(r); };
  ops.rmdir = [](fuse_req_t r, fuse_ino_t, const char*) { Refuse(r); };
  ops.symlink = [](fuse_req_t r, const char*, fuse_ino_t, const char*) { Refuse(r); };
  ops.rename = [](fuse_req_t r, fuse_ino_t, const char*, fuse_ino_t, const char*, unsigned) {
    Refuse(r);
  };
  ops.link = [](fuse_req_t r, fuse_ino_t, fuse_ino_t, const char*) { Refuse(r); };
  ops.create = [](fuse_req_t r, fuse_ino_t, const char*, mode_t, fuse_file_info*) { Refuse(r); };
  ops.write = [](fuse_req_t r, fuse_ino_t, const char*, std::size_t, off_t, fuse_file_info*) {
    Refuse(r);
  };
  ops.fallocate = [](fuse_req_t r, fuse_ino_t, int, off_t, off_t, fuse_file_info*) { Refuse(r); };
  ops.setxattr = [](fuse_req_t r, fuse_ino_t, const char*, const char*, std::size_t, int) {
    Refuse(r);
  };
  ops.removexattr = [](fuse_req_t r, fuse_ino_t, const char*) { Refuse(r); };
}

}  // namespace tensormount::fs
