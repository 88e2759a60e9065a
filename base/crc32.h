// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_CRC32_H_
#define TENSORMOUNT_BASE_CRC32_H_

#include <cstddef>
#include <cstdint>

namespace tensormount {

// The CRC-32 of zip archives (polynomial 0x04C11DB7 reflected, init and xorout all ones; of
// "123456789" 0xCBF43926, of nothing 0): what others' archives are checked with and ours written.

// The CRC of what `crc` is of, followed by `data`. Start with 0.
std::uint32_t Crc32Extend(std::uint32_t crc, const void* data, std::size_t size);
// CRC of A followed by B from those of A and B, in O(log b_bytes) and without the bytes: parts of
// an archive are written on several threads, and its directory wants one CRC of each member.
std::uint32_t Crc32Combine(std::uint32_t a, std::uint32_t b, std::uint64_t b_bytes);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_CRC32_H_
