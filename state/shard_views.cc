// SPDX-License-Identifier: Apache-2.0
// Views of shards (Narrowed, Split, Stacked, Transposed, Interleaved, ...) of tensormount/shard.h:
// another tensor seen through the same memory, without a copy. shard.cc makes shards; the functions
// here take one shard to another. Each checks its argument (most by Normalized) and its result
// (CheckedView), so that a view meets the same rules as a shard that a caller made.
#include <algorithm>
#include <string>

#include "tensormount/shard.h"

#include "base/checked.h"
#include "base/errors.h"
#include "shard/box_access.h"
#include "shard/tensor_meta.h"
#include "state/shard_check.h"

namespace tensormount {
namespace {

// `region` with another begin and extent on one axis, whose numbers the caller has checked.
Region WithAxis(const Region& region, int axis, std::int64_t begin, std::int64_t extent) {
  return BoxAccess::WithAxis(region.box(), axis, begin, extent);
}

// Checks a shard and converts it to the form that views start from: the buffer of a box has all
// axes of the box, the buffer of a flat range has one axis, and an empty region is a box (except
// for scalars).
Result<Shard> Normalized(const Shard& shard) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckShard(shard));
  Shard out = shard;
  if (out.region.empty() && out.region.is_flat() && out.region.box().rank() > 0) {
    out.region = WithAxis(out.region, 0, out.region.box().begin(0), 0);
  }
  BufferView& data = out.data;
  if (out.metadata_only) {
    data = WithoutMemory(data.dtype, out.region);
    return out;
  }
  if (out.region.is_flat()) return out;
  const Dims& extents = out.region.box().extent();
  const int lacking = extents.rank() - data.shape.rank();
  if (out.region.empty()) {
    data.strides = PackedStrides(extents);
  } else if (data.shape.rank() == 1 && data.shape[0] == out.region.volume()) {
    // The buffer has one axis with all elements of the box in row-major order. If all other axes of
    // the box have extent 1, the next branch would give the same strides.
    const std::int64_t step = data.strides[0];
    data.strides = PackedStrides(extents);
    // The stride of an axis of extent 1 does not matter, and its product could overflow. The other
    // products fit: CheckShard has checked the extent of the buffer in bytes.
    for (int a = 0; a < extents.rank(); ++a) {
      data.strides[a] = extents[a] == 1 ? 0 : data.strides[a] * step;
    }
  } else if (lacking > 0) {
    Dims strides = Dims::Filled(lacking, 0);
    for (const std::int64_t s : data.strides) strides.push_back(s);
    data.strides = strides;
  }
  data.shape = extents;
  return out;
}

Status CheckAxis(const Shard& shard, int axis) {
  if (axis >= 0 && axis < shard.global_shape.rank()) return Status();
  return InvalidArgument("a tensor of shape " + shard.global_shape.ToString() + " has no axis " +
                         std::to_string(axis));
}

// The part of a normalized shard in [lo, hi) on `axis`, in the same coordinates; an empty part lies
// in [lo, hi], unless the shard is empty itself. Requires 0 <= lo <= hi <= the global extent of
// `axis`.
Result<Shard> Cut(const Shard& shard, int axis, std::int64_t lo, std::int64_t hi) {
  const Box& box = shard.region.box();
  const std::int64_t from = std::clamp(box.begin(axis), lo, hi);
  const std::int64_t to = std::clamp(box.end(axis), lo, hi);
  if (from == box.begin(axis) && to == box.end(axis)) return shard;
  Shard part = shard;
  if (from == to || !shard.region.is_flat()) {
    part.region = WithAxis(shard.region, axis, from, to - from);
    if (shard.metadata_only || from == to) {
      const BufferView empty = WithoutMemory(shard.data.dtype, part.region);
      part.data.shape = empty.shape;
      part.data.strides = empty.strides;
      return part;
    }
    const Box inside =
        BoxAccess::WithAxis(Box::Whole(box.extent()), axis, from - box.begin(axis), to - from);
    TENSORMOUNT_ASSIGN_OR_RETURN(part.data, SliceView(shard.data, inside));
    return part;
  }
  // Cuts whole rows out of a flat range.
  std::int64_t row = 1;
  for (int a = 0; a < box.rank(); ++a) {
    if (a < axis && box.extent(a) != 1) {
      return Status(Code::kUnsupported, "region " + shard.region.ToString() +
                                            " cannot be cut on axis " + std::to_string(axis) +
                                            ": the result would not be one flat range");
    }
    if (a > axis) row *= box.extent(a);
  }
  const std::int64_t first = shard.region.flat_first();
  const std::int64_t end = first + shard.region.volume();
  const std::int64_t cut_first = std::clamp((from - box.begin(axis)) * row, first, end);
  const std::int64_t cut_end = std::clamp((to - box.begin(axis)) * row, first, end);
  TENSORMOUNT_ASSIGN_OR_RETURN(part.region, Region::Flat(box, cut_first, cut_end - cut_first));
  if (cut_first == cut_end) part.region = WithAxis(part.region, axis, from, 0);
  if (shard.metadata_only) {
    part.data = WithoutMemory(shard.data.dtype, part.region);
    return part;
  }
  const Box inside = BoxAccess::Make(Dims{cut_first - first}, Dims{cut_end - cut_first});
  TENSORMOUNT_ASSIGN_OR_RETURN(part.data, SliceView(shard.data, inside));
  // Region::Flat makes a box of a range of whole rows, and the buffer of a box needs all axes.
  return Normalized(part);
}

// The shard with its region moved by `distance` along `axis`, in a tensor whose extent there is
// `extent`.
Result<Shard> Moved(Shard shard, int axis, std::int64_t distance, std::int64_t extent) {
  const Region& region = shard.region;
  const Box box = BoxAccess::WithAxis(region.box(), axis, region.box().begin(axis) + distance,
                                      region.box().extent(axis));
  if (region.is_flat()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(shard.region,
                                 Region::Flat(box, region.flat_first(), region.volume()));
  } else {
    shard.region = box;
  }
  shard.global_shape[axis] = extent;
  return shard;
}

// Checks the result of a view: its shape may have become too large, or the view may cut elements
// smaller than a byte.
Result<Shard> CheckedView(Result<Shard> shard) {
  if (!shard.ok()) return shard;
  TENSORMOUNT_RETURN_IF_ERROR(CheckShard(shard.value()));
  return shard;
}

// Whether [a, a + a_extent) and [b, b + b_extent) overlap. The sums must not overflow.
bool OverlapOf(std::int64_t a, std::int64_t a_extent, std::int64_t b, std::int64_t b_extent) {
  return std::max(a, b) < std::min(a + a_extent, b + b_extent);
}

Status CheckRange(std::int64_t begin, std::int64_t extent, std::int64_t whole, const char* what) {
  if (begin >= 0 && extent >= 0 && begin <= whole && extent <= whole - begin) return Status();
  return InvalidArgument(std::to_string(extent) + " elements beginning at " +
                         std::to_string(begin) + " do not lie within the " + std::to_string(whole) +
                         " elements of " + what);
}

}  // namespace

Result<std::vector<Shard>> Split(const Shard& shard, int axis,
                                 std::span<const std::int64_t> sizes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Shard whole, Normalized(shard));
  TENSORMOUNT_RETURN_IF_ERROR(CheckAxis(whole, axis));
  const std::int64_t extent = whole.global_shape[axis];
  std::vector<Shard> parts;
  std::int64_t at = 0;
  for (const std::int64_t size : sizes) {
    if (size < 0 || size > extent - at) {
      at = -1;
      break;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Shard cut, Cut(whole, axis, at, at + size));
    TENSORMOUNT_ASSIGN_OR_RETURN(Shard part, CheckedView(Moved(cut, axis, -at, size)));
    parts.push_back(std::move(part));
    at += size;
  }
  if (at != extent) {
    return InvalidArgument("sizes of parts do not add up to the " + std::to_string(extent) +
                           " elements of axis " + std::to_string(axis));
  }
  return parts;
}

Result<Shard> Concatenated(const Shard& shard, int axis, std::int64_t offset, std::int64_t total) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckShard(shard));
  TENSORMOUNT_RETURN_IF_ERROR(CheckAxis(shard, axis));
  TENSORMOUNT_RETURN_IF_ERROR(
      CheckRange(offset, shard.global_shape[axis], total, "the concatenated axis"));
  return CheckedView(Moved(shard, axis, offset, total));
}

Result<Shard> Stacked(const Shard& shard, int axis, std::int64_t index, std::int64_t count) {
  TENSORMOUNT_ASSIGN_OR_RETURN(Shard out, Normalized(shard));
  const int rank = out.global_shape.rank();
  if (axis < 0 || axis > rank) {
    return InvalidArgument("axis " + std::to_string(axis) + " cannot be added to shape " +
                           out.global_shape.ToString());
  }
  if (rank == kMaxRank) {
    return InvalidArgument("shape " + out.global_shape.ToString() +
                           " already has 16 axes, the maximum");
  }
  if (index < 0 || index >= count) {
    return InvalidArgument("layer index " + std::to_string(index) + " is out of range for " +
                           std::to_string(count) + " layers");
  }
  const auto insert = [axis](const Dims& dims, std::int64_t value) {
    Dims longer;
    for (int a = 0; a <= dims.rank(); ++a) {
      if (a == axis) longer.push_back(value);
      if (a < dims.rank()) longer.push_back(dims[a]);
    }
    return longer;
  };
  out.global_shape = insert(out.global_shape, count);
  const Box box = BoxAccess::Make(insert(out.region.box().begin(), index),
                                  insert(out.region.box().extent(), 1));
  if (out.region.is_flat()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out.region,
                                 Region::Flat(box, out.region.flat_first(), out.region.volume()));
  } else {
    out.region = box;
    TENSORMOUNT_ASSIGN_OR_RETURN(out.data, UnsqueezeView(out.data, axis));
  }
  return CheckedView(std::move(out));
}

Result<Shard> Transposed(const Shard& shard, std::span<const int> axes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(Shard out, Normalized(shard));
  if (out.region.is_flat()) {
    return Status(Code::kUnsupported,
                  "region " + out.region.ToString() +
                      " cannot be transposed: the result would not be one flat range");
  }
  // Shape and begin are permuted like the buffer. TransposeView checks `axes` for all three.
  const auto permuted = [axes](const Dims& dims) {
    Dims turned;
    for (const int axis : axes) turned.push_back(dims[axis]);
    return turned;
  };
  if (out.metadata_only) {
    // Without memory the elements need not be packed, so TransposeView only checks `axes`.
    BufferView bytes = out.data;
    bytes.dtype = DType::kU8;
    TENSORMOUNT_ASSIGN_OR_RETURN(bytes, TransposeView(bytes, axes));
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(out.data, TransposeView(out.data, axes));
  }
  out.global_shape = permuted(out.global_shape);
  out.region =
      BoxAccess::Make(permuted(out.region.box().begin()), permuted(out.region.box().extent()));
  if (out.metadata_only) out.data = WithoutMemory(out.data.dtype, out.region);
  return CheckedView(std::move(out));
}

Result<Shard> Sliced(const Shard& shard, const Box& box) {
  TENSORMOUNT_ASSIGN_OR_RETURN(Shard out, Normalized(shard));
  if (!box.Within(out.global_shape)) {
    return InvalidArgument("slice " + box.ToString() + " does not lie within shape " +
                           out.global_shape.ToString());
  }
  for (int a = 0; a < box.rank(); ++a) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out, Cut(out, a, box.begin(a), box.end(a)));
  }
  for (int a = 0; a < box.rank(); ++a) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out, Moved(std::move(out), a, -box.begin(a), box.extent(a)));
  }
  return CheckedView(std::move(out));
}

Result<Shard> Narrowed(const Shard& shard, int axis, std::int64_t begin, std::int64_t extent) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Shard whole, Normalized(shard));
  TENSORMOUNT_RETURN_IF_ERROR(CheckAxis(whole, axis));
  if (whole.region.is_flat()) {
    return Status(Code::kUnsupported, "region " + whole.region.ToString() +
                                          " cannot be narrowed: a flat range has no axes of its "
                                          "own");
  }
  const Box& box = whole.region.box();
  TENSORMOUNT_RETURN_IF_ERROR(CheckRange(begin, extent, box.extent(axis), "the shard's own axis"));
  const std::int64_t from = box.begin(axis) + begin;
  return CheckedView(Cut(whole, axis, from, from + extent));
}

Result<Shard> NarrowedOnGrid(const Shard& shard, int axis, std::int64_t local_extent,
                             std::int64_t begin, std::int64_t extent) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Shard whole, Normalized(shard));
  TENSORMOUNT_RETURN_IF_ERROR(CheckAxis(whole, axis));
  const std::int64_t global = whole.global_shape[axis];
  if (local_extent < 1 || global % local_extent != 0) {
    return InvalidArgument("axis " + std::to_string(axis) + " of " + std::to_string(global) +
                           " elements cannot be divided into pieces of " +
                           std::to_string(local_extent));
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckRange(begin, extent, local_extent, "a piece of the grid"));
  const Box& box = whole.region.box();
  // An empty region at the end belongs to the last piece, if there is one.
  const std::int64_t pieces = global / local_extent;
  const std::int64_t piece =
      std::max<std::int64_t>(0, std::min(box.begin(axis) / local_extent, pieces - 1));
  const std::int64_t at = std::min(piece * local_extent, global);
  if (!box.empty() && box.end(axis) > at + local_extent) {
    return InvalidArgument("region " + whole.region.ToString() +
                           " lies in more than one piece of " + std::to_string(local_extent) +
                           " on axis " + std::to_string(axis));
  }
  const std::int64_t from = std::min(at + begin, global);
  const std::int64_t to = std::min(from + extent, global);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Shard cut, Cut(whole, axis, from, to));
  return CheckedView(Moved(cut, axis, piece * extent - from, pieces * extent));
}

Result<std::vector<Shard>> Interleaved(const Shard& shard, int axis,
                                       std::span<const AxisMove> moves) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Shard whole, Normalized(shard));
  TENSORMOUNT_RETURN_IF_ERROR(CheckAxis(whole, axis));
  const std::int64_t extent = whole.global_shape[axis];
  std::vector<Shard> parts;
  std::int64_t volume = 0;
  for (std::size_t i = 0; i < moves.size(); ++i) {
    const AxisMove& m = moves[i];
    TENSORMOUNT_RETURN_IF_ERROR(CheckRange(m.from, m.extent, extent, "the axis"));
    TENSORMOUNT_RETURN_IF_ERROR(CheckRange(m.to, m.extent, extent, "the axis"));
    for (const AxisMove& before : moves.first(i)) {
      if (OverlapOf(m.from, m.extent, before.from, before.extent) ||
          OverlapOf(m.to, m.extent, before.to, before.extent)) {
        return InvalidArgument("parts of an interleaved axis overlap: those that begin at " +
                               std::to_string(m.from) + " and at " + std::to_string(before.from));
      }
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Shard cut, Cut(whole, axis, m.from, m.from + m.extent));
    TENSORMOUNT_ASSIGN_OR_RETURN(Shard part, CheckedView(Moved(cut, axis, m.to - m.from, extent)));
    volume += part.region.volume();
    parts.push_back(std::move(part));
  }
  if (volume != whole.region.volume()) {
    return InvalidArgument("parts of an interleaved axis do not cover region " +
                           whole.region.ToString());
  }
  return parts;
}

Result<std::vector<AxisMove>> FusedMoves(std::span<const std::int64_t> sizes, std::int64_t index,
                                         std::int64_t count) {
  if (count < 1 || index < 0 || index >= count) {
    return InvalidArgument("rank " + std::to_string(index) + " is out of range for " +
                           std::to_string(count) + " ranks");
  }
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) {
    if (size < 0 || size % count != 0) {
      return InvalidArgument("a part of " + std::to_string(size) + " elements cannot be cut into " +
                             std::to_string(count) + " equal pieces");
    }
    const auto sum = CheckedAdd(total, size);
    if (!sum) return InvalidArgument("the parts have 2^63 elements or more");
    total = *sum;
  }
  std::vector<AxisMove> moves;
  std::int64_t from = index * (total / count);
  std::int64_t part = 0;
  for (const std::int64_t size : sizes) {
    const std::int64_t extent = size / count;
    moves.push_back({.from = from, .extent = extent, .to = part + index * extent});
    from += extent;
    part += size;
  }
  return moves;
}

}  // namespace tensormount
