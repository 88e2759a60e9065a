// SPDX-License-Identifier: Apache-2.0
#include "shard/copy_plan.h"

#include <cstring>

#include "tests/shard/placements.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using testing::ElementsAre;

struct CopyRun {
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::uint64_t size = 0;
  friend bool operator==(const CopyRun&, const CopyRun&) = default;
};

std::vector<CopyRun> Runs(const StridedCopy& copy) {
  std::vector<CopyRun> runs;
  copy.ForEachRun([&](std::int64_t src, std::int64_t dst, std::uint64_t size) {
    runs.push_back({src, dst, size});
  });
  EXPECT_EQ(runs.size(), copy.runs());
  return runs;
}

std::vector<PlacedBox> Packed(const Region& bytes, std::uint64_t offset = 0) {
  return PlacePacked(bytes, offset);
}

TEST(PlanCopyTest, RowsBecomeOneRun) {
  const PlacedBox src = Packed(B({0, 0, 0}, {8, 4, 2}), 1000)[0];
  const PlacedBox dst = Packed(B({2, 0, 0}, {3, 4, 2}))[0];
  EXPECT_THAT(Runs(PlanCopy(dst.box, src, dst)), ElementsAre(CopyRun{1016, 0, 24}));
}

TEST(PlanCopyTest, ColumnsBecomeOneRunPerRow) {
  const PlacedBox src = Packed(B({0, 0}, {3, 8}))[0];
  const PlacedBox dst = Packed(B({0, 2}, {3, 2}))[0];
  EXPECT_THAT(Runs(PlanCopy(dst.box, src, dst)),
              ElementsAre(CopyRun{2, 0, 2}, CopyRun{10, 2, 2}, CopyRun{18, 4, 2}));
}

TEST(PlanCopyTest, ContiguousAxesAreMerged) {
  // Columns of a 4-axis tensor: the first three axes are one loop.
  const PlacedBox src = Packed(B({0, 0, 0, 0}, {2, 3, 4, 8}))[0];
  const PlacedBox dst = Packed(B({0, 0, 0, 0}, {2, 3, 4, 4}))[0];
  const StridedCopy copy = PlanCopy(dst.box, src, dst);
  EXPECT_EQ(copy.axes, 1);
  EXPECT_EQ(copy.axis[0].count, 24);
  EXPECT_EQ(copy.run, 4u);
}

TEST(PlanCopyTest, TransposedMemoryIsCopiedByElements) {
  const PlacedBox src{B({0, 0, 0}, {2, 2, 4}), 0, {4, 8, 1}};
  const PlacedBox dst = Packed(B({0, 0, 0}, {2, 2, 4}))[0];
  EXPECT_THAT(Runs(PlanCopy(dst.box, src, dst)), ElementsAre(CopyRun{0, 0, 4}, CopyRun{8, 4, 4},
                                                             CopyRun{4, 8, 4}, CopyRun{12, 12, 4}));
}

TEST(PlanCopyTest, ScalarsAndEmptyBoxesArePlanned) {
  const PlacedBox scalar = Packed(B({0}, {8}))[0];
  EXPECT_THAT(Runs(PlanCopy(scalar.box, scalar, scalar)), ElementsAre(CopyRun{0, 0, 8}));
  EXPECT_THAT(Runs(PlanCopy(B({0}, {0}), scalar, scalar)), ElementsAre());
  EXPECT_EQ(PlanCopy(B({0}, {0}), scalar, scalar).bytes(), 0u);
}

TEST(CopyPlanTest, ColumnShardsInterleave) {
  const std::vector<std::vector<PlacedBox>> chunks = {Packed(B({0, 0}, {2, 3})),
                                                      Packed(B({0, 3}, {2, 1}))};
  const auto plan = CopyPlan::Make(Packed(B({0, 0}, {2, 4})), chunks);
  ASSERT_OK(plan);
  EXPECT_EQ(plan.value().bytes(), 8u);
  ASSERT_EQ(plan.value().parts().size(), 2u);
  EXPECT_EQ(plan.value().parts()[1].chunk, 1u);
  EXPECT_EQ(plan.value().parts()[1].part, B({0, 3}, {2, 1}));
  EXPECT_THAT(Runs(plan.value().parts()[0].copy), ElementsAre(CopyRun{0, 0, 3}, CopyRun{3, 4, 3}));
  EXPECT_THAT(Runs(plan.value().parts()[1].copy), ElementsAre(CopyRun{0, 3, 1}, CopyRun{1, 7, 1}));
}

TEST(CopyPlanTest, HoleIsReported) {
  const std::vector<std::vector<PlacedBox>> chunks = {Packed(B({0, 0}, {2, 4})),
                                                      Packed(B({2, 0}, {2, 3}))};
  const auto plan = CopyPlan::Make(Packed(B({1, 0}, {2, 4})), chunks);
  EXPECT_THAT(plan, HasCode(Code::kDataLoss));
  EXPECT_THAT(plan, HasMessage("bytes [2:3, 3:4] is stored in no chunk"));
}

TEST(CopyPlanTest, HoleIsReportedInElements) {
  const TensorMeta meta = TensorMeta::Make("w", DType::kF32, {4, 4}).value();
  const Region want = ByteRegion(DType::kF32, meta.shape(), B({1, 0}, {2, 4})).value();
  const Region have = ByteRegion(DType::kF32, meta.shape(), B({0, 0}, {4, 2})).value();
  const std::vector<std::vector<PlacedBox>> chunks = {Packed(have)};
  EXPECT_THAT(CopyPlan::Make(Packed(want), chunks, &meta),
              HasMessage("tensor w [1:3, 2:4] is stored in no chunk"));
}

TEST(CopyPlanTest, OverlapIsReportedEvenIfTheVolumeFits) {
  // As many bytes as wanted, but one twice and one never.
  const std::vector<std::vector<PlacedBox>> chunks = {Packed(B({0}, {6})), Packed(B({5}, {4}))};
  EXPECT_THAT(CopyPlan::Make(Packed(B({0}, {10})), chunks),
              HasMessage("[9:10] is stored in no chunk"));
  EXPECT_THAT(CopyPlan::Make(Packed(B({0}, {9})), chunks),
              HasMessage("[5:6] is stored twice, in chunks 0 and 1"));
  const std::vector<std::vector<PlacedBox>> same = {Packed(B({0}, {5})), Packed(B({0}, {5}))};
  EXPECT_THAT(CopyPlan::Make(Packed(B({0}, {10})), same), HasCode(Code::kDataLoss));
}

TEST(CopyPlanTest, DifferentTensorRanksAreRefused) {
  const std::vector<std::vector<PlacedBox>> chunks = {Packed(B({0}, {4}))};
  EXPECT_THAT(CopyPlan::Make(Packed(B({0, 0}, {2, 2})), chunks), HasCode(Code::kInvalidArgument));
}

TEST(CopyPlanTest, EmptyPlanIsValid) {
  const auto plan = CopyPlan::Make({}, {});
  ASSERT_OK(plan);
  EXPECT_EQ(plan.value().bytes(), 0u);
}

// Every run size that has its own code, through tiles and without, against byte by byte.
TEST(ExecuteCopyTest, TransposesOfEveryRunSizeAreExact) {
  for (const std::int64_t size : {1, 2, 3, 4, 6, 8, 16, 24}) {
    const std::int64_t rows = 150;
    const std::int64_t columns = 70;
    const Box box = B({0, 0, 0}, {rows, columns, size});
    const PlacedBox src{box, 0, {size, rows * size, 1}};
    const PlacedBox dst{box, 0, {columns * size, size, 1}};
    std::vector<std::byte> from(static_cast<std::size_t>(box.volume()));
    Random(TestSeed()).Fill(from.data(), from.size());
    std::vector<std::byte> to(from.size());
    ExecuteCopy(PlanCopy(box, src, dst), from.data(), to.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        ASSERT_EQ(0,
                  std::memcmp(to.data() + (r * columns + c) * size,
                              from.data() + (c * rows + r) * size, static_cast<std::size_t>(size)))
            << size << " " << r << " " << c;
      }
    }
  }
}

// Large enough to be written past the caches, at every alignment of the destination's runs.
TEST(ExecuteCopyTest, StreamedRunsAreExactAtEveryAlignment) {
  const std::int64_t rows = 4100;
  const std::int64_t run = 2051;
  std::vector<std::byte> from(static_cast<std::size_t>(rows * run + 3));
  Random(TestSeed()).Fill(from.data(), from.size());
  const Box box = B({0, 0}, {rows, run});
  std::vector<std::byte> to(static_cast<std::size_t>(rows * 2100 + 7));
  ExecuteCopy(PlanCopy(box, {box, 3, {run, 1}}, {box, 7, {2100, 1}}), from.data(), to.data());
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::byte* const there = to.data() + 7 + r * 2100;
    ASSERT_EQ(0, std::memcmp(there, from.data() + 3 + r * run, static_cast<std::size_t>(run))) << r;
    ASSERT_EQ(there[-1], std::byte{0}) << r;
    ASSERT_EQ(there[run], std::byte{0}) << r;
  }
}

// Every way to copy runs, of lengths around where one takes over from another, from and to places
// off and on the start of a cache line, as a copy of its own and as a block of a large one.
// Whatever stands between the runs stays.
TEST(ExecuteCopyTest, RunsOfEveryLengthAndAlignmentAreExact) {
  constexpr std::uint64_t kLarge = std::uint64_t{1} << 30;
  for (const std::int64_t run :
       {17, 127, 128, 200, 448, 1023, 1024, 2050, 3071, 3072, 4100, 70000}) {
    for (const std::int64_t gap : {0, 6, 64}) {
      for (const bool gather : {true, false}) {
        for (const std::int64_t off : {0, 6, 63}) {
          StridedCopy copy;
          copy.run = static_cast<std::uint64_t>(run);
          copy.axes = 2;
          const std::int64_t apart = run + gap + 1;
          copy.axis[0] = {2, 5 * (gather ? apart : run), 5 * (gather ? run : apart)};
          copy.axis[1] = {3, gather ? apart : run, gather ? run : apart};
          copy.src_offset = off;
          copy.dst_offset = 2 * off;
          std::string src(static_cast<std::size_t>(off + 10 * apart), '\0');
          for (std::size_t i = 0; i < src.size(); ++i)
            src[i] = static_cast<char>(i * 131 + i / 251);
          std::string want(static_cast<std::size_t>(2 * off + 10 * apart), '.');
          copy.ForEachRun([&](std::int64_t from, std::int64_t to, std::uint64_t size) {
            std::memcpy(want.data() + to, src.data() + from, size);
          });
          for (const std::uint64_t whole : {std::uint64_t{0}, kLarge}) {
            std::string got(want.size(), '.');
            ExecuteCopy(copy, reinterpret_cast<const std::byte*>(src.data()),
                        reinterpret_cast<std::byte*>(got.data()), whole);
            ASSERT_TRUE(got == want)
                << run << " " << gap << " " << gather << " " << off << " " << whole;
          }
        }
      }
    }
  }
}

// Whatever the sharding and the strides, executing the plan yields what naive indexing yields, and
// the runs of the plan are the same bytes as its execution.
TEST(CopyPlanPropertyTest, MatchesNaiveIndexingForAnyPartition) {
  const std::vector<DType> types = {DType::kF4,  DType::kF6E2M3, DType::kU8,  DType::kBF16,
                                    DType::kF32, DType::kF64,    DType::kC128};
  int tried = 0;
  for (int i = 0; i < TestScale(1500); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    const DType dtype = rnd.Pick(types);
    const Dims shape = RandomShape(rnd, 4, 7);
    const auto meta = TensorMeta::Make("w", dtype, shape);
    if (!meta.ok()) continue;
    const Dims byte_shape = ByteShape(dtype, shape);
    const std::int64_t element_bytes = InfoOf(dtype).bits / 8;
    SCOPED_TRACE(testing::Message() << i << " " << InfoOf(dtype).name << shape.ToString());

    std::string tensor = rnd.Bytes(meta.value().bytes());
    std::vector<Region> regions;
    CutAtRandom(rnd, Box::Whole(shape), static_cast<int>(rnd.Int(0, 4)), regions);
    std::vector<std::vector<PlacedBox>> chunks;
    std::vector<std::vector<std::byte>> stored;
    bool on_bytes = true;
    for (const Region& region : regions) {
      if (!region.is_flat() && element_bytes > 0 && !region.empty() && rnd.OneIn(3)) {
        StridedMemory memory = RandomMemory(rnd, region.box().extent(), element_bytes);
        Dims steps;
        for (const std::int64_t s : memory.strides) steps.push_back(s * element_bytes);
        const auto placed =
            PlaceStrided(dtype, shape, region.box(),
                         static_cast<std::uint64_t>(memory.first * element_bytes), steps);
        ASSERT_OK(placed);
        chunks.push_back(placed.value());
        stored.push_back(std::move(memory.bytes));
      } else {
        const auto bytes = ByteRegion(dtype, shape, region);
        if (!bytes.ok()) {
          on_bytes = false;
          break;
        }
        const std::int64_t offset = rnd.Int(0, 9);
        chunks.push_back(PlacePacked(bytes.value(), static_cast<std::uint64_t>(offset)));
        stored.emplace_back(static_cast<std::size_t>(bytes.value().volume() + offset));
      }
      for (const PlacedBox& placed : chunks.back()) {
        ForEachByte(placed, byte_shape, [&](std::int64_t t, std::int64_t m) {
          stored.back()[static_cast<std::size_t>(m)] =
              static_cast<std::byte>(tensor[static_cast<std::size_t>(t)]);
        });
      }
    }
    if (!on_bytes) continue;

    const KnownRegion want = RandomRegion(rnd, shape);
    if (!ByteRegion(dtype, shape, want.region).ok()) continue;
    ++tried;
    StridedMemory out;
    if (element_bytes == 0) {
      out.bytes.resize(RegionBytes(dtype, shape, want.region).value());
    } else {
      const Dims extents =
          want.region.is_flat() ? Dims{want.region.volume()} : want.region.box().extent();
      out = want.region.empty() ? StridedMemory{Dims::Filled(extents.rank(), 1), 0, {}}
                                : RandomMemory(rnd, extents, element_bytes);
    }
    BufferView buffer;
    if (element_bytes == 0) {
      buffer = BufferView::Host(
          dtype, static_cast<void*>(out.bytes.data()),
          want.region.is_flat() ? Dims{want.region.volume()} : want.region.box().extent());
    } else {
      buffer = BufferView::HostStrided(
          dtype, out.bytes.data() + out.first * element_bytes,
          want.region.is_flat() ? Dims{want.region.volume()} : want.region.box().extent(),
          out.strides);
    }
    const auto placed = PlaceBuffer(buffer, dtype, shape, want.region);
    ASSERT_OK(placed);
    const auto plan = CopyPlan::Make(placed.value(), chunks, &meta.value());
    ASSERT_OK(plan);
    std::vector<std::byte> by_runs = out.bytes;
    std::byte* base = static_cast<std::byte*>(buffer.data);
    const std::int64_t base_at = base - out.bytes.data();
    for (const CopyPlan::Part& piece : plan.value().parts()) {
      const std::vector<std::byte>& from = stored[piece.chunk];
      ExecuteCopy(piece.copy, from.data(), base);
      piece.copy.ForEachRun([&](std::int64_t src, std::int64_t dst, std::uint64_t size) {
        std::memcpy(by_runs.data() + base_at + dst, from.data() + src, size);
      });
    }
    ASSERT_TRUE(out.bytes == by_runs);
    std::uint64_t seen = 0;
    for (const PlacedBox& p : placed.value()) {
      ForEachByte(p, byte_shape, [&](std::int64_t t, std::int64_t m) {
        ++seen;
        ASSERT_EQ(base[m], static_cast<std::byte>(tensor[static_cast<std::size_t>(t)]));
      });
    }
    ASSERT_EQ(seen, plan.value().bytes());
    // One chunk less: the plan must fail exactly where that chunk had something of it.
    if (chunks.empty()) continue;
    const auto gone = static_cast<std::uint32_t>(rnd.Int(0, static_cast<int>(chunks.size()) - 1));
    bool needed = false;
    for (const CopyPlan::Part& p : plan.value().parts()) needed = needed || p.chunk == gone;
    chunks[gone].clear();
    const auto less = CopyPlan::Make(placed.value(), chunks);
    ASSERT_EQ(less.ok(), !needed);
    if (needed) {
      ASSERT_THAT(less, HasMessage("is stored in no chunk"));
    }
  }
  EXPECT_GT(tried, TestScale(500));
}

}  // namespace
}  // namespace tensormount
