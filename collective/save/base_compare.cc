// SPDX-License-Identifier: Apache-2.0
// Cuts a rank's chunks into ranges and compares each range either by leaf hashes of a chunk of the
// base or with the stored bytes. Device hashes are requested first, so that devices work while the
// host compares.
#include "collective/save/base_compare.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "collective/save/extent_match.h"
#include "device/device_hashes.h"
#include "index/read/rebuild.h"
#include "index/records/manifest.h"
#include "shard/chunk_accumulator.h"
#include "shard/leaf_hash.h"
#include "shard/page_hash.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kCompareBytes = std::uint64_t{1} << 20;
// The most bytes of a device chunk that are copied to the host for comparison: the ends of a few
// leaves.
constexpr std::uint64_t kMostBrought = 16 * kLeafBytes;
constexpr std::size_t kMostManifests = 32;

// A part of the packed bytes of a shard that this rank would write.
struct ComparedRange {
  std::uint32_t chunk = 0;  // Position in RankTask::chunks.
  std::uint64_t begin = 0;  // Offset in the packed bytes of the chunk's item.
  std::uint64_t bytes = 0;
  // Set if the range is compared by leaves: the chunk of the base that has these leaves. `leaf` is
  // the number of the first of them in that chunk.
  std::optional<ChunkRecord> of = {};
  std::uint64_t leaf = 0;
  std::optional<std::size_t> job = {};  // Job in hashes_, if a device hashes the range.
  // Whether the range is copied from a device and compared on the host.
  bool brought = false;
};

struct TensorComparison {
  std::optional<TensorEntry> entry;  // Empty: the base has no such tensor.
  bool differs = false;
  // The base's data file with the tensor; of several files the last one seen.
  std::optional<std::uint32_t> file;
  std::uint64_t by_leaf = 0;
  std::uint64_t by_comparison = 0;
};

// Leaf hashes of chunks of the base. Each list is verified by the chunk's hash.
class BaseLeaves {
 public:
  BaseLeaves(FileSystem& fs, const OpenedCheckpoint& base) : fs_(fs), base_(base) {}

  // The leaves of `chunk`, valid until the next call; empty for a chunk of one leaf.
  Result<std::span<const Hash128>> Of(const ChunkRecord& chunk) {
    const std::uint64_t count = LeafCount(chunk.length);
    if (count == 1) {  // The chunk's hash proves its only leaf (SameLeaf).
      leaves_.clear();
      return std::span<const Hash128>();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(File * file, Manifest(chunk.manifest));
    TENSORMOUNT_ASSIGN_OR_RETURN(leaves_, ReadManifestLeaves(*file, chunk.first_leaf, count));
    if (leaves_.size() != count || ChunkRoot(leaves_, chunk.length) != chunk.hash) {
      return Status(Code::kDataLoss, base_.index().manifests()[chunk.manifest] +
                                         ": the leaf hashes of a chunk do not match its hash");
    }
    return std::span<const Hash128>(leaves_);
  }

  // Whether page hashes of `chunk` are stored after its leaf hashes.
  Result<bool> Paged(const ChunkRecord& chunk) {
    TENSORMOUNT_ASSIGN_OR_RETURN(File * file, Manifest(chunk.manifest));
    bool paged = false;
    const std::uint64_t behind = chunk.first_leaf + LeafCount(chunk.length);
    TENSORMOUNT_RETURN_IF_ERROR(ReadManifestLeaves(*file, behind - 1, 1, &paged).status());
    if (!paged) return false;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Hash128> mark,
                                 ReadManifestLeaves(*file, behind, 1));
    return mark[0] == PagesMark(chunk.hash);
  }

 private:
  Result<File*> Manifest(std::uint32_t number) {
    if (number >= base_.index().manifests().size()) {
      return Status(Code::kDataLoss, "a chunk refers to a manifest that is not in the index");
    }
    const auto used = std::exchange(used_, number);
    if (const auto at = open_.find(number); at != open_.end()) return at->second.get();
    // Every tensor uses the manifests in the same order, so the manifest used last is the one
    // needed again last, and is closed first. If the oldest manifest were closed first, a base with
    // more than kMostManifests manifests would open all of them again for each tensor.
    if (open_.size() >= kMostManifests && open_.erase(used) == 0) open_.erase(open_.begin());
    TENSORMOUNT_ASSIGN_OR_RETURN(
        std::unique_ptr<File> file,
        OpenListedFile(fs_, base_.pinned_directory(), base_.index().manifests()[number]));
    return open_.emplace(number, std::move(file)).first->second.get();
  }

  FileSystem& fs_;
  const OpenedCheckpoint& base_;
  std::map<std::uint32_t, std::unique_ptr<File>> open_;
  std::uint32_t used_ = 0;  // The manifest used last.
  std::vector<Hash128> leaves_;
};

class BaseComparison {
 public:
  BaseComparison(FileSystem& fs, const OpenedCheckpoint& base, const StateDict& state,
                 const RankTask& task, PlacementRule rule, bool page_hashes,
                 const BlockRules& rules, const Deadline& deadline)
      : base_(base),
        state_(state),
        task_(task),
        rule_(rule),
        page_hashes_(page_hashes),
        rules_(rules),
        deadline_(deadline),
        leaves_(fs, base),
        device_reader_(state, rules),
        hashes_(device_reader_.queues()),
        tensors_(task.tensors.size()) {
    out_.tensors.assign(base.index().tensor_count(), BaseMatch::kNotWritten);
    out_.task_tensors.assign(task.tensors.size(), BaseMatches::kNotInBase);
  }

  Result<BaseMatches> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(FindTensors());
    // Chunks of one tensor are adjacent.
    for (std::uint32_t first = 0, end = 0; first < task_.chunks.size(); first = end) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      do {
        ++end;
      } while (end < task_.chunks.size() && task_.chunks[end].tensor == task_.chunks[first].tensor);
      TENSORMOUNT_RETURN_IF_ERROR(Cut(first, end));
    }
    TENSORMOUNT_RETURN_IF_ERROR(SubmitToDevices());
    for (const ComparedRange& range : ranges_) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      TENSORMOUNT_RETURN_IF_ERROR(Compare(range));
    }
    TENSORMOUNT_RETURN_IF_ERROR(CompareObjects());
    if (rule_ == PlacementRule::kSafetensors) RejectPartialFiles();
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const TensorComparison& tensor = tensors_[t];
      if (!tensor.entry) continue;
      out_.tensors[tensor.entry->ordinal] = tensor.differs ? BaseMatch::kDiffers : BaseMatch::kSame;
      if (tensor.differs) continue;
      out_.bytes_by_leaf += tensor.by_leaf;
      out_.bytes_by_comparison += tensor.by_comparison;
    }
    return std::move(out_);
  }

 private:
  TensorComparison& Of(const ComparedRange& range) {
    return tensors_[task_.chunks[range.chunk].tensor];
  }
  const Shard& ShardOf(const RankTask::Chunk& chunk) const {
    return state_.tensors()[chunk.item].shard;
  }
  bool IsOnDevice(const RankTask::Chunk& chunk) const {
    const Shard& shard = ShardOf(chunk);
    return !shard.metadata_only && IsDeviceMemory(shard.data);
  }
  Status Stop() const {
    if (rules_.cancel == nullptr || !rules_.cancel->load(std::memory_order_relaxed)) {
      return Status();
    }
    return Status(Code::kCancelled, "the save is being cancelled");
  }

  // Marks a tensor whose base data cannot be used, so that it is written again. Keeps the first
  // reason.
  void MarkUnusable(TensorComparison& tensor, const Status& why) {
    tensor.differs = true;
    if (out_.base_problem.ok()) out_.base_problem = why;
  }

  // Marks the tensor as unusable if the deadline has passed. Called before each block, because a
  // blocking read is not interrupted and the other ranks wait for this rank.
  bool IsPastDeadline(TensorComparison& tensor) {
    if (!deadline_.Passed()) return false;
    MarkUnusable(tensor,
                 Status(Code::kDeadlineExceeded,
                        "comparing with the base checkpoint took half of the time that the other "
                        "ranks wait; the rest is written, not linked"));
    return true;
  }

  // Finds the task's tensors in the base. Both lists are sorted by key.
  Status FindTensors() {
    std::size_t t = 0;
    return base_.index().ForEachTensor(0, [&](const TensorEntry& entry) {
      int order = 1;
      while (t < task_.tensors.size() &&
             (order = task_.tensors[t].meta.key().compare(entry.meta.key())) < 0) {
        ++t;
      }
      if (t == task_.tensors.size()) return false;
      if (order != 0) return true;
      const TensorMeta& mine = task_.tensors[t].meta;
      tensors_[t].entry = entry;
      out_.task_tensors[t] = entry.ordinal;
      // Without a digest the tensor's bytes were never verified.
      tensors_[t].differs = mine.dtype() != entry.meta.dtype() ||
                            !(mine.shape() == entry.meta.shape()) || !entry.has_digest;
      return true;
    });
  }

  // For PlacementRule::kSafetensors, where one rank writes the whole model to one file: if one
  // tensor differs, all tensors are written again.
  void RejectPartialFiles() {
    bool all = base_.index().tensor_count() == tensors_.size();
    std::optional<std::uint32_t> file;
    for (const TensorComparison& tensor : tensors_) {
      all = all && tensor.entry && !tensor.differs;
      if (!tensor.file) continue;
      all = all && (!file || *file == *tensor.file);
      file = tensor.file;
    }
    for (TensorComparison& tensor : tensors_) tensor.differs = tensor.differs || !all;
  }

  // ---- Which bytes are compared how ----

  // Cuts chunks [first, end), all of one tensor, into ranges.
  Status Cut(std::uint32_t first, std::uint32_t end) {
    const RankTask::Tensor& wanted = task_.tensors[task_.chunks[first].tensor];
    TensorComparison& tensor = tensors_[task_.chunks[first].tensor];
    if (!tensor.entry || tensor.differs || IsPastDeadline(tensor)) return Status();
    const auto extents = base_.Extents(*tensor.entry);
    if (!extents.ok()) {
      MarkUnusable(tensor, extents.status());
      return Status();
    }
    ExtentMatch match(wanted.meta, std::span(task_.chunks).subspan(first, end - first));
    for (std::uint32_t row = 0; row < extents.value()->size(); ++row) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      const Status met = Meet(*extents.value(), row, wanted.placement, match, tensor);
      if (!met.ok()) {
        MarkUnusable(tensor, met);
        return Status();
      }
    }
    if (tensor.differs) return Status();
    const std::size_t before = ranges_.size();
    const Status cut = AddRanges(first, match.Cut(), *extents.value());
    if (!cut.ok()) MarkUnusable(tensor, cut);
    std::uint64_t brought = 0;  // Bytes of the current chunk that are copied from a device.
    for (std::size_t i = before; i < ranges_.size(); ++i) {
      const ComparedRange& range = ranges_[i];
      if (i > before && ranges_[i - 1].chunk != range.chunk) brought = 0;
      if (range.of || !IsOnDevice(task_.chunks[range.chunk])) continue;
      brought += range.bytes;
      if (brought > kMostBrought) tensor.differs = true;
    }
    if (tensor.differs) ranges_.resize(before);
    return Status();
  }

  // Decides whether a stored chunk may be linked. Its file must be of a kind that this save could
  // write, because the kind of file decides how fast a tensor is read; under kAuto a tensor that
  // needs no file of its own may be in any file. With page_hashes_ the chunk must have page hashes,
  // too. Each rank checks page hashes only for the extents of its own cells; the tensor is written
  // again if any rank finds an extent without them.
  Status Meet(const ExtentTable& extents, std::uint32_t row, Placement wanted, ExtentMatch& match,
              TensorComparison& tensor) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord stored, extents.At(row));
    if (stored.file >= base_.index().files().size()) {
      return Status(Code::kDataLoss, "a chunk refers to a file that is not in the file table");
    }
    const bool one_file = !tensor.file || *tensor.file == stored.file;
    tensor.file = stored.file;
    const Placement there = base_.index().files()[stored.file].placement;
    const bool good = wanted == Placement::kTensorFile || wanted == Placement::kSafetensors
                          ? there == wanted && one_file
                          : rule_ == PlacementRule::kAuto || there == Placement::kRankShard ||
                                there == Placement::kPack;
    if (!good) tensor.differs = true;
    if (tensor.differs) return Status();
    TENSORMOUNT_RETURN_IF_ERROR(match.Add(row, stored));
    if (!page_hashes_ || extents.rank() < 2 || stored.length <= kLeafBytes ||
        !match.Touches(stored) || IsPastDeadline(tensor)) {
      return Status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool paged, leaves_.Paged(stored));
    if (!paged) tensor.differs = true;
    return Status();
  }

  Status AddRanges(std::uint32_t first, const std::vector<ExtentMatch::ExtentPart>& pieces,
                   const ExtentTable& extents) {
    for (const ExtentMatch::ExtentPart& piece : pieces) {
      ComparedRange& range = ranges_.emplace_back();
      range.chunk = first + piece.chunk;
      range.begin = piece.begin;
      range.bytes = piece.bytes;
      range.leaf = piece.leaf;
      if (piece.row) {
        TENSORMOUNT_ASSIGN_OR_RETURN(range.of, extents.At(*piece.row));
      }
    }
    return Status();
  }

  // ---- Devices ----

  Status SubmitToDevices() {
    std::vector<BlockReader::PlannedRange> wanted;
    for (ComparedRange& range : ranges_) {
      const RankTask::Chunk& chunk = task_.chunks[range.chunk];
      if (Of(range).differs || !IsOnDevice(chunk)) continue;
      if (!range.of) {
        wanted.push_back({chunk.item, range.begin, range.bytes});
        range.brought = true;
        continue;
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource source, PackedSource::Make(ShardOf(chunk)));
      const Result<std::size_t> job =
          hashes_.Add(source.device(), source.Gather(range.begin, range.bytes), source.base(),
                      range.bytes, kLeafBytes);
      if (job.status().code() == Code::kResourceExhausted) {
        Of(range).differs = true;  // The device has no memory for the hashes.
        continue;
      }
      TENSORMOUNT_RETURN_IF_ERROR(
          job.status().WithContext("tensor " + task_.tensors[chunk.tensor].meta.key()));
      range.job = job.value();
    }
    // Ranges of tensors that turn out to differ are copied, too; they are few.
    device_reader_.Plan(std::move(wanted));
    return Status();
  }

  // ---- Comparing ----

  Status Compare(const ComparedRange& range) {
    const RankTask::Chunk& chunk = task_.chunks[range.chunk];
    TensorComparison& tensor = Of(range);
    const bool on_device = IsOnDevice(chunk);
    // A range that is copied from a device is read even if the tensor differs, because
    // device_reader_ reads its ranges in order.
    if (tensor.differs && !range.brought) return Status();
    if (!range.of) {
      return on_device ? CompareDeviceBytes(range, tensor) : CompareStored(range, tensor);
    }
    if (IsPastDeadline(tensor)) return Status();
    const Result<std::span<const Hash128>> stored = leaves_.Of(*range.of);
    if (!stored.ok()) {
      MarkUnusable(tensor, stored.status());
      return Status();
    }
    tensor.by_leaf += range.bytes;
    return on_device ? CompareHashed(range, stored.value(), tensor)
                     : CompareLeaves(range, stored.value(), tensor);
  }

  // Whether leaf `i` of a range equals the stored one. `stored` has all leaves of the chunk; it
  // is empty for a chunk of one leaf.
  static bool SameLeaf(const ComparedRange& range, std::span<const Hash128> stored, std::uint64_t i,
                       const Hash128& mine) {
    if (stored.empty()) {
      return ChunkRoot(std::span(&mine, 1), range.of->length) == range.of->hash;
    }
    return stored[static_cast<std::size_t>(range.leaf + i)] == mine;
  }

  Status CompareHashed(const ComparedRange& range, std::span<const Hash128> stored,
                       TensorComparison& tensor) {
    if (!range.job) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const Hash128> mine, hashes_.Get(*range.job));
    for (std::size_t i = 0; i < mine.size() && !tensor.differs; ++i) {
      tensor.differs = !SameLeaf(range, stored, i, mine[i]);
    }
    return Status();
  }

  Status CompareLeaves(const ComparedRange& range, std::span<const Hash128> stored,
                       TensorComparison& tensor) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource* source, SourceOf(range));
    mine_.resize(kLeafBytes);
    for (std::uint64_t done = 0, i = 0; done < range.bytes; ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      if (IsPastDeadline(tensor)) return Status();
      const auto n = static_cast<std::size_t>(std::min(kLeafBytes, range.bytes - done));
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* bytes,
                                   source->Fetch(range.begin + done, n, mine_.data()));
      if (!SameLeaf(range, stored, i, Xxh3(bytes, n))) {
        tensor.differs = true;
        return Status();
      }
      done += n;
    }
    return Status();
  }

  Status CompareStored(const ComparedRange& range, TensorComparison& tensor) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource* source, SourceOf(range));
    for (std::uint64_t done = 0; done < range.bytes && !tensor.differs;) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      if (IsPastDeadline(tensor)) return Status();
      const auto n = static_cast<std::size_t>(std::min(kCompareBytes, range.bytes - done));
      mine_.resize(n);
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* bytes,
                                   source->Fetch(range.begin + done, n, mine_.data()));
      CompareBytes(*source, range.begin + done, {bytes, n}, tensor);
      done += n;
    }
    return Status();
  }

  // Reads the whole range even after a difference, because device_reader_ reads its ranges in
  // order.
  Status CompareDeviceBytes(const ComparedRange& range, TensorComparison& tensor) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource* source, device_reader_.Next());
    for (std::uint64_t done = 0; done < range.bytes;) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const std::byte> block,
                                   device_reader_.Take(static_cast<std::size_t>(
                                       std::min(kCompareBytes, range.bytes - done))));
      if (!tensor.differs && !IsPastDeadline(tensor)) {
        CompareBytes(*source, range.begin + done, block, tensor);
      }
      done += block.size();
    }
    return Status();
  }

  void CompareBytes(const PackedSource& source, std::uint64_t begin,
                    std::span<const std::byte> bytes, TensorComparison& tensor) {
    stored_.resize(bytes.size());
    ReadStats stats;
    const Status read =
        base_.ReadPlaced(*tensor.entry, PlacePacked(source.Bytes(begin, bytes.size()), 0),
                         stored_.data(), ReadVerify::kExtendLeaves, stats, nullptr);
    if (!read.ok()) return MarkUnusable(tensor, read);
    tensor.differs = std::memcmp(stored_.data(), bytes.data(), bytes.size()) != 0;
    tensor.by_comparison += bytes.size();
  }

  // The host-readable source of a range's shard; kept for consecutive ranges of the same
  // shard.
  Result<const PackedSource*> SourceOf(const ComparedRange& range) {
    const RankTask::Chunk& chunk = task_.chunks[range.chunk];
    if (!source_ || item_ != chunk.item) {
      const Shard& shard = ShardOf(chunk);
      Result<PackedSource> made = rules_.read != nullptr
                                      ? PackedSource::Make(shard, chunk.item, *rules_.read)
                                      : PackedSource::Make(shard);
      TENSORMOUNT_RETURN_IF_ERROR(
          made.status().WithContext("tensor " + task_.tensors[chunk.tensor].meta.key()));
      source_.emplace(std::move(made).value());
      item_ = chunk.item;
    }
    return &*source_;
  }

  // ---- Objects ----

  // Compares this rank's object parts. A part is unchanged if its length and hash equal the stored
  // ones. A key that is a tensor here and an object in the base is not reused.
  Status CompareObjects() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> stored, base_.index().Objects());
    out_.objects.assign(stored.size(), BaseMatch::kNotWritten);
    std::set<std::string_view> keys;
    for (const RankTask::Tensor& tensor : task_.tensors) keys.insert(tensor.meta.key());
    for (std::size_t i = 0; i < stored.size(); ++i) {
      if (keys.contains(stored[i].key)) out_.objects[i] = BaseMatch::kDiffers;
    }
    for (const std::uint32_t number : task_.objects) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      const StateDict::ObjectItem& mine = state_.objects()[number];
      std::uint32_t& there = out_.task_objects.emplace_back(BaseMatches::kNotInBase);
      if (const auto tensor = base_.index().Find(mine.key); tensor.ok()) {
        out_.tensors[tensor.value().ordinal] = BaseMatch::kDiffers;
      }
      auto at = std::lower_bound(
          stored.begin(), stored.end(), mine.key,
          [](const ObjectRecord& object, const std::string& key) { return object.key < key; });
      for (; at != stored.end() && at->key == mine.key; ++at) {
        BaseMatch& found = out_.objects[static_cast<std::size_t>(at - stored.begin())];
        if (!(at->grid == mine.place.grid)) {
          found = BaseMatch::kDiffers;  // The grid changed, so no part of the base is used.
        } else if (at->index == mine.place.index) {
          found = SameObject(*at, mine.bytes) ? BaseMatch::kSame : BaseMatch::kDiffers;
          there = static_cast<std::uint32_t>(at - stored.begin());
        }
      }
    }
    return Status();
  }

  bool SameObject(const ObjectRecord& stored, const std::string& bytes) {
    if (!stored.has_hash() || stored.length != bytes.size()) return false;
    if (HashChunk(bytes.data(), bytes.size()).root != stored.hash) return false;
    out_.bytes_by_leaf += bytes.size();
    return true;
  }

  const OpenedCheckpoint& base_;
  const StateDict& state_;
  const RankTask& task_;
  const PlacementRule rule_;
  const bool page_hashes_;
  const BlockRules& rules_;
  const Deadline deadline_;
  BaseLeaves leaves_;
  BlockReader device_reader_;
  DeviceHashes hashes_;
  std::vector<TensorComparison> tensors_;  // By position of the tensor in the task.
  std::vector<ComparedRange> ranges_;
  std::optional<PackedSource> source_;
  std::uint32_t item_ = 0;
  std::vector<std::byte> mine_;
  std::vector<std::byte> stored_;
  BaseMatches out_;
};

}  // namespace

Result<BaseMatches> CompareWithBase(FileSystem& fs, const OpenedCheckpoint& base,
                                    const StateDict& state, const RankTask& task,
                                    PlacementRule rule, bool page_hashes, const BlockRules& rules,
                                    const Deadline& deadline) {
  return BaseComparison(fs, base, state, task, rule, page_hashes, rules, deadline).Run();
}

}  // namespace tensormount
