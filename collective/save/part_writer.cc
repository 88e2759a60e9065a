// SPDX-License-Identifier: Apache-2.0
// Writes files of one rank's data: chunks in the order of the task, hashed by leaves and by digest
// in the same pass, while each block is in the second-level cache. Writeback starts early, so that
// the fsync at the end is short.
#include "collective/save/part_writer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/log.h"
#include "device/device_hashes.h"
#include "shard/chunk_accumulator.h"
#include "shard/safetensors.h"

namespace tensormount {
namespace {

// Size of the blocks that are hashed, digested and written: a block stays in the second-level cache
// meanwhile. Blocks end at multiples of this in the file: the page cache keeps one aligned write as
// one large page, so a reader that maps the file takes one page fault instead of several. For
// larger blocks see docs/performance.md.
constexpr std::size_t kCopyBlockBytes = BlockReader::kBlockBytes;
// Small pieces are combined into writes of this size.
constexpr std::size_t kBufferBytes = 1024 * 1024;
// Writeback starts once this many bytes are written, so that the storage works while the rest is
// hashed and copied.
constexpr std::uint64_t kWritebackBytes = 8 * 1024 * 1024;
// Number of files of a rank in writeback before the first one is synced.
constexpr std::size_t kFilesBeforeSync = 64;

// Appends to a file: large pieces straight from their memory, small ones through a buffer.
class FileAppender {
 public:
  FileAppender(File& file, std::uint64_t offset) : file_(file), at_(offset), started_(offset) {}

  std::uint64_t offset() const { return at_ + buffer_.size(); }
  Status Append(const void* data, std::size_t size) {
    if (size >= kCopyBlockBytes / 2) {
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

class PartWriter {
 public:
  PartWriter(const WriteInput& input, const WriterPart& part, const std::atomic<bool>& stop)
      : fs_(input.fs),
        staging_(input.staging),
        state_(input.state),
        task_(input.task),
        part_(part),
        rank_(input.rank),
        page_hashes_(input.page_hashes),
        count_values_(input.count_values),
        progress_(input.progress),
        cancel_(input.rules.cancel),
        stop_(stop),
        files_before_sync_(
            std::max<std::size_t>(1, kFilesBeforeSync / static_cast<std::size_t>(input.writers))),
        blocks_(input.state, input.rules),
        at_begin_(blocks_.queues()) {}

  Result<WrittenPart> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(PlanBlocks());
    TENSORMOUNT_RETURN_IF_ERROR(WriteTensorFiles());
    TENSORMOUNT_RETURN_IF_ERROR(WriteSafetensors(Placement::kRankShard));
    TENSORMOUNT_RETURN_IF_ERROR(WriteSafetensors(Placement::kSafetensors));
    TENSORMOUNT_RETURN_IF_ERROR(WritePack());
    TENSORMOUNT_RETURN_IF_ERROR(SyncOpen());
    return std::move(out_);
  }

 private:
  struct OpenFile {
    std::unique_ptr<File> file;
    bool seal = false;
  };

  void CountWritten(std::uint32_t file, std::uint64_t bytes) {
    out_.bytes += bytes;
    out_.files[file].bytes += bytes;
    if (progress_ != nullptr) progress_->fetch_add(bytes, std::memory_order_relaxed);
  }

  std::vector<RankTask::Chunk> ChunksOf(Placement placement) const {
    std::vector<RankTask::Chunk> chunks;
    for (const std::uint32_t i : part_.chunks) {
      const RankTask::Chunk& c = task_.chunks[i];
      if (task_.tensors[c.tensor].placement == placement) chunks.push_back(c);
    }
    if (placement != Placement::kTensorFile) SortByAlignment(chunks);
    return chunks;
  }

  // Plans all chunks in the order of Run. Device chunks are hashed first: if a copy taken later has
  // a different hash, the caller changed the tensor during the save.
  Status PlanBlocks() {
    std::vector<BlockReader::PlannedRange> pieces;
    pieces.reserve(part_.chunks.size());
    for (const Placement placement : {Placement::kTensorFile, Placement::kRankShard,
                                      Placement::kSafetensors, Placement::kPack}) {
      for (const RankTask::Chunk& chunk : ChunksOf(placement)) {
        pieces.push_back({chunk.item, chunk.begin, chunk.bytes});
        const StateDict::TensorItem& item = state_.tensors()[chunk.item];
        if (!IsDeviceMemory(item.shard.data) || item.shard.metadata_only) continue;
        Status hashing = HashOnDevice(item.shard, chunk);
        if (hashing.code() == Code::kResourceExhausted) {
          // The device is full: the save continues without this check.
          LogNotWatched(hashing);
          hashing = Status();
          at_begin_jobs_.emplace_back();
        }
        if (!hashing.ok()) return hashing.WithContext("tensor " + item.key);
      }
    }
    blocks_.Plan(std::move(pieces));
    return Status();
  }

  Status HashOnDevice(const Shard& shard, const RankTask::Chunk& chunk) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource source, PackedSource::Make(shard));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::size_t job,
        at_begin_.Add(source.device(), source.Gather(chunk.begin, chunk.bytes), source.base(),
                      chunk.bytes, kLeafBytes));
    at_begin_jobs_.push_back(job);
    return Status();
  }

  void LogNotWatched(const Status& why) {
    if (logged_not_watched_) return;
    logged_not_watched_ = true;
    Log(LogLevel::kWarning,
        "changes to tensors during the save cannot be detected: " + why.message());
  }

  // Fails if the next device chunk has changed since the save began.
  Status CheckUnchanged(const RankTask::Chunk& chunk, std::span<const Hash128> leaves) {
    const std::optional<std::size_t> job = at_begin_jobs_[next_on_device_++];
    if (!job) return {};
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const Hash128> before, at_begin_.Get(*job));
    const auto [was, is] = std::ranges::mismatch(before, leaves);
    if (was == before.end() && is == leaves.end()) return Status();
    const auto leaf = static_cast<std::uint64_t>(was - before.begin());
    return Status(Code::kBusy, "the data changed during the save: " + chunk.region.ToString() +
                                   " differs, from byte " + std::to_string(leaf * kLeafBytes) +
                                   " on, from the bytes that the device hashed at the start");
  }

  // Sorts chunks by size of elements, the largest first, so that all are naturally aligned without
  // gaps.
  void SortByAlignment(std::vector<RankTask::Chunk>& chunks) const {
    const auto alignment = [&](const RankTask::Chunk& c) {
      const std::uint32_t bits = task_.tensors[c.tensor].meta.bits();
      return bits % 8 == 0 ? bits : 1;
    };
    std::stable_sort(chunks.begin(), chunks.end(),
                     [&](const RankTask::Chunk& a, const RankTask::Chunk& b) {
                       return alignment(a) > alignment(b);
                     });
  }

  std::uint32_t AddFile(std::string name, Placement placement, std::uint64_t length) {
    out_.files.push_back({name, 0});
    out_.inventory.files.push_back({std::move(name), placement, length, {}});
    return static_cast<std::uint32_t>(out_.inventory.files.size() - 1);
  }

  std::string Path(const std::string& name) const { return JoinPath(staging_.directory, name); }

  void Keep(std::unique_ptr<File> file, bool seal) { open_.push_back({std::move(file), seal}); }

  // Seals before it syncs, so that the file mode is durable with the data.
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

  Status CheckCancel() const {
    if (stop_.load(std::memory_order_relaxed)) return WriterStopped();
    if (cancel_ == nullptr || !cancel_->load(std::memory_order_relaxed)) return Status();
    return Status(Code::kCancelled, "the save is being cancelled");
  }

  Status WriteChunk(const RankTask::Chunk& chunk, std::uint32_t file, FileAppender& out) {
    TensorRecord& tensor = RecordOf(out_.tensors, task_, chunk.tensor);
    TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource* source, blocks_.Next());
    ChunkRecord record;
    record.region = chunk.region;
    record.file = file;
    record.offset = out.offset();
    record.length = chunk.bytes;
    record.first_leaf = out_.leaves.size();
    // Page hashes do not help chunks of a single leaf, or tensors of one axis, whose parts are long
    // runs.
    const bool pages = page_hashes_ && chunk.bytes > kLeafBytes && tensor.meta.shape().rank() >= 2;
    ChunkAccumulator accumulator(
        pages ? ChunkAccumulator::Pages::kHashed : ChunkAccumulator::Pages::kNone,
        count_values_ ? std::optional(tensor.meta.dtype()) : std::nullopt);
    for (std::uint64_t done = 0; done < chunk.bytes;) {
      TENSORMOUNT_RETURN_IF_ERROR(CheckCancel());
      const auto most = static_cast<std::size_t>(kCopyBlockBytes - out.offset() % kCopyBlockBytes);
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const std::byte> block, blocks_.Take(most));
      accumulator.Update(block.data(), block.size());
      tensor.digest ^= source->Digest(chunk.begin + done, block.size(), block.data());
      TENSORMOUNT_RETURN_IF_ERROR(out.Append(block.data(), block.size()));
      done += block.size();
      CountWritten(file, block.size());
    }
    const ChunkHashes hashes = accumulator.Finish();
    record.hash = hashes.root;
    hashes.AppendTo(out_.leaves);
    if (count_values_) AppendCountsRow(hashes.counts, out_.leaves);
    out_.paged = out_.paged || pages;
    if (source->device() != nullptr) {
      const Status unchanged = CheckUnchanged(chunk, hashes.leaves);
      if (!unchanged.ok()) {
        return unchanged.WithContext("tensor " + tensor.meta.key())
            .With({.key = tensor.meta.key()});
      }
    }
    tensor.extents.Append(record);
    return Status();
  }

  // Appends the leaf hashes of `bytes` to the list of all leaves. Returns the root of these leaves.
  Hash128 AppendLeavesOf(std::string_view bytes) {
    const ChunkHashes hashes = HashChunk(bytes.data(), bytes.size());
    hashes.AppendTo(out_.leaves);
    return hashes.root;
  }

  Status WriteTensorFiles() {
    const std::vector<RankTask::Chunk> chunks = ChunksOf(Placement::kTensorFile);
    for (std::size_t from = 0; from < chunks.size();) {
      const std::uint32_t t = chunks[from].tensor;
      const bool shared = task_.tensors[t].shared;
      const std::string name = TensorFileName(staging_, task_.tensors[t].file);
      TENSORMOUNT_ASSIGN_OR_RETURN(
          std::unique_ptr<File> file,
          shared ? fs_.OpenShared(Path(name)) : fs_.CreateExclusive(Path(name)));
      const std::uint32_t number =
          AddFile(name, Placement::kTensorFile, task_.tensors[t].meta.bytes());
      for (; from < chunks.size() && chunks[from].tensor == t; ++from) {
        FileAppender out(*file, chunks[from].offset);
        TENSORMOUNT_RETURN_IF_ERROR(WriteChunk(chunks[from], number, out));
        TENSORMOUNT_RETURN_IF_ERROR(out.Flush());
      }
      Keep(std::move(file), !shared);
      if (open_.size() >= files_before_sync_) TENSORMOUNT_RETURN_IF_ERROR(SyncOpen());
    }
    return Status();
  }

  // The entry of a chunk in the header of a safetensors file. In a rank shard, parts are named
  // KEY#n; a dtype that the format lacks is stored as bytes, and the metadata give the real dtype.
  SafetensorsEntry Entry(const RankTask::Chunk& chunk,
                         std::map<std::string, std::string>& metadata) {
    const TensorMeta& meta = task_.tensors[chunk.tensor].meta;
    SafetensorsEntry entry;
    entry.key = meta.key();
    entry.dtype = meta.dtype();
    if (task_.tensors[chunk.tensor].placement == Placement::kSafetensors) {
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
    const std::vector<RankTask::Chunk> chunks = ChunksOf(placement);
    if (chunks.empty()) return Status();
    std::map<std::string, std::string> metadata;
    std::vector<SafetensorsEntry> entries;
    if (placement == Placement::kSafetensors) {
      metadata["format"] = "pt";
      // A file that is the whole model also lists tensors without cells.
      for (const RankTask::Tensor& tensor : task_.tensors) {
        if (!tensor.empty) continue;
        const TensorMeta& meta = tensor.meta;
        entries.push_back({meta.key(), meta.dtype(), meta.shape(), 0, 0});
      }
    } else {
      metadata["tensormount"] = "rank shard of checkpoint " + staging_.uuid.ToString();
    }
    for (const RankTask::Chunk& chunk : chunks) entries.push_back(Entry(chunk, metadata));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string header,
                                 MakeSafetensorsHeader(entries, metadata));

    const std::string name = RankShardName(staging_, rank_, part_.shard);
    TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs_.CreateExclusive(Path(name)));
    const std::uint32_t number = AddFile(name, placement, 0);
    FileAppender out(*file, 0);
    ExtraRange piece;
    piece.file = number;
    piece.length = header.size();
    piece.first_leaf = out_.leaves.size();
    piece.hash = AppendLeavesOf(header);
    out_.inventory.extras.push_back(piece);
    CountWritten(number, header.size());
    TENSORMOUNT_RETURN_IF_ERROR(out.Append(header.data(), header.size()));
    for (const RankTask::Chunk& chunk : chunks) {
      TENSORMOUNT_RETURN_IF_ERROR(WriteChunk(chunk, number, out));
    }
    TENSORMOUNT_RETURN_IF_ERROR(out.Flush());
    out_.inventory.files[number].length = out.offset();
    Keep(std::move(file), true);
    return Status();
  }

  Status WritePack() {
    const std::vector<RankTask::Chunk> chunks = ChunksOf(Placement::kPack);
    if (chunks.empty() && part_.objects.empty()) return Status();
    const std::string name = PackName(staging_, rank_);
    TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs_.CreateExclusive(Path(name)));
    const std::uint32_t number = AddFile(name, Placement::kPack, 0);
    FileAppender out(*file, 0);
    for (const RankTask::Chunk& chunk : chunks) {
      TENSORMOUNT_RETURN_IF_ERROR(WriteChunk(chunk, number, out));
    }
    for (const std::uint32_t item : part_.objects) {
      TENSORMOUNT_RETURN_IF_ERROR(WriteObject(state_.objects()[item], number, out));
    }
    TENSORMOUNT_RETURN_IF_ERROR(out.Flush());
    out_.inventory.files[number].length = out.offset();
    Keep(std::move(file), true);
    return Status();
  }

  Status WriteObject(const StateDict::ObjectItem& object, std::uint32_t file, FileAppender& out) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckCancel());
    const std::string& bytes = object.bytes;
    ObjectRecord record;
    record.key = object.key;
    record.index = object.place.index;
    record.grid = object.place.grid;
    record.file = file;
    record.offset = out.offset();
    record.length = bytes.size();
    record.first_leaf = out_.leaves.size();
    record.hash = AppendLeavesOf(bytes);
    out_.inventory.objects.push_back(std::move(record));
    CountWritten(file, bytes.size());
    return out.Append(bytes.data(), bytes.size());
  }

  FileSystem& fs_;
  const Staging& staging_;
  const StateDict& state_;
  const RankTask& task_;
  const WriterPart& part_;
  const int rank_;
  const bool page_hashes_;
  const bool count_values_;
  std::atomic<std::uint64_t>* const progress_;
  const std::atomic<bool>* const cancel_;
  const std::atomic<bool>& stop_;
  const std::size_t files_before_sync_;
  BlockReader blocks_;
  DeviceHashes at_begin_;
  // Hash jobs of device chunks in the order of writing; an entry is empty if the device had no
  // memory for the job.
  std::vector<std::optional<std::size_t>> at_begin_jobs_;
  bool logged_not_watched_ = false;
  std::size_t next_on_device_ = 0;
  WrittenPart out_;
  std::vector<OpenFile> open_;
};

}  // namespace

TensorRecord& RecordOf(std::map<std::uint32_t, TensorRecord>& tensors, const RankTask& task,
                       std::uint32_t t) {
  auto at = tensors.find(t);
  if (at == tensors.end()) {
    at = tensors.emplace(t, TensorRecord(task.tensors[t].meta)).first;
    at->second.has_digest = true;
  }
  return at->second;
}

Status WriterStopped() { return Status(Code::kCancelled, "another writer of this rank failed"); }

Result<WrittenPart> WritePart(const WriteInput& input, const WriterPart& part,
                              const std::atomic<bool>& stop) {
  return PartWriter(input, part, stop).Run();
}

}  // namespace tensormount
