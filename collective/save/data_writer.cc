// SPDX-License-Identifier: Apache-2.0
#include "collective/save/data_writer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "collective/save/packed_source.h"
#include "shard/leaf_hash.h"
#include "shard/safetensors.h"

namespace tensormount {
namespace {

// Hashed, digested and written block by block: a block stays in the second-level cache meanwhile.
constexpr std::size_t kBlockBytes = 256 * 1024;
// Small pieces are put together to writes of this size.
constexpr std::size_t kBufferBytes = 1024 * 1024;
// The device begins with what was written when there is this much of it, so that it works while
// the rest is hashed and copied.
constexpr std::uint64_t kWritebackBytes = 8 * 1024 * 1024;
// Files of which some are still being written back when the sync of the first is asked for.
constexpr std::size_t kFilesBeforeSync = 64;

// Appends to a file: large pieces straight from where they are, small ones through a buffer.
class FileAppender {
 public:
  FileAppender(File& file, std::uint64_t offset) : file_(file), at_(offset), started_(offset) {}

  std::uint64_t offset() const { return at_ + buffer_.size(); }
  Status Append(const void* data, std::size_t size) {
    if (size >= kBlockBytes / 2) {
      TENSORMOUNT_RETURN_IF_ERROR(Flush());
      return Write(data, size);
    }
    buffer_.append(static_cast<const char*>(data), size);
    return buffer_.size() >= kBufferBytes ? Flush() : Status();
  }
  Status Flush() {
    if (buffer_.empty()) return Status();
    TENSORMOUNT_RETURN_IF_ERROR(Write(buffer_.data(), buffer_.size()));
    buffer_.clear();
    return Status();
  }

 private:
  Status Write(const void* data, std::size_t size) {
    TENSORMOUNT_RETURN_IF_ERROR(file_.WriteAt(at_, data, size));
    at_ += size;
    if (at_ - started_ >= kWritebackBytes) {
      file_.StartWriteback(started_, at_ - started_);
      started_ = at_;
    }
    return Status();
  }

  File& file_;
  std::uint64_t at_;
  std::uint64_t started_;
  std::string buffer_;
};

class DataWriter {
 public:
  DataWriter(FileSystem& fs, const Staging& staging, const StateDict& state,
             const GlobalLayout& layout, const SavePlan& plan, int rank,
             std::atomic<std::uint64_t>* progress)
      : fs_(fs),
        staging_(staging),
        state_(state),
        layout_(layout),
        plan_(plan),
        mine_(plan.ranks[static_cast<std::size_t>(rank)]),
        rank_(rank),
        progress_(progress),
        scratch_(std::make_unique<std::byte[]>(kBlockBytes)) {
    out_.content.info.uuid = staging.uuid;
  }

  Result<WrittenData> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(WriteTensorFiles());
    TENSORMOUNT_RETURN_IF_ERROR(WriteSafetensors(Placement::kRankShard));
    TENSORMOUNT_RETURN_IF_ERROR(WriteSafetensors(Placement::kSafetensors));
    TENSORMOUNT_RETURN_IF_ERROR(WritePack());
    TENSORMOUNT_RETURN_IF_ERROR(SyncOpen());
    for (const std::uint32_t t : mine_.recorded) TensorRecord(t);
    for (auto& [ordinal, tensor] : tensors_) {
      tensor.extents.Sort();
      out_.content.tensors.push_back(std::move(tensor));
    }
    return std::move(out_);
  }

 private:
  struct OpenFile {
    std::unique_ptr<File> file;
    bool seal = false;
  };

  void Written(std::uint64_t bytes) {
    out_.bytes += bytes;
    if (progress_ != nullptr) progress_->fetch_add(bytes, std::memory_order_relaxed);
  }

  TensorContent& TensorRecord(std::uint32_t t) {
    auto at = tensors_.find(t);
    if (at == tensors_.end()) {
      at = tensors_.emplace(t, TensorContent(layout_.tensors[t].meta)).first;
      at->second.has_digest = true;
    }
    return at->second;
  }

  std::vector<PlannedChunk> ChunksOf(Placement placement) const {
    std::vector<PlannedChunk> chunks;
    for (const PlannedChunk& c : mine_.chunks) {
      if (c.placement == placement) chunks.push_back(c);
    }
    return chunks;
  }

  // Naturally aligned without gaps: wide elements first.
  void SortByAlignment(std::vector<PlannedChunk>& chunks) const {
    const auto alignment = [&](const PlannedChunk& c) {
      const std::uint32_t bits = layout_.tensors[c.tensor].meta.bits();
      return bits % 8 == 0 ? bits : 1;
    };
    std::stable_sort(
        chunks.begin(), chunks.end(),
        [&](const PlannedChunk& a, const PlannedChunk& b) { return alignment(a) > alignment(b); });
  }

  std::uint32_t AddFile(std::string name, Placement placement, std::uint64_t length) {
    out_.content.files.push_back({std::move(name), placement, length, {}});
    return static_cast<std::uint32_t>(out_.content.files.size() - 1);
  }

  std::string Path(const std::string& name) const { return JoinPath(staging_.directory, name); }

  void Keep(std::unique_ptr<File> file, bool seal) { open_.push_back({std::move(file), seal}); }

  // The mode is durable with the data: sealed first, then synced.
  Status SyncOpen() {
    for (OpenFile& f : open_) {
      if (f.seal) TENSORMOUNT_RETURN_IF_ERROR(f.file->Seal());
    }
    for (OpenFile& f : open_) {
      TENSORMOUNT_RETURN_IF_ERROR(f.file->Sync());
      TENSORMOUNT_RETURN_IF_ERROR(f.file->Close());
    }
    open_.clear();
    return Status();
  }

  // Writes a chunk at the appender's place and records it.
  Status WriteChunk(const PlannedChunk& chunk, std::uint32_t file, FileAppender& out) {
    TensorContent& tensor = TensorRecord(chunk.tensor);
    const Shard& shard = state_.tensors()[chunk.item].shard;
    Result<PackedSource> source = PackedSource::Make(shard);
    if (!source.ok()) return source.status().WithContext("tensor " + tensor.meta.key());
    ChunkRecord record;
    record.region = chunk.region;
    record.file = file;
    record.offset = out.offset();
    record.length = chunk.bytes;
    record.first_leaf = out_.leaves.size();
    LeafHasher hasher;
    for (std::uint64_t done = 0; done < chunk.bytes;) {
      const auto n =
          static_cast<std::size_t>(std::min<std::uint64_t>(kBlockBytes, chunk.bytes - done));
      const std::byte* data = source.value().Fetch(chunk.begin + done, n, scratch_.get());
      hasher.Update(data, n);
      tensor.digest ^= source.value().Digest(chunk.begin + done, n, data);
      TENSORMOUNT_RETURN_IF_ERROR(out.Append(data, n));
      done += n;
      Written(n);
    }
    record.hash = TakeLeaves(hasher);
    tensor.extents.Append(record);
    return Status();
  }

  Hash128 TakeLeaves(LeafHasher& hasher) {
    hasher.Finish();
    out_.leaves.insert(out_.leaves.end(), hasher.leaves().begin(), hasher.leaves().end());
    return hasher.Root();
  }

  Status WriteTensorFiles() {
    const std::vector<PlannedChunk> chunks = ChunksOf(Placement::kTensorFile);
    for (std::size_t from = 0; from < chunks.size();) {
      const std::uint32_t t = chunks[from].tensor;
      const bool shared = plan_.writers[t] > 1;
      const std::string name = TensorFileName(staging_, t);
      TENSORMOUNT_ASSIGN_OR_RETURN(
          std::unique_ptr<File> file,
          shared ? fs_.OpenShared(Path(name)) : fs_.CreateExclusive(Path(name)));
      const std::uint32_t number =
          AddFile(name, Placement::kTensorFile, layout_.tensors[t].meta.bytes());
      for (; from < chunks.size() && chunks[from].tensor == t; ++from) {
        FileAppender out(*file, chunks[from].offset);
        TENSORMOUNT_RETURN_IF_ERROR(WriteChunk(chunks[from], number, out));
        TENSORMOUNT_RETURN_IF_ERROR(out.Flush());
      }
      Keep(std::move(file), !shared);
      if (open_.size() >= kFilesBeforeSync) TENSORMOUNT_RETURN_IF_ERROR(SyncOpen());
    }
    return Status();
  }

  // The entry of a chunk in the header of a rank shard: parts are named KEY#n, dtypes that the
  // format lacks are bytes, and the metadata say what it really is.
  SafetensorsEntry Entry(const PlannedChunk& chunk, std::map<std::string, std::string>& metadata) {
    const TensorMeta& meta = layout_.tensors[chunk.tensor].meta;
    SafetensorsEntry entry;
    entry.key = meta.key();
    entry.dtype = meta.dtype();
    if (chunk.placement == Placement::kSafetensors) {
      entry.shape = meta.shape();
      return entry;
    }
    entry.key += "#" + std::to_string(chunk.part);
    if (InfoOf(meta.dtype()).safetensors.empty()) {
      entry.dtype = DType::kU8;
      entry.shape = Dims{static_cast<std::int64_t>(chunk.bytes)};
    } else if (chunk.region.is_flat()) {
      entry.shape = Dims{chunk.region.volume()};
    } else {
      entry.shape = chunk.region.box().extent();
    }
    metadata[entry.key] = std::string(InfoOf(meta.dtype()).name) + " " + meta.shape().ToString() +
                          " " + chunk.region.ToString();
    return entry;
  }

  Status WriteSafetensors(Placement placement) {
    std::vector<PlannedChunk> chunks = ChunksOf(placement);
    if (chunks.empty()) return Status();
    SortByAlignment(chunks);
    std::map<std::string, std::string> metadata;
    std::vector<SafetensorsEntry> entries;
    if (placement == Placement::kSafetensors) {
      metadata["format"] = "pt";
      // Tensors without cells belong into a file that is the whole model.
      for (const std::uint32_t t : mine_.recorded) {
        const TensorMeta& meta = layout_.tensors[t].meta;
        entries.push_back({meta.key(), meta.dtype(), meta.shape(), 0, 0});
      }
    } else {
      metadata["tensormount"] = "rank shard of checkpoint " + staging_.uuid.ToString();
    }
    for (const PlannedChunk& chunk : chunks) entries.push_back(Entry(chunk, metadata));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string header,
                                 MakeSafetensorsHeader(entries, metadata));

    const std::string name = RankShardName(staging_, rank_);
    TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs_.CreateExclusive(Path(name)));
    const std::uint32_t number = AddFile(name, placement, 0);
    FileAppender out(*file, 0);
    ExtraPiece piece;
    piece.file = number;
    piece.length = header.size();
    piece.first_leaf = out_.leaves.size();
    LeafHasher hasher;
    hasher.Update(header.data(), header.size());
    piece.hash = TakeLeaves(hasher);
    out_.content.extras.push_back(piece);
    Written(header.size());
    TENSORMOUNT_RETURN_IF_ERROR(out.Append(header.data(), header.size()));
    for (const PlannedChunk& chunk : chunks) {
      TENSORMOUNT_RETURN_IF_ERROR(WriteChunk(chunk, number, out));
    }
    TENSORMOUNT_RETURN_IF_ERROR(out.Flush());
    out_.content.files[number].length = out.offset();
    Keep(std::move(file), true);
    return Status();
  }

  Status WritePack() {
    std::vector<PlannedChunk> chunks = ChunksOf(Placement::kPack);
    if (chunks.empty() && mine_.objects.empty()) return Status();
    SortByAlignment(chunks);
    const std::string name = PackName(staging_, rank_);
    TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs_.CreateExclusive(Path(name)));
    const std::uint32_t number = AddFile(name, Placement::kPack, 0);
    FileAppender out(*file, 0);
    for (const PlannedChunk& chunk : chunks) {
      TENSORMOUNT_RETURN_IF_ERROR(WriteChunk(chunk, number, out));
    }
    for (const std::uint32_t o : mine_.objects) {
      TENSORMOUNT_RETURN_IF_ERROR(WriteObject(layout_.objects[o], number, out));
    }
    TENSORMOUNT_RETURN_IF_ERROR(out.Flush());
    out_.content.files[number].length = out.offset();
    Keep(std::move(file), true);
    return Status();
  }

  Status WriteObject(const LayoutObject& object, std::uint32_t file, FileAppender& out) {
    const auto holder = std::find_if(object.holders.begin(), object.holders.end(),
                                     [&](const Holder& h) { return h.rank == rank_; });
    if (holder == object.holders.end()) {
      return Status(Code::kInternal, "object " + object.key + " was given to a rank without it");
    }
    const std::string& bytes = state_.objects()[holder->item].bytes;
    ObjectContent record;
    record.key = object.key;
    record.index = object.index;
    record.grid = object.grid;
    record.file = file;
    record.offset = out.offset();
    record.length = bytes.size();
    record.first_leaf = out_.leaves.size();
    LeafHasher hasher;
    hasher.Update(bytes.data(), bytes.size());
    record.hash = TakeLeaves(hasher);
    out_.content.objects.push_back(std::move(record));
    Written(bytes.size());
    return out.Append(bytes.data(), bytes.size());
  }

  FileSystem& fs_;
  const Staging& staging_;
  const StateDict& state_;
  const GlobalLayout& layout_;
  const SavePlan& plan_;
  const RankPlan& mine_;
  const int rank_;
  std::atomic<std::uint64_t>* const progress_;
  std::unique_ptr<std::byte[]> scratch_;
  WrittenData out_;
  std::map<std::uint32_t, TensorContent> tensors_;  // By ordinal: sorted as manifests want it.
  std::vector<OpenFile> open_;
};

}  // namespace

Result<WrittenData> WriteData(FileSystem& fs, const Staging& staging, const StateDict& state,
                              const GlobalLayout& layout, const SavePlan& plan, int rank,
                              std::atomic<std::uint64_t>* progress) {
  return DataWriter(fs, staging, state, layout, plan, rank, progress).Run();
}

Status SealShared(FileSystem& fs, const Staging& staging, const SavePlan& plan, int rank) {
  for (const SharedFile& shared : plan.shared) {
    if (shared.owner != rank) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        std::unique_ptr<File> file,
        fs.OpenShared(JoinPath(staging.directory, TensorFileName(staging, shared.tensor))));
    TENSORMOUNT_RETURN_IF_ERROR(file->Seal());
    TENSORMOUNT_RETURN_IF_ERROR(file->Sync());
    TENSORMOUNT_RETURN_IF_ERROR(file->Close());
  }
  return Status();
}

std::string TensorFileName(const Staging& staging, std::uint32_t tensor) {
  return "data/" + staging.ShortId() + "-t" + std::to_string(tensor) + ".bin";
}
std::string RankShardName(const Staging& staging, int rank) {
  return "data/" + staging.ShortId() + "-r" + std::to_string(rank) + ".safetensors";
}
std::string PackName(const Staging& staging, int rank) {
  return "data/" + staging.ShortId() + "-p" + std::to_string(rank) + ".bin";
}
std::string ManifestName(int rank) { return "manifest/r" + std::to_string(rank) + ".tmm"; }

}  // namespace tensormount
