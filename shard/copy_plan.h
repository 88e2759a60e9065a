// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_COPY_PLAN_H_
#define TENSORMOUNT_SHARD_COPY_PLAN_H_

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "shard/tensor_meta.h"

namespace tensormount {

// `size` contiguous bytes at `src_offset` go to `dst_offset`.
struct CopyRun {
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::uint64_t size = 0;
  friend bool operator==(const CopyRun&, const CopyRun&) = default;
};

// The strided loop nest that copies one box between two placements: `count[a]` steps along axis a,
// each `src_step`/`dst_step` bytes, around contiguous runs of `run` bytes. Axes that are contiguous
// on both sides are already merged, so that runs are as long as they can be. Yields runs instead
// of holding them: memory is O(rank). A value; safe to share between threads.
struct StridedCopy {
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::uint64_t run = 0;  // Bytes of one run; 0 = nothing to copy.
  int axes = 0;
  std::array<std::int64_t, kMaxAxes> count{};
  std::array<std::int64_t, kMaxAxes> src_step{};
  std::array<std::int64_t, kMaxAxes> dst_step{};

  std::uint64_t runs() const;
  std::uint64_t bytes() const { return runs() * run; }

  // Calls fn(src_offset, dst_offset, size) for every run in row-major order of the box.
  template <typename Fn>
  void ForEachRun(Fn fn) const {
    if (run == 0) return;
    std::array<std::int64_t, kMaxAxes> at{};
    std::int64_t src = src_offset;
    std::int64_t dst = dst_offset;
    for (;;) {
      // The innermost axis without the odometer: this is the hot loop of a column read.
      const int inner = axes - 1;
      const std::int64_t n = axes > 0 ? count[static_cast<std::size_t>(inner)] : 1;
      const std::int64_t ss = axes > 0 ? src_step[static_cast<std::size_t>(inner)] : 0;
      const std::int64_t ds = axes > 0 ? dst_step[static_cast<std::size_t>(inner)] : 0;
      for (std::int64_t i = 0; i < n; ++i) fn(src + i * ss, dst + i * ds, run);
      int a = inner - 1;
      for (; a >= 0; --a) {
        const auto u = static_cast<std::size_t>(a);
        src += src_step[u];
        dst += dst_step[u];
        if (++at[u] < count[u]) break;
        src -= at[u] * src_step[u];
        dst -= at[u] * dst_step[u];
        at[u] = 0;
      }
      if (a < 0) return;
    }
  }
};

// How to copy `part` (which must lie in both boxes) from `src` to `dst`. The one place that turns
// boxes into byte runs: slices, resharding, packing and the byte ranges of the mount all use it.
StridedCopy PlanCopy(const Box& part, const PlacedBox& src, const PlacedBox& dst);

// Moves the bytes of a plan from one memory to another, which must not overlap. Any order of axes
// is as fast as its memory allows: transposes go by tiles.
void ExecuteCopy(const StridedCopy& plan, const std::byte* src, std::byte* dst);

// How to assemble a byte region of a tensor from the chunks that store it. Pieces are ordered by
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

  std::span<const Part> pieces() const { return pieces_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::vector<Part> pieces_;
  std::uint64_t bytes_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_COPY_PLAN_H_
