// SPDX-License-Identifier: Apache-2.0
// Bytes of shards in the order in which they are written. Pieces of device memory are copied ahead:
// several small ones, or a part of a large one, in one submission to one block of the device's
// ring.
#include "collective/save/block_reader.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace tensormount {
namespace {

// Pieces that are begun before they are wanted, at most.
constexpr std::size_t kPiecesAhead = 4096;

}  // namespace

BlockReader::~BlockReader() {
  const Deadline deadline = Deadline::After(kDeviceGrace);
  for (const Begun& begun : begun_) {
    for (const Part& part : begun.parts) part.block->Settle(deadline);
  }
}

Status BlockReader::Failed(std::size_t piece, const Status& why) const {
  return why.WithContext("tensor " + state_.tensors()[pieces_[piece].item].key);
}

Status BlockReader::BeginNext() {
  if (next_ == pieces_.size()) return {Code::kInternal, "no piece was planned any more"};
  const std::uint32_t item = pieces_[next_].item;
  static const ShardReader none;
  Result<PackedSource> source = PackedSource::Make(state_.tensors()[item].shard, item,
                                                   rules_.read != nullptr ? *rules_.read : none);
  if (!source.ok()) return Failed(next_, source.status());
  begun_.push_back({next_++, std::move(source).value(), {}, 0});
  return {};
}

Result<const PackedSource*> BlockReader::Next() {
  if (started_) {
    begun_.pop_front();
    if (grounded_ > 0) --grounded_;
  }
  started_ = false;
  if (begun_.empty()) TENSORMOUNT_RETURN_IF_ERROR(BeginNext());
  started_ = true;
  taken_ = 0;
  return &begun_.front().source;
}

Result<std::span<const std::byte>> BlockReader::Take(std::size_t most) {
  Begun& begun = begun_.front();
  const Wanted& piece = pieces_[begun.piece];
  most = static_cast<std::size_t>(std::min<std::uint64_t>(most, piece.bytes - taken_));
  Result<std::span<const std::byte>> block = std::span<const std::byte>();
  if (begun.source.device() != nullptr) {
    block = TakeFlown(begun, most);
  } else {
    if (!begun.source.in_place()) {
      most = std::min(most, kBlockBytes);
      if (scratch_ == nullptr) scratch_ = std::make_unique_for_overwrite<std::byte[]>(kBlockBytes);
    }
    const Result<const std::byte*> data =
        begun.source.Fetch(piece.begin + taken_, most, scratch_.get());
    if (!data.ok()) return data.status();
    block = std::span<const std::byte>(data.value(), most);
  }
  if (!block.ok()) return Failed(begun.piece, block.status());
  taken_ += block.value().size();
  return block;
}

Result<std::span<const std::byte>> BlockReader::TakeFlown(Begun& begun, std::size_t most) {
  // What was given out last is done with, and its block too if that was the last of it.
  while (!begun.parts.empty() && begun.parts.front().bytes == 0) begun.parts.pop_front();
  TENSORMOUNT_RETURN_IF_ERROR(Advance());
  Part& part = begun.parts.front();
  TENSORMOUNT_RETURN_IF_ERROR(part.block->Land(rules_));
  const std::size_t n = std::min(most, part.bytes);
  const std::span<const std::byte> bytes(part.block->data() + part.offset, n);
  part.offset += n;
  part.bytes -= n;
  return bytes;
}

BlockReader::Begun* BlockReader::Grounded() {
  for (;; ++grounded_) {
    if (grounded_ == begun_.size()) {
      // What cannot begin says so when its turn comes.
      if (next_ == pieces_.size() || begun_.size() >= kPiecesAhead || !BeginNext().ok()) {
        return nullptr;
      }
    }
    Begun& begun = begun_[grounded_];
    if (begun.source.device() != nullptr && begun.submitted < pieces_[begun.piece].bytes) {
      return &begun;
    }
  }
}

Status BlockReader::Advance() {
  while (const Begun* wanted = Grounded()) {
    const std::shared_ptr<const OpenedDevice> device = wanted->source.device();
    std::optional<PinnedRing::Block> block = device->ring->TryTake();
    if (!block) {
      // Others have them all. To wait for one while holding some might be for ever.
      if (grounded_ > 0 || !wanted->parts.empty()) return {};
      TENSORMOUNT_ASSIGN_OR_RETURN(block, rules_.TakeBlock(*device));
    }
    TENSORMOUNT_RETURN_IF_ERROR(Fly(device, std::move(*block)));
  }
  return {};
}

// In the order of pieces, whatever device they are on: so nothing is held for a later piece while
// an earlier one waits for a block.
Status BlockReader::Fly(const std::shared_ptr<const OpenedDevice>& device,
                        PinnedRing::Block taken) {
  TENSORMOUNT_ASSIGN_OR_RETURN(DeviceQueue* const queue, queues_.Of(device));
  const auto block = std::make_shared<FlyingBlock>(std::move(taken), device);
  copies_.clear();
  std::size_t used = 0;
  while (used < block->size()) {
    Begun* const begun = Grounded();
    if (begun == nullptr || begun->source.device() != device) break;
    const Wanted& piece = pieces_[begun->piece];
    const auto n = static_cast<std::size_t>(
        std::min<std::uint64_t>(block->size() - used, piece.bytes - begun->submitted));
    for (const StridedCopy& plan : begun->source.Gather(piece.begin + begun->submitted, n)) {
      copies_.push_back({plan, begun->source.base(), block->data() + used});
    }
    begun->parts.push_back({block, used, n});
    begun->submitted += n;
    used = AlignedInBlock(used + n);
  }
  return block->Launch(*queue, [&] { return queue->CopyOut(copies_); });
}

}  // namespace tensormount
