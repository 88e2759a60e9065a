// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_FILE_USERS_H_
#define TENSORMOUNT_FS_MOUNT_FILE_USERS_H_

#include <cstdint>
#include <mutex>
#include <sys/types.h>
#include <vector>

namespace tensormount::fs {

// Decides which close(2) of an open file is the last one of its users. The kernel sends FLUSH for
// every close(2) of a descriptor, also for copies that a fork made and whose process ends without
// using the file (a started program, a worker). Treating each of these as the last would stop
// counting the file as open for writing too early, and cost an fsync for each worker.
//
// Only closes by the opener and by writers count. Writers are identified by their descriptor tables
// (the lock owner that the kernel sends with writes and closes), the opener by its process id.
// Thread-safe.
class FileUsers {
 public:
  // `thread`: the thread that opened the file; 0 if it is not visible here.
  explicit FileUsers(pid_t thread);
  void NoteWrite(std::uint64_t table, pid_t thread);

  // What a FLUSH means for the file.
  enum class Close {
    kUnrelated,  // Closed by a process that neither opened nor wrote the file.
    kNotLast,    // The opener or another writer still has the file open.
    kLast,
  };
  Close NoteClose(std::uint64_t table, pid_t thread);

 private:
  // Whether the caller is the opener: `table` is the opener's, which is known once the opener has
  // written, or `thread` belongs to the opener's process (/proc). Requires the lock.
  bool IsOpener(std::uint64_t table, pid_t thread) const;

  const pid_t opener_;  // 0: unknown.
  std::mutex mutex_;
  std::uint64_t opener_table_ = 0;      // 0: the opener has not written yet.
  bool opener_has_it_ = true;           // The opener has not closed the file yet.
  std::vector<std::uint64_t> writers_;  // Descriptor tables that wrote since their last close.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_FILE_USERS_H_
