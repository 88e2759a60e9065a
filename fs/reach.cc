// SPDX-License-Identifier: Apache-2.0
// Modes, owners and POSIX access lists of several files as the bits of one node.
#include "fs/reach.h"

#include <cstring>
#include <string_view>

namespace tensormount::fs {
namespace {

// Of linux/posix_acl_xattr.h: a version, then entries of tag, permissions and id, little-endian.
constexpr std::size_t kHeaderBytes = 4;
constexpr std::size_t kEntryBytes = 8;
constexpr std::uint32_t kVersion = 2;
enum Tag : std::uint16_t {
  kAclUserObj = 0x01,
  kAclUser = 0x02,
  kAclGroupObj = 0x04,
  kAclGroup = 0x08,
  kAclMask = 0x10,
  kAclOther = 0x20,
};

std::uint32_t U16At(std::string_view bytes, std::size_t at) {
  const auto byte = [&](std::size_t i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[i]));
  };
  return byte(at) | byte(at + 1) << 8;
}

std::uint32_t U32At(std::string_view bytes, std::size_t at) {
  return U16At(bytes, at) | U16At(bytes, at + 2) << 16;
}

bool Has(std::uint32_t triple, Reach::How how) {
  return (triple & static_cast<std::uint32_t>(how)) != 0;
}

}  // namespace

// A member of a named group, or a named user, is of the node's group or one of its others, nobody
// knows which: so what such an entry lacks both lose.
Result<std::uint32_t> PlainMode(FileSystem& fs, const std::string& path, const FileInfo& info) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string list, fs.AccessList(path));
  if (list.empty()) return info.mode;
  // A list that cannot be understood gives nobody anything but the owner.
  if (list.size() < kHeaderBytes || (list.size() - kHeaderBytes) % kEntryBytes != 0 ||
      U32At(list, 0) != kVersion) {
    return info.mode & 07700;
  }
  std::uint32_t mask = 7;
  std::uint32_t group = 0;
  std::uint32_t other = 0;
  std::uint32_t named = 7;
  for (const bool masks : {true, false}) {
    for (std::size_t at = kHeaderBytes; at < list.size(); at += kEntryBytes) {
      const std::uint32_t tag = U16At(list, at);
      const std::uint32_t bits = U16At(list, at + 2) & 7;
      if (masks) {
        if (tag == kAclMask) mask = bits;
      } else if (tag == kAclGroupObj) {
        group = bits & mask;
      } else if (tag == kAclOther) {
        other = bits;
      } else if (tag == kAclUser || tag == kAclGroup) {
        named &= bits & mask;
      }
    }
  }
  return (info.mode & 07700) | (group & named) << 3 | (other & named);
}

void Reach::Need(const FileInfo& info, std::uint32_t mode, How how) {
  const bool owner = Has(mode >> 6, how);
  const bool group = Has(mode >> 3, how);
  const bool other = Has(mode, how);
  const bool same_owner = info.uid == uid_;
  const bool same_group = info.gid == gid_;
  // Another's file sees our owner as one of its group or of the others.
  const bool ours = same_owner ? owner : group && other;
  // One of our group is not our owner, but may be its owner, and of its group.
  const bool members = (same_group ? group : group && other) && (same_owner || owner);
  const bool rest = other && (same_group || group) && (same_owner || owner);
  if (!ours && uid_ != 0) mask_ &= ~0700u;
  if (!members) mask_ &= ~0070u;
  if (!rest) mask_ &= ~0007u;
}

Status Reach::Need(FileSystem& fs, const std::string& path, How how) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t mode, PlainMode(fs, path, info));
  Need(info, mode, how);
  return {};
}

void Reach::AssumeSearched(const std::string& folder) {
  folders_.insert(folder);
  for (std::size_t at = folder.rfind('/'); at != std::string::npos && at > 0;
       at = folder.rfind('/', at - 1)) {
    folders_.insert(folder.substr(0, at));
  }
  folders_.insert("/");
}

Status Reach::NeedFoldersAbove(FileSystem& fs, const std::string& path) {
  std::string folder = path;
  while (folder.size() > 1) {
    const std::size_t slash = folder.rfind('/');
    folder = slash == 0 || slash == std::string::npos ? "/" : folder.substr(0, slash);
    if (!folders_.insert(folder).second) return {};  // All above it were, too.
    TENSORMOUNT_RETURN_IF_ERROR(Need(fs, folder, How::kSearch));
  }
  return {};
}

}  // namespace tensormount::fs
