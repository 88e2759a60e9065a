// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_JOURNAL_H_
#define TENSORMOUNT_FS_SAVE_JOURNAL_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "base/hash.h"
#include "index/records/inventory.h"
#include "shard/leaf_hash.h"

// A journal for one target of 1 MiB that was written once, as records:
//   kFile 0 "data/1f00-<incarnation>-p0.bin"
//   kTarget 0 tensor w, box [0:512, :]
//   kExtent target 0, [0, 1 MiB), file 0, offset 0, 16 leaf hashes
// Records say bytes of targets, not cells of tensors: what a program writes is a byte range of a
// file, and cells are only worked out by the publish, which knows the final schema.
// What one mount (one incarnation of its daemon) says it wrote into a staging: a file of records,
// each with its length and checksum, that only grows (docs/format.md, "Journal"). A record counts
// when it was synced; a torn tail is no damage, it was never promised.

namespace tensormount::fs {

// How long a thread waits for an fsync or a write of another one. Storage that hangs so long will
// not come back, and a wait without an end would take threads of the mount, which are few, for
// good.
inline constexpr std::chrono::minutes kStoragePatience{10};

// Where bytes are to go: a box of a tensor, in its packed row-major order. `tensors/KEY` is the box
// of the whole tensor.
struct StagedTarget {
  std::string key;
  Box box;
  // Of the tensor when it was written: contributions hold for no other, and a schema can be taken
  // back.
  Dims shape;
  std::uint8_t bits = 0;  // Of an element.
  friend bool operator==(const StagedTarget&, const StagedTarget&) = default;
};

// Bytes of a target that are on disk, side by side: [begin, begin + length), or, where `runs` > 1,
// that many runs of `length` bytes, run i from begin + i * stride on: what came in short writes at
// one distance (columns, through `tensors/KEY`). In the file they follow each other without gaps,
// as the packed order of a box does, so that a box of the tensor may come of one record.
struct StagedExtent {
  std::uint32_t target = 0;  // Number of a kTarget record of this journal.
  std::uint64_t begin = 0;   // In the target's packed bytes.
  std::uint64_t length = 0;  // Of one run.
  std::uint64_t runs = 1;
  std::uint64_t stride = 0;     // 0 where runs is 1, otherwise more than `length`.
  std::uint32_t file = 0;       // Number of a kFile record.
  std::uint64_t offset = 0;     // In that file.
  std::vector<Hash128> leaves;  // Of each 64 KiB from `offset` on (shard/leaf_hash.h).
  // Of these bytes to the digest of the whole tensor (base/hash.h).
  Crc64 contribution = 0;

  std::uint64_t bytes() const { return runs * length; }  // Checked by ReadJournal.
};

// An object is recorded as a whole by each sync that changed it; the last record of its name
// counts. So its leaves always describe all of its bytes, from `offset` on.
// A file without a shape: an object part.
struct StagedObject {
  std::string key;
  Dims index;
  std::uint32_t file = 0;  // kNoFile where length is 0.
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::vector<Hash128> leaves;
};

// One structure for all kinds, of which each uses a few fields, instead of a variant: the reader
// fills vectors of them and the publish keeps pointers into those. Numbers are given by the writer,
// rise by one from 0 for each kind, and hold within one journal only.
struct JournalRecord {
  enum class Kind : std::uint8_t {
    kFile = 1,      // `file_name` is data file number `number`.
    kTarget = 2,    // `target`, of `end` packed bytes, is target number `number`.
    kExtent = 3,    // `extent` was written. Later records of one journal hold over earlier ones.
    kForget = 4,    // What records of target `number` say about [begin, end) no longer holds
                    // (truncation, removal).
    kObject = 5,    // `object` is now these bytes.
    kNoObject = 6,  // `object.key` and `.index` were removed.
    kCondemn = 7,   // `file_name` of the view must not be published: `reason`. Its target is
                    // number `number`, or kNoFile where it is not known.
  } kind = Kind::kExtent;
  std::uint32_t number = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::string file_name;                   // "data/…", below the staging; of kCondemn: see there.
  Placement placement = Placement::kPack;  // Of kFile: what it is for.
  StagedTarget target;
  StagedExtent extent;
  StagedObject object;
  std::string reason;
};

// What one record may be of: its leaves are at most 8 MiB.
// 4 GiB are 65,536 leaves of 16 bytes, 1 MiB; the 32 GiB of an object are 8 MiB.
inline constexpr std::uint64_t kMaxExtentBytes = std::uint64_t{4} << 30;
inline constexpr std::uint64_t kMaxObjectBytes = std::uint64_t{32} << 30;

// Encodes one record, framed: u32 length, body, u64 low half of the XXH3-128 of the body.
// The length lets a reader skip to the next frame, and the checksum tells a frame that a crash tore
// from a whole one. Records are little-endian and have no padding.
std::string EncodeRecord(const JournalRecord& record);

struct Journal {
  Uuid checkpoint;
  std::string incarnation;  // 16 hex digits.
  std::vector<JournalRecord> records;
  // A done mark names a journal and how many bytes of it were durable; the publish refuses where
  // `bytes` is less.
  std::uint64_t bytes = 0;  // Up to the end of the last whole record.
  // Names of data files by their numbers in the journal; filled by SortJournals.
  std::vector<std::string> files;

  std::string name() const { return incarnation + ".tmj"; }  // Of its file.
};
// What is in the file so far: up to the first record that is not whole. kDataLoss where that record
// had been synced (a later mark of the writer says so), and for records that contradict themselves
// (numbers that were never given, ranges past the target, too few leaves). What was synced last may
// lack its mark after a power cut: whoever was promised synced_bytes() compares them with `bytes`.
// kNotFound where there is no file or no whole head: nothing was promised. kUnsupported for a newer
// version. Everything is checked before it is used as a size.
Result<Journal> ReadJournal(FileSystem& fs, const std::string& path);

// Group commit: a sync covers all records that were appended before it began, and callers that
// arrive while one runs wait for it and share the next. After each sync a mark is appended (not
// synced) that says how much of the file was durable. A reader that meets a broken record looks for
// a whole mark behind it that promised that byte: with one it is damage, without one a tail that a
// crash tore, which is dropped.
// Writes the journal of this incarnation. Thread-safe.
class JournalWriter {
 public:
  // Makes `path` (which must not exist) with its head and syncs it and its folder. `incarnation`:
  // 16 hex digits.
  static Result<std::unique_ptr<JournalWriter>> Create(FileSystem& fs, const std::string& path,
                                                       const Uuid& checkpoint,
                                                       const std::string& incarnation);
  // Appends whole records; not durable yet. After a failure the journal is condemned: all fails.
  // After a write that failed half of a record may be in the file, so nothing can follow it: the
  // failure stays.
  Status Append(std::string_view records);
  // Until all that was appended before this call is durable. Callers that come while one syncs wait
  // for the next sync together.
  Status Sync();
  // Up to which byte the file is durable. Always the end of a record.
  std::uint64_t synced_bytes() const;
  // Closes the file: later calls are kStale.
  void Close();

 private:
  explicit JournalWriter(std::string path) : path_(std::move(path)) {}
  // With the lock held.
  Status Check() const;

  const std::string path_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<File> file_;  // Null once closed. A sync that runs keeps it.
  std::uint64_t end_ = 0;       // Of what was appended.
  std::uint64_t wanted_ = 0;    // Of what a sync has to reach: marks need none.
  std::uint64_t synced_ = 0;
  bool syncing_ = false;
  Status failure_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_JOURNAL_H_
