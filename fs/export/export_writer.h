// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_EXPORT_EXPORT_WRITER_H_
#define TENSORMOUNT_FS_EXPORT_EXPORT_WRITER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/byte_range.h"
#include "base/file_system.h"
#include "fs/export/export_plan.h"

namespace tensormount::fs {

// One rank's share of the files of an export: ranges of about equally many bytes, cut where no two
// ranks write to one page. Memory is bounded by one block. Every byte is read as the view verifies.
//
// What rank r writes follows from the plan, r and the number of ranks, so that ranks agree on it
// without a message: all files are laid side by side, and the r-th part of the whole is its share.
// A file counts some bytes more than it has, because making one is work too. The steps are called
// in the order below, by all ranks, and export.cc tells them of each other's failures in between.
//
// Order of calls: ShareFiles, Skip (both only where a file of the plan is backed), Write,
// PartialCrcs, PutCrcs, Sync. Between them the ranks exchange what these returned.
//
// Why CRCs come last: a zip entry's CRC is wanted at two positions and covers bytes that several
// ranks may write. Each rank computes it for what it read; CRCs of parts combine to that of the
// whole without the data (Crc32Combine). Not thread-safe; every rank has its own.
class ExportWriter {
 public:
  // Of one read and one write: large enough for any disk, and what bounds memory.
  static constexpr std::uint64_t kBlock = std::uint64_t{8} << 20;

  // What is given must outlive this. `base`: where the export is made. Of the options `progress`
  // and `cancel` count: Write and Sync end with kCancelled once that is set.
  ExportWriter(FileSystem& fs, const CheckpointView& view, const ExportPlan& plan, std::string base,
               int rank, int size, const ExportOptions& options);

  // A file of the plan by its number, and how it was made.
  struct Shared {
    std::uint32_t file = 0;
    bool linked = false;  // A hard link.
  };
  // The files that a stored one is byte for byte and that begin in this rank's share: shared with
  // it where the filesystem can (a reflink, or a hard link to a sealed file of a store). What is
  // not must be written.
  // Never fails: what goes wrong with a file means that it is written. A reflink keeps the source's
  // extents until one side changes; a hard link is the same file, so it is only made of what nobody
  // can write.
  std::vector<Shared> ShareFiles();
  // What the ranks shared in all: read, so that damage is found, but not written.
  void Skip(const std::vector<Shared>& shared);

  // Writes this rank's ranges.
  Status Write();
  // Of CRCs of parts: what this rank has of entries that others have a part of, too.
  // Encoded for an all-gather: u32 file, u32 hole, u64 begin, u64 end, u32 CRC each.
  std::string PartialCrcs() const;
  // With everybody's parts: writes the CRCs to where they go. kInternal where parts are missing.
  // The rank that has the first byte of a hole writes its CRC, into both positions.
  Status PutCrcs(const std::vector<std::string>& parts);
  // Makes all that this rank wrote durable, and closes it.
  // Files that were closed earlier, to keep few open, were synced then. Folders are rank 0's.
  Status Sync();

  std::uint64_t bytes_written() const { return bytes_written_; }

 private:
  // The cost that comes before the share of rank `n`; of `size_`: all of it.
  // All files side by side, each with kFileCost before its bytes, make one line of `cost_`; rank n
  // has [ShareBegin(n), ShareBegin(n + 1)) of it.
  std::uint64_t ShareBegin(std::uint64_t n) const;
  // This rank's bytes of a file of `size` bytes that has so much cost before it.
  // Cut at multiples of kCut within the file, so that two ranks never write to one page of it, nor
  // read-modify-write one stripe.
  ByteRange RangeOf(std::uint64_t cost_before, std::uint64_t size) const;
  // Whether the file begins in this rank's share: such a rank makes it, and shares it where that
  // can be.
  bool Owns(std::uint64_t cost_before) const;
  std::string PathOf(const ExportFile& file) const;
  Result<File*> OpenToWrite(std::uint32_t file);
  // Ranks may make the same folder at once; that it is there already is no failure.
  Status MakeFolderOf(const ExportFile& file);
  Status WriteRange(std::uint32_t number, const ByteRange& range);
  void AddCrc(std::uint32_t file, std::uint64_t begin, const char* data, std::size_t size);

  // The CRC of a run of bytes of a hole.
  // Runs are never split: a rank reads its range of a file from front to back.
  struct Part {
    ByteRange covered;
    std::uint32_t crc = 0;
  };
  using HoleId = std::pair<std::uint32_t, std::uint32_t>;  // File, number of its hole.
  Status PutCrc(const HoleId& id, std::vector<Part> parts);

  FileSystem& fs_;
  const CheckpointView& view_;
  const ExportPlan& plan_;
  const std::string base_;
  const std::uint64_t rank_;
  const std::uint64_t size_;
  const ExportOptions& options_;
  std::uint64_t cost_ = 0;  // Of everything.
  std::vector<bool> shared_;
  std::set<std::string> made_folders_;
  std::vector<char> buffer_;
  std::map<HoleId, Part> crcs_;  // What this rank read, one run of each hole.
  // The oldest first, which is closed where there are too many.
  std::deque<std::pair<std::uint32_t, std::unique_ptr<File>>> open_;
  std::uint64_t bytes_written_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_EXPORT_WRITER_H_
