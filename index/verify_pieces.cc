// SPDX-License-Identifier: Apache-2.0
#include "index/verify_pieces.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <optional>
#include <thread>

#include "base/checked.h"
#include "index/file_cache.h"
#include "shard/copy_plan.h"
#include "shard/leaf_hash.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kBlockBytes = std::uint64_t{1} << 20;
static_assert(kBlockBytes % kLeafBytes == 0);
constexpr std::uint32_t kNone = UINT32_MAX;

// Something to read and compare.
struct Task {
  std::uint32_t tensor = kNone;  // Ordinal, and row of its extents;
  std::uint32_t row = 0;
  std::uint32_t object = kNone;  // or an object; or
  std::uint32_t extra = kNone;   // an extra piece.
};

struct Piece {
  std::string object;
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  bool has_hash = true;
  Hash128 hash;
  std::uint32_t manifest = 0;
  std::uint64_t first_leaf = 0;
};

// The digest of a chunk from its bytes in order.
class ChunkDigest {
 public:
  ChunkDigest(const TensorMeta& meta, const Region& bytes) : tensor_bytes_(meta.bytes()) {
    const Dims shape = ByteShape(meta.dtype(), meta.shape());
    PlacedBox whole{Box::Whole(shape), 0, Dims::Filled(shape.rank(), 1)};
    for (int a = shape.rank() - 2; a >= 0; --a) {
      whole.strides[a] = whole.strides[a + 1] * shape[a + 1];
    }
    for (const PlacedBox& placed : PlacePacked(bytes, 0)) {
      copies_.push_back(PlanCopy(placed.box, placed, whole));
    }
  }

  // Calls load(at) for the memory of byte `at` of the chunk, which gives a pointer and how many
  // bytes follow it there; nullptr ends it.
  template <typename Load>
  bool Walk(Load load) {
    bool going = true;
    for (const StridedCopy& copy : copies_) {
      copy.ForEachRun([&](std::int64_t src, std::int64_t position, std::uint64_t size) {
        auto at = static_cast<std::uint64_t>(src);
        auto to = static_cast<std::uint64_t>(position);
        while (going && size > 0) {
          std::uint64_t n = 0;
          const std::byte* data = load(at, n);
          if (data == nullptr) {
            going = false;
            break;
          }
          n = std::min(n, size);
          digest_.AddRun(to, Crc64Extend(0, data, n), n);
          at += n;
          to += n;
          size -= n;
        }
      });
    }
    return going;
  }
  Crc64 Finish() const { return digest_.Finish(tensor_bytes_); }

 private:
  const std::uint64_t tensor_bytes_;
  std::vector<StridedCopy> copies_;
  DigestAccumulator digest_;
};

class PieceVerifier {
 public:
  PieceVerifier(FileSystem& fs, const std::string& directory, const Content& content,
                const std::map<std::string, std::vector<Hash128>>& leaves,
                const VerifyOptions& options, VerifyReport& report)
      : directory_(directory),
        content_(content),
        leaves_(leaves),
        options_(options),
        report_(report),
        files_(fs, 256),
        digests_(content.tensors.size()) {}

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
    std::sort(damages_.begin(), damages_.end(), [](const auto& a, const auto& b) {
      return a.file != b.file ? a.file < b.file : a.offset < b.offset;
    });
    for (VerifyReport::Damage& damage : damages_) report_.damages.push_back(std::move(damage));
    return Status();
  }

 private:
  struct TensorDigest {
    std::atomic<Crc64> value{0};
    std::atomic<bool> whole{true};
  };

  void MakeTasks() {
    for (std::uint32_t t = 0; t < content_.tensors.size(); ++t) {
      const auto rows = static_cast<std::uint32_t>(content_.tensors[t].extents.size());
      for (std::uint32_t r = 0; r < rows; ++r) tasks_.push_back({.tensor = t, .row = r});
    }
    for (std::uint32_t i = 0; i < content_.objects.size(); ++i) tasks_.push_back({.object = i});
    for (std::uint32_t i = 0; i < content_.extras.size(); ++i) tasks_.push_back({.extra = i});
    for (const FileRecord& file : content_.files) total_ += file.length;
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
    std::vector<std::byte> buffer(kBlockBytes);
    for (std::size_t i = next_++; i < tasks_.size(); i = next_++) Check(tasks_[i], buffer);
  }

  void Damage(const Piece& piece, std::uint64_t at, std::string reason) {
    std::lock_guard lock(mutex_);
    damages_.push_back(
        {.object = piece.object,
         .file = piece.file < content_.files.size() ? content_.files[piece.file].name : "index",
         .offset = piece.offset + at,
         .reason = std::move(reason)});
  }

  void Check(const Task& task, std::vector<std::byte>& buffer) {
    if (task.tensor == kNone) {
      Piece piece;
      if (task.object != kNone) {
        const ObjectContent& o = content_.objects[task.object];
        piece = {.object = "object " + o.key,
                 .file = o.file,
                 .offset = o.offset,
                 .length = o.length,
                 .hash = o.hash,
                 .manifest = o.manifest,
                 .first_leaf = o.first_leaf};
        if (o.grid.rank() > 0) piece.object += " part " + o.index.ToString();
      } else {
        const ExtraPiece& e = content_.extras[task.extra];
        piece = {.object = "header",
                 .file = e.file,
                 .offset = e.offset,
                 .length = e.length,
                 .hash = e.hash,
                 .manifest = e.manifest,
                 .first_leaf = e.first_leaf};
      }
      (void)CheckPiece(piece, nullptr, buffer);  // Says so itself.
      return;
    }
    const TensorContent& tensor = content_.tensors[task.tensor];
    TensorDigest& digest = digests_[task.tensor];
    Result<ChunkRecord> chunk = tensor.extents.At(task.row);
    Result<Region> bytes =
        chunk.ok() ? ByteRegion(tensor.meta.dtype(), tensor.meta.shape(), chunk.value().region)
                   : Result<Region>(chunk.status());
    if (!bytes.ok()) {
      digest.whole = false;
      Damage({.object = "tensor " + tensor.meta.key(), .file = kNone}, 0, bytes.status().message());
      return;
    }
    const ChunkRecord& c = chunk.value();
    const Piece piece = {.object = "tensor " + tensor.meta.key() + " " + c.region.ToString(),
                         .file = c.file,
                         .offset = c.offset,
                         .length = c.length,
                         .has_hash = c.has_hash,
                         .hash = c.hash,
                         .manifest = c.manifest,
                         .first_leaf = c.first_leaf};
    std::optional<ChunkDigest> walk;
    if (tensor.has_digest) walk.emplace(tensor.meta, bytes.value());
    if (CheckPiece(piece, walk ? &*walk : nullptr, buffer)) {
      if (walk) digest.value ^= walk->Finish();
    } else {
      digest.whole = false;
    }
  }

  // False where it is damaged, after saying so. Reads every byte once.
  bool CheckPiece(const Piece& piece, ChunkDigest* digest, std::vector<std::byte>& buffer) {
    if (piece.file >= content_.files.size()) {
      Damage(piece, 0, "its file is not in the table");
      return false;
    }
    const FileRecord& record = content_.files[piece.file];
    Result<std::shared_ptr<OpenDataFile>> file = files_.Open(
        record.placement == Placement::kForeign ? record.name : JoinPath(directory_, record.name));
    if (!file.ok()) {
      Damage(piece, 0,
             file.status().code() == Code::kNotFound ? "the file is missing"
                                                     : file.status().message());
      return false;
    }
    std::vector<Hash128> leaves;
    leaves.reserve(LeafCount(piece.length));
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    bool failed = false;
    // Loads the block at `end`, hashing it; blocks are asked for in order.
    const auto load_next = [&] {
      const std::uint64_t size = std::min<std::uint64_t>(kBlockBytes, piece.length - end);
      Result<std::size_t> got =
          file.value()->file().ReadAt(piece.offset + end, buffer.data(), size);
      if (!got.ok() || got.value() != size) {
        failed = true;
        Damage(piece, got.ok() ? end + got.value() : end,
               got.ok() ? "the file ends here" : got.status().message());
        return;
      }
      for (std::uint64_t at = 0; at < size; at += kLeafBytes) {
        leaves.push_back(Xxh3(buffer.data() + at, std::min(kLeafBytes, size - at)));
      }
      begin = end;
      end += size;
      const std::uint64_t done = done_ += size;
      if (options_.progress) options_.progress(done, total_);
    };
    if (digest != nullptr) {
      digest->Walk([&](std::uint64_t at, std::uint64_t& n) -> const std::byte* {
        while (at >= end && !failed) load_next();
        if (failed) return nullptr;
        n = end - at;
        return buffer.data() + (at - begin);
      });
    }
    while (end < piece.length && !failed) load_next();
    if (failed) return false;
    if (!piece.has_hash || ChunkRoot(leaves, piece.length) == piece.hash) return true;
    SayWhere(piece, leaves);
    return false;
  }

  // Names the first byte of the first leaf that differs.
  void SayWhere(const Piece& piece, const std::vector<Hash128>& leaves) {
    if (piece.manifest < content_.manifests.size()) {
      const auto known = leaves_.find(content_.manifests[piece.manifest]);
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
      const TensorContent& tensor = content_.tensors[t];
      if (!tensor.has_digest || !digests_[t].whole || digests_[t].value == tensor.digest) continue;
      damages_.push_back({.object = "tensor " + tensor.meta.key(),
                          .file = std::string(kIndexName),
                          .offset = 0,
                          .reason = "its digest is not that of its bytes"});
    }
  }

  const std::string& directory_;
  const Content& content_;
  const std::map<std::string, std::vector<Hash128>>& leaves_;
  const VerifyOptions& options_;
  VerifyReport& report_;
  OpenedCheckpoint::Files files_;
  std::vector<Task> tasks_;
  std::vector<TensorDigest> digests_;
  std::atomic<bool> out_of_memory_{false};
  std::atomic<std::size_t> next_{0};
  std::atomic<std::uint64_t> done_{0};
  std::uint64_t total_ = 0;
  std::mutex mutex_;
  std::vector<VerifyReport::Damage> damages_;
};

}  // namespace

Status VerifyPieces(FileSystem& fs, const std::string& directory, const Content& content,
                    const std::map<std::string, std::vector<Hash128>>& leaves,
                    const VerifyOptions& options, VerifyReport& report) {
  return PieceVerifier(fs, directory, content, leaves, options, report).Run();
}

}  // namespace tensormount
