// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_REACH_H_
#define TENSORMOUNT_FS_REACH_H_

#include <cstdint>
#include <set>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"

namespace tensormount::fs {

// Computes who may access a node whose data lie in several files and directories with their own
// owners, groups, modes and access lists. A node has one owner, one group and nine bits, which the
// kernel checks. A class of users (owner, group, others) keeps a bit only if every user that may be
// in it could access everything directly. When in doubt the class gets fewer bits, never more than
// the store's modes grant.
// Not thread-safe.
class AccessMask {
 public:
  enum class Access : std::uint32_t { kRead = 4, kSearch = 1 };
  // The mask of a node that has this owner and group. If the owner is root, its bits are never
  // removed (capabilities(7)).
  AccessMask(std::uint32_t uid, std::uint32_t gid) : uid_(uid), gid_(gid) {}

  // Restricts the node to users who have access `how` to `path`. Follows symbolic links.
  Status Require(FileSystem& fs, const std::string& path, Access how);
  // Like the other Require, for a file with this information; `mode` is the result of
  // ModeWithoutAcl.
  void Require(const FileInfo& info, std::uint32_t mode, Access how);
  // Treats this directory and all above it as searchable by every user of the node.
  void AssumeSearchable(const std::string& folder);
  // Requires search permission on every directory above the absolute `path`, up to the root. Each
  // is checked once.
  Status RequireFoldersAbove(FileSystem& fs, const std::string& path);

  // 0777 without all three bits of each class that lacks a required access.
  std::uint32_t mask() const { return mask_; }

 private:
  const std::uint32_t uid_;
  const std::uint32_t gid_;
  std::uint32_t mask_ = 0777;
  std::set<std::string> folders_;  // Directories that were checked, or are assumed searchable.
};

// Permission bits of `path` that a node without an access list may show. The owner's bits are those
// of the file. Group and others keep only bits that every entry of the access list grants that may
// apply to one of their members. st_mode alone does not tell, because with a list its group bits
// are the list's mask (acl(5)).
Result<std::uint32_t> ModeWithoutAcl(FileSystem& fs, const std::string& path, const FileInfo& info);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_REACH_H_
