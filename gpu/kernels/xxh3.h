// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_KERNELS_XXH3_H_
#define TENSORMOUNT_GPU_KERNELS_XXH3_H_

#include <cstdint>

#include "gpu/kernels/lanes.h"

// XXH3-128 with seed 0 of one leaf, computed by one warp. The results are bit-identical to those of
// base/hash.h.
//
// For inputs over 240 bytes XXH3 has eight 64-bit accumulators. Stripes of 64 bytes are added to
// them in any order; after each block of sixteen stripes they are scrambled, which is sequential.
// So a warp processes eight stripes at a time, four lanes each, combines the lanes before a
// scramble, and prefetches the next blocks meanwhile. Source: the specification of XXH3
// (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).

namespace tensormount::kernels {

// Same layout as Hash128 of base/hash.h, which is not for device code.
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
  // `offset` must be at most kSecretBytes - 8: beyond it Secret64 would read past the secret.
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
// The final mixing of XXH64.
TENSORMOUNT_HOST_DEVICE inline std::uint64_t Avalanche64(std::uint64_t h) {
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

// The accumulation for long inputs. Lane q of four loads words 2q and 2q + 1 of a stripe, which
// belong to accumulators 2q and 2q + 1; each word is also added unmodified to the accumulator of
// the other one. So four lanes hold a stripe, and a step of the warp is eight stripes. After the
// lanes' results are combined, lanes 0 to 3 have accumulators 0, 2, 4, 6, lanes 4 to 7 have 1, 3,
// 5, 7, and the other lanes repeat these.
template <typename Warp>
class LongHash {
 public:
  // Number of blocks that are prefetched into registers: enough loads in flight to keep the memory
  // busy. It divides the 63 scrambled blocks of a leaf of 64 KiB, so that none of them is left for
  // AddRest.
  static constexpr unsigned kAhead = 3;

  TENSORMOUNT_HOST_DEVICE explicit LongHash(const Warp& warp)
      : warp_(warp), sums_(warp.Map([](int lane) { return FirstSum(SumOf(lane)); })) {
    scramble_key_ = KeyOf([](int lane) { return kSecretBytes - kStripeBytes + SumOf(lane) * 8; });
    TENSORMOUNT_UNROLL
    for (int step = 0; step < kBlockSteps; ++step) {
      keys_.of[step] = KeysOf((step * kStepStripes) * 8, 8);
    }
  }

  // Adds `times` groups of kAhead whole blocks from a 16-byte-aligned address.
  TENSORMOUNT_HOST_DEVICE void AddAligned(const std::uint8_t* data, unsigned times) {
    if (times == 0) return;
    Addresses at = warp_.Map([&](int lane) { return data + lane * 16; });
    Block ahead[kAhead];
    TENSORMOUNT_UNROLL
    for (unsigned k = 0; k < kAhead; ++k) LoadWhole(at, k, ahead[k]);
    TENSORMOUNT_ROLLED
    for (; times > 1; --times) {
      at = warp_.Map([&](int lane) { return Warp::Get(at, lane) + kAhead * kBlockBytes; });
      AddGroup<true>(ahead, at);
    }
    AddGroup<false>(ahead, at);
  }

  // Adds the rest of the input, at any alignment: `blocks` whole blocks, `stripes` stripes of one
  // more block, and the stripe at `last`, which ends with the input and may overlap the others.
  TENSORMOUNT_HOST_DEVICE void AddRest(const std::uint8_t* data, unsigned blocks, int stripes,
                                       const std::uint8_t* last) {
    Block block;
    TENSORMOUNT_ROLLED
    for (; blocks > 0; --blocks, data += kBlockBytes) {
      Load(data, kBlockStripes, block);
      TakeIn(Added(block, keys_));
      Scramble();
    }
    Load(data, stripes, block);
    Block keys;
    TENSORMOUNT_UNROLL
    for (int step = 0; step < kBlockSteps; ++step) {
      keys.of[step] = Begin(keys_.of[step], stripes - step * kStepStripes);
    }
    TakeIn(Added(block, keys));
    Load(last, 1, block);
    keys = Block{};
    keys.of[0] = Begin(KeysOf(kSecretBytes - kStripeBytes - 7, 0), 1);
    TakeIn(Added(block, keys));
  }

  TENSORMOUNT_HOST_DEVICE Hash Value(std::uint64_t size) const {
    return {Merged(warp_, sums_, 11, size * kPrime64_1),
            Merged(warp_, sums_, kSecretBytes - kStripeBytes - 11, ~(size * kPrime64_2))};
  }

 private:
  using Words = typename Warp::template Of<Word16>;
  using Addresses = typename Warp::template Of<const std::uint8_t*>;
  using Sum = typename Warp::template Of<std::uint64_t>;
  static constexpr int kStripeLanes = kStripeBytes / 16;
  static constexpr int kStepStripes = kLanes / kStripeLanes;
  static constexpr int kBlockSteps = kBlockStripes / kStepStripes;
  struct Block {
    Words of[kBlockSteps] = {};
  };
  struct Sums {
    Sum even;
    Sum odd;
  };

  // The accumulator that a lane has after combining.
  TENSORMOUNT_HOST_DEVICE static int SumOf(int lane) {
    return lane % kStripeLanes * 2 + lane / kStripeLanes % 2;
  }
  template <typename Fn>
  TENSORMOUNT_HOST_DEVICE Sum KeyOf(Fn offset) const {
    return warp_.Map([&](int lane) { return Secret64(offset(lane)); });
  }
  // The words of the secret for one step: the first stripe uses the secret from `offset` on, each
  // further stripe from `next` bytes later.
  TENSORMOUNT_HOST_DEVICE Words KeysOf(int offset, int next) const {
    return warp_.Map([&](int lane) {
      const int at = offset + lane / kStripeLanes * next + lane % kStripeLanes * 16;
      return Word16{Secret64(at), Secret64(at + 8)};
    });
  }
  // Keeps the words of the first `stripes` stripes and zeros the other words; zero keys and words
  // add nothing.
  TENSORMOUNT_HOST_DEVICE Words Begin(const Words& words, int stripes) const {
    return warp_.Map([&](int lane) {
      return lane / kStripeLanes < stripes ? Warp::Get(words, lane) : Word16{0, 0};
    });
  }

  // Loads the block that is `behind` blocks after `at`.
  TENSORMOUNT_HOST_DEVICE void LoadWhole(const Addresses& at, unsigned behind, Block& block) const {
    TENSORMOUNT_UNROLL
    for (unsigned step = 0; step < kBlockSteps; ++step) {
      block.of[step] = warp_.Map([&](int lane) {
        return LoadOnce(Warp::Get(at, lane) + (behind * kBlockSteps + step) * kLanes * 16);
      });
    }
  }
  // Loads the first `stripes` stripes of a block, and zeros for the others.
  TENSORMOUNT_HOST_DEVICE void Load(const std::uint8_t* data, int stripes, Block& block) const {
    TENSORMOUNT_UNROLL
    for (int step = 0; step < kBlockSteps; ++step) {
      block.of[step] = warp_.Map([&](int lane) {
        return step * kStepStripes + lane / kStripeLanes < stripes
                   ? LoadAny(data + step * kStepStripes * kStripeBytes + lane * 16)
                   : Word16{0, 0};
      });
    }
  }

  // Adds the prefetched blocks and, if kMore, loads the blocks from `next` on into the same
  // registers. kMore is a template parameter: with a condition at run time the compiler would copy
  // loaded values between registers, and each copy would wait for its load.
  template <bool kMore>
  TENSORMOUNT_HOST_DEVICE void AddGroup(Block (&ahead)[kAhead], const Addresses& next) {
    TENSORMOUNT_UNROLL
    for (unsigned k = 0; k < kAhead; ++k) {
      const Sums sums = Added(ahead[k], keys_);
      if constexpr (kMore) LoadWhole(next, k, ahead[k]);
      TakeIn(sums);
      Scramble();
    }
  }

  TENSORMOUNT_HOST_DEVICE static std::uint64_t HalvesProduct(std::uint64_t keyed) {
    return (keyed & 0xFFFFFFFF) * (keyed >> 32);
  }
  TENSORMOUNT_HOST_DEVICE Sums Added(const Block& words, const Block& keys) const {
    Sums sums{warp_.Map([](int) { return std::uint64_t{0}; }),
              warp_.Map([](int) { return std::uint64_t{0}; })};
    TENSORMOUNT_UNROLL
    for (int step = 0; step < kBlockSteps; ++step) {
      const auto word = [&](int lane) { return Warp::Get(words.of[step], lane); };
      const auto key = [&](int lane) { return Warp::Get(keys.of[step], lane); };
      sums.even = warp_.Map([&](int lane) {
        return Warp::Get(sums.even, lane) + word(lane).high +
               HalvesProduct(word(lane).low ^ key(lane).low);
      });
      sums.odd = warp_.Map([&](int lane) {
        return Warp::Get(sums.odd, lane) + word(lane).low +
               HalvesProduct(word(lane).high ^ key(lane).high);
      });
    }
    return sums;
  }

  // Adds the results of all lanes to sums_. Each lane has an even and an odd accumulator. In the
  // first exchange lane n and lane n ^ kStripeLanes add theirs: one gets the sum of the even
  // accumulators, the other the sum of the odd ones.
  TENSORMOUNT_HOST_DEVICE void TakeIn(const Sums& sums) {
    const auto is_odd = [](int lane) { return SumOf(lane) % 2 != 0; };
    const Sum given =
        warp_.Map([&](int lane) { return Warp::Get(is_odd(lane) ? sums.even : sums.odd, lane); });
    const Sum got = Warp::Exchange(given, kStripeLanes);
    Sum added = warp_.Map([&](int lane) {
      return Warp::Get(is_odd(lane) ? sums.odd : sums.even, lane) + Warp::Get(got, lane);
    });
    TENSORMOUNT_UNROLL
    for (int bits = 2 * kStripeLanes; bits < kLanes; bits *= 2) {
      const Sum other = Warp::Exchange(added, bits);
      added = warp_.Map([&](int lane) { return Warp::Get(added, lane) + Warp::Get(other, lane); });
    }
    sums_ = warp_.Map([&](int lane) { return Warp::Get(sums_, lane) + Warp::Get(added, lane); });
  }

  TENSORMOUNT_HOST_DEVICE void Scramble() {
    sums_ = warp_.Map([&](int lane) {
      std::uint64_t sum = Warp::Get(sums_, lane);
      sum ^= sum >> 47;
      sum ^= Warp::Get(scramble_key_, lane);
      return sum * kPrime32_1;
    });
  }

  TENSORMOUNT_HOST_DEVICE TENSORMOUNT_OUT_OF_LINE static std::uint64_t Merged(const Warp& warp,
                                                                              const Sum& sums,
                                                                              int secret,
                                                                              std::uint64_t start) {
    const Sum keyed = warp.Map(
        [&](int lane) { return Warp::Get(sums, lane) ^ Secret64(secret + SumOf(lane) * 8); });
    // XXH3 multiplies accumulators 2q and 2q + 1, which are in two lanes; both compute the product.
    const Sum other = Warp::Exchange(keyed, kStripeLanes);
    Sum folded = warp.Map(
        [&](int lane) { return FoldedProduct(Warp::Get(keyed, lane), Warp::Get(other, lane)); });
    for (int bits = 1; bits < kStripeLanes; bits *= 2) {
      const Sum next = Warp::Exchange(folded, bits);
      folded = warp.Map([&](int lane) { return Warp::Get(folded, lane) + Warp::Get(next, lane); });
    }
    return Avalanche(start + Warp::Get(folded, 0));
  }

  const Warp& warp_;
  Sum sums_;
  // The parts of the secret that a lane needs, kept in registers.
  Sum scramble_key_;
  Block keys_;
};

}  // namespace xxh3

// Returns the same hash in all lanes.
template <typename Warp>
TENSORMOUNT_HOST_DEVICE Hash HashOfLeaf(const Warp& warp, const std::uint8_t* data,
                                        std::uint64_t size) {
  if (size <= 16) return xxh3::UpTo16(data, size);
  if (size <= 240) return xxh3::UpTo240(data, size);
  xxh3::LongHash<Warp> hash(warp);
  // All blocks are scrambled, except the last one, which may be whole or shorter.
  auto blocks = static_cast<unsigned>((size - 1) / xxh3::kBlockBytes);
  const auto rest = static_cast<int>((size - 1 - blocks * xxh3::kBlockBytes) / xxh3::kStripeBytes);
  const std::uint8_t* at = data;
  if (reinterpret_cast<std::uintptr_t>(data) % sizeof(Word16) == 0) {
    const unsigned times = blocks / hash.kAhead;
    hash.AddAligned(at, times);
    at += times * hash.kAhead * xxh3::kBlockBytes;
    blocks -= times * hash.kAhead;
  }
  hash.AddRest(at, blocks, rest, data + size - xxh3::kStripeBytes);
  return hash.Value(size);
}

}  // namespace tensormount::kernels

#endif  // TENSORMOUNT_GPU_KERNELS_XXH3_H_
