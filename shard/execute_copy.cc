// SPDX-License-Identifier: Apache-2.0
// Runs the strided copies of copy_plan.h, which declares it: planning thinks, this only moves
// bytes, and all that is particular about caches and processors is in here. Three loops: tiles for
// runs of a few bytes, a plain loop for runs of some cache lines, memcpy for long ones; large
// copies write past the caches.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/stream_copy.h"
#include "shard/copy_plan.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kStreamFrom = 2 * 1024 * 1024;

using CopyAxis = StridedCopy::Axis;

// The axes in the order of execution. The destination decides (writes in sequence are worth most),
// then axes that continue each other on both sides merge: this finds the long runs of two buffers
// that are transposed alike.
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

// Runs of a constant size, which the compiler makes one load and one store of.
template <std::size_t kRun>
void CopyLine(const CopyAxis& x, const std::byte* src, std::byte* dst) {
  for (std::int64_t i = 0; i < x.count; ++i) {
    std::memcpy(dst, src, kRun);
    src += x.src;
    dst += x.dst;
  }
}

// Two axes of small runs that want opposite orders: in tiles, so that each cache line of the source
// is used up while it is there. Tiles are few lines wide, because a power-of-two step maps all of
// them to one cache set. (Measured: passing tiles through a packed block is slower.)
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

// Runs of some cache lines from many places. The C library's memcpy is half as fast at it as a
// plain loop (measured: 2 KiB of 16 KiB rows, 4.3 against 7.5 GB/s on an EPYC with AVX-512).
constexpr std::uint64_t kLoopFrom = 256;
constexpr std::uint64_t kLoopTo = 16 * 1024;
// Where the next run is on the same page, the hardware's prefetching finds it, and that of a loop
// is in its way (448 bytes of 1,792: 9.0 GB/s by memcpy alone, 6.8 with prefetching).
constexpr std::int64_t kNear = 4096;

void CopyRuns(std::uint64_t run, bool stream, const CopyAxis& outer, const CopyAxis& inner,
              const std::byte* src, std::byte* dst) {
  const bool loop = run >= kLoopFrom && run < kLoopTo;
  if (!stream && run < kNear && std::llabs(inner.src) < kNear) {
    for (std::int64_t i = 0; i < outer.count; ++i) {
      for (std::int64_t j = 0; j < inner.count; ++j) {
        std::memcpy(dst + i * outer.dst + j * inner.dst, src + i * outer.src + j * inner.src, run);
      }
    }
    return;
  }
  for (std::int64_t i = 0; i < outer.count; ++i) {
    const std::byte* from = src + i * outer.src;
    std::byte* to = dst + i * outer.dst;
    for (std::int64_t j = 0; j < inner.count; ++j) {
      // The hardware's own prefetching ends at a page, and column runs are pages apart.
      const std::byte* ahead = from + std::min(j + 2, inner.count - 1) * inner.src;
      for (std::uint64_t p = 0; p < std::min<std::uint64_t>(run, 256); p += 64) {
        __builtin_prefetch(ahead + p);
      }
      if (stream) {
        StreamBytes(from + j * inner.src, to + j * inner.dst, run);
      } else if (loop) {
        CopyByLines(from + j * inner.src, to + j * inner.dst, run);
      } else {
        std::memcpy(to + j * inner.dst, from + j * inner.src, run);
      }
    }
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

void ExecuteCopy(const StridedCopy& plan, const std::byte* src, std::byte* dst) {
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
  int outside = std::max(0, nest.axes - 2);  // Axes that the odometer below walks.
  // A plane of two loops, `outer` around `inner`, and the other axes around that.
  if (nest.axes > 1) {
    // The axis that the source likes innermost goes next to the one that the destination does.
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
  // Measured: runs of a KiB to some, in copies that no cache holds, gain a fifth to a half; memcpy
  // streams longer ones itself when it pays.
  const bool stream = nest.run >= 1024 && nest.run < 8192 && plan.bytes() >= kStreamFrom;
  std::array<std::int64_t, kMaxAxes> at{};
  for (;;) {
    if (plane != nullptr) {
      plane(outer, inner, src, dst);
    } else {
      CopyRuns(nest.run, stream, outer, inner, src, dst);
    }
    // The odometer over the axes outside of the plane, as in ForEachRun.
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
  if (stream) EndStream();
}

}  // namespace tensormount
