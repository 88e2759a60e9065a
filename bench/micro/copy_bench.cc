// SPDX-License-Identifier: Apache-2.0
// Copies of runs between memory that no cache holds, beside a memcpy for each run. Gather: from
// every fourth place into one run, as a load of columns out of stored rows does; scatter: the other
// way. The last argument is by how many bytes the destination is off a cache line.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <benchmark/benchmark.h>

#include "shard/copy_plan.h"

namespace tensormount {
namespace {

constexpr std::int64_t kBytes = 64 << 20;  // Copied by one iteration.
constexpr std::int64_t kApart = 4;         // Runs from one to the next, on the side with the gaps.

using Memory = std::unique_ptr<std::byte, decltype(&std::free)>;

Memory Touched(std::int64_t size) {
  const auto bytes = static_cast<std::size_t>((size + 4096) / 4096 * 4096);
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)), &std::free);
  std::memset(memory.get(), 1, bytes);
  return memory;
}

enum class Way { kOurs, kMemcpy };

void Copy(benchmark::State& state, Way way, bool gather) {
  const std::int64_t run = state.range(0);
  const std::int64_t off = state.range(1);
  StridedCopy copy;
  copy.run = static_cast<std::uint64_t>(run);
  copy.axes = 1;
  copy.axis[0] = {kBytes / run, gather ? kApart * run : run, gather ? run : kApart * run};
  copy.dst_offset = off;
  const Memory src = Touched(gather ? kApart * kBytes : kBytes);
  const Memory dst = Touched((gather ? kBytes : kApart * kBytes) + off);
  for (auto _ : state) {
    if (way == Way::kOurs) {
      ExecuteCopy(copy, src.get(), dst.get());
    } else {
      copy.ForEachRun([&](std::int64_t from, std::int64_t to, std::uint64_t size) {
        std::memcpy(dst.get() + to, src.get() + from, size);
      });
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(copy.bytes()));
}

void Runs(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t run : {64, 256, 448, 1024, 2048, 4096, 16384}) {
    for (const std::int64_t off : {0, 6}) bench->Args({run, off});
  }
  bench->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(Copy, gather_ours, Way::kOurs, true)->Apply(Runs);
BENCHMARK_CAPTURE(Copy, gather_memcpy, Way::kMemcpy, true)->Apply(Runs);
BENCHMARK_CAPTURE(Copy, scatter_ours, Way::kOurs, false)->Apply(Runs);
BENCHMARK_CAPTURE(Copy, scatter_memcpy, Way::kMemcpy, false)->Apply(Runs);

}  // namespace
}  // namespace tensormount
