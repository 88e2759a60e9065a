// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_KERNELS_CRC64_H_
#define TENSORMOUNT_GPU_KERNELS_CRC64_H_

#include <cstdint>

#include "base/crc64_math.h"
#include "gpu/kernels/lanes.h"
#include "gpu/kernels/strided.h"

// The contribution of a region to the digest of its tensor (shard/strided_digest.h), piece by
// piece: the CRC-64/NVME of a piece that is one run of the tensor's row-major bytes, shifted by the
// number of tensor bytes after it. Contributions are combined by exclusive or, in any order, so
// each thread processes some pieces, and all threads combine their results in the digest's word.

namespace tensormount::kernels {

// Bytes of a piece, which one thread processes: long enough that the final shift (MovedUp) costs
// little in comparison.
inline constexpr std::uint64_t kCrcPieceBytes = 1024;

// Tables in device memory. `bytes` is a copy of crc64::kTables (base/crc64_math.h), which processes
// eight bytes at a time; the kernel copies it to shared memory, because every byte needs a look-up.
// `powers[d][n]` shifts a CRC by n * 256^d bytes.
struct ByteTables {
  std::uint64_t of[8][256];
};
struct CrcTables {
  ByteTables bytes;
  std::uint64_t powers[8][256];
};
inline void FillCrcTables(CrcTables& tables) {
  for (std::size_t k = 0; k < 8; ++k) {
    for (std::size_t b = 0; b < 256; ++b) tables.bytes.of[k][b] = crc64::kTables[k][b];
    // kBytePowers[8 * k] shifts by 2^(8k) = 256^k bytes; its n-th power shifts by n times that.
    const std::uint64_t one = crc64::kBytePowers[8 * k];
    tables.powers[k][0] = 0;  // Unused.
    tables.powers[k][1] = one;
    for (std::size_t n = 2; n < 256; ++n) {
      tables.powers[k][n] = crc64::MultiplyPortable(tables.powers[k][n - 1], one);
    }
  }
}

// The same as crc64::MultiplyPortable, which is host code, but without branches, so that the
// threads of a warp do not diverge.
TENSORMOUNT_HOST_DEVICE inline std::uint64_t CrcProduct(std::uint64_t a, std::uint64_t b) {
  constexpr std::uint64_t kReflected = crc64::kReflected;
  std::uint64_t product = 0;
  TENSORMOUNT_ROLLED
  for (int i = 63; i >= 0; --i) {
    product ^= b & (0 - ((a >> i) & 1));
    b = (b >> 1) ^ (kReflected & (0 - (b & 1)));
  }
  return (product >> 1) ^ (kReflected & (0 - (product & 1)));
}

TENSORMOUNT_HOST_DEVICE inline std::uint64_t MovedUp(const CrcTables& tables, std::uint64_t crc,
                                                     std::uint64_t bytes) {
  TENSORMOUNT_ROLLED
  for (int digit = 0; bytes != 0; ++digit, bytes >>= 8) {
    if ((bytes & 0xFF) != 0) crc = CrcProduct(crc, tables.powers[digit][bytes & 0xFF]);
  }
  return crc;
}

TENSORMOUNT_HOST_DEVICE inline std::uint64_t CrcOf(const ByteTables& tables,
                                                   const std::uint8_t* data, std::uint64_t size) {
  std::uint64_t state = ~std::uint64_t{0};
  for (; size >= 8; data += 8, size -= 8) {
    const std::uint64_t word = state ^ Load64(data);
    state = 0;
    for (int k = 0; k < 8; ++k) state ^= tables.of[7 - k][(word >> (8 * k)) & 0xFF];
  }
  TENSORMOUNT_ROLLED
  for (; size > 0; ++data, --size) {
    state = (state >> 8) ^ tables.of[0][(state ^ *data) & 0xFF];
  }
  return ~state;
}

// The contribution of piece `number`. `s` maps bytes of memory, relative to `from`, to positions in
// the tensor's row-major bytes, of which there are `tensor_bytes`.
template <typename Index>
TENSORMOUNT_HOST_DEVICE std::uint64_t CrcOfPiece(const ByteTables& bytes, const CrcTables& tables,
                                                 const Strided& s, std::uint64_t number,
                                                 const std::uint8_t* from,
                                                 std::uint64_t tensor_bytes) {
  const RunPart p = PieceAt<Index>(s, number);
  const std::uint64_t end = static_cast<std::uint64_t>(p.to) + p.bytes;
  return MovedUp(tables, CrcOf(bytes, from + p.from, p.bytes), tensor_bytes - end);
}

}  // namespace tensormount::kernels

#endif  // TENSORMOUNT_GPU_KERNELS_CRC64_H_
