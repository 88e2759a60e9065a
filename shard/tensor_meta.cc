// SPDX-License-Identifier: Apache-2.0
// Conversion from elements to bytes. A tensor of any dtype is a tensor of bytes with one more axis,
// so that plans, copies and digests need no element sizes. Types below one byte have no such axis:
// their last axes are merged until a position is a whole byte, and regions that would cut a byte
// are refused here.
#include "shard/tensor_meta.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "shard/box_access.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

// The first element axis that is merged: the axes from it on form one axis of bytes. For whole-byte
// types no axis is merged, and the bytes of an element are an extra axis. For smaller types as few
// trailing axes are merged as hold whole bytes: of f4, [2, 4] has rows of two bytes and becomes [2,
// 2] bytes; [2, 3] has rows of a byte and a half and becomes [3]. CheckShape ensures that all axes
// together are whole bytes.
int FirstMergedAxis(std::uint32_t bits, const Dims& shape) {
  if (bits >= 8) return shape.rank();
  std::int64_t elements = 1;
  for (int a = shape.rank() - 1; a >= 0; --a) {
    elements *= shape[a];
    if (elements * bits % 8 == 0) return a;
  }
  return 0;
}

Status UnalignedRegionError(DType dtype, const Region& region) {
  return Status(Code::kInvalidArgument, "region " + region.ToString() + " of " +
                                            std::string(InfoOf(dtype).name) +
                                            " does not begin and end on a byte boundary");
}

// The form of empty regions: a box with `rank` axes whose extents are zero.
Region EmptyRegion(int rank) {
  return BoxAccess::Make(Dims::Filled(rank, 0), Dims::Filled(rank, 0));
}

std::int64_t Product(const Dims& extents, int from, int to) {
  std::int64_t p = 1;
  for (int a = from; a < to; ++a) p *= extents[a];
  return p;
}

// Whether the cells of `box` are contiguous in the row-major order of `shape` over the axes from
// `from` on; returns the first position.
bool RunOfTrailingAxes(const Box& box, const Dims& shape, int from, std::int64_t* first) {
  *first = 0;
  bool spanned = true;  // Whether the box spans all axes after `a`.
  for (int a = shape.rank() - 1; a >= from; --a) {
    if (!spanned && box.extent(a) != 1) return false;
    spanned = spanned && box.extent(a) == shape[a];
    *first += box.begin(a) * Product(shape, a + 1, shape.rank());
  }
  return true;
}

// ByteRegion for types below one byte; the axes from `merged` on form one axis of bytes
// (FirstMergedAxis). If the cells are in one row of the merged axis, their run scales by bits / 8.
// Otherwise they must be the same run of several rows: a box stays a box, a flat range a flat
// range. A region that begins or ends inside a byte, such as a column of half bytes, fails.
Result<Region> SubByteRegion(DType dtype, const Dims& shape, const Region& region, int merged) {
  const std::int64_t bits = InfoOf(dtype).bits;
  const Box& box = region.box();
  Dims begin;
  Dims extent;
  for (int a = 0; a < merged; ++a) {
    begin.push_back(box.begin(a));
    extent.push_back(box.extent(a));
  }
  std::int64_t first = 0;
  std::int64_t count = Product(box.extent(), merged, box.rank());
  const bool run = RunOfTrailingAxes(box, shape, merged, &first);
  const bool one_row = Product(box.extent(), 0, merged) == 1;
  std::int64_t flat_first = region.flat_first();
  if (run && one_row) {
    // The flat range itself is a run of the merged axis; its box need not be byte-aligned.
    first += flat_first;
    count = region.volume();
    flat_first = 0;
  }
  if (!run || first * bits % 8 != 0 || count * bits % 8 != 0 || flat_first * bits % 8 != 0 ||
      region.volume() * bits % 8 != 0) {
    return UnalignedRegionError(dtype, region);
  }
  begin.push_back(first * bits / 8);
  extent.push_back(count * bits / 8);
  const Box bytes = BoxAccess::Make(begin, extent);
  if (!region.is_flat() || one_row) return Region(bytes);
  return Region::Flat(bytes, flat_first * bits / 8, region.volume() * bits / 8);
}

// The span of byte offsets of a strided box, relative to its first element. False if the span
// exceeds 2^62: half of the range of offsets, so that an offset below 2^62 can be added without
// another check.
bool ReachOf(const Dims& extents, const Dims& strides, std::int64_t* low, std::int64_t* high) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 62;
  *low = 0;
  *high = 0;
  for (int a = 0; a < extents.rank(); ++a) {
    const auto reach = CheckedMul(extents[a] - 1, strides[a]);
    if (!reach) return false;
    std::int64_t& side = *reach < 0 ? *low : *high;
    const auto sum = CheckedAdd(side, *reach);
    if (!sum || *sum > kLimit || *sum < -kLimit) return false;
    side = *sum;
  }
  return true;
}

// Strides in bytes: element strides times `unit`, and one more axis for the bytes of an element.
Result<Dims> ByteStrides(const Dims& strides, std::int64_t unit) {
  Dims out;
  for (const std::int64_t s : strides) {
    const auto bytes = CheckedMul(s, unit);
    if (!bytes) return Status(Code::kInvalidArgument, "stride of 2^63 bytes or more");
    out.push_back(*bytes);
  }
  out.push_back(1);
  return out;
}

Box ByteBox(const Box& box, std::int64_t element_bytes) {
  Dims begin = box.begin();
  Dims extent = box.extent();
  begin.push_back(0);
  extent.push_back(element_bytes);
  return BoxAccess::Make(begin, extent);
}

}  // namespace

Status CheckKey(std::string_view key) {
  const auto bad = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, "key '" + std::string(key.substr(0, 64)) + "': " + why);
  };
  if (key.empty()) return bad("is empty");
  if (key.size() > kMaxKeyBytes) {
    return bad("has " + std::to_string(key.size()) + " bytes, at most " +
               std::to_string(kMaxKeyBytes) + " are allowed");
  }
  if (key.find('\0') != std::string_view::npos) return bad("contains a NUL byte");
  if (!IsUtf8(key)) return bad("is not UTF-8");
  return Status();
}

namespace {

// Number of bits of all elements; zero if an extent is zero.
Result<std::int64_t> ShapeBits(DType dtype, const Dims& shape) {
  const auto bad = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, "shape " + shape.ToString() + " of " +
                                              std::string(InfoOf(dtype).name) + " " + why);
  };
  if (shape.rank() > kMaxRank) {
    return bad("has " + std::to_string(shape.rank()) + " axes, at most " +
               std::to_string(kMaxRank) + " are allowed");
  }
  std::int64_t size = InfoOf(dtype).bits;
  bool empty = false;
  for (const std::int64_t e : shape) {
    if (e < 0) return bad("has a negative extent");
    empty = empty || e == 0;
    if (__builtin_mul_overflow(size, std::max<std::int64_t>(e, 1), &size)) {
      return bad("has 2^63 bits or more");
    }
  }
  if (empty) size = 0;
  if (size % 8 != 0) return bad("does not fill whole bytes");
  return size;
}

// Number of leading axes of extent one that a box of these extents has and a buffer of this shape
// lacks; -1 if the two are incompatible.
int LackingAxes(const Dims& extents, const Dims& shape) {
  const int lacking = extents.rank() - shape.rank();
  if (lacking < 0) return -1;
  for (int a = 0; a < extents.rank(); ++a) {
    if (extents[a] != (a < lacking ? 1 : shape[a - lacking])) return -1;
  }
  return lacking;
}

}  // namespace

Status CheckShape(DType dtype, const Dims& shape) { return ShapeBits(dtype, shape).status(); }

Result<TensorMeta> TensorMeta::Make(std::string key, DType dtype, const Dims& shape) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckKey(key));
  const Result<std::int64_t> size = ShapeBits(dtype, shape);
  if (!size.ok()) return size.status().WithContext("tensor " + key);
  TensorMeta meta;
  meta.key_ = std::move(key);
  meta.dtype_ = dtype;
  meta.shape_ = shape;
  meta.elements_ = static_cast<std::uint64_t>(size.value()) / InfoOf(dtype).bits;
  meta.bytes_ = static_cast<std::uint64_t>(size.value() / 8);
  return meta;
}

Dims ByteShape(DType dtype, const Dims& shape) {
  const std::uint32_t bits = InfoOf(dtype).bits;
  const int merged = FirstMergedAxis(bits, shape);
  Dims bytes;
  for (int a = 0; a < merged; ++a) bytes.push_back(shape[a]);
  bytes.push_back(Product(shape, merged, shape.rank()) * bits / 8);
  return bytes;
}

Result<Region> ByteRegion(DType dtype, const Dims& shape, const Region& region) {
  if (!region.Within(shape)) {
    return Status(Code::kInvalidArgument,
                  "region " + region.ToString() + " does not lie within shape " + shape.ToString());
  }
  const std::uint32_t bits = InfoOf(dtype).bits;
  const int merged = FirstMergedAxis(bits, shape);
  if (region.empty()) return EmptyRegion(merged + 1);
  if (bits < 8) return SubByteRegion(dtype, shape, region, merged);
  const std::int64_t bytes = bits / 8;
  const Box box = ByteBox(region.box(), bytes);
  if (!region.is_flat()) return Region(box);
  return Region::Flat(box, region.flat_first() * bytes, region.volume() * bytes);
}

// Rounds outwards to whole elements. If several axes were merged, a run of bytes is no box of
// elements, and the result spans all of these axes.
Box ElementBox(DType dtype, const Dims& shape, const Box& byte_box) {
  const std::int64_t bits = InfoOf(dtype).bits;
  const int merged = FirstMergedAxis(InfoOf(dtype).bits, shape);
  if (byte_box.rank() != merged + 1) return byte_box;
  Dims begin;
  Dims extent;
  for (int a = 0; a < merged; ++a) {
    begin.push_back(byte_box.begin(a));
    extent.push_back(byte_box.extent(a));
  }
  // A single merged axis is scaled to elements; several merged axes are spanned.
  for (int a = merged; a < shape.rank(); ++a) {
    const bool scales = a == merged && merged + 1 == shape.rank();
    const std::int64_t from = scales ? byte_box.begin(merged) * 8 / bits : 0;
    const std::int64_t to =
        scales ? std::min((byte_box.end(merged) * 8 + bits - 1) / bits, shape[a]) : shape[a];
    begin.push_back(from);
    extent.push_back(to - from);
  }
  return BoxAccess::Make(begin, extent);
}

Result<std::uint64_t> RegionBytes(DType dtype, const Dims& shape, const Region& region) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes, ByteRegion(dtype, shape, region));
  return static_cast<std::uint64_t>(bytes.volume());
}

PlacedBox PartOfPlaced(const PlacedBox& placed, const Box& part) {
  PlacedBox out = placed;
  out.box = part;
  for (int a = 0; a < part.rank(); ++a) {
    out.offset += (part.begin(a) - placed.box.begin(a)) * placed.strides[a];
  }
  return out;
}

PlacedBox PlaceWhole(const Dims& byte_shape) {
  PlacedBox whole{Box::Whole(byte_shape), 0, Dims::Filled(byte_shape.rank(), 1)};
  for (int a = byte_shape.rank() - 2; a >= 0; --a) {
    whole.strides[a] = whole.strides[a + 1] * byte_shape[a + 1];
  }
  return whole;
}

std::vector<PlacedBox> PlacePacked(const Region& byte_region, std::uint64_t offset) {
  std::vector<PlacedBox> placed;
  auto at = static_cast<std::int64_t>(offset);
  for (const Box& box : byte_region.Boxes()) {
    placed.push_back({box, at, PackedStrides(box.extent())});
    at += box.volume();
  }
  return placed;
}

Result<std::vector<PlacedBox>> PlaceBuffer(const BufferView& buffer, DType dtype, const Dims& shape,
                                           const Region& region) {
  if (buffer.dtype != dtype) {
    return Status(Code::kInvalidArgument,
                  "buffer of dtype " + std::string(InfoOf(buffer.dtype).name) +
                      " does not match the tensor's dtype " + std::string(InfoOf(dtype).name));
  }
  // A buffer of the box's own extents is traversed axis by axis; a buffer with one axis holds the
  // elements of the region in order, whatever boxes they come from.
  const int lacking = region.is_flat() ? -1 : LackingAxes(region.box().extent(), buffer.shape);
  const bool as_box = lacking >= 0;
  const bool as_run = buffer.shape.rank() == 1 && buffer.shape[0] == region.volume();
  if (!as_box && !as_run) {
    return Status(Code::kInvalidArgument, "buffer of shape " + buffer.shape.ToString() +
                                              " does not fit region " + region.ToString() + " of " +
                                              std::to_string(region.volume()) + " elements");
  }
  if (buffer.strides.rank() != buffer.shape.rank()) {
    return Status(Code::kInvalidArgument,
                  "buffer of shape " + buffer.shape.ToString() +
                      " has strides with another number of axes: " + buffer.strides.ToString());
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes, ByteRegion(dtype, shape, region));
  if (bytes.empty()) return std::vector<PlacedBox>();
  if (buffer.IsPacked()) return PlacePacked(bytes, 0);
  const std::int64_t element_bytes = InfoOf(dtype).bits / 8;
  if (element_bytes == 0) {
    return Status(Code::kInvalidArgument,
                  "buffer of " + std::string(InfoOf(dtype).name) +
                      " must be packed: its elements are smaller than a byte");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims strides, ByteStrides(buffer.strides, element_bytes));
  std::int64_t low = 0;
  std::int64_t high = 0;
  if (!ReachOf(buffer.shape, strides, &low, &high)) {
    return Status(Code::kInvalidArgument, "buffer of shape " + buffer.shape.ToString() +
                                              " with strides " + buffer.strides.ToString() +
                                              " reaches past 2^62 bytes");
  }
  std::vector<PlacedBox> placed;
  if (as_box) {
    Dims all = Dims::Filled(lacking, 0);  // Leading axes of extent one, whose stride is never used.
    for (const std::int64_t s : strides) all.push_back(s);
    placed.push_back({ByteBox(region.box(), element_bytes), 0, all});
    return placed;
  }
  std::int64_t at = 0;  // Position on the buffer's single axis.
  // Strided memory of one axis: element n of the region is n steps from the first, so within each
  // box the strides are those of packed elements times the buffer's stride.
  for (const Box& box : region.Boxes()) {
    Dims steps;
    for (const std::int64_t s : PackedStrides(box.extent())) steps.push_back(s * strides[0]);
    steps.push_back(1);
    placed.push_back({ByteBox(box, element_bytes), at * strides[0], steps});
    at += box.volume();
  }
  return placed;
}

Result<std::vector<PlacedBox>> PlaceStrided(DType dtype, const Dims& shape, const Box& box,
                                            std::uint64_t offset, const Dims& byte_strides) {
  const auto bad = [&](Code code, const std::string& why) {
    return Status(code, "box " + box.ToString() + " at byte " + std::to_string(offset) +
                            " with strides " + byte_strides.ToString() + " " + why);
  };
  if (!box.Within(shape))
    return bad(Code::kInvalidArgument, "is not within shape " + shape.ToString());
  if (byte_strides.rank() != box.rank())
    return bad(Code::kInvalidArgument, "has another number of axes than its strides");
  if (box.empty()) return std::vector<PlacedBox>();
  if (InfoOf(dtype).bits < 8) {
    return bad(Code::kUnsupported,
               "has elements smaller than a byte, for which only packed chunks are supported");
  }
  const std::int64_t element_bytes = InfoOf(dtype).bits / 8;
  std::int64_t low = 0;
  std::int64_t high = 0;
  const auto at = CheckedCast<std::int64_t>(offset);
  if (!at || *at >= (std::int64_t{1} << 62) || !ReachOf(box.extent(), byte_strides, &low, &high) ||
      *at + low < 0 || *at + high > (std::int64_t{1} << 62) - element_bytes) {
    return bad(Code::kInvalidArgument, "reaches before byte 0 or past byte 2^62");
  }
  Dims strides = byte_strides;
  strides.push_back(1);
  return std::vector<PlacedBox>{{ByteBox(box, element_bytes), *at, strides}};
}

Result<std::uint64_t> StridedSpan(DType dtype, const Dims& extents, const Dims& byte_strides) {
  const auto bad = [&](Code code, const std::string& why) {
    return Status(code, "strides " + byte_strides.ToString() + " of a box of " +
                            extents.ToString() + " " + why);
  };
  if (byte_strides.rank() != extents.rank())
    return bad(Code::kInvalidArgument, "have another number of axes");
  if (InfoOf(dtype).bits < 8) {
    return bad(Code::kUnsupported, "are not supported for elements smaller than a byte");
  }
  bool empty = false;
  for (int a = 0; a < extents.rank(); ++a) {
    if (byte_strides[a] < 0 || extents[a] < 0) return bad(Code::kInvalidArgument, "are negative");
    empty = empty || extents[a] == 0;
  }
  if (empty) return std::uint64_t{0};
  std::int64_t low = 0;
  std::int64_t high = 0;
  if (!ReachOf(extents, byte_strides, &low, &high)) {
    return bad(Code::kInvalidArgument, "reach past 2^62 bytes");
  }
  return static_cast<std::uint64_t>(high) + InfoOf(dtype).bits / 8;
}

bool ArePackedStrides(DType dtype, const Dims& extents, const Dims& byte_strides) {
  if (byte_strides.rank() != extents.rank() || InfoOf(dtype).bits < 8) return false;
  std::int64_t packed = InfoOf(dtype).bits / 8;
  for (int a = extents.rank() - 1; a >= 0; --a) {
    if (extents[a] == 0) return true;
    if (extents[a] != 1 && byte_strides[a] != packed) return false;
    if (__builtin_mul_overflow(packed, extents[a], &packed)) return false;
  }
  return true;
}

Result<std::uint64_t> ChunkBytes(DType dtype, const Dims& shape, const Region& region,
                                 const Dims& byte_strides) {
  if (byte_strides.rank() == 0) return RegionBytes(dtype, shape, region);
  if (region.is_flat()) return Status(Code::kInvalidArgument, "a flat range cannot have strides");
  return StridedSpan(dtype, region.box().extent(), byte_strides);
}

Result<std::vector<PlacedBox>> PlaceChunk(DType dtype, const Dims& shape, const Region& region,
                                          std::uint64_t offset, const Dims& byte_strides) {
  if (byte_strides.rank() > 0) {
    if (region.is_flat()) return Status(Code::kInvalidArgument, "a flat range cannot have strides");
    return PlaceStrided(dtype, shape, region.box(), offset, byte_strides);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes, ByteRegion(dtype, shape, region));
  return PlacePacked(bytes, offset);
}

}  // namespace tensormount
