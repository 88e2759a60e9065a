// SPDX-License-Identifier: Apache-2.0
// Keyed BLAKE2s as specified by RFC 7693; random bytes from the kernel.
#include "base/keyed_hash.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <sys/random.h>

#include "base/coding.h"

namespace tensormount {
namespace {

constexpr std::size_t kBlake2sBlock = 64;
constexpr std::array<std::uint32_t, 8> kBlake2sIv = {
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
constexpr std::uint8_t kBlake2sSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

using Blake2sState = std::array<std::uint32_t, 8>;

// Adds one block to the state `h`. `total`: number of bytes so far, including this block.
void Blake2sCompress(Blake2sState& h, const std::uint8_t* block, std::uint64_t total, bool last) {
  std::uint32_t m[16];
  for (std::size_t i = 0; i < 16; ++i) m[i] = LoadLittle<std::uint32_t>(block + 4 * i);
  std::uint32_t v[16];
  std::copy(h.begin(), h.end(), v);
  std::copy(kBlake2sIv.begin(), kBlake2sIv.end(), v + 8);
  v[12] ^= static_cast<std::uint32_t>(total);
  v[13] ^= static_cast<std::uint32_t>(total >> 32);
  if (last) v[14] = ~v[14];
  const auto mix = [&v](int a, int b, int c, int d, std::uint32_t x, std::uint32_t y) {
    v[a] += v[b] + x;
    v[d] = std::rotr(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = std::rotr(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 7);
  };
  for (const auto& s : kBlake2sSigma) {
    mix(0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  for (std::size_t i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

KeyedDigest KeyedHash(const SecretKey& key, std::string_view message) {
  Blake2sState h = kBlake2sIv;
  // The parameter block of RFC 7693: sizes of digest and key, fan-out 1, depth 1.
  h[0] ^= 0x01010000u ^ (static_cast<std::uint32_t>(kKeyBytes) << 8) ^
          static_cast<std::uint32_t>(sizeof(KeyedDigest));
  std::uint8_t block[kBlake2sBlock] = {};
  std::memcpy(block, key.data(), key.size());
  std::uint64_t total = kBlake2sBlock;
  Blake2sCompress(h, block, total, message.empty());
  while (!message.empty()) {
    const std::size_t n = std::min(kBlake2sBlock, message.size());
    std::memset(block, 0, sizeof(block));
    std::memcpy(block, message.data(), n);
    message.remove_prefix(n);
    total += n;
    Blake2sCompress(h, block, total, message.empty());
  }
  KeyedDigest out;
  for (std::size_t i = 0; i < 8; ++i) StoreLittle(out.data() + 4 * i, h[i]);
  return out;
}

bool EqualInConstantTime(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  // volatile, so that the compiler does not end the loop early.
  volatile unsigned char differs = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    differs = static_cast<unsigned char>(differs | (a[i] ^ b[i]));
  }
  return differs == 0;
}

Status FillRandom(std::span<std::uint8_t> out) {
  while (!out.empty()) {
    const ssize_t n = ::getrandom(out.data(), out.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Status::FromErrno(n < 0 ? errno : EIO, "get", "random bytes");
    out = out.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

}  // namespace tensormount
