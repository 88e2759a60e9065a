// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include "tensormount/box.h"

#include "tests/shard/boxes.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using testing::ElementsAre;

TEST(RegionTest, FlatRangeOfWholeRowsIsABox) {
  EXPECT_EQ(F(B({0, 0}, {4, 8}), 8, 16), Region(B({1, 0}, {2, 8})));
  EXPECT_FALSE(F(B({0, 0}, {4, 8}), 8, 16).is_flat());
  // Rows of a middle axis.
  EXPECT_EQ(F(B({0, 0, 0}, {2, 3, 4}), 16, 8), Region(B({1, 1, 0}, {1, 2, 4})));
}

TEST(RegionTest, FlatRangeWithinOneRowIsABox) {
  EXPECT_EQ(F(B({0, 0}, {4, 8}), 9, 5), Region(B({1, 1}, {1, 5})));
}

TEST(RegionTest, FlatRangeOfEverythingIsTheBox) {
  EXPECT_EQ(F(B({2, 1}, {4, 8}), 0, 32), Region(B({2, 1}, {4, 8})));
  EXPECT_EQ(F(Box(), 0, 1), Region());
}

TEST(RegionTest, AxesOfExtentOneDoNotHideABox) {
  EXPECT_EQ(F(B({0, 0, 0}, {4, 1, 1}), 1, 2), Region(B({1, 0, 0}, {2, 1, 1})));
  EXPECT_EQ(F(B({0, 0, 0}, {1, 4, 1}), 1, 2), Region(B({0, 1, 0}, {1, 2, 1})));
}

TEST(RegionTest, RegionsWithEqualCellsAreEqual) {
  const Region a = F(B({0, 0}, {8, 4}), 6, 7);
  EXPECT_TRUE(a.is_flat());
  EXPECT_EQ(a, F(B({1, 0}, {3, 4}), 2, 7));
  EXPECT_EQ(a.box(), B({1, 0}, {3, 4}));
  EXPECT_EQ(a.flat_first(), 2);
  EXPECT_EQ(a.ToString(), "[1:4, 0:4] flat 2:9");
  EXPECT_NE(a, F(B({0, 0}, {8, 4}), 6, 8));
  EXPECT_NE(a, F(B({0, 0}, {8, 4}), 7, 7));
}

TEST(RegionTest, EmptyRegionsAreEqual) {
  EXPECT_EQ(F(B({0}, {4}), 2, 0), Region(B({1, 1}, {0, 3})));
  EXPECT_NE(F(B({0}, {4}), 2, 0), Region());
  EXPECT_TRUE(F(Box(), 0, 0).empty());
  EXPECT_TRUE(F(B({0}, {4}), 2, 0).Boxes().empty());
}

TEST(RegionTest, FlatRangeMustLieInTheBox) {
  const Box of = B({0}, {4});
  EXPECT_THAT(Region::Flat(of, 0, 5), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Region::Flat(of, 2, 3), HasMessage("3 elements from 2"));
  EXPECT_THAT(Region::Flat(of, -1, 1), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Region::Flat(of, 1, -1), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Region::Flat(of, INT64_MAX, 1), HasCode(Code::kInvalidArgument));
}

TEST(RegionTest, BoxesFollowElementOrder) {
  EXPECT_THAT(F(B({0, 0}, {4, 4}), 2, 9).Boxes(),
              ElementsAre(B({0, 2}, {1, 2}), B({1, 0}, {1, 4}), B({2, 0}, {1, 3})));
  EXPECT_THAT(F(B({0, 0}, {2, 4}), 3, 2).Boxes(),
              ElementsAre(B({0, 3}, {1, 1}), B({1, 0}, {1, 1})));
  EXPECT_THAT(Region(B({1}, {2})).Boxes(), ElementsAre(B({1}, {2})));
}

TEST(RegionPropertyTest, BoxesGiveTheCellsInOrder) {
  for (int i = 0; i < TestScale(3000); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    const Dims shape = RandomShape(rnd, 4, 5);
    const KnownRegion known = RandomFlat(rnd, shape);
    std::vector<std::int64_t> cells;
    const std::vector<Box> boxes = known.region.Boxes();
    for (const Box& box : boxes) {
      EXPECT_FALSE(box.empty());
      for (const std::int64_t c : CellsOf(box, shape)) cells.push_back(c);
    }
    ASSERT_EQ(cells, known.cells) << known.region.ToString();
    EXPECT_LE(boxes.size(), static_cast<std::size_t>(std::max(1, 2 * shape.rank() - 1)));
    EXPECT_EQ(known.region.volume(), static_cast<std::int64_t>(known.cells.size()));
    EXPECT_TRUE(known.region.Within(shape));
  }
}

// Of all flat ranges of all boxes of a shape: equal cells, equal regions, and only then.
TEST(RegionPropertyTest, EqualityIsEqualityOfCells) {
  for (const Dims& shape : {Dims{3, 3}, Dims{2, 1, 3}, Dims{2, 2, 2}, Dims{1, 4}, Dims{4, 1}}) {
    std::map<std::vector<std::int64_t>, Region> by_cells;
    std::vector<std::pair<std::vector<std::int64_t>, Region>> all;
    std::vector<Box> boxes;
    const auto grow = [&](auto&& self, Dims begin, Dims extent) -> void {
      const int axis = begin.rank();
      if (axis == shape.rank()) {
        boxes.push_back(B(begin, extent));
        return;
      }
      for (std::int64_t b = 0; b < shape[axis]; ++b) {
        for (std::int64_t e = 1; b + e <= shape[axis]; ++e) {
          Dims nb = begin;
          Dims ne = extent;
          nb.push_back(b);
          ne.push_back(e);
          self(self, nb, ne);
        }
      }
    };
    grow(grow, Dims(), Dims());
    for (const Box& box : boxes) {
      const std::vector<std::int64_t> cells = CellsOf(box, shape);
      for (std::size_t first = 0; first < cells.size(); ++first) {
        for (std::size_t end = first + 1; end <= cells.size(); ++end) {
          const std::vector<std::int64_t> part(cells.begin() + static_cast<std::ptrdiff_t>(first),
                                               cells.begin() + static_cast<std::ptrdiff_t>(end));
          const Region region =
              F(box, static_cast<std::int64_t>(first), static_cast<std::int64_t>(end - first));
          const auto [at, fresh] = by_cells.emplace(part, region);
          ASSERT_EQ(at->second, region) << box.ToString() << " " << first << ":" << end;
        }
      }
      ASSERT_EQ(by_cells.at(cells), Region(box));
    }
    for (auto a = by_cells.begin(); a != by_cells.end(); ++a) {
      for (auto b = std::next(a); b != by_cells.end(); ++b) ASSERT_NE(a->second, b->second);
    }
  }
}

}  // namespace
}  // namespace tensormount
