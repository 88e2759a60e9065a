// SPDX-License-Identifier: Apache-2.0
// Hashes and checksums beside their floors. 2 KiB is a run of a column split, 64 KiB a leaf, 1 MiB
// a block that is hashed while it is in cache, 256 MiB comes from memory.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <benchmark/benchmark.h>

#include "base/crc64_math.h"
#include "base/hash.h"

namespace tensormount {
namespace {

// Touched, aligned to pages, never zeros only.
class Buffer {
 public:
  explicit Buffer(std::size_t size)
      : bytes_(static_cast<char*>(std::aligned_alloc(4096, (size + 4095) / 4096 * 4096)),
               &std::free) {
    for (std::size_t i = 0; i < size; ++i) bytes_.get()[i] = static_cast<char>(i * 131 + (i >> 9));
  }
  char* data() { return bytes_.get(); }

 private:
  std::unique_ptr<char, decltype(&std::free)> bytes_;
};

template <typename F>
void Over(benchmark::State& state, F f) {
  const auto size = static_cast<std::size_t>(state.range(0));
  Buffer in(size);
  Buffer out(size);
  for (auto _ : state) {
    f(out.data(), in.data(), size);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void Memcpy(benchmark::State& state) {
  Over(state, [](char* out, const char* in, std::size_t n) { std::memcpy(out, in, n); });
}

void Xxh3_128(benchmark::State& state) {
  Over(state, [](char*, const char* in, std::size_t n) { benchmark::DoNotOptimize(Xxh3(in, n)); });
}

void Crc64Of(benchmark::State& state) {
  Over(state, [](char*, const char* in, std::size_t n) {
    benchmark::DoNotOptimize(Crc64Extend(0, in, n));
  });
}

// As a writer does: the digest and the leaf hash of blocks that are still in cache.
void Crc64AndXxh3By64KiB(benchmark::State& state) {
  Over(state, [](char*, const char* in, std::size_t n) {
    Crc64 crc = 0;
    for (std::size_t at = 0; at < n; at += 65536) {
      const std::size_t part = std::min<std::size_t>(65536, n - at);
      crc = Crc64Extend(crc, in + at, part);
      benchmark::DoNotOptimize(Xxh3(in + at, part));
    }
    benchmark::DoNotOptimize(crc);
  });
}

void Crc64CopyOf(benchmark::State& state) {
  Over(state, [](char* out, const char* in, std::size_t n) {
    benchmark::DoNotOptimize(Crc64Copy(0, out, in, n));
  });
}

void MemcpyThenCrc64(benchmark::State& state) {
  Over(state, [](char* out, const char* in, std::size_t n) {
    std::memcpy(out, in, n);
    benchmark::DoNotOptimize(Crc64Extend(0, out, n));
  });
}

void Crc64Form(benchmark::State& state, const crc64::Form* form) {
  if (form == nullptr) {
    state.SkipWithError("not on this CPU");
    return;
  }
  Over(state, [form](char*, const char* in, std::size_t n) {
    benchmark::DoNotOptimize(form->extend(0, nullptr, in, n));
  });
}

// Runs of 448 bytes, one after the other, as columns arrive in a buffer.
void Crc64Rows448(benchmark::State& state, const crc64::Form* form) {
  if (form == nullptr) {
    state.SkipWithError("not on this CPU");
    return;
  }
  constexpr std::size_t kRun = 448;
  const std::array<std::byte, crc64::kLongestRow> ones{};
  const crc64::FoldPair by = {Crc64Shift(1800).factor(), Crc64Shift(1792).factor()};
  Over(state, [&](char*, const char* in, std::size_t n) {
    benchmark::DoNotOptimize(
        form->rows(reinterpret_cast<const std::byte*>(in), kRun, kRun, n / kRun, by, ones.data()));
  });
}

void ShiftMade(benchmark::State& state) {
  std::uint64_t bytes = 0x123456789;
  for (auto _ : state) benchmark::DoNotOptimize(Crc64Shift(++bytes));
}

void Sizes(benchmark::internal::Benchmark* b) {
  for (const std::int64_t size : {64, 256, 2048, 65536, 1 << 20, 256 << 20}) b->Arg(size);
}

BENCHMARK(Memcpy)->Apply(Sizes);
BENCHMARK(Xxh3_128)->Apply(Sizes);
BENCHMARK(Crc64Of)->Apply(Sizes);
BENCHMARK(Crc64CopyOf)->Apply(Sizes);
BENCHMARK(MemcpyThenCrc64)->Apply(Sizes);
BENCHMARK(Crc64AndXxh3By64KiB)->Arg(1 << 20)->Arg(256 << 20);
BENCHMARK_CAPTURE(Crc64Form, portable, &crc64::PortableForm())->Arg(2048)->Arg(1 << 20);
BENCHMARK_CAPTURE(Crc64Form, pclmul, crc64::ClmulForm())->Apply(Sizes);
BENCHMARK_CAPTURE(Crc64Form, vpclmulqdq256, crc64::DoubleClmulForm())->Apply(Sizes);
BENCHMARK_CAPTURE(Crc64Form, vpclmulqdq, crc64::WideClmulForm())->Apply(Sizes);
BENCHMARK_CAPTURE(Crc64Rows448, pclmul, crc64::ClmulForm())->Arg(1 << 17)->Arg(256 << 20);
BENCHMARK_CAPTURE(Crc64Rows448, vpclmulqdq256, crc64::DoubleClmulForm())
    ->Arg(1 << 17)
    ->Arg(256 << 20);
BENCHMARK_CAPTURE(Crc64Rows448, vpclmulqdq, crc64::WideClmulForm())->Arg(1 << 17)->Arg(256 << 20);
BENCHMARK(ShiftMade);

}  // namespace
}  // namespace tensormount
