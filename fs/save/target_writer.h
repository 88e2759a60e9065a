// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_TARGET_WRITER_H_
#define TENSORMOUNT_FS_SAVE_TARGET_WRITER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fs/save/range_map.h"
#include "fs/save/staged_part.h"
#include "fs/save/target_geometry.h"

namespace tensormount::fs {

// Writes a box of a tensor (placement: staging_writer.h). Bytes have two kinds of places:
//   grid  byte b at the target's base + b, in its file of the tensor, a file of its own, or an area
//         of the pack. Whole 64 KiB blocks of the target are hashed while they are written.
//   log   one write after the other in the pack: short writes without neighbours, rewrites of
//         synced bytes, and bytes whose grid position another target has claimed or whose file is
//         condemned. Hashed at the sync, where adjacent ones become one record.
// A byte has one of three states; a byte that is both fresh and synced counts as fresh:
//   fresh_   written since the last sync: may be overwritten in place
//   synced_  recorded in the journal, or about to be: never overwritten in place, because the
//            record's leaf hashes cover these bytes
//   hole     never written, or forgotten
// A rewrite of synced bytes goes to the log; its record overrides the earlier one because it is
// later in the journal.
//
// A write has three steps. With the lock: BeginWrite waits until no other call writes these bytes,
// and Plan chooses their places. Without the lock: hash and write. With the lock: Install records
// the places, so after a failure the bytes before it count as written. Writes of other bytes of the
// target run in parallel.
//
// Lock order: sync_lock_, then mutex_, then those of DataFiles and TensorFile. mutex_ is not held
// during reads, writes and fsyncs of the target's data files, but is held while a file is created
// (which may sync older files) or the journal appended to.
class TargetWriter final : public StagedPart {
 public:
  // In large targets, shorter writes that are not beside grid bytes go to the log until this many
  // contiguous bytes exist.
  static constexpr std::uint64_t kShortBytes = 64 * 1024;

  // `on_first_write` runs once, before the first byte. `owner` is the number of this target, unique
  // among the targets of `shared`: tensor files note by it which target wrote which ranges.
  TargetWriter(std::shared_ptr<StagedParts> shared, StagedTarget name, TargetGeometry geometry,
               std::uint32_t owner, std::function<void()> on_first_write);

  std::uint64_t size() const { return geometry_.bytes(); }  // Packed bytes of the box.
  // ENODATA: some of the bytes were not written through this target.
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size);
  // The caller must hold a StagingLease for writing. EFBIG: the bytes are past size(); kStale after
  // CloseForGood.
  Status Write(std::uint64_t offset, const void* data, std::size_t size);
  // Discards these bytes; durable with this mount's next sync of anything in the staging. If all
  // bytes of the target are discarded, a condemned target may be written again.
  Status Forget(ByteRange bytes);
  // Makes everything written before this call durable and recorded. A failure condemns the target:
  // its later writes and syncs fail, and its record in the journal makes the publish fail. Of the
  // other targets only those with unsynced bytes in a failed file are affected.
  Status Sync();
  std::uint64_t written_bytes() const;  // Each byte is counted once.
  // Records that the target must not be published, because of `reason`.
  void Condemn(const std::string& reason);
  // The written ranges, merged, in order; for SEEK_DATA, SEEK_HOLE and `du`.
  std::vector<ByteRange> WrittenRanges() const;

  Status Prepare(PendingPart& pending) override;
  void Finish(PendingPart& pending, const Status& status) override;

 private:
  // Hash and digest contribution of one 64 KiB block of the target; Leaves has them by block
  // number. Whole blocks are hashed while their bytes are in the cache, so that a sync need not
  // read them back; of grid bytes the sync reads back and hashes only blocks written in parts.
  struct Leaf {
    Hash128 hash;
    Crc64 contribution = 0;
  };
  using Leaves = std::map<std::uint64_t, Leaf>;
  // The place of the target's grid bytes. Chosen at the first write to the grid, by size and shape;
  // a target with only short scattered writes has none.
  struct Grid {
    std::shared_ptr<DataFile> file;
    std::uint64_t base = 0;
    // Set if `file` is the file of a tensor, in which other targets may have bytes, too.
    std::shared_ptr<TensorFile> shared;
  };
  using Lock = std::unique_lock<std::mutex>;

  std::string Name() const { return name_.key + name_.box.ToString(); }
  bool Overlaps(const ByteRange& bytes) const;
  // Waits until no other call writes these bytes and no sync waits, then adds them to writing_.
  Status BeginWrite(Lock& lock, const ByteRange& bytes);
  void EndWrite(const ByteRange& bytes);

  // Places of the bytes of a write, in rising order without overlaps; nobody else writes these
  // bytes meanwhile. Ranges outside of the write are neighbours that move with it.
  using Ranges = std::vector<StoredRange>;
  Status Plan(const ByteRange& bytes, Ranges& plan);
  // Plans the places of bytes that are not fresh.
  Status PlanGap(const ByteRange& bytes, bool is_short, Ranges& plan);
  Status PlanLog(const ByteRange& bytes, Ranges& plan);
  Status PlanGrown(const ByteRange& bytes, Ranges& plan);
  bool IsBesideGrid(const ByteRange& bytes) const;
  // Whether these bytes may be written at their grid position; claims them in the tensor's file. If
  // the plan fails later, claimed bytes there stay unwritten: other targets then write theirs to
  // the pack, which costs only space.
  bool ClaimGrid(const ByteRange& bytes);
  StoredRange GridRange(const ByteRange& bytes) const;
  // Adds a range to a plan; merges it with the last one if they are adjacent.
  static void AddRange(const StoredRange& range, Ranges& plan);
  Status OpenGrid();
  Status WriteRange(const StoredRange& range, const std::byte* data, Leaves& leaves);
  // Copies the bytes `to.bytes`, which are in the log so far, to their grid position (`to`),
  // because a write beside them goes to the grid.
  Status CopyRange(const StoredRange& to);
  void Install(const StoredRange& range);
  // Starts writeback of written bytes. Requires the lock, and releases it during the call.
  void StartWriteback(Lock& lock, const StoredRange& range);
  // Drops the hash of every 64 KiB block that these bytes touch.
  void EraseLeaves(const ByteRange& bytes);
  // Number of bytes that are fresh or synced, each counted once.
  std::uint64_t KnownBytes(const ByteRange& bytes) const;
  // Assigns the target its number in the journal, if it has none yet. Requires the lock.
  Status AssignNumber();

  // RecordGrid, RecordLog and RecordRuns append journal records of written bytes to `records`.
  // RecordGrid reads back and hashes blocks that `leaves` lacks.
  Status RecordGrid(const StoredRange& range, const Leaves& leaves, std::string& records);
  Status RecordLog(Ranges ranges, std::string& records);
  // `runs` has at least one range.
  Status RecordRuns(std::span<const StoredRange> runs, std::string& records);

  const std::shared_ptr<StagedParts> shared_;
  const StagedTarget name_;
  const TargetGeometry geometry_;
  const std::uint32_t owner_;
  // Makes StagingWriter keep the target, because SyncAll must sync written bytes even after the
  // program closed the file.
  const std::function<void()> on_first_write_;

  SyncLock sync_lock_;  // Serializes syncs; taken before mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ByteRange> writing_;  // Bytes that running calls write.
  bool sync_waiting_ = false;       // A sync waits until writing_ is empty.
  bool began_ = false;
  Status failure_;
  std::optional<std::uint32_t> number_;  // The target's number in the journal.
  RangeMap fresh_;                       // Bytes that no sync has taken yet; overrides synced_.
  RangeMap synced_;                      // Bytes that a sync has taken; never overwritten.
  RangeMap used_;                        // Grid bytes of the target that were ever synced.
  Leaves leaves_;                        // Hashes of blocks of fresh bytes.
  // Number of fresh or synced bytes, which `du` shows.
  std::uint64_t written_ = 0;
  std::optional<Grid> grid_;
  DataFiles::Area log_;  // The unused rest of the log's last area.
  // Bytes of the pack that the log has taken so far. The next area has this size, within limits, so
  // that few short writes take little space and many take few areas.
  std::uint64_t log_bytes_ = 0;
  // The last contiguous bytes whose writeback has not been started: writeback_ is their range in
  // the data file with the number writeback_file_. Empty before the first write.
  std::uint32_t writeback_file_ = 0;
  ByteRange writeback_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_TARGET_WRITER_H_
