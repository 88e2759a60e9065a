// SPDX-License-Identifier: Apache-2.0
// Compares a scan of a stored checkpoint with the hashes of its records.
//
// A range is whole if the root of its leaves equals the root in its record. A tensor is whole if
// the digests of its chunks add up to the digest in its record. The digest also finds table rows
// that point to intact bytes of other data.
#include "index/read/verify_ranges.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>

#include "base/checked.h"
#include "index/read/foreign_file.h"
#include "index/read/rebuild.h"
#include "index/read/scan.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

// The hashes in the record of a range.
struct StoredHash {
  bool known = true;
  Hash128 root;
  std::uint32_t manifest = 0;
  std::uint64_t first_leaf = 0;
};

StoredHash HashOf(const Inventory& inventory, const ScanRange& range) {
  const auto of = [](const auto& record, bool known) {
    return StoredHash{known, record.hash, record.manifest, record.first_leaf};
  };
  switch (range.kind) {
    case ScanRange::Kind::kChunk: {
      const auto chunk = inventory.tensors[range.owner].extents.At(range.row);
      return of(chunk.value(), chunk.value().has_hash);  // The scan decoded the row before.
    }
    case ScanRange::Kind::kObject:
      return of(inventory.objects[range.owner], inventory.objects[range.owner].has_hash());
    case ScanRange::Kind::kExtra:
      break;
  }
  return of(inventory.extras[range.owner], true);
}

class RangeVerifier {
 public:
  RangeVerifier(FileSystem& fs, const std::string& directory, const ForeignBase& base,
                const Inventory& inventory,
                const std::map<std::string, std::vector<Hash128>>& leaves,
                const VerifyOptions& options, VerifyReport& report)
      : fs_(fs),
        directory_(directory),
        base_(base),
        inventory_(inventory),
        leaves_(leaves),
        options_(options),
        report_(report),
        digests_(inventory.tensors.size()) {}

  Status Run() {
    ranges_ = RangesOf(inventory_);
    for (ScanRange& range : ranges_) {
      range.digest =
          range.kind == ScanRange::Kind::kChunk && inventory_.tensors[range.owner].has_digest;
    }
    Scan scan(inventory_,
              {.open = [this](std::uint32_t file) { return Open(file); },
               .check = [this](std::uint32_t file,
                               File& open) { return CheckFileUnchanged(file, open); }},
              options_.threads, options_.watch);
    TENSORMOUNT_RETURN_IF_ERROR(
        scan.Run(ranges_,
                 [this](std::size_t i, ScanFinding& found) {
                   CheckFinding(ranges_[i], found);
                   return Status();  // Damage of one range does not end the scan.
                 })
            .WithContext("verify"));
    CompareDigests();
    report_.bytes_checked += scan.bytes();
    report_.bytes_without_hash += unhashed_;
    std::sort(damages_.begin(), damages_.end(), [](const auto& a, const auto& b) {
      return a.file != b.file ? a.file < b.file : a.offset < b.offset;
    });
    for (VerifyReport::Damage& damage : damages_) report_.damages.push_back(std::move(damage));
    return unread_;
  }

 private:
  // Digest of a tensor, computed from its chunks. `whole` becomes false at the first damaged or
  // unread chunk, because the digest then differs for a known reason.
  struct TensorDigest {
    std::atomic<Crc64> value{0};
    std::atomic<bool> whole{true};
  };

  bool IsForeign(std::uint32_t file) const {
    return inventory_.files[file].placement == Placement::kForeign;
  }

  // Whether the damage of the whole file was in the report before the scan.
  bool WasReported(std::uint32_t file) const {
    return std::any_of(report_.damages.begin(), report_.damages.end(), [&](const auto& damage) {
      return damage.file == inventory_.files[file].name;
    });
  }

  Result<std::unique_ptr<File>> Open(std::uint32_t file) const {
    const FileRecord& record = inventory_.files[file];
    return IsForeign(file) ? OpenForeignFile(fs_, base_, record, true)
                           : OpenListedFile(fs_, directory_, record.name);
  }

  Status CheckFileUnchanged(std::uint32_t file, File& open) const {
    if (!IsForeign(file)) return Status();
    const Result<FileInfo> now = open.Stat();
    if (now.status().code() == Code::kStale) {  // A stale handle proves nothing about the file.
      return {Code::kUnavailable, now.status().message()};
    }
    TENSORMOUNT_RETURN_IF_ERROR(now.status());
    return CheckUnchanged(inventory_.files[file], now.value(), true);
  }

  void Damage(const ScanRange& range, std::uint64_t at, std::string reason) {
    const bool has_file = range.file < inventory_.files.size();
    std::lock_guard lock(mutex_);
    damages_.push_back({.object = RangeName(inventory_, range),
                        .file = has_file ? inventory_.files[range.file].name : "index",
                        .offset = range.offset + at,
                        .reason = std::move(reason)});
  }

  // Reports that bytes from `at` on could not be read. If the failure proves damage, it is added to
  // the damages. If not, the first such reason is the result of Run.
  void ReportReadFailure(const ScanRange& range, std::uint64_t at, const Status& status) {
    if (!ProvesDamage(status)) {
      std::lock_guard lock(mutex_);
      if (unread_.ok()) unread_ = status.WithContext(RangeName(inventory_, range));
      return;
    }
    Damage(range, at, ReasonWithoutFile(inventory_.files[range.file].name, status));
  }

  void CheckFinding(const ScanRange& range, const ScanFinding& found) {
    bool whole = false;
    switch (found.step) {
      case ScanFinding::Step::kNone:
        whole = HashesAgree(range, found.read.leaves);
        break;
      case ScanFinding::Step::kRecord:
        Damage(range, 0, found.failure.message());
        break;
      case ScanFinding::Step::kOpen:
        // CheckForeignFiles has reported an unusable foreign file once, as a whole.
        if (!IsForeign(range.file) || !WasReported(range.file)) {
          ReportReadFailure(range, 0, found.failure);
        }
        break;
      case ScanFinding::Step::kRead:
        ReportReadFailure(range, found.read.bytes, found.failure);
        break;
      case ScanFinding::Step::kCheck:
        // kStale means that the file no longer matches its record, which is damage of the
        // checkpoint.
        if (found.failure.code() == Code::kStale) {
          Damage(range, 0, found.failure.message());
        } else {
          ReportReadFailure(range, 0, found.failure);
        }
        break;
    }
    if (range.kind != ScanRange::Kind::kChunk) return;
    TensorDigest& digest = digests_[range.owner];
    if (whole) {
      digest.value ^= found.read.contribution;
    } else {
      digest.whole = false;
    }
  }

  // Compares a range with its hashes and reports a difference. A range without hashes only has to
  // be readable.
  bool HashesAgree(const ScanRange& range, const std::vector<Hash128>& leaves) {
    const StoredHash stored = HashOf(inventory_, range);
    if (!stored.known) {
      unhashed_ += range.length;
      return true;
    }
    if (ChunkRoot(leaves, range.length) == stored.root) return true;
    ReportFirstDifference(range, stored, leaves);
    return false;
  }

  // Reports the first byte of the first differing leaf, or of the range if its leaf hashes are
  // unknown. The leaf hashes of the manifest are used only if their root is the root in the record.
  void ReportFirstDifference(const ScanRange& range, const StoredHash& hash,
                             const std::vector<Hash128>& leaves) {
    if (hash.manifest < inventory_.manifests.size()) {
      const auto known = leaves_.find(inventory_.manifests[hash.manifest]);
      if (known != leaves_.end() &&
          RangeWithin(hash.first_leaf, leaves.size(), known->second.size())) {
        const std::span<const Hash128> stored =
            std::span(known->second).subspan(hash.first_leaf, leaves.size());
        if (ChunkRoot(stored, range.length) == hash.root) {
          std::size_t differing = 0;
          std::optional<std::uint64_t> first;
          for (std::size_t i = 0; i < leaves.size(); ++i) {
            if (leaves[i] == stored[i]) continue;
            ++differing;
            if (!first) first = i * kLeafBytes;
          }
          std::string reason = "checksum mismatch";
          if (differing > 1) {
            reason += " (in " + std::to_string(differing) + " leaves of 64 KiB)";
          }
          Damage(range, first.value_or(0), std::move(reason));
          return;
        }
      }
    }
    Damage(range, 0, "checksum mismatch (the damaged 64 KiB leaf is unknown)");
  }

  // Called after the threads have ended. Skips tensors with chunks that are unread or damaged.
  void CompareDigests() {
    for (std::size_t t = 0; t < digests_.size(); ++t) {
      const TensorRecord& tensor = inventory_.tensors[t];
      if (!tensor.has_digest || !digests_[t].whole || digests_[t].value == tensor.digest) continue;
      damages_.push_back(
          {.object = "tensor " + tensor.meta.key(),
           .file = std::string(kIndexName),
           .offset = 0,
           .reason = "the digest of the tensor in the index does not match its bytes"});
    }
  }

  FileSystem& fs_;
  const std::string& directory_;
  const ForeignBase& base_;
  const Inventory& inventory_;
  const std::map<std::string, std::vector<Hash128>>& leaves_;
  const VerifyOptions& options_;
  VerifyReport& report_;
  std::vector<ScanRange> ranges_;
  std::vector<TensorDigest> digests_;
  std::atomic<std::uint64_t> unhashed_{0};
  std::mutex mutex_;
  std::vector<VerifyReport::Damage> damages_;
  Status unread_;  // First reason why a range was not checked.
};

}  // namespace

// The codes that return false concern the process, the machine or the moment, or data of a newer
// format, which may be intact. All other codes (I/O errors, missing files, short reads) are taken
// for damage of the stored bytes.
bool ProvesDamage(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
    case Code::kPermissionDenied:
    case Code::kResourceExhausted:
    case Code::kUnavailable:
    case Code::kDeadlineExceeded:
    case Code::kBusy:
    case Code::kStale:
    case Code::kUnsupported:
    case Code::kCancelled:
      return false;
    default:
      return true;
  }
}

std::string ReasonWithoutFile(std::string_view file, const Status& status) {
  const std::string prefix = std::string(file) + ": ";
  const std::string_view why = status.message();
  return std::string(why.starts_with(prefix) ? why.substr(prefix.size()) : why);
}

Result<VerifyReport> ConcludeReport(VerifyReport report, const Status& unread) {
  if (unread.ok()) return report;
  if (report.damages.empty()) {
    // kStale is replaced, because callers take it to mean that the checkpoint was deleted.
    return unread.code() == Code::kStale ? Status(Code::kUnavailable, unread.message()) : unread;
  }
  report.warnings.push_back("not everything could be checked: " + unread.message());
  return report;
}

Status VerifyRanges(FileSystem& fs, const std::string& directory, const ForeignBase& base,
                    const Inventory& inventory,
                    const std::map<std::string, std::vector<Hash128>>& leaves,
                    const VerifyOptions& options, VerifyReport& report) {
  return RangeVerifier(fs, directory, base, inventory, leaves, options, report).Run();
}

}  // namespace tensormount
