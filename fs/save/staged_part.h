// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGED_PART_H_
#define TENSORMOUNT_FS_SAVE_STAGED_PART_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/save/data_files.h"
#include "fs/save/journal.h"
#include "index/store/store.h"

// Makes targets and objects durable, one or many at once.

namespace tensormount::fs {

// The state that all parts of a StagingWriter share. May outlive the StagingWriter: a file that a
// program has open keeps its part.
struct StagedParts {
  // From this size on a target is written into its tensor's file or a file of its own, instead of
  // an area of the pack; an object above this size into a file of its own.
  static constexpr std::uint64_t kOwnFileBytes = std::uint64_t{4} << 20;

  StagedParts(FileSystem& fs, const Staging& staging, const std::string& incarnation)
      : files(fs, staging, incarnation) {}

  DataFiles files;
  // Counters for .tensormount/status; relaxed, since no decision depends on them.
  std::atomic<std::uint64_t> bytes_written{0};
  std::atomic<std::uint64_t> syncs{0};
};

// Serializes the syncs of one part. Not a mutex, because StagingWriter::SyncAll takes the locks of
// all parts, which are more than lock-order checkers support.
class SyncLock {
 public:
  // Blocks in atomic::wait (a futex), so waiting uses no processor time.
  void lock() {
    while (taken_.exchange(true, std::memory_order_acquire)) taken_.wait(true);
  }
  void unlock() {
    taken_.store(false, std::memory_order_release);
    taken_.notify_one();
  }

 private:
  std::atomic<bool> taken_{false};
};

// The contribution of one part to a sync: its lock, its files and its records.
struct PendingPart {
  std::unique_lock<SyncLock> sync_lock;
  // Files that must be durable before the records. The shared pointers keep them open and numbered
  // until the sync has ended.
  std::vector<std::shared_ptr<DataFile>> files;
  std::string records;
};

// A target or object that is synced in three steps; a crash between two steps loses nothing that a
// returned sync covers:
//   1. Prepare: freezes the written bytes (never overwritten in place again), hashes them, and
//      makes their records in memory.
//   2. The data files are synced.
//   3. The records are appended to the journal and the journal is synced.
// A record is thus never durable before its bytes. If step 2 fails for a file, no record of the
// parts that used it is appended.
class StagedPart {
 public:
  virtual ~StagedPart() = default;
  // Step 1: takes the sync lock, freezes all bytes written before, hashes those that were not
  // hashed during their write, and fills `pending`.
  virtual Status Prepare(PendingPart& pending) = 0;
  // Called once after each Prepare, with the result of the sync; releases the sync lock. After a
  // failure later syncs of the part fail, until the whole part is discarded.
  virtual void Finish(PendingPart& pending, const Status& status) = 0;
};

// Syncs several parts: the data files, each once; then the records of parts whose files are
// durable; then the journal, once. Returns the first failure; Finish of each part gets the result
// of that part.
// Sync locks are taken in the order of `parts`, so all callers must pass parts in the same order to
// avoid a deadlock (StagingWriter uses the order of its maps).
Status SyncParts(StagedParts& shared, std::span<StagedPart* const> parts);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGED_PART_H_
