// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_STREAM_COPY_H_
#define TENSORMOUNT_BASE_STREAM_COPY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// Copies of bytes that memcpy does badly, for the strided loops of shard/execute_copy.cc. Plain
// memcpy is right for everything else: it knows the machine's best way for a single long run. What
// it cannot know is that a run of 2 KiB is one of a million, of which the cache will hold none.
//
// Elsewhere than on x86-64 both forms are memcpy.

namespace tensormount {

inline constexpr std::size_t kCacheLine = 64;

// Copies whole cache lines, as many as there are, and returns how many bytes that was. kPastCaches:
// `dst` must be aligned to 16 bytes, without which the streaming store faults. All four loads come
// before the four stores, so that the stores of a line are neighbours: the processor collects them
// in a buffer of one line and writes that to memory as one.
template <bool kPastCaches>
std::size_t CopyWholeLines(const std::byte* src, std::byte* dst, std::size_t size) {
  std::size_t at = 0;
#if defined(__SSE2__)
  // SSE2, which every x86-64 has: wider stores would need a choice at run time for each short run,
  // and fill the same line buffers.
  const auto store = [](__m128i* to, __m128i bytes) {
    if constexpr (kPastCaches) {
      _mm_stream_si128(to, bytes);
    } else {
      _mm_storeu_si128(to, bytes);
    }
  };
  for (; size - at >= 64; at += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(src + at);
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    store(to, a);
    store(to + 1, b);
    store(to + 2, c);
    store(to + 3, d);
  }
#endif
  return at;
}

// memcpy past the caches, for what will not be read soon: an ordinary store fetches the line that
// it is about to overwrite, which costs half as much again. How much is too much for a cache is for
// the caller to say; below that a reader finds the bytes there. After the last of such copies,
// before other threads are told of them, EndStream() makes them visible in the usual order.
inline void StreamBytes(const std::byte* src, std::byte* dst, std::size_t size) {
  // Whole lines of the destination, and what stands before and behind them by memcpy. A line that
  // is streamed in part is written to memory in pieces: measured 1 GB/s instead of 7.
  const std::size_t head =
      (kCacheLine - reinterpret_cast<std::uintptr_t>(dst) % kCacheLine) % kCacheLine;
  if (head >= size) {
    std::memcpy(dst, src, size);
    return;
  }
  std::memcpy(dst, src, head);
  const std::size_t at = head + CopyWholeLines<true>(src + head, dst + head, size - head);
  std::memcpy(dst + at, src + at, size - at);
}

// memcpy through the caches, a cache line a step. For runs of some lines from many places, where
// the C library's start of a copy costs more than the copy (figures: docs/performance.md).
inline void CopyByLines(const std::byte* src, std::byte* dst, std::size_t size) {
  const std::size_t at = CopyWholeLines<false>(src, dst, size);
  std::memcpy(dst + at, src + at, size - at);
}

// Streaming stores are not ordered with those that follow: without this another thread could see a
// flag that says "copied" before the bytes. Once after all copies, since it waits for all of them.
inline void EndStream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_STREAM_COPY_H_
