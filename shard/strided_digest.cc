// SPDX-License-Identifier: Apache-2.0
// What a box of a tensor contributes to its digest, from memory in which it has any strides. The
// CRC of a tensor is over its row-major bytes; a box is runs of them. Each run is hashed and moved
// up by the bytes behind it, not run by run but by Horner's rule along the axes: two
// multiplications a run, whatever the number of axes. Short runs are gathered first, because to
// begin and end a CRC costs as much as some tens of bytes.
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
// Below this a run is cheaper gathered first: starting and ending a CRC costs tens of bytes' time.
constexpr std::int64_t kShortRun = 64;

struct DigestAxis {
  std::int64_t count = 0;
  std::int64_t src = 0;  // Steps in bytes.
  std::int64_t dst = 0;
  std::int64_t position = 0;  // In the tensor.
};

// Loops around runs that are contiguous in both memories and in the tensor, in the tensor's order.
struct DigestNest {
  std::int64_t src = 0;
  std::int64_t dst = 0;
  std::int64_t position = 0;  // Of the first byte in the tensor.
  std::int64_t run = 0;
  int size = 0;
  std::array<DigestAxis, kMaxAxes> axes;

  DigestAxis& axis(int a) { return axes[static_cast<std::size_t>(a)]; }
  const DigestAxis& axis(int a) const { return axes[static_cast<std::size_t>(a)]; }
  // Bytes of one step of the axis before `from`.
  std::int64_t Bytes(int from) const {
    std::int64_t n = run;
    for (int a = from; a < size; ++a) n *= axis(a).count;
    return n;
  }
  // Where the last run ends in the tensor.
  std::int64_t End() const {
    std::int64_t end = position + run;
    for (int a = 0; a < size; ++a) end += (axis(a).count - 1) * axis(a).position;
    return end;
  }
};

// Adds the axes of `part`, outermost first; src and dst steps are those of its axes.
void AddAxes(const Box& part, const Dims& src, const Dims& dst, const Dims& byte_shape,
             DigestNest& nest) {
  const Dims tensor = PackedStrides(byte_shape);
  nest.run = 1;
  for (int a = 0; a < part.rank(); ++a) {
    nest.position += part.begin(a) * tensor[a];
    const std::int64_t n = part.extent(a);
    if (n == 1) continue;
    const DigestAxis next = {n, src[a], dst[a], tensor[a]};
    if (nest.size > 0) {
      DigestAxis& last = nest.axis(nest.size - 1);
      if (last.src == n * next.src && last.dst == n * next.dst &&
          last.position == n * next.position) {
        last = {last.count * n, next.src, next.dst, next.position};
        continue;
      }
    }
    nest.axis(nest.size++) = next;
  }
  if (nest.size > 0) {
    const DigestAxis& last = nest.axis(nest.size - 1);
    if (last.src == 1 && last.dst == 1 && last.position == 1) {
      nest.run = last.count;
      --nest.size;
    }
  }
}

// One shift for each axis: the distance between two neighbours on it is always the same.
class Shifts {
 public:
  explicit Shifts(const DigestNest& nest, int axes) {
    shifts_.reserve(static_cast<std::size_t>(axes));
    for (int a = 0; a < axes; ++a) {
      shifts_.emplace_back(static_cast<std::uint64_t>(nest.axis(a).position));
    }
  }
  Crc64 Apply(int axis, Crc64 crc) const {
    return crc == 0 ? 0 : shifts_[static_cast<std::size_t>(axis)].Apply(crc);
  }

 private:
  std::vector<Crc64Shift> shifts_;
};

// Horner's rule over the axes from `axis` to `axes`: the CRCs that `leaf(src, dst)` gives, each
// shifted by what lies between it and the end of the last one.
template <typename Leaf>
Crc64 Horner(const DigestNest& nest, const Shifts& shifts, int axis, int axes, std::int64_t src,
             std::int64_t dst, const Leaf& leaf) {
  if (axis == axes) return leaf(src, dst);
  const DigestAxis& x = nest.axis(axis);
  Crc64 crc = 0;
  if (axis + 1 == axes) {
    for (std::int64_t i = 0; i < x.count; ++i) {
      crc = shifts.Apply(axis, crc) ^ leaf(src + i * x.src, dst + i * x.dst);
    }
    return crc;
  }
  for (std::int64_t i = 0; i < x.count; ++i) {
    crc = shifts.Apply(axis, crc) ^
          Horner(nest, shifts, axis + 1, axes, src + i * x.src, dst + i * x.dst, leaf);
  }
  return crc;
}

Crc64 BehindEnd(const DigestNest& nest, const Dims& byte_shape, Crc64 crc) {
  const std::int64_t behind = Box::Whole(byte_shape).volume() - nest.End();
  return Crc64Shift(static_cast<std::uint64_t>(behind)).Apply(crc);
}

// The memory of `nest` (its src side), brought into the tensor's order where that differs.
class Gatherer {
 public:
  Gatherer(const DigestNest& nest, const std::byte* base) : nest_(nest), base_(base) {
    // Axes from here on continue each other in the tensor.
    joined_ = nest.size;
    std::int64_t run = nest.run;
    while (joined_ > 0 && nest.axis(joined_ - 1).position == run) {
      run *= nest.axis(--joined_).count;
    }
    if (joined_ < nest.size) {
      scratch_ = std::make_unique_for_overwrite<std::byte[]>(
          static_cast<std::size_t>(std::min(kScratchBytes, nest.Bytes(0))));
    }
  }

  Crc64 Digest() const {
    const std::int64_t row = nest_.Bytes(joined_);
    const bool several = joined_ > 0 && joined_ < nest_.size && row * 2 <= kScratchBytes;
    const int outer = several ? joined_ - 1 : joined_;
    const Shifts shifts(nest_, joined_);
    return Horner(nest_, shifts, 0, outer, nest_.src, 0, [&](std::int64_t src, std::int64_t) {
      return several ? Rows(shifts, outer, row, src) : Run(joined_, src, 0);
    });
  }

 private:
  // Whole rows of the tensor, as many at a time as scratch holds, so that cache lines of a
  // transposed memory serve all of them.
  Crc64 Rows(const Shifts& shifts, int axis, std::int64_t row, std::int64_t src) const {
    const DigestAxis& x = nest_.axis(axis);
    const std::int64_t at_once = kScratchBytes / row;
    Crc64 crc = 0;
    for (std::int64_t i = 0; i < x.count; i += at_once) {
      const std::int64_t rows = std::min(at_once, x.count - i);
      Gather(axis, rows, src + i * x.src);
      for (std::int64_t r = 0; r < rows; ++r) {
        crc = shifts.Apply(axis, crc) ^
              Crc64Extend(0, scratch_.get() + r * row, static_cast<std::size_t>(row));
      }
    }
    return crc;
  }

  // One run of the tensor, made of the axes from `axis` on.
  Crc64 Run(int axis, std::int64_t src, Crc64 crc) const {
    if (axis == nest_.size) {
      return Crc64Extend(crc, base_ + src, static_cast<std::size_t>(nest_.run));
    }
    const DigestAxis& x = nest_.axis(axis);
    const std::int64_t step = nest_.Bytes(axis + 1);
    if (nest_.run >= kShortRun || step > kScratchBytes) {
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

  // `count` steps of `axis`, packed into scratch.
  void Gather(int axis, std::int64_t count, std::int64_t src) const {
    StridedCopy copy;
    copy.src_offset = src;
    copy.run = static_cast<std::uint64_t>(nest_.run);
    for (int a = axis; a < nest_.size; ++a) {
      const auto u = static_cast<std::size_t>(copy.axes++);
      copy.count[u] = a == axis ? count : nest_.axis(a).count;
      copy.src_step[u] = nest_.axis(a).src;
      copy.dst_step[u] = nest_.Bytes(a + 1);
    }
    ExecuteCopy(copy, base_, scratch_.get());
  }

  const DigestNest& nest_;
  const std::byte* base_;
  int joined_ = 0;
  std::unique_ptr<std::byte[]> scratch_;
};

// Takes the merged axes of a plan apart again: the steps of every axis of `part` on one side.
// `step(a)` is the plan's step of axis a.
template <typename Step>
Dims StepsOfPart(const StridedCopy& plan, const Box& part, Step step) {
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
    const auto u = static_cast<std::size_t>(p);
    take(plan.count[u], step(u));
  }
  return steps;
}

StridedCopy AsCopy(const DigestNest& nest) {
  StridedCopy copy;
  copy.src_offset = nest.src;
  copy.dst_offset = nest.dst;
  copy.run = static_cast<std::uint64_t>(nest.run);
  copy.axes = nest.size;
  for (int a = 0; a < nest.size; ++a) {
    const auto u = static_cast<std::size_t>(a);
    copy.count[u] = nest.axis(a).count;
    copy.src_step[u] = nest.axis(a).src;
    copy.dst_step[u] = nest.axis(a).dst;
  }
  return copy;
}

// Short runs: copies block by block and reads each block's digest from the destination.
Crc64 CopyThenDigest(const DigestNest& nest, const std::byte* src, std::byte* dst,
                     const Dims& byte_shape) {
  if (nest.size == 0 || nest.Bytes(0) <= kScratchBytes) {
    ExecuteCopy(AsCopy(nest), src, dst);
    DigestNest written = nest;
    written.src = nest.dst;
    for (int a = 0; a < nest.size; ++a) written.axis(a).src = nest.axis(a).dst;
    return BehindEnd(nest, byte_shape, Gatherer(written, dst).Digest());
  }
  if (nest.axis(0).count == 1) {
    DigestNest inner = nest;
    std::move(inner.axes.begin() + 1, inner.axes.begin() + inner.size, inner.axes.begin());
    --inner.size;
    return CopyThenDigest(inner, src, dst, byte_shape);
  }
  DigestNest low = nest;
  DigestNest high = nest;
  const std::int64_t half = nest.axis(0).count / 2;
  low.axis(0).count = half;
  high.axis(0).count -= half;
  high.src += half * nest.axis(0).src;
  high.dst += half * nest.axis(0).dst;
  high.position += half * nest.axis(0).position;
  return CopyThenDigest(low, src, dst, byte_shape) ^ CopyThenDigest(high, src, dst, byte_shape);
}

}  // namespace

Crc64 DigestOfPlaced(const PlacedBox& placed, const std::byte* base, const Dims& byte_shape) {
  if (placed.box.empty()) return 0;
  DigestNest nest;
  nest.src = placed.offset;
  AddAxes(placed.box, placed.strides, placed.strides, byte_shape, nest);
  return BehindEnd(nest, byte_shape, Gatherer(nest, base).Digest());
}

void ExecuteCopyWithDigest(const StridedCopy& plan, const Box& part, const std::byte* src,
                           std::byte* dst, const Dims& byte_shape, Crc64* contribution) {
  if (plan.run == 0) return;
  DigestNest nest;
  nest.src = plan.src_offset;
  nest.dst = plan.dst_offset;
  AddAxes(part, StepsOfPart(plan, part, [&](std::size_t a) { return plan.src_step[a]; }),
          StepsOfPart(plan, part, [&](std::size_t a) { return plan.dst_step[a]; }), byte_shape,
          nest);
  if (nest.run < kShortRun) {
    *contribution ^= CopyThenDigest(nest, src, dst, byte_shape);
    return;
  }
  const Shifts shifts(nest, nest.size);
  const auto run = static_cast<std::size_t>(nest.run);
  const Crc64 crc = Horner(
      nest, shifts, 0, nest.size, nest.src, nest.dst,
      [&](std::int64_t from, std::int64_t to) { return Crc64Copy(0, dst + to, src + from, run); });
  *contribution ^= BehindEnd(nest, byte_shape, crc);
}

}  // namespace tensormount
