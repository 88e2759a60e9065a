// SPDX-License-Identifier: Apache-2.0
// zlib's CRC-32, used by zip archives and DCP files, for 64-bit sizes.
#include "base/crc32.h"

#include <limits>
#include <zlib.h>

namespace tensormount {

std::uint32_t Crc32Extend(std::uint32_t crc, const void* data, std::size_t size) {
  return static_cast<std::uint32_t>(crc32_z(crc, static_cast<const Bytef*>(data), size));
}

std::uint32_t Crc32Combine(std::uint32_t a, std::uint32_t b, std::uint64_t b_bytes) {
  static_assert(std::numeric_limits<z_off_t>::max() >= std::numeric_limits<std::int64_t>::max());
  return static_cast<std::uint32_t>(crc32_combine(a, b, static_cast<z_off_t>(b_bytes)));
}

}  // namespace tensormount
