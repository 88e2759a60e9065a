// SPDX-License-Identifier: Apache-2.0
#include "shard/strided_digest.h"

#include <cstring>

#include "tests/shard/placements.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

Crc64 Whole(const std::string& tensor) { return Crc64Bitwise(0, tensor.data(), tensor.size()); }

const std::byte* BytePointer(const std::string& s) {
  return reinterpret_cast<const std::byte*>(s.data());
}

TEST(StridedDigestTest, DigestOfAWholeTensorIsItsCrc) {
  const std::string text = "123456789";
  const PlacedBox placed{B({0}, {9}), 0, {1}};
  EXPECT_EQ(DigestOfPlaced(placed, BytePointer(text), {9}), 0xAE8B14860A799888u);
}

TEST(StridedDigestTest, EmptyBoxContributesNothing) {
  EXPECT_EQ(DigestOfPlaced({B({3}, {0}), 0, {1}}, nullptr, {9}), 0u);
  Crc64 contribution = 7;
  ExecuteCopyWithDigest(StridedCopy(), B({0}, {0}), nullptr, nullptr, {9}, &contribution);
  EXPECT_EQ(contribution, 7u);
}

TEST(StridedDigestTest, DigestsOfTwoColumnsXorToTheWhole) {
  const std::string tensor = "abcdefgh";  // [2, 4]
  const std::string left = "abef";
  const std::string right = "cdgh";
  const Dims shape = {2, 4};
  EXPECT_EQ(DigestOfPlaced({B({0, 0}, {2, 2}), 0, {2, 1}}, BytePointer(left), shape) ^
                DigestOfPlaced({B({0, 2}, {2, 2}), 0, {2, 1}}, BytePointer(right), shape),
            Whole(tensor));
}

// The sizes at which gathering goes by blocks of rows, by parts of one row, and by single runs.
TEST(StridedDigestTest, LargeTransposedMemoryDigestsExactly) {
  const std::vector<Dims> shapes = {
      {300, 700, 2}, {2, 200'000, 2}, {3, 5, 40'000, 1}, {64, 900, 8}};
  for (const Dims& shape : shapes) {
    Random rnd(TestSeed());
    const Box box = Box::Whole(shape);
    const std::string tensor = rnd.Bytes(static_cast<std::size_t>(box.volume()));
    // Memory with the axes before the last the other way round.
    PlacedBox placed{box, 0, Dims::Filled(shape.rank(), 1)};
    std::int64_t step = shape[shape.rank() - 1];
    for (int a = 0; a + 1 < shape.rank(); ++a) {
      placed.strides[a] = step;
      step *= shape[a];
    }
    std::vector<std::byte> memory(tensor.size());
    const PlacedBox packed = PlacePacked(box, 0)[0];
    Crc64 copied = 0;
    ExecuteCopyWithDigest(PlanCopy(box, packed, placed), box, BytePointer(tensor), memory.data(),
                          shape, &copied);
    const Crc64 whole = Crc64Extend(0, tensor.data(), tensor.size());
    EXPECT_EQ(copied, whole) << shape.ToString();
    EXPECT_EQ(DigestOfPlaced(placed, memory.data(), shape), whole) << shape.ToString();
    std::string back(tensor.size(), '\0');
    copied = 0;
    ExecuteCopyWithDigest(PlanCopy(box, placed, packed), box, memory.data(),
                          reinterpret_cast<std::byte*>(back.data()), shape, &copied);
    EXPECT_EQ(copied, whole) << shape.ToString();
    EXPECT_TRUE(back == tensor) << shape.ToString();
  }
}

TEST(StridedDigestTest, LongColumnRunsDigestExactly) {
  const Dims shape = {40, 1024};
  Random rnd(TestSeed());
  const std::string tensor = rnd.Bytes(40 * 1024);
  const PlacedBox whole = PlacePacked(Box::Whole(shape), 0)[0];
  Crc64 sum = 0;
  for (std::int64_t c = 0; c < 1024; c += 128) {
    const Box part = B({0, c}, {40, 128});
    const PlacedBox packed = PlacePacked(part, 0)[0];
    std::string out(40 * 128, '\0');
    ExecuteCopyWithDigest(PlanCopy(part, whole, packed), part, BytePointer(tensor),
                          reinterpret_cast<std::byte*>(out.data()), shape, &sum);
    for (std::size_t r = 0; r < 40; ++r) {
      ASSERT_EQ(0, std::memcmp(out.data() + r * 128,
                               tensor.data() + r * 1024 + static_cast<std::size_t>(c), 128));
    }
  }
  EXPECT_EQ(sum, Whole(tensor));
}

// However a tensor is cut and held, the contributions XOR to the CRC of its bytes.
TEST(StridedDigestPropertyTest, DigestsOfAnyPartitionXorToTheWhole) {
  for (int i = 0; i < TestScale(700); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    const std::int64_t element_bytes = rnd.Pick<std::int64_t>({1, 2, 4, 8, 16});
    Dims shape = RandomShape(rnd, 4, rnd.OneIn(4) ? 15 : 6);
    const Dims elements = shape;
    shape.push_back(element_bytes);
    const std::string tensor = rnd.Bytes(static_cast<std::size_t>(Box::Whole(shape).volume()));
    std::vector<Region> regions;
    CutAtRandom(rnd, Box::Whole(elements), static_cast<int>(rnd.Int(0, 5)), regions);
    Crc64 held = 0;
    Crc64 copied = 0;
    for (const Region& region : regions) {
      for (const Box& box : region.Boxes()) {
        StridedMemory src = RandomMemory(rnd, box.extent(), element_bytes);
        StridedMemory dst = RandomMemory(rnd, box.extent(), element_bytes);
        const auto place = [&](const StridedMemory& memory) {
          Dims begin = box.begin();
          Dims extent = box.extent();
          Dims strides;
          for (const std::int64_t s : memory.strides) strides.push_back(s * element_bytes);
          begin.push_back(0);
          extent.push_back(element_bytes);
          strides.push_back(1);
          return PlacedBox{B(begin, extent), memory.first * element_bytes, strides};
        };
        const PlacedBox from = place(src);
        const PlacedBox to = place(dst);
        ForEachByte(from, shape, [&](std::int64_t t, std::int64_t m) {
          src.bytes[static_cast<std::size_t>(m)] =
              static_cast<std::byte>(tensor[static_cast<std::size_t>(t)]);
        });
        held ^= DigestOfPlaced(from, src.bytes.data(), shape);
        ExecuteCopyWithDigest(PlanCopy(from.box, from, to), from.box, src.bytes.data(),
                              dst.bytes.data(), shape, &copied);
        ForEachByte(to, shape, [&](std::int64_t t, std::int64_t m) {
          ASSERT_EQ(dst.bytes[static_cast<std::size_t>(m)],
                    static_cast<std::byte>(tensor[static_cast<std::size_t>(t)]));
        });
      }
    }
    ASSERT_EQ(held, Whole(tensor)) << shape.ToString();
    ASSERT_EQ(copied, Whole(tensor)) << shape.ToString();
  }
}

}  // namespace
}  // namespace tensormount
