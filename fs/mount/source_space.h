// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_SOURCE_SPACE_H_
#define TENSORMOUNT_FS_MOUNT_SOURCE_SPACE_H_

#include <chrono>
#include <mutex>
#include <string>
#include <sys/statvfs.h>
#include <utility>

#include "tensormount/status.h"

#include "base/file_system.h"

namespace tensormount::fs {

// Free space of the filesystem that holds a mount's source (statvfs(2)), which `df` shows for the
// mount. Thread-safe.
// Cached, because `df` queries every mount in turn and statvfs(2) of a network filesystem may hang.
class SourceSpace {
 public:
  // How long a cached answer is used.
  static constexpr std::chrono::seconds kMaxAge{1};

  // All zeros if `fs` is not a kernel filesystem (Ability::kKernelFiles).
  SourceSpace(const FileSystem& fs, std::string path)
      : asked_(fs.Can(Ability::kKernelFiles)), path_(std::move(path)) {}
  // Whether Get() needs no storage, so that the receiving thread may answer.
  bool IsFresh();
  // One caller at a time waits for storage; the others get the last known values (at first all
  // zeros).
  Result<struct statvfs> Get();

 private:
  const bool asked_;
  const std::string path_;
  std::mutex mutex_;
  bool asking_ = false;
  bool known_ = false;
  std::chrono::steady_clock::time_point when_{};
  struct statvfs last_ {};
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_SOURCE_SPACE_H_
