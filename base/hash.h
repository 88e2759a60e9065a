// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_HASH_H_
#define TENSORMOUNT_BASE_HASH_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tensormount {

// Two hash functions for two questions (docs/format.md, "Hashes"):
//   XXH3-128    is this piece of disk what was written?
//   CRC-64/NVME is it the same tensor, however it was cut? (a CRC is linear)
// Neither resists an adversary.

// A 128-bit hash in two halves; `low` is the lower one. Ordered only for use as a key.
struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  friend auto operator<=>(const Hash128&, const Hash128&) = default;
  // 32 hex digits, high half first.
  std::string ToHex() const;
};

// XXH3-128 with seed 0, in the fastest form for this CPU, chosen at run time.
Hash128 Xxh3(const void* data, std::size_t size);
inline Hash128 Xxh3(std::string_view s) { return Xxh3(s.data(), s.size()); }
// XXH3-64, for names, inode numbers and messages.
std::uint64_t Xxh3Low64(std::string_view s);

// XXH3-128 of data that arrive in several calls. Move-only. Allocates about 600 bytes; for
// contiguous data Xxh3 is faster.
class Xxh3Stream {
 public:
  Xxh3Stream();
  void Update(const void* data, std::size_t size);
  // The hash of all data so far; more may follow.
  Hash128 Value() const;
  void Reset();

 private:
  // The library's XXH3_state_t, hidden from our headers, and its deleter.
  std::unique_ptr<void, void (*)(void*)> state_;
};

// CRC-64/NVME: polynomial 0xAD93D23594C93659 reflected, init and xorout all ones;
// "123456789" gives 0xAE8B14860A799888, the empty string 0. Source: NVM Express NVM Command Set
// Specification, and the checksum that S3 keeps of whole objects.
using Crc64 = std::uint64_t;

// The CRC of the data that `crc` covers, followed by `data`. Start with 0. Uses carry-less
// multiplication if the CPU has it (chosen at run time), else tables.
Crc64 Crc64Extend(Crc64 crc, const void* data, std::size_t size);
// Crc64Extend by the definition, bit by bit, to test the fast forms.
Crc64 Crc64Bitwise(Crc64 crc, const void* data, std::size_t size);
// Whether Crc64Extend uses carry-less multiplication.
bool Crc64IsAccelerated();
// memcpy and Crc64Extend in one pass over memory, which is faster than both in sequence: copies
// `size` bytes from `src` to `dst` (no overlap) and returns the extended CRC.
Crc64 Crc64Copy(Crc64 crc, void* dst, const void* src, std::size_t size);

// Shifts a finished CRC by n following bytes that are hashed elsewhere. The CRCs of the pieces of a
// byte string, each shifted by the number of bytes after it, XOR to the CRC of the whole, in any
// order. A shift is a polynomial modulo P: making one costs O(log n) multiplications and applying
// it costs one, so reuse it for equal distances (columns).
class Crc64Shift {
 public:
  explicit Crc64Shift(std::uint64_t bytes);
  Crc64 Apply(Crc64 crc) const;
  // The factor by which the shift multiplies a CRC (base/crc64_math.h).
  std::uint64_t factor() const { return factor_; }

 private:
  std::uint64_t factor_;
};
// The contribution of `rows` runs of `run` bytes to the CRC of a message. In memory the first run
// is at `data` and each further one `step` bytes later (may be negative); in the message the runs
// are `distance` bytes apart. The result is relative to the end of the last run:
//   CRC(run 0) shifted by (rows - 1) * distance  XOR  ...  XOR  CRC(run rows - 1)
// Each CRC is of one run alone. With carry-less multiplication, four or more runs of 64 to 512
// bytes are as fast as one long run, because they are computed in parallel. All others are computed
// one after the other.
Crc64 Crc64Rows(const void* data, std::ptrdiff_t step, std::size_t run, std::size_t rows,
                std::uint64_t distance);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HASH_H_
