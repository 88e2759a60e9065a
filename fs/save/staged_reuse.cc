// SPDX-License-Identifier: Apache-2.0
// Compares chunks of a staging with those of the base. If the base has a chunk of the same region,
// only hashes are compared; otherwise both sides are read, each verified against its own hashes.
#include "fs/save/staged_reuse.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "tensormount/save.h"

#include "base/hash.h"
#include "base/log.h"
#include "index/records/store_paths.h"
#include "index/store/retained_file.h"
#include "shard/leaf_hash.h"

namespace tensormount::fs {
namespace {

std::uint32_t FullEvery() { return SaveOptions().full_every; }

bool IsName(const std::string& reuse) {
  return !reuse.empty() && reuse != "auto" && reuse != "off";
}

}  // namespace

Status HoldNamedBase(FileSystem& fs, const Staging& staging, const std::string& reuse) {
  if (!IsName(reuse)) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs, staging.store));
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(reuse).WithContext("reuse"));
  const CheckpointListing listing = store.FindListing(reuse);
  if (listing.problem.code() == Code::kNotFound ||
      listing.state == CheckpointListing::State::kNoCheckpoint) {
    return Status(Code::kNotFound,
                  "reuse: " + store.CheckpointPath(reuse) + ": no such checkpoint");
  }
  // A base that cannot be read now is not protected. The publish tries to open it by name.
  if (!listing.problem.ok()) return Status();
  return ReplaceRetained(fs, staging.directory, store_paths::kBaseFile,
                         listing.uuid.ToString() + "\n", ExchangeFallback::kBrieflyMissing);
}

void StagedReuse::Open(const std::string& reuse) {
  if (reuse == "off") return;
  const auto open = [&]() -> Status {
    std::string name = staging_.parent_name;
    std::optional<Uuid> wanted = staging_.parent;
    if (IsName(reuse)) {
      name = reuse;
      const Result<std::string> held =
          fs_.ReadFile(JoinPath(staging_.directory, store_paths::kBaseFile), 64);
      wanted = held.ok() ? Uuid::Parse(held.value().substr(0, 32)) : std::nullopt;
    } else if (staging_.parent.IsZero()) {
      return Status();
    }
    TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(name));
    // Without a UUID (HoldNamedBase could not read the base, or an older program made the staging)
    // the base is opened by its name.
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto base, wanted ? OpenBase(fs_, store_.path(), name, *wanted)
                                : OpenedCheckpoint::Open(fs_, store_.CheckpointPath(name), {}));
    const CheckpointInfo& info = base->index().info();
    if (base->commit() == nullptr || !info.self_contained) return Status();
    consecutive_ = ConsecutiveLinkedSaves(base->index());
    if (consecutive_ + 1 >= FullEvery()) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(objects_, base->index().Objects());
    taken_ = ReusedFromBase::Nothing(base->index().tensor_count(), objects_.size());
    base_ = base;
    return Status();
  };
  const Status opened = open();
  if (opened.ok()) return;
  base_.reset();
  note_ = "nothing is reused: " + opened.message();
  Log(IsName(reuse) ? LogLevel::kWarning : LogLevel::kInfo,
      "staging " + staging_.name + ": " + note_);
}

bool StagedReuse::TryReuse(const TensorMeta& meta, const std::vector<StagedChunk>& chunks) {
  if (base_ == nullptr || chunks.empty()) return false;
  const Result<TensorEntry> entry = base_->index().Find(meta.key());
  if (!entry.ok() || !entry.value().has_digest || entry.value().meta.dtype() != meta.dtype() ||
      !(entry.value().meta.shape() == meta.shape())) {
    return false;
  }
  Crc64 digest = 0;
  std::uint64_t bytes = 0;
  bool one_file = true;
  for (const StagedChunk& chunk : chunks) {
    digest ^= chunk.contribution;
    bytes += chunk.length;
    one_file = one_file && chunk.journal == chunks[0].journal && chunk.file == chunks[0].file;
    if (chunk.journal == kPublisher) return false;
  }
  if (digest != entry.value().digest || bytes != meta.bytes()) return false;
  // A large tensor that was written into one file is not replaced by one that the base stores in
  // several parts: a mount can let the kernel read only a whole file (passthrough).
  if (one_file && meta.bytes() >= (std::uint64_t{4} << 20) &&
      !base_->WholeFileOf(entry.value()).ok()) {
    return false;
  }
  bool same = true;
  const Status compared = Compare(entry.value(), chunks, &same);
  if (!compared.ok() || !same) return false;
  taken_.tensors[entry.value().ordinal] = true;
  ++tensors_;
  bytes_ += meta.bytes();
  return true;
}

Status StagedReuse::Compare(const TensorEntry& entry, const std::vector<StagedChunk>& chunks,
                            bool* same) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto extents, base_->Extents(entry));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ChunkRecord> stored, extents->All());
  for (const StagedChunk& chunk : chunks) {
    const auto equal = std::find_if(stored.begin(), stored.end(), [&](const ChunkRecord& there) {
      return there.region == chunk.region && there.has_hash;
    });
    if (equal != stored.end()) {
      *same = equal->length == chunk.length && equal->hash == ChunkRoot(chunk.leaves, chunk.length);
    } else {
      TENSORMOUNT_RETURN_IF_ERROR(CompareBytes(entry, chunk, same));
    }
    if (!*same) return Status();
  }
  return Status();
}

Status StagedReuse::CompareBytes(const TensorEntry& entry, const StagedChunk& chunk, bool* same) {
  const std::string path = JoinPath(staging_.directory, journals_[chunk.journal].files[chunk.file]);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, fs_.OpenRead(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                               ByteRegion(entry.meta.dtype(), entry.meta.shape(), chunk.region));
  std::vector<std::byte> mine(kLeafBytes);
  std::vector<std::byte> theirs(kLeafBytes);
  for (std::size_t leaf = 0; leaf < chunk.leaves.size(); ++leaf) {
    const std::uint64_t at = leaf * kLeafBytes;
    const auto n = static_cast<std::size_t>(std::min(kLeafBytes, chunk.length - at));
    TENSORMOUNT_RETURN_IF_ERROR(file->ReadExactAt(chunk.offset + at, mine.data(), n));
    if (Xxh3(mine.data(), n) != chunk.leaves[leaf]) {
      return Status(Code::kDataLoss, path + ": checksum mismatch");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const Region part,
        Region::Flat(bytes.box(), bytes.flat_first() + static_cast<std::int64_t>(at),
                     static_cast<std::int64_t>(n)));
    ReadStats stats;
    TENSORMOUNT_RETURN_IF_ERROR(base_->ReadPlaced(entry, PlacePacked(part, 0), theirs.data(),
                                                  ReadVerify::kExtendLeaves, stats, nullptr));
    *same = std::memcmp(mine.data(), theirs.data(), n) == 0;
    if (!*same) return Status();
  }
  return Status();
}

bool StagedReuse::TryReuse(const StagedObject& object, const Dims& grid) {
  if (base_ == nullptr) return false;
  for (std::size_t i = 0; i < objects_.size(); ++i) {
    const ObjectRecord& there = objects_[i];
    if (there.key != object.key || !(there.grid == grid) || !(there.index == object.index))
      continue;
    if (!there.has_hash() || there.length != object.length ||
        there.hash != ChunkRoot(object.leaves, object.length)) {
      return false;
    }
    taken_.objects[i] = true;
    bytes_ += object.length;
    return true;
  }
  return false;
}

Status StagedReuse::Link() {
  if (!any()) return Status();
  const std::string path = JoinPath(staging_.directory, LinkedManifestName(0, consecutive_ + 1));
  LinkPlan plan;
  const auto link = [&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(plan, PlanLinks(*base_, staging_, taken_));
    BaseLinker linker(fs_, *base_, staging_, taken_, plan);
    LinkCounts counts;
    return linker.LinkAll(consecutive_ + 1, counts);
  };
  const Status linked = link();
  if (linked.ok()) return linked;
  BaseLinker(fs_, *base_, staging_, taken_, plan).Discard(0, 1);
  // A partial manifest must not be mistaken for a complete one.
  (void)fs_.RemoveFile(path);
  base_.reset();
  tensors_ = 0;
  bytes_ = 0;
  note_ = "nothing is reused: " + linked.message();
  Log(LogLevel::kWarning, "staging " + staging_.name + ": " + note_);
  return linked;
}

}  // namespace tensormount::fs
