// SPDX-License-Identifier: Apache-2.0
// Registers backing files for passthrough with the ioctls of protocol 7.40.
#include "fs/mount/fuse_backing.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <linux/capability.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace tensormount::fs {
namespace {

// These are from linux/fuse.h of protocol 7.40 (Linux 6.9), which the headers of the build machine
// may lack.
struct BackingMap {
  std::int32_t fd;
  std::uint32_t flags;
  std::uint64_t padding;
};
static_assert(sizeof(BackingMap) == 16);
constexpr unsigned kFuseMagic = 229;
constexpr unsigned long kBackingOpen = _IOW(kFuseMagic, 1, BackingMap);
constexpr unsigned long kBackingClose = _IOW(kFuseMagic, 2, std::uint32_t);

constexpr long kOverlayfs = 0x794c7630;

}  // namespace

Result<int> FuseBacking::Register(int descriptor) {
  BackingMap map{.fd = descriptor, .flags = 0, .padding = 0};
  const int id = ioctl(device_, kBackingOpen, &map);
  if (id > 0) return id;
  return Status::FromErrno(id < 0 ? errno : EIO, "register", "a backing file");
}

void FuseBacking::Unregister(int id) noexcept {
  auto number = static_cast<std::uint32_t>(id);
  // Fails only if the mount, and all its registrations, are gone.
  (void)ioctl(device_, kBackingClose, &number);
}

// The depth is 2 only where needed, because a filesystem of depth 2 cannot be part of another
// overlay.
unsigned PassthroughDepth(const std::string& source) {
  struct statfs info {};
  const bool overlay =
      statfs(source.c_str(), &info) == 0 && static_cast<long>(info.f_type) == kOverlayfs;
  return overlay ? 2 : 1;
}

std::string PassthroughObstacle() {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3] = {};
  if (syscall(SYS_capget, &header, sets) != 0) return "";
  if ((sets[CAP_SYS_ADMIN / 32].effective & (1u << (CAP_SYS_ADMIN % 32))) == 0) {
    return "this process does not have CAP_SYS_ADMIN (root has it; containers must be given it)";
  }
  return "";
}

}  // namespace tensormount::fs
