// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_VECTOR_CODE_H_
#define TENSORMOUNT_SHARD_VECTOR_CODE_H_

#include <cstdint>

// Loops over values that are compiled twice: for every processor, and for those with AVX2. Both
// give the same bits: AVX2 without FMA rounds like SSE2, and the order of sums is fixed (Lanes).

namespace tensormount {

// Whether the code for AVX2 runs. Tests clear it to compare both.
inline bool& UsesAvx2() {
  static bool uses = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
#else
    return false;
#endif
  }();
  return uses;
}

#if defined(__x86_64__)
// Runs `fn`, compiled for AVX2 with everything that it calls. Requires UsesAvx2().
template <typename Fn>
[[gnu::target("avx2"), gnu::flatten, gnu::noinline]] void RunWithAvx2(const Fn& fn) {
  fn();
}
#else
template <typename Fn>
void RunWithAvx2(const Fn& fn) {
  fn();
}
#endif

// Sums are formed in 8 lanes: lane l has the values number l, l + 8, l + 16, ... The lanes are
// computed kLanes at a time, as vectors of the compiler (GCC and clang).
inline constexpr int kSumLanes = 8;
struct NarrowLanes {
  static constexpr int kLanes = 2;
  typedef double Doubles __attribute__((vector_size(16)));
  typedef std::int64_t Integers __attribute__((vector_size(16)));
};
struct WideLanes {
  static constexpr int kLanes = 4;
  typedef double Doubles __attribute__((vector_size(32)));
  typedef std::int64_t Integers __attribute__((vector_size(32)));
};

// Calls fn(NarrowLanes()) or fn(WideLanes()).
template <typename Fn>
void WithLanes(const Fn& fn) {
  if (UsesAvx2()) {
    RunWithAvx2([&] { fn(WideLanes()); });
  } else {
    fn(NarrowLanes());
  }
}

// The sum of all lanes, always in the same order.
template <typename T>
T AddLanes(const T* lanes) {
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_VECTOR_CODE_H_
