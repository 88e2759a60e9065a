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

// The journal of one mount (one incarnation of its daemon): the bytes that it has written into a
// staging, as a file of records with lengths and checksums that only grows (docs/format.md,
// "Journal"). A record survives a crash once it was synced; an incomplete record at the end is not
// damage. Example, one target of 1 MiB that was written once:
//   kFile 0 "data/1f00-<incarnation>-p0.bin"
//   kTarget 0 tensor w, box [0:512, :]
//   kExtent target 0, [0, 1 MiB), file 0, offset 0, 16 leaf hashes
// Records describe byte ranges of targets, because programs write byte ranges of files; the
// publish, which knows the final schema, computes the cells of tensors.

namespace tensormount::fs {

// How long a thread waits for an fsync or a write of another thread. Storage that hangs so long is
// considered dead, and an endless wait would use up the mount's few threads.
inline constexpr std::chrono::minutes kStoragePatience{10};

// The target of writes: a box of a tensor, as bytes in packed row-major order. `tensors/KEY` is the
// box of the whole tensor.
struct StagedTarget {
  std::string key;
  Box box;
  // Shape of the tensor when the target was written. Contributions to the digest are valid for this
  // shape only, and the schema may change after a withdrawal.
  Dims shape;
  std::uint8_t bits = 0;  // Bits of an element.
  friend bool operator==(const StagedTarget&, const StagedTarget&) = default;
};

// Stored bytes of a target: [begin, begin + length) or, if `runs` > 1, that many runs of `length`
// bytes, run i at begin + i * stride. Such runs come from short writes at a fixed distance
// (columns, through `tensors/KEY`). In the file the runs are adjacent, in the packed order of a
// box, so that one record can describe a box of the tensor.
struct StagedExtent {
  std::uint32_t target = 0;  // Number of a kTarget record of this journal.
  std::uint64_t begin = 0;   // First byte, in the target's packed bytes.
  std::uint64_t length = 0;  // Bytes of one run.
  std::uint64_t runs = 1;
  std::uint64_t stride = 0;     // 0 if runs is 1, otherwise more than `length`.
  std::uint32_t file = 0;       // Number of a kFile record.
  std::uint64_t offset = 0;     // Position in that file.
  std::vector<Hash128> leaves;  // One hash for each 64 KiB of the stored bytes.
  // Contribution of these bytes to the digest of the whole tensor (base/hash.h).
  Crc64 contribution = 0;

  std::uint64_t bytes() const { return runs * length; }  // ReadJournal checks for overflow.
};

// An object part (a file without a shape). Each sync after a change records the whole part, and the
// last record counts, so the leaves cover all its bytes, from `offset` on.
struct StagedObject {
  std::string key;
  Dims index;
  std::uint32_t file = 0;  // kNoFile if length is 0.
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::vector<Hash128> leaves;
};

// One record of the journal. Each kind uses some of the fields; one structure serves all kinds,
// because the reader fills vectors of records and the publish keeps pointers into these. The writer
// assigns numbers, which rise by one from 0 for each kind and are valid within one journal only.
struct JournalRecord {
  enum class Kind : std::uint8_t {
    kFile = 1,    // Data file number `number` is `file_name`.
    kTarget = 2,  // Target number `number` is `target`, with `end` packed bytes.
    kExtent = 3,  // `extent` was written; overrides earlier records of these bytes.
    // Bytes [begin, end) of target `number` were discarded (truncation, removal): earlier records
    // of them are void.
    kForget = 4,
    kObject = 5,        // `object` is the new content of an object part.
    kRemoveObject = 6,  // The object part `object.key`, `.index` was removed.
    // The tensor, slice or object that `file_name` describes must not be published, because of
    // `reason`. `number` is its target, or kNoFile.
    kCondemn = 7,
  } kind = Kind::kExtent;
  std::uint32_t number = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::string file_name;                   // "data/…", below the staging; for kCondemn: as above.
  Placement placement = Placement::kPack;  // The file's purpose (kFile only).
  StagedTarget target;
  StagedExtent extent;
  StagedObject object;
  std::string reason;
};

// Limits of the bytes that one record describes, so that its leaf hashes take at most 8 MiB: 4 GiB
// have 65,536 leaf hashes of 16 bytes, which are 1 MiB; the 32 GiB of an object have 8 MiB.
inline constexpr std::uint64_t kMaxExtentBytes = std::uint64_t{4} << 30;
inline constexpr std::uint64_t kMaxObjectBytes = std::uint64_t{32} << 30;

// Encodes one record with its frame: u32 length, body, u64 low half of the XXH3-128 of the body.
// The length leads to the next frame, and the checksum detects a frame torn by a crash.
// Little-endian, without padding.
std::string EncodeRecord(const JournalRecord& record);

struct Journal {
  Uuid checkpoint;
  std::string incarnation;  // 16 hex digits.
  std::vector<JournalRecord> records;
  // End of the last complete record. A done mark contains a journal's durable size; the publish
  // fails if `bytes` is smaller.
  std::uint64_t bytes = 0;
  // Names of data files by their numbers; filled by SortJournals.
  std::vector<std::string> files;

  std::string name() const { return incarnation + ".tmj"; }  // Name of the journal's file.
};
// Reads the journal up to the first incomplete record. All numbers are checked before they are used
// as sizes.
// kDataLoss: the incomplete record had been synced (a later mark proves that), or records
// contradict each other (unknown numbers, ranges past the target, too few leaves). kNotFound: there
// is no file or no complete head, so nothing had been synced. kUnsupported: a newer version. After
// a power loss the mark of the last sync may be missing, so a caller that relies on synced_bytes()
// must compare it with `bytes`.
Result<Journal> ReadJournal(FileSystem& fs, const std::string& path);

// Writes the journal of this incarnation. Thread-safe.
// Group commit: a sync covers all records appended before it began, and callers that arrive
// meanwhile share the next one. Each sync appends a mark (not synced) with the durable size. A
// reader that meets a broken record looks for a later mark that covers it: with one the record is
// damaged, without one it is a torn tail and is dropped.
class JournalWriter {
 public:
  // Creates `path` (which must not exist) with its head, and syncs the file and its directory.
  // `incarnation`: 16 hex digits.
  static Result<std::unique_ptr<JournalWriter>> Create(FileSystem& fs, const std::string& path,
                                                       const Uuid& checkpoint,
                                                       const std::string& incarnation);
  // Appends complete records, not yet durable. After a failure every later call fails, because half
  // a record may be in the file and nothing can follow it.
  Status Append(std::string_view records);
  // Makes all records appended before this call durable. Callers that arrive during a sync share
  // the next one.
  Status Sync();
  // Durable size of the file; never within a record.
  std::uint64_t synced_bytes() const;
  // Closes the file: later calls that need it return kStale.
  void Close();

 private:
  explicit JournalWriter(std::string path) : path_(std::move(path)) {}
  // The failure of an earlier call; kStale once closed. Requires the lock.
  Status Check() const;

  const std::string path_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<File> file_;  // Null once closed. A running sync keeps the file.
  std::uint64_t end_ = 0;       // End of the appended bytes.
  std::uint64_t wanted_ = 0;    // End of the bytes that a sync must reach; excludes marks.
  std::uint64_t synced_ = 0;
  bool syncing_ = false;
  Status failure_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_JOURNAL_H_
