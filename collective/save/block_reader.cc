// SPDX-License-Identifier: Apache-2.0
// Reads bytes of shards in the order of writing. Device memory is copied ahead: several small
// ranges, or a part of a large one, in one submission to one block of the device's ring.
#include "collective/save/block_reader.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace tensormount {
namespace {

constexpr std::size_t kPiecesAhead = 4096;

}  // namespace

BlockReader::~BlockReader() {
  const Deadline deadline = Deadline::After(kDeviceGrace);
  for (const StartedRange& begun : begun_) {
    for (const Part& part : begun.parts) part.block->Settle(deadline);
  }
}

Status BlockReader::FailureOf(std::size_t range, const Status& why) const {
  return why.WithContext("tensor " + state_.tensors()[ranges_[range].item].key);
}

Status BlockReader::BeginNext() {
  if (next_ == ranges_.size()) {
    return {Code::kInternal, "internal error: more blocks are read than planned"};
  }
  const std::uint32_t item = ranges_[next_].item;
  static const ShardReader none;
  Result<PackedSource> source = PackedSource::Make(state_.tensors()[item].shard, item,
                                                   rules_.read != nullptr ? *rules_.read : none);
  if (!source.ok()) return FailureOf(next_, source.status());
  begun_.push_back({next_++, std::move(source).value(), {}, 0});
  return {};
}

Result<const PackedSource*> BlockReader::Next() {
  if (started_) {
    begun_.pop_front();
    if (first_unsubmitted_ > 0) --first_unsubmitted_;
  }
  started_ = false;
  if (begun_.empty()) TENSORMOUNT_RETURN_IF_ERROR(BeginNext());
  started_ = true;
  taken_ = 0;
  return &begun_.front().source;
}

Result<std::span<const std::byte>> BlockReader::Take(std::size_t most) {
  StartedRange& begun = begun_.front();
  const PlannedRange& range = ranges_[begun.range];
  most = static_cast<std::size_t>(std::min<std::uint64_t>(most, range.bytes - taken_));
  Result<std::span<const std::byte>> block = std::span<const std::byte>();
  if (begun.source.device() != nullptr) {
    block = TakeFromDevice(begun, most);
  } else {
    if (!begun.source.in_place()) {
      most = std::min(most, kBlockBytes);
      if (scratch_ == nullptr) scratch_ = std::make_unique_for_overwrite<std::byte[]>(kBlockBytes);
    }
    const Result<const std::byte*> data =
        begun.source.Fetch(range.begin + taken_, most, scratch_.get());
    if (!data.ok()) return data.status();
    block = std::span<const std::byte>(data.value(), most);
  }
  if (!block.ok()) return FailureOf(begun.range, block.status());
  taken_ += block.value().size();
  return block;
}

Result<std::span<const std::byte>> BlockReader::TakeFromDevice(StartedRange& begun,
                                                               std::size_t most) {
  // The caller has finished with the previous bytes, so a block of which all bytes were taken is
  // freed.
  while (!begun.parts.empty() && begun.parts.front().bytes == 0) begun.parts.pop_front();
  TENSORMOUNT_RETURN_IF_ERROR(Advance());
  Part& part = begun.parts.front();
  TENSORMOUNT_RETURN_IF_ERROR(part.block->AwaitTransfer(rules_));
  const std::size_t n = std::min(most, part.bytes);
  const std::span<const std::byte> bytes(part.block->data() + part.offset, n);
  part.offset += n;
  part.bytes -= n;
  return bytes;
}

BlockReader::StartedRange* BlockReader::FirstUnsubmitted() {
  for (;; ++first_unsubmitted_) {
    if (first_unsubmitted_ == begun_.size()) {
      // If a range cannot begin, Next reports the failure when the range is due.
      if (next_ == ranges_.size() || begun_.size() >= kPiecesAhead || !BeginNext().ok()) {
        return nullptr;
      }
    }
    StartedRange& begun = begun_[first_unsubmitted_];
    if (begun.source.device() != nullptr && begun.submitted < ranges_[begun.range].bytes) {
      return &begun;
    }
  }
}

Status BlockReader::Advance() {
  while (const StartedRange* wanted = FirstUnsubmitted()) {
    const std::shared_ptr<const OpenedDevice> device = wanted->source.device();
    std::optional<PinnedRing::Block> block = device->ring->TryTake();
    if (!block) {
      // All blocks are in use. Waiting for a block while this reader has some could deadlock.
      if (first_unsubmitted_ > 0 || !wanted->parts.empty()) return {};
      TENSORMOUNT_ASSIGN_OR_RETURN(block, rules_.TakeBlock(*device));
    }
    TENSORMOUNT_RETURN_IF_ERROR(SubmitCopy(device, std::move(*block)));
  }
  return {};
}

// Fills the block with the next ranges in order and stops at a range of another device. Skipping
// ahead would hold a block for a later range while an earlier one waits for a block (deadlock).
Status BlockReader::SubmitCopy(const std::shared_ptr<const OpenedDevice>& device,
                               PinnedRing::Block taken) {
  TENSORMOUNT_ASSIGN_OR_RETURN(DeviceQueue* const queue, queues_.Of(device));
  const auto block = std::make_shared<BlockInTransit>(std::move(taken), device);
  copies_.clear();
  std::size_t used = 0;
  while (used < block->size()) {
    StartedRange* const begun = FirstUnsubmitted();
    if (begun == nullptr || begun->source.device() != device) break;
    const PlannedRange& range = ranges_[begun->range];
    const auto n = static_cast<std::size_t>(
        std::min<std::uint64_t>(block->size() - used, range.bytes - begun->submitted));
    for (const StridedCopy& plan : begun->source.Gather(range.begin + begun->submitted, n)) {
      copies_.push_back({plan, begun->source.base(), block->data() + used});
    }
    begun->parts.push_back({block, used, n});
    begun->submitted += n;
    used = AlignedInBlock(used + n);
  }
  return block->Launch(*queue, [&] { return queue->CopyOut(copies_); });
}

}  // namespace tensormount
