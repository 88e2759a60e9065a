// SPDX-License-Identifier: Apache-2.0
// A shard's bytes in packed row-major order, from memory of any strides, in place if already
// packed.
#include "collective/save/packed_source.h"

#include "shard/copy_plan.h"
#include "shard/strided_digest.h"

namespace tensormount {

Result<PackedSource> PackedSource::Make(const Shard& shard) { return Make(shard, 0, {}); }

Result<PackedSource> PackedSource::Make(const Shard& shard, std::uint32_t item,
                                        const ShardReader& read) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckMemory(shard.data));
  PackedSource source;
  const DType dtype = shard.data.dtype;
  TENSORMOUNT_ASSIGN_OR_RETURN(source.region_, ByteRegion(dtype, shard.global_shape, shard.region));
  source.byte_shape_ = ByteShape(dtype, shard.global_shape);
  source.bytes_ = static_cast<std::uint64_t>(source.region_.volume());
  if (shard.metadata_only && read) {
    source.read_ = &read;
    source.item_ = item;
    return source;
  }
  source.base_ = static_cast<const std::byte*>(shard.data.data);
  TENSORMOUNT_ASSIGN_OR_RETURN(source.placed_,
                               PlaceBuffer(shard.data, dtype, shard.global_shape, shard.region));
  source.packed_ = shard.data.IsPacked();
  if (IsDeviceMemory(shard.data)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(source.device_, OpenDevice(shard.data.device));
  }
  return source;
}

Region PackedSource::Bytes(std::uint64_t offset, std::uint64_t size) const {
  return Region::Flat(region_.box(), region_.flat_first() + static_cast<std::int64_t>(offset),
                      static_cast<std::int64_t>(size))
      .value();
}

// The wanted bytes and the memory are both sets of boxes; their intersections are copied, each byte
// once, and cover all wanted bytes.
template <typename Fn>
void PackedSource::ForEachCopy(std::uint64_t offset, std::uint64_t size, Fn fn) const {
  for (const PlacedBox& want : PlacePacked(Bytes(offset, size), 0)) {
    for (const PlacedBox& have : placed_) {
      const Box part = Intersect(want.box, have.box);
      if (!part.empty()) fn(PlanCopy(part, have, want));
    }
  }
}

std::vector<StridedCopy> PackedSource::Gather(std::uint64_t offset, std::uint64_t size) const {
  std::vector<StridedCopy> gather;
  if (packed_) {
    gather.emplace_back();
    gather.back().src_offset = static_cast<std::int64_t>(offset);
    gather.back().run = size;
  } else {
    ForEachCopy(offset, size, [&](const StridedCopy& plan) { gather.push_back(plan); });
  }
  return gather;
}

Result<const std::byte*> PackedSource::Fetch(std::uint64_t offset, std::size_t size,
                                             std::byte* scratch) const {
  if (read_ != nullptr) {
    TENSORMOUNT_RETURN_IF_ERROR((*read_)(item_, offset, {scratch, size}));
    return scratch;
  }
  if (packed_) return base_ + offset;
  ForEachCopy(offset, size, [&](const StridedCopy& plan) { ExecuteCopy(plan, base_, scratch); });
  return scratch;
}

Crc64 PackedSource::Digest(std::uint64_t offset, std::size_t size, const std::byte* data) const {
  Crc64 digest = 0;
  for (const PlacedBox& placed : PlacePacked(Bytes(offset, size), 0)) {
    digest ^= DigestOfPlaced(placed, data, byte_shape_);
  }
  return digest;
}

}  // namespace tensormount
