// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FILE_USERS_H_
#define TENSORMOUNT_FS_MOUNT_FILE_USERS_H_

#include <cstdint>
#include <mutex>
#include <sys/types.h>
#include <vector>

namespace tensormount::fs {

// Which processes write to an open file. Each process that has it, also by a fork, tells of its
// close, whether it meant to or not: a program that is started, a worker that ends. Only those that
// opened it or wrote to it have closed something. Processes are known by their tables of
// descriptors, which the kernel names in requests that write and close, and whoever opened the file
// by its number. Thread-safe.
// The kernel sends FLUSH for every close(2) of a descriptor, also of copies that a fork made and
// whose process ends without having touched the file. A sync for each of those would be wrong (it
// would end the writing too early) and slow (an fsync for each worker process that ends).
class FileUsers {
 public:
  // `thread`: of the request that opened it; 0 where it is of no process that can be seen here.
  explicit FileUsers(pid_t thread);
  void Wrote(std::uint64_t table, pid_t thread);

  // What a FLUSH was.
  enum class Close {
    kNobodys,  // Of a process that did neither.
    kOne,      // Others that opened it or wrote to it have it still.
    kLast,
  };
  Close Closed(std::uint64_t table, pid_t thread);

 private:
  // With the lock held.
  // The opener has no table until it has written: then its thread number is compared, through
  // /proc, with the process that opened.
  bool IsOpener(std::uint64_t table, pid_t thread) const;

  const pid_t opener_;  // 0: not known.
  std::mutex mutex_;
  std::uint64_t opener_table_ = 0;      // 0: it has not written yet.
  bool opener_has_it_ = true;           // Has not closed it.
  std::vector<std::uint64_t> writers_;  // Tables that wrote since they closed it last.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FILE_USERS_H_
