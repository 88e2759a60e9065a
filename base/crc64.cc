// SPDX-License-Identifier: Apache-2.0
// The CRC-64/NVME of base/hash.h without special instructions; crc64_clmul.cc has the fast form.
// The form is chosen at program start.
//
// A CRC is the remainder of the bytes, read as a polynomial. So the CRC of a tensor is the sum
// (exclusive or) of its runs' contributions, each shifted by the number of bytes after it: a
// multiplication by x^(8n) modulo the polynomial, which Crc64Shift prepares by squaring. This makes
// digests of tensors independent of their sharding.
#include <array>
#include <cstring>

#include "base/crc64_math.h"
#include "base/hash.h"

namespace tensormount {
namespace crc64 {
namespace {

std::uint64_t ExtendPortable(std::uint64_t state, void* dst, const void* src, std::size_t size) {
  if (dst != nullptr && size > 0) std::memcpy(dst, src, size);
  const auto* p = static_cast<const unsigned char*>(src);
  for (; size >= 8; size -= 8, p += 8) {
    std::uint64_t v;
    std::memcpy(&v, p, 8);
    v ^= state;
    state = kTables[7][v & 0xFF] ^ kTables[6][(v >> 8) & 0xFF] ^ kTables[5][(v >> 16) & 0xFF] ^
            kTables[4][(v >> 24) & 0xFF] ^ kTables[3][(v >> 32) & 0xFF] ^
            kTables[2][(v >> 40) & 0xFF] ^ kTables[1][(v >> 48) & 0xFF] ^ kTables[0][v >> 56];
  }
  for (; size > 0; --size, ++p) state = (state >> 8) ^ kTables[0][(state ^ *p) & 0xFF];
  return state;
}

std::uint64_t MultiplyByBits(std::uint64_t a, std::uint64_t b) { return MultiplyPortable(a, b); }

constexpr Form kPortable = {"portable", ExtendPortable, MultiplyByBits, nullptr};

// The form in use. Until it is initialised (static initialisers of other files may hash) the
// portable form is used.
const Form* chosen = [] {
  if (const Form* wide = WideClmulForm()) return wide;
  if (const Form* twice = DoubleClmulForm()) return twice;
  if (const Form* clmul = ClmulForm()) return clmul;
  return &kPortable;
}();

const Form& Chosen() { return chosen != nullptr ? *chosen : kPortable; }

}  // namespace

const Form& PortableForm() { return kPortable; }

}  // namespace crc64

Crc64 Crc64Extend(Crc64 crc, const void* data, std::size_t size) {
  return ~crc64::Chosen().extend(~crc, nullptr, data, size);
}

Crc64 Crc64Copy(Crc64 crc, void* dst, const void* src, std::size_t size) {
  return ~crc64::Chosen().extend(~crc, dst, src, size);
}

Crc64 Crc64Bitwise(Crc64 crc, const void* data, std::size_t size) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint64_t state = ~crc;
  for (std::size_t i = 0; i < size; ++i) {
    state ^= p[i];
    for (int bit = 0; bit < 8; ++bit) state = crc64::TimesX(state);
  }
  return ~state;
}

bool Crc64IsAccelerated() { return &crc64::Chosen() != &crc64::PortableForm(); }

Crc64Shift::Crc64Shift(std::uint64_t bytes) : factor_(crc64::kInverseX) {
  // `multiply` also multiplies by x. The factor of a shift by 0 bytes is therefore x^-1, and each
  // of kBytePowers has a factor x^-1.
  const crc64::MultiplyFn multiply = crc64::Chosen().multiply;
  bool first = true;
  for (std::size_t k = 0; bytes != 0; ++k, bytes >>= 1) {
    if ((bytes & 1) == 0) continue;
    factor_ = first ? crc64::kBytePowers[k] : multiply(factor_, crc64::kBytePowers[k]);
    first = false;
  }
}

Crc64 Crc64Shift::Apply(Crc64 crc) const { return crc64::Chosen().multiply(crc, factor_); }

// Fewer rows are hashed one by one, because the setup of Form::rows does not pay off for them.
constexpr std::size_t kFewRows = 4;

Crc64 Crc64Rows(const void* data, std::ptrdiff_t step, std::size_t run, std::size_t rows,
                std::uint64_t distance) {
  const auto* src = static_cast<const std::byte*>(data);
  const crc64::Form& form = crc64::Chosen();
  const Crc64Shift shift(distance);
  if (form.rows == nullptr || run < crc64::kLaneBytes || run > crc64::kLongestRow ||
      rows < kFewRows) {
    Crc64 crc = 0;
    for (; rows > 0; --rows, src += step) crc = shift.Apply(crc) ^ Crc64Extend(0, src, run);
    return crc;
  }
  // Form::rows does not invert the CRC at its begin and end. Bytes that it XORs into each run have
  // the same effect: ones into the first eight, kFinalOnes into the last eight.
  std::array<std::byte, crc64::kLongestRow> ones{};
  const std::size_t padded = crc64::PaddedRun(run);
  std::memset(ones.data() + (padded - run), 0xFF, 8);
  std::memcpy(ones.data() + (padded - 8), &crc64::kFinalOnes, 8);
  return form.rows(src, step, run, rows, {Crc64Shift(distance + 8).factor(), shift.factor()},
                   ones.data());
}

}  // namespace tensormount
