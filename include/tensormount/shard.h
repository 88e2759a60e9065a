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
// arithmetic on regions, shapes and strides: it copies no data. Views replace Megatron-Core's
// factories (splitting a gated layer, stacking layers, transposing), and the same view serves save
// and load.

namespace tensormount {

// Label of a shard whose region several ranks hold. Optional: equal regions without labels are
// replicas of each other, and the lowest rank's counts as the main one. With labels, exactly one
// rank's shard of a region is main; a key must not have both labelled and unlabelled shards.
enum class Replica : std::uint8_t { kUnlabelled, kMain, kCopy };

// Converts Megatron's replica ids: kMain if all numbers are zero (or there are none), else kCopy.
TENSORMOUNT_EXPORT Replica ReplicaFromId(std::span<const std::int64_t> id);
TENSORMOUNT_EXPORT Replica ReplicaFromId(std::int64_t id);

// The part of a global tensor that one rank holds. A value type.
struct Shard {
  Dims global_shape;
  Region region;
  // The memory of the region, which belongs to the caller. Its shape is the region's extents;
  // leading axes of extent one may be left out (layers stacked under one key). For a flat range it
  // has one axis.
  BufferView data;
  Replica replica = Replica::kUnlabelled;
  // True: only `data.dtype` is used, and there is no memory; for checks of a layout, and for loads
  // after StateDict::AllocateData.
  bool metadata_only = false;
};

// A rank's position on one axis of a regular grid: part `index` of `count` equal parts.
struct AxisFragment {
  int axis = 0;  // Axis of the global tensor.
  std::int64_t index = 0;
  std::int64_t count = 1;
};

// The shard of a rank that holds `local`, whose shape is the local extents without the first
// `prepended_axes`. Axes without a fragment are not cut. A prepended axis is one that the local
// buffer lacks: it has extent one in the shard and `count` in the global tensor, and needs a
// fragment.
//   local [1, 3, 7, 9], {0: 0 of 10}, {2: 3 of 6}  ->  shape [10, 3, 42, 9], begin [0, 0, 21, 0]
// kInvalidArgument: an axis twice or out of range, an index outside [0, count), or a product that
// overflows.
TENSORMOUNT_EXPORT Result<Shard> ShardFromOffsets(const BufferView& local,
                                                  std::span<const AxisFragment> fragments,
                                                  int prepended_axes = 0,
                                                  Replica replica = Replica::kUnlabelled);
// Like ShardFromOffsets, for a flat range: `data` has one axis and holds elements [first, first +
// its length) of the row-major order of the local box `local_shape` (ZeRO: a data-parallel slice of
// a tensor-parallel shard).
TENSORMOUNT_EXPORT Result<Shard> FlatShardFromOffsets(const Dims& local_shape,
                                                      std::span<const AxisFragment> fragments,
                                                      std::int64_t first, const BufferView& data,
                                                      int prepended_axes = 0,
                                                      Replica replica = Replica::kUnlabelled);
// A shard without memory, for checking a layout or for later allocation. Its data has the region's
// extents (one axis for flat ranges), packed.
TENSORMOUNT_EXPORT Shard MetadataOnly(DType dtype, const Dims& global_shape, const Region& region,
                                      Replica replica = Replica::kUnlabelled);

// ---- Views of buffers ----------------------------------------------------------------------
// All functions of this section return kInvalidArgument if axes, boxes or sizes do not match, and
// kUnsupported for element types below one byte if the result would not be packed.

// The part `box` of a buffer.
TENSORMOUNT_EXPORT Result<BufferView> SliceView(const BufferView& buffer, const Box& box);
// Axis i of the result is axis axes[i] of the buffer.
TENSORMOUNT_EXPORT Result<BufferView> TransposeView(const BufferView& buffer,
                                                    std::span<const int> axes);
// Adds an axis of extent one, which will be axis `axis` of the result.
TENSORMOUNT_EXPORT Result<BufferView> UnsqueezeView(const BufferView& buffer, int axis);

// ---- Views of shards -----------------------------------------------------------------------
// These functions convert a shard of one global tensor to a shard of another one. Labels and
// `metadata_only` are kept. Flat ranges can be combined (Concatenated, Stacked) on any axis. They
// can be cut (Split, Sliced, NarrowedOnGrid, Interleaved) only on the first axis on which they have
// more than one row, or if the cut keeps all or nothing; other cuts are kUnsupported, because the
// result would be several ranges. Empty results are valid shards.

// Splits the global tensor into consecutive parts along `axis`: part i has extent sizes[i] and
// becomes its own global tensor, of which the result is a shard. Sizes must add up.
TENSORMOUNT_EXPORT Result<std::vector<Shard>> Split(const Shard& shard, int axis,
                                                    std::span<const std::int64_t> sizes);
// Places the shard's tensor at `offset` on `axis` of a larger concatenated tensor, whose extent
// there is `total`.
TENSORMOUNT_EXPORT Result<Shard> Concatenated(const Shard& shard, int axis, std::int64_t offset,
                                              std::int64_t total);
// The shard's tensor becomes part `index` of a larger tensor, in which `count` tensors of its shape
// are stacked along a new axis `axis`.
TENSORMOUNT_EXPORT Result<Shard> Stacked(const Shard& shard, int axis, std::int64_t index,
                                         std::int64_t count);
// Axis i of the new tensor is axis axes[i] of the shard's tensor. Only for boxes.
TENSORMOUNT_EXPORT Result<Shard> Transposed(const Shard& shard, std::span<const int> axes);
// The part `box` of the global tensor as a tensor of its own.
TENSORMOUNT_EXPORT Result<Shard> Sliced(const Shard& shard, const Box& box);
// The same global tensor, but only elements [begin, begin + extent) of this shard's axis `axis`.
// Only for boxes, because a flat range has no such axis.
TENSORMOUNT_EXPORT Result<Shard> Narrowed(const Shard& shard, int axis, std::int64_t begin,
                                          std::int64_t extent);
// Megatron's ShardedTensor.narrow: every rank holds `local_extent` on `axis` and keeps elements
// [begin, begin + extent) of these. Together the ranks form a new tensor with the same cuts: the
// global extent and the shard's offset scale by extent / local_extent.
TENSORMOUNT_EXPORT Result<Shard> NarrowedOnGrid(const Shard& shard, int axis,
                                                std::int64_t local_extent, std::int64_t begin,
                                                std::int64_t extent);

// A part of an axis for Interleaved: what the shard describes as elements [from, from + extent) is
// elements [to, to + extent) of the global tensor.
struct AxisMove {
  std::int64_t from = 0;
  std::int64_t extent = 0;
  std::int64_t to = 0;
};
// For a buffer whose parts are not contiguous in the global tensor. `shard` describes the buffer as
// if they were contiguous. The result has one shard of the same tensor per move, in order; a shard
// is empty if `shard` has nothing of that move. Moves must be disjoint, before and after, and cover
// the shard.
TENSORMOUNT_EXPORT Result<std::vector<Shard>> Interleaved(const Shard& shard, int axis,
                                                          std::span<const AxisMove> moves);
// The moves of rank `index` of `count`, if global parts of `sizes` (gate and up; query, key and
// value) are each cut evenly over the ranks, and each rank stores its pieces one after the other:
//   sizes {8, 8}, rank 1 of 4: from [4, 6) to [2, 4), and from [6, 8) to [10, 12).
TENSORMOUNT_EXPORT Result<std::vector<AxisMove>> FusedMoves(std::span<const std::int64_t> sizes,
                                                            std::int64_t index, std::int64_t count);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_H_
