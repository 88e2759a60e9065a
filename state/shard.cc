// SPDX-License-Identifier: Apache-2.0
// Checks of a shard against its tensor, and builders of shards from what frameworks know: offsets,
// fragments of an axis, flat ranges (tensormount/shard.h).
#include "tensormount/shard.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "base/checked.h"
#include "base/errors.h"
#include "shard/box_access.h"
#include "shard/tensor_meta.h"
#include "state/shard_check.h"

namespace tensormount {
namespace {

struct Grid {
  Dims shape;
  Dims begin;
};

// The position of a box on a regular grid of boxes of `extents`: the global shape, and the begin of
// the box.
Result<Grid> PlaceOnGrid(const Dims& extents, std::span<const AxisFragment> fragments,
                         int prepended_axes) {
  const auto axis_text = [](const AxisFragment& f) {
    return "axis " + std::to_string(f.axis) + ", fragment " + std::to_string(f.index) + " of " +
           std::to_string(f.count);
  };
  std::array<bool, kMaxRank> named{};
  Grid grid;
  grid.shape = extents;
  grid.begin = Dims::Filled(extents.rank(), 0);
  for (const AxisFragment& f : fragments) {
    if (f.axis < 0 || f.axis >= extents.rank()) {
      return InvalidArgument(axis_text(f) + ": the tensor has " + std::to_string(extents.rank()) +
                             " axes, prepended axes included");
    }
    if (named[static_cast<std::size_t>(f.axis)]) {
      return InvalidArgument("axis " + std::to_string(f.axis) + " is given twice");
    }
    named[static_cast<std::size_t>(f.axis)] = true;
    if (f.count < 1 || f.index < 0 || f.index >= f.count) {
      return InvalidArgument(axis_text(f) + ": the fragment index is out of range");
    }
    const auto whole = CheckedMul(extents[f.axis], f.count);
    if (!whole) return InvalidArgument(axis_text(f) + ": the global extent exceeds 2^63 - 1");
    grid.shape[f.axis] = *whole;
    grid.begin[f.axis] = extents[f.axis] * f.index;
  }
  for (int a = 0; a < prepended_axes; ++a) {
    if (!named[static_cast<std::size_t>(a)]) {
      return InvalidArgument("axis " + std::to_string(a) +
                             " is prepended to the local buffer, so its fragment must be given");
    }
  }
  return grid;
}

Result<Dims> WithPrepended(const Dims& local, int prepended_axes) {
  if (prepended_axes < 0 || prepended_axes > kMaxRank - std::min(local.rank(), kMaxRank)) {
    return InvalidArgument(std::to_string(prepended_axes) + " prepended and " +
                           std::to_string(local.rank()) +
                           " local axes: at most 16 axes in total are allowed");
  }
  Dims extents = Dims::Filled(prepended_axes, 1);
  for (const std::int64_t e : local) {
    if (e < 0) return InvalidArgument("local shape " + local.ToString() + " has a negative extent");
    extents.push_back(e);
  }
  return extents;
}

Result<Shard> CheckedShard(Shard shard) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckShard(shard));
  return shard;
}

Status CheckBuffer(const BufferView& buffer) {
  if (buffer.strides.rank() != buffer.shape.rank()) {
    return InvalidArgument(
        "buffer of shape " + buffer.shape.ToString() +
        " has strides with another number of axes: " + buffer.strides.ToString());
  }
  if (!CheckedProduct(buffer.shape)) {
    return InvalidArgument("buffer of shape " + buffer.shape.ToString() +
                           " has a negative extent or more than 2^63 - 1 elements");
  }
  return Status();
}

// Sub-byte elements have no address of their own, so only packed buffers can be described.
Status CheckStillPacked(const BufferView& view, const char* what) {
  if (InfoOf(view.dtype).bits >= 8 || view.IsPacked()) return Status();
  return Status(Code::kUnsupported, std::string(what) + " a buffer of " +
                                        std::string(InfoOf(view.dtype).name) +
                                        ": the result would not be packed, as elements smaller "
                                        "than a byte must be");
}

}  // namespace

Replica ReplicaFromId(std::span<const std::int64_t> id) {
  const bool zero = std::all_of(id.begin(), id.end(), [](std::int64_t n) { return n == 0; });
  return zero ? Replica::kMain : Replica::kCopy;
}

Replica ReplicaFromId(std::int64_t id) { return id == 0 ? Replica::kMain : Replica::kCopy; }

BufferView WithoutMemory(DType dtype, const Region& region) {
  const Dims extents = region.is_flat() ? Dims{region.volume()} : region.box().extent();
  return BufferView::Host(dtype, static_cast<void*>(nullptr), extents);
}

Status CheckShard(const Shard& shard) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckShape(shard.data.dtype, shard.global_shape));
  if (shard.region.box().rank() != shard.global_shape.rank()) {
    return InvalidArgument("region " + shard.region.ToString() +
                           " has another number of axes than shape " +
                           shard.global_shape.ToString());
  }
  if (!shard.region.Within(shard.global_shape)) {
    return InvalidArgument("region " + shard.region.ToString() + " lies outside of shape " +
                           shard.global_shape.ToString());
  }
  TENSORMOUNT_RETURN_IF_ERROR(
      ByteRegion(shard.data.dtype, shard.global_shape, shard.region).status());
  if (shard.metadata_only) return Status();
  return PlaceBuffer(shard.data, shard.data.dtype, shard.global_shape, shard.region).status();
}

Result<Shard> ShardFromOffsets(const BufferView& local, std::span<const AxisFragment> fragments,
                               int prepended_axes, Replica replica) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckBuffer(local));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims extents, WithPrepended(local.shape, prepended_axes));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Grid grid, PlaceOnGrid(extents, fragments, prepended_axes));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(grid.begin, extents));
  return CheckedShard(
      {.global_shape = grid.shape, .region = Region(box), .data = local, .replica = replica});
}

Result<Shard> FlatShardFromOffsets(const Dims& local_shape, std::span<const AxisFragment> fragments,
                                   std::int64_t first, const BufferView& data, int prepended_axes,
                                   Replica replica) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckBuffer(data));
  if (data.shape.rank() != 1) {
    return InvalidArgument("buffer of shape " + data.shape.ToString() +
                           ": the buffer of a flat range must have one axis");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims extents, WithPrepended(local_shape, prepended_axes));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Grid grid, PlaceOnGrid(extents, fragments, prepended_axes));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(grid.begin, extents));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region region, Region::Flat(box, first, data.shape[0]));
  return CheckedShard(
      {.global_shape = grid.shape, .region = region, .data = data, .replica = replica});
}

Shard MetadataOnly(DType dtype, const Dims& global_shape, const Region& region, Replica replica) {
  return {.global_shape = global_shape,
          .region = region,
          .data = WithoutMemory(dtype, region),
          .replica = replica,
          .metadata_only = true};
}

Result<BufferView> SliceView(const BufferView& buffer, const Box& box) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckBuffer(buffer));
  TENSORMOUNT_RETURN_IF_ERROR(CheckStillPacked(buffer, "slice"));
  if (!box.Within(buffer.shape)) {
    return InvalidArgument("slice " + box.ToString() + " does not lie within a buffer of shape " +
                           buffer.shape.ToString());
  }
  BufferView view = buffer;
  view.shape = box.extent();
  if (box.empty()) {
    view.strides = PackedStrides(view.shape);
    return view;
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckStillPacked(view, "slice"));
  std::int64_t bits = 0;
  for (int a = 0; a < box.rank(); ++a) {
    if (box.begin(a) == 0) continue;
    const auto step = CheckedMul<std::int64_t>(buffer.strides[a], InfoOf(buffer.dtype).bits);
    const auto moved = step ? CheckedMul(*step, box.begin(a)) : std::nullopt;
    const auto sum = moved ? CheckedAdd(bits, *moved) : std::nullopt;
    if (!sum) {
      return InvalidArgument("slice " + box.ToString() + " of a buffer with strides " +
                             buffer.strides.ToString() + " begins past 2^63 bits");
    }
    bits = *sum;
  }
  if (bits % 8 != 0) {
    return Status(Code::kUnsupported, "slice " + box.ToString() + " of " +
                                          std::string(InfoOf(buffer.dtype).name) +
                                          " does not begin on a byte boundary");
  }
  if (view.data != nullptr) view.data = static_cast<std::byte*>(view.data) + bits / 8;
  return view;
}

Result<BufferView> TransposeView(const BufferView& buffer, std::span<const int> axes) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckBuffer(buffer));
  TENSORMOUNT_RETURN_IF_ERROR(CheckStillPacked(buffer, "transpose"));
  const int rank = buffer.shape.rank();
  std::array<bool, kMaxAxes> used{};
  BufferView view = buffer;
  view.shape = Dims();
  view.strides = Dims();
  for (const int axis : axes) {
    if (axis < 0 || axis >= rank || used[static_cast<std::size_t>(axis)]) break;
    used[static_cast<std::size_t>(axis)] = true;
    view.shape.push_back(buffer.shape[axis]);
    view.strides.push_back(buffer.strides[axis]);
  }
  if (axes.size() != static_cast<std::size_t>(rank) || view.shape.rank() != rank) {
    std::string list;
    for (const int axis : axes.first(std::min<std::size_t>(axes.size(), kMaxAxes))) {
      list += (list.empty() ? "" : ", ") + std::to_string(axis);
    }
    return InvalidArgument("axes (" + list + ") are not a permutation of the " +
                           std::to_string(rank) + " axes");
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckStillPacked(view, "transpose"));
  return view;
}

Result<BufferView> UnsqueezeView(const BufferView& buffer, int axis) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckBuffer(buffer));
  const int rank = buffer.shape.rank();
  if (axis < 0 || axis > rank || rank >= kMaxRank) {
    return InvalidArgument("axis " + std::to_string(axis) +
                           " cannot be added to a buffer of shape " + buffer.shape.ToString());
  }
  BufferView view = buffer;
  view.shape = Dims();
  view.strides = Dims();
  for (int a = 0; a <= rank; ++a) {
    if (a == axis) {
      view.shape.push_back(1);
      view.strides.push_back(0);  // The axis has extent 1, so its stride is not used.
    }
    if (a == rank) break;
    view.shape.push_back(buffer.shape[a]);
    view.strides.push_back(buffer.strides[a]);
  }
  return view;
}

}  // namespace tensormount
