// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_STREAM_COPY_H_
#define TENSORMOUNT_BASE_STREAM_COPY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tensormount {

// memcpy past the caches, for what will not be read soon: fetching the destination first would cost
// half as much again. After the last of such copies, before other threads are told of them,
// EndStream() makes them visible in the usual order.
inline void StreamBytes(const std::byte* src, std::byte* dst, std::size_t size) {
#if defined(__SSE2__)
  const std::size_t head = (16 - reinterpret_cast<std::uintptr_t>(dst) % 16) % 16;
  if (head >= size) {
    std::memcpy(dst, src, size);
    return;
  }
  std::memcpy(dst, src, head);
  std::size_t at = head;
  for (; size - at >= 64; at += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(src + at);
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + at, src + at, size - at);
#else
  std::memcpy(dst, src, size);
#endif
}

// memcpy through the caches, a cache line a step.
inline void CopyByLines(const std::byte* src, std::byte* dst, std::size_t size) {
  std::size_t at = 0;
#if defined(__SSE2__)
  for (; size - at >= 64; at += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(src + at);
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_storeu_si128(to, a);
    _mm_storeu_si128(to + 1, b);
    _mm_storeu_si128(to + 2, c);
    _mm_storeu_si128(to + 3, d);
  }
#endif
  std::memcpy(dst + at, src + at, size - at);
}

inline void EndStream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_STREAM_COPY_H_
