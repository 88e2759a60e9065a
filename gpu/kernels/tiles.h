// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_KERNELS_TILES_H_
#define TENSORMOUNT_GPU_KERNELS_TILES_H_

#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "gpu/kernels/lanes.h"
#include "gpu/kernels/strided.h"
#include "shard/copy_plan.h"

// A transpose of any number of axes: words that are adjacent in the source are not adjacent in the
// destination. A word-by-word copy would use a fraction of the memory bandwidth on one side. So a
// block of threads reads a tile into shared memory along the source's fastest axis, and writes it
// along the destination's fastest axis.

namespace tensormount::kernels {

struct Tiled {
  struct Axis {
    std::uint32_t count = 1;
    std::uint32_t tiles = 1;
    // Steps in the source and in the destination, in bytes.
    std::int64_t from = 0;
    std::int64_t to = 0;
  };
  std::int64_t from = 0;  // Offsets of the first word in the source and in the destination.
  std::int64_t to = 0;
  int word = 0;  // Size of a word in bytes.
  // Whether a thread can read a unit of adjacent words (BytesOfUnit) with one load, and write one
  // with one store.
  bool wide_from = false;
  bool wide_to = false;
  Axis read;                // The fastest axis of the source.
  Axis written;             // The fastest axis of the destination.
  std::uint32_t tiles = 0;  // Number of tiles; 0: not suitable for tiles.
  int axes = 0;             // Number of all other axes, the outermost first.
  std::uint32_t count[kMaxAxes - 2] = {};
  std::int64_t from_step[kMaxAxes - 2] = {};
  std::int64_t to_step[kMaxAxes - 2] = {};
};

// A unit is 4 or 8 bytes of adjacent words. Both sides of a tile are as many words as 32 units
// hold: then a warp, one unit per lane, reads or writes whole cache lines, and each thread has
// enough work. Rows in shared memory are one unit longer (kPitch), so that the units of a column
// lie in different banks.
inline constexpr unsigned kUnits = 32;
inline constexpr unsigned kPitch = kUnits + 1;
TENSORMOUNT_HOST_DEVICE constexpr unsigned BytesOfUnit(unsigned word) { return word < 4 ? 4 : 8; }
TENSORMOUNT_HOST_DEVICE constexpr unsigned WordsOfUnit(unsigned word) {
  return BytesOfUnit(word) / word;
}
struct alignas(16) TileMemory {
  // Up to four groups of 32 rows of kPitch units: words of one byte need four groups of 4-byte
  // units, words of four bytes two groups of 8-byte units; other words need less.
  std::uint8_t bytes[4 * kUnits * kPitch * 4];
};
// Tiles are numbered in strips: kStrip tiles along the source's fastest axis, then the next kStrip
// one step further along the destination's fastest axis. So concurrent blocks access nearby memory
// on both sides.
inline constexpr std::uint32_t kStrip = 32;

// Shortest extent of both axes for which tiles are used: with less, most of a tile would be empty.
inline constexpr std::int64_t kLeastSide = 8;
// Words at least this many bytes apart never share a sector of a cache line (32 bytes), so tiles
// would not save memory traffic.
inline constexpr std::int64_t kNear = 32;

// Cuts a copy into tiles. Returns `tiles` = 0 if tiles are not worthwhile.
inline Tiled CutIntoTiles(const StridedCopy& plan, const void* from, const void* to) {
  Tiled t;
  if (plan.axes < 2 || plan.run > 8 || WordOf(plan, from, to) != plan.run) return t;
  const auto word = static_cast<std::int64_t>(plan.run);
  int read = -1;
  int written = -1;
  for (int a = 0; a < plan.axes; ++a) {
    const StridedCopy::Axis& axis = plan.axis[static_cast<std::size_t>(a)];
    const auto nearer = [&](std::int64_t step, int other, bool source) {
      if (other < 0) return true;
      const StridedCopy::Axis& best = plan.axis[static_cast<std::size_t>(other)];
      return std::abs(step) < std::abs(source ? best.src : best.dst);
    };
    if (axis.count == 1) continue;
    if (axis.src != 0 && nearer(axis.src, read, true)) read = a;
    if (axis.dst != 0 && nearer(axis.dst, written, false)) written = a;
  }
  if (read < 0 || written < 0 || read == written) return t;
  const auto side = static_cast<std::int64_t>(kUnits * WordsOfUnit(static_cast<unsigned>(word)));
  const auto taken = [&](int a) {
    const StridedCopy::Axis& axis = plan.axis[static_cast<std::size_t>(a)];
    return Tiled::Axis{static_cast<std::uint32_t>(axis.count),
                       static_cast<std::uint32_t>((axis.count + side - 1) / side), axis.src,
                       axis.dst};
  };
  std::uint64_t tiles = 1;
  std::int64_t others_from = plan.src_offset | reinterpret_cast<std::intptr_t>(from);
  std::int64_t others_to = plan.dst_offset | reinterpret_cast<std::intptr_t>(to);
  for (int a = 0; a < plan.axes; ++a) {
    const StridedCopy::Axis& axis = plan.axis[static_cast<std::size_t>(a)];
    const bool inner = a == read || a == written;
    const std::int64_t times = inner ? (axis.count + side - 1) / side : axis.count;
    // Kernels compute with extents and tile numbers of 32 bits.
    if (axis.count >> 32 != 0 || (tiles *= static_cast<std::uint64_t>(times)) >> 32 != 0) return t;
    if (a != read) others_from |= axis.src;
    if (a != written) others_to |= axis.dst;
    if (inner) continue;
    t.count[t.axes] = static_cast<std::uint32_t>(axis.count);
    t.from_step[t.axes] = axis.src;
    t.to_step[t.axes] = axis.dst;
    ++t.axes;
  }
  t.read = taken(read);
  t.written = taken(written);
  // If steps along the destination's fastest axis do not move in the source (a broadcast), all
  // reads are nearby without tiles.
  if (t.read.count < kLeastSide || t.written.count < kLeastSide || t.written.from == 0 ||
      std::abs(t.read.from) >= kNear || std::abs(t.written.to) >= kNear) {
    return t;
  }
  t.from = plan.src_offset;
  t.to = plan.dst_offset;
  t.word = static_cast<int>(word);
  const std::int64_t unit = BytesOfUnit(static_cast<unsigned>(word));
  t.wide_from = word == unit || (t.read.from == word && others_from % unit == 0);
  t.wide_to = word == unit || (t.written.to == word && others_to % unit == 0);
  t.tiles = static_cast<std::uint32_t>(tiles);
  return t;
}

// Transposes a square of words in registers: kWords units of kWords words each.
template <typename Word, typename Unit>
TENSORMOUNT_HOST_DEVICE inline void TransposeUnits(Unit (&unit)[sizeof(Unit) / sizeof(Word)]) {
  constexpr unsigned kBits = 8 * sizeof(Word);
  constexpr unsigned kWords = sizeof(Unit) / sizeof(Word);
  constexpr Unit kMask = (Unit{1} << kBits) - 1;
  Unit turned[kWords] = {};
  TENSORMOUNT_UNROLL
  for (unsigned row = 0; row < kWords; ++row) {
    TENSORMOUNT_UNROLL
    for (unsigned column = 0; column < kWords; ++column) {
      turned[column] |= (unit[row] >> (kBits * column) & kMask) << (kBits * row);
    }
  }
  TENSORMOUNT_UNROLL
  for (unsigned k = 0; k < kWords; ++k) unit[k] = turned[k];
}

// Moves one tile with the threads of a block.
template <typename Word, typename Block>
class TileMove {
 public:
  TENSORMOUNT_HOST_DEVICE TileMove(const Tiled& t, std::uint32_t number, const std::uint8_t* from,
                                   std::uint8_t* to, const Block& block, TileMemory& memory)
      : t_(t), block_(block), memory_(reinterpret_cast<Unit*>(memory.bytes)) {
    const std::uint32_t each = t.read.tiles * t.written.tiles;
    std::uint32_t rest = number / each;
    const std::uint32_t in_plane = number - rest * each;
    const std::uint32_t strip = in_plane / (kStrip * t.written.tiles);
    const std::uint32_t in_strip = in_plane - strip * kStrip * t.written.tiles;
    const std::uint32_t after = t.read.tiles - strip * kStrip;
    const std::uint32_t width = after < kStrip ? after : kStrip;
    const std::uint32_t w = in_strip / width * kSide;
    const std::uint32_t r = (strip * kStrip + in_strip % width) * kSide;
    read_ = t.read.count - r < kSide ? t.read.count - r : kSide;
    written_ = t.written.count - w < kSide ? t.written.count - w : kSide;
    from_ = from + t.from + r * t.read.from + w * t.written.from;
    to_ = to + t.to + r * t.read.to + w * t.written.to;
    TENSORMOUNT_ROLLED
    for (int a = t.axes - 1; a >= 0; --a) {
      const std::uint32_t at = rest % t.count[a];
      rest /= t.count[a];
      from_ += at * t.from_step[a];
      to_ += at * t.to_step[a];
    }
  }

  TENSORMOUNT_HOST_DEVICE void Run() const {
    const bool whole = read_ == kSide && written_ == kSide;
    if (whole && t_.wide_from) {
      block_.Each([&](unsigned thread) { Read<true, true>(thread); });
    } else if (whole) {
      block_.Each([&](unsigned thread) { Read<true, false>(thread); });
    } else {
      block_.Each([&](unsigned thread) { Read<false, false>(thread); });
    }
    if (whole && t_.wide_to) {
      block_.Each([&](unsigned thread) { Write<true, true>(thread); });
    } else if (whole) {
      block_.Each([&](unsigned thread) { Write<true, false>(thread); });
    } else {
      block_.Each([&](unsigned thread) { Write<false, false>(thread); });
    }
  }

 private:
  using Unit = std::conditional_t<BytesOfUnit(sizeof(Word)) == 8, std::uint64_t, std::uint32_t>;
  static constexpr unsigned kWords = WordsOfUnit(sizeof(Word));  // Words of a unit.
  static constexpr std::uint32_t kSide = kUnits * kWords;        // Side of a tile in words.
  static constexpr unsigned kRows = Block::kThreads / kUnits;    // Rows of units per pass.
  static constexpr unsigned kTimes = kUnits / kRows;

  // Loads `words` words of a unit; none if negative.
  TENSORMOUNT_HOST_DEVICE static Unit LoadPartial(const std::uint8_t* at, std::int64_t step,
                                                  std::int64_t words) {
    Unit unit = 0;
    TENSORMOUNT_UNROLL
    for (unsigned k = 0; k < kWords; ++k) {
      if (k < words) {
        unit |= Unit{*reinterpret_cast<const Word*>(at + k * step)} << (8 * sizeof(Word) * k);
      }
    }
    return unit;
  }

  TENSORMOUNT_HOST_DEVICE static void StorePartial(std::uint8_t* at, std::int64_t step,
                                                   std::int64_t words, Unit unit) {
    TENSORMOUNT_UNROLL
    for (unsigned k = 0; k < kWords; ++k) {
      if (k < words) {
        *reinterpret_cast<Word*>(at + k * step) = static_cast<Word>(unit >> (8 * sizeof(Word) * k));
      }
    }
  }

  // Each thread reads a square of kWords by kWords words and transposes it in registers, so that a
  // unit holds words that are adjacent in the destination. Unit k goes to group k of shared memory,
  // which has kUnits rows of kPitch units. Addresses are advanced by additions, because 64-bit
  // multiplications would take longer than everything else here.
  template <bool kWhole, bool kWide>
  TENSORMOUNT_HOST_DEVICE void Read(unsigned thread) const {
    // For a whole tile, issues all loads before the first use of their results, so that they
    // overlap.
    constexpr unsigned kAtOnce = kWhole ? kTimes : kWords == 2 ? 2 : 1;
    const unsigned i = thread % kUnits;
    unsigned row = thread / kUnits;
    const std::int64_t step = t_.written.from;
    const std::int64_t further = step * (kRows * kWords);
    const std::uint8_t* from = from_ + i * kWords * t_.read.from + row * kWords * step;
    Unit* to = memory_ + i * kPitch + row;
    TENSORMOUNT_ROLLED
    for (unsigned done = 0; done < kTimes; done += kAtOnce) {
      Unit units[kAtOnce][kWords];
      TENSORMOUNT_UNROLL
      for (unsigned n = 0; n < kAtOnce; ++n, from += further) {
        const std::uint8_t* at = from;
        TENSORMOUNT_UNROLL
        for (unsigned k = 0; k < kWords; ++k, at += step) {
          if constexpr (kWide) {
            units[n][k] = *reinterpret_cast<const Unit*>(at);
          } else if constexpr (kWhole) {
            units[n][k] = LoadPartial(at, t_.read.from, kWords);
          } else {
            units[n][k] = (row + n * kRows) * kWords + k < written_
                              ? LoadPartial(at, t_.read.from, std::int64_t{read_} - i * kWords)
                              : 0;
          }
        }
      }
      TENSORMOUNT_UNROLL
      for (unsigned n = 0; n < kAtOnce; ++n) {
        if constexpr (kWords > 1) TransposeUnits<Word, Unit>(units[n]);
        TENSORMOUNT_UNROLL
        for (unsigned k = 0; k < kWords; ++k) to[k * kUnits * kPitch + n * kRows] = units[n][k];
      }
      row += kAtOnce * kRows;
      to += kAtOnce * kRows;
    }
  }

  template <bool kWhole, bool kWide>
  TENSORMOUNT_HOST_DEVICE void Write(unsigned thread) const {
    constexpr unsigned kAtOnce = kWhole ? kTimes : 1;
    const unsigned i = thread % kUnits;
    unsigned row = thread / kUnits;
    const std::int64_t step = t_.read.to;
    const std::int64_t further = step * (kRows * kWords);
    std::uint8_t* to = to_ + i * kWords * t_.written.to + row * kWords * step;
    const Unit* from = memory_ + row * kPitch + i;
    TENSORMOUNT_ROLLED
    for (unsigned done = 0; done < kTimes; done += kAtOnce) {
      TENSORMOUNT_UNROLL
      for (unsigned n = 0; n < kAtOnce; ++n, to += further) {
        std::uint8_t* at = to;
        TENSORMOUNT_UNROLL
        for (unsigned k = 0; k < kWords; ++k, at += step) {
          const Unit unit = from[(k * kUnits + n * kRows) * kPitch];
          if constexpr (kWide) {
            *reinterpret_cast<Unit*>(at) = unit;
          } else if constexpr (kWhole) {
            StorePartial(at, t_.written.to, kWords, unit);
          } else if ((row + n * kRows) * kWords + k < read_) {
            StorePartial(at, t_.written.to, std::int64_t{written_} - i * kWords, unit);
          }
        }
      }
      row += kAtOnce * kRows;
      from += kAtOnce * kRows * kPitch;
    }
  }

  const Tiled& t_;
  const Block& block_;
  Unit* const memory_;
  // Number of words of this tile along the read axis and along the written axis; fewer than kSide
  // at the end of an axis.
  std::uint32_t read_ = 0;
  std::uint32_t written_ = 0;
  const std::uint8_t* from_ = nullptr;
  std::uint8_t* to_ = nullptr;
};

// Moves tile `number` of a copy.
template <typename Block>
TENSORMOUNT_HOST_DEVICE void MoveTile(const Tiled& t, std::uint32_t number,
                                      const std::uint8_t* from, std::uint8_t* to,
                                      const Block& block, TileMemory& memory) {
  switch (t.word) {
    case 8:
      return TileMove<std::uint64_t, Block>(t, number, from, to, block, memory).Run();
    case 4:
      return TileMove<std::uint32_t, Block>(t, number, from, to, block, memory).Run();
    case 2:
      return TileMove<std::uint16_t, Block>(t, number, from, to, block, memory).Run();
    default:
      return TileMove<std::uint8_t, Block>(t, number, from, to, block, memory).Run();
  }
}

}  // namespace tensormount::kernels

#endif  // TENSORMOUNT_GPU_KERNELS_TILES_H_
