// SPDX-License-Identifier: Apache-2.0
// FuseShim: adds passthrough and mappable direct files, which libfuse of Debian 12 lacks, to the
// replies that pass through it.
#include "fs/mount/fuse_shim.h"

#include <algorithm>
#include <cstring>
#include <linux/fuse.h>
#include <unistd.h>

#include "fs/mount/mount_call.h"

namespace tensormount::fs {
namespace {

// Protocol structures that are newer than linux/fuse.h of Debian 12 (protocol 7.40): headers of the
// build machine may be older than the running kernel.
struct InitOut {
  std::uint32_t major, minor, max_readahead, flags;
  std::uint16_t max_background, congestion_threshold;
  std::uint32_t max_write, time_gran;
  std::uint16_t max_pages, map_alignment;
  std::uint32_t flags2;
  std::uint32_t max_stack_depth;  // Unused before 7.40, but always sent.
};
struct OpenOut {
  std::uint64_t handle;
  std::uint32_t flags;
  std::int32_t backing_id;  // Padding before 7.40.
};
static_assert(sizeof(InitOut) == 40 && sizeof(OpenOut) == sizeof(fuse_open_out));

constexpr std::uint32_t kDirectIoAllowMmap2 = 1u << 4;  // flags2: bit 36 of all flags.
constexpr std::uint32_t kPassthrough2 = 1u << 5;        // flags2: bit 37 of all flags.
constexpr std::uint32_t kOpenParallelWrites = 1u << 6;
constexpr std::uint32_t kOpenPassthrough = 1u << 7;

// Thread-local, because libfuse sends a reply on the thread that requested it, before that call
// returns.
thread_local int named_backing = 0;
thread_local bool writes_together = false;

// Copies the parts of a reply into `out`; returns the size, or 0 if the reply is longer than
// `room`.
std::size_t Gather(const iovec* pieces, int count, char* out, std::size_t room) {
  std::size_t size = 0;
  for (int i = 0; i < count; ++i) {
    if (pieces[i].iov_len > room - size) return 0;
    std::memcpy(out + size, pieces[i].iov_base, pieces[i].iov_len);
    size += pieces[i].iov_len;
  }
  return size;
}

}  // namespace

FuseShim::OpenReplyScope::OpenReplyScope(int backing_id, bool together) {
  named_backing = backing_id;
  writes_together = together;
}
FuseShim::OpenReplyScope::~OpenReplyScope() {
  named_backing = 0;
  writes_together = false;
}

// Looks only for the INIT request, which tells what the kernel offers; libfuse 3.14 does not expose
// that.
ssize_t FuseShim::Read(int fd, void* buffer, std::size_t size) {
  const ssize_t n = read(fd, buffer, size);
  if (state_.load(std::memory_order_acquire) != State::kWaiting) return n;
  if (n < static_cast<ssize_t>(sizeof(fuse_in_header))) return n;
  fuse_in_header header;
  std::memcpy(&header, buffer, sizeof header);
  if (header.opcode != FUSE_INIT) return n;
  fuse_init_in in{};
  const std::size_t have = static_cast<std::size_t>(n) - sizeof header;
  std::memcpy(&in, static_cast<const char*>(buffer) + sizeof header, std::min(have, sizeof in));
  init_unique_ = header.unique;
  kernel_minor_.store(in.minor, std::memory_order_relaxed);
  const std::uint32_t more = (in.flags & FUSE_INIT_EXT) != 0 ? in.flags2 : 0;
  mmap_offered_ = (more & kDirectIoAllowMmap2) != 0;
  passthrough_offered_.store((more & kPassthrough2) != 0, std::memory_order_release);
  state_.store(State::kRequested, std::memory_order_release);
  return n;
}

ssize_t FuseShim::Writev(int fd, const iovec* pieces, int count) {
  if (state_.load(std::memory_order_acquire) == State::kRequested)
    return WriteInit(fd, pieces, count);
  if (named_backing > 0 || writes_together) return WriteOpen(fd, pieces, count, named_backing);
  return writev(fd, pieces, count);
}

ssize_t FuseShim::WriteInit(int fd, const iovec* pieces, int count) {
  // No other request is answered before INIT, so this must be the reply to INIT. A reply that does
  // not look like it is passed on unchanged.
  char reply[256];
  const std::size_t size = Gather(pieces, count, reply, sizeof reply);
  fuse_out_header header;
  if (size < sizeof header) return writev(fd, pieces, count);
  std::memcpy(&header, reply, sizeof header);
  if (header.unique != init_unique_) return writev(fd, pieces, count);
  bool mmap = false;
  bool passthrough = false;
  if (header.error == 0 && size >= sizeof header + sizeof(InitOut)) {
    InitOut out;
    std::memcpy(&out, reply + sizeof header, sizeof out);
    // In a reply that only negotiates the version the flags have no meaning.
    if (out.max_write > 0) {
      if (mmap_offered_ && options_.want_mmap) {
        out.flags |= FUSE_INIT_EXT;
        out.flags2 |= kDirectIoAllowMmap2;
        mmap = true;
      }
      if (passthrough_offered() && options_.passthrough_depth > 0) {
        if (!options_.by_libfuse) {
          out.flags |= FUSE_INIT_EXT;
          out.flags &= ~std::uint32_t{FUSE_WRITEBACK_CACHE};
          out.flags2 |= kPassthrough2;
          out.max_stack_depth = options_.passthrough_depth;
        }
        passthrough = (out.flags2 & kPassthrough2) != 0 && out.max_stack_depth > 0 &&
                      (out.flags & FUSE_WRITEBACK_CACHE) == 0;
      }
      std::memcpy(reply + sizeof header, &out, sizeof out);
    }
  }
  // The flags are stored before the kernel gets the reply, and so before the first request.
  direct_io_mmap_.store(mmap, std::memory_order_release);
  passthrough_.store(passthrough, std::memory_order_release);
  const ssize_t written = write(fd, reply, size);
  if (written >= 0 && header.error == 0) state_.store(State::kDone, std::memory_order_release);
  return written;
}

// A reply of unexpected form is passed on unchanged; the open is then an ordinary one.
ssize_t FuseShim::WriteOpen(int fd, const iovec* pieces, int count, int backing_id) {
  char reply[sizeof(fuse_out_header) + sizeof(OpenOut)];
  fuse_out_header header;
  // Only replies to opens have exactly this size.
  if (Gather(pieces, count, reply, sizeof reply) != sizeof reply) return writev(fd, pieces, count);
  std::memcpy(&header, reply, sizeof header);
  if (header.error != 0) return writev(fd, pieces, count);
  OpenOut out;
  std::memcpy(&out, reply + sizeof header, sizeof out);
  if (backing_id > 0) {
    out.flags = (out.flags | kOpenPassthrough) & ~std::uint32_t{FOPEN_KEEP_CACHE};
    out.backing_id = backing_id;
  }
  if (writes_together) out.flags |= kOpenParallelWrites;
  std::memcpy(reply + sizeof header, &out, sizeof out);
  return write(fd, reply, sizeof reply);
}

}  // namespace tensormount::fs
