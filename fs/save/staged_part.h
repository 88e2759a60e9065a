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

// How targets and objects become durable, one or many at once.

namespace tensormount::fs {

// What all parts of a StagingWriter share.
// Lives as long as any target or object of the staging, which may be longer than the StagingWriter:
// a file that a program has open keeps its part.
struct StagedParts {
  // A target or object of so many bytes gets a file of its own instead of an area of the pack.
  static constexpr std::uint64_t kOwnFileBytes = std::uint64_t{4} << 20;

  StagedParts(FileSystem& fs, const Staging& staging, const std::string& incarnation)
      : files(fs, staging, incarnation) {}

  DataFiles files;
  // Figures of .tensormount/status; relaxed, since nothing is decided by them.
  std::atomic<std::uint64_t> bytes_written{0};
  std::atomic<std::uint64_t> syncs{0};
};

// Syncs of one part come one after the other. Not a mutex: a sync of everything holds one of each
// part, more than checkers of lock orders can count.
class Turn {
 public:
  // Blocks in atomic::wait (a futex), so a waiter costs nothing while another sync is at the disk.
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

// What one part has to say in a sync.
struct PendingPart {
  std::unique_lock<Turn> turn;
  // Held as shared pointers: the file stays open and numbered until the sync has ended.
  std::vector<std::shared_ptr<DataFile>> files;  // To be durable before its records.
  std::string records;
};

// A sync of one or many parts is three steps, and a crash between any two of them loses nothing
// that was promised:
//   1. Prepare: what was written is frozen (never overwritten in place again) and hashed, and the
//   records that will name it are made, in memory.
//   2. The data files are synced.
//   3. The records are appended to the journal and the journal is synced.
// A record is thus never durable before the bytes that it names, and where step 2 fails for a file,
// no record of the parts that used it is appended.
class StagedPart {
 public:
  virtual ~StagedPart() = default;
  // Takes its turn, and all that was written before: from here on those bytes of its files are
  // never written again. Hashes what was not hashed while it was written.
  virtual Status Prepare(PendingPart& pending) = 0;
  // Once a turn was taken, with the outcome. After a failure all later syncs of the part fail.
  virtual void Finish(PendingPart& pending, const Status& status) = 0;
};

// Data files, each once; then the records of those whose files are durable; then the journal, once.
// The first failure; each part hears of its own. To be called with parts in one order by all who
// sync several at once.
// Turns are taken in the order of `parts`. Two callers that took them in different orders would
// wait for each other for ever: StagingWriter passes its maps in order, and a single part is in any
// order.
Status SyncParts(StagedParts& shared, std::span<StagedPart* const> parts);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGED_PART_H_
