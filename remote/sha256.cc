// SPDX-License-Identifier: Apache-2.0
// SHA-256: libcurl brings no hash, and which library of TLS it uses differs by system. With the
// instructions for it, where the CPU has them: uploads hash every byte.
#include "remote/sha256.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tensormount {
namespace {

constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using Sha256State = std::array<std::uint32_t, 8>;

void AddBlock(Sha256State& state, const unsigned char* block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i) {
    w[i] = static_cast<std::uint32_t>(block[4 * i]) << 24 |
           static_cast<std::uint32_t>(block[4 * i + 1]) << 16 |
           static_cast<std::uint32_t>(block[4 * i + 2]) << 8 | block[4 * i + 3];
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  std::array<std::uint32_t, 8> v = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t s1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
    const std::uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
    const std::uint32_t t1 = v[7] + s1 + choice + kRounds[i] + w[i];
    const std::uint32_t s0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
    const std::uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    std::copy_backward(v.begin(), v.end() - 1, v.end());
    v[4] += t1;
    v[0] = t1 + s0 + majority;
  }
  for (std::size_t i = 0; i < 8; ++i) state[i] += v[i];
}

#if defined(__x86_64__)
bool HasShaInstructions() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0 &&
         __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

// The instructions want the state as (A, B, E, F) and (C, D, G, H), the first in the highest lane.
__attribute__((target("sha,sse4.1,ssse3"))) void AddBlocksBySha(Sha256State& state,
                                                                const unsigned char* data,
                                                                std::size_t blocks) {
  const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i abcd =
      _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data())), 0xb1);
  const __m128i efgh =
      _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data() + 4)), 0x1b);
  __m128i abef = _mm_alignr_epi8(abcd, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, abcd, 0xf0);
  for (; blocks > 0; --blocks, data += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i words[4];
    for (int i = 0; i < 4; ++i) {
      words[i] =
          _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), order);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m128i& now = words[i % 4];
      const __m128i& last = words[(i + 3) % 4];
      const __m128i sums = _mm_add_epi32(
          now, _mm_loadu_si128(reinterpret_cast<const __m128i*>(kRounds.data() + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sums);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sums, 0x0e));
      if (i >= 12) continue;
      const __m128i first = _mm_sha256msg1_epu32(now, words[(i + 1) % 4]);
      const __m128i middle = _mm_alignr_epi8(last, words[(i + 2) % 4], 4);
      now = _mm_sha256msg2_epu32(_mm_add_epi32(first, middle), last);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data()), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data() + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#endif

void AddBlocksPortable(Sha256State& state, const unsigned char* data, std::size_t blocks) {
  for (; blocks > 0; --blocks, data += 64) AddBlock(state, data);
}

using BlockFunction = void (*)(Sha256State&, const unsigned char*, std::size_t);

BlockFunction BestBlocks() {
#if defined(__x86_64__)
  if (HasShaInstructions()) return AddBlocksBySha;
#endif
  return AddBlocksPortable;
}

Sha256Digest HashWith(BlockFunction add_blocks, std::string_view data) {
  Sha256State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const std::uint64_t bits = static_cast<std::uint64_t>(data.size()) * 8;
  const std::size_t whole = data.size() / 64;
  add_blocks(state, reinterpret_cast<const unsigned char*>(data.data()), whole);
  data.remove_prefix(whole * 64);
  std::array<unsigned char, 128> last{};
  std::memcpy(last.data(), data.data(), data.size());
  last[data.size()] = 0x80;
  const std::size_t end = data.size() < 56 ? 64 : 128;
  for (std::size_t i = 0; i < 8; ++i) {
    last[end - 1 - i] = static_cast<unsigned char>(bits >> (8 * i));
  }
  add_blocks(state, last.data(), end / 64);
  Sha256Digest digest{};
  for (std::size_t i = 0; i < 32; ++i) {
    digest[i] = static_cast<unsigned char>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

}  // namespace

Sha256Digest Sha256(std::string_view data) {
  static const BlockFunction best = BestBlocks();
  return HashWith(best, data);
}

Sha256Digest Sha256Portable(std::string_view data) { return HashWith(AddBlocksPortable, data); }

std::string Hexadecimal(const Sha256Digest& digest) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const unsigned char byte : digest) {
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  }
  return out;
}

std::string Base64(const Sha256Digest& digest) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t at = 0; at < digest.size(); at += 3) {
    const std::size_t n = std::min<std::size_t>(3, digest.size() - at);
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 3; ++i) bits = bits << 8 | (i < n ? digest[at + i] : 0U);
    for (std::size_t i = 0; i < 4; ++i) {
      out += i <= n ? kDigits[bits >> (18 - 6 * i) & 63] : '=';
    }
  }
  return out;
}

}  // namespace tensormount
