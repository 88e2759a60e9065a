// SPDX-License-Identifier: Apache-2.0
// Combines modes, owners and POSIX access lists of several files into the permission bits of one
// node.
#include "fs/reach.h"

#include <cstring>
#include <string_view>

namespace tensormount::fs {
namespace {

// The format of an access list (linux/posix_acl_xattr.h): a version, then entries of tag,
// permissions and id, little-endian.
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

bool Has(std::uint32_t triple, AccessMask::Access how) {
  return (triple & static_cast<std::uint32_t>(how)) != 0;
}

}  // namespace

// A named user, or a member of a named group, may be in the node's group or in its others, so both
// lose the bits that such an entry lacks.
Result<std::uint32_t> ModeWithoutAcl(FileSystem& fs, const std::string& path,
                                     const FileInfo& info) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string list, fs.AccessList(path));
  if (list.empty()) return info.mode;
  // A list that cannot be parsed grants bits to the owner only.
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

void AccessMask::Require(const FileInfo& info, std::uint32_t mode, Access how) {
  const bool owner = Has(mode >> 6, how);
  const bool group = Has(mode >> 3, how);
  const bool other = Has(mode, how);
  const bool same_owner = info.uid == uid_;
  const bool same_group = info.gid == gid_;
  // The node's owner. If the file has another owner, this user may be in the file's group or among
  // its others.
  const bool ours = same_owner ? owner : group && other;
  // The other members of the node's group. If the file has another owner than the node, the file's
  // owner may be one of these members, so the bits of the file's owner count, too.
  const bool members = (same_group ? group : group && other) && (same_owner || owner);
  const bool rest = other && (same_group || group) && (same_owner || owner);
  if (!ours && uid_ != 0) mask_ &= ~0700u;
  if (!members) mask_ &= ~0070u;
  if (!rest) mask_ &= ~0007u;
}

Status AccessMask::Require(FileSystem& fs, const std::string& path, Access how) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t mode, ModeWithoutAcl(fs, path, info));
  Require(info, mode, how);
  return {};
}

void AccessMask::AssumeSearchable(const std::string& folder) {
  folders_.insert(folder);
  for (std::size_t at = folder.rfind('/'); at != std::string::npos && at > 0;
       at = folder.rfind('/', at - 1)) {
    folders_.insert(folder.substr(0, at));
  }
  folders_.insert("/");
}

Status AccessMask::RequireFoldersAbove(FileSystem& fs, const std::string& path) {
  std::string folder = path;
  while (folder.size() > 1) {
    const std::size_t slash = folder.rfind('/');
    folder = slash == 0 || slash == std::string::npos ? "/" : folder.substr(0, slash);
    if (!folders_.insert(folder).second) return {};  // The directories above were checked, too.
    TENSORMOUNT_RETURN_IF_ERROR(Require(fs, folder, Access::kSearch));
  }
  return {};
}

}  // namespace tensormount::fs
