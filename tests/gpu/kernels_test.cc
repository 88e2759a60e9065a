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
#include "gpu/kernels/strided.h"
#include "gpu/kernels/xxh3.h"
#include "shard/copy_plan.h"
#include "shard/strided_digest.h"
#include "tests/gpu/grid.h"
#include "tests/support/random.h"
#include "tests/support/random_strided.h"

namespace tensormount {
namespace {

const std::uint8_t* AsBytes(const void* data) { return static_cast<const std::uint8_t*>(data); }

// In memory that ends where the bytes do: a sanitizer sees one byte too many.
template <typename Fn>
auto WithExactMemory(const std::string& bytes, Fn fn) {
  const auto memory = std::make_unique<std::uint8_t[]>(bytes.size());
  std::memcpy(memory.get(), bytes.data(), bytes.size());
  return fn(memory.get());
}

Hash128 ByKernel(const std::string& bytes) {
  return WithExactMemory(bytes, [&](const std::uint8_t* data) {
    const kernels::Hash hash = kernels::HashOfLeaf(kernels::HostWarp(), data, bytes.size());
    return Hash128{hash.low, hash.high};
  });
}

TEST(KernelsTest, HashesOfEveryLength) {
  Random random(TestSeed());
  const std::string all = random.Bytes(3000);
  for (std::size_t size = 0; size <= all.size(); ++size) {
    const std::string bytes = all.substr(all.size() - size);
    ASSERT_EQ(ByKernel(bytes), Xxh3(bytes)) << size << " bytes";
  }
}

TEST(KernelsTest, HashesOfLeaves) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(300); ++i) {
    // Ends of blocks and stripes, and what is around them.
    const std::int64_t near = random.Int(1, 64) * (random.OneIn(2) ? 1024 : 64);
    const auto size = static_cast<std::size_t>(random.OneIn(4) ? random.Int(0, 65'536)
                                                               : near + random.Int(-1, 1));
    const std::string bytes = random.OneIn(8)
                                  ? std::string(size, static_cast<char>(random.Int(0, 255)))
                                  : random.Bytes(size);
    ASSERT_EQ(ByKernel(bytes), Xxh3(bytes)) << size << " bytes, seed " << TestSeed();
  }
}

TEST(KernelsTest, CopiesOfEveryShape) {
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

// What no memory here holds: over 2^32 pieces, and steps of zero.
TEST(KernelsTest, PiecesBeyond32Bits) {
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

TEST(KernelsTest, DigestsOfEveryShape) {
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
    WithExactMemory(memory, [&](const std::uint8_t* data) {
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

TEST(KernelsTest, ACrcMovesAnyDistance) {
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
