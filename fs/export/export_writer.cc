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
constexpr std::uint64_t kFileCost = 64 << 10;
// Ranks' ranges are cut at multiples of it.
constexpr std::uint64_t kCut = std::uint64_t{1} << 20;
constexpr std::size_t kMaxOpen = 64;

}  // namespace

ExportWriter::ExportWriter(FileSystem& fs, const CheckpointView& view, const ExportPlan& plan,
                           std::string base, int rank, int size,
                           std::atomic<std::uint64_t>* progress)
    : fs_(fs),
      view_(view),
      plan_(plan),
      base_(std::move(base)),
      rank_(static_cast<std::uint64_t>(rank)),
      size_(static_cast<std::uint64_t>(size)),
      progress_(progress),
      shared_(plan.files.size(), false) {
  for (const ExportFile& file : plan.files) cost_ += kFileCost + file.size;
}

std::string ExportWriter::PathOf(const ExportFile& file) const {
  return file.name.empty() ? base_ : JoinPath(base_, file.name);
}

ExportWriter::Range ExportWriter::RangeOf(std::uint64_t cost_before, std::uint64_t size) const {
  // 128 bits: of petabytes on thousands of ranks.
  const auto share = [this](std::uint64_t n) {
    return static_cast<std::uint64_t>(static_cast<unsigned __int128>(cost_) * n / size_);
  };
  const std::uint64_t low = share(rank_);
  const std::uint64_t high = share(rank_ + 1);
  const auto cut = [&](std::uint64_t cost) -> std::uint64_t {
    const std::uint64_t data = cost_before + kFileCost;
    if (cost <= data) return 0;
    return cost - data >= size ? size : (cost - data) / kCut * kCut;
  };
  return {.begin = cut(low), .end = cut(high), .owns = low <= cost_before && cost_before < high};
}

std::vector<ExportWriter::Shared> ExportWriter::ShareFiles() {
  std::vector<Shared> shared;
  std::uint64_t cost = 0;
  for (std::uint32_t n = 0; n < plan_.files.size(); ++n) {
    const ExportFile& file = plan_.files[n];
    const bool owns = RangeOf(cost, file.size).owns;
    cost += kFileCost + file.size;
    if (!file.backed || !owns) continue;
    // Whatever goes wrong here, copying does it too, and says why where it cannot.
    const auto opened = plan_.Open(view_, file);
    if (!opened.ok() || !MakeFolderOf(file).ok()) continue;
    const auto source = opened.value()->OpenBacking();
    const auto source_path = opened.value()->BackingPath();
    if (!source.ok() || !source_path.ok()) continue;
    const std::string path = PathOf(file);
    if (source.value().file->descriptor() >= 0) {
      auto made = fs_.CreateExclusive(path);
      if (!made.ok()) continue;
      if (ioctl(made.value()->descriptor(), FICLONE, source.value().file->descriptor()) == 0) {
        open_.emplace_back(n, std::move(made).value());
        shared.push_back({.file = n, .linked = false});
        continue;
      }
      if (!made.value()->Close().ok() || !fs_.RemoveFile(path).ok()) continue;
    }
    // A second name is only right for bytes that never change: a store's own, sealed ones. Whom the
    // seal does not stop, as root, could change the store by writing to the export.
    const bool sealed = view_.opened().index().info().self_contained &&
                        (source.value().info.mode & 0222) == 0 &&
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
  if (made_folders_.size() > 1024) made_folders_ = {folder};  // Only spares repeated calls.
  return fs_.CreateDirectories(JoinPath(base_, folder));
}

Result<File*> ExportWriter::OpenToWrite(std::uint32_t number) {
  for (const auto& [n, file] : open_) {
    if (n == number) return file.get();
  }
  while (open_.size() >= kMaxOpen) {
    TENSORMOUNT_RETURN_IF_ERROR(open_.front().second->Sync());
    TENSORMOUNT_RETURN_IF_ERROR(open_.front().second->Close());
    open_.pop_front();
  }
  const ExportFile& file = plan_.files[number];
  TENSORMOUNT_RETURN_IF_ERROR(MakeFolderOf(file));
  TENSORMOUNT_ASSIGN_OR_RETURN(auto opened, fs_.OpenShared(PathOf(file)));
  open_.emplace_back(number, std::move(opened));
  return open_.back().second.get();
}

Status ExportWriter::Write() {
  std::uint64_t cost = 0;
  for (std::uint32_t n = 0; n < plan_.files.size(); ++n) {
    const ExportFile& file = plan_.files[n];
    const Range range = RangeOf(cost, file.size);
    cost += kFileCost + file.size;
    if (range.begin < range.end || (range.owns && file.size == 0)) {
      TENSORMOUNT_RETURN_IF_ERROR(WriteRange(n, range));
    }
  }
  buffer_ = {};
  return {};
}

Status ExportWriter::WriteRange(std::uint32_t number, const Range& range) {
  const ExportFile& file = plan_.files[number];
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto source, plan_.Open(view_, file));
  File* out = nullptr;
  if (!shared_[number]) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out, OpenToWrite(number));
  }
  const std::uint64_t wanted = std::min(kBlock, range.end - range.begin);
  if (buffer_.size() < wanted) buffer_.resize(wanted);
  for (std::uint64_t at = range.begin; at < range.end;) {
    const auto n = static_cast<std::size_t>(std::min(kBlock, range.end - at));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got,
                                 source->Read(at, buffer_.data(), n, nullptr));
    if (got != n) return Status(Code::kInternal, source->label() + ": ends before its end");
    AddCrc(number, at, buffer_.data(), n);
    if (out != nullptr) {
      TENSORMOUNT_RETURN_IF_ERROR(out->WriteAt(at, buffer_.data(), n));
      out->StartWriteback(at, n);
      bytes_written_ += n;
    }
    at += n;
    if (progress_ != nullptr) *progress_ += n;
  }
  return {};
}

void ExportWriter::AddCrc(std::uint32_t file, std::uint64_t begin, const char* data,
                          std::size_t size) {
  const std::vector<CrcHole>& holes = plan_.files[file].holes;
  const std::uint64_t end = begin + size;
  auto hole = std::upper_bound(holes.begin(), holes.end(), begin,
                               [](std::uint64_t at, const CrcHole& h) { return at < h.begin; });
  if (hole != holes.begin()) --hole;
  for (; hole != holes.end() && hole->begin < end; ++hole) {
    const std::uint64_t from = std::max(begin, hole->begin);
    const std::uint64_t to = std::min(end, hole->begin + hole->length);
    if (from >= to) continue;
    // A rank's range is one run, read from its begin to its end: so is what it has of a hole.
    Part& part = crcs_[{file, static_cast<std::uint32_t>(hole - holes.begin())}];
    if (part.length == 0) part.begin = from;
    part.crc = Crc32Extend(part.crc, data + (from - begin), static_cast<std::size_t>(to - from));
    part.length += to - from;
  }
}

std::string ExportWriter::PartialCrcs() const {
  ByteWriter out;
  for (const auto& [id, part] : crcs_) {
    if (part.length == plan_.files[id.first].holes[id.second].length) continue;
    out.U32(id.first);
    out.U32(id.second);
    out.U64(part.begin);
    out.U64(part.length);
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
      part.begin = in.U64();
      part.length = in.U64();
      part.crc = in.U32();
      if (!in.status().ok() || id.first >= plan_.files.size() ||
          id.second >= plan_.files[id.first].holes.size()) {
        return Status(Code::kInternal, "a rank sent CRCs of something else");
      }
      shared[id].push_back(part);
    }
  }
  for (const auto& [id, part] : crcs_) {
    const CrcHole& hole = plan_.files[id.first].holes[id.second];
    if (part.length == hole.length) {
      TENSORMOUNT_RETURN_IF_ERROR(PutCrc(id, {part}));
    } else if (part.begin == hole.begin) {  // Whoever begins it ends it.
      TENSORMOUNT_RETURN_IF_ERROR(PutCrc(id, std::move(shared[id])));
    }
  }
  crcs_.clear();
  return {};
}

Status ExportWriter::PutCrc(const HoleId& id, std::vector<Part> parts) {
  const CrcHole& hole = plan_.files[id.first].holes[id.second];
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return a.begin < b.begin; });
  std::uint64_t at = hole.begin;
  std::uint32_t crc = 0;
  for (const Part& part : parts) {
    if (part.begin != at) break;
    crc = Crc32Combine(crc, part.crc, part.length);
    at += part.length;
  }
  if (at != hole.begin + hole.length) {
    return Status(Code::kInternal, "no rank sent the CRC of a part of an entry");
  }
  ByteWriter text;
  text.U32(crc);
  TENSORMOUNT_ASSIGN_OR_RETURN(File * file, OpenToWrite(id.first));
  for (const std::uint64_t place : hole.places) {
    TENSORMOUNT_RETURN_IF_ERROR(file->WriteAt(place, text.bytes().data(), text.bytes().size()));
  }
  return {};
}

Status ExportWriter::Sync() {
  for (const auto& [number, file] : open_) TENSORMOUNT_RETURN_IF_ERROR(file->Sync());
  for (const auto& [number, file] : open_) TENSORMOUNT_RETURN_IF_ERROR(file->Close());
  open_.clear();
  return {};
}

}  // namespace tensormount::fs
