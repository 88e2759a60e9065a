// SPDX-License-Identifier: Apache-2.0
// A rank's chunks cut into stretches, each of which is compared in one of two ways: by leaf hashes
// of a chunk of the base, or with its stored bytes. Hashes of what is on devices are asked for
// first of all, so that devices work while the host compares.
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
#include "shard/leaf_hash.h"
#include "shard/page_hash.h"

namespace tensormount {
namespace {

// Compared with stored bytes at a time.
constexpr std::uint64_t kCompareBytes = std::uint64_t{1} << 20;
// Of a chunk on a device, what is brought to the host to be compared: the ends of a few leaves.
constexpr std::uint64_t kMostBrought = 16 * kLeafBytes;
// Manifests of the base that are open at a time.
constexpr std::size_t kMostManifests = 32;

// A part of the packed bytes of a shard that this rank would write.
struct Stretch {
  std::uint32_t chunk = 0;  // In RankTask::chunks.
  std::uint64_t begin = 0;  // In the packed bytes of its item.
  std::uint64_t bytes = 0;
  // By leaves: those of this chunk of the base, from number `leaf` on.
  std::optional<ChunkRecord> of = {};
  std::uint64_t leaf = 0;
  std::optional<std::size_t> job = {};  // Of the device that hashes it.
  bool brought = false;                 // From a device, to be compared here.
};

// What is known of one tensor of the task.
struct Compared {
  std::optional<TensorEntry> entry;  // None: the base has no such tensor.
  bool differs = false;
  std::optional<std::uint32_t> file;  // That all of it is in, if it has bytes.
  std::uint64_t by_leaf = 0;
  std::uint64_t by_comparison = 0;
};

// Leaf hashes of chunks of the base, each list proved by the chunk's hash.
class BaseLeaves {
 public:
  BaseLeaves(FileSystem& fs, const OpenedCheckpoint& base) : fs_(fs), base_(base) {}

  // Of all of `chunk`; valid until the next call.
  Result<std::span<const Hash128>> Of(const ChunkRecord& chunk) {
    const std::uint64_t count = LeafCount(chunk.length);
    if (count == 1) {  // Its root says it all; what the leaf is the caller finds out himself.
      leaves_.clear();
      return std::span<const Hash128>();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(File * file, Manifest(chunk.manifest));
    TENSORMOUNT_ASSIGN_OR_RETURN(leaves_, ReadManifestLeaves(*file, chunk.first_leaf, count));
    if (leaves_.size() != count || ChunkRoot(leaves_, chunk.length) != chunk.hash) {
      return Status(Code::kDataLoss, base_.index().manifests()[chunk.manifest] +
                                         ": leaf hashes differ from the chunk's");
    }
    return std::span<const Hash128>(leaves_);
  }

  // Whether page hashes stand behind them.
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
      return Status(Code::kDataLoss, "a chunk of a manifest that is not there");
    }
    const auto used = std::exchange(used_, number);
    if (const auto at = open_.find(number); at != open_.end()) return at->second.get();
    // Tensors come to manifests in the same order, one like the other: the one just left is the
    // last to be wanted again. If the oldest went, a base with one more than there is room for
    // would have all of them opened for each tensor.
    if (open_.size() >= kMostManifests && open_.erase(used) == 0) open_.erase(open_.begin());
    TENSORMOUNT_ASSIGN_OR_RETURN(
        std::unique_ptr<File> file,
        OpenListedFile(fs_, base_.pinned_directory(), base_.index().manifests()[number]));
    return open_.emplace(number, std::move(file)).first->second.get();
  }

  FileSystem& fs_;
  const OpenedCheckpoint& base_;
  std::map<std::uint32_t, std::unique_ptr<File>> open_;
  std::uint32_t used_ = 0;  // The manifest that was asked for last.
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
        brought_(state, rules),
        hashes_(brought_.queues()),
        tensors_(task.tensors.size()) {
    out_.tensors.assign(base.index().tensor_count(), InBase::kNotHere);
    out_.task_tensors.assign(task.tensors.size(), ComparedWithBase::kNotInBase);
  }

  Result<ComparedWithBase> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(FindTensors());
    // Those of a tensor stand together.
    for (std::uint32_t first = 0, end = 0; first < task_.chunks.size(); first = end) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      do {
        ++end;
      } while (end < task_.chunks.size() && task_.chunks[end].tensor == task_.chunks[first].tensor);
      TENSORMOUNT_RETURN_IF_ERROR(Cut(first, end));
    }
    TENSORMOUNT_RETURN_IF_ERROR(SubmitToDevices());
    for (const Stretch& stretch : stretches_) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      TENSORMOUNT_RETURN_IF_ERROR(Compare(stretch));
    }
    TENSORMOUNT_RETURN_IF_ERROR(CompareObjects());
    if (rule_ == PlacementRule::kSafetensors) AllOrNone();
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const Compared& tensor = tensors_[t];
      if (!tensor.entry) continue;
      out_.tensors[tensor.entry->ordinal] = tensor.differs ? InBase::kDiffers : InBase::kSame;
      if (tensor.differs) continue;
      out_.bytes_by_leaf += tensor.by_leaf;
      out_.bytes_by_comparison += tensor.by_comparison;
    }
    return std::move(out_);
  }

 private:
  Compared& Of(const Stretch& stretch) { return tensors_[task_.chunks[stretch.chunk].tensor]; }
  const Shard& ShardOf(const RankTask::Chunk& chunk) const {
    return state_.tensors()[chunk.item].shard;
  }
  bool IsOnDevice(const RankTask::Chunk& chunk) const {
    const Shard& shard = ShardOf(chunk);
    return !shard.metadata_only && OnDevice(shard.data);
  }
  Status Stop() const {
    if (rules_.cancel == nullptr || !rules_.cancel->load(std::memory_order_relaxed)) {
      return Status();
    }
    return Status(Code::kCancelled, "the save is being cancelled");
  }

  // What of the base cannot be used is written anew, whatever the reason.
  void CannotUse(Compared& tensor, const Status& why) {
    tensor.differs = true;
    if (out_.base_problem.ok()) out_.base_problem = why;
  }

  // Asked before each block, since what blocks is not interrupted: the others wait for this rank.
  bool OutOfTime(Compared& tensor) {
    if (!deadline_.Passed()) return false;
    CannotUse(tensor, Status(Code::kDeadlineExceeded,
                             "the base was not compared in half of the time that ranks wait for "
                             "each other; what was left is written anew"));
    return true;
  }

  // Both are sorted by key.
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
      // Without a digest its bytes were never proved.
      tensors_[t].differs = mine.dtype() != entry.meta.dtype() ||
                            !(mine.shape() == entry.meta.shape()) || !entry.has_digest;
      return true;
    });
  }

  // One file shall be all of the model, and one rank writes it.
  void AllOrNone() {
    bool all = base_.index().tensor_count() == tensors_.size();
    std::optional<std::uint32_t> file;
    for (const Compared& tensor : tensors_) {
      all = all && tensor.entry && !tensor.differs;
      if (!tensor.file) continue;
      all = all && (!file || *file == *tensor.file);
      file = tensor.file;
    }
    for (Compared& tensor : tensors_) tensor.differs = tensor.differs || !all;
  }

  // ---- Which bytes are compared how ----

  // Of all chunks of one tensor, which are numbers [first, end).
  Status Cut(std::uint32_t first, std::uint32_t end) {
    const RankTask::Tensor& wanted = task_.tensors[task_.chunks[first].tensor];
    Compared& tensor = tensors_[task_.chunks[first].tensor];
    if (!tensor.entry || tensor.differs || OutOfTime(tensor)) return Status();
    const auto extents = base_.Extents(*tensor.entry);
    if (!extents.ok()) {
      CannotUse(tensor, extents.status());
      return Status();
    }
    ExtentMatch match(wanted.meta, std::span(task_.chunks).subspan(first, end - first));
    for (std::uint32_t row = 0; row < extents.value()->size(); ++row) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      const Status met = Meet(*extents.value(), row, wanted.placement, match, tensor);
      if (!met.ok()) {
        CannotUse(tensor, met);
        return Status();
      }
    }
    if (tensor.differs) return Status();
    const std::size_t before = stretches_.size();
    const Status cut = AddStretches(first, match.Cut(), *extents.value());
    if (!cut.ok()) CannotUse(tensor, cut);
    std::uint64_t brought = 0;  // Of a chunk.
    for (std::size_t i = before; i < stretches_.size(); ++i) {
      const Stretch& stretch = stretches_[i];
      if (i > before && stretches_[i - 1].chunk != stretch.chunk) brought = 0;
      if (stretch.of || !IsOnDevice(task_.chunks[stretch.chunk])) continue;
      brought += stretch.bytes;
      if (brought > kMostBrought) tensor.differs = true;
    }
    if (tensor.differs) stretches_.resize(before);
    return Status();
  }

  // How a tensor is stored decides how fast it is read: a link must not bring back what the caller
  // wants otherwise now. A file of its own is as good as any other form. Page hashes are looked for
  // where this rank has cells: other ranks look at the other extents, and one that finds none
  // decides for all.
  Status Meet(const ExtentTable& extents, std::uint32_t row, Placement wanted, ExtentMatch& match,
              Compared& tensor) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord stored, extents.At(row));
    if (stored.file >= base_.index().files().size()) {
      return Status(Code::kDataLoss, "a chunk in a file that is not in the table");
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
        !match.Touches(stored) || OutOfTime(tensor)) {
      return Status();
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool paged, leaves_.Paged(stored));
    if (!paged) tensor.differs = true;
    return Status();
  }

  Status AddStretches(std::uint32_t first, const std::vector<ExtentMatch::ExtentPart>& pieces,
                      const ExtentTable& extents) {
    for (const ExtentMatch::ExtentPart& piece : pieces) {
      Stretch& stretch = stretches_.emplace_back();
      stretch.chunk = first + piece.chunk;
      stretch.begin = piece.begin;
      stretch.bytes = piece.bytes;
      stretch.leaf = piece.leaf;
      if (piece.row) {
        TENSORMOUNT_ASSIGN_OR_RETURN(stretch.of, extents.At(*piece.row));
      }
    }
    return Status();
  }

  // ---- Devices ----

  Status SubmitToDevices() {
    std::vector<BlockReader::Wanted> wanted;
    for (Stretch& stretch : stretches_) {
      const RankTask::Chunk& chunk = task_.chunks[stretch.chunk];
      if (Of(stretch).differs || !IsOnDevice(chunk)) continue;
      if (!stretch.of) {
        wanted.push_back({chunk.item, stretch.begin, stretch.bytes});
        stretch.brought = true;
        continue;
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource source, PackedSource::Make(ShardOf(chunk)));
      const Result<std::size_t> job =
          hashes_.Add(source.device(), source.Gather(stretch.begin, stretch.bytes), source.base(),
                      stretch.bytes, kLeafBytes);
      if (job.status().code() == Code::kResourceExhausted) {
        Of(stretch).differs = true;  // The device is full.
        continue;
      }
      TENSORMOUNT_RETURN_IF_ERROR(
          job.status().WithContext("tensor " + task_.tensors[chunk.tensor].meta.key()));
      stretch.job = job.value();
    }
    // Those of a tensor that turned out to differ later are taken all the same: they are few.
    brought_.Plan(std::move(wanted));
    return Status();
  }

  // ---- Comparing ----

  Status Compare(const Stretch& stretch) {
    const RankTask::Chunk& chunk = task_.chunks[stretch.chunk];
    Compared& tensor = Of(stretch);
    const bool on_device = IsOnDevice(chunk);
    // What is on its way from a device is taken in any case: the next piece waits for that.
    if (tensor.differs && !stretch.brought) return Status();
    if (!stretch.of) {
      return on_device ? CompareBrought(stretch, tensor) : CompareStored(stretch, tensor);
    }
    if (OutOfTime(tensor)) return Status();
    const Result<std::span<const Hash128>> stored = leaves_.Of(*stretch.of);
    if (!stored.ok()) {
      CannotUse(tensor, stored.status());
      return Status();
    }
    tensor.by_leaf += stretch.bytes;
    return on_device ? CompareHashed(stretch, stored.value(), tensor)
                     : CompareLeaves(stretch, stored.value(), tensor);
  }

  // Whether leaf number `i` of a stretch is the stored one. `stored`: those of all of the chunk;
  // none: it has only one.
  static bool SameLeaf(const Stretch& stretch, std::span<const Hash128> stored, std::uint64_t i,
                       const Hash128& mine) {
    if (stored.empty()) {
      return ChunkRoot(std::span(&mine, 1), stretch.of->length) == stretch.of->hash;
    }
    return stored[static_cast<std::size_t>(stretch.leaf + i)] == mine;
  }

  Status CompareHashed(const Stretch& stretch, std::span<const Hash128> stored, Compared& tensor) {
    if (!stretch.job) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<const Hash128> mine, hashes_.Get(*stretch.job));
    for (std::size_t i = 0; i < mine.size() && !tensor.differs; ++i) {
      tensor.differs = !SameLeaf(stretch, stored, i, mine[i]);
    }
    return Status();
  }

  Status CompareLeaves(const Stretch& stretch, std::span<const Hash128> stored, Compared& tensor) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource* source, SourceOf(stretch));
    mine_.resize(kLeafBytes);
    for (std::uint64_t done = 0, i = 0; done < stretch.bytes; ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      if (OutOfTime(tensor)) return Status();
      const auto n = static_cast<std::size_t>(std::min(kLeafBytes, stretch.bytes - done));
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* bytes,
                                   source->Fetch(stretch.begin + done, n, mine_.data()));
      if (!SameLeaf(stretch, stored, i, Xxh3(bytes, n))) {
        tensor.differs = true;
        return Status();
      }
      done += n;
    }
    return Status();
  }

  Status CompareStored(const Stretch& stretch, Compared& tensor) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource* source, SourceOf(stretch));
    for (std::uint64_t done = 0; done < stretch.bytes && !tensor.differs;) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      if (OutOfTime(tensor)) return Status();
      const auto n = static_cast<std::size_t>(std::min(kCompareBytes, stretch.bytes - done));
      mine_.resize(n);
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::byte* bytes,
                                   source->Fetch(stretch.begin + done, n, mine_.data()));
      CompareBytes(*source, stretch.begin + done, {bytes, n}, tensor);
      done += n;
    }
    return Status();
  }

  // All of it is taken, since the next piece waits for that.
  Status CompareBrought(const Stretch& stretch, Compared& tensor) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const PackedSource* source, brought_.Next());
    for (std::uint64_t done = 0; done < stretch.bytes;) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const std::span<const std::byte> block,
          brought_.Take(static_cast<std::size_t>(std::min(kCompareBytes, stretch.bytes - done))));
      if (!tensor.differs && !OutOfTime(tensor)) {
        CompareBytes(*source, stretch.begin + done, block, tensor);
      }
      done += block.size();
    }
    return Status();
  }

  void CompareBytes(const PackedSource& source, std::uint64_t begin,
                    std::span<const std::byte> bytes, Compared& tensor) {
    stored_.resize(bytes.size());
    ReadStats stats;
    const Status read =
        base_.ReadPlaced(*tensor.entry, PlacePacked(source.Bytes(begin, bytes.size()), 0),
                         stored_.data(), ReadVerify::kExtendLeaves, stats, nullptr);
    if (!read.ok()) return CannotUse(tensor, read);
    tensor.differs = std::memcmp(stored_.data(), bytes.data(), bytes.size()) != 0;
    tensor.by_comparison += bytes.size();
  }

  // Of the shard of a stretch that the host reads; kept while stretches of it follow each other.
  Result<const PackedSource*> SourceOf(const Stretch& stretch) {
    const RankTask::Chunk& chunk = task_.chunks[stretch.chunk];
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

  // A part is unchanged where its length and its hash are those of the stored one. A key that is a
  // tensor here and an object there is neither's.
  Status CompareObjects() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> stored, base_.index().Objects());
    out_.objects.assign(stored.size(), InBase::kNotHere);
    std::set<std::string_view> keys;
    for (const RankTask::Tensor& tensor : task_.tensors) keys.insert(tensor.meta.key());
    for (std::size_t i = 0; i < stored.size(); ++i) {
      if (keys.contains(stored[i].key)) out_.objects[i] = InBase::kDiffers;
    }
    for (const std::uint32_t number : task_.objects) {
      TENSORMOUNT_RETURN_IF_ERROR(Stop());
      const StateDict::ObjectItem& mine = state_.objects()[number];
      std::uint32_t& there = out_.task_objects.emplace_back(ComparedWithBase::kNotInBase);
      if (const auto tensor = base_.index().Find(mine.key); tensor.ok()) {
        out_.tensors[tensor.value().ordinal] = InBase::kDiffers;
      }
      auto at = std::lower_bound(
          stored.begin(), stored.end(), mine.key,
          [](const ObjectRecord& object, const std::string& key) { return object.key < key; });
      for (; at != stored.end() && at->key == mine.key; ++at) {
        InBase& found = out_.objects[static_cast<std::size_t>(at - stored.begin())];
        if (!(at->grid == mine.place.grid)) {
          found = InBase::kDiffers;  // All of the old parts go.
        } else if (at->index == mine.place.index) {
          found = SameObject(*at, mine.bytes) ? InBase::kSame : InBase::kDiffers;
          there = static_cast<std::uint32_t>(at - stored.begin());
        }
      }
    }
    return Status();
  }

  bool SameObject(const ObjectRecord& stored, const std::string& bytes) {
    if (!stored.has_hash() || stored.length != bytes.size()) return false;
    LeafHasher hasher;
    hasher.Update(bytes.data(), bytes.size());
    hasher.Finish();
    if (hasher.Root() != stored.hash) return false;
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
  BlockReader brought_;
  DeviceHashes hashes_;
  std::vector<Compared> tensors_;  // By position in the task.
  std::vector<Stretch> stretches_;
  std::optional<PackedSource> source_;
  std::uint32_t item_ = 0;
  std::vector<std::byte> mine_;
  std::vector<std::byte> stored_;
  ComparedWithBase out_;
};

}  // namespace

Result<ComparedWithBase> CompareWithBase(FileSystem& fs, const OpenedCheckpoint& base,
                                         const StateDict& state, const RankTask& task,
                                         PlacementRule rule, bool page_hashes,
                                         const BlockRules& rules, const Deadline& deadline) {
  return BaseComparison(fs, base, state, task, rule, page_hashes, rules, deadline).Run();
}

}  // namespace tensormount
