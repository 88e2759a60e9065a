// SPDX-License-Identifier: Apache-2.0
#include "base/crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace tensormount {
namespace {

// Reflected: bit 31 is the coefficient of x^0.
constexpr std::uint32_t kPolynomial = 0xEDB88320;
constexpr std::size_t kSlices = 8;

// kTables[k][b]: byte b followed by k zero bytes.
constexpr auto kTables = [] {
  std::array<std::array<std::uint32_t, 256>, kSlices> t{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t v = b;
    for (int i = 0; i < 8; ++i) v = (v >> 1) ^ ((v & 1) != 0 ? kPolynomial : 0);
    t[0][b] = v;
  }
  for (std::size_t k = 1; k < kSlices; ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xFF];
    }
  }
  return t;
}();

// The state between the inversions.
std::uint32_t ExtendTables(std::uint32_t state, const unsigned char* p, std::size_t size) {
  for (; size >= kSlices; size -= kSlices, p += kSlices) {
    std::uint32_t low;
    std::uint32_t high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + 4, 4);
    low ^= state;
    state = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^
            kTables[5][(low >> 16) & 0xFF] ^ kTables[4][low >> 24] ^ kTables[3][high & 0xFF] ^
            kTables[2][(high >> 8) & 0xFF] ^ kTables[1][(high >> 16) & 0xFF] ^
            kTables[0][high >> 24];
  }
  for (; size > 0; --size, ++p) state = (state >> 8) ^ kTables[0][(state ^ *p) & 0xFF];
  return state;
}

// a * b mod P.
constexpr std::uint32_t Multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// kPowers[k] is x^(8 * 2^k) mod P.
constexpr auto kPowers = [] {
  std::array<std::uint32_t, 64> t{};
  t[0] = 1u << 23;
  for (std::size_t k = 1; k < t.size(); ++k) t[k] = Multiply(t[k - 1], t[k - 1]);
  return t;
}();

#if defined(__x86_64__) && defined(__GNUC__)

#define TENSORMOUNT_CLMUL __attribute__((target("pclmul,sse4.1")))

// x^n mod P in 33 bits, reflected, as a folding step over that distance wants it.
constexpr std::uint64_t FoldConstant(int n) {
  std::uint32_t v = 1u << 31;
  for (int i = 0; i < n; ++i) v = (v >> 1) ^ ((v & 1) != 0 ? kPolynomial : 0);
  return std::uint64_t{v} << 1;
}

TENSORMOUNT_CLMUL inline __m128i Pair(std::uint64_t low, std::uint64_t high) {
  return _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low));
}

TENSORMOUNT_CLMUL inline __m128i Fold(__m128i v, __m128i k, __m128i next) {
  return _mm_xor_si128(
      next, _mm_xor_si128(_mm_clmulepi64_si128(v, k, 0x00), _mm_clmulepi64_si128(v, k, 0x11)));
}

// Four remainders of 16 bytes, folded into one; the last 128 bits go through the tables. `size` is
// at least 64.
TENSORMOUNT_CLMUL std::uint32_t ExtendClmul(std::uint32_t state, const unsigned char* p,
                                            std::size_t size) {
  const auto load = [&p](int at) TENSORMOUNT_CLMUL {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + at));
  };
  __m128i a = _mm_xor_si128(load(0), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load(16);
  __m128i c = load(32);
  __m128i d = load(48);
  const __m128i by64 = Pair(FoldConstant(8 * 64 + 32), FoldConstant(8 * 64 - 32));
  for (p += 64, size -= 64; size >= 64; p += 64, size -= 64) {
    a = Fold(a, by64, load(0));
    b = Fold(b, by64, load(16));
    c = Fold(c, by64, load(32));
    d = Fold(d, by64, load(48));
  }
  const __m128i by16 = Pair(FoldConstant(8 * 16 + 32), FoldConstant(8 * 16 - 32));
  a = Fold(Fold(Fold(a, by16, b), by16, c), by16, d);
  for (; size >= 16; p += 16, size -= 16) a = Fold(a, by16, load(0));
  // What is left is congruent to all that came: the CRC of these bytes, from state 0.
  unsigned char rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), a);
  return ExtendTables(ExtendTables(0, rest, sizeof rest), p, size);
}

bool HasClmul() {
  static const bool has = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return has;
}

#endif

}  // namespace

std::uint32_t Crc32Portable(std::uint32_t crc, const void* data, std::size_t size) {
  return ~ExtendTables(~crc, static_cast<const unsigned char*>(data), size);
}

std::uint32_t Crc32Extend(std::uint32_t crc, const void* data, std::size_t size) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (size >= 64 && HasClmul()) {
    return ~ExtendClmul(~crc, static_cast<const unsigned char*>(data), size);
  }
#endif
  return Crc32Portable(crc, data, size);
}

std::uint32_t Crc32Combine(std::uint32_t a, std::uint32_t b, std::uint64_t b_bytes) {
  for (std::size_t k = 0; b_bytes != 0; ++k, b_bytes >>= 1) {
    if ((b_bytes & 1) != 0) a = Multiply(kPowers[k], a);
  }
  return a ^ b;
}

}  // namespace tensormount
