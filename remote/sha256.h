// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_SHA256_H_
#define TENSORMOUNT_REMOTE_SHA256_H_

#include <array>
#include <string>
#include <string_view>

namespace tensormount {

using Sha256Digest = std::array<unsigned char, 32>;
// FIPS 180-4.
Sha256Digest Sha256(std::string_view data);
// The same without the CPU's instructions for it.
Sha256Digest Sha256Portable(std::string_view data);
std::string Hexadecimal(const Sha256Digest& digest);
std::string Base64(const Sha256Digest& digest);

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_SHA256_H_
