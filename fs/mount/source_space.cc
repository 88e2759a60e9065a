// SPDX-License-Identifier: Apache-2.0
// SourceSpace: statvfs(2) of the source's filesystem.
#include "fs/mount/source_space.h"

#include <cerrno>

namespace tensormount::fs {

using Clock = std::chrono::steady_clock;

bool SourceSpace::IsFresh() {
  const std::lock_guard lock(mutex_);
  return !asked_ || asking_ || (known_ && Clock::now() - when_ <= kMaxAge);
}

// The lock is not held during statvfs(2).
Result<struct statvfs> SourceSpace::Get() {
  {
    const std::lock_guard lock(mutex_);
    if (!asked_ || asking_ || (known_ && Clock::now() - when_ <= kMaxAge)) return last_;
    asking_ = true;
  }
  struct statvfs now {};
  const int failed = statvfs(path_.c_str(), &now) != 0 ? errno : 0;
  const std::lock_guard lock(mutex_);
  asking_ = false;
  if (failed != 0) return Status::FromErrno(failed, "statfs", path_);
  last_ = now;
  known_ = true;
  when_ = Clock::now();
  return last_;
}

}  // namespace tensormount::fs
