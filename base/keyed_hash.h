// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_KEYED_HASH_H_
#define TENSORMOUNT_BASE_KEYED_HASH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount {

// What the hashes of base/hash.h are not: for an adversary. Who knows a key proves it by hashing
// what the other one chose; who does not cannot, and learns nothing of the key by listening.

inline constexpr std::size_t kKeyBytes = 32;
using SecretKey = std::array<std::uint8_t, kKeyBytes>;
using KeyedDigest = std::array<std::uint8_t, 32>;

// BLAKE2s-256 with a key (RFC 7693), which needs no HMAC around it. Of short messages: one pass, no
// allocation.
KeyedDigest KeyedHash(const SecretKey& key, std::string_view message);
// Takes the same time wherever they differ. Of equal sizes; otherwise false at once.
bool EqualInConstantTime(std::string_view a, std::string_view b);
// From the kernel's generator. Fails only where the system has none.
Status FillRandom(std::span<std::uint8_t> out);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_KEYED_HASH_H_
