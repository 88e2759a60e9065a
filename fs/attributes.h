// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_ATTRIBUTES_H_
#define TENSORMOUNT_FS_ATTRIBUTES_H_

#include <cstdint>

#include "base/file_system.h"

namespace tensormount::fs {

// What stat says of a node.
// Values of the store, not of the mount: who looks through the mount sees the owner and times that
// the checkpoint has on disk.
struct Attributes {
  FileKind kind = FileKind::kFile;
  std::uint64_t inode = 0;
  std::uint64_t size = 0;
  std::uint32_t mode = 0;  // Permission bits.
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  // Seconds since 1970.
  std::int64_t mtime = 0;
  // Bytes that are there, what `du` counts: all of a published file, what was written of a staged
  // one.
  static constexpr std::uint64_t kAll = ~std::uint64_t{0};
  std::uint64_t allocated = kAll;
};

// Permission bits and owner of a source, which its nodes inherit: a mount never shows more than
// the store's modes do.
// Modes are without write bits (a mount of checkpoints is read-only) and may differ for each
// checkpoint of a store.
struct Ownership {
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  std::uint32_t file_mode = 0444;
  std::uint32_t folder_mode = 0555;
  // Of a store: who may change it, and so what is below .staging/.
  std::uint32_t write_mode = 0;
  friend bool operator==(const Ownership&, const Ownership&) = default;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_ATTRIBUTES_H_
