// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_H_
#define TENSORMOUNT_SHARD_H_

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

// Shards, and how they are made: from offsets in a grid of ranks, and by views. A view is
// arithmetic on regions, shapes and strides; no byte is copied when it is made, and none more than
// without it when it is saved or loaded. What Megatron-Core calls factories (splitting a gated
// layer, stacking layers, transposing) is a view here, and the same view serves save and load.

namespace tensormount {

// Who of several holders of the same cells is the one that counts. Optional: equal regions without
// labels are replicas of each other, and one of them is elected. Where labels are given, exactly
// one holder of a region is main; a key must not have labelled and unlabelled shards.
enum class Replica : std::uint8_t { kUnlabelled, kMain, kCopy };

// Megatron's replica ids: main where all numbers are zero (or there are none).
TENSORMOUNT_EXPORT Replica ReplicaFromId(std::span<const std::int64_t> id);
TENSORMOUNT_EXPORT Replica ReplicaFromId(std::int64_t id);

// What one rank holds of a global tensor. A value.
struct Shard {
  Dims global_shape;
  Region region;
  // The region's extents; leading axes of extent one may be left out (layers stacked under one
  // key). A flat range has one axis. The caller's memory, never owned.
  BufferView data;
  Replica replica = Replica::kUnlabelled;
  // Only `data.dtype` is meant; there are no bytes. For checks of a layout, and for loads after
  // StateDict::AllocateData.
  bool metadata_only = false;
};

// Where a rank stands on one axis of a regular grid: part `index` of `count` equal ones.
struct AxisFragment {
  int axis = 0;  // Of the global tensor.
  std::int64_t index = 0;
  std::int64_t count = 1;
};

// The shard of a rank that holds `local` (its shape is the local extents without the first
// `prepended_axes`). Axes that are not named are not cut. A prepended axis is one that the local
// buffer lacks: extent one here, `count` in the global tensor; it must be named.
//   local [1, 3, 7, 9], {0: 0 of 10}, {2: 3 of 6}  ->  shape [10, 3, 42, 9], begin [0, 0, 21, 0]
// kInvalidArgument: an axis twice or out of range, an index outside of its count, a product that
// does not fit.
TENSORMOUNT_EXPORT Result<Shard> ShardFromOffsets(const BufferView& local,
                                                  std::span<const AxisFragment> fragments,
                                                  int prepended_axes = 0,
                                                  Replica replica = Replica::kUnlabelled);
// Likewise of a flat range: `data` has one axis and holds elements [first, first + its length) of
// the row-major order of the local box `local_shape` (ZeRO: a data-parallel slice of a
// tensor-parallel shard).
TENSORMOUNT_EXPORT Result<Shard> FlatShardFromOffsets(const Dims& local_shape,
                                                      std::span<const AxisFragment> fragments,
                                                      std::int64_t first, const BufferView& data,
                                                      int prepended_axes = 0,
                                                      Replica replica = Replica::kUnlabelled);
// Without data: for checking a layout, or to be allocated before a load. Its data has the region's
// extents (one axis for flat ranges), packed, and no memory.
TENSORMOUNT_EXPORT Shard MetadataOnly(DType dtype, const Dims& global_shape, const Region& region,
                                      Replica replica = Replica::kUnlabelled);

// ---- Views of buffers ----------------------------------------------------------------------
// All kInvalidArgument where axes, boxes or sizes do not fit, kUnsupported for element types
// under a byte where the result would not be packed.

// The part `box` of a buffer.
TENSORMOUNT_EXPORT Result<BufferView> SliceView(const BufferView& buffer, const Box& box);
// Axis i of the result is axis axes[i] of the buffer.
TENSORMOUNT_EXPORT Result<BufferView> TransposeView(const BufferView& buffer,
                                                    std::span<const int> axes);
// Adds an axis of extent one, which will be axis `axis` of the result.
TENSORMOUNT_EXPORT Result<BufferView> UnsqueezeView(const BufferView& buffer, int axis);

// ---- Views of shards -----------------------------------------------------------------------
// How a shard of one global tensor is a shard of another one. Labels and `metadata_only` are kept.
// Flat ranges can be put together (Concatenated, Stacked) on any axis, and be cut (Split, Sliced,
// NarrowedOnGrid, Interleaved) on the first axis on which they have more than one row, or where the
// cut leaves all or nothing of them; kUnsupported says that a cut would need more than one range.
// Empty results are legal shards, but have no cells.

// Cut into consecutive parts along `axis`: part i of the global tensor, sizes[i] long there,
// becomes a global tensor of its own, and this its shard. Sizes must add up.
TENSORMOUNT_EXPORT Result<std::vector<Shard>> Split(const Shard& shard, int axis,
                                                    std::span<const std::int64_t> sizes);
// One of several tensors that stand one after the other on `axis` of a larger one: `offset` is
// where this begins there and `total` the extent of the whole.
TENSORMOUNT_EXPORT Result<Shard> Concatenated(const Shard& shard, int axis, std::int64_t offset,
                                              std::int64_t total);
// Number `index` of `count` tensors of equal shape that are stacked along a new axis `axis`.
TENSORMOUNT_EXPORT Result<Shard> Stacked(const Shard& shard, int axis, std::int64_t index,
                                         std::int64_t count);
// Axis i of the new tensor is axis axes[i] of this one. Of boxes only.
TENSORMOUNT_EXPORT Result<Shard> Transposed(const Shard& shard, std::span<const int> axes);
// The part `box` of the global tensor as a tensor of its own.
TENSORMOUNT_EXPORT Result<Shard> Sliced(const Shard& shard, const Box& box);
// The same tensor, less of this shard: elements [begin, begin + extent) of its own axis `axis`. Of
// boxes only (a flat range has no axis of its own).
TENSORMOUNT_EXPORT Result<Shard> Narrowed(const Shard& shard, int axis, std::int64_t begin,
                                          std::int64_t extent);
// What Megatron's ShardedTensor.narrow does: all ranks hold `local_extent` on `axis` and keep
// elements [begin, begin + extent) of these, which together are a tensor of their own, cut as the
// old one is: its shape and the beginning of this shard scale by extent / local_extent.
TENSORMOUNT_EXPORT Result<Shard> NarrowedOnGrid(const Shard& shard, int axis,
                                                std::int64_t local_extent, std::int64_t begin,
                                                std::int64_t extent);

// Elements [from, from + extent) of an axis truly stand at [to, to + extent).
struct AxisMove {
  std::int64_t from = 0;
  std::int64_t extent = 0;
  std::int64_t to = 0;
};
// A buffer that holds parts of the global tensor which do not stand one after the other there.
// `shard` says what it would hold if they did; the result has one shard a move, in order (empty
// where the shard has nothing of it), all of the same tensor. Moves must be disjoint, before and
// after, and cover the shard.
TENSORMOUNT_EXPORT Result<std::vector<Shard>> Interleaved(const Shard& shard, int axis,
                                                          std::span<const AxisMove> moves);
// The moves of rank `index` of `count` where global parts of `sizes` (gate and up; query, key and
// value) are each cut evenly over the ranks, and a rank has its pieces one after the other:
//   sizes {8, 8}, rank 1 of 4: [4, 6) is at [2, 4), [6, 8) is at [10, 12).
TENSORMOUNT_EXPORT Result<std::vector<AxisMove>> FusedMoves(std::span<const std::int64_t> sizes,
                                                            std::int64_t index, std::int64_t count);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_H_
