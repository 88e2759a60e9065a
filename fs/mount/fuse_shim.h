// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FUSE_SHIM_H_
#define TENSORMOUNT_FS_MOUNT_FUSE_SHIM_H_

#include <atomic>
#include <cstdint>
#include <sys/types.h>
#include <sys/uio.h>

namespace tensormount::fs {

// Stands between libfuse and /dev/fuse, and adds to libfuse's reply to INIT what libfuse 3.14 does
// not know: that files opened with FOPEN_DIRECT_IO may be mapped (Linux 6.6). After INIT it only
// passes on. Thread-safe.
class FuseShim {
 public:
  // `want_mmap`: ask for it where the kernel offers it.
  explicit FuseShim(bool want_mmap) : want_mmap_(want_mmap) {}

  // read(2) and writev(2) of the device; what fuse_session_custom_io is given.
  ssize_t Read(int fd, void* buffer, std::size_t size);
  ssize_t Writev(int fd, const iovec* pieces, int count);

  // After INIT: whether direct files can be mapped.
  bool direct_io_mmap() const { return direct_io_mmap_.load(std::memory_order_acquire); }
  // Whether INIT was answered.
  bool initialized() const { return state_.load(std::memory_order_acquire) == State::kDone; }
  // What the kernel spoke, 7.`minor`.
  std::uint32_t kernel_minor() const { return kernel_minor_.load(std::memory_order_relaxed); }

 private:
  enum class State { kWaiting, kAsked, kDone };
  const bool want_mmap_;
  std::atomic<State> state_{State::kWaiting};
  std::atomic<bool> direct_io_mmap_{false};
  std::atomic<std::uint32_t> kernel_minor_{0};
  bool offered_ = false;  // Written before state_ becomes kAsked.
  std::uint64_t init_unique_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FUSE_SHIM_H_
