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

// Writes one rank's share of the files of an export. Shares have about the same size, and are cut
// so that no two ranks write to one page at a time. Takes the memory of one block. Every byte is
// read with the verification of the view.
//
// The share of rank r follows from the plan, r and the number of ranks, without communication: all
// files are laid out on one axis (the cost axis), and rank r gets the r-th part. A file counts as
// more bytes than it has, because creating a file costs time.
//
// Order of calls: ShareFiles, Skip (both only if a file of the plan is backed), Write, PartialCrcs,
// PutCrcs, Sync. All ranks make them; between the calls the ranks exchange the returned values and
// their errors (export.cc).
//
// CRCs come last, because a zip entry's CRC is stored at two positions and covers bytes that
// several ranks may write. Each rank computes the CRC of the bytes that it read; the CRCs of parts
// are combined without reading the bytes again (Crc32Combine). Not thread-safe; every rank has its
// own object.
class ExportWriter {
 public:
  // Size of one read and one write, which bounds memory.
  static constexpr std::uint64_t kBlock = std::uint64_t{8} << 20;

  // All arguments must outlive this object. `base`: the temporary path at which the export is
  // written. Only `progress` and `cancel` of the options are used: Write and Sync return kCancelled
  // once `cancel` is set.
  ExportWriter(FileSystem& fs, const CheckpointView& view, const ExportPlan& plan, std::string base,
               int rank, int size, const ExportOptions& options);

  // A shared file: its number in the plan, and how it was shared.
  struct SharedExportFile {
    std::uint32_t file = 0;
    bool linked = false;  // True for a hard link, false for a reflink.
  };
  // Shares with the source the files that begin in this rank's share and have exactly the bytes of
  // a stored file: by a reflink if the filesystem supports it, else by a hard link if the stored
  // file is sealed and this user cannot write to it (a write to the export would change the store).
  // Never fails: Write writes the files that could not be shared.
  std::vector<SharedExportFile> ShareFiles();
  // `shared`: the files that all ranks shared. Write reads them, so that damage is found, but does
  // not write them.
  void Skip(const std::vector<SharedExportFile>& shared);

  // Writes this rank's ranges.
  Status Write();
  // This rank's CRCs of its parts of zip entries, for entries that other ranks read parts of, too.
  // They are encoded for an all-gather, each as u32 file, u32 hole, u64 begin, u64 end, u32 CRC.
  std::string PartialCrcs() const;
  // Combines the CRCs of all ranks' parts and writes the results, each by the rank that read the
  // entry's first byte. kInternal if the CRC of a part is missing.
  Status PutCrcs(const std::vector<std::string>& parts);
  // Makes this rank's open files durable and closes them. Files that were closed earlier were
  // synced at that time; rank 0 syncs the directories.
  Status Sync();

  std::uint64_t bytes_written() const { return bytes_written_; }

 private:
  // Begin of rank n's share on the cost axis, on which each file takes kFileCost plus its bytes.
  // The share ends at ShareBegin(n + 1); ShareBegin(size_) is the total.
  std::uint64_t ShareBegin(std::uint64_t n) const;
  // This rank's byte range of a file of `size` bytes that begins at `cost_before` on the cost axis.
  // Files are cut at multiples of kCut, so that two ranks never write to one page or stripe.
  ByteRange RangeOf(std::uint64_t cost_before, std::uint64_t size) const;
  // Whether the file begins in this rank's share. If so, this rank creates it if it is empty, and
  // shares it if possible.
  bool Owns(std::uint64_t cost_before) const;
  std::string PathOf(const ExportFile& file) const;
  Result<File*> OpenToWrite(std::uint32_t file);
  // Creates the file's directory. Ranks may do this at the same time, so an existing directory is
  // not an error.
  Status MakeFolderOf(const ExportFile& file);
  Status WriteRange(std::uint32_t number, const ByteRange& range);
  void AddCrc(std::uint32_t file, std::uint64_t begin, const char* data, std::size_t size);

  // The CRC of some of the bytes of a hole. They are one run, because a rank reads its range of a
  // file from front to back.
  struct Part {
    ByteRange covered;
    std::uint32_t crc = 0;
  };
  // Number of the file, number of the hole in it.
  using HoleId = std::pair<std::uint32_t, std::uint32_t>;
  Status PutCrc(const HoleId& id, std::vector<Part> parts);

  FileSystem& fs_;
  const CheckpointView& view_;
  const ExportPlan& plan_;
  const std::string base_;
  const std::uint64_t rank_;
  const std::uint64_t size_;
  const ExportOptions& options_;
  std::uint64_t cost_ = 0;  // Length of the cost axis.
  std::vector<bool> shared_;
  std::set<std::string> made_folders_;
  std::vector<char> buffer_;
  std::map<HoleId, Part> crcs_;  // The part of each hole that this rank read.
  // Open files, the oldest first, which is closed when too many are open.
  std::deque<std::pair<std::uint32_t, std::unique_ptr<File>>> open_;
  std::uint64_t bytes_written_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_EXPORT_WRITER_H_
