// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_STREAM_COPY_H_
#define TENSORMOUNT_BASE_STREAM_COPY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// Copies for which memcpy is slow: the strided loops of shard/execute_copy.cc. memcpy is best for a
// single long run, but cannot know that a run of 2 KiB is one of a million that exceed the cache.
//
// On other machines than x86-64 both functions are memcpy.

namespace tensormount {

inline constexpr std::size_t kCacheLine = 64;

// Copies all whole cache lines and returns the number of bytes. With kPastCaches (streaming stores)
// `dst` must be 16-byte aligned, or the store faults. The four loads come before the four stores,
// so that the stores of a line are adjacent and the processor writes the line to memory at once.
template <bool kPastCaches>
std::size_t CopyWholeLines(const std::byte* src, std::byte* dst, std::size_t size) {
  std::size_t at = 0;
#if defined(__SSE2__)
  // SSE2 is always available: wider stores would need a run-time choice for each short run, and
  // fill the same line buffers.
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

// memcpy with streaming stores, for data that are not read soon: ordinary stores first fetch the
// lines that they overwrite, which adds half to the memory traffic. The caller decides what is too
// large for the cache. After the last such copy, call EndStream() before other threads may read the
// data.
inline void StreamBytes(const std::byte* src, std::byte* dst, std::size_t size) {
  // Streams whole lines and copies both ends by memcpy, because the processor writes a partly
  // streamed line in pieces (measured: 1 GB/s instead of 7).
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

// memcpy through the caches, one line per step. For runs of a few cache lines from many places,
// where the C library's setup costs more than the copy (figures: docs/performance.md).
inline void CopyByLines(const std::byte* src, std::byte* dst, std::size_t size) {
  const std::size_t at = CopyWholeLines<false>(src, dst, size);
  std::memcpy(dst + at, src + at, size - at);
}

// Orders streaming stores before later stores: without this function another thread could see a
// "copied" flag before the bytes. Call it once after all copies, because it waits for all of them.
inline void EndStream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_STREAM_COPY_H_
