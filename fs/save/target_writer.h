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

// A box of a tensor (staging_writer.h says where its bytes go). Two kinds of places:
//   grid  byte b at the target's base + b: its file of the tensor, a file of its own, or an area of
//         the pack. Whole 64 KiB blocks of the target are hashed while they are written.
//   log   one write behind the other in the pack: short writes beside no others, and what rewrites
//         synced bytes. Hashed at the sync, where what followed each other becomes one record.
// Three states of a byte, each of which goes before the next where a byte has several:
//   fresh_   written since the last sync: may be overwritten where it is stored
//   synced_  a journal record names it, or is about to: never overwritten where it is stored,
//   because the record's leaf hashes vouch for those very bytes
//   hole     never written, or forgotten
// A rewrite of synced bytes goes to the log; the next sync records it, and its record holds over
// the earlier one because it is later in the journal.
//
// A write runs in three steps. With the lock: Enter waits until no other call writes any of these
// bytes, Plan decides where they are stored. Without: hash and write. With it again: Install makes
// them known, so a write that failed half way is only known as far as it came. Writes of other
// bytes of the same target run in parallel.
//
// Lock order: turn_, then mutex_, then those of DataFiles and TensorFile. mutex_ is not held over
// reads, writes and fsyncs of data files; making a file and appending to the journal happen under
// it.
class TargetWriter final : public StagedPart {
 public:
  // Writes shorter than this go to the log until so many bytes in a row are there.
  static constexpr std::uint64_t kShortBytes = 64 * 1024;

  // `on_first_write` runs once, before the first byte. `owner` is of no other target of `shared`.
  TargetWriter(std::shared_ptr<StagedParts> shared, StagedTarget name, TargetGeometry geometry,
               std::uint32_t owner, std::function<void()> on_first_write);

  std::uint64_t size() const { return geometry_.bytes(); }  // Packed bytes of the box.
  // ENODATA where any of the bytes was not written through this target.
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size);
  // EFBIG past size(); needs a StagingLease for writing held by the caller. kStale once
  // CloseForGood ran.
  Status Write(std::uint64_t offset, const void* data, std::size_t size);
  // Forgets what was written of these bytes. Durable with the next sync of anything. Where that is
  // all of it a target that was condemned may be written again.
  Status Forget(ByteRange bytes);
  // Until what was written before this call is durable and recorded. Where that fails the target is
  // condemned, in the journal too: later writes and syncs fail. Other targets go on.
  Status Sync();
  std::uint64_t written_bytes() const;  // Distinct ones.
  void Condemn(const std::string& reason);
  // What is written, merged, in order: SEEK_DATA, SEEK_HOLE, `du`.
  std::vector<ByteRange> Written() const;

  Status Prepare(PendingPart& pending) override;
  void Finish(PendingPart& pending, const Status& status) override;

 private:
  // Whole blocks are hashed while their bytes are in the cache, so that a sync does not read the
  // file back. Blocks that came in parts are read back and hashed by the sync.
  // Of a block of 64 KiB of the target, by its number.
  struct Leaf {
    Hash128 hash;
    Crc64 contribution = 0;
  };
  using Leaves = std::map<std::uint64_t, Leaf>;
  // Chosen at the first write that goes there, by size and shape; a target that only ever gets
  // short scattered writes has none.
  struct Grid {
    std::shared_ptr<DataFile> file;
    std::uint64_t base = 0;
    std::shared_ptr<TensorFile> shared;  // Where other targets may have bytes in it, too.
  };
  using Lock = std::unique_lock<std::mutex>;

  std::string Name() const { return name_.key + name_.box.ToString(); }
  bool Overlaps(const ByteRange& bytes) const;
  // Waits until nobody else writes these bytes and no sync is about to take them.
  Status Enter(Lock& lock, const ByteRange& bytes);
  void Leave(const ByteRange& bytes);

  // Where a write stores its bytes, in rising order and without overlaps. Nobody else writes these
  // bytes meanwhile. What lies outside of the write are neighbours that move with it.
  using Ranges = std::vector<StoredRange>;
  Status Plan(const ByteRange& bytes, Ranges& plan);
  // Of bytes that are not fresh.
  Status PlanGap(const ByteRange& bytes, bool is_short, Ranges& plan);
  Status PlanLog(const ByteRange& bytes, Ranges& plan);
  Status PlanGrown(const ByteRange& bytes, Ranges& plan);
  bool BesideGrid(const ByteRange& bytes) const;
  // May claim bytes in the file of the tensor that are then not written, where the plan fails
  // later: other targets write theirs to the pack, which costs space and nothing else.
  bool ClaimGrid(const ByteRange& bytes);
  StoredRange InGrid(const ByteRange& bytes) const;
  // Adds a range to a plan, joined with the last one where it continues that.
  static void AddRange(const StoredRange& range, Ranges& plan);
  Status OpenGrid();
  Status WriteRange(const StoredRange& range, const std::byte* data, Leaves& leaves);
  // Of a neighbour that moves from the log to `to` in the grid.
  Status CopyRange(const StoredRange& to);
  void Install(const StoredRange& range);
  // With the lock held; gives it back for the call.
  void StartWriteback(Lock& lock, const StoredRange& range);
  // Of every block that these bytes touch: its hash no longer holds.
  void EraseLeaves(const ByteRange& bytes);
  // Fresh or synced, each once.
  std::uint64_t KnownBytes(const ByteRange& bytes) const;
  // Gives the target its number in the journal, once; with the lock held.
  Status Number();

  // Appends records to `records`. Reads back and hashes what `leaves` does not have.
  Status RecordGrid(const StoredRange& range, const Leaves& leaves, std::string& records);
  Status RecordLog(Ranges ranges, std::string& records);
  // With at least one range.
  Status RecordRuns(std::span<const StoredRange> runs, std::string& records);

  const std::shared_ptr<StagedParts> shared_;
  const StagedTarget name_;
  const TargetGeometry geometry_;
  const std::uint32_t owner_;
  // Keeps the target alive in StagingWriter from then on: what was written must be synced by
  // SyncAll even when the program has closed the file.
  const std::function<void()> on_first_write_;

  Turn turn_;  // Of syncs; taken before mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ByteRange> writing_;  // By calls that run now.
  bool taking_ = false;             // A sync waits for those.
  bool began_ = false;
  Status failure_;
  std::optional<std::uint32_t> number_;  // In the journal.
  RangeMap fresh_;                       // Not yet taken by a sync: goes before synced_.
  RangeMap synced_;                      // Taken; never written again.
  RangeMap used_;                        // Of the target, what of the grid was ever synced.
  Leaves leaves_;                        // Of fresh_ bytes.
  // Bytes that are fresh or synced: what `du` and .staging show.
  std::uint64_t written_ = 0;
  std::optional<Grid> grid_;
  DataFiles::Area log_;  // The rest of it is free.
  // Of the pack that the log has taken so far: the next area is as large, within bounds, so that
  // few short writes take little and many take few areas.
  std::uint64_t log_bytes_ = 0;
  // Stored bytes that the device shall begin with, as one run, when there are enough of them. Empty
  // before the first write.
  std::uint32_t writeback_file_ = 0;
  ByteRange writeback_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_TARGET_WRITER_H_
