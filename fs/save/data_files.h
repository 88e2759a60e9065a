// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_DATA_FILES_H_
#define TENSORMOUNT_FS_SAVE_DATA_FILES_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/save/journal.h"
#include "fs/save/range_map.h"
#include "index/store/store.h"

// The data files and the journal of one mount in one staging.

namespace tensormount::fs {

// One data file. Thread-safe. Writes and reads run in parallel; the lock guards only the counters
// and the descriptor:
//   started_  writes that have begun
//   done_     writes that have returned, in any order
//   synced_   the part of done_ that a later fsync has covered
// CloseIfIdle closes a descriptor only while all three are equal, because Linux reports a failed
// writeback once for each open file description: closing it before the fsync would lose the error.
class DataFile {
 public:
  DataFile(FileSystem& fs, const std::string& staging, std::string name, std::uint32_t number,
           std::unique_ptr<File> file, std::shared_ptr<std::atomic<std::size_t>> open_files);
  ~DataFile();

  const std::string& name() const { return name_; }  // Path below the staging: "data/…".
  std::uint32_t number() const { return number_; }
  // Whether a sync failed: unsynced bytes may then be lost, and no more are written to this file.
  bool condemned() const { return condemned_.load(std::memory_order_acquire); }

  Status Write(std::uint64_t offset, const void* data, std::size_t size);
  // Reads exactly `size` bytes.
  Status Read(std::uint64_t offset, void* out, std::size_t size);
  void StartWriteback(std::uint64_t offset, std::uint64_t size);
  // Makes everything written before this call durable, including the file's name. Concurrent
  // callers share the next fsync; a call without new writes does nothing. After a failure all later
  // calls fail.
  Status Sync();
  // Closes the descriptor if all writes are synced; the next access reopens the file.
  void CloseIfIdle();
  // Closes the file for good: later calls that need the descriptor return kStale.
  void Close();

 private:
  // Requires the lock. Returns the open file; reopens it if CloseIfIdle has closed it.
  Result<std::shared_ptr<File>> Handle();
  void DropHandle();
  // Whether a file that a call reopened should be closed again after that call, because too many
  // files are open (kManyFiles).
  bool TooManyOpen() const;

  FileSystem& fs_;
  // Number of open descriptors, shared by all data files of a DataFiles.
  const std::shared_ptr<std::atomic<std::size_t>> open_files_;
  const std::string folder_;
  const std::string name_;
  const std::string path_;
  const std::uint32_t number_;
  std::atomic<bool> condemned_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<File> file_;
  std::uint64_t started_ = 0;  // Numbers of writes (see the class comment).
  std::uint64_t done_ = 0;
  std::uint64_t synced_ = 0;
  bool syncing_ = false;
  bool name_synced_ = false;
  bool closed_ = false;
  Status failure_;
};

// The file of a tensor, into which several targets of that tensor may write.
// Targets of one tensor may overlap (rows 0 to 9 and rows 5 to 14); each keeps its own bytes until
// the publish, which takes those that were synced last. The first target that writes a byte claims
// that byte in this file; other targets write theirs to the pack.
struct TensorFile {
  std::shared_ptr<DataFile> file;
  std::mutex mutex;
  // Claimed bytes of the tensor. The source of a range is the `owner` number of the TargetWriter
  // that claimed it.
  RangeMap claims;
};

// All data files and the journal of a mount in one staging. Thread-safe.
// Data file n of a mount is data/<staging>-<incarnation>-<kind><n>.bin, with kind t (the file of a
// tensor), p (a pack) or o (one target or object). ReadJournal requires numbers that rise by one
// from 0 in the order of the kFile records, so a file is made, recorded and numbered under one
// lock.
class DataFiles {
 public:
  DataFiles(FileSystem& fs, const Staging& staging, std::string incarnation);

  // Creates the journal if this mount has none yet. kStale after CloseForGood.
  Status Open();
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // Null before the first Open().
  JournalWriter* journal() const { return journal_ptr_.load(std::memory_order_acquire); }
  const std::string& incarnation() const { return incarnation_; }

  // Makes a new file and appends its record to the journal. `kind`: 't', 'p' or 'o', as above.
  // The record is not synced: it precedes all records of extents in the file and becomes durable
  // with the first of them.
  Result<std::shared_ptr<DataFile>> Create(char kind, Placement placement);
  std::shared_ptr<DataFile> Get(std::uint32_t number) const;
  Result<std::shared_ptr<TensorFile>> FileOfTensor(const std::string& key);

  struct Area {
    std::shared_ptr<DataFile> file;
    std::uint64_t offset = 0;
    std::uint64_t size = 0;
    std::uint64_t end() const { return offset + size; }
  };
  // An unused area of the pack, whose unwritten bytes read as zeros. Areas are never freed: a
  // rewrite leaves unused space in the published checkpoint, at most the size of what was written.
  Result<Area> Allocate(std::uint64_t bytes);
  // Extends `area` by `bytes` if no other area follows it in the pack.
  bool Extend(Area& area, std::uint64_t bytes);

  // Records a target in the journal and returns its number there.
  Result<std::uint32_t> AddTarget(const StagedTarget& target, std::uint64_t bytes);
  // Closes the descriptor of `file` if this mount has many files. Called after a sync of the file.
  void CloseIdle(DataFile& file);
  // Closes the journal and all files. Does not wait: writes in progress finish on the descriptor
  // that they hold.
  void CloseForGood();
  std::uint64_t count() const;

 private:
  FileSystem& fs_;
  const Staging staging_;
  const std::string incarnation_;
  const std::shared_ptr<std::atomic<std::size_t>> open_files_ =
      std::make_shared<std::atomic<std::size_t>>(0);
  std::atomic<bool> closed_{false};
  // Set once, by Open; every write reads it without a lock.
  std::atomic<JournalWriter*> journal_ptr_{nullptr};

  // Guards the members down to `tensors_`; taken before the locks of files.
  mutable std::mutex mutex_;
  std::unique_ptr<JournalWriter> journal_;
  std::vector<std::shared_ptr<DataFile>> files_;  // All files, by number.
  // Files with lower numbers were synced early and, if idle, closed once.
  std::size_t next_to_close_ = 0;
  std::uint32_t targets_ = 0;
  std::map<std::string, std::shared_ptr<TensorFile>> tensors_;

  std::mutex pack_mutex_;  // Guards the pack; taken before mutex_.
  std::shared_ptr<DataFile> pack_;
  std::uint64_t pack_end_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_DATA_FILES_H_
