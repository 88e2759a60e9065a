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

// A hash that resists adversaries, unlike those of base/hash.h. A process proves that it knows a
// key by hashing the other side's challenge; an eavesdropper learns nothing about the key.

inline constexpr std::size_t kKeyBytes = 32;
using SecretKey = std::array<std::uint8_t, kKeyBytes>;
using KeyedDigest = std::array<std::uint8_t, 32>;

// Keyed BLAKE2s-256 (RFC 7693), which needs no HMAC. For short messages: one pass, no allocation.
KeyedDigest KeyedHash(const SecretKey& key, std::string_view message);
// Compares in a time that does not depend on the contents. Different sizes return false at once.
bool EqualInConstantTime(std::string_view a, std::string_view b);
// Fills `out` from the kernel's random generator. Fails only if the system has none.
Status FillRandom(std::span<std::uint8_t> out);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_KEYED_HASH_H_
