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

// Two questions, two functions (docs/format.md, "Hashes"):
//   XXH3-128    is this piece of disk what was written?
//   CRC-64/NVME is it the same tensor, however it was cut? (a CRC is linear)
// Neither resists an adversary.

// As the library gives it and as records hold it: two halves, of which `low` is the lower. Ordered
// only so that it can be a key; the order means nothing.
struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  friend auto operator<=>(const Hash128&, const Hash128&) = default;
  // 32 hex digits, high half first.
  std::string ToHex() const;
};

// XXH3-128 with seed 0. The fastest form that this CPU has, chosen at run time.
Hash128 Xxh3(const void* data, std::size_t size);
inline Hash128 Xxh3(std::string_view s) { return Xxh3(s.data(), s.size()); }
// XXH3-64, for names and inode numbers.
std::uint64_t Xxh3Low64(std::string_view s);

// The same over data that come in several calls. Move-only. Costs an allocation of some 600 bytes:
// where all of the data are at hand, Xxh3 is the faster one.
class Xxh3Stream {
 public:
  Xxh3Stream();
  void Update(const void* data, std::size_t size);
  // Of everything so far; more may follow.
  Hash128 Value() const;
  void Reset();

 private:
  // The library's XXH3_state_t, which no header of ours names, and what frees it.
  std::unique_ptr<void, void (*)(void*)> state_;
};

// CRC-64/NVME: polynomial 0xAD93D23594C93659 reflected, init and xorout all ones;
// "123456789" gives 0xAE8B14860A799888, the empty string 0. Source: NVM Express NVM Command Set
// Specification, and the checksum that S3 keeps of whole objects.
using Crc64 = std::uint64_t;

// The CRC of what `crc` is of, followed by `data`. Start with 0.
// By carry-less multiplication where the CPU has it (chosen at run time), else by tables.
Crc64 Crc64Extend(Crc64 crc, const void* data, std::size_t size);
// The definition, bit by bit: what the fast forms are tested against.
Crc64 Crc64Bitwise(Crc64 crc, const void* data, std::size_t size);
// Whether the carry-less form is in use.
bool Crc64IsAccelerated();
// memcpy and Crc64Extend in one pass over memory: copies `size` bytes from `src` to `dst`
// (no overlap) and returns the extended CRC. Faster than the two one after the other.
Crc64 Crc64Copy(Crc64 crc, void* dst, const void* src, std::size_t size);

// How a finished CRC changes when n bytes that are counted elsewhere follow it. CRCs of the
// pieces of a byte string, each shifted by the bytes that come after it, XOR to the CRC of the
// whole, in any order. A shift is a polynomial modulo P: making one costs O(log n)
// multiplications, applying it one, so keep it where the same distance recurs (columns).
class Crc64Shift {
 public:
  explicit Crc64Shift(std::uint64_t bytes);
  Crc64 Apply(Crc64 crc) const;
  // What a CRC is multiplied by (base/crc64_math.h).
  std::uint64_t factor() const { return factor_; }

 private:
  std::uint64_t factor_;
};
// What `rows` runs of `run` bytes, the first at `data` and each `step` bytes behind the one before
// (which may be negative), contribute where each stands `distance` bytes behind the one before it
// in the message, seen from the end of the last one:
//   CRC(run 0) moved up by (rows - 1) * distance  XOR  ...  XOR  CRC(run rows - 1)
// For runs of 64 to 512 bytes as fast as the CRC of one long run: they are added up side by side,
// and none is begun or ended by itself. Longer and shorter ones are hashed one after the other.
Crc64 Crc64Rows(const void* data, std::ptrdiff_t step, std::size_t run, std::size_t rows,
                std::uint64_t distance);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HASH_H_
