// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_KERNELS_XXH3_H_
#define TENSORMOUNT_GPU_KERNELS_XXH3_H_

#include <cstdint>

#include "gpu/kernels/lanes.h"

// XXH3-128 with seed 0 (base/hash.h) of one leaf by one warp, bit for bit.
//
// Of an input over 240 bytes, XXH3 has eight sums of 64 bits. A stripe of 64 bytes adds to each of
// them, in no particular order, and after sixteen stripes all are scrambled, which is in order. So
// a warp takes four stripes at a time, eight lanes each, and adds up between scrambles: a leaf of
// 64 KiB is 64 such steps, of 1 KiB that is read side by side.
// Source: the specification of XXH3 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).

namespace tensormount::kernels {

// As base/hash.h has it; that header is not for device code.
struct Hash {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

namespace xxh3 {

inline constexpr std::uint32_t kPrime32_1 = 0x9E3779B1;
inline constexpr std::uint32_t kPrime32_2 = 0x85EBCA77;
inline constexpr std::uint32_t kPrime32_3 = 0xC2B2AE3D;
inline constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87;
inline constexpr std::uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4F;
inline constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9;
inline constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63;
inline constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5;
inline constexpr int kSecretBytes = 192;
inline constexpr int kStripeBytes = 64;
inline constexpr int kBlockStripes = (kSecretBytes - kStripeBytes) / 8;
inline constexpr std::uint64_t kBlockBytes = std::uint64_t{kStripeBytes} * kBlockStripes;

// The default secret, as little-endian words.
TENSORMOUNT_HOST_DEVICE inline std::uint64_t SecretWord(int i) {
  static constexpr std::uint64_t kWords[kSecretBytes / 8] = {
      0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
      0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
      0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
      0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
      0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
      0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
  };
  return kWords[i];
}
TENSORMOUNT_HOST_DEVICE inline std::uint64_t Secret64(int offset) {
  const int shift = offset % 8 * 8;
  const std::uint64_t low = SecretWord(offset / 8);
  return shift == 0 ? low : (low >> shift) | (SecretWord(offset / 8 + 1) << (64 - shift));
}
TENSORMOUNT_HOST_DEVICE inline std::uint32_t Secret32(int offset) {
  // The last four bytes are no one's first.
  return static_cast<std::uint32_t>(Secret64(offset));
}

struct Wide {
  std::uint64_t low;
  std::uint64_t high;
};
TENSORMOUNT_HOST_DEVICE inline Wide Multiply(std::uint64_t a, std::uint64_t b) {
#if defined(__CUDA_ARCH__)
  return {a * b, __umul64hi(a, b)};
#else
  __extension__ using U128 = unsigned __int128;
  const U128 product = static_cast<U128>(a) * b;
  return {static_cast<std::uint64_t>(product), static_cast<std::uint64_t>(product >> 64)};
#endif
}
TENSORMOUNT_HOST_DEVICE inline std::uint64_t FoldedProduct(std::uint64_t a, std::uint64_t b) {
  const Wide product = Multiply(a, b);
  return product.low ^ product.high;
}
TENSORMOUNT_HOST_DEVICE inline std::uint64_t Avalanche(std::uint64_t h) {
  h ^= h >> 37;
  h *= 0x165667919E3779F9;
  return h ^ (h >> 32);
}
TENSORMOUNT_HOST_DEVICE inline std::uint64_t Avalanche64(std::uint64_t h) {  // That of XXH64.
  h ^= h >> 33;
  h *= kPrime64_2;
  h ^= h >> 29;
  h *= kPrime64_3;
  return h ^ (h >> 32);
}
TENSORMOUNT_HOST_DEVICE inline std::uint32_t Swapped(std::uint32_t v) {
  return (v >> 24) | ((v >> 8) & 0xFF00) | ((v << 8) & 0xFF0000) | (v << 24);
}
TENSORMOUNT_HOST_DEVICE inline std::uint64_t Swapped(std::uint64_t v) {
  return (std::uint64_t{Swapped(static_cast<std::uint32_t>(v))} << 32) |
         Swapped(static_cast<std::uint32_t>(v >> 32));
}

TENSORMOUNT_HOST_DEVICE TENSORMOUNT_OUT_OF_LINE inline Hash UpTo16(const std::uint8_t* data,
                                                                   std::uint64_t size) {
  if (size > 8) {
    const std::uint64_t flip_low = Secret64(32) ^ Secret64(40);
    const std::uint64_t flip_high = Secret64(48) ^ Secret64(56);
    const std::uint64_t low = Load64(data);
    const std::uint64_t high = Load64(data + size - 8);
    Wide m = Multiply(low ^ high ^ flip_low, kPrime64_1);
    m.low += (size - 1) << 54;
    const std::uint64_t keyed = high ^ flip_high;
    m.high += keyed + std::uint64_t{static_cast<std::uint32_t>(keyed)} * (kPrime32_2 - 1);
    m.low ^= Swapped(m.high);
    Wide h = Multiply(m.low, kPrime64_2);
    h.high += m.high * kPrime64_2;
    return {Avalanche(h.low), Avalanche(h.high)};
  }
  if (size >= 4) {
    const std::uint64_t both = Load32(data) + (std::uint64_t{Load32(data + size - 4)} << 32);
    Wide m = Multiply(both ^ Secret64(16) ^ Secret64(24), kPrime64_1 + (size << 2));
    m.high += m.low << 1;
    m.low ^= m.high >> 3;
    m.low ^= m.low >> 35;
    m.low *= 0x9FB21C651E98DF25;
    m.low ^= m.low >> 28;
    return {m.low, Avalanche(m.high)};
  }
  if (size > 0) {
    const std::uint32_t first = data[0];
    const std::uint32_t middle = data[size / 2];
    const std::uint32_t last = data[size - 1];
    const std::uint32_t low =
        (first << 16) | (middle << 24) | last | (static_cast<std::uint32_t>(size) << 8);
    const std::uint32_t swapped = Swapped(low);
    const std::uint32_t high = (swapped << 13) | (swapped >> 19);
    return {Avalanche64(low ^ std::uint64_t{Secret32(0) ^ Secret32(4)}),
            Avalanche64(high ^ std::uint64_t{Secret32(8) ^ Secret32(12)})};
  }
  return {Avalanche64(Secret64(64) ^ Secret64(72)), Avalanche64(Secret64(80) ^ Secret64(88))};
}

TENSORMOUNT_HOST_DEVICE TENSORMOUNT_OUT_OF_LINE inline std::uint64_t Mixed16(
    const std::uint8_t* data, int secret) {
  return FoldedProduct(Load64(data) ^ Secret64(secret), Load64(data + 8) ^ Secret64(secret + 8));
}
TENSORMOUNT_HOST_DEVICE inline void Mix32(Hash& sum, const std::uint8_t* a, const std::uint8_t* b,
                                          int secret) {
  sum.low += Mixed16(a, secret);
  sum.low ^= Load64(b) + Load64(b + 8);
  sum.high += Mixed16(b, secret + 16);
  sum.high ^= Load64(a) + Load64(a + 8);
}

TENSORMOUNT_HOST_DEVICE TENSORMOUNT_OUT_OF_LINE inline Hash UpTo240(const std::uint8_t* data,
                                                                    std::uint64_t size) {
  Hash sum{size * kPrime64_1, 0};
  if (size <= 128) {
    if (size > 96) Mix32(sum, data + 48, data + size - 64, 96);
    if (size > 64) Mix32(sum, data + 32, data + size - 48, 64);
    if (size > 32) Mix32(sum, data + 16, data + size - 32, 32);
    Mix32(sum, data, data + size - 16, 0);
  } else {
    std::uint64_t at = 0;
    TENSORMOUNT_ROLLED
    for (; at < 128; at += 32) Mix32(sum, data + at, data + at + 16, static_cast<int>(at));
    sum = {Avalanche(sum.low), Avalanche(sum.high)};
    for (; at + 32 <= size; at += 32) {
      Mix32(sum, data + at, data + at + 16, static_cast<int>(at) - 128 + 3);
    }
    Mix32(sum, data + size - 16, data + size - 32, 136 - 17 - 16);
  }
  return {Avalanche(sum.low + sum.high),
          0 - Avalanche(sum.low * kPrime64_1 + sum.high * kPrime64_4 + size * kPrime64_2)};
}

TENSORMOUNT_HOST_DEVICE inline std::uint64_t FirstSum(int i) {
  static constexpr std::uint64_t kFirst[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                              kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  return kFirst[i];
}

// Lane i has sum i % 8.
template <typename Warp>
class LongHash {
 public:
  TENSORMOUNT_HOST_DEVICE explicit LongHash(const Warp& warp)
      : warp_(warp),
        sums_(warp.Map([](int lane) { return FirstSum(lane % 8); })),
        scramble_key_(warp.Map(
            [](int lane) { return Secret64(kSecretBytes - kStripeBytes + lane % 8 * 8); })) {
    for (int step = 0; step < kBlockSteps; ++step) {
      keys_[step] = warp.Map(
          [&](int lane) { return Secret64((step * kStepStripes + lane / 8) * 8 + lane % 8 * 8); });
    }
  }

  // A block, or the `stripes` at its begin that there are.
  TENSORMOUNT_HOST_DEVICE void AddBlock(const std::uint8_t* data, int stripes) {
    Sums products = Zeros();
    Sums plain = Zeros();
    TENSORMOUNT_UNROLL
    for (int step = 0; step < kBlockSteps; ++step) {
      AddStep(data + step * kStepStripes * kStripeBytes, stripes - step * kStepStripes, keys_[step],
              products, plain);
    }
    TakeIn(products, plain);
  }

  // The last stripe of all.
  TENSORMOUNT_HOST_DEVICE void AddLast(const std::uint8_t* data) {
    Sums products = Zeros();
    Sums plain = Zeros();
    const Sums key = warp_.Map(
        [](int lane) { return Secret64(kSecretBytes - kStripeBytes - 7 + lane % 8 * 8); });
    AddStep(data, 1, key, products, plain);
    TakeIn(products, plain);
  }

  TENSORMOUNT_HOST_DEVICE void Scramble() {
    sums_ = warp_.Map([&](int lane) {
      std::uint64_t sum = Warp::Get(sums_, lane);
      sum ^= sum >> 47;
      sum ^= Warp::Get(scramble_key_, lane);
      return sum * kPrime32_1;
    });
  }

  TENSORMOUNT_HOST_DEVICE Hash Value(std::uint64_t size) const {
    return {Merged(11, size * kPrime64_1),
            Merged(kSecretBytes - kStripeBytes - 11, ~(size * kPrime64_2))};
  }

 private:
  using Sums = typename Warp::template Of<std::uint64_t>;
  static constexpr int kStepStripes = kLanes / 8;
  static constexpr int kBlockSteps = kBlockStripes / kStepStripes;

  TENSORMOUNT_HOST_DEVICE Sums Zeros() const {
    return warp_.Map([](int) { return std::uint64_t{0}; });
  }

  // Four stripes side by side, eight lanes each. Lanes whose stripe is not among the first
  // `stripes` add nothing.
  TENSORMOUNT_HOST_DEVICE void AddStep(const std::uint8_t* data, int stripes, const Sums& key,
                                       Sums& products, Sums& plain) const {
    const Sums word = warp_.Map(
        [&](int lane) { return lane / 8 < stripes ? Load64(data + lane * 8) : std::uint64_t{0}; });
    plain = warp_.Map([&](int lane) { return Warp::Get(plain, lane) + Warp::Get(word, lane); });
    products = warp_.Map([&](int lane) {
      if (lane / 8 >= stripes) return Warp::Get(products, lane);
      const std::uint64_t keyed = Warp::Get(word, lane) ^ Warp::Get(key, lane);
      return Warp::Get(products, lane) + (keyed & 0xFFFFFFFF) * (keyed >> 32);
    });
  }

  // What all lanes of a sum have found, into the sum.
  TENSORMOUNT_HOST_DEVICE void TakeIn(const Sums& products, const Sums& plain) {
    const Sums neighbours = Warp::Exchange(plain, 1);
    Sums added = warp_.Map(
        [&](int lane) { return Warp::Get(products, lane) + Warp::Get(neighbours, lane); });
    for (int bits = 8; bits < kLanes; bits *= 2) {
      const Sums other = Warp::Exchange(added, bits);
      added = warp_.Map([&](int lane) { return Warp::Get(added, lane) + Warp::Get(other, lane); });
    }
    sums_ = warp_.Map([&](int lane) { return Warp::Get(sums_, lane) + Warp::Get(added, lane); });
  }

  TENSORMOUNT_HOST_DEVICE TENSORMOUNT_OUT_OF_LINE std::uint64_t Merged(int secret,
                                                                       std::uint64_t start) const {
    const Sums keyed = warp_.Map(
        [&](int lane) { return Warp::Get(sums_, lane) ^ Secret64(secret + lane % 8 * 8); });
    const Sums next = Warp::Exchange(keyed, 1);
    Sums folded = warp_.Map([&](int lane) {
      return lane % 2 == 0 ? FoldedProduct(Warp::Get(keyed, lane), Warp::Get(next, lane))
                           : std::uint64_t{0};
    });
    for (int bits = 1; bits < 8; bits *= 2) {
      const Sums other = Warp::Exchange(folded, bits);
      folded =
          warp_.Map([&](int lane) { return Warp::Get(folded, lane) + Warp::Get(other, lane); });
    }
    return Avalanche(start + Warp::Get(folded, 0));
  }

  const Warp& warp_;
  Sums sums_;
  // What of the secret a lane needs, looked up once: in registers of a device.
  Sums scramble_key_;
  Sums keys_[kBlockSteps];
};

}  // namespace xxh3

// The same in all lanes.
template <typename Warp>
TENSORMOUNT_HOST_DEVICE Hash HashOfLeaf(const Warp& warp, const std::uint8_t* data,
                                        std::uint64_t size) {
  if (size <= 16) return xxh3::UpTo16(data, size);
  if (size <= 240) return xxh3::UpTo240(data, size);
  xxh3::LongHash<Warp> hash(warp);
  // All blocks but the last one, which has fewer stripes or as many, are scrambled.
  const std::uint64_t blocks = (size - 1) / xxh3::kBlockBytes;
  const auto rest = static_cast<int>((size - 1 - blocks * xxh3::kBlockBytes) / xxh3::kStripeBytes);
  TENSORMOUNT_ROLLED
  for (std::uint64_t b = 0; b <= blocks; ++b) {
    hash.AddBlock(data + b * xxh3::kBlockBytes, b < blocks ? xxh3::kBlockStripes : rest);
    if (b < blocks) hash.Scramble();
  }
  hash.AddLast(data + size - xxh3::kStripeBytes);
  return hash.Value(size);
}

}  // namespace tensormount::kernels

#endif  // TENSORMOUNT_GPU_KERNELS_XXH3_H_
