// SPDX-License-Identifier: Apache-2.0
// Writes one rank's share of the files of a plan, and combines the CRCs of the ranks.
#include "fs/export/export_writer.h"

#include <algorithm>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/checked.h"
#include "base/coding.h"
#include "base/crc32.h"

namespace tensormount::fs {
namespace {

// Cost of creating and syncing a file, expressed in bytes. Without it one rank would get all small
// files of an export and another rank one large file.
constexpr std::uint64_t kFileCost = 64 << 10;
// Ranks' ranges are cut at multiples of this size, which exceeds any page or stripe of a
// filesystem.
constexpr std::uint64_t kCut = std::uint64_t{1} << 20;
// Largest number of files that a rank keeps open: far below the descriptor limit, even with many
// ranks in a process.
constexpr std::size_t kMaxOpen = 64;

}  // namespace

ExportWriter::ExportWriter(FileSystem& fs, const CheckpointView& view, const ExportPlan& plan,
                           std::string base, int rank, int size, const ExportOptions& options)
    : fs_(fs),
      view_(view),
      plan_(plan),
      base_(std::move(base)),
      rank_(static_cast<std::uint64_t>(rank)),
      size_(static_cast<std::uint64_t>(size)),
      options_(options),
      shared_(plan.files.size(), false) {
  for (const ExportFile& file : plan.files) cost_ += kFileCost + file.size;
}

std::string ExportWriter::PathOf(const ExportFile& file) const {
  return file.name.empty() ? base_ : JoinPath(base_, file.name);
}

std::uint64_t ExportWriter::ShareBegin(std::uint64_t n) const {
  // Petabytes times thousands of ranks need 128 bits.
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(cost_) * n / size_);
}

ByteRange ExportWriter::RangeOf(std::uint64_t cost_before, std::uint64_t size) const {
  // Maps a position on the cost axis to an offset in this file. Two ranks compute their common
  // border alike, so their ranges meet exactly.
  const auto cut = [&](std::uint64_t cost) -> std::uint64_t {
    const std::uint64_t data = cost_before + kFileCost;
    if (cost <= data) return 0;
    return cost - data >= size ? size : (cost - data) / kCut * kCut;
  };
  return {cut(ShareBegin(rank_)), cut(ShareBegin(rank_ + 1))};
}

bool ExportWriter::Owns(std::uint64_t cost_before) const {
  return ShareBegin(rank_) <= cost_before && cost_before < ShareBegin(rank_ + 1);
}

std::vector<ExportWriter::SharedExportFile> ExportWriter::ShareFiles() {
  std::vector<SharedExportFile> shared;
  std::uint64_t cost = 0;
  for (std::uint32_t n = 0; n < plan_.files.size(); ++n) {
    const ExportFile& file = plan_.files[n];
    const bool owns = Owns(cost);
    cost += kFileCost + file.size;
    if (!file.backed || !owns) continue;
    // Every failure here is ignored: the file is copied instead, and the copy reports the error.
    const auto opened = plan_.Open(view_, file);
    if (!opened.ok() || !MakeFolderOf(file).ok()) continue;
    // The file is cloned by descriptor; its path is needed for link(2).
    const auto source = opened.value()->OpenBacking();
    const auto source_path = opened.value()->BackingPath();
    if (!source.ok() || !source_path.ok()) continue;
    const std::string path = PathOf(file);
    if (source.value().file->descriptor() >= 0) {
      auto made = fs_.CreateExclusive(path);
      if (!made.ok()) continue;
      // FICLONE copies no data: both files share the extents until one of them is written (XFS,
      // btrfs and others; on other filesystems it fails).
      if (ioctl(made.value()->descriptor(), FICLONE, source.value().file->descriptor()) == 0) {
        open_.emplace_back(n, std::move(made).value());
        shared.push_back({.file = n, .linked = false});
        continue;
      }
      // Frees the name for the hard link below.
      (void)made.value()->Close();
      (void)fs_.RemoveFile(path);
    }
    // A hard link is safe only if the bytes never change, as in sealed files of a store. It is not
    // made for a user who can write to sealed files, such as root: writing to the export would
    // change the store.
    const bool linkable = view_.opened().fs().Can(Ability::kKernelFiles) &&
                          fs_.Can(Ability::kKernelFiles) && fs_.Can(Ability::kHardLinks);
    const bool sealed = linkable && view_.opened().index().info().self_contained &&
                        source.value().info.sealed() &&
                        faccessat(AT_FDCWD, source_path.value().c_str(), W_OK, AT_EACCESS) != 0;
    if (sealed && fs_.Link(source_path.value(), path).ok()) {
      shared.push_back({.file = n, .linked = true});
    }
  }
  return shared;
}

void ExportWriter::Skip(const std::vector<SharedExportFile>& shared) {
  for (const SharedExportFile& file : shared) {
    if (file.file < shared_.size()) shared_[file.file] = true;
  }
}

Status ExportWriter::MakeFolderOf(const ExportFile& file) {
  const std::size_t slash = file.name.rfind('/');
  if (slash == std::string::npos) return {};
  const std::string folder = file.name.substr(0, slash);
  if (!made_folders_.insert(folder).second) return {};
  // made_folders_ only avoids repeated calls. Directories come in order, so older ones are not
  // needed again.
  if (made_folders_.size() > 1024) made_folders_ = {folder};
  return fs_.CreateDirectories(JoinPath(base_, folder));
}

Result<File*> ExportWriter::OpenToWrite(std::uint32_t number) {
  for (const auto& [n, file] : open_) {
    if (n == number) return file.get();
  }
  // A file is synced before it is closed, because closing would lose an error of writeback that was
  // not reported yet.
  while (open_.size() >= kMaxOpen) {
    TENSORMOUNT_RETURN_IF_ERROR(open_.front().second->Sync());
    TENSORMOUNT_RETURN_IF_ERROR(open_.front().second->Close());
    open_.pop_front();
  }
  const ExportFile& file = plan_.files[number];
  TENSORMOUNT_RETURN_IF_ERROR(MakeFolderOf(file));
  // Several ranks may write one file; OpenShared creates the file if it does not exist.
  TENSORMOUNT_ASSIGN_OR_RETURN(auto opened, fs_.OpenShared(PathOf(file)));
  open_.emplace_back(number, std::move(opened));
  return open_.back().second.get();
}

Status ExportWriter::Write() {
  std::uint64_t cost = 0;
  for (std::uint32_t n = 0; n < plan_.files.size(); ++n) {
    const ExportFile& file = plan_.files[n];
    const ByteRange range = RangeOf(cost, file.size);
    const bool owns = Owns(cost);
    cost += kFileCost + file.size;
    // No rank writes bytes to an empty file, so the rank in whose share it begins creates it.
    if (!range.empty() || (owns && file.size == 0)) {
      TENSORMOUNT_RETURN_IF_ERROR(WriteRange(n, range));
    }
  }
  // Frees the buffer, which the remaining steps do not need.
  buffer_ = {};
  return {};
}

Status ExportWriter::WriteRange(std::uint32_t number, const ByteRange& range) {
  const ExportFile& file = plan_.files[number];
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto source, plan_.Open(view_, file));
  // Bytes of a shared file are read but not written, so that damage in the source still fails the
  // export.
  File* out = nullptr;
  if (!shared_[number]) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out, OpenToWrite(number));
  }
  const std::uint64_t wanted = std::min(kBlock, range.size());
  if (buffer_.size() < wanted) buffer_.resize(wanted);
  for (std::uint64_t at = range.begin; at < range.end;) {
    const auto n = static_cast<std::size_t>(std::min(kBlock, range.end - at));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got,
                                 source->Read(at, buffer_.data(), n, nullptr));
    // The file has `file.size` bytes, so a short read is an error of the view.
    if (got != n)
      return Status(Code::kInternal,
                    source->label() + ": the file is shorter than its directory lists");
    AddCrc(number, at, buffer_.data(), n);
    if (out != nullptr) {
      TENSORMOUNT_RETURN_IF_ERROR(out->WriteAt(at, buffer_.data(), n));
      // Keeps the disk busy while the next block is read and hashed, and makes the final sync
      // short.
      out->StartWriteback(at, n);
      bytes_written_ += n;
    }
    at += n;
    if (options_.progress != nullptr) *options_.progress += n;
    TENSORMOUNT_RETURN_IF_ERROR(CheckNotCancelled(options_));
  }
  return {};
}

void ExportWriter::AddCrc(std::uint32_t file, std::uint64_t begin, const char* data,
                          std::size_t size) {
  const std::vector<CrcHole>& holes = plan_.files[file].holes;
  const std::uint64_t end = begin + size;
  // Holes are sorted and disjoint: the search starts at the last hole that begins at or before
  // `begin`.
  auto hole =
      std::upper_bound(holes.begin(), holes.end(), begin,
                       [](std::uint64_t at, const CrcHole& h) { return at < h.covered.begin; });
  if (hole != holes.begin()) --hole;
  for (; hole != holes.end() && hole->covered.begin < end; ++hole) {
    const ByteRange both = hole->covered.Intersect({begin, end});
    if (both.empty()) continue;
    // A rank reads its range of a file as one run from front to back, so its part of a hole is one
    // run too.
    Part& part = crcs_[{file, static_cast<std::uint32_t>(hole - holes.begin())}];
    if (part.covered.empty()) part.covered = {both.begin, both.begin};
    part.crc =
        Crc32Extend(part.crc, data + (both.begin - begin), static_cast<std::size_t>(both.size()));
    part.covered.end = both.end;
  }
}

std::string ExportWriter::PartialCrcs() const {
  ByteWriter out;
  for (const auto& [id, part] : crcs_) {
    // If this rank read all bytes of the hole, the other ranks do not need their CRC.
    if (part.covered == plan_.files[id.first].holes[id.second].covered) continue;
    out.U32(id.first);
    out.U32(id.second);
    out.U64(part.covered.begin);
    out.U64(part.covered.end);
    out.U32(part.crc);
  }
  return std::move(out.bytes());
}

Status ExportWriter::PutCrcs(const std::vector<std::string>& parts) {
  std::map<HoleId, std::vector<Part>> shared;
  for (const std::string& from_rank : parts) {
    ByteReader in(from_rank, "CRCs");
    while (in.left() > 0) {
      HoleId id;
      Part part;
      id.first = in.U32();
      id.second = in.U32();
      part.covered.begin = in.U64();
      part.covered.end = in.U64();
      part.crc = in.U32();
      // The numbers are used as indexes. Only a bug or a rank of another version could send wrong
      // ones.
      if (!in.status().ok() || id.first >= plan_.files.size() ||
          id.second >= plan_.files[id.first].holes.size()) {
        return Status(Code::kInternal, "internal error: a rank sent CRCs of an unknown entry");
      }
      shared[id].push_back(part);
    }
  }
  for (const auto& [id, part] : crcs_) {
    const CrcHole& hole = plan_.files[id.first].holes[id.second];
    if (part.covered == hole.covered) {
      TENSORMOUNT_RETURN_IF_ERROR(PutCrc(id, {part}));
      // If several ranks read a hole, the one that read its first byte writes its CRC.
    } else if (part.covered.begin == hole.covered.begin) {
      TENSORMOUNT_RETURN_IF_ERROR(PutCrc(id, std::move(shared[id])));
    }
  }
  crcs_.clear();
  return {};
}

Status ExportWriter::PutCrc(const HoleId& id, std::vector<Part> parts) {
  const CrcHole& hole = plan_.files[id.first].holes[id.second];
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return a.covered < b.covered; });
  std::uint64_t at = hole.covered.begin;
  std::uint32_t crc = 0;
  for (const Part& part : parts) {
    if (part.covered.begin != at) break;
    crc = Crc32Combine(crc, part.crc, part.covered.size());
    at = part.covered.end;
  }
  if (at != hole.covered.end) {
    return Status(Code::kInternal, "internal error: no rank sent the CRC of a part of an entry");
  }
  ByteWriter text;
  text.U32(crc);
  // These four bytes may be in another rank's range. That rank does not write to it any more,
  // because all ranks agreed that Write has ended.
  TENSORMOUNT_ASSIGN_OR_RETURN(File * file, OpenToWrite(id.first));
  for (const std::uint64_t position : hole.positions) {
    TENSORMOUNT_RETURN_IF_ERROR(file->WriteAt(position, text.bytes().data(), text.bytes().size()));
  }
  return {};
}

Status ExportWriter::Sync() {
  // All files are synced, and only then closed. After a failed sync the destructors close them, and
  // the export fails.
  for (const auto& [number, file] : open_) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckNotCancelled(options_));
    TENSORMOUNT_RETURN_IF_ERROR(file->Sync());
  }
  for (const auto& [number, file] : open_) TENSORMOUNT_RETURN_IF_ERROR(file->Close());
  open_.clear();
  return {};
}

}  // namespace tensormount::fs
