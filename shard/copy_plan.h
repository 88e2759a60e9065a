// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_COPY_PLAN_H_
#define TENSORMOUNT_SHARD_COPY_PLAN_H_

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "shard/tensor_meta.h"

namespace tensormount {

// The strided loop nest that copies one box between two placements: axes, the outermost first,
// around contiguous runs of `run` bytes. Axes that are contiguous on both sides are already merged,
// so that runs are as long as they can be. Yields runs instead of holding them: memory is O(rank).
// A value; safe to share between threads.
//
// Example: columns 2 to 3 of a packed [4, 8] of bytes, read into a packed [4, 2], are 4 runs of 2
// bytes: src_offset 2, run 2, one axis {count 4, src 8, dst 2}. Rows 1 and 2 of the same tensor
// into a packed [2, 8] are one run of 16 bytes from 8 on, and no axis at all.
struct StridedCopy {
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::uint64_t run = 0;  // Bytes of one run; 0 = nothing to copy.
  int axes = 0;
  // `count` steps, at each of which both sides move by so many bytes; of memory they may be
  // negative.
  struct Axis {
    std::int64_t count = 0;
    std::int64_t src = 0;
    std::int64_t dst = 0;
  };
  std::array<Axis, kMaxAxes> axis{};

  std::span<Axis> loops() { return {axis.data(), static_cast<std::size_t>(axes)}; }
  std::span<const Axis> loops() const { return {axis.data(), static_cast<std::size_t>(axes)}; }

  std::uint64_t runs() const;
  std::uint64_t bytes() const { return runs() * run; }
  // Bytes from the first to the end of the last one that is read, where no step is negative.
  std::uint64_t src_span() const;

  // Calls fn(src_offset, dst_offset, size) for every run in row-major order of the box.
  template <typename Fn>
  void ForEachRun(Fn fn) const {
    if (run == 0) return;
    std::array<std::int64_t, kMaxAxes> at{};
    std::int64_t src = src_offset;
    std::int64_t dst = dst_offset;
    // An odometer over the outer axes: `at` says how far each has turned, src and dst follow it by
    // additions, and an axis that is through goes back to its beginning and moves the one before.
    for (;;) {
      // The innermost axis without the odometer: this is the hot loop of a column read.
      const Axis inner = axes > 0 ? axis[static_cast<std::size_t>(axes - 1)] : Axis{1, 0, 0};
      for (std::int64_t i = 0; i < inner.count; ++i) {
        fn(src + i * inner.src, dst + i * inner.dst, run);
      }
      int a = axes - 2;
      for (; a >= 0; --a) {
        const auto u = static_cast<std::size_t>(a);
        src += axis[u].src;
        dst += axis[u].dst;
        if (++at[u] < axis[u].count) break;
        src -= at[u] * axis[u].src;
        dst -= at[u] * axis[u].dst;
        at[u] = 0;
      }
      if (a < 0) return;
    }
  }
};

// Offsets and steps are plain int64 sums and products, which cannot overflow: placed boxes are made
// of checked shapes, of chunks that lie within their files, and of strides whose reach
// tensor_meta.h bounds by 2^62 bytes, and every run is a part of one.

// How to copy `part` (which must lie in both boxes) from `src` to `dst`. The one place that turns
// boxes into byte runs: slices, resharding, packing and the byte ranges of the mount all use it.
StridedCopy PlanCopy(const Box& part, const PlacedBox& src, const PlacedBox& dst);

// Moves the bytes of a plan from one memory to another, which must not overlap. Any order of axes
// is as fast as its memory allows: transposes go by tiles, and what no cache holds goes past the
// caches where that pays. `whole`: the bytes of the copy that this one is a block of, if it is one.
void ExecuteCopy(const StridedCopy& plan, const std::byte* src, std::byte* dst,
                 std::uint64_t whole = 0);

// Cuts a box into row-major consecutive parts of at most `max_bytes` each (at least one element):
// each part is one run of the packed row-major order of the box.
void SplitBox(const Box& box, std::uint64_t element_bytes, std::uint64_t max_bytes,
              const std::function<void(const Box&)>& fn);

// How to assemble a byte region of a tensor from the chunks that store it. Parts are ordered by
// chunk, then destination; together they cover the destination exactly once.
class CopyPlan {
 public:
  struct Part {
    std::uint32_t chunk = 0;  // Index into the chunks given to Make.
    Box part;                 // In byte coordinates of the tensor.
    StridedCopy copy;
  };
  // `want`: placed boxes of the destination (disjoint). `chunks[i]`: placed boxes of chunk i.
  // kDataLoss "[0:4, 0:2] is stored in no chunk" / "... is stored twice" where the cells wanted are
  // not covered exactly once; kInvalidArgument where ranks differ. `meta` names the box in
  // elements, and the tensor; without it the message speaks of bytes.
  static Result<CopyPlan> Make(std::span<const PlacedBox> want,
                               std::span<const std::vector<PlacedBox>> chunks,
                               const TensorMeta* meta = nullptr);

  std::span<const Part> parts() const { return parts_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::vector<Part> parts_;
  std::uint64_t bytes_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COPY_PLAN_H_
