// SPDX-License-Identifier: Apache-2.0
#include "base/keyed_hash.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

std::string HexOf(const KeyedDigest& digest) {
  std::string out;
  for (const std::uint8_t byte : digest) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

// By Python's hashlib.blake2s(message, key=bytes(range(32))): around the ends of blocks.
TEST(KeyedHashTest, MatchesKeyedBlake2s) {
  SecretKey key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::uint8_t>(i);
  struct Vector {
    std::size_t size;
    const char* hex;
  };
  for (const Vector& v : {
           Vector{0, "48a8997da407876b3d79c0d92325ad3b89cbb754d86ab71aee047ad345fd2c49"},
           Vector{1, "40d15fee7c328830166ac3f918650f807e7e01e177258cdc0a39b11f598066f1"},
           Vector{63, "c65382513f07460da39833cb666c5ed82e61b9e998f4b0c4287cee56c3cc9bcd"},
           Vector{64, "8975b0577fd35566d750b362b0897a26c399136df07bababbde6203ff2954ed4"},
           Vector{65, "21fe0ceb0052be7fb0f004187cacd7de67fa6eb0938d927677f2398c132317a8"},
           Vector{128, "0c311f38c35a4fb90d651c289d486856cd1413df9b0677f53ece2cd9e477c60a"},
           Vector{129, "46a73a8dd3e70f59d3942c01df599def783c9da82fd83222cd662b53dce7dbdf"},
           Vector{1000, "d5c42863172fb2424de520ff25866bf2ac9201ce81b6a8b703f67ea4c6735767"},
       }) {
    std::string message;
    for (std::size_t i = 0; i < v.size; ++i) message += static_cast<char>(i % 251);
    EXPECT_EQ(HexOf(KeyedHash(key, message)), v.hex) << v.size;
  }
  const KeyedDigest before = KeyedHash(key, "abc");
  key[31] ^= 0x80;
  EXPECT_NE(KeyedHash(key, "abc"), before);
}

TEST(KeyedHashTest, EqualityComparesEveryByte) {
  const std::string a(32, 'a');
  EXPECT_TRUE(EqualInConstantTime(a, std::string(32, 'a')));
  EXPECT_FALSE(EqualInConstantTime(a, a.substr(1)));
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::string b = a;
    b[i] ^= 1;
    EXPECT_FALSE(EqualInConstantTime(a, b)) << i;
  }
}

TEST(KeyedHashTest, RandomBytesDiffer) {
  SecretKey a{};
  SecretKey b{};
  ASSERT_OK(FillRandom(a));
  ASSERT_OK(FillRandom(b));
  EXPECT_NE(a, b);
}

}  // namespace
}  // namespace tensormount
