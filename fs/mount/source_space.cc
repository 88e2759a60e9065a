// SPDX-License-Identifier: Apache-2.0
// statfs of where the source lies.
#include "fs/mount/source_space.h"

#include <cerrno>

namespace tensormount::fs {

using Clock = std::chrono::steady_clock;

bool SourceSpace::Fresh() {
  const std::lock_guard lock(mutex_);
  return asking_ || (known_ && Clock::now() - when_ <= kMaxAge);
}

// The lock is not held over statvfs(2).
Result<struct statvfs> SourceSpace::Get() {
  {
    const std::lock_guard lock(mutex_);
    if (asking_ || (known_ && Clock::now() - when_ <= kMaxAge)) return last_;
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
