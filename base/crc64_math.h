// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_CRC64_MATH_H_
#define TENSORMOUNT_BASE_CRC64_MATH_H_

#include <array>
#include <cstddef>
#include <cstdint>

// The arithmetic behind CRC-64/NVME, for base/crc64*.cc.
//
// Reflected: bit i of a 64-bit word is the coefficient of x^(63-i), and of a 128-bit pair
// (low, high) bit i of the whole is that of x^(127-i): `low` holds the higher degrees. The
// carry-less product of two reflected words, read as such a pair, is their product times x; the
// constants below are made for that.
//
// Why reflected: the CRC is defined so, with the first bit of a message being the lowest of its
// first byte. Loaded as a little-endian word, the bytes of a message are then in order of
// descending degree, without swapping. The price is an extra factor x in each product, because a
// carry-less product of two 64-bit words has 127 bits and ends one bit below the top of the pair;
// hence the "- 1" in the exponents of the constants.

namespace tensormount::crc64 {

// The polynomial P without its term x^64.
inline constexpr std::uint64_t kPolynomial = 0xAD93D23594C93659;

constexpr std::uint64_t Reflect(std::uint64_t v) {
  std::uint64_t r = 0;
  for (int i = 0; i < 64; ++i) r |= ((v >> i) & 1) << (63 - i);
  return r;
}

inline constexpr std::uint64_t kReflected = Reflect(kPolynomial);

// v * x mod P.
constexpr std::uint64_t TimesX(std::uint64_t v) {
  return (v >> 1) ^ ((v & 1) != 0 ? kReflected : 0);
}

// a * b * x mod P: one carry-less multiplication and a reduction, here bit by bit.
constexpr std::uint64_t MultiplyPortable(std::uint64_t a, std::uint64_t b) {
  std::uint64_t r = 0;
  for (int i = 63; i >= 0; --i) {  // Falling bit index: rising degree of a.
    if (((a >> i) & 1) != 0) r ^= b;
    b = TimesX(b);
  }
  return TimesX(r);
}

// x^-1 mod P, which exists because P has the term 1: (P - 1) / x.
inline constexpr std::uint64_t kInverseX = (kReflected << 1) | 1;

// The eight bytes whose CRC without inversions is all ones: all ones divided by x^64. XORed into
// the last eight bytes of a run they have the effect of the final inversion. Eight bytes of ones,
// XORed into the first eight, have the effect of the initial inversion.
inline constexpr std::uint64_t kFinalOnes = [] {
  std::uint64_t v = ~std::uint64_t{0};
  for (int i = 0; i < 64; ++i) v = (v >> 63) != 0 ? ((v ^ kReflected) << 1) | 1 : v << 1;
  return v;
}();

// kBytePowers[k] is x^(8 * 2^k - 1) mod P: multiplying by it shifts a value by 2^k bytes. Each is
// the square of the previous one: (8 * 2^k - 1) * 2 plus the product's own x is 8 * 2^(k + 1) - 1.
// Any shift by n bytes is a product of at most 64 of them, by the bits of n (Crc64Shift).
inline constexpr auto kBytePowers = [] {
  std::array<std::uint64_t, 64> t{};
  t[0] = Reflect(1) >> 7;
  for (std::size_t k = 1; k < t.size(); ++k) t[k] = MultiplyPortable(t[k - 1], t[k - 1]);
  return t;
}();

// x^(bits - 1) mod P: folds a word over a distance of `bits`.
constexpr std::uint64_t FoldConstant(int bits) {
  std::uint64_t v = Reflect(1);
  for (int i = 1; i < bits; ++i) v = TimesX(v);
  return v;
}

// Barrett's constants, both without their term 1: floor(x^128 / P) and P itself. With them reducing
// a 128-bit value costs two multiplications and no division: the first gives the quotient from the
// higher word, the second the multiple of P to subtract.
inline constexpr std::uint64_t kQuotient = [] {
  // Long division. `rest` has the 64 coefficients below the leading one.
  std::uint64_t rest = kPolynomial;  // x^128 - x^64 * P, seen from x^127 down.
  std::uint64_t quotient = 1;        // The coefficient of x^64.
  for (int i = 63; i >= 1; --i) {
    const bool lead = (rest >> 63) != 0;
    rest = (rest << 1) ^ (lead ? kPolynomial : 0);
    quotient = (quotient << 1) | (lead ? 1 : 0);
  }
  return Reflect(quotient);  // Coefficients of x^64 to x^1.
}();
inline constexpr std::uint64_t kDivisor = kInverseX;  // Coefficients of x^64 to x^1.

// kTables[k][b]: CRC of byte b followed by k zero bytes, for eight message bytes at a time
// ("slicing by 8"): their eight independent look-ups are combined by exclusive or, while byte by
// byte each look-up waits for the previous one. 16 KiB.
inline constexpr auto kTables = [] {
  std::array<std::array<std::uint64_t, 256>, 8> t{};
  for (std::size_t b = 0; b < 256; ++b) {
    std::uint64_t v = b;
    for (int i = 0; i < 8; ++i) v = TimesX(v);
    t[0][b] = v;
  }
  for (std::size_t k = 1; k < t.size(); ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      const std::uint64_t v = t[k - 1][b];
      t[k][b] = (v >> 8) ^ t[0][v & 0xFF];
    }
  }
  return t;
}();

// Extends a CRC by `size` bytes from `src`, and copies them to `dst` unless `dst` is null. `state`
// and the result are the CRC after the initial and before the final inversion.
using ExtendFn = std::uint64_t (*)(std::uint64_t state, void* dst, const void* src,
                                   std::size_t size);
using MultiplyFn = std::uint64_t (*)(std::uint64_t a, std::uint64_t b);
// Factors that shift a pair of words: one for the lower word, one for the higher.
using FoldPair = std::array<std::uint64_t, 2>;

// Sums of runs are computed by lanes, 64 bytes at the same position of every run. Lanes are aligned
// to the end of the run, so the first lane is padded with leading zeros.
inline constexpr std::size_t kLaneBytes = 64;
inline constexpr std::size_t kLongestRow = 512;
constexpr std::size_t PaddedRun(std::size_t run) {
  return (run + kLaneBytes - 1) / kLaneBytes * kLaneBytes;
}
// The CRC of the sum of runs of 64 to kLongestRow bytes, where the sum so far is shifted by `by`
// for each next run. The CRC has no inversions; instead `ones`, of PaddedRun(run) bytes, is XORed
// into each run (kFinalOnes).
using RowsFn = std::uint64_t (*)(const std::byte* src, std::ptrdiff_t step, std::size_t run,
                                 std::size_t rows, FoldPair by, const std::byte* ones);

// One implementation. All give equal results for all inputs; base/hash_test compares them with
// Crc64Bitwise. They differ only in speed.
struct Form {
  const char* name;
  ExtendFn extend;
  MultiplyFn multiply;
  RowsFn rows;  // Null: hashing run by run is as fast.
};

// The table-based form, which works everywhere.
const Form& PortableForm();
// 128-bit carry-less multiplication; null if the CPU or the architecture lacks it.
const Form* ClmulForm();
// 256-bit carry-less multiplication (VPCLMULQDQ with AVX2: AMD since Zen 3, Intel since Alder
// Lake); null if the CPU or the architecture lacks it.
const Form* DoubleClmulForm();
// 512-bit carry-less multiplication; null if the CPU or the architecture lacks it.
const Form* WideClmulForm();

}  // namespace tensormount::crc64

#endif  // TENSORMOUNT_BASE_CRC64_MATH_H_
