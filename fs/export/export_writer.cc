// SPDX-License-Identifier: Apache-2.0
// Files of a plan written by several ranks: cut at multiples of a block, so that two ranks never
// write one; CRCs of parts are combined, not computed twice.
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

// A file costs as much as so many bytes.
// Creating and syncing one takes time, whatever its size; without it one rank would get all small
// files of an export and another one a single large one.
constexpr std::uint64_t kFileCost = 64 << 10;
// Ranks' ranges are cut at multiples of it.
// Larger than any page or stripe of a filesystem.
constexpr std::uint64_t kCut = std::uint64_t{1} << 20;
// Files of one rank that are open for writing; far below the limit of descriptors, also with many
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
  // 128 bits: of petabytes on thousands of ranks.
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(cost_) * n / size_);
}

ByteRange ExportWriter::RangeOf(std::uint64_t cost_before, std::uint64_t size) const {
  // From a position in the line of costs to one in this file. Both ends of a rank's share go
  // through the same function as the neighbours' do, so ranges meet exactly.
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

std::vector<ExportWriter::Shared> ExportWriter::ShareFiles() {
  std::vector<Shared> shared;
  std::uint64_t cost = 0;
  for (std::uint32_t n = 0; n < plan_.files.size(); ++n) {
    const ExportFile& file = plan_.files[n];
    const bool owns = Owns(cost);
    cost += kFileCost + file.size;
    if (!file.backed || !owns) continue;
    // Whatever goes wrong here, copying does it too, and says why where it cannot.
    const auto opened = plan_.Open(view_, file);
    if (!opened.ok() || !MakeFolderOf(file).ok()) continue;
    // The file itself, which is cloned by descriptor, and its path, since link(2) wants one.
    const auto source = opened.value()->OpenBacking();
    const auto source_path = opened.value()->BackingPath();
    if (!source.ok() || !source_path.ok()) continue;
    const std::string path = PathOf(file);
    if (source.value().file->descriptor() >= 0) {
      auto made = fs_.CreateExclusive(path);
      if (!made.ok()) continue;
      // One call, no data: the extents are shared until one side is written (XFS, btrfs and others;
      // elsewhere it fails).
      if (ioctl(made.value()->descriptor(), FICLONE, source.value().file->descriptor()) == 0) {
        open_.emplace_back(n, std::move(made).value());
        shared.push_back({.file = n, .linked = false});
        continue;
      }
      // Where this fails, so does the link below.
      (void)made.value()->Close();
      (void)fs_.RemoveFile(path);
    }
    // A second name is only right for bytes that never change: a store's own, sealed ones. Whom the
    // seal does not stop, as root, could change the store by writing to the export.
    const bool sealed = view_.opened().index().info().self_contained &&
                        source.value().info.sealed() &&
                        faccessat(AT_FDCWD, source_path.value().c_str(), W_OK, AT_EACCESS) != 0;
    if (sealed && fs_.Link(source_path.value(), path).ok()) {
      shared.push_back({.file = n, .linked = true});
    }
  }
  return shared;
}

void ExportWriter::Skip(const std::vector<Shared>& shared) {
  for (const Shared& file : shared) {
    if (file.file < shared_.size()) shared_[file.file] = true;
  }
}

Status ExportWriter::MakeFolderOf(const ExportFile& file) {
  const std::size_t slash = file.name.rfind('/');
  if (slash == std::string::npos) return {};
  const std::string folder = file.name.substr(0, slash);
  if (!made_folders_.insert(folder).second) return {};
  // Folders come in order, so old ones are not asked for again.
  if (made_folders_.size() > 1024) made_folders_ = {folder};  // Only spares repeated calls.
  return fs_.CreateDirectories(JoinPath(base_, folder));
}

Result<File*> ExportWriter::OpenToWrite(std::uint32_t number) {
  for (const auto& [n, file] : open_) {
    if (n == number) return file.get();
  }
  // Synced when it is closed: an error of writeback that nobody hears would be lost with the
  // descriptor.
  while (open_.size() >= kMaxOpen) {
    TENSORMOUNT_RETURN_IF_ERROR(open_.front().second->Sync());
    TENSORMOUNT_RETURN_IF_ERROR(open_.front().second->Close());
    open_.pop_front();
  }
  const ExportFile& file = plan_.files[number];
  TENSORMOUNT_RETURN_IF_ERROR(MakeFolderOf(file));
  // Several ranks write one file; whoever comes first makes it.
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
    // An empty file has no bytes to be written by anybody: its owner makes it.
    if (!range.empty() || (owns && file.size == 0)) {
      TENSORMOUNT_RETURN_IF_ERROR(WriteRange(n, range));
    }
  }
  // Before the CRCs, which need none of it.
  buffer_ = {};
  return {};
}

Status ExportWriter::WriteRange(std::uint32_t number, const ByteRange& range) {
  const ExportFile& file = plan_.files[number];
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto source, plan_.Open(view_, file));
  // Of a shared file the bytes are read and not written: damage of the source must fail the export
  // all the same.
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
    // The view promised the size.
    if (got != n) return Status(Code::kInternal, source->label() + ": ends before its end");
    AddCrc(number, at, buffer_.data(), n);
    if (out != nullptr) {
      TENSORMOUNT_RETURN_IF_ERROR(out->WriteAt(at, buffer_.data(), n));
      // So that the disk is busy while the next block is read and hashed, and the sync at the end
      // is short.
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
  // Holes are sorted and do not overlap; the search begins at the last one that begins at or before
  // the bytes.
  auto hole =
      std::upper_bound(holes.begin(), holes.end(), begin,
                       [](std::uint64_t at, const CrcHole& h) { return at < h.covered.begin; });
  if (hole != holes.begin()) --hole;
  for (; hole != holes.end() && hole->covered.begin < end; ++hole) {
    const ByteRange both = hole->covered.Intersect({begin, end});
    if (both.empty()) continue;
    // A rank's range is one run, read from its begin to its end: so is what it has of a hole.
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
    // Whole: no other rank has any of it.
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
      // Only a bug or a rank of another version could send this; the numbers index vectors.
      if (!in.status().ok() || id.first >= plan_.files.size() ||
          id.second >= plan_.files[id.first].holes.size()) {
        return Status(Code::kInternal, "a rank sent CRCs of something else");
      }
      shared[id].push_back(part);
    }
  }
  for (const auto& [id, part] : crcs_) {
    const CrcHole& hole = plan_.files[id.first].holes[id.second];
    if (part.covered == hole.covered) {
      TENSORMOUNT_RETURN_IF_ERROR(PutCrc(id, {part}));
    } else if (part.covered.begin == hole.covered.begin) {  // Whoever begins it ends it: one rank.
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
    return Status(Code::kInternal, "no rank sent the CRC of a part of an entry");
  }
  ByteWriter text;
  text.U32(crc);
  // Four bytes in a range that may be another rank's, which has ended its writes: Write was agreed
  // on in between.
  TENSORMOUNT_ASSIGN_OR_RETURN(File * file, OpenToWrite(id.first));
  for (const std::uint64_t position : hole.positions) {
    TENSORMOUNT_RETURN_IF_ERROR(file->WriteAt(position, text.bytes().data(), text.bytes().size()));
  }
  return {};
}

Status ExportWriter::Sync() {
  // All syncs, then all closes: one that fails leaves the rest to the destructors, and the export
  // fails.
  for (const auto& [number, file] : open_) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckNotCancelled(options_));
    TENSORMOUNT_RETURN_IF_ERROR(file->Sync());
  }
  for (const auto& [number, file] : open_) TENSORMOUNT_RETURN_IF_ERROR(file->Close());
  open_.clear();
  return {};
}

}  // namespace tensormount::fs
