// SPDX-License-Identifier: Apache-2.0
// The fast implementation for base/crc64.cc, declared in crc64_math.h; a separate file because it
// is compiled for instructions that the rest of the program must not need.
//
// CRC-64/NVME by carry-less multiplication: several independent remainders are folded over the data
// at once, because one multiplication takes several cycles but one can start every cycle.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "base/crc64_math.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

namespace tensormount::crc64 {
namespace {

// Target attributes are per function, not per file, because HasClmul and other functions of this
// file run on every CPU. The helpers are always inlined, because a call would pass vectors through
// memory.
#define TENSORMOUNT_CLMUL __attribute__((target("pclmul,ssse3,sse4.1")))
#define TENSORMOUNT_CLMUL_INLINE \
  __attribute__((target("pclmul,ssse3,sse4.1"), always_inline)) inline
#define TENSORMOUNT_AVX2 __attribute__((target("pclmul,ssse3,sse4.1,avx2,vpclmulqdq")))
#define TENSORMOUNT_AVX2_INLINE \
  __attribute__((target("pclmul,ssse3,sse4.1,avx2,vpclmulqdq"), always_inline)) inline
#define TENSORMOUNT_WIDE \
  __attribute__((target("pclmul,ssse3,sse4.1,avx512f,avx512bw,avx512vl,vpclmulqdq")))
#define TENSORMOUNT_WIDE_INLINE                                                      \
  __attribute__((target("pclmul,ssse3,sse4.1,avx512f,avx512bw,avx512vl,vpclmulqdq"), \
                 always_inline)) inline

// Constants to shift a pair by `bytes`, for its low and high word; the low word, of higher degrees,
// moves 64 bits further.
constexpr FoldPair FoldBy(int bytes) {
  return {FoldConstant(8 * bytes + 64), FoldConstant(8 * bytes)};
}
constexpr FoldPair kFold16 = FoldBy(16);
constexpr FoldPair kFold32 = FoldBy(32);
constexpr FoldPair kFold64 = FoldBy(64);
constexpr FoldPair kFold128 = FoldBy(128);
constexpr FoldPair kFold256 = FoldBy(256);

TENSORMOUNT_CLMUL_INLINE __m128i Set(FoldPair k) {
  return _mm_set_epi64x(static_cast<long long>(k[1]), static_cast<long long>(k[0]));
}

TENSORMOUNT_CLMUL_INLINE __m128i Word(std::uint64_t v) {
  return _mm_cvtsi64_si128(static_cast<long long>(v));
}

TENSORMOUNT_CLMUL_INLINE std::uint64_t LowWord(__m128i v) {
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(v));
}

// Shifts a pair by the distance of the constants `k`: the two 128-bit products of the words are
// together congruent to the shifted pair.
TENSORMOUNT_CLMUL_INLINE __m128i Fold(__m128i v, __m128i k) {
  return _mm_xor_si128(_mm_clmulepi64_si128(v, k, 0x00), _mm_clmulepi64_si128(v, k, 0x11));
}

// Reduces a pair (low, high) modulo P by Barrett reduction: the word of higher degrees gives the
// quotient, and the quotient's multiple of P is subtracted from the other word.
TENSORMOUNT_CLMUL_INLINE std::uint64_t Reduce(__m128i v) {
  const __m128i k =
      _mm_set_epi64x(static_cast<long long>(kDivisor), static_cast<long long>(kQuotient));
  const __m128i quotient = _mm_clmulepi64_si128(v, k, 0x00);
  const __m128i product = _mm_clmulepi64_si128(quotient, k, 0x10);
  // kDivisor omits the constant term (x^0) of P. The product of the quotient with that term is the
  // quotient itself, which is added here.
  const __m128i high = _mm_unpackhi_epi64(_mm_xor_si128(v, product), v);
  return LowWord(_mm_xor_si128(high, quotient));
}

TENSORMOUNT_CLMUL std::uint64_t MultiplyClmul(std::uint64_t a, std::uint64_t b) {
  return Reduce(_mm_clmulepi64_si128(Word(a), Word(b), 0x00));
}

template <bool kCopy>
TENSORMOUNT_CLMUL_INLINE __m128i Load(unsigned char* dst, const unsigned char* src, int at = 0) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + at));
  if (kCopy) _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + at), v);
  return v;
}

// Extends the state by the last bytes, fewer than 16.
template <bool kCopy>
TENSORMOUNT_CLMUL_INLINE std::uint64_t Tail(std::uint64_t state, unsigned char* dst,
                                            const unsigned char* src, std::size_t size) {
  if ((size & 8) != 0) {
    std::uint64_t v;
    std::memcpy(&v, src, 8);
    if (kCopy) {
      std::memcpy(dst, &v, 8);
      dst += 8;
    }
    src += 8;
    state = Reduce(Word(state ^ v));
  }
  const std::size_t rest = size & 7;
  if (rest == 0) return state;
  std::uint64_t v = 0;
  int at = 0;
  if ((rest & 4) != 0) {
    std::uint32_t part;
    std::memcpy(&part, src, 4);
    if (kCopy) {
      std::memcpy(dst, &part, 4);
      dst += 4;
    }
    src += 4;
    v = part;
    at = 32;
  }
  if ((rest & 2) != 0) {
    std::uint16_t part;
    std::memcpy(&part, src, 2);
    if (kCopy) {
      std::memcpy(dst, &part, 2);
      dst += 2;
    }
    src += 2;
    v |= static_cast<std::uint64_t>(part) << at;
    at += 16;
  }
  if ((rest & 1) != 0) {
    if (kCopy) *dst = *src;
    v |= static_cast<std::uint64_t>(*src) << at;
  }
  // Multiplies v by x^(8 * rest). As a pair, bits shifted out of the word go into the low word.
  v ^= state;
  const int bits = static_cast<int>(8 * rest);
  return Reduce(
      _mm_set_epi64x(static_cast<long long>(v >> bits), static_cast<long long>(v << (64 - bits))));
}

// Folds `acc` over the remaining blocks of 16 bytes, then reduces and adds the tail.
template <bool kCopy>
TENSORMOUNT_CLMUL_INLINE std::uint64_t Finish(__m128i acc, unsigned char* dst,
                                              const unsigned char* src, std::size_t size) {
  const __m128i k16 = Set(kFold16);
  for (; size >= 16; size -= 16) {
    acc = _mm_xor_si128(Fold(acc, k16), Load<kCopy>(dst, src));
    src += 16;
    if (kCopy) dst += 16;
  }
  // acc * x^64 mod P: the low word is shifted by 128 bits, the high one takes its place.
  const __m128i k128 = Word(kFold16[1]);
  const __m128i v = _mm_xor_si128(_mm_clmulepi64_si128(acc, k128, 0x00), _mm_srli_si128(acc, 8));
  return Tail<kCopy>(Reduce(v), dst, src, size);
}

// Hashes 128 bytes per step in eight remainders of 16 bytes, each shifted by kFold128. At the end
// they are 16 bytes apart and are folded into one: 8 to 4, 4 to 2, 2 to 1. Data of less than two
// steps use a single remainder, which is cheaper than setting up eight.
template <bool kCopy>
TENSORMOUNT_CLMUL_INLINE std::uint64_t ExtendLanes(std::uint64_t state, unsigned char* dst,
                                                   const unsigned char* src, std::size_t size) {
  if (size < 16) return Tail<kCopy>(state, dst, src, size);
  constexpr int kLanes = 8;
  constexpr std::size_t kBlock = 16 * kLanes;
  if (size < 2 * kBlock) {
    const __m128i first = _mm_xor_si128(Load<kCopy>(dst, src), Word(state));
    return Finish<kCopy>(first, kCopy ? dst + 16 : dst, src + 16, size - 16);
  }
  __m128i acc[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) acc[i] = Load<kCopy>(dst, src, 16 * i);
  acc[0] = _mm_xor_si128(acc[0], Word(state));
  const __m128i k = Set(kFold128);
  for (;;) {
    size -= kBlock;
    src += kBlock;
    if (kCopy) dst += kBlock;
    if (size < kBlock) break;
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) {
      acc[i] = _mm_xor_si128(Fold(acc[i], k), Load<kCopy>(dst, src, 16 * i));
    }
  }
  const __m128i k64 = Set(kFold64);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) acc[i] = _mm_xor_si128(Fold(acc[i], k64), acc[i + 4]);
  const __m128i k32 = Set(kFold32);
  acc[0] = _mm_xor_si128(Fold(acc[0], k32), acc[2]);
  acc[1] = _mm_xor_si128(Fold(acc[1], k32), acc[3]);
  acc[0] = _mm_xor_si128(Fold(acc[0], Set(kFold16)), acc[1]);
  return Finish<kCopy>(acc[0], dst, src, size);
}

TENSORMOUNT_CLMUL std::uint64_t ExtendClmul(std::uint64_t state, void* dst, const void* src,
                                            std::size_t size) {
  const auto* from = static_cast<const unsigned char*>(src);
  if (dst == nullptr) return ExtendLanes<false>(state, nullptr, from, size);
  return ExtendLanes<true>(state, static_cast<unsigned char*>(dst), from, size);
}

TENSORMOUNT_WIDE_INLINE __m512i SetWide(FoldPair k) {
  const auto low = static_cast<long long>(k[0]);
  const auto high = static_cast<long long>(k[1]);
  return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

// Folds four pairs and adds the next bytes in one instruction (0x96 is the exclusive or of three).
TENSORMOUNT_WIDE_INLINE __m512i FoldWide(__m512i v, __m512i k, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(v, k, 0x00),
                                   _mm512_clmulepi64_epi128(v, k, 0x11), next, 0x96);
}

template <bool kCopy>
TENSORMOUNT_WIDE_INLINE __m512i LoadWide(unsigned char* dst, const unsigned char* src, int at) {
  const __m512i v = _mm512_loadu_si512(src + at);
  if (kCopy) _mm512_storeu_si512(dst + at, v);
  return v;
}

// Folds the bulk of the data in 4 remainders of 64 bytes, returns them as one of 16 bytes, and
// advances the arguments.
template <bool kCopy>
TENSORMOUNT_WIDE_INLINE __m128i FoldBulk(std::uint64_t state, unsigned char*& dst,
                                         const unsigned char*& src, std::size_t& size) {
  constexpr std::size_t kBlock = 256;
  __m512i a0 = LoadWide<kCopy>(dst, src, 0);
  __m512i a1 = LoadWide<kCopy>(dst, src, 64);
  __m512i a2 = LoadWide<kCopy>(dst, src, 128);
  __m512i a3 = LoadWide<kCopy>(dst, src, 192);
  a0 = _mm512_xor_si512(a0, _mm512_zextsi128_si512(Word(state)));
  const __m512i k = SetWide(kFold256);
  for (;;) {
    size -= kBlock;
    src += kBlock;
    if (kCopy) dst += kBlock;
    if (size < kBlock) break;
    a0 = FoldWide(a0, k, LoadWide<kCopy>(dst, src, 0));
    a1 = FoldWide(a1, k, LoadWide<kCopy>(dst, src, 64));
    a2 = FoldWide(a2, k, LoadWide<kCopy>(dst, src, 128));
    a3 = FoldWide(a3, k, LoadWide<kCopy>(dst, src, 192));
  }
  const __m512i k128 = SetWide(kFold128);
  a0 = FoldWide(a0, k128, a2);
  a1 = FoldWide(a1, k128, a3);
  a0 = FoldWide(a0, SetWide(kFold64), a1);
  __m128i b0 = _mm512_castsi512_si128(a0);
  __m128i b1 = _mm512_extracti32x4_epi32(a0, 1);
  const __m128i b2 = _mm512_extracti32x4_epi32(a0, 2);
  const __m128i b3 = _mm512_extracti32x4_epi32(a0, 3);
  const __m128i k32 = Set(kFold32);
  b0 = _mm_xor_si128(Fold(b0, k32), b2);
  b1 = _mm_xor_si128(Fold(b1, k32), b3);
  return _mm_xor_si128(Fold(b0, Set(kFold16)), b1);
}

template <bool kCopy>
TENSORMOUNT_WIDE_INLINE std::uint64_t ExtendWideLanes(std::uint64_t state, unsigned char* dst,
                                                      const unsigned char* src, std::size_t size) {
  const __m128i acc = FoldBulk<kCopy>(state, dst, src, size);
  // The compiler inserts this instruction only when it optimises; without it later SSE code is
  // slow.
  _mm256_zeroupper();
  return Finish<kCopy>(acc, dst, src, size);
}

TENSORMOUNT_WIDE std::uint64_t ExtendWide(std::uint64_t state, void* dst, const void* src,
                                          std::size_t size) {
  // FoldBulk needs at least two steps of 256 bytes.
  if (size < 512) return ExtendClmul(state, dst, src, size);
  const auto* from = static_cast<const unsigned char*>(src);
  if (dst == nullptr) return ExtendWideLanes<false>(state, nullptr, from, size);
  return ExtendWideLanes<true>(state, static_cast<unsigned char*>(dst), from, size);
}

// Summing runs: a lane is 64 bytes at the same position of every run. Its sum is shifted by the
// distance to the next run, whose bytes are then added. The cost of starting and ending a CRC is
// paid once for all runs, and neighbouring lanes hide the latency of a lane's chain of
// multiplications.
TENSORMOUNT_WIDE_INLINE __m512i SumWide(__m512i sum, __m512i k, __m512i row, __m512i ones) {
  return FoldWide(sum, k, _mm512_xor_si512(row, ones));
}

// Sums runs of kLanes lanes from `src` on. `mask` zeros the bytes of the first lane that are
// outside the run.
template <int kLanes>
TENSORMOUNT_WIDE_INLINE std::uint64_t RowsOfLanes(const std::byte* src, std::ptrdiff_t step,
                                                  std::size_t rows, __mmask64 mask, __m512i k,
                                                  const std::byte* ones) {
  __m512i sum[kLanes];
  __m512i one[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) {
    sum[i] = _mm512_setzero_si512();
    one[i] = _mm512_loadu_si512(ones + 64 * i);
  }
  for (; rows > 0; --rows, src += step) {
    sum[0] = SumWide(sum[0], k, _mm512_maskz_loadu_epi8(mask, src), one[0]);
#pragma GCC unroll 8
    for (int i = 1; i < kLanes; ++i) {
      sum[i] = SumWide(sum[i], k, _mm512_loadu_si512(src + 64 * i), one[i]);
    }
  }
  std::array<std::byte, 64 * kLanes> all;
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(all.data() + 64 * i, sum[i]);
  _mm256_zeroupper();
  return ExtendWide(0, nullptr, all.data(), all.size());
}

TENSORMOUNT_WIDE std::uint64_t RowsWide(const std::byte* src, std::ptrdiff_t step, std::size_t run,
                                        std::size_t rows, FoldPair by, const std::byte* ones) {
  const std::size_t before = PaddedRun(run) - run;
  const __mmask64 mask = ~std::uint64_t{0} << before;
  const __m512i k = SetWide(by);
  src -= before;
  switch (PaddedRun(run) / kLaneBytes) {
    case 1:
      return RowsOfLanes<1>(src, step, rows, mask, k, ones);
    case 2:
      return RowsOfLanes<2>(src, step, rows, mask, k, ones);
    case 3:
      return RowsOfLanes<3>(src, step, rows, mask, k, ones);
    case 4:
      return RowsOfLanes<4>(src, step, rows, mask, k, ones);
    case 5:
      return RowsOfLanes<5>(src, step, rows, mask, k, ones);
    case 6:
      return RowsOfLanes<6>(src, step, rows, mask, k, ones);
    case 7:
      return RowsOfLanes<7>(src, step, rows, mask, k, ones);
    default:
      return RowsOfLanes<8>(src, step, rows, mask, k, ones);
  }
}

// RowsByStrips sums strips of some lanes, over as many rows as have kRowsBlock bytes. The
// first-level cache holds them and the next block.
constexpr std::size_t kRowsBlock = 8 * 1024;
constexpr int kStripLanes = 8;

// Like SumWide, for lanes of 16 bytes.
TENSORMOUNT_CLMUL_INLINE __m128i SumNarrow(__m128i sum, __m128i k, __m128i row,
                                           const std::byte* ones) {
  const __m128i one = _mm_loadu_si128(reinterpret_cast<const __m128i*>(ones));
  return _mm_xor_si128(Fold(sum, k), _mm_xor_si128(row, one));
}

TENSORMOUNT_CLMUL_INLINE __m128i LoadRow(const std::byte* src) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
}

template <int kLanes>
TENSORMOUNT_CLMUL_INLINE void StripNarrow(const std::byte* src, std::ptrdiff_t step,
                                          std::size_t rows, __m128i k, std::byte* sums,
                                          const std::byte* ones) {
  auto* const kept = reinterpret_cast<__m128i*>(sums);
  __m128i sum[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) sum[i] = _mm_load_si128(kept + i);
  for (std::size_t r = 0; r < rows; ++r, src += step) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) {
      sum[i] = SumNarrow(sum[i], k, LoadRow(src + 16 * i), ones + 16 * i);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) _mm_store_si128(kept + i, sum[i]);
}

// Strips with 128-bit instructions.
struct NarrowStrips {
  TENSORMOUNT_CLMUL static void Sum(const std::byte* src, std::ptrdiff_t step, std::size_t bytes,
                                    std::size_t rows, FoldPair by, std::byte* sums,
                                    const std::byte* ones) {
    const __m128i k = Set(by);
    std::size_t at = 0;
    for (; bytes - at >= 16 * kStripLanes; at += 16 * kStripLanes) {
      StripNarrow<kStripLanes>(src + at, step, rows, k, sums + at, ones + at);
    }
    for (; at < bytes; at += 16) {
      StripNarrow<1>(src + at, step, rows, k, sums + at, ones + at);
    }
  }
};

// The same with 256-bit instructions, whose lanes have 32 bytes.
TENSORMOUNT_AVX2_INLINE __m256i SetDouble(FoldPair k) {
  return _mm256_broadcastsi128_si256(Set(k));
}
TENSORMOUNT_AVX2_INLINE __m256i FoldDouble(__m256i v, __m256i k) {
  return _mm256_xor_si256(_mm256_clmulepi64_epi128(v, k, 0x00),
                          _mm256_clmulepi64_epi128(v, k, 0x11));
}
TENSORMOUNT_AVX2_INLINE __m256i LoadDouble(const std::byte* src) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}

template <int kLanes>
TENSORMOUNT_AVX2_INLINE void StripDouble(const std::byte* src, std::ptrdiff_t step,
                                         std::size_t rows, __m256i k, std::byte* sums,
                                         const std::byte* ones) {
  __m256i sum[kLanes];
  __m256i one[kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; ++i) {
    sum[i] = LoadDouble(sums + 32 * i);
    one[i] = LoadDouble(ones + 32 * i);
  }
  for (std::size_t r = 0; r < rows; ++r, src += step) {
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i) {
      const __m256i row = _mm256_xor_si256(LoadDouble(src + 32 * i), one[i]);
      sum[i] = _mm256_xor_si256(FoldDouble(sum[i], k), row);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 32 * i), sum[i]);
  }
}

struct DoubleStrips {
  TENSORMOUNT_AVX2 static void Sum(const std::byte* src, std::ptrdiff_t step, std::size_t bytes,
                                   std::size_t rows, FoldPair by, std::byte* sums,
                                   const std::byte* ones) {
    constexpr int kLanes = 4;  // With as many `ones`, no more fit into the registers.
    const __m256i k = SetDouble(by);
    std::size_t at = 0;
    for (; bytes - at >= 32 * kLanes; at += 32 * kLanes) {
      StripDouble<kLanes>(src + at, step, rows, k, sums + at, ones + at);
    }
    for (; bytes - at >= 32; at += 32) {
      StripDouble<1>(src + at, step, rows, k, sums + at, ones + at);
    }
    _mm256_zeroupper();
    if (at < bytes) StripNarrow<1>(src + at, step, rows, Set(by), sums + at, ones + at);
  }
};

template <typename Strips>
TENSORMOUNT_CLMUL_INLINE std::uint64_t RowsByStrips(const std::byte* src, std::ptrdiff_t step,
                                                    std::size_t run, std::size_t rows, FoldPair by,
                                                    const std::byte* ones) {
  alignas(16) std::array<std::byte, kLongestRow> all{};
  std::byte* const sums = all.data();
  const std::size_t padded = PaddedRun(run);
  const std::size_t before = padded - run;
  const std::size_t part = before % 16;  // Bytes before the run in the lane in which it begins.
  const __m128i k = Set(by);
  // The control of _mm_shuffle_epi8 that moves a lane's bytes up by `part` and sets the lowest
  // `part` bytes to zero.
  const __m128i up =
      _mm_sub_epi8(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                   _mm_set1_epi8(static_cast<char>(part)));
  const std::size_t at_once = std::max<std::size_t>(1, kRowsBlock / padded);
  for (std::size_t r = 0; r < rows; r += at_once) {
    const std::size_t n = std::min(at_once, rows - r);
    // The strips would wait for memory at each line. The next block arrives meanwhile.
    const std::byte* coming = src + static_cast<std::ptrdiff_t>(n) * step;
    for (std::size_t i = std::min(at_once, rows - r - n); i > 0; --i, coming += step) {
      for (std::size_t b = 0; b < run; b += 64) _mm_prefetch(coming + b, _MM_HINT_T0);
    }
    std::size_t at = before - part;
    if (part != 0) {
      auto* const kept = reinterpret_cast<__m128i*>(sums + at);
      __m128i sum = _mm_load_si128(kept);
      const std::byte* row = src;
      for (std::size_t i = 0; i < n; ++i, row += step) {
        sum = SumNarrow(sum, k, _mm_shuffle_epi8(LoadRow(row), up), ones + at);
      }
      _mm_store_si128(kept, sum);
      at += 16;
    }
    Strips::Sum(src + at - before, step, padded - at, n, by, sums + at, ones + at);
    src += static_cast<std::ptrdiff_t>(n) * step;
  }
  return ExtendClmul(0, nullptr, sums, padded);
}

TENSORMOUNT_CLMUL std::uint64_t RowsNarrow(const std::byte* src, std::ptrdiff_t step,
                                           std::size_t run, std::size_t rows, FoldPair by,
                                           const std::byte* ones) {
  return RowsByStrips<NarrowStrips>(src, step, run, rows, by, ones);
}
TENSORMOUNT_CLMUL std::uint64_t RowsDouble(const std::byte* src, std::ptrdiff_t step,
                                           std::size_t run, std::size_t rows, FoldPair by,
                                           const std::byte* ones) {
  return RowsByStrips<DoubleStrips>(src, step, run, rows, by, ones);
}

// Hashes 256 bytes per step in eight remainders of 32 bytes.
template <bool kCopy>
TENSORMOUNT_AVX2_INLINE __m128i FoldDoubleBulk(std::uint64_t state, unsigned char*& dst,
                                               const unsigned char*& src, std::size_t& size) {
  constexpr int kLanes = 8;
  constexpr std::size_t kBlock = 32 * kLanes;
  const auto load = [&](int i) TENSORMOUNT_AVX2 {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32 * i));
    if (kCopy) _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 32 * i), v);
    return v;
  };
  __m256i acc[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) acc[i] = load(i);
  acc[0] = _mm256_xor_si256(acc[0], _mm256_zextsi128_si256(Word(state)));
  const __m256i k = SetDouble(kFold256);
  for (;;) {
    size -= kBlock;
    src += kBlock;
    if (kCopy) dst += kBlock;
    if (size < kBlock) break;
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) acc[i] = _mm256_xor_si256(FoldDouble(acc[i], k), load(i));
  }
  const __m256i k128 = SetDouble(kFold128);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) acc[i] = _mm256_xor_si256(FoldDouble(acc[i], k128), acc[i + 4]);
  const __m256i k64 = SetDouble(kFold64);
  acc[0] = _mm256_xor_si256(FoldDouble(acc[0], k64), acc[2]);
  acc[1] = _mm256_xor_si256(FoldDouble(acc[1], k64), acc[3]);
  acc[0] = _mm256_xor_si256(FoldDouble(acc[0], SetDouble(kFold32)), acc[1]);
  const __m128i low = _mm256_castsi256_si128(acc[0]);
  const __m128i high = _mm256_extracti128_si256(acc[0], 1);
  return _mm_xor_si128(Fold(low, Set(kFold16)), high);
}

template <bool kCopy>
TENSORMOUNT_AVX2_INLINE std::uint64_t ExtendDoubleLanes(std::uint64_t state, unsigned char* dst,
                                                        const unsigned char* src,
                                                        std::size_t size) {
  const __m128i acc = FoldDoubleBulk<kCopy>(state, dst, src, size);
  _mm256_zeroupper();
  return Finish<kCopy>(acc, dst, src, size);
}

TENSORMOUNT_AVX2 std::uint64_t ExtendDouble(std::uint64_t state, void* dst, const void* src,
                                            std::size_t size) {
  if (size < 512) return ExtendClmul(state, dst, src, size);
  const auto* from = static_cast<const unsigned char*>(src);
  if (dst == nullptr) return ExtendDoubleLanes<false>(state, nullptr, from, size);
  return ExtendDoubleLanes<true>(state, static_cast<unsigned char*>(dst), from, size);
}

constexpr Form kDouble = {"vpclmulqdq256", ExtendDouble, MultiplyClmul, RowsDouble};
constexpr Form kClmul = {"pclmul", ExtendClmul, MultiplyClmul, RowsNarrow};
constexpr Form kWide = {"vpclmulqdq", ExtendWide, MultiplyClmul, RowsWide};

bool HasClmul() {
  __builtin_cpu_init();  // Required in static initialisers, which may call this function.
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("ssse3") &&
         __builtin_cpu_supports("sse4.1");
}

}  // namespace

const Form* ClmulForm() { return HasClmul() ? &kClmul : nullptr; }

const Form* DoubleClmulForm() {
  if (!HasClmul() || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("vpclmulqdq")) {
    return nullptr;
  }
  return &kDouble;
}

const Form* WideClmulForm() {
  if (!HasClmul() || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("vpclmulqdq")) {
    return nullptr;
  }
  return &kWide;
}

}  // namespace tensormount::crc64

#else

namespace tensormount::crc64 {

const Form* ClmulForm() { return nullptr; }
const Form* DoubleClmulForm() { return nullptr; }
const Form* WideClmulForm() { return nullptr; }

}  // namespace tensormount::crc64

#endif
