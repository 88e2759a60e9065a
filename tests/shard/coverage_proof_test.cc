// SPDX-License-Identifier: Apache-2.0
// Layouts as ranks cut tensors, sound and with one fault each, against a count of every cell; and
// each method of proof alone.
#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "shard/coverage.h"
#include "shard/coverage_search.h"
#include "shard/partition_proof.h"
#include "tests/shard/boxes.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<std::int64_t> CellsOfRegion(const Region& region, const Dims& shape) {
  std::vector<std::int64_t> cells;
  for (const Box& box : region.Boxes()) {
    for (const std::int64_t c : CellsOf(box, shape)) cells.push_back(c);
  }
  return cells;
}

std::vector<int> CountCells(const Dims& shape, const std::vector<Region>& regions) {
  std::vector<int> count(static_cast<std::size_t>(Box::Whole(shape).volume()));
  for (const Region& r : regions) {
    for (const std::int64_t c : CellsOfRegion(r, shape)) ++count[static_cast<std::size_t>(c)];
  }
  return count;
}

bool EachOnce(const std::vector<int>& count) {
  return std::ranges::all_of(count, [](int c) { return c == 1; });
}

// Where `extent` is cut into up to `most` parts, some of them empty: begins, then the end.
std::vector<std::int64_t> RandomCuts(Random& rnd, std::int64_t extent, std::int64_t most) {
  std::vector<std::int64_t> cuts = {0, extent};
  for (std::int64_t n = rnd.Int(0, most - 1); n > 0; --n) cuts.push_back(rnd.Int(0, extent));
  std::ranges::sort(cuts);
  return cuts;
}

// Every cell of a grid on all axes from `axis` on.
void CutGrid(const std::vector<std::vector<std::int64_t>>& cuts, std::size_t axis, Dims begin,
             Dims extent, std::vector<Region>& out) {
  if (axis == cuts.size()) {
    out.push_back(B(begin, extent));
    return;
  }
  for (std::size_t i = 0; i + 1 < cuts[axis].size(); ++i) {
    Dims b = begin;
    Dims e = extent;
    b.push_back(cuts[axis][i]);
    e.push_back(cuts[axis][i + 1] - cuts[axis][i]);
    CutGrid(cuts, axis + 1, b, e, out);
  }
}

void SplitFlat(Random& rnd, const Box& box, std::vector<Region>& out) {
  const std::vector<std::int64_t> cuts = RandomCuts(rnd, box.volume(), 6);
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    out.push_back(F(box, cuts[i], cuts[i + 1] - cuts[i]));
  }
}

// Rows, grids, flat ranges, flat ranges of grid cells, arbitrary splits; in order or not.
std::vector<Region> SoundLayout(Random& rnd, const Dims& shape) {
  std::vector<Region> regions;
  const Box whole = Box::Whole(shape);
  const std::int64_t kind = rnd.Int(0, 4);
  if (kind == 0) {
    SplitFlat(rnd, whole, regions);
  } else if (kind == 1) {
    CutAtRandom(rnd, whole, static_cast<int>(rnd.Int(0, 5)), regions);
  } else {
    const std::int64_t rows_only = rnd.Int(0, 1);
    std::vector<std::vector<std::int64_t>> cuts;
    for (int a = 0; a < shape.rank(); ++a) {
      cuts.push_back(RandomCuts(rnd, shape[a], rows_only == 1 && a > 0 ? 1 : 4));
    }
    CutGrid(cuts, 0, {}, {}, regions);
    if (kind == 4) {
      std::vector<Region> parts;
      for (const Region& r : regions) SplitFlat(rnd, r.box(), parts);
      regions = std::move(parts);
    }
  }
  if (rnd.OneIn(2)) rnd.Shuffle(regions);
  std::erase_if(regions, [](const Region& r) { return r.empty(); });
  return regions;
}

// `box` with its begin and end on one axis moved, cut off at the shape.
Box Moved(const Box& box, const Dims& shape, int axis, std::int64_t by_begin, std::int64_t by_end) {
  Dims begin = box.begin();
  Dims extent = box.extent();
  begin[axis] = std::clamp<std::int64_t>(box.begin(axis) + by_begin, 0, shape[axis]);
  extent[axis] =
      std::clamp<std::int64_t>(box.end(axis) + by_end, begin[axis], shape[axis]) - begin[axis];
  return B(begin, extent);
}

// What goes wrong in a job: a rank is missing, sends what another one sends, counts from the wrong
// place, or mixes up axes. May by chance leave a sound layout.
std::string PlantFault(Random& rnd, const Dims& shape, std::vector<Region>& regions) {
  if (regions.empty()) return "";
  const auto pick = [&] {
    return static_cast<std::size_t>(rnd.Int(0, static_cast<std::int64_t>(regions.size()) - 1));
  };
  const std::size_t i = pick();
  const std::size_t j = pick();
  const Box box = regions[i].box();
  const int axis = shape.rank() == 0 ? -1 : static_cast<int>(rnd.Int(0, shape.rank() - 1));
  switch (rnd.Int(0, 6)) {
    case 0:
      regions.erase(regions.begin() + static_cast<std::ptrdiff_t>(i));
      return "gap";
    case 1:
      regions.push_back(regions[i]);
      return "duplicate";
    case 2:
      regions[i] = regions[j];
      return "one rank with the region of another";
    case 3:
      if (axis < 0) return "";
      if (regions[i].is_flat()) {
        const std::int64_t by = rnd.Int(-1, 1);
        const std::int64_t first = std::clamp<std::int64_t>(regions[i].flat_first() + by, 0,
                                                            box.volume() - regions[i].volume());
        regions[i] = F(box, first, regions[i].volume());
        return "shifted flat range";
      } else {
        const std::int64_t by = rnd.OneIn(2) ? 1 : -1;
        regions[i] = Moved(box, shape, axis, by, by);
        return "shifted by one";
      }
    case 4:
      if (axis < 0) return "";
      regions[i] = rnd.OneIn(2) ? Moved(box, shape, axis, 0, rnd.OneIn(2) ? 1 : -1)
                                : Moved(box, shape, axis, rnd.OneIn(2) ? 1 : -1, 0);
      return "off by one";
    case 5: {
      // Extents of two ranks exchanged.
      Dims a = box.extent();
      Dims b = regions[j].box().extent();
      for (int k = 0; k < shape.rank(); ++k) {
        std::swap(a[k], b[k]);
        a[k] = std::min(a[k], shape[k] - box.begin(k));
        b[k] = std::min(b[k], shape[k] - regions[j].box().begin(k));
      }
      const Dims begin = regions[j].box().begin();
      regions[i] = B(box.begin(), a);
      regions[j] = B(begin, b);
      return "swapped extents";
    }
    default: {
      // Ranks of a grid counted along the wrong axis.
      if (shape.rank() < 2) return "";
      for (Region& r : regions) {
        Dims begin = r.box().begin();
        Dims extent = r.box().extent();
        std::swap(begin[0], begin[1]);
        std::swap(extent[0], extent[1]);
        for (const int a : {0, 1}) {
          begin[a] = std::min(begin[a], shape[a]);
          extent[a] = std::min(extent[a], shape[a] - begin[a]);
        }
        r = B(begin, extent);
      }
      std::erase_if(regions, [](const Region& r) { return r.empty(); });
      return "transposed grid";
    }
  }
}

// The report against the counts: exactly the missing cells, once each; every pair that meets with
// exactly the cells that both have.
void ExpectExact(const Dims& shape, const std::vector<Region>& regions,
                 const std::vector<int>& count, const std::vector<Box>& missing,
                 std::uint64_t missing_elements, const std::vector<Overlap>& overlaps) {
  std::vector<int> listed(count.size());
  for (const Box& box : missing) {
    for (const std::int64_t c : CellsOfRegion(box, shape)) ++listed[static_cast<std::size_t>(c)];
  }
  std::uint64_t cells = 0;
  for (std::size_t c = 0; c < count.size(); ++c) {
    ASSERT_EQ(listed[c], count[c] == 0 ? 1 : 0) << "cell " << c;
    cells += count[c] == 0 ? 1 : 0;
  }
  ASSERT_EQ(missing_elements, cells);
  // For each cell, how often pairs share it: a cell of k regions is shared by k * (k - 1) / 2.
  std::vector<int> shared(count.size());
  for (const Overlap& o : overlaps) {
    ASSERT_LT(o.first, o.second);
    const Region& a = regions[o.first];
    const Region& b = regions[o.second];
    if (!a.is_flat() && !b.is_flat()) {
      ASSERT_EQ(o.box, Intersect(a.box(), b.box()));
    }
    const std::vector<std::int64_t> of_a = CellsOfRegion(a, shape);
    const std::vector<std::int64_t> of_b = CellsOfRegion(b, shape);
    for (const std::int64_t c : CellsOfRegion(o.box, shape)) {
      ++shared[static_cast<std::size_t>(c)];
      ASSERT_EQ(std::ranges::count(of_a, c), 1);
      ASSERT_EQ(std::ranges::count(of_b, c), 1);
    }
  }
  for (std::size_t c = 0; c < count.size(); ++c) {
    ASSERT_EQ(shared[c], count[c] * (count[c] - 1) / 2) << "cell " << c;
  }
}

Dims SmallShape(Random& rnd) {
  Dims shape = RandomShape(rnd, 4, 5);
  if (rnd.OneIn(3)) shape = {rnd.Int(1, 40)};
  if (rnd.OneIn(3)) shape = {rnd.Int(1, 12), rnd.Int(1, 12)};
  return shape;
}

// No method may ever give a wrong answer, whichever sets it is for.
void ExpectNoneWrong(const RegionSet& set, bool sound) {
  const Proof wrong = sound ? Proof::kNotPartition : Proof::kPartition;
  bool linear = false;
  ASSERT_NE(ProveByOrder(set, &linear), wrong);
  ASSERT_NE(ProveAsGrid(set), wrong);
  ASSERT_EQ(ProveByCorners(set, nullptr), sound ? Proof::kPartition : Proof::kNotPartition);
  const Proof by_ends = ProveByEnds(set);
  ASSERT_NE(by_ends, wrong);
  ASSERT_EQ(by_ends == Proof::kUnknown, !linear);
  ASSERT_EQ(IsPartition(set), sound);
}

TEST(CoverageProofTest, NoFalseAlarmInTenThousandSoundLayouts) {
  for (int i = 0; i < TestScale(10'000); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    const Dims shape = SmallShape(rnd);
    const std::vector<Region> regions = SoundLayout(rnd, shape);
    ASSERT_TRUE(EachOnce(CountCells(shape, regions)));
    const RegionSet set = SetOf(shape, regions);
    ASSERT_TRUE(CheckCoverage(set).complete());
    ExpectNoneWrong(set, true);
    if (HasFatalFailure()) return;
  }
}

TEST(CoverageProofTest, TenThousandFaultsAreReportedExactly) {
  std::map<std::string, int> faults;
  for (int i = 0; i < TestScale(10'000); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    Dims shape;
    std::vector<Region> regions;
    std::vector<int> count;
    std::string fault;
    do {
      shape = SmallShape(rnd);
      regions = SoundLayout(rnd, shape);
      fault = PlantFault(rnd, shape, regions);
      count = CountCells(shape, regions);
    } while (EachOnce(count));
    ++faults[fault];
    SCOPED_TRACE(fault);
    const RegionSet set = SetOf(shape, regions);
    // Empty ones are not in the set; positions then differ from owners, which are what counts.
    const CoverageReport report = CheckCoverage(set, 100'000);
    ASSERT_FALSE(report.complete());
    ASSERT_FALSE(report.truncated);
    ExpectExact(shape, regions, count, report.missing, report.missing_elements, report.overlaps);
    ExpectNoneWrong(set, false);
    if (HasFatalFailure()) return;
  }
  if (TestScale(10'000) < 10'000) return;
  EXPECT_EQ(faults.size(), 8u);
  for (const auto& [fault, times] : faults) EXPECT_GT(times, 50) << fault;
}

// What is left to do where a proof by corners leaves too much.
TEST(CoverageProofTest, SearchWithoutProofIsExact) {
  for (int i = 0; i < TestScale(2000); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    const Dims shape = SmallShape(rnd);
    std::vector<Region> regions = SoundLayout(rnd, shape);
    PlantFault(rnd, shape, regions);
    std::erase_if(regions, [](const Region& r) { return r.is_flat() || r.empty(); });
    const RegionSet set = SetOf(shape, regions);
    for (const bool only_overlaps : {false, true}) {
      CoverageFindings found = SearchCoverage(set, 100'000, only_overlaps);
      std::vector<Overlap> overlaps;
      for (const auto& [a, b] : found.pairs) {
        overlaps.push_back({Intersect(regions[a].box(), regions[b].box()), a, b});
      }
      std::vector<int> count = CountCells(shape, regions);
      if (only_overlaps) {
        ASSERT_THAT(found.holes, IsEmpty());
        for (int& c : count) c = std::max(c, 1);
      }
      ExpectExact(shape, regions, count, found.holes, found.missing_elements, overlaps);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CoverageProofTest, OrderedRangesAreRecognizedInOnePass) {
  const Box whole = Box::Whole({8, 6});
  const std::vector<Region> mixed = {B({0, 0}, {2, 6}), F(whole, 12, 5), F(whole, 17, 1),
                                     B({3, 0}, {5, 6})};
  bool linear = false;
  EXPECT_EQ(ProveByOrder(SetOf({8, 6}, mixed), &linear), Proof::kPartition);
  EXPECT_TRUE(linear);
  std::vector<Region> turned(mixed.rbegin(), mixed.rend());
  EXPECT_EQ(ProveByOrder(SetOf({8, 6}, turned), &linear), Proof::kUnknown);
  EXPECT_TRUE(linear);
  EXPECT_EQ(ProveByEnds(SetOf({8, 6}, turned)), Proof::kPartition);
  EXPECT_EQ(ProveByOrder(SetOf({8, 6}, {B({0, 0}, {8, 3}), B({0, 3}, {8, 3})}), &linear),
            Proof::kUnknown);
  EXPECT_FALSE(linear);
}

TEST(CoverageProofTest, GridsAreRecognizedInAnyOrder) {
  Random rnd(TestSeed());
  for (int i = 0; i < TestScale(200); ++i) {
    SCOPED_TRACE(i);
    std::vector<std::vector<std::int64_t>> cuts;
    Dims shape;
    for (std::int64_t a = rnd.Int(1, 3); a > 0; --a) {
      shape.push_back(rnd.Int(1, 60));
      cuts.push_back(RandomCuts(rnd, shape[shape.rank() - 1], 30));
      auto& c = cuts.back();
      c.erase(std::unique(c.begin(), c.end()), c.end());
    }
    std::vector<Region> grid;
    CutGrid(cuts, 0, {}, {}, grid);
    if (rnd.OneIn(2)) rnd.Shuffle(grid);
    ASSERT_EQ(ProveAsGrid(SetOf(shape, grid)), Proof::kPartition);
    if (grid.size() < 2) continue;
    // As many boxes, all of them cells of the grid, but one twice and one not at all.
    std::swap(
        grid[0],
        grid[static_cast<std::size_t>(rnd.Int(1, static_cast<std::int64_t>(grid.size()) - 1))]);
    grid[1] = grid[0];
    ASSERT_NE(ProveAsGrid(SetOf(shape, grid)), Proof::kPartition);
  }
}

// Enough boxes in no order that the proof stops joining neighbours and its table grows.
TEST(CoverageProofTest, FaultsAmongThousandsOfUnorderedBoxesAreFound) {
  Random rnd(TestSeed());
  for (int i = 0; i < 4; ++i) {
    const Dims shape = i % 2 == 0 ? Dims{100'000, 70'000} : Dims{4000, 3000, 5000};
    std::vector<Region> regions;
    while (regions.size() < 3000) {
      regions.clear();
      CutAtRandom(rnd, Box::Whole(shape), 13, regions);
    }
    if (i < 2) std::erase_if(regions, [](const Region& r) { return r.empty(); });
    rnd.Shuffle(regions);
    EXPECT_EQ(ProveByCorners(SetOf(shape, regions), nullptr), Proof::kPartition);
    const auto box = std::ranges::find_if(regions, [](const Region& r) { return !r.is_flat(); });
    const Box gone = box->box();
    std::vector<Region> holed = regions;
    holed.erase(holed.begin() + (box - regions.begin()));
    EXPECT_THAT(CheckCoverage(SetOf(shape, holed)).missing, ElementsAre(gone));
    std::vector<Region> doubled = regions;
    doubled.push_back(gone);
    const CoverageReport report = CheckCoverage(SetOf(shape, doubled));
    EXPECT_THAT(report.missing, IsEmpty());
    ASSERT_EQ(report.overlaps.size(), 1u);
    EXPECT_EQ(report.overlaps[0].box, gone);
    EXPECT_EQ(report.overlaps[0].first, static_cast<std::uint32_t>(box - regions.begin()));
    EXPECT_EQ(report.overlaps[0].second, regions.size());
  }
}

// Rows beside columns: on either axis half of all boxes are open at a time.
TEST(CoverageProofTest, CombsDoNotTakeQuadraticTime) {
  const std::int64_t teeth = 60'000;
  std::vector<Region> regions;
  for (std::int64_t i = 0; i < teeth; ++i) {
    regions.push_back(B({i, 0}, {1, teeth}));
    regions.push_back(B({0, teeth + i}, {teeth, 1}));
  }
  Random rnd(TestSeed());
  rnd.Shuffle(regions);
  EXPECT_TRUE(IsPartition(SetOf({teeth, 2 * teeth}, regions)));
  const Box gone = regions.back().box();
  regions.pop_back();
  EXPECT_THAT(CheckCoverage(SetOf({teeth, 2 * teeth}, regions)).missing, ElementsAre(gone));
}

TEST(CoverageProofTest, MoreFaultsThanCornersAreAllCounted) {
  // A chessboard: every second cell is missing.
  const std::int64_t n = 200;
  std::vector<Region> white;
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t c = r % 2; c < n; c += 2) white.push_back(B({r, c}, {1, 1}));
  }
  const RegionSet set = SetOf({n, n}, white);
  std::vector<Miscount> differences;
  EXPECT_EQ(ProveByCorners(set, &differences), Proof::kNotPartition);
  EXPECT_THAT(differences, IsEmpty());
  const CoverageReport report = CheckCoverage(set, 3);
  EXPECT_EQ(report.missing_elements, static_cast<std::uint64_t>(n * n / 2));
  EXPECT_TRUE(report.truncated);
  EXPECT_THAT(report.missing, ElementsAre(B({0, 1}, {1, 1}), B({0, 3}, {1, 1}), B({0, 5}, {1, 1})));
}

TEST(CoverageProofTest, MoreHolesThanGridCellsAreAllFound) {
  const std::int64_t n = 600;
  std::vector<Region> regions;
  std::vector<Box> holes;
  for (std::int64_t r = 0; r < n; ++r) {
    const std::int64_t at = 3 * (n - r);
    regions.push_back(B({2 * r, 0}, {1, at}));
    regions.push_back(B({2 * r, at + 1}, {1, 2000 - at - 1}));
    regions.push_back(B({2 * r + 1, 0}, {1, 2000}));
    holes.push_back(B({2 * r, at}, {1, 1}));
  }
  const RegionSet set = SetOf({2 * n, 2000}, regions);
  std::vector<Miscount> differences;
  EXPECT_EQ(ProveByCorners(set, &differences), Proof::kNotPartition);
  EXPECT_THAT(differences, IsEmpty());
  EXPECT_EQ(CheckCoverage(set, 1000).missing, holes);
}

TEST(CoverageProofTest, ManyDistantOverlapsAreFound) {
  std::vector<Region> regions;
  for (std::int64_t r = 0; r < 40; ++r) {
    const std::int64_t at = r < 20 ? 7 : 2;
    regions.push_back(B({2 * r, 0}, {2, r % 2 == 0 ? at + 1 : at}));
    regions.push_back(B({2 * r, at}, {2, 10 - at}));
  }
  const CoverageReport report = CheckCoverage(SetOf({80, 10}, regions), 100);
  ASSERT_EQ(report.overlaps.size(), 20u);
  for (std::int64_t k = 0; k < 20; ++k) {
    const Overlap& o = report.overlaps[static_cast<std::size_t>(k)];
    EXPECT_EQ(o.box, B({4 * k, k < 10 ? 7 : 2}, {2, 1}));
    EXPECT_EQ(o.first, static_cast<std::uint32_t>(4 * k));
    EXPECT_EQ(o.second, static_cast<std::uint32_t>(4 * k + 1));
  }
}

// Cut on more axes than corners are counted on.
TEST(CoverageProofTest, FaultsOnManyAxesAreFound) {
  const Dims shape = Dims::Filled(8, 2);
  std::vector<std::vector<std::int64_t>> cuts(8, {0, 1, 2});
  std::vector<Region> grid;
  CutGrid(cuts, 0, {}, {}, grid);
  EXPECT_TRUE(IsPartition(SetOf(shape, grid)));
  // Two cells joined: no grid any more.
  grid[0] = B(Dims::Filled(8, 0), {1, 1, 1, 1, 1, 1, 1, 2});
  grid.erase(grid.begin() + 1);
  EXPECT_EQ(ProveByCorners(SetOf(shape, grid), nullptr), Proof::kUnknown);
  EXPECT_TRUE(IsPartition(SetOf(shape, grid)));
  const Box gone = grid[77].box();
  grid.erase(grid.begin() + 77);
  EXPECT_FALSE(IsPartition(SetOf(shape, grid)));
  EXPECT_THAT(CheckCoverage(SetOf(shape, grid)).missing, ElementsAre(gone));
}

TEST(CoverageProofTest, LargestExtentsDoNotOverflow) {
  const std::int64_t huge = std::int64_t{1} << 62;
  // Five times everything is as much as everything once, modulo 2^64.
  const std::vector<Region> five(5, B({0}, {huge}));
  bool linear = false;
  EXPECT_EQ(ProveByOrder(SetOf({huge}, five), &linear), Proof::kNotPartition);
  EXPECT_EQ(CheckCoverage(SetOf({huge}, five)).overlaps.size(), 10u);
  EXPECT_TRUE(IsPartition(SetOf({huge}, {B({1}, {huge - 1}), B({0}, {1})})));
  EXPECT_THAT(CheckCoverage(SetOf({huge}, {B({1}, {huge - 2}), B({0}, {1})})).missing,
              ElementsAre(B({huge - 1}, {1})));
  const std::vector<Dims> shapes = {{std::int64_t{1} << 31, std::int64_t{1} << 31},
                                    {std::int64_t{1} << 60, 7},
                                    {7, std::int64_t{1} << 60},
                                    {2, std::int64_t{1} << 60, 2, 1}};
  for (const Dims& shape : shapes) {
    SCOPED_TRACE(shape.ToString());
    Random rnd(TestSeed());
    std::vector<Region> regions;
    for (int tries = 0; tries < 20; ++tries) {
      regions.clear();
      CutAtRandom(rnd, Box::Whole(shape), 6, regions);
      std::erase_if(regions, [](const Region& r) { return r.empty(); });
      EXPECT_TRUE(IsPartition(SetOf(shape, regions)));
      if (regions[0].is_flat()) continue;
      const Box gone = regions[0].box();
      regions.erase(regions.begin());
      EXPECT_THAT(CheckCoverage(SetOf(shape, regions)).missing, ElementsAre(gone));
    }
  }
}

TEST(CoverageProofTest, CornerCountsOver64BitsAreHandled) {
  const std::int64_t half = std::int64_t{1} << 56;
  const Dims shape = {2, 2, 2, 2, 2, 2 * half};
  std::vector<std::vector<std::int64_t>> cuts(5, {0, 1, 2});
  cuts.push_back({0, half, 2 * half});
  std::vector<Region> grid;
  CutGrid(cuts, 0, {}, {}, grid);
  EXPECT_EQ(ProveByCorners(SetOf(shape, grid), nullptr), Proof::kUnknown);
  grid[0] = B(Dims::Filled(6, 0), {1, 1, 1, 1, 1, 2 * half});
  grid.erase(grid.begin() + 1);
  EXPECT_EQ(ProveAsGrid(SetOf(shape, grid)), Proof::kUnknown);
  EXPECT_TRUE(IsPartition(SetOf(shape, grid)));
  const Box gone = grid[20].box();
  grid.erase(grid.begin() + 20);
  EXPECT_THAT(CheckCoverage(SetOf(shape, grid)).missing, ElementsAre(gone));
}

TEST(RegionSetTest, RefusesRegionsOutsideTheShape) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  RegionSet set({4, 6});
  const auto box = [&](const Dims& begin, const Dims& extent) {
    return set.AddBox(begin.begin(), extent.begin(), 0);
  };
  EXPECT_FALSE(box({0, 0}, {5, 6}));
  EXPECT_FALSE(box({1, 0}, {4, 6}));
  EXPECT_FALSE(box({-1, 0}, {1, 6}));
  EXPECT_FALSE(box({0, 0}, {-1, 6}));
  EXPECT_FALSE(box({kMax, 0}, {1, 6}));
  EXPECT_FALSE(box({1, 0}, {kMax, 6}));
  EXPECT_FALSE(box({kMin, 0}, {kMin, 6}));
  EXPECT_FALSE(box({kMax, 0}, {kMin, 6}));
  const auto flat = [&](const Dims& begin, const Dims& extent, std::int64_t first,
                        std::int64_t count) {
    return set.AddFlat(begin.begin(), extent.begin(), first, count, 0);
  };
  EXPECT_FALSE(flat({0, 0}, {4, 6}, 0, 25));
  EXPECT_FALSE(flat({0, 0}, {4, 6}, -1, 2));
  EXPECT_FALSE(flat({0, 0}, {4, 6}, 2, -1));
  EXPECT_FALSE(flat({0, 0}, {4, 6}, kMax, kMax));
  EXPECT_FALSE(flat({0, 0}, {4, 0}, 0, 1));
  EXPECT_FALSE(flat({1, 0}, {4, 6}, 0, 1));
  EXPECT_FALSE(set.Add(B({0}, {4}), 0));
  EXPECT_TRUE(set.empty());
  // Empty ones are fine, and nothing.
  EXPECT_TRUE(box({4, 0}, {0, 6}));
  EXPECT_TRUE(flat({0, 0}, {4, 6}, 24, 0));
  EXPECT_TRUE(flat({0, 0}, {4, 0}, 0, 0));
  EXPECT_TRUE(set.empty());
  EXPECT_TRUE(box({3, 5}, {1, 1}));
  EXPECT_EQ(set.size(), 1u);
}

TEST(RegionSetTest, StoresRegionsUnchanged) {
  for (int i = 0; i < TestScale(1000); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    const Dims shape = RandomShape(rnd, 4, 6);
    RegionSet set(shape);
    std::vector<Region> regions;
    for (std::int64_t n = rnd.Int(0, 8); n > 0; --n) {
      const Box of = RandomBox(rnd, shape);
      const auto owner = static_cast<std::uint32_t>(100 + regions.size());
      Region region = of;
      if (rnd.OneIn(2)) {
        ASSERT_TRUE(set.AddBox(of.begin().begin(), of.extent().begin(), owner));
      } else {
        const std::int64_t first = rnd.Int(0, of.volume());
        const std::int64_t count = rnd.Int(0, of.volume() - first);
        region = F(of, first, count);
        ASSERT_TRUE(set.AddFlat(of.begin().begin(), of.extent().begin(), first, count, owner));
      }
      if (!region.empty()) regions.push_back(region);
    }
    ASSERT_EQ(set.size(), regions.size());
    for (std::size_t r = 0; r < regions.size(); ++r) {
      ASSERT_EQ(set.At(r), regions[r]);
      ASSERT_EQ(set.is_flat(r), regions[r].is_flat());
      ASSERT_EQ(set.volume(r), regions[r].volume());
      ASSERT_EQ(set.owner(r), 100 + r);
    }
  }
}

TEST(RegionSetTest, RangesWithinTheSameRowsAreNotEqual) {
  const Box whole = Box::Whole({4, 6});
  // All of them reach from the first row into the last.
  const std::vector<Region> all = {F(whole, 1, 20), F(whole, 2, 20), F(whole, 2, 19),
                                   whole,           F(whole, 1, 20), whole};
  RegionSet distinct;
  EXPECT_THAT(GroupEqual(SetOf({4, 6}, all), &distinct), ElementsAre(0, 1, 2, 3, 0, 3));
}

TEST(RegionSetTest, GroupsEqualRegionsByFirstAppearance) {
  for (int i = 0; i < TestScale(300); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    const Dims shape = RandomShape(rnd, 3, rnd.OneIn(2) ? 4 : 40);
    std::vector<Region> kinds;
    for (std::int64_t n = rnd.Int(1, 100); n > 0; --n) {
      Region region = RandomRegion(rnd, shape).region;
      if (!region.empty()) kinds.push_back(region);
    }
    if (kinds.empty()) continue;
    RegionSet set(shape);
    std::vector<Region> all;
    const std::int64_t pattern = rnd.Int(0, 2);
    for (std::size_t n = 0; n < 400; ++n) {
      // Rank order with the replicas outside, inside, or none.
      const std::size_t k = pattern == 0   ? n % kinds.size()
                            : pattern == 1 ? n * kinds.size() / 400
                                           : static_cast<std::size_t>(rnd.Next() % kinds.size());
      all.push_back(kinds[k]);
      ASSERT_TRUE(set.Add(kinds[k], 7));
    }
    std::vector<Region> distinct;
    std::vector<std::uint32_t> expected;
    for (const Region& r : all) {
      const auto at = std::ranges::find(distinct, r);
      expected.push_back(static_cast<std::uint32_t>(at - distinct.begin()));
      if (at == distinct.end()) distinct.push_back(r);
    }
    RegionSet groups;
    ASSERT_EQ(GroupEqual(set, &groups), expected);
    ASSERT_EQ(groups.size(), distinct.size());
    for (std::size_t g = 0; g < distinct.size(); ++g) {
      ASSERT_EQ(groups.At(g), distinct[g]);
      ASSERT_EQ(groups.owner(g), g);
    }
  }
}

}  // namespace
}  // namespace tensormount
