// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_REACH_H_
#define TENSORMOUNT_FS_REACH_H_

#include <cstdint>
#include <set>
#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"

namespace tensormount::fs {

// Who may reach what a node shows, where that stands on several files and folders with owners,
// groups, modes and access lists of their own. A node has one owner, one group and nine bits, by
// which the kernel decides; so a class of its users (owner, group, others) keeps its bits only
// where all who may be in it could reach everything directly. What cannot be told apart counts as
// the one who may less: never more than the store's modes, sometimes less.
// Not thread-safe.
class Reach {
 public:
  enum class How : std::uint32_t { kRead = 4, kSearch = 1 };
  // Of nodes with this owner and group. Root, as an owner, may everything (capabilities(7)).
  Reach(std::uint32_t uid, std::uint32_t gid) : uid_(uid), gid_(gid) {}

  // Only who may do that too. Follows symbolic links.
  Status Need(FileSystem& fs, const std::string& path, How how);
  // `mode` as PlainMode gives it.
  void Need(const FileInfo& info, std::uint32_t mode, How how);
  // Who comes here has searched this folder, and all above it, already.
  void AssumeSearched(const std::string& folder);
  // To search every folder above the absolute `path`, up to the root. Each is looked at once.
  Status NeedFoldersAbove(FileSystem& fs, const std::string& path);

  // 0777 without the bits of the classes that are shut out.
  std::uint32_t mask() const { return mask_; }

 private:
  const std::uint32_t uid_;
  const std::uint32_t gid_;
  std::uint32_t mask_ = 0777;
  std::set<std::string> folders_;  // Searched already.
};

// The permission bits that a node without an access list may show of `path`: the owner's as they
// are; the group's and the others' no more than every entry of the list gives that may be of one of
// them (in st_mode the group's bits are the list's mask, acl(5)).
Result<std::uint32_t> PlainMode(FileSystem& fs, const std::string& path, const FileInfo& info);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_REACH_H_
