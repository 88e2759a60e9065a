// SPDX-License-Identifier: Apache-2.0
// Verification of foreign checkpoints (verify_foreign.h). Foreign formats have no hashes, so a
// checkpoint is intact if its metadata can be read and are consistent, every item matches its chunk
// in the metadata, zip entries match their CRCs, all bytes can be read, and no file changes
// meanwhile. Data that were found missing at opening are reported as damage, other warnings as
// warnings.
#include "index/foreign/verify_foreign.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "index/archives/zip_archive.h"
#include "index/foreign/foreign.h"
#include "index/foreign/format.h"
#include "index/read/scan.h"
#include "index/read/verify_ranges.h"

namespace tensormount {
namespace {

bool BeginsZip(File& file, std::uint64_t offset, std::uint64_t length) {
  std::array<char, 4> head{};
  return length >= head.size() && file.ReadExactAt(offset, head.data(), head.size()).ok() &&
         std::string_view(head.data(), head.size()) == std::string_view("PK\3\4", 4);
}

// Reads all bytes that the records refer to: zip archives entry by entry, to check the CRCs, and
// all other ranges with a Scan.
class ForeignVerifier {
 public:
  ForeignVerifier(const OpenedCheckpoint& opened, const VerifyOptions& options)
      : opened_(opened), options_(options) {}

  Result<VerifyReport> Run() {
    // The text of each loss is also among the warnings, and is not reported twice.
    std::unordered_set<std::string> told;
    for (const ForeignLoss& loss : opened_.lost()) {
      told.insert(loss.ToString());
      const bool parts = loss.holes && !loss.file.empty();
      VerifyReport::Damage damage{.object = (parts ? "parts of " : "") + loss.Summary(),
                                  .file = loss.file,
                                  .offset = 0,
                                  .reason = loss.reason + loss.Examples(),
                                  .lost = true};
      damage.keys = loss.tensors;
      damage.keys.insert(damage.keys.end(), loss.objects.begin(), loss.objects.end());
      report_.damages.push_back(std::move(damage));
    }
    for (const std::string& warning : opened_.warnings()) {
      if (!told.contains(warning)) report_.warnings.push_back(warning);
    }
    const CheckpointIndex& index = opened_.index();
    report_.tensors = index.tensor_count();
    report_.chunks = index.chunk_count();
    if (!options_.quick) {
      TENSORMOUNT_RETURN_IF_ERROR(FindRanges());
      ReadArchives();
      TENSORMOUNT_RETURN_IF_ERROR(ended_);
      TENSORMOUNT_RETURN_IF_ERROR(ScanOutsideArchives());
    }
    return ConcludeReport(std::move(report_), unread_);
  }

 private:
  // Reports an object (or tensor) that cannot be read or does not match the metadata.
  void AddFailure(std::string object, std::string file, std::uint64_t offset,
                  const Status& status) {
    if (ProvesDamage(status) || status.code() == Code::kStale) {  // kStale: the file changed.
      report_.damages.push_back({.object = std::move(object),
                                 .file = std::move(file),
                                 .offset = offset,
                                 .reason = status.message()});
    } else if (unread_.ok()) {
      unread_ = status.WithContext(object);
    }
  }
  std::string Name(const ScanRange& range) const { return RangeName(inventory_, range); }
  const std::string& FileName(std::uint32_t file) const { return inventory_.files[file].name; }

  // Fills ranges_, sorted by file. Extents() locates the bytes of each item from the item's zip
  // directory and pickle, so it also checks the items.
  Status FindRanges() {
    const CheckpointIndex& index = opened_.index();
    TENSORMOUNT_ASSIGN_OR_RETURN(inventory_, index.ToInventory());
    std::vector<bool> unknown(inventory_.tensors.size());
    TENSORMOUNT_RETURN_IF_ERROR(index.ForEachTensor(0, [&](const TensorEntry& tensor) {
      const auto found = opened_.Extents(tensor);
      unknown[tensor.ordinal] = !found.ok();
      if (!found.ok()) AddFailure("tensor " + tensor.meta.key(), {}, 0, found.status());
      return true;
    }));
    for (ScanRange& range : RangesOf(inventory_)) {
      range.digest = false;  // Foreign tensors have no digest.
      // An invalid item was reported above. Its range is not read, because its length may be wrong.
      if (range.kind == ScanRange::Kind::kChunk && unknown[range.owner] && IsItem(range)) continue;
      ranges_.push_back(range);
      total_ += range.length;
    }
    std::stable_sort(ranges_.begin(), ranges_.end(), [](const ScanRange& a, const ScanRange& b) {
      return std::tie(a.file, a.offset, a.length) < std::tie(b.file, b.offset, b.length);
    });
    return Status();
  }

  // Whether the range may be an archive: a pending item of a tensor, or an object.
  bool IsItem(const ScanRange& range) const {
    if (range.kind != ScanRange::Kind::kChunk) return true;
    const auto chunk = inventory_.tensors[range.owner].extents.At(range.row);
    return chunk.ok() && chunk.value().pending;
  }

  // Checks the zip archives and removes their ranges from ranges_. A file is one archive
  // (torch.save, .npz), or has many items, each of which may be an archive (.distcp), or has no
  // archive.
  void ReadArchives() {
    std::vector<ScanRange> others;
    for (std::size_t i = 0; i < ranges_.size() && !IsStopped();) {
      const std::uint32_t number = ranges_[i].file;
      std::size_t end = i;
      while (end < ranges_.size() && ranges_[end].file == number) ++end;
      const std::span<const ScanRange> ranges(ranges_.data() + i, end - i);
      i = end;
      auto file = opened_.OpenFile(number);
      bool archives = false;
      if (file.ok()) {
        archives = ReadArchivesOf(*file.value(), ranges, others);
      } else {  // The scan will report the error.
        others.insert(others.end(), ranges.begin(), ranges.end());
      }
      if (!archives) continue;
      if (const Status still = opened_.CheckFileUnchanged(number, *file.value()); !still.ok()) {
        AddFailure(Name(ranges.front()), FileName(number), 0, still);
      }
    }
    ranges_ = std::move(others);
  }

  // Checks the archives in one file. `ranges`: all ranges of the file. Returns whether the file has
  // archives; ranges that are in no archive are added to `others`.
  bool ReadArchivesOf(File& file, std::span<const ScanRange> ranges,
                      std::vector<ScanRange>& others) {
    const std::uint32_t number = ranges.front().file;
    const std::uint64_t length = inventory_.files[number].length;
    if (BeginsZip(file, 0, length)) {
      // A .distcp file also begins with a zip, its first item, but with several items it cannot be
      // parsed as one archive.
      const Result<ZipArchive> whole = ZipArchive::Read(file, 0, length);
      if (whole.ok()) {
        CheckEntries(file, whole.value(), ranges);
        for (const ScanRange& range : ranges) Count(range.length);
        return true;
      }
    }
    bool archives = false;
    for (const ScanRange& range : ranges) {
      if (!IsItem(range) || !BeginsZip(file, range.offset, range.length)) {
        others.push_back(range);
        continue;
      }
      archives = true;
      const Result<ZipArchive> item = ZipArchive::Read(file, range.offset, range.length);
      if (item.ok()) {
        CheckEntries(file, item.value(), std::span(&range, 1));
      } else {
        AddFailure(Name(range), FileName(number), range.offset, item.status());
      }
      Count(range.length);
    }
    return archives;
  }

  // Checks the CRCs of the entries of an archive. A damaged entry is reported for each range with
  // bytes in the entry (several tensors may share one storage). If no range has bytes in it, it is
  // reported by its own name (data.pkl).
  void CheckEntries(File& file, const ZipArchive& archive, std::span<const ScanRange> ranges) {
    const std::string& name = FileName(ranges.front().file);
    for (const ZipEntry& entry : archive.entries()) {
      if (IsStopped()) return;
      const Status checked = CheckZipCrc(file, entry, [&](std::uint64_t bytes) {
        in_archive_ += bytes;
        return IsStopped() ? ended_ : Status();
      });
      if (!ended_.ok()) return;  // The check of the entry was not finished.
      if (checked.ok()) continue;
      bool owned = false;
      for (const ScanRange& range : ranges) {
        if (range.offset >= entry.offset + entry.size ||
            entry.offset >= range.offset + range.length) {
          continue;
        }
        AddFailure(Name(range), name, entry.offset, checked);
        owned = true;
      }
      if (!owned) AddFailure("archive entry " + entry.name, name, entry.offset, checked);
    }
  }

  void Count(std::uint64_t bytes) {
    report_.bytes_checked += bytes;
    report_.bytes_without_hash += bytes;
    in_archive_ = 0;
  }

  // Whether the caller's watch has ended the verification. Called before each file and each entry,
  // and after each block of an entry.
  bool IsStopped() {
    if (ended_.ok() && options_.watch) {
      ended_ = options_.watch(std::min(report_.bytes_checked + in_archive_, total_), total_);
    }
    return !ended_.ok();
  }

  // Scans the ranges that are in no archive. If a file changed, that is reported once, not for each
  // range.
  Status ScanOutsideArchives() {
    const std::uint64_t before = report_.bytes_checked;
    Scan scan(inventory_,
              {.open = [this](std::uint32_t file) { return opened_.OpenFile(file); },
               .check = [this](std::uint32_t file,
                               File& open) { return opened_.CheckFileUnchanged(file, open); }},
              options_.threads, [&](std::uint64_t done, std::uint64_t) {
                return options_.watch ? options_.watch(before + done, total_) : Status();
              });
    // Failures are collected by range, so that they are reported in the order of ranges.
    std::mutex mutex;
    std::map<std::size_t, ScanFinding> failures;
    TENSORMOUNT_RETURN_IF_ERROR(scan.Run(ranges_, [&](std::size_t i, ScanFinding& found) {
      const std::lock_guard lock(mutex);
      if (!found.failure.ok()) failures.emplace(i, std::move(found));
      return Status();
    }));
    report_.bytes_checked += scan.bytes();
    report_.bytes_without_hash += scan.bytes();
    std::uint32_t changed = kNoFile;
    for (const auto& [i, found] : failures) {
      const ScanRange& range = ranges_[i];
      const bool whole_file = found.step == ScanFinding::Step::kCheck;
      if (whole_file && range.file == changed) continue;
      if (whole_file) changed = range.file;
      AddFailure(Name(range), FileName(range.file),
                 whole_file ? 0 : range.offset + found.read.bytes, found.failure);
    }
    return Status();
  }

  const OpenedCheckpoint& opened_;
  const VerifyOptions& options_;
  VerifyReport report_;
  // The first error that is not damage, such as a failing disk: something was not checked.
  Status unread_;
  Status ended_;                  // The error of the watch, if the watch ended the verification.
  std::uint64_t in_archive_ = 0;  // Bytes read so far of the current archive.
  Inventory inventory_;
  std::vector<ScanRange> ranges_;
  std::uint64_t total_ = 0;
};

}  // namespace

Result<VerifyReport> VerifyForeign(FileSystem& fs, const std::string& path,
                                   const VerifyOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder,
                               ForeignFolder::Open(fs, path, options.roots));
  TENSORMOUNT_ASSIGN_OR_RETURN(ForeignInventory inventory, ReadForeign(folder));
  OpenedCheckpoint::Options how;
  how.roots = options.roots;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened,
                               OpenedCheckpoint::OpenForeign(fs, std::move(inventory), path, how));
  return ForeignVerifier(*opened, options).Run();
}

}  // namespace tensormount
