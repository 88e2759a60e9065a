// SPDX-License-Identifier: Apache-2.0
// The contribution of a box to its tensor's digest, from memory with any strides. The CRC covers
// the row-major bytes of the tensor, in which a box is a set of runs. Each run is hashed and
// shifted by the bytes after it: by Horner's rule along the axes, and by Crc64Rows along the
// innermost one, which makes runs of 64 bytes and more as fast as one long run. Shorter runs are
// gathered first, because starting and ending a CRC costs as much as tens of bytes.
#include "shard/strided_digest.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <memory>
#include <utility>
#include <vector>

#include "shard/box_access.h"

namespace tensormount {
namespace {

constexpr std::int64_t kScratchBytes = 256 * 1024;
// Runs shorter than this are gathered before they are hashed.
constexpr std::int64_t kShortRun = 64;
// For runs up to this length, a copy followed by Crc64Rows of the cached result is faster than one
// combined pass.
constexpr std::int64_t kRowRun = 512;

// A loop nest around runs that are contiguous in both memories and in the tensor, in the tensor's
// order: a copy whose axes also have their step in the tensor.
struct DigestNest {
  StridedCopy copy;
  std::int64_t position = 0;                       // Position of the first byte in the tensor.
  std::array<std::int64_t, kMaxAxes> tensor_step;  // Step of each axis in the tensor, in bytes.

  StridedCopy::Axis& axis(int a) { return copy.axis[static_cast<std::size_t>(a)]; }
  const StridedCopy::Axis& axis(int a) const { return copy.axis[static_cast<std::size_t>(a)]; }
  std::int64_t step(int a) const { return tensor_step[static_cast<std::size_t>(a)]; }
  std::int64_t run() const { return static_cast<std::int64_t>(copy.run); }
  // Bytes of the axes from `from` on, which are one step of the axis before `from`.
  std::int64_t Bytes(int from) const {
    std::int64_t n = run();
    for (int a = from; a < copy.axes; ++a) n *= axis(a).count;
    return n;
  }
  // The end of the last run, as a position in the tensor.
  std::int64_t End() const {
    std::int64_t end = position + run();
    for (int a = 0; a < copy.axes; ++a) end += (axis(a).count - 1) * step(a);
    return end;
  }
};

// Adds the axes of `part`, outermost first; `src` and `dst` are their steps in both memories.
// Merges axes as PlanCopy does, but only if they are also contiguous in the tensor.
void AddAxes(const Box& part, const Dims& src, const Dims& dst, const Dims& byte_shape,
             DigestNest& nest) {
  const Dims tensor = PackedStrides(byte_shape);
  nest.copy.run = 1;
  int& axes = nest.copy.axes;
  for (int a = 0; a < part.rank(); ++a) {
    nest.position += part.begin(a) * tensor[a];
    const std::int64_t n = part.extent(a);
    if (n == 1) continue;
    const StridedCopy::Axis next = {n, src[a], dst[a]};
    if (axes > 0) {
      StridedCopy::Axis& last = nest.axis(axes - 1);
      if (last.src == n * next.src && last.dst == n * next.dst &&
          nest.step(axes - 1) == n * tensor[a]) {
        last = {last.count * n, next.src, next.dst};
        nest.tensor_step[static_cast<std::size_t>(axes - 1)] = tensor[a];
        continue;
      }
    }
    nest.tensor_step[static_cast<std::size_t>(axes)] = tensor[a];
    nest.axis(axes++) = next;
  }
  if (axes > 0) {
    const StridedCopy::Axis& last = nest.axis(axes - 1);
    if (last.src == 1 && last.dst == 1 && nest.step(axes - 1) == 1) {
      nest.copy.run = static_cast<std::uint64_t>(last.count);
      --axes;
    }
  }
}

// One shift for each of the first `axes` axes, because the distance between neighbours on an axis
// is constant, and making a shift costs much more than applying it.
std::vector<Crc64Shift> ShiftsOf(const DigestNest& nest, int axes) {
  std::vector<Crc64Shift> shifts;
  shifts.reserve(static_cast<std::size_t>(axes));
  for (int a = 0; a < axes; ++a) shifts.emplace_back(static_cast<std::uint64_t>(nest.step(a)));
  return shifts;
}

// Applies the shift of `axis`. A CRC of zero, as before the first run, stays zero under every
// shift.
Crc64 Shifted(const std::vector<Crc64Shift>& shifts, int axis, Crc64 crc) {
  return crc == 0 ? 0 : shifts[static_cast<std::size_t>(axis)].Apply(crc);
}

// Horner's rule over the axes from `axis` to `axes`: combines the CRCs that `leaf(src, dst)`
// returns, each shifted to the end of the last run. For three runs r0, r1, r2 at distances of d
// bytes the CRC is ((r0 << d) ^ r1) << d ^ r2, where "<< d" is the shift by d bytes. The runs of an
// inner axis together are one coefficient of the axis around it.
template <typename Leaf>
Crc64 Horner(const DigestNest& nest, const std::vector<Crc64Shift>& shifts, int axis, int axes,
             std::int64_t src, std::int64_t dst, const Leaf& leaf) {
  if (axis == axes) return leaf(src, dst);
  const StridedCopy::Axis& x = nest.axis(axis);
  Crc64 crc = 0;
  if (axis + 1 == axes) {
    for (std::int64_t i = 0; i < x.count; ++i) {
      crc = Shifted(shifts, axis, crc) ^ leaf(src + i * x.src, dst + i * x.dst);
    }
    return crc;
  }
  for (std::int64_t i = 0; i < x.count; ++i) {
    crc = Shifted(shifts, axis, crc) ^
          Horner(nest, shifts, axis + 1, axes, src + i * x.src, dst + i * x.dst, leaf);
  }
  return crc;
}

// Shifts `crc` by the bytes of the tensor after the last run, for all runs at once.
Crc64 ShiftedPastEnd(const DigestNest& nest, const Dims& byte_shape, Crc64 crc) {
  const std::int64_t behind = Box::Whole(byte_shape).volume() - nest.End();
  return Crc64Shift(static_cast<std::uint64_t>(behind)).Apply(crc);
}

// Hashes the memory of `nest` (its src side), and gathers it into the tensor's order if that
// differs.
class Gatherer {
 public:
  Gatherer(const DigestNest& nest, const std::byte* base) : nest_(nest), base_(base) {
    // Finds the axes that are contiguous in the tensor: those from `joined_` on.
    joined_ = nest.copy.axes;
    std::int64_t run = nest.run();
    while (joined_ > 0 && nest.step(joined_ - 1) == run) {
      run *= nest.axis(--joined_).count;
    }
    if (joined_ < nest.copy.axes) {
      scratch_ = std::make_unique_for_overwrite<std::byte[]>(
          static_cast<std::size_t>(std::min(kScratchBytes, nest.Bytes(0))));
    }
  }

  Crc64 Digest() const {
    const std::int64_t row = nest_.Bytes(joined_);
    // Whether each run of the tensor is contiguous in memory.
    const bool in_place = joined_ == nest_.copy.axes;
    const bool several = joined_ > 0 && (in_place || row * 2 <= kScratchBytes);
    const int outer = several ? joined_ - 1 : joined_;
    const std::vector<Crc64Shift> shifts = ShiftsOf(nest_, outer);
    return Horner(nest_, shifts, 0, outer, nest_.copy.src_offset, 0,
                  [&](std::int64_t src, std::int64_t) {
                    if (!several) return Run(joined_, src, 0);
                    return in_place ? RowsInPlace(outer, src) : Rows(outer, row, src);
                  });
  }

 private:
  // Hashes the runs along an axis in place.
  Crc64 RowsInPlace(int axis, std::int64_t src) const {
    const StridedCopy::Axis& x = nest_.axis(axis);
    return Crc64Rows(base_ + src, x.src, static_cast<std::size_t>(nest_.run()),
                     static_cast<std::size_t>(x.count),
                     static_cast<std::uint64_t>(nest_.step(axis)));
  }

  // Gathers as many whole rows of the tensor as the scratch memory holds, so that cache lines of
  // transposed memory serve all of them.
  Crc64 Rows(int axis, std::int64_t row, std::int64_t src) const {
    const StridedCopy::Axis& x = nest_.axis(axis);
    const std::int64_t at_once = kScratchBytes / row;
    const auto step = static_cast<std::uint64_t>(nest_.step(axis));
    const Crc64Shift block(static_cast<std::uint64_t>(at_once) * step);
    Crc64 crc = 0;
    for (std::int64_t i = 0; i < x.count; i += at_once) {
      const std::int64_t rows = std::min(at_once, x.count - i);
      Gather(axis, rows, src + i * x.src);
      if (crc != 0) {
        crc = (rows == at_once ? block : Crc64Shift(static_cast<std::uint64_t>(rows) * step))
                  .Apply(crc);
      }
      crc ^= Crc64Rows(scratch_.get(), row, static_cast<std::size_t>(row),
                       static_cast<std::size_t>(rows), step);
    }
    return crc;
  }

  // Hashes one run of the tensor, which consists of the axes from `axis` on.
  Crc64 Run(int axis, std::int64_t src, Crc64 crc) const {
    if (axis == nest_.copy.axes) {
      return Crc64Extend(crc, base_ + src, static_cast<std::size_t>(nest_.run()));
    }
    const StridedCopy::Axis& x = nest_.axis(axis);
    const std::int64_t step = nest_.Bytes(axis + 1);
    if (nest_.run() >= kShortRun || step > kScratchBytes) {
      for (std::int64_t i = 0; i < x.count; ++i) crc = Run(axis + 1, src + i * x.src, crc);
      return crc;
    }
    const std::int64_t at_once = kScratchBytes / step;
    for (std::int64_t i = 0; i < x.count; i += at_once) {
      const std::int64_t steps = std::min(at_once, x.count - i);
      Gather(axis, steps, src + i * x.src);
      crc = Crc64Extend(crc, scratch_.get(), static_cast<std::size_t>(steps * step));
    }
    return crc;
  }

  // Packs `count` steps of `axis` into the scratch memory.
  void Gather(int axis, std::int64_t count, std::int64_t src) const {
    StridedCopy copy;
    copy.src_offset = src;
    copy.run = nest_.copy.run;
    for (int a = axis; a < nest_.copy.axes; ++a) {
      const auto u = static_cast<std::size_t>(copy.axes++);
      copy.axis[u] = {a == axis ? count : nest_.axis(a).count, nest_.axis(a).src,
                      nest_.Bytes(a + 1)};
    }
    ExecuteCopy(copy, base_, scratch_.get());
  }

  const DigestNest& nest_;
  const std::byte* base_;
  int joined_ = 0;
  std::unique_ptr<std::byte[]> scratch_;
};

// Splits the merged axes of a plan: the steps of every axis of `part` on one side, `side` being
// &Axis::src or &Axis::dst.
Dims StepsOfPart(const StridedCopy& plan, const Box& part, std::int64_t StridedCopy::Axis::*side) {
  Dims steps = Dims::Filled(part.rank(), 0);
  int a = part.rank() - 1;
  const auto take = [&](std::int64_t count, std::int64_t first) {
    std::int64_t taken = 1;
    for (; a >= 0 && taken < count; --a) {
      steps[a] = first * taken;
      taken *= part.extent(a);
    }
    assert(taken == count);
  };
  take(static_cast<std::int64_t>(plan.run), 1);
  for (int p = plan.axes - 1; p >= 0; --p) {
    const StridedCopy::Axis& axis = plan.axis[static_cast<std::size_t>(p)];
    take(axis.count, axis.*side);
  }
  return steps;
}

// Halves the outermost axis until a block fits the scratch size, and so the second-level cache;
// then copies block by block and hashes each block at the destination. The contributions of the
// halves add up like those of two boxes.
Crc64 CopyThenDigest(const DigestNest& nest, const std::byte* src, std::byte* dst,
                     const Dims& byte_shape) {
  if (nest.copy.axes == 0 || nest.Bytes(0) <= kScratchBytes) {
    ExecuteCopy(nest.copy, src, dst);
    DigestNest written = nest;
    written.copy.src_offset = nest.copy.dst_offset;
    for (StridedCopy::Axis& axis : written.copy.loops()) axis.src = axis.dst;
    return ShiftedPastEnd(nest, byte_shape, Gatherer(written, dst).Digest());
  }
  if (nest.axis(0).count == 1) {
    DigestNest inner = nest;
    const int axes = inner.copy.axes--;
    std::move(inner.copy.axis.begin() + 1, inner.copy.axis.begin() + axes, inner.copy.axis.begin());
    std::move(inner.tensor_step.begin() + 1, inner.tensor_step.begin() + axes,
              inner.tensor_step.begin());
    return CopyThenDigest(inner, src, dst, byte_shape);
  }
  DigestNest low = nest;
  DigestNest high = nest;
  const std::int64_t half = nest.axis(0).count / 2;
  low.axis(0).count = half;
  high.axis(0).count -= half;
  high.copy.src_offset += half * nest.axis(0).src;
  high.copy.dst_offset += half * nest.axis(0).dst;
  high.position += half * nest.step(0);
  return CopyThenDigest(low, src, dst, byte_shape) ^ CopyThenDigest(high, src, dst, byte_shape);
}

}  // namespace

Crc64 DigestOfPlaced(const PlacedBox& placed, const std::byte* base, const Dims& byte_shape) {
  if (placed.box.empty()) return 0;
  DigestNest nest;
  nest.copy.src_offset = placed.offset;
  AddAxes(placed.box, placed.strides, placed.strides, byte_shape, nest);
  return ShiftedPastEnd(nest, byte_shape, Gatherer(nest, base).Digest());
}

void ExecuteCopyWithDigest(const StridedCopy& plan, const Box& part, const std::byte* src,
                           std::byte* dst, const Dims& byte_shape, Crc64* contribution) {
  if (plan.run == 0) return;
  DigestNest nest;
  nest.copy.src_offset = plan.src_offset;
  nest.copy.dst_offset = plan.dst_offset;
  AddAxes(part, StepsOfPart(plan, part, &StridedCopy::Axis::src),
          StepsOfPart(plan, part, &StridedCopy::Axis::dst), byte_shape, nest);
  if (nest.run() <= kRowRun) {
    *contribution ^= CopyThenDigest(nest, src, dst, byte_shape);
    return;
  }
  const std::vector<Crc64Shift> shifts = ShiftsOf(nest, nest.copy.axes);
  const auto run = static_cast<std::size_t>(nest.copy.run);
  const Crc64 crc = Horner(
      nest, shifts, 0, nest.copy.axes, nest.copy.src_offset, nest.copy.dst_offset,
      [&](std::int64_t from, std::int64_t to) { return Crc64Copy(0, dst + to, src + from, run); });
  *contribution ^= ShiftedPastEnd(nest, byte_shape, crc);
}

}  // namespace tensormount
