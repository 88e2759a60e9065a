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

// Writes and reads run in parallel, without the lock; the lock only guards the counters and the
// descriptor. Three counters say what a sync has to wait for:
//   started_  writes that have begun
//   done_     writes that have returned, in whatever order
//   synced_   as many of done_ as an fsync that began after them has covered
// CloseIfIdle closes a descriptor only while all three are equal, so that an fsync error cannot be
// lost: Linux reports a failed write-back once for each open file description, and one that is
// closed before its fsync has nobody to tell. One data file. Thread-safe.
class DataFile {
 public:
  DataFile(FileSystem& fs, const std::string& staging, std::string name, std::uint32_t number,
           std::unique_ptr<File> file, std::shared_ptr<std::atomic<std::size_t>> open_files);
  ~DataFile();

  const std::string& name() const { return name_; }  // "data/…".
  std::uint32_t number() const { return number_; }
  // A sync failed: what was not synced before may be lost, and nothing more is written here.
  bool condemned() const { return condemned_.load(std::memory_order_acquire); }

  Status Write(std::uint64_t offset, const void* data, std::size_t size);
  // Exactly `size` bytes.
  Status Read(std::uint64_t offset, void* out, std::size_t size);
  void StartWriteback(std::uint64_t offset, std::uint64_t size);
  // Until what was written before this call is durable, name and all. Those who come meanwhile wait
  // for the next fsync together; nothing is done where nothing was written. Once it failed it
  // fails for ever.
  Status Sync();
  // Closes the descriptor if all is synced; it is opened again when needed.
  void CloseIfIdle();
  // For good: all that follows is kStale.
  void Close();

 private:
  // With the lock held. Opens the file again where CloseIfIdle has closed it.
  Result<std::shared_ptr<File>> Handle();
  void DropHandle();
  // Whether writing to a file that had to be opened again should close it at once: then there are
  // more files in use than descriptors to spare.
  bool TooManyOpen() const;

  FileSystem& fs_;
  const std::shared_ptr<std::atomic<std::size_t>> open_files_;  // Of all data files together.
  const std::string folder_;
  const std::string name_;
  const std::string path_;
  const std::uint32_t number_;
  std::atomic<bool> condemned_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<File> file_;
  std::uint64_t started_ = 0;  // Writes.
  std::uint64_t done_ = 0;
  std::uint64_t synced_ = 0;  // Of `done_`.
  bool syncing_ = false;
  bool name_synced_ = false;
  bool closed_ = false;
  Status failure_;
};

// Targets of one tensor may overlap (rows 0 to 9 and rows 5 to 14), and then each keeps its own
// bytes of the common rows until the publish compares them. In the file there is room for one of
// them: the first target that writes a byte claims it, and others write theirs to the pack.
// The file of a tensor, shared by those targets that do not overlap.
struct TensorFile {
  std::shared_ptr<DataFile> file;
  std::mutex mutex;
  RangeMap claims;  // In bytes of the tensor; sources are the targets that own them.
};

// Thread-safe.
// Names and numbers: data file n of a mount is data/<staging>-<incarnation>-<kind><n>.bin, with
// kind t (the file of a tensor), p (a pack) or o (one target or object). Numbers rise by one from 0
// in the order of the kFile records, because ReadJournal accepts no others; that is why a file is
// made, recorded and numbered under one lock.
class DataFiles {
 public:
  DataFiles(FileSystem& fs, const Staging& staging, std::string incarnation);

  // Makes the journal where there is none. kStale once closed.
  Status Open();
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // Null before the first Open().
  JournalWriter* journal() const { return journal_ptr_.load(std::memory_order_acquire); }
  const std::string& incarnation() const { return incarnation_; }

  // A new file, in the journal. `kind`: a letter for its name.
  // The record of the file is appended but not synced: it stands before all records of extents in
  // it, and becomes durable with the first of them.
  Result<std::shared_ptr<DataFile>> Create(char kind, Placement placement);
  std::shared_ptr<DataFile> Get(std::uint32_t number) const;
  Result<std::shared_ptr<TensorFile>> OfTensor(const std::string& key);

  struct Area {
    std::shared_ptr<DataFile> file;
    std::uint64_t offset = 0;
    std::uint64_t size = 0;
    std::uint64_t end() const { return offset + size; }
  };
  // Areas are never given back. What a rewrite leaves behind in a pack is unused space of the
  // published checkpoint, bounded by what was written.
  // A place in the pack that nobody used before: holes read as zeros there.
  Result<Area> Allocate(std::uint64_t bytes);
  // Makes `area` longer by `bytes` where it is the last of the pack.
  bool Extend(Area& area, std::uint64_t bytes);

  // Gives a target its number in the journal.
  Result<std::uint32_t> AddTarget(const StagedTarget& target, std::uint64_t bytes);
  // After a sync: closes descriptors where there are many.
  void CloseIdle(DataFile& file);
  // Waits for nobody: writes that run finish on the descriptor that they hold.
  void CloseForGood();
  std::uint64_t count() const;

 private:
  FileSystem& fs_;
  const Staging staging_;
  const std::string incarnation_;
  const std::shared_ptr<std::atomic<std::size_t>> open_files_ =
      std::make_shared<std::atomic<std::size_t>>(0);
  std::atomic<bool> closed_{false};
  // Set once, by Open; read without a lock by every write.
  std::atomic<JournalWriter*> journal_ptr_{nullptr};

  mutable std::mutex mutex_;  // Of everything below; taken before those of files.
  std::unique_ptr<JournalWriter> journal_;
  std::vector<std::shared_ptr<DataFile>> files_;  // By number.
  std::size_t next_to_close_ = 0;                 // Those before were closed once.
  std::uint32_t targets_ = 0;
  std::map<std::string, std::shared_ptr<TensorFile>> tensors_;

  std::mutex pack_mutex_;  // Taken before mutex_.
  std::shared_ptr<DataFile> pack_;
  std::uint64_t pack_end_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_DATA_FILES_H_
