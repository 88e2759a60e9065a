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
#include <string>
#include <utility>
#include <vector>

#include "fs/save/range_map.h"
#include "fs/save/staged_part.h"
#include "fs/save/staging_writer.h"
#include "fs/save/target_geometry.h"

namespace tensormount::fs {

// A box of a tensor (staging_writer.h says where its bytes go). Two kinds of places:
//   grid  byte b at the target's base + b: its file of the tensor, a file of its own, or an area of
//         the pack. Whole 64 KiB blocks of the target are hashed while they are written.
//   log   one write behind the other in the pack: short writes beside no others, and what rewrites
//         synced bytes. Hashed at the sync, where what followed each other becomes one record.
class TargetWriter final : public StagingWriter::Target, public StagedPart {
 public:
  // Writes shorter than this go to the log until so many bytes in a row are there.
  static constexpr std::uint64_t kShortBytes = 64 * 1024;

  // `on_first_write` runs once, before the first byte.
  TargetWriter(std::shared_ptr<StagedParts> shared, StagedTarget name, TargetGeometry geometry,
               std::uint64_t owner, std::function<void()> on_first_write);

  std::uint64_t size() const override { return geometry_.bytes(); }
  Result<std::size_t> Read(std::uint64_t offset, void* out, std::size_t size) override;
  Status Write(std::uint64_t offset, const void* data, std::size_t size) override;
  Status Forget(std::uint64_t begin, std::uint64_t end) override;
  Status Sync() override;
  std::uint64_t written_bytes() const override;
  void Condemn(const std::string& reason) override;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> Written() const override;

  Status Prepare(PendingPart& pending) override;
  void Finish(PendingPart& pending, const Status& status) override;

 private:
  // Of a block of 64 KiB of the target, by its number.
  struct Leaf {
    Hash128 hash;
    Crc64 contribution = 0;
  };
  using Leaves = std::map<std::uint64_t, Leaf>;
  // Bytes that one call writes side by side.
  struct WriteRun {
    PlacedRange range;
    std::shared_ptr<DataFile> file;
    std::optional<PlacedRange> copied;  // From here instead of the caller's data.
  };
  struct Grid {
    std::shared_ptr<DataFile> file;
    std::uint64_t base = 0;
    std::shared_ptr<TensorFile> shared;  // Where other targets may have bytes in it, too.
  };
  using Lock = std::unique_lock<std::mutex>;

  std::string Name() const { return name_.key + name_.box.ToString(); }
  bool Overlaps(std::uint64_t begin, std::uint64_t end) const;
  // Waits until nobody else writes these bytes and no sync is about to take them.
  Status Enter(Lock& lock, std::uint64_t begin, std::uint64_t end);
  void Leave(std::uint64_t begin, std::uint64_t end);

  // Where bytes go that nobody else writes meanwhile.
  using WriteRuns = std::vector<WriteRun>;
  Status Plan(std::uint64_t begin, std::uint64_t end, WriteRuns& pieces);
  Status PlanGap(std::uint64_t begin, std::uint64_t end, bool is_short, WriteRuns& pieces);
  Status PlanLog(std::uint64_t begin, std::uint64_t end, WriteRuns& pieces);
  Status PlanGrown(std::uint64_t begin, std::uint64_t end, WriteRuns& pieces);
  bool BesideGrid(std::uint64_t begin, std::uint64_t end) const;
  bool ClaimGrid(std::uint64_t begin, std::uint64_t end);
  void AddPiece(std::uint64_t begin, std::uint64_t end, const std::shared_ptr<DataFile>& file,
                std::uint64_t offset, bool grid, WriteRuns& pieces) const;
  Status OpenGrid();
  Status WritePiece(const WriteRun& piece, const std::byte* data, Leaves& leaves);
  Status CopyPiece(const WriteRun& piece);
  void Install(const WriteRun& piece);
  void StartWriteback(Lock& lock, const WriteRun& piece);
  void EraseLeaves(std::uint64_t begin, std::uint64_t end);
  std::uint64_t KnownBytes(std::uint64_t begin, std::uint64_t end) const;
  Status Number();

  Status RecordGrid(const PlacedRange& range, const Leaves& leaves, std::string& records);
  Status RecordLog(std::vector<PlacedRange> ranges, std::string& records);
  Status RecordRuns(std::vector<PlacedRange>::const_iterator from,
                    std::vector<PlacedRange>::const_iterator to, std::string& records);

  const std::shared_ptr<StagedParts> shared_;
  const StagedTarget name_;
  const TargetGeometry geometry_;
  const std::uint64_t owner_;
  const std::function<void()> on_first_write_;

  Turn turn_;  // Of syncs; taken before mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> writing_;  // By calls that run now.
  bool taking_ = false;                                           // A sync waits for those.
  bool began_ = false;
  Status failure_;
  std::optional<std::uint32_t> number_;  // In the journal.
  RangeMap fresh_;                       // Not yet taken by a sync: goes before synced_.
  RangeMap synced_;                      // Taken; never written again.
  ClaimedRanges used_;                   // Of the target, what of the grid was ever synced.
  Leaves leaves_;                        // Of fresh_ bytes.
  std::uint64_t written_ = 0;
  std::optional<Grid> grid_;
  DataFiles::Area log_;  // The rest of it is free.
  std::uint64_t log_bytes_ = 0;
  std::shared_ptr<DataFile> writeback_;  // A run of writes that the device shall begin with.
  std::uint64_t writeback_begin_ = 0;
  std::uint64_t writeback_end_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_TARGET_WRITER_H_
