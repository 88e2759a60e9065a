// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_KERNELS_RUNS_H_
#define TENSORMOUNT_GPU_KERNELS_RUNS_H_

#include <cstdint>

#include "gpu/kernels/lanes.h"

// Copies that are contiguous on both sides, at any alignment. Most are of small tensors, of which
// there are many.

namespace tensormount::kernels {

// Bytes that one warp copies.
inline constexpr std::uint64_t kRunPart = 4096;

// Copies every kLanes-th of `words` words, from word `lane` on.
template <typename Word>
TENSORMOUNT_HOST_DEVICE void CopyWords(const std::uint8_t* from, std::uint8_t* to, unsigned words,
                                       unsigned lane) {
  constexpr unsigned kAtOnce = 4;
  const auto* const source = reinterpret_cast<const Word*>(from);
  auto* const target = reinterpret_cast<Word*>(to);
  TENSORMOUNT_ROLLED
  for (unsigned n = lane; n < words; n += kAtOnce * kLanes) {
    Word some[kAtOnce];
    // Issue all loads before the first use, so that they overlap.
    TENSORMOUNT_UNROLL
    for (unsigned k = 0; k < kAtOnce; ++k) {
      if (n + k * kLanes < words) some[k] = source[n + k * kLanes];
    }
    TENSORMOUNT_UNROLL
    for (unsigned k = 0; k < kAtOnce; ++k) {
      if (n + k * kLanes < words) target[n + k * kLanes] = some[k];
    }
  }
}

// Does one lane's share of a copy of at most kRunPart bytes. The warp copies words of the largest
// size, at most 16 bytes, that can be aligned on both sides, and single bytes before the first word
// and after the last one, of which there are fewer than lanes.
TENSORMOUNT_HOST_DEVICE inline void CopyRun(const std::uint8_t* from, std::uint8_t* to,
                                            unsigned bytes, unsigned lane) {
  const std::uintptr_t apart =
      reinterpret_cast<std::uintptr_t>(from) ^ reinterpret_cast<std::uintptr_t>(to);
  const auto word = static_cast<unsigned>((apart | 16) & (~(apart | 16) + 1));
  auto before = static_cast<unsigned>(0 - reinterpret_cast<std::uintptr_t>(to)) & (word - 1);
  if (before > bytes) before = bytes;
  const unsigned words = (bytes - before) / word;
  const unsigned behind = bytes - before - words * word;
  if (lane < before) to[lane] = from[lane];
  if (lane < behind) to[bytes - behind + lane] = from[bytes - behind + lane];
  from += before;
  to += before;
  switch (word) {
    case 16:
      return CopyWords<Word16>(from, to, words, lane);
    case 8:
      return CopyWords<std::uint64_t>(from, to, words, lane);
    case 4:
      return CopyWords<std::uint32_t>(from, to, words, lane);
    case 2:
      return CopyWords<std::uint16_t>(from, to, words, lane);
    default:
      return CopyWords<std::uint8_t>(from, to, words, lane);
  }
}

}  // namespace tensormount::kernels

#endif  // TENSORMOUNT_GPU_KERNELS_RUNS_H_
