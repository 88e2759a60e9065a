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
class ExportWriter {
 public:
  static constexpr std::uint64_t kBlock = std::uint64_t{8} << 20;

  // What is given must outlive this. `base`: where the export is made. `progress` may be null.
  ExportWriter(FileSystem& fs, const CheckpointView& view, const ExportPlan& plan, std::string base,
               int rank, int size, std::atomic<std::uint64_t>* progress);

  // The files that a stored one is byte for byte and that begin in this rank's share: shared with
  // it where the filesystem can (a reflink, or a hard link to a sealed file of a store). What is
  // not must be written.
  struct Shared {
    std::uint32_t file = 0;
    bool linked = false;  // A hard link.
  };
  std::vector<Shared> ShareFiles();
  // What the ranks shared in all: read, so that damage is found, but not written.
  void Skip(const std::vector<Shared>& shared);

  // Writes this rank's ranges.
  Status Write();
  // Of CRCs of parts: what this rank has of entries that others have a part of, too.
  std::string PartialCrcs() const;
  // With everybody's parts: puts CRCs in place. kInternal where parts are missing.
  Status PutCrcs(const std::vector<std::string>& parts);
  // Makes all that this rank wrote durable, and closes it.
  Status Sync();

  std::uint64_t bytes_written() const { return bytes_written_; }

 private:
  // This rank's bytes of one file.
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    bool owns = false;  // Begins the file: makes it, and shares it where that can be.
  };
  Range RangeOf(std::uint64_t cost_before, std::uint64_t size) const;
  std::string PathOf(const ExportFile& file) const;
  Result<File*> OpenToWrite(std::uint32_t file);
  Status MakeFolderOf(const ExportFile& file);
  Status WriteRange(std::uint32_t number, const Range& range);
  void AddCrc(std::uint32_t file, std::uint64_t begin, const char* data, std::size_t size);

  // The CRC of a run of bytes of a hole.
  struct Part {
    std::uint64_t begin = 0;
    std::uint64_t length = 0;
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
  std::atomic<std::uint64_t>* progress_;
  std::uint64_t cost_ = 0;  // Of everything.
  std::vector<bool> shared_;
  std::set<std::string> made_folders_;
  std::vector<char> buffer_;
  std::map<HoleId, Part> crcs_;  // What this rank read, one run of each hole.
  std::deque<std::pair<std::uint32_t, std::unique_ptr<File>>> open_;
  std::uint64_t bytes_written_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_EXPORT_WRITER_H_
