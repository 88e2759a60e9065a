// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_COPY_PLAN_H_
#define TENSORMOUNT_SHARD_COPY_PLAN_H_

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "shard/tensor_meta.h"

namespace tensormount {

// The loop nest that copies one box between two placements: axes, the outermost first, around
// contiguous runs of `run` bytes. Axes that are contiguous on both sides are merged, so runs are as
// long as possible. Runs are generated, not stored, so memory is O(axes). A value type; threads may
// share it.
//
// Example: columns 2 to 3 of a packed [4, 8] of bytes, copied to a packed [4, 2], are 4 runs of 2
// bytes: src_offset 2, run 2, one axis {count 4, src 8, dst 2}. Rows 1 and 2 of the same tensor to
// a packed [2, 8] are one run of 16 bytes from 8 on, without axes.
struct StridedCopy {
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::uint64_t run = 0;  // Bytes of one run; 0 = nothing to copy.
  int axes = 0;
  // A loop of `count` steps. Each step advances `src` and `dst` bytes (may be negative in memory).
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
  // Number of bytes from the first to the last byte read, if no step is negative.
  std::uint64_t src_span() const;

  // Calls fn(src_offset, dst_offset, size) for every run in row-major order of the box.
  template <typename Fn>
  void ForEachRun(Fn fn) const {
    if (run == 0) return;
    std::array<std::int64_t, kMaxAxes> at{};
    std::int64_t src = src_offset;
    std::int64_t dst = dst_offset;
    // An odometer over the outer axes: `at` counts each axis, src and dst follow by additions, and
    // a finished axis resets and advances the one before it.
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

// Offsets and steps are plain int64 sums and products, which cannot overflow: placed boxes come
// from checked shapes, from chunks within their files, and from strides whose reach tensor_meta.h
// limits to 2^62 bytes, and every run is part of a placed box.

// Plans the copy of `part` (which must lie in both boxes) from `src` to `dst`. Slices, resharding,
// packing and the byte ranges of the mount all use this function.
StridedCopy PlanCopy(const Box& part, const PlacedBox& src, const PlacedBox& dst);

// Executes a plan between memories that must not overlap. Transposes of small runs use tiles, and
// large copies bypass the caches if that is faster. `whole`: total bytes, if this copy is a block
// of a larger one.
void ExecuteCopy(const StridedCopy& plan, const std::byte* src, std::byte* dst,
                 std::uint64_t whole = 0);

// Splits a box into consecutive row-major parts of at most `max_bytes` each (at least one element),
// each of which is contiguous in the packed box.
void SplitBox(const Box& box, std::uint64_t element_bytes, std::uint64_t max_bytes,
              const std::function<void(const Box&)>& fn);

// The copies that assemble a byte region of a tensor from the chunks that store it. Parts are
// ordered by chunk, then destination; together they cover the destination exactly once.
class CopyPlan {
 public:
  struct Part {
    std::uint32_t chunk = 0;  // Index into the chunks given to Make.
    Box part;                 // In byte coordinates of the tensor.
    StridedCopy copy;
  };
  // `want`: placed boxes of the destination (disjoint). `chunks[i]`: placed boxes of chunk i.
  // kDataLoss "[0:4, 0:2] is stored in no chunk" / "... is stored twice" if the wanted cells are
  // not covered exactly once; kInvalidArgument if the numbers of axes differ. With `meta` the
  // message has the tensor and its elements, without `meta` the bytes.
  static Result<CopyPlan> Make(std::span<const PlacedBox> want,
                               std::span<const std::vector<PlacedBox>> chunks,
                               const TensorMeta* meta = nullptr);

  std::span<const Part> parts() const { return parts_; }
  std::vector<Part> TakeParts() && { return std::move(parts_); }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::vector<Part> parts_;
  std::uint64_t bytes_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COPY_PLAN_H_
