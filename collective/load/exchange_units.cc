// SPDX-License-Identifier: Apache-2.0
// Assigns blocks of stored chunks (units) evenly to the ranks that want some of them. Small tensors
// are cut into smaller units, so that every rank has some to read. Every rank computes this from
// the plan, in the same order.
#include "collective/load/exchange_units.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "collective/load/digest_proof.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// Small tensors are cut into units below kUnitBytes, so that every rank reads some, but not below
// this size.
constexpr std::uint64_t kLeastUnitBytes = 64u << 10;
// Units are made for this much data at a time, so that their memory does not grow with the model.
constexpr std::uint64_t kBatchBytes = std::uint64_t{4} << 30;
constexpr std::size_t kBatchChunks = 8192;
// From a server a rank reads up to this much of a file at one go: a request of such a size.
constexpr std::uint64_t kFarRunBytes = std::uint64_t{8} << 20;

}  // namespace

ExchangeUnits::ExchangeUnits(const OpenedCheckpoint& checkpoint, const LoadPlan& plan,
                             std::span<LoadTarget> targets, int rank, TensorFilter wanted)
    : checkpoint_(checkpoint),
      plan_(plan),
      rank_(rank),
      wanted_(std::move(wanted)),
      far_(!checkpoint.fs().Can(Ability::kKernelFiles)) {
  mine_.resize(plan.tensors.size());
  for (LoadTarget& target : targets) {
    mine_[static_cast<std::size_t>(target.tensor - plan.tensors.data())].push_back(&target);
  }
  const auto me = static_cast<std::size_t>(rank);
  in_group_.resize(plan.groups.size(), false);
  for (std::size_t r = 0; r < plan.groups.size(); ++r) {
    in_group_[r] = plan.groups[r] == plan.groups[me];
  }
  group_size_ = static_cast<std::uint64_t>(std::count(in_group_.begin(), in_group_.end(), true));
  load_.resize(plan.groups.size(), 0);
}

Status ExchangeUnits::Prepare(std::size_t t) {
  const PlannedTensor& tensor = plan_.tensors[t];
  const TensorMeta& meta = tensor.entry().meta;
  Prepared& prepared = prepared_[t];
  std::size_t mine = 0;
  for (const RequestedRegion& want : tensor.wants) {
    LoadTarget* target = want.rank == rank_ ? mine_[t][mine++] : nullptr;
    if (want.convert || !in_group_[static_cast<std::size_t>(want.rank)]) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                                 ByteRegion(meta.dtype(), meta.shape(), want.region));
    prepared.wants.push_back({want.rank, bytes.Boxes(), target});
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const ExtentTable> extents,
                               checkpoint_.Extents(tensor.entry()));
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ChunkRecord> chunks, extents->All());
  std::sort(chunks.begin(), chunks.end(), [](const ChunkRecord& a, const ChunkRecord& b) {
    return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
  });
  const std::vector<FileRecord>& files = checkpoint_.index().files();
  std::vector<std::vector<PlacedBox>> placed;
  for (const ChunkRecord& chunk : chunks) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                                 ByteRegion(meta.dtype(), meta.shape(), chunk.region));
    // Units are read directly from the file, without the checks of an ordinary read, so chunks are
    // checked here.
    if (chunk.strides.rank() > 0) {
      return Status(Code::kInternal, "internal error: tensor " + meta.key() +
                                         ": ranks cannot exchange strided chunks");
    }
    if (chunk.file >= files.size() ||
        !RangeWithin(chunk.offset, static_cast<std::uint64_t>(bytes.volume()),
                     files[chunk.file].length)) {
      return Status(Code::kDataLoss, "index: tensor " + meta.key() + " " + chunk.region.ToString() +
                                         ": its chunk lies outside of its data file");
    }
    placed.push_back(PlacePacked(bytes, 0));
    std::uint64_t offset = chunk.offset;
    for (const Box& box : chunk.region.Boxes()) {
      prepared.chunks.push_back({static_cast<std::uint32_t>(t), box, chunk.file, offset});
      offset += static_cast<std::uint64_t>(box.volume()) * (meta.bits() / 8);
    }
  }
  for (const LoadTarget* target : mine_[t]) {
    if (target->convert) continue;
    Result<CopyPlan> plan = CopyPlan::Make(target->placed, placed, &meta);
    if (!plan.ok()) return plan.status();
  }
  return {};
}

Result<bool> ExchangeUnits::Next() {
  units_.clear();
  std::erase_if(prepared_, [&](const auto& item) { return item.first < next_tensor_; });
  std::uint64_t bytes = 0;
  std::size_t chunks = 0;
  for (; next_tensor_ < plan_.tensors.size(); ++next_tensor_, next_chunk_ = 0) {
    const PlannedTensor& tensor = plan_.tensors[next_tensor_];
    if (!tensor.exchange || !wanted_(tensor)) continue;
    // A tensor is already prepared if the previous batch ended at it or within it.
    if (!prepared_.contains(next_tensor_)) TENSORMOUNT_RETURN_IF_ERROR(Prepare(next_tensor_));
    const std::vector<ExchangeUnit>& stored = prepared_[next_tensor_].chunks;
    for (; next_chunk_ < stored.size(); ++next_chunk_) {
      if (bytes >= kBatchBytes || chunks >= kBatchChunks) return true;
      AddUnits(stored[next_chunk_]);
      bytes += static_cast<std::uint64_t>(stored[next_chunk_].box.volume()) *
               (tensor.entry().meta.bits() / 8);
      ++chunks;
    }
  }
  return chunks > 0;
}

bool ExchangeUnits::GoesOn(const ExchangeUnit& unit, std::uint64_t size) const {
  if (!far_ || far_reader_ < 0 || unit.file != far_file_) return false;
  return unit.offset >= far_range_.end && unit.offset + size - far_range_.begin <= kFarRunBytes;
}

void ExchangeUnits::AddUnits(const ExchangeUnit& chunk) {
  const TensorMeta& meta = tensor(chunk).entry().meta;
  const std::uint64_t element = meta.bits() / 8;
  const std::uint64_t unit_bytes =
      std::clamp(meta.bytes() / group_size_, kLeastUnitBytes, kUnitBytes);
  std::uint64_t offset = chunk.offset;  // Units are consecutive runs of the chunk.
  SplitBox(chunk.box, element, unit_bytes, [&](const Box& box) {
    ExchangeUnit unit{chunk.tensor, box, chunk.file, offset};
    const std::uint64_t size = static_cast<std::uint64_t>(box.volume()) * element;
    offset += size;
    const Box bytes = BytesOf(unit).box;
    // Among the ranks that want a part of the unit, the one with the fewest bytes to read so far is
    // chosen. Wants are ordered by rank.
    const bool goes_on = GoesOn(unit, size);
    for (const UnitRequest& want : prepared_[chunk.tensor].wants) {
      if (unit.reader == want.rank || (goes_on && unit.reader == far_reader_)) continue;
      const bool wants_it = std::any_of(want.bytes.begin(), want.bytes.end(),
                                        [&](const Box& b) { return !Intersect(bytes, b).empty(); });
      if (!wants_it) continue;
      if (unit.reader < 0 || (goes_on && want.rank == far_reader_) ||
          load_[static_cast<std::size_t>(want.rank)] <
              load_[static_cast<std::size_t>(unit.reader)]) {
        unit.reader = want.rank;
      }
    }
    if (unit.reader < 0) return;
    if (!goes_on || unit.reader != far_reader_) {
      far_reader_ = unit.reader;
      far_file_ = unit.file;
      far_range_.begin = unit.offset;
    }
    far_range_.end = unit.offset + size;
    load_[static_cast<std::size_t>(unit.reader)] += size;
    units_.push_back(std::move(unit));
  });
}

std::uint64_t ExchangeUnits::bytes() const {
  std::uint64_t bytes = 0;
  for (const ExchangeUnit& unit : units_) {
    bytes += static_cast<std::uint64_t>(BytesOf(unit).box.volume());
  }
  return bytes;
}

PlacedBox ExchangeUnits::BytesOf(const ExchangeUnit& unit) const {
  const TensorMeta& meta = plan_.tensors[unit.tensor].entry().meta;
  // Cannot fail: the box is a part of a chunk whose bytes were placed before.
  return PlacePacked(ByteRegion(meta.dtype(), meta.shape(), unit.box).value(), 0).front();
}

std::vector<ExchangeBox> ExchangeUnits::BlocksOf(const ExchangeUnit& unit) const {
  const Box bytes = BytesOf(unit).box;
  std::vector<ExchangeBox> blocks;
  for (const UnitRequest& want : prepared_.at(unit.tensor).wants) {
    for (const Box& wanted : want.bytes) {
      const Box part = Intersect(bytes, wanted);
      if (part.empty()) continue;
      auto block = std::find_if(blocks.begin(), blocks.end(),
                                [&](const ExchangeBox& p) { return p.bytes == part; });
      if (block == blocks.end()) {
        blocks.emplace_back();
        block = blocks.end() - 1;
        block->bytes = part;
      }
      if (want.target != nullptr) block->mine.push_back(want.target);
      if (want.rank == unit.reader) continue;
      if (block->receivers.empty() || block->receivers.back() != want.rank) {
        block->receivers.push_back(want.rank);
      }
    }
  }
  return blocks;
}

}  // namespace tensormount
