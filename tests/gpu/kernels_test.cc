// SPDX-License-Identifier: Apache-2.0
// The kernels' templates on the host, lane by lane and thread by thread, against the host's own
// hashes and copies; under the sanitizers, bounds and alignment of what they touch.
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/hash.h"
#include "gpu/kernels/crc64.h"
#include "gpu/kernels/jobs.h"
#include "gpu/kernels/strided.h"
#include "gpu/kernels/tiles.h"
#include "gpu/kernels/xxh3.h"
#include "shard/copy_plan.h"
#include "shard/strided_digest.h"
#include "tests/gpu/grid.h"
#include "tests/support/random.h"
#include "tests/support/random_strided.h"

namespace tensormount {
namespace {

const std::uint8_t* AsBytes(const void* data) { return static_cast<const std::uint8_t*>(data); }

// In memory that ends where the bytes do: a sanitizer sees one byte too many. They begin so many
// bytes behind where the widest words do.
template <typename Fn>
auto WithExactMemory(const std::string& bytes, std::size_t shift, Fn fn) {
  const auto memory = std::make_unique<std::uint8_t[]>(shift + bytes.size());
  std::memcpy(memory.get() + shift, bytes.data(), bytes.size());
  return fn(memory.get() + shift);
}

Hash128 ByKernel(const std::string& bytes, std::size_t shift) {
  return WithExactMemory(bytes, shift, [&](const std::uint8_t* data) {
    const kernels::Hash hash = kernels::HashOfLeaf(kernels::HostWarp(), data, bytes.size());
    return Hash128{hash.low, hash.high};
  });
}

TEST(KernelsTest, HashesOfEveryLengthMatchTheHost) {
  Random random(TestSeed());
  const std::string all = random.Bytes(3000);
  for (std::size_t size = 0; size <= all.size(); ++size) {
    const std::string bytes = all.substr(all.size() - size);
    const std::size_t shift = random.OneIn(2) ? 0 : size % 16;
    ASSERT_EQ(ByKernel(bytes, shift), Xxh3(bytes)) << size << " bytes from " << shift;
  }
}

TEST(KernelsTest, LeafHashesMatchTheHost) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(300); ++i) {
    // Ends of blocks and stripes, and what is around them.
    const std::int64_t near = random.Int(1, 64) * (random.OneIn(2) ? 1024 : 64);
    const auto size = static_cast<std::size_t>(random.OneIn(4) ? random.Int(0, 65'536)
                                                               : near + random.Int(-1, 1));
    const std::string bytes = random.OneIn(8)
                                  ? std::string(size, static_cast<char>(random.Int(0, 255)))
                                  : random.Bytes(size);
    const auto shift = static_cast<std::size_t>(random.OneIn(2) ? 0 : random.Int(1, 15));
    ASSERT_EQ(ByKernel(bytes, shift), Xxh3(bytes))
        << size << " bytes from " << shift << ", seed " << TestSeed();
  }
}

TEST(KernelsTest, CopiesOfEveryShapeAreExact) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(500); ++i) {
    const StridedBytes s = MakeStridedBytes(random);
    const auto volume = static_cast<std::size_t>(s.box.volume());
    const PlacedBox packed = PlacePacked(Region(s.box), 0).front();
    const std::string memory = random.Bytes(s.bytes);
    const std::string bytes = random.Bytes(volume);
    for (const bool pack : {true, false}) {
      const StridedCopy plan =
          pack ? PlanCopy(s.box, s.placed, packed) : PlanCopy(s.box, packed, s.placed);
      const std::string& from = pack ? memory : bytes;
      std::string expected = pack ? bytes : memory;
      // Words are aligned where memory is.
      std::vector<kernels::Word16> aligned_from(from.size() / 16 + 1);
      std::vector<kernels::Word16> aligned_to(expected.size() / 16 + 1);
      std::memcpy(aligned_from.data(), from.data(), from.size());
      std::memcpy(aligned_to.data(), expected.data(), expected.size());
      ExecuteCopy(plan, reinterpret_cast<const std::byte*>(from.data()),
                  reinterpret_cast<std::byte*>(expected.data()));
      const std::uint64_t word = kernels::WordOf(plan, aligned_from.data(), aligned_to.data());
      const kernels::Strided cut = kernels::CutIntoPieces(plan, word);
      ASSERT_EQ(cut.pieces * word, plan.bytes());
      RunGrid(random, cut.pieces, [&](std::uint64_t t) {
        auto* const to = reinterpret_cast<std::uint8_t*>(aligned_to.data());
        if (random.OneIn(2)) {
          kernels::CopyPiece<std::uint32_t>(cut, t, AsBytes(aligned_from.data()), to);
        } else {
          kernels::CopyPiece<std::uint64_t>(cut, t, AsBytes(aligned_from.data()), to);
        }
      });
      ASSERT_EQ(std::memcmp(aligned_to.data(), expected.data(), expected.size()), 0)
          << "case " << i << ", seed " << TestSeed() << ", pack " << pack;
    }
  }
}

// A copy by tiles, beside the host's.
void ExpectTiledCopy(Random& random, const StridedCopy& plan, std::size_t from_bytes,
                     std::size_t to_bytes, std::size_t from_shift, std::size_t to_shift,
                     bool wide_from, bool wide_to) {
  const std::string bytes = random.Bytes(from_bytes);
  std::string expected = random.Bytes(to_bytes);
  std::vector<kernels::Word16> from((from_shift + from_bytes) / 16 + 1);
  std::vector<kernels::Word16> to((to_shift + to_bytes) / 16 + 1);
  auto* const source = reinterpret_cast<std::uint8_t*>(from.data()) + from_shift;
  auto* const target = reinterpret_cast<std::uint8_t*>(to.data()) + to_shift;
  std::memcpy(source, bytes.data(), bytes.size());
  std::memcpy(target, expected.data(), expected.size());
  ExecuteCopy(plan, reinterpret_cast<const std::byte*>(bytes.data()),
              reinterpret_cast<std::byte*>(expected.data()));
  kernels::TileJob job;
  job.count = 1;
  job.tiled[0] = kernels::CutIntoTiles(plan, source, target);
  ASSERT_NE(job.tiled[0].tiles, 0u);
  EXPECT_EQ(job.tiled[0].wide_from, wide_from);
  EXPECT_EQ(job.tiled[0].wide_to, wide_to);
  job.begin[1] = job.tiled[0].tiles;
  job.from[0] = source;
  job.to[0] = target;
  // Fewer blocks than tiles now and then.
  const std::uint64_t blocks = random.OneIn(2) ? job.tiles() : (job.tiles() + 2) / 3;
  const auto memory = std::make_unique<kernels::TileMemory>();
  RunGrid(random, blocks, [&](std::uint64_t b) {
    kernels::TileBlock(job, kernels::HostBlock<kernels::kBlockThreads>(), *memory, b, blocks);
  });
  ASSERT_EQ(std::memcmp(target, expected.data(), expected.size()), 0) << "seed " << TestSeed();
}

StridedCopy Transpose(std::int64_t word, std::int64_t rows, std::int64_t columns) {
  StridedCopy plan;
  plan.run = static_cast<std::uint64_t>(word);
  plan.axes = 2;
  plan.axis[0] = {columns, word, rows * word};
  plan.axis[1] = {rows, columns * word, word};
  return plan;
}

// Words of every size; whole tiles, edges, and so many tiles that there are several strips.
TEST(KernelsTest, TransposesAreExact) {
  Random random(TestSeed());
  for (const std::int64_t word : {1, 2, 4, 8}) {
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{128, 256},
                                        {129, 260},
                                        {132, 255},
                                        {8, 9},
                                        {1001, 13},
                                        {40, 33 * 128}}) {
      const auto bytes = static_cast<std::size_t>(word * rows * columns);
      const std::int64_t unit = word < 4 ? 4 : 8;
      ExpectTiledCopy(random, Transpose(word, rows, columns), bytes, bytes, 0, 0,
                      columns * word % unit == 0, rows * word % unit == 0);
    }
  }
}

// What is not aligned for more than a word is read, or written, by single words.
TEST(KernelsTest, TransposesOfUnalignedWordsAreExact) {
  Random random(TestSeed());
  constexpr std::size_t kBytes = 2 * 128 * 192;
  for (const std::size_t from : {0u, 2u, 4u}) {
    for (const std::size_t to : {0u, 2u, 4u}) {
      ExpectTiledCopy(random, Transpose(2, 128, 192), kBytes, kBytes, from, to, from != 2, to != 2);
    }
  }
  for (const std::size_t from : {0u, 4u}) {
    for (const std::size_t to : {0u, 4u}) {
      ExpectTiledCopy(random, Transpose(4, 128, 192), 2 * kBytes, 2 * kBytes, from, to, from != 4,
                      to != 4);
    }
  }
  // Every other word, the last ones first.
  StridedCopy plan = Transpose(2, 128, 64);
  plan.src_offset = 63 * 4;
  plan.axis[0].src = -4;
  plan.axis[1].src = 256;
  ExpectTiledCopy(random, plan, 128 * 256, 128 * 128, 0, 0, false, true);
}

TEST(KernelsTest, TransposesOfAnyRankAreExact) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(60); ++i) {
    const std::int64_t word = std::int64_t{1} << random.Int(0, 3);
    // Axes in one order in the source and in another one in the destination, with gaps.
    const int axes = static_cast<int>(random.Int(2, 4));
    StridedCopy plan;
    plan.run = static_cast<std::uint64_t>(word);
    plan.axes = axes;
    std::vector<std::size_t> order;
    for (std::size_t a = 0; a < static_cast<std::size_t>(axes); ++a) {
      plan.axis[a].count = axes == 2 ? random.Int(8, 150) : random.Int(8, axes == 3 ? 40 : 14);
      order.push_back(a);
    }
    std::int64_t to_step = word;
    for (std::size_t a = order.size(); a-- > 0;) {
      plan.axis[a].dst = to_step;
      to_step *= plan.axis[a].count;
    }
    // The last one of the destination must not be the source's.
    do random.Shuffle(order);
    while (order.back() + 1 == order.size());
    std::int64_t from_step = word;
    for (std::size_t n = order.size(); n-- > 0;) {
      StridedCopy::Axis& axis = plan.axis[order[n]];
      axis.src = from_step;
      from_step *= axis.count;
      if (random.OneIn(3)) from_step += random.Int(0, 3) * word;
      if (random.OneIn(5)) {
        plan.src_offset += axis.src * (axis.count - 1);
        axis.src = -axis.src;
      }
    }
    const kernels::Tiled t = kernels::CutIntoTiles(plan, nullptr, nullptr);
    ExpectTiledCopy(random, plan, static_cast<std::size_t>(from_step),
                    static_cast<std::size_t>(to_step), 0, 0, t.wide_from, t.wide_to);
  }
}

// Where tiles would be next to empty, or save nothing.
TEST(KernelsTest, OnlyTransposesAreTiled) {
  const auto tiles = [](const StridedCopy& plan) {
    return kernels::CutIntoTiles(plan, nullptr, nullptr).tiles;
  };
  StridedCopy plan = Transpose(2, 100, 100);
  EXPECT_EQ(tiles(plan), 4u);
  EXPECT_EQ(tiles(Transpose(2, 7, 1000)), 0u);
  EXPECT_EQ(tiles(Transpose(16, 100, 100)), 0u);
  plan.axis[0].src = 64;  // Nothing of the source is near.
  EXPECT_EQ(tiles(plan), 0u);
  plan = Transpose(2, 100, 100);
  plan.axis[1].src = 0;  // All rows are one.
  EXPECT_EQ(tiles(plan), 0u);
  plan = Transpose(2, 100, 100);  // Rows stay rows.
  std::swap(plan.axis[0], plan.axis[1]);
  for (StridedCopy::Axis& axis : plan.loops()) axis.dst = axis.src;
  EXPECT_EQ(tiles(plan), 0u);
  plan = Transpose(2, 100, 100);
  plan.src_offset = 1;  // No words.
  EXPECT_EQ(tiles(plan), 0u);
}

TEST(KernelsTest, RunsAtAnyAlignmentAreCopiedExactly) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(50); ++i) {
    const std::string bytes = random.Bytes(60'000);
    std::string expected(70'000, '.');
    const auto job = std::make_unique<kernels::RunJob>();
    std::vector<kernels::Word16> to(expected.size() / 16);
    std::memset(to.data(), '.', expected.size());
    std::vector<kernels::Word16> from(bytes.size() / 16);
    std::memcpy(from.data(), bytes.data(), bytes.size());
    for (std::size_t at = 0;;) {
      // One in two is as far from a word on both sides.
      at += static_cast<std::size_t>(random.Int(0, 40));
      const auto size =
          static_cast<std::size_t>(random.OneIn(4) ? random.Int(1, 12'000) : random.Int(1, 100));
      const auto source = static_cast<std::size_t>(
          random.OneIn(2) ? random.Int(0, 2900) * 16 + static_cast<std::int64_t>(at % 16)
                          : random.Int(0, 47'000));
      if (at + size > expected.size() || job->count == kernels::kRunBatch) break;
      const auto m = static_cast<std::size_t>(job->count++);
      job->from[m] = AsBytes(from.data()) + source;
      job->to[m] = reinterpret_cast<std::uint8_t*>(to.data()) + at;
      job->bytes[m] = size;
      job->begin[m + 1] =
          job->begin[m] + static_cast<std::uint32_t>((size + 4095) / kernels::kRunPart);
      expected.replace(at, size, bytes, source, size);
      at += size;
    }
    const auto warps =
        static_cast<std::uint32_t>(random.OneIn(2) ? job->parts() : (job->parts() + 2) / 3);
    RunGrid(random, warps, [&](std::uint64_t w) {
      kernels::RunWarp(*job, kernels::HostWarp(), static_cast<std::uint32_t>(w), warps);
    });
    ASSERT_EQ(std::memcmp(to.data(), expected.data(), expected.size()), 0)
        << "case " << i << ", seed " << TestSeed();
  }
}

// What no memory here holds: over 2^32 pieces, and steps of zero.
TEST(KernelsTest, PieceNumbersExceed32Bits) {
  StridedCopy plan;
  plan.run = 2;
  plan.axes = 3;
  plan.axis[0] = {5, 0, std::int64_t{1} << 33};  // An expanded axis.
  plan.axis[1] = {1'000'000'007, 4, 2};
  plan.axis[2] = {3, -1'000, 1'000'000'000};
  const kernels::Strided cut = kernels::CutIntoPieces(plan, 1);
  EXPECT_EQ(cut.pieces, std::uint64_t{2} * 5 * 1'000'000'007 * 3);
  EXPECT_GT(cut.pieces, std::uint64_t{std::numeric_limits<std::uint32_t>::max()});
  // The last one.
  const kernels::RunPart last = kernels::PieceAt<std::uint64_t>(cut, cut.pieces - 1);
  EXPECT_EQ(last.from, 1 + std::int64_t{1'000'000'006} * 4 - 2'000);
  EXPECT_EQ(last.to,
            1 + 4 * (std::int64_t{1} << 33) + std::int64_t{1'000'000'006} * 2 + 2'000'000'000);
}

TEST(KernelsTest, DigestsOfEveryShapeMatchTheHost) {
  Random random(TestSeed());
  const auto tables = std::make_unique<kernels::CrcTables>();
  kernels::FillCrcTables(*tables);
  for (int i = 0; i < TestScale(500); ++i) {
    const StridedBytes s = MakeStridedBytes(random);
    const std::string memory = random.Bytes(s.bytes);
    const PlacedBox tensor = PlacePacked(Region(Box::Whole(s.byte_shape)), 0).front();
    const kernels::Strided cut = kernels::CutIntoPieces(
        PlanCopy(s.box, s.placed, tensor), random.OneIn(2) ? kernels::kCrcPieceBytes : 24);
    const auto tensor_bytes = static_cast<std::uint64_t>(tensor.box.volume());
    std::uint64_t digest = 0;
    WithExactMemory(memory, 0, [&](const std::uint8_t* data) {
      RunGrid(random, cut.pieces, [&](std::uint64_t t) {
        digest ^=
            kernels::CrcOfPiece<std::uint64_t>(tables->bytes, *tables, cut, t, data, tensor_bytes);
      });
      return 0;
    });
    ASSERT_EQ(digest, DigestOfPlaced(s.placed, reinterpret_cast<const std::byte*>(memory.data()),
                                     s.byte_shape))
        << "case " << i << ", seed " << TestSeed();
  }
}

TEST(KernelsTest, CrcShiftsByAnyDistance) {
  Random random(TestSeed());
  const auto tables = std::make_unique<kernels::CrcTables>();
  kernels::FillCrcTables(*tables);
  for (int i = 0; i < TestScale(200); ++i) {
    const std::uint64_t crc = random.Next();
    const std::uint64_t bytes = random.Next() >> random.Int(1, 63);
    ASSERT_EQ(kernels::MovedUp(*tables, crc, bytes), Crc64Shift(bytes).Apply(crc)) << bytes;
  }
}

}  // namespace
}  // namespace tensormount
