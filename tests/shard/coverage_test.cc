// SPDX-License-Identifier: Apache-2.0
#include "shard/coverage.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tests/shard/boxes.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(CoverageTest, RowsAreComplete) {
  const CoverageReport report =
      CheckCoverage(SetOf({4, 8}, {B({0, 0}, {2, 8}), B({2, 0}, {2, 8})}));
  EXPECT_TRUE(report.complete());
  EXPECT_EQ(report.missing_elements, 0u);
}

TEST(CoverageTest, MissingRankIsReportedAsOneBox) {
  std::vector<Region> grid;
  for (std::int64_t r = 0; r < 4; ++r) {
    for (std::int64_t c = 0; c < 4; ++c) {
      if (r == 1 && (c == 1 || c == 2)) continue;
      grid.push_back(B({r * 4, c * 8}, {4, 8}));
    }
  }
  const CoverageReport report = CheckCoverage(SetOf({16, 32}, grid));
  EXPECT_THAT(report.missing, ElementsAre(B({4, 8}, {4, 16})));
  EXPECT_EQ(report.missing_elements, 64u);
  EXPECT_THAT(report.overlaps, IsEmpty());
}

TEST(CoverageTest, FlatRangesAndBoxesCombine) {
  const Box whole = Box::Whole({4, 4});
  const CoverageReport report = CheckCoverage(
      SetOf({4, 4}, {F(whole, 0, 6), F(whole, 6, 3), B({3, 0}, {1, 4}), F(whole, 10, 2)}));
  EXPECT_THAT(report.missing, ElementsAre(B({2, 1}, {1, 1})));
  EXPECT_THAT(report.overlaps, IsEmpty());
}

TEST(CoverageTest, OverlapReportNamesBothOwners) {
  RegionSet regions({4, 4});
  ASSERT_TRUE(regions.Add(B({0, 0}, {2, 4}), 7));
  ASSERT_TRUE(regions.Add(B({2, 0}, {2, 4}), 5));
  ASSERT_TRUE(regions.Add(B({1, 1}, {2, 2}), 3));
  const CoverageReport report = CheckCoverage(regions);
  EXPECT_THAT(report.missing, IsEmpty());
  ASSERT_EQ(report.overlaps.size(), 2u);
  EXPECT_EQ(report.overlaps[0].box, B({1, 1}, {1, 2}));
  EXPECT_EQ(report.overlaps[0].first, 7u);
  EXPECT_EQ(report.overlaps[0].second, 3u);
  EXPECT_EQ(report.overlaps[1].box, B({2, 1}, {1, 2}));
  EXPECT_EQ(report.overlaps[1].first, 5u);
}

TEST(CoverageTest, DuplicateRegionsOverlap) {
  const CoverageReport report = CheckCoverage(SetOf({4}, {B({0}, {4}), B({0}, {4}), B({1}, {0})}));
  ASSERT_EQ(report.overlaps.size(), 1u);
  EXPECT_EQ(report.overlaps[0].box, B({0}, {4}));
}

TEST(CoverageTest, EmptyLayoutMissesTheWholeTensor) {
  EXPECT_THAT(CheckCoverage(SetOf({4, 4}, {})).missing, ElementsAre(B({0, 0}, {4, 4})));
  EXPECT_TRUE(CheckCoverage(SetOf({4, 0}, {})).complete());
  EXPECT_THAT(CheckCoverage(SetOf({}, {})).missing, ElementsAre(Box()));
  EXPECT_TRUE(CheckCoverage(SetOf({}, {Box()})).complete());
  EXPECT_EQ(CheckCoverage(SetOf({}, {Box(), Box()})).overlaps.size(), 1u);
}

TEST(CoverageTest, ListsAreTruncatedButCounted) {
  std::vector<Region> odd;
  for (std::int64_t i = 1; i < 100; i += 2) odd.push_back(B({i}, {1}));
  const CoverageReport report = CheckCoverage(SetOf({100}, odd), 3);
  EXPECT_THAT(report.missing, ElementsAre(B({0}, {1}), B({2}, {1}), B({4}, {1})));
  EXPECT_EQ(report.missing_elements, 50u);
  EXPECT_TRUE(report.truncated);
  EXPECT_FALSE(CheckCoverage(SetOf({100}, odd), 0).complete());
}

void ExpectAsCounted(const Dims& shape, const std::vector<KnownRegion>& known) {
  std::vector<int> count(static_cast<std::size_t>(Box::Whole(shape).volume()));
  std::vector<Region> regions;
  for (const KnownRegion& k : known) {
    regions.push_back(k.region);
    for (const std::int64_t c : k.cells) ++count[static_cast<std::size_t>(c)];
  }
  const CoverageReport report = CheckCoverage(SetOf(shape, regions), 100'000);
  ASSERT_FALSE(report.truncated);
  std::vector<int> missing(count.size());
  for (const Box& box : report.missing) {
    for (const std::int64_t c : CellsOf(box, shape)) ++missing[static_cast<std::size_t>(c)];
  }
  // Of each pair the cells that both have, each listed once.
  using Pair = std::pair<std::uint32_t, std::uint32_t>;
  std::map<Pair, std::vector<std::int64_t>> listed;
  for (const Overlap& o : report.overlaps) {
    ASSERT_LT(o.first, o.second);
    std::vector<std::int64_t>& cells = listed[{o.first, o.second}];
    for (const std::int64_t c : CellsOf(o.box, shape)) cells.push_back(c);
  }
  std::map<Pair, std::vector<std::int64_t>> meeting;
  for (std::uint32_t a = 0; a < known.size(); ++a) {
    for (std::uint32_t b = a + 1; b < known.size(); ++b) {
      std::vector<std::int64_t> common;
      for (const std::int64_t c : known[a].cells) {
        if (std::ranges::count(known[b].cells, c) > 0) common.push_back(c);
      }
      if (!common.empty()) meeting[{a, b}] = common;
    }
  }
  for (auto* pairs : {&listed, &meeting}) {
    for (auto& [pair, cells] : *pairs) std::ranges::sort(cells);
  }
  ASSERT_EQ(listed, meeting);
  std::uint64_t missing_cells = 0;
  for (std::size_t c = 0; c < count.size(); ++c) {
    ASSERT_EQ(missing[c], count[c] == 0 ? 1 : 0) << c;
    missing_cells += count[c] == 0;
  }
  ASSERT_EQ(report.missing_elements, missing_cells);
  const auto row_major = [](const Box& a, const Box& b) {
    return std::ranges::lexicographical_compare(a.begin().span(), b.begin().span());
  };
  ASSERT_TRUE(std::ranges::is_sorted(report.missing, row_major));
  ASSERT_TRUE(std::ranges::is_sorted(report.overlaps, row_major, &Overlap::box));
}

TEST(CoveragePropertyTest, MatchesCountingEveryCell) {
  for (int i = 0; i < TestScale(1500); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    const Dims shape = RandomShape(rnd, 4, 6);
    std::vector<KnownRegion> known;
    if (rnd.OneIn(2)) {
      // A partition with some of it taken away and some of it doubled.
      std::vector<Region> regions;
      CutAtRandom(rnd, Box::Whole(shape), static_cast<int>(rnd.Int(0, 5)), regions);
      rnd.Shuffle(regions);
      for (const Region& r : regions) {
        if (rnd.OneIn(8)) continue;
        std::vector<std::int64_t> cells;
        for (const Box& b : r.Boxes()) {
          for (const std::int64_t c : CellsOf(b, shape)) cells.push_back(c);
        }
        known.push_back({r, cells});
        if (rnd.OneIn(10)) known.push_back(known.back());
      }
    } else {
      for (std::int64_t n = rnd.Int(0, 12); n > 0; --n) known.push_back(RandomRegion(rnd, shape));
    }
    ExpectAsCounted(shape, known);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// However the rest is cut, what one rank does not bring is named as the one box that it is.
TEST(CoveragePropertyTest, MissingBoxIsReportedWhole) {
  for (int i = 0; i < TestScale(1000); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    Dims shape = RandomShape(rnd, 3, 30);
    shape.push_back(rnd.Int(1, 30));
    std::vector<Region> regions;
    CutAtRandom(rnd, Box::Whole(shape), static_cast<int>(rnd.Int(0, 8)), regions);
    rnd.Shuffle(regions);
    const auto gone =
        std::ranges::find_if(regions, [](const Region& r) { return !r.is_flat() && !r.empty(); });
    if (gone == regions.end()) continue;
    const Box box = gone->box();
    regions.erase(gone);
    ASSERT_THAT(CheckCoverage(SetOf(shape, regions)).missing, ElementsAre(box));
  }
}

TEST(CoverageScaleTest, MissingRowAmongManyIsFound) {
  std::vector<Region> rows;
  for (std::int64_t i = 0; i < 100'000; ++i) {
    if (i != 77'777) rows.push_back(B({i * 3, 0}, {3, 4096}));
  }
  Random rnd(TestSeed());
  rnd.Shuffle(rows);
  const CoverageReport report = CheckCoverage(SetOf({300'000, 4096}, rows));
  EXPECT_THAT(report.missing, ElementsAre(B({233'331, 0}, {3, 4096})));
}

TEST(CoverageScaleTest, LargeGridIsComplete) {
  std::vector<Region> grid;
  for (std::int64_t a = 0; a < 64; ++a) {
    for (std::int64_t b = 0; b < 64; ++b) {
      for (std::int64_t c = 0; c < 8; ++c) grid.push_back(B({a * 2, b * 3, c * 5}, {2, 3, 5}));
    }
  }
  EXPECT_TRUE(CheckCoverage(SetOf({128, 192, 40}, grid)).complete());
}

TEST(CoverageScaleTest, ThousandsOfIrregularBoxesAreChecked) {
  Random rnd(TestSeed());
  const Dims shape = {4000, 4000, 4000};
  std::vector<Region> regions;
  CutAtRandom(rnd, Box::Whole(shape), 12, regions);
  EXPECT_GT(regions.size(), 2000u);
  rnd.Shuffle(regions);
  EXPECT_TRUE(CheckCoverage(SetOf(shape, regions)).complete());
  std::vector<Region> wild;
  for (int i = 0; i < 3000; ++i) wild.push_back(RandomBox(rnd, shape));
  EXPECT_TRUE(CheckCoverage(SetOf(shape, wild)).truncated);
}

// Bricks: no cut goes through without cutting boxes.
TEST(CoverageScaleTest, GapInABrickPatternIsFound) {
  std::vector<Region> bricks;
  for (std::int64_t r = 0; r < 60; ++r) {
    for (std::int64_t c = 0; c < 60; ++c) {
      const std::int64_t shift = r % 2 == 0 ? 0 : 5;
      const std::int64_t begin = c == 0 ? 0 : c * 10 + shift;
      const std::int64_t end = c == 59 ? 600 : (c + 1) * 10 + shift;
      bricks.push_back(B({r, begin}, {1, end - begin}));
      bricks.push_back(B({60 + begin, r}, {end - begin, 1}));
    }
  }
  const CoverageReport report = CheckCoverage(SetOf({660, 600}, bricks));
  EXPECT_THAT(report.missing, ElementsAre(B({60, 60}, {600, 540})));
  EXPECT_THAT(report.overlaps, IsEmpty());
}

}  // namespace
}  // namespace tensormount
