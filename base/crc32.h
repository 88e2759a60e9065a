// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_CRC32_H_
#define TENSORMOUNT_BASE_CRC32_H_

#include <cstddef>
#include <cstdint>

namespace tensormount {

// The CRC-32 of zip archives (polynomial 0x04C11DB7 reflected, init and xorout all ones;
// "123456789" gives 0xCBF43926, the empty string 0), to check foreign archives and write ours.

// The CRC of the data that `crc` covers, followed by `data`. Start with 0.
std::uint32_t Crc32Extend(std::uint32_t crc, const void* data, std::size_t size);
// The CRC of A followed by B from their CRCs, in O(log b_bytes) without the bytes: parts of an
// archive are written on several threads, and its directory needs one CRC per member.
std::uint32_t Crc32Combine(std::uint32_t a, std::uint32_t b, std::uint64_t b_bytes);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_CRC32_H_
