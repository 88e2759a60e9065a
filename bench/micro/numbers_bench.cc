// SPDX-License-Identifier: Apache-2.0
// What `diff --stats` and `stats --full` cost beside a plain loop over values in memory:
//
//   numbersbench [--mib N] [--rounds N] [A B]
//
// One line of JSON, in GB/s of the bytes of both sides, the best of the rounds. `change` and
// `statistics` are our loops over N MiB of bf16 in memory, on one thread; the loops ending in
// `_plain` are those that one writes in C, which sum in one double each. With two checkpoints of
// bf16 tensors, `diff` is the whole comparison, and `diff_plain` the plain loop over the tensors
// after they were read into memory, on as many threads.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "index/foreign/open_source.h"
#include "index/read/compare.h"
#include "index/read/tensor_units.h"
#include "shard/value_statistics.h"

namespace tensormount {
namespace {

// Keeps the compiler from leaving out a loop whose result nobody reads.
volatile double sink;

double SecondsOf(int rounds, const std::function<void()>& fn) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int i = 0; i < rounds; ++i) {
    const Clock::time_point begin = Clock::now();
    fn();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

double FromBf16(std::uint16_t code) {
  const std::uint32_t bits = std::uint32_t{code} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return static_cast<double>(value);
}

double PlainChange(const std::uint16_t* a, const std::uint16_t* b, std::size_t count) {
  double sum = 0, squares = 0, a_squares = 0, b_squares = 0, products = 0, largest = 0;
  std::size_t changed = 0, non_finite = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double x = FromBf16(a[i]);
    const double y = FromBf16(b[i]);
    changed += a[i] != b[i] ? 1 : 0;
    if (!std::isfinite(x) || !std::isfinite(y)) {
      ++non_finite;
      continue;
    }
    const double change = std::abs(y - x);
    sum += change;
    squares += change * change;
    a_squares += x * x;
    b_squares += y * y;
    products += x * y;
    largest = std::max(largest, change);
  }
  return sum + squares + a_squares + b_squares + products + largest +
         static_cast<double>(changed + non_finite);
}

double PlainStatistics(const std::uint16_t* a, std::size_t count) {
  double sum = 0, squares = 0, min = INFINITY, max = -INFINITY;
  std::size_t zeros = 0, subnormals = 0, non_finite = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double x = FromBf16(a[i]);
    if (!std::isfinite(x)) {
      ++non_finite;
      continue;
    }
    sum += x;
    squares += x * x;
    min = std::min(min, x);
    max = std::max(max, x);
    zeros += x == 0 ? 1 : 0;
    subnormals += std::abs(x) < 0x1p-126 ? 1 : 0;
  }
  return sum + squares + min + max + static_cast<double>(zeros + subnormals + non_finite);
}

std::vector<std::uint16_t> SomeValues(std::size_t count, std::uint32_t seed) {
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& value : values) {
    seed = seed * 1664525 + 1013904223;
    value = static_cast<std::uint16_t>(0x3c00 + (seed >> 25) + ((seed >> 9 & 1) << 15));
  }
  return values;
}

void MeasureMemory(std::size_t count, int rounds, std::string& json) {
  const std::vector<std::uint16_t> a = SomeValues(count, 1);
  const std::vector<std::uint16_t> b = SomeValues(count, 2);
  const auto* bytes_a = reinterpret_cast<const std::byte*>(a.data());
  const auto* bytes_b = reinterpret_cast<const std::byte*>(b.data());
  const auto add = [&](const char* name, double bytes, const std::function<void()>& fn) {
    char text[80];
    std::snprintf(text, sizeof(text), "%s\"%s\": %.2f", json.empty() ? "" : ", ", name,
                  bytes / SecondsOf(rounds, fn) / 1e9);
    json += text;
  };
  const auto both = static_cast<double>(4 * count);
  add("change", both, [&] {
    ValueChange change;
    for (std::size_t i = 0; i < count; i += kBlockValues) {
      change.Add(MeasureChange(DType::kBF16, bytes_a + 2 * i, DType::kBF16, bytes_b + 2 * i,
                               std::min(kBlockValues, count - i)));
    }
    sink = change.l2_change();
  });
  add("change_plain", both, [&] { sink = PlainChange(a.data(), b.data(), count); });
  add("statistics", both / 2, [&] {
    ValueSums sum;
    for (std::size_t i = 0; i < count; i += kBlockValues) {
      sum.Add(MeasureBlock(DType::kBF16, bytes_a + 2 * i, std::min(kBlockValues, count - i)));
    }
    sink = sum.squares.Root();
  });
  add("statistics_plain", both / 2, [&] { sink = PlainStatistics(a.data(), count); });
}

Status MeasureCheckpoints(const std::string& first, const std::string& second, int rounds,
                          std::string& json) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto a, OpenNamed(HostFileSystem(), first, {}));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto b, OpenNamed(HostFileSystem(), second, {}));
  Status status;
  std::uint64_t read = 0;
  const double ours = SecondsOf(rounds, [&] {
    CompareOptions options;
    options.stats = true;
    const auto summary =
        CompareCheckpoints(*a, *b, options, [](const Mismatch&) { return Status(); });
    if (!summary.ok()) status = summary.status();
    if (summary.ok()) read = summary.value().bytes_read;
  });
  TENSORMOUNT_RETURN_IF_ERROR(status);
  struct Pair {
    std::vector<std::byte> a;
    std::vector<std::byte> b;
  };
  std::vector<Pair> pairs;
  TENSORMOUNT_RETURN_IF_ERROR(a->index().ForEachTensor(0, [&](const TensorEntry& tensor) {
    if (tensor.meta.dtype() != DType::kBF16 || !status.ok()) return true;
    const Result<TensorEntry> other = b->index().Find(tensor.meta.key());
    if (!other.ok() || (tensor.has_digest && tensor.digest == other.value().digest)) return true;
    Pair& pair = pairs.emplace_back();
    status = ReadElements(*a, tensor, 0, tensor.meta.elements(), pair.a);
    if (status.ok()) status = ReadElements(*b, other.value(), 0, tensor.meta.elements(), pair.b);
    return true;
  }));
  TENSORMOUNT_RETURN_IF_ERROR(status);
  TensorUnits units;
  constexpr std::size_t kUnit = std::size_t{1} << 20;
  for (const Pair& pair : pairs) units.Add((pair.a.size() + kUnit - 1) / kUnit);
  struct Nothing {};
  const double plain = SecondsOf(rounds, [&] {
    (void)ForEachParallel<Nothing>(
        units.count(), ReadingThreads(0), [&](std::size_t i, Nothing&) -> Status {
          const TensorUnits::Unit unit = units.At(i);
          const Pair& pair = pairs[unit.tensor];
          const std::size_t begin = unit.number * kUnit;
          const std::size_t size = std::min(kUnit, pair.a.size() - begin);
          sink =
              PlainChange(reinterpret_cast<const std::uint16_t*>(pair.a.data() + begin),
                          reinterpret_cast<const std::uint16_t*>(pair.b.data() + begin), size / 2);
          return Status();
        });
  });
  char text[160];
  std::snprintf(text, sizeof(text),
                ", \"threads\": %d, \"bytes\": %llu, \"diff\": %.2f, \"diff_plain\": %.2f",
                ReadingThreads(0), static_cast<unsigned long long>(read),
                static_cast<double>(read) / ours / 1e9, static_cast<double>(read) / plain / 1e9);
  json += text;
  return {};
}

int RunNumbersBench(int argc, char** argv) {
  std::size_t mib = 256;
  int rounds = 5;
  std::vector<std::string> sources;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--mib" && i + 1 < argc) {
      mib = std::strtoul(argv[++i], nullptr, 10);
    } else if (word == "--rounds" && i + 1 < argc) {
      rounds = std::atoi(argv[++i]);
    } else {
      sources.push_back(word);
    }
  }
  if ((!sources.empty() && sources.size() != 2) || mib == 0 || rounds < 1) {
    std::fprintf(stderr, "usage: numbersbench [--mib N] [--rounds N] [A B]\n");
    return 2;
  }
  std::string json;
  MeasureMemory(mib << 19, rounds, json);
  if (!sources.empty()) {
    const Status status = MeasureCheckpoints(sources[0], sources[1], rounds, json);
    if (!status.ok()) {
      std::fprintf(stderr, "numbersbench: %s\n", status.ToString().c_str());
      return 1;
    }
  }
  std::printf("{%s}\n", json.c_str());
  return 0;
}

}  // namespace
}  // namespace tensormount

int main(int argc, char** argv) { return tensormount::RunNumbersBench(argc, argv); }
