// SPDX-License-Identifier: Apache-2.0
#include "index/read/verify_ranges.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <optional>
#include <thread>

#include "base/checked.h"
#include "index/read/file_cache.h"
#include "index/read/foreign_file.h"
#include "index/read/rebuild.h"
#include "index/read/stretch_read.h"
#include "index/records/inventory.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

constexpr std::uint32_t kUnset = UINT32_MAX;

// Something to read and compare.
struct Task {
  std::uint32_t tensor = kUnset;  // Ordinal, and row of its extents;
  std::uint32_t row = 0;
  std::uint32_t object = kUnset;  // or an object; or
  std::uint32_t extra = kUnset;   // an extra piece.
};

struct HashedRange {
  std::string object;
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  bool has_hash = true;
  Hash128 hash;
  std::uint32_t manifest = 0;
  std::uint64_t first_leaf = 0;
};

class RangeVerifier {
 public:
  RangeVerifier(FileSystem& fs, const std::string& directory, const ForeignBase& base,
                const Inventory& inventory,
                const std::map<std::string, std::vector<Hash128>>& leaves,
                const VerifyOptions& options, VerifyReport& report)
      : directory_(directory),
        base_(base),
        inventory_(inventory),
        leaves_(leaves),
        options_(options),
        report_(report),
        files_(fs, 256),
        digests_(inventory.tensors.size()) {}

  Status Run() {
    MakeTasks();
    std::size_t threads = options_.threads > 0 ? static_cast<std::size_t>(options_.threads)
                                               : std::thread::hardware_concurrency();
    threads = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(1, tasks_.size()));
    std::vector<std::thread> workers;
    for (std::size_t i = 1; i < threads; ++i) workers.emplace_back([this] { WorkOrStop(); });
    WorkOrStop();
    for (std::thread& worker : workers) worker.join();
    if (out_of_memory_) return Status(Code::kResourceExhausted, "verify: out of memory");
    CompareDigests();
    report_.bytes_checked += done_;
    report_.bytes_without_hash += unhashed_;
    std::sort(damages_.begin(), damages_.end(), [](const auto& a, const auto& b) {
      return a.file != b.file ? a.file < b.file : a.offset < b.offset;
    });
    for (VerifyReport::Damage& damage : damages_) report_.damages.push_back(std::move(damage));
    return unread_;
  }

 private:
  struct TensorDigest {
    std::atomic<Crc64> value{0};
    std::atomic<bool> whole{true};
  };

  void MakeTasks() {
    for (std::uint32_t t = 0; t < inventory_.tensors.size(); ++t) {
      const auto rows = static_cast<std::uint32_t>(inventory_.tensors[t].extents.size());
      for (std::uint32_t r = 0; r < rows; ++r) tasks_.push_back({.tensor = t, .row = r});
    }
    for (std::uint32_t i = 0; i < inventory_.objects.size(); ++i) tasks_.push_back({.object = i});
    for (std::uint32_t i = 0; i < inventory_.extras.size(); ++i) tasks_.push_back({.extra = i});
    // Stretches of foreign files may overlap, and not all of such a file need belong to us.
    for (const TensorRecord& tensor : inventory_.tensors) total_ += tensor.extents.DataBytes();
    for (const ObjectRecord& object : inventory_.objects) total_ += object.length;
    for (const ExtraRange& extra : inventory_.extras) total_ += extra.length;
  }

  // A thread's body: nothing may leave it by exception.
  void WorkOrStop() {
    try {
      Work();
    } catch (const std::bad_alloc&) {
      out_of_memory_ = true;
    }
  }

  void Work() {
    StretchReader reader;
    for (std::size_t i = next_++; i < tasks_.size(); i = next_++) Check(tasks_[i], reader);
  }

  void Damage(const HashedRange& piece, std::uint64_t at, std::string reason) {
    std::lock_guard lock(mutex_);
    damages_.push_back(
        {.object = piece.object,
         .file = piece.file < inventory_.files.size() ? inventory_.files[piece.file].name : "index",
         .offset = piece.offset + at,
         .reason = std::move(reason)});
  }

  // Its bytes from `at` on could not be had.
  void Failed(const HashedRange& piece, std::uint64_t at, const Status& status) {
    if (!ProvesDamage(status)) {
      std::lock_guard lock(mutex_);
      if (unread_.ok()) unread_ = status.WithContext(piece.object);
      return;
    }
    Damage(piece, at, ReasonWithout(inventory_.files[piece.file].name, status));
  }

  void Check(const Task& task, StretchReader& reader) {
    if (task.tensor == kUnset) {
      HashedRange piece;
      if (task.object != kUnset) {
        const ObjectRecord& o = inventory_.objects[task.object];
        piece = {.object = "object " + o.key,
                 .file = o.file,
                 .offset = o.offset,
                 .length = o.length,
                 .has_hash = o.has_hash(),
                 .hash = o.hash,
                 .manifest = o.manifest,
                 .first_leaf = o.first_leaf};
        if (o.grid.rank() > 0) piece.object += " part " + o.index.ToString();
      } else {
        const ExtraRange& e = inventory_.extras[task.extra];
        piece = {.object = "header",
                 .file = e.file,
                 .offset = e.offset,
                 .length = e.length,
                 .hash = e.hash,
                 .manifest = e.manifest,
                 .first_leaf = e.first_leaf};
      }
      (void)CheckPiece(piece, {}, {}, reader);  // Says so itself.
      return;
    }
    const TensorRecord& tensor = inventory_.tensors[task.tensor];
    TensorDigest& digest = digests_[task.tensor];
    Result<ChunkRecord> chunk = tensor.extents.At(task.row);
    using Boxes = Result<std::vector<PlacedBox>>;
    Boxes boxes = chunk.ok() ? PlaceChunk(tensor.meta.dtype(), tensor.meta.shape(),
                                          chunk.value().region, 0, chunk.value().strides)
                             : Boxes(chunk.status());
    if (!boxes.ok()) {
      digest.whole = false;
      Damage({.object = "tensor " + tensor.meta.key(), .file = kNoFile}, 0,
             boxes.status().message());
      return;
    }
    const ChunkRecord& c = chunk.value();
    const HashedRange piece = {.object = "tensor " + tensor.meta.key() + " " + c.region.ToString(),
                               .file = c.file,
                               .offset = c.offset,
                               .length = c.length,
                               .has_hash = c.has_hash,
                               .hash = c.hash,
                               .manifest = c.manifest,
                               .first_leaf = c.first_leaf};
    if (!tensor.has_digest) boxes.value().clear();
    const Dims shape = ByteShape(tensor.meta.dtype(), tensor.meta.shape());
    const std::optional<Crc64> contribution = CheckPiece(piece, boxes.value(), shape, reader);
    if (contribution) {
      digest.value ^= *contribution;
    } else {
      digest.whole = false;
    }
  }

  // What the boxes contribute to the digest. Nothing where the piece is damaged, after saying so.
  // Reads every byte once.
  std::optional<Crc64> CheckPiece(const HashedRange& piece, std::span<const PlacedBox> boxes,
                                  const Dims& byte_shape, StretchReader& reader) {
    if (piece.file >= inventory_.files.size()) {
      Damage(piece, 0, "its file is not in the table");
      return std::nullopt;
    }
    const FileRecord& record = inventory_.files[piece.file];
    const bool foreign = record.placement == Placement::kForeign;
    Result<std::shared_ptr<OpenDataFile>> file =
        foreign ? files_.Open("foreign/" + record.name,
                              [&] { return OpenForeignFile(files_.fs, base_, record, true); })
                : files_.Open(JoinPath(directory_, record.name),
                              [&] { return OpenListedFile(files_.fs, directory_, record.name); });
    if (!file.ok()) {
      // Of a foreign file that was said once for all of it.
      if (!foreign) Failed(piece, 0, file.status());
      return std::nullopt;
    }
    StretchReader::Findings found;
    const Status read = reader.Read(
        file.value()->file(), piece.offset, piece.length, boxes, byte_shape,
        [&](std::uint64_t bytes) {
          const std::uint64_t done = done_ += bytes;
          if (options_.progress) options_.progress(std::min(done, total_), total_);
        },
        found);
    if (foreign) {
      const Result<FileInfo> now = file.value()->file().Stat();
      if (!now.ok()) {
        Failed(piece, 0, now.status());
        return std::nullopt;
      }
      const Status still = CheckUnchanged(record, now.value(), true);
      if (!still.ok()) {
        Damage(piece, 0, still.message());
        return std::nullopt;
      }
    }
    if (!read.ok()) {
      Failed(piece, found.bytes, read);
      return std::nullopt;
    }
    if (!piece.has_hash) {
      unhashed_ += piece.length;
    } else if (ChunkRoot(found.leaves, piece.length) != piece.hash) {
      SayWhere(piece, found.leaves);
      return std::nullopt;
    }
    return found.contribution;
  }

  // Names the first byte of the first leaf that differs.
  void SayWhere(const HashedRange& piece, const std::vector<Hash128>& leaves) {
    if (piece.manifest < inventory_.manifests.size()) {
      const auto known = leaves_.find(inventory_.manifests[piece.manifest]);
      if (known != leaves_.end() &&
          RangeWithin(piece.first_leaf, leaves.size(), known->second.size())) {
        const std::span<const Hash128> stored =
            std::span(known->second).subspan(piece.first_leaf, leaves.size());
        if (ChunkRoot(stored, piece.length) == piece.hash) {
          std::size_t differing = 0;
          std::optional<std::uint64_t> first;
          for (std::size_t i = 0; i < leaves.size(); ++i) {
            if (leaves[i] == stored[i]) continue;
            ++differing;
            if (!first) first = i * kLeafBytes;
          }
          std::string reason = "checksum differs";
          if (differing > 1) {
            reason += " (" + std::to_string(differing) + " leaves of 64 KiB)";
          }
          Damage(piece, first.value_or(0), std::move(reason));
          return;
        }
      }
    }
    Damage(piece, 0, "checksum differs (which leaf is not known)");
  }

  void CompareDigests() {
    for (std::size_t t = 0; t < digests_.size(); ++t) {
      const TensorRecord& tensor = inventory_.tensors[t];
      if (!tensor.has_digest || !digests_[t].whole || digests_[t].value == tensor.digest) continue;
      damages_.push_back({.object = "tensor " + tensor.meta.key(),
                          .file = std::string(kIndexName),
                          .offset = 0,
                          .reason = "its digest is not that of its bytes"});
    }
  }

  const std::string& directory_;
  const ForeignBase& base_;
  const Inventory& inventory_;
  const std::map<std::string, std::vector<Hash128>>& leaves_;
  const VerifyOptions& options_;
  VerifyReport& report_;
  OpenedCheckpoint::Files files_;
  std::vector<Task> tasks_;
  std::vector<TensorDigest> digests_;
  std::atomic<bool> out_of_memory_{false};
  std::atomic<std::size_t> next_{0};
  std::atomic<std::uint64_t> done_{0};
  std::atomic<std::uint64_t> unhashed_{0};
  std::uint64_t total_ = 0;
  std::mutex mutex_;
  std::vector<VerifyReport::Damage> damages_;
  Status unread_;  // Why some piece was not checked.
};

}  // namespace

bool ProvesDamage(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
    case Code::kPermissionDenied:
    case Code::kResourceExhausted:
    case Code::kUnavailable:
    case Code::kDeadlineExceeded:
    case Code::kBusy:
    case Code::kStale:
    case Code::kCancelled:
      return false;
    default:
      return true;
  }
}

std::string ReasonWithout(std::string_view file, const Status& status) {
  const std::string prefix = std::string(file) + ": ";
  const std::string_view why = status.message();
  return std::string(why.starts_with(prefix) ? why.substr(prefix.size()) : why);
}

Result<VerifyReport> Concluded(VerifyReport report, const Status& unread) {
  if (unread.ok()) return report;
  if (report.damages.empty()) {
    // kStale would mean that the checkpoint was deleted.
    return unread.code() == Code::kStale ? Status(Code::kUnavailable, unread.message()) : unread;
  }
  report.warnings.push_back("not all could be checked: " + unread.message());
  return report;
}

Status VerifyRanges(FileSystem& fs, const std::string& directory, const ForeignBase& base,
                    const Inventory& inventory,
                    const std::map<std::string, std::vector<Hash128>>& leaves,
                    const VerifyOptions& options, VerifyReport& report) {
  return RangeVerifier(fs, directory, base, inventory, leaves, options, report).Run();
}

}  // namespace tensormount
