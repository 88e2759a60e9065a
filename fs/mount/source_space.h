// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_SOURCE_SPACE_H_
#define TENSORMOUNT_FS_MOUNT_SOURCE_SPACE_H_

#include <chrono>
#include <mutex>
#include <string>
#include <sys/statvfs.h>
#include <utility>

#include "tensormount/status.h"

namespace tensormount::fs {

// How much room there is where a mount's source lies, as statvfs(2) says: what `df` shows of the
// mount. Thread-safe.
// `df` asks every mount in turn, and statvfs(2) of a network filesystem may hang: it must not hang
// for each program that asks.
class SourceSpace {
 public:
  // An answer serves for so long.
  static constexpr std::chrono::seconds kMaxAge{1};

  explicit SourceSpace(std::string path) : path_(std::move(path)) {}
  // Whether Get() need not ask storage.
  // Then the caller may answer on the thread that received the request.
  bool Fresh();
  // One caller at a time waits for storage; the others get what was known last (at first: nothing
  // but zeros).
  Result<struct statvfs> Get();

 private:
  const std::string path_;
  std::mutex mutex_;
  bool asking_ = false;
  bool known_ = false;
  std::chrono::steady_clock::time_point when_{};
  struct statvfs last_ {};
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_SOURCE_SPACE_H_
