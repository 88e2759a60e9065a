// SPDX-License-Identifier: Apache-2.0
// ExecuteCopy of copy_plan.h, with the choice of the fastest method for caches and processors.
// CopyPlane copies runs of 1, 2, 4, 8 and 16 bytes, in tiles if the memory orders are opposite;
// ChooseRunCopy chooses the method for other runs.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/stream_copy.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

// About the size of a core's second-level cache, in bytes.
constexpr std::uint64_t kLargeCopy = 2 * 1024 * 1024;

using CopyAxis = StridedCopy::Axis;

// Orders the axes by their destination steps, the largest first (sequential writes matter most),
// then merges axes that are contiguous on both sides. This finds long runs if both buffers are
// transposed alike.
StridedCopy Ordered(const StridedCopy& plan) {
  StridedCopy nest;
  nest.run = plan.run;
  nest.axis = plan.axis;
  std::stable_sort(
      nest.axis.begin(), nest.axis.begin() + plan.axes,
      [](const CopyAxis& a, const CopyAxis& b) { return std::llabs(a.dst) > std::llabs(b.dst); });
  for (int a = 0; a < plan.axes; ++a) {
    const CopyAxis next = nest.axis[static_cast<std::size_t>(a)];
    if (nest.axes > 0) {
      CopyAxis& last = nest.loops().back();
      if (last.src == next.count * next.src && last.dst == next.count * next.dst) {
        last = {last.count * next.count, next.src, next.dst};
        continue;
      }
    }
    nest.axis[static_cast<std::size_t>(nest.axes++)] = next;
  }
  if (nest.axes > 0) {
    const CopyAxis& last = nest.loops().back();
    const auto run = static_cast<std::int64_t>(nest.run);
    if (last.src == run && last.dst == run) {
      nest.run *= static_cast<std::uint64_t>(last.count);
      --nest.axes;
    }
  }
  return nest;
}

// Copies runs of a constant size, for which the compiler emits one load and one store per run.
template <std::size_t kRun>
void CopyLine(const CopyAxis& x, const std::byte* src, std::byte* dst) {
  for (std::int64_t i = 0; i < x.count; ++i) {
    std::memcpy(dst, src, kRun);
    src += x.src;
    dst += x.dst;
  }
}

// Copies two axes of small runs with opposite memory orders in tiles, so that each cache line of
// the source is used completely while cached. A tile is only a few cache lines wide, because a
// power-of-two step maps all of its lines to one cache set. (Measured: copying tiles through a
// packed block is slower.)
template <std::size_t kRun>
void CopyTiles(const CopyAxis& outer, const CopyAxis& inner, const std::byte* src, std::byte* dst) {
  constexpr std::int64_t kRows = kRun >= 8 ? 16 : 64 / static_cast<std::int64_t>(kRun);
  constexpr std::int64_t kColumns = kRun >= 8 ? 16 : 8;
  for (std::int64_t i = 0; i < outer.count; i += kRows) {
    const std::int64_t rows = std::min(kRows, outer.count - i);
    for (std::int64_t j = 0; j < inner.count; j += kColumns) {
      const CopyAxis line = {std::min(kColumns, inner.count - j), inner.src, inner.dst};
      for (std::int64_t r = 0; r < rows; ++r) {
        CopyLine<kRun>(line, src + (i + r) * outer.src + j * inner.src,
                       dst + (i + r) * outer.dst + j * inner.dst);
      }
    }
  }
}

template <std::size_t kRun>
void CopyPlane(const CopyAxis& outer, const CopyAxis& inner, const std::byte* src, std::byte* dst) {
  if (std::llabs(inner.src) > std::llabs(outer.src) && outer.count > 1) {
    CopyTiles<kRun>(outer, inner, src, dst);
    return;
  }
  for (std::int64_t i = 0; i < outer.count; ++i) {
    CopyLine<kRun>(inner, src + i * outer.src, dst + i * outer.dst);
  }
}

// Method for runs that CopyPlane does not copy. The best method depends on the run, on the side
// with gaps, and on whether the copy fits a cache (docs/performance.md, "Copies of runs", has the
// table).
enum class RunCopy {
  kMemcpy,      // Short runs, which the hardware prefetches; prefetching by code would interfere.
  kLines,       // A few KiB, where the C library's setup costs more than the copy.
  kLongMemcpy,  // Long runs. Code prefetches beyond the page at which the hardware stops.
  kStream,      // Larger than a cache, and scattered or of runs for which kLines is best.
};

constexpr std::uint64_t kLinesFrom = 1024;
constexpr std::uint64_t kLinesTo = 3072;
// Up to this length the C library uses `rep movsb`, which has a third of the speed if the
// destination is not line-aligned; for longer runs the library uses streaming stores itself.
constexpr std::uint64_t kUnalignedLinesTo = 64 * 1024;
// Shorter runs are not streamed, because they consist mostly of the two cache lines that they share
// with their neighbours.
constexpr std::uint64_t kStreamedRun = 128;

RunCopy ChooseRunCopy(std::uint64_t run, bool large, const CopyAxis& outer, const CopyAxis& inner,
                      const std::byte* dst) {
  const bool scatters = std::llabs(inner.src) == static_cast<std::int64_t>(run);
  if (large && scatters && run >= kStreamedRun) return RunCopy::kStream;
  if (run < kLinesFrom) return RunCopy::kMemcpy;
  if (run < kLinesTo) return large ? RunCopy::kStream : RunCopy::kLines;
  const auto off_lines = [](std::int64_t step) {
    return static_cast<std::uint64_t>(step) % kCacheLine != 0;
  };
  const bool unaligned = reinterpret_cast<std::uintptr_t>(dst) % kCacheLine != 0 ||
                         off_lines(inner.dst) || off_lines(outer.dst);
  return unaligned && run < kUnalignedLinesTo ? RunCopy::kLines : RunCopy::kLongMemcpy;
}

template <RunCopy kHow>
void CopyRuns(std::uint64_t run, const CopyAxis& outer, const CopyAxis& inner, const std::byte* src,
              std::byte* dst) {
  const bool prefetch = kHow != RunCopy::kStream || run < kLinesTo;
  for (std::int64_t i = 0; i < outer.count; ++i) {
    const std::byte* from = src + i * outer.src;
    std::byte* to = dst + i * outer.dst;
    for (std::int64_t j = 0; j < inner.count; ++j) {
      if (kHow != RunCopy::kMemcpy && prefetch) {
        // Hardware prefetching ends at a page, and column runs are pages apart.
        const std::byte* ahead = from + std::min(j + 2, inner.count - 1) * inner.src;
        for (std::uint64_t p = 0; p < std::min<std::uint64_t>(run, 256); p += kCacheLine) {
          __builtin_prefetch(ahead + p);
        }
      }
      if constexpr (kHow == RunCopy::kStream) {
        StreamBytes(from + j * inner.src, to + j * inner.dst, run);
      } else if constexpr (kHow == RunCopy::kLines) {
        CopyByLines(from + j * inner.src, to + j * inner.dst, run);
      } else {
        std::memcpy(to + j * inner.dst, from + j * inner.src, run);
      }
    }
  }
}

void CopyRuns(std::uint64_t run, bool large, const CopyAxis& outer, const CopyAxis& inner,
              const std::byte* src, std::byte* dst) {
  switch (ChooseRunCopy(run, large, outer, inner, dst)) {
    case RunCopy::kMemcpy:
      return CopyRuns<RunCopy::kMemcpy>(run, outer, inner, src, dst);
    case RunCopy::kLines:
      return CopyRuns<RunCopy::kLines>(run, outer, inner, src, dst);
    case RunCopy::kLongMemcpy:
      return CopyRuns<RunCopy::kLongMemcpy>(run, outer, inner, src, dst);
    case RunCopy::kStream:
      return CopyRuns<RunCopy::kStream>(run, outer, inner, src, dst);
  }
}

using PlaneFn = void (*)(const CopyAxis&, const CopyAxis&, const std::byte*, std::byte*);

PlaneFn PlaneOf(std::uint64_t run) {
  switch (run) {
    case 1:
      return CopyPlane<1>;
    case 2:
      return CopyPlane<2>;
    case 4:
      return CopyPlane<4>;
    case 8:
      return CopyPlane<8>;
    case 16:
      return CopyPlane<16>;
    default:
      return nullptr;
  }
}

}  // namespace

void ExecuteCopy(const StridedCopy& plan, const std::byte* src, std::byte* dst,
                 std::uint64_t whole) {
  if (plan.run == 0) return;
  src += plan.src_offset;
  dst += plan.dst_offset;
  if (plan.axes == 0) {
    std::memcpy(dst, src, plan.run);
    return;
  }
  StridedCopy nest = Ordered(plan);
  const CopyAxis once = {1, 0, 0};
  const CopyAxis inner = nest.axes > 0 ? nest.loops().back() : once;
  CopyAxis outer = once;
  int outside = std::max(0, nest.axes - 2);  // Axes of the odometer below.
  // A plane of two loops, `outer` around `inner`, within the other axes.
  if (nest.axes > 1) {
    // `inner` is the axis with the smallest destination step. `outer` is the axis with the smallest
    // source step, if that is not larger than the source step of `inner`; otherwise it is the axis
    // just outside of `inner`.
    std::size_t best = static_cast<std::size_t>(nest.axes - 2);
    for (std::size_t a = 0; a < best; ++a) {
      if (std::llabs(nest.axis[a].src) < std::llabs(nest.axis[best].src)) best = a;
    }
    if (std::llabs(nest.axis[best].src) > std::llabs(inner.src)) {
      best = static_cast<std::size_t>(nest.axes - 2);
    }
    outer = nest.axis[best];
    for (std::size_t a = best; a + 2 < static_cast<std::size_t>(nest.axes); ++a) {
      nest.axis[a] = nest.axis[a + 1];
    }
  }
  const PlaneFn plane = PlaneOf(nest.run);
  const bool large = std::max(whole, plan.bytes()) >= kLargeCopy;
  std::array<std::int64_t, kMaxAxes> at{};
  for (;;) {
    if (plane != nullptr) {
      plane(outer, inner, src, dst);
    } else {
      CopyRuns(nest.run, large, outer, inner, src, dst);
    }
    // The odometer over the axes outside the plane, as in ForEachRun.
    int a = outside - 1;
    for (; a >= 0; --a) {
      const auto u = static_cast<std::size_t>(a);
      const CopyAxis& x = nest.axis[u];
      src += x.src;
      dst += x.dst;
      if (++at[u] < x.count) break;
      src -= x.count * x.src;
      dst -= x.count * x.dst;
      at[u] = 0;
    }
    if (a < 0) break;
  }
  if (large) EndStream();  // Streaming stores must be ordered before later stores.
}

}  // namespace tensormount
