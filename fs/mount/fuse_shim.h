// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FUSE_SHIM_H_
#define TENSORMOUNT_FS_MOUNT_FUSE_SHIM_H_

#include <atomic>
#include <cstdint>
#include <sys/types.h>
#include <sys/uio.h>

namespace tensormount::fs {

// Stands between libfuse and /dev/fuse, and adds to two of libfuse's replies what libfuse 3.14 does
// not know. To INIT: that files opened with FOPEN_DIRECT_IO may be mapped (Linux 6.6), and that
// the kernel may read backing files itself (passthrough, Linux 6.9). To OPEN: which backing file.
// All else it passes on. Where libfuse knows passthrough (3.17) it is libfuse that asks for it and
// names the file; the shim then only sees what was agreed. Thread-safe.
// It works on bytes of the protocol (linux/fuse.h), which the kernel keeps compatible: structures
// only grow at their end. Only two kinds of replies are touched, and those are recognised by their
// place (the reply to the INIT that was read) or by a flag of their thread, so that no other
// traffic is looked at. Once INIT is over, Read is a read(2) and an atomic load.
class FuseShim {
 public:
  struct Options {
    bool want_mmap = false;  // Ask that direct files can be mapped, where the kernel offers it.
    // How deep a stack of filesystems may be with ours on top: 1 over plain ones, 2 over overlayfs
    // (with which ours can no longer be part of another overlay). 0: do not ask for passthrough.
    std::uint32_t passthrough_depth = 0;
    bool by_libfuse = false;  // libfuse asks for passthrough, from OpInit.
  };
  explicit FuseShim(const Options& options) : options_(options) {}

  // read(2) and writev(2) of the device; what fuse_session_custom_io is given.
  ssize_t Read(int fd, void* buffer, std::size_t size);
  ssize_t Writev(int fd, const iovec* pieces, int count);

  // While it lives, the OPEN reply that its thread sends says more than libfuse lets it say: the
  // backing file that it names (0: none), and whether several may write the file at once (Linux
  // 6.2; older ones take no notice), over each write of which the kernel holds the file's lock
  // otherwise. By variables of the thread: libfuse sends a reply on the thread that asked for it,
  // before that call returns.
  class InOpenReply {
   public:
    InOpenReply(int backing_id, bool writes_together);
    ~InOpenReply();
    InOpenReply(const InOpenReply&) = delete;
    InOpenReply& operator=(const InOpenReply&) = delete;
  };

  const Options& options() const { return options_; }
  // After INIT: whether direct files can be mapped.
  bool direct_io_mmap() const { return direct_io_mmap_.load(std::memory_order_acquire); }
  // After INIT: whether the kernel offered passthrough, and whether both sides agreed on it.
  bool passthrough_offered() const { return passthrough_offered_.load(std::memory_order_acquire); }
  bool passthrough() const { return passthrough_.load(std::memory_order_acquire); }
  // Whether INIT was answered.
  bool initialized() const { return state_.load(std::memory_order_acquire) == State::kDone; }
  // What the kernel spoke, 7.`minor`.
  std::uint32_t kernel_minor() const { return kernel_minor_.load(std::memory_order_relaxed); }

 private:
  // Waiting for INIT; INIT was read and not answered; answered.
  enum class State { kWaiting, kAsked, kDone };
  // The flags are set before the reply is written: the kernel may send its first request as soon as
  // it has it.
  ssize_t WriteInit(int fd, const iovec* pieces, int count);
  // `backing_id` 0: none.
  ssize_t WriteOpen(int fd, const iovec* pieces, int count, int backing_id);

  const Options options_;
  std::atomic<State> state_{State::kWaiting};
  std::atomic<bool> direct_io_mmap_{false};
  std::atomic<bool> passthrough_offered_{false};
  std::atomic<bool> passthrough_{false};
  std::atomic<std::uint32_t> kernel_minor_{0};
  bool mmap_offered_ = false;  // Written before state_ becomes kAsked.
  std::uint64_t init_unique_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FUSE_SHIM_H_
