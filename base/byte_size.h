// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_BYTE_SIZE_H_
#define TENSORMOUNT_BASE_BYTE_SIZE_H_

#include <cstdint>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount {

// Number of bytes of a text like "5GB", "512MiB" or "100000". K, M, G, KB, MB and GB are powers of
// 1000; KiB, MiB and GiB are powers of 1024. kInvalidArgument for other texts, 0 and overflow of 63
// bits; the message begins with `what`.
Result<std::uint64_t> ParseByteSize(std::string_view what, std::string_view text);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_BYTE_SIZE_H_
