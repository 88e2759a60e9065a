// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/fuse_shim.h"

#include <cstring>
#include <unistd.h>

#include "fs/mount/mount_call.h"

namespace tensormount::fs {
namespace {

// The parts of the kernel's protocol that are needed here (linux/fuse.h, protocol 7.36 and later:
// the headers of the machine that builds may be older than the kernel that runs).
struct InHeader {
  std::uint32_t length;
  std::uint32_t opcode;
  std::uint64_t unique;
  std::uint64_t node;
  std::uint32_t uid, gid, pid;
  std::uint32_t padding;
};
struct InitIn {
  std::uint32_t major, minor, max_readahead, flags, flags2;
};
struct OutHeader {
  std::uint32_t length;
  std::int32_t error;
  std::uint64_t unique;
};
struct InitOut {
  std::uint32_t major, minor, max_readahead, flags;
  std::uint16_t max_background, congestion_threshold;
  std::uint32_t max_write, time_gran;
  std::uint16_t max_pages, map_alignment;
  std::uint32_t flags2;
};
static_assert(sizeof(InHeader) == 40 && sizeof(OutHeader) == 16 && sizeof(InitOut) == 36);

constexpr std::uint32_t kOpInit = 26;
constexpr std::uint32_t kInitExt = 1u << 30;            // flags: flags2 counts too.
constexpr std::uint32_t kDirectIoAllowMmap2 = 1u << 4;  // flags2: bit 36 of all flags.

}  // namespace

ssize_t FuseShim::Read(int fd, void* buffer, std::size_t size) {
  const ssize_t n = read(fd, buffer, size);
  if (state_.load(std::memory_order_acquire) != State::kWaiting) return n;
  if (n < static_cast<ssize_t>(sizeof(InHeader))) return n;
  InHeader header;
  std::memcpy(&header, buffer, sizeof header);
  if (header.opcode != kOpInit) return n;
  InitIn in{};
  const std::size_t have = static_cast<std::size_t>(n) - sizeof header;
  std::memcpy(&in, static_cast<const char*>(buffer) + sizeof header, std::min(have, sizeof in));
  init_unique_ = header.unique;
  kernel_minor_.store(in.minor, std::memory_order_relaxed);
  offered_ = (in.flags & kInitExt) != 0 && (in.flags2 & kDirectIoAllowMmap2) != 0;
  state_.store(State::kAsked, std::memory_order_release);
  return n;
}

ssize_t FuseShim::Writev(int fd, const iovec* pieces, int count) {
  if (state_.load(std::memory_order_acquire) != State::kAsked) return writev(fd, pieces, count);
  // Nothing but INIT is answered before INIT: this is it, unless it failed.
  char reply[256];
  std::size_t size = 0;
  for (int i = 0; i < count; ++i) {
    if (pieces[i].iov_len > sizeof reply - size) return writev(fd, pieces, count);
    std::memcpy(reply + size, pieces[i].iov_base, pieces[i].iov_len);
    size += pieces[i].iov_len;
  }
  OutHeader header;
  if (size < sizeof header) return writev(fd, pieces, count);
  std::memcpy(&header, reply, sizeof header);
  if (header.unique != init_unique_) return writev(fd, pieces, count);
  bool asked = false;
  if (header.error == 0 && size >= sizeof header + sizeof(InitOut) && offered_ && want_mmap_) {
    InitOut out;
    std::memcpy(&out, reply + sizeof header, sizeof out);
    // A reply of version negotiation alone has no flags that count.
    if (out.max_write > 0) {
      out.flags |= kInitExt;
      out.flags2 |= kDirectIoAllowMmap2;
      std::memcpy(reply + sizeof header, &out, sizeof out);
      asked = true;
    }
  }
  direct_io_mmap_.store(asked, std::memory_order_release);
  const ssize_t written = write(fd, reply, size);
  if (written >= 0 && header.error == 0) state_.store(State::kDone, std::memory_order_release);
  return written;
}

}  // namespace tensormount::fs
