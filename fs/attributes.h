// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_ATTRIBUTES_H_
#define TENSORMOUNT_FS_ATTRIBUTES_H_

#include <cstdint>

#include "base/file_system.h"

namespace tensormount::fs {

// The attributes that stat(2) shows for a node. Owner and times are those of the checkpoint or
// store on disk, not of the mount.
struct Attributes {
  FileKind kind = FileKind::kFile;
  std::uint64_t inode = 0;
  std::uint64_t size = 0;
  std::uint32_t mode = 0;  // Permission bits.
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  // Seconds since 1970.
  std::int64_t mtime = 0;
  // Allocated bytes, which `du` counts: kAll stands for the whole size; a staged tensor or slice
  // has the bytes written so far.
  static constexpr std::uint64_t kAll = ~std::uint64_t{0};
  std::uint64_t allocated = kAll;
};

// Owner and permission bits of a source, or of one checkpoint of a store. All nodes below inherit
// them, so that a mount never grants more than the modes on disk. `file_mode` and `folder_mode`
// have no write bits, because mounted checkpoints are read-only.
struct Ownership {
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  std::uint32_t file_mode = 0444;
  std::uint32_t folder_mode = 0555;
  // For a store: the write bits of its directory. They decide who may publish and write below
  // .staging/.
  std::uint32_t write_mode = 0;
  friend bool operator==(const Ownership&, const Ownership&) = default;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_ATTRIBUTES_H_
