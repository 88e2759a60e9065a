// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FUSE_SHIM_H_
#define TENSORMOUNT_FS_MOUNT_FUSE_SHIM_H_

#include <atomic>
#include <cstdint>
#include <sys/types.h>
#include <sys/uio.h>

namespace tensormount::fs {

// Stands between libfuse and /dev/fuse and extends two replies beyond libfuse 3.14. The reply to
// INIT allows mappings of files opened with FOPEN_DIRECT_IO (Linux 6.6), and reads of backing files
// by the kernel (passthrough, Linux 6.9). The reply to OPEN names the backing file. All else passes
// unchanged. libfuse 3.17 handles passthrough itself; for passthrough the shim then only records
// the negotiated flags. Thread-safe.
// Works on the bytes of the protocol (linux/fuse.h), whose structures only grow at their end. The
// two replies are recognized by the preceding INIT request and by a thread-local flag, so other
// traffic is not parsed; after INIT, Read is read(2) and an atomic load.
class FuseShim {
 public:
  struct Options {
    bool want_mmap = false;  // Request mappable direct files if the kernel offers them.
    // Allowed depth of stacked filesystems, this mount included: 1 over ordinary filesystems, 2
    // over overlayfs (the mount can then not be part of another overlay). 0: no passthrough.
    std::uint32_t passthrough_depth = 0;
    bool by_libfuse = false;  // libfuse requests passthrough itself, in OpInit.
  };
  explicit FuseShim(const Options& options) : options_(options) {}

  // read(2) and writev(2) of the device, for fuse_session_custom_io.
  ssize_t Read(int fd, void* buffer, std::size_t size);
  ssize_t Writev(int fd, const iovec* pieces, int count);

  // While this object lives, the OPEN reply that its thread sends also carries the backing file (0:
  // none) and whether several threads may write the file at once. Without the latter (Linux 6.2,
  // ignored by older kernels) the kernel locks the file during each write. Uses thread-local
  // variables, because libfuse sends a reply on the thread that requested it, before that call
  // returns.
  class OpenReplyScope {
   public:
    OpenReplyScope(int backing_id, bool writes_together);
    ~OpenReplyScope();
    OpenReplyScope(const OpenReplyScope&) = delete;
    OpenReplyScope& operator=(const OpenReplyScope&) = delete;
  };

  const Options& options() const { return options_; }
  // Valid after INIT: whether direct files can be mapped.
  bool direct_io_mmap() const { return direct_io_mmap_.load(std::memory_order_acquire); }
  // Valid after INIT: whether the kernel offered passthrough, and whether it was agreed on.
  bool passthrough_offered() const { return passthrough_offered_.load(std::memory_order_acquire); }
  bool passthrough() const { return passthrough_.load(std::memory_order_acquire); }
  // Whether INIT was answered.
  bool initialized() const { return state_.load(std::memory_order_acquire) == State::kDone; }
  // Minor version of the kernel's protocol, 7.`minor`.
  std::uint32_t kernel_minor() const { return kernel_minor_.load(std::memory_order_relaxed); }

 private:
  // Waiting for INIT; INIT was read but not answered; INIT was answered.
  enum class State { kWaiting, kRequested, kDone };
  // Sets the flags before it writes the reply, since the kernel may send its first request right
  // after.
  ssize_t WriteInit(int fd, const iovec* pieces, int count);
  // Adds the backing file (0: none), and the permission for parallel writes, to an OPEN reply.
  ssize_t WriteOpen(int fd, const iovec* pieces, int count, int backing_id);

  const Options options_;
  std::atomic<State> state_{State::kWaiting};
  std::atomic<bool> direct_io_mmap_{false};
  std::atomic<bool> passthrough_offered_{false};
  std::atomic<bool> passthrough_{false};
  std::atomic<std::uint32_t> kernel_minor_{0};
  bool mmap_offered_ = false;  // Set before state_ becomes kRequested.
  std::uint64_t init_unique_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FUSE_SHIM_H_
