// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SHARD_BOXES_H_
#define TENSORMOUNT_TESTS_SHARD_BOXES_H_

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/box.h"

#include "shard/region_set.h"
#include "tests/support/random.h"

// Slow and obvious: boxes as lists of their cells, and random boxes to try them on.

namespace tensormount {

inline Box B(const Dims& begin, const Dims& extent) { return Box::Make(begin, extent).value(); }
inline Region F(const Box& of, std::int64_t first, std::int64_t count) {
  return Region::Flat(of, first, count).value();
}

inline RegionSet SetOf(const Dims& shape, const std::vector<Region>& regions) {
  RegionSet set(shape);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    EXPECT_TRUE(set.Add(regions[i], static_cast<std::uint32_t>(i))) << regions[i].ToString();
  }
  return set;
}

// The row-major positions in `shape` of the cells of `box`, in the row-major order of the box.
inline std::vector<std::int64_t> CellsOf(const Box& box, const Dims& shape) {
  std::vector<std::int64_t> cells;
  for (std::int64_t n = 0; n < box.volume(); ++n) {
    std::int64_t rest = n;
    std::int64_t position = 0;
    std::int64_t step = 1;
    for (int a = box.rank() - 1; a >= 0; --a) {
      position += (box.begin(a) + rest % box.extent(a)) * step;
      step *= shape[a];
      rest /= box.extent(a);
    }
    cells.push_back(position);
  }
  return cells;
}

inline Dims RandomShape(Random& rnd, int max_rank, std::int64_t max_extent,
                        std::int64_t min_extent = 1) {
  Dims shape;
  for (std::int64_t rank = rnd.Int(0, max_rank); rank > 0; --rank) {
    shape.push_back(rnd.Int(min_extent, max_extent));
  }
  return shape;
}

// May be empty.
inline Box RandomBox(Random& rnd, const Dims& shape, std::int64_t min_extent = 0) {
  Dims begin;
  Dims extent;
  for (const std::int64_t e : shape) {
    begin.push_back(rnd.Int(0, e - min_extent));
    extent.push_back(rnd.Int(min_extent, e - begin[begin.rank() - 1]));
  }
  return B(begin, extent);
}

// A box, or a flat range of one, with their cells as defined: no use of Region's own methods.
struct KnownRegion {
  Region region;
  std::vector<std::int64_t> cells;  // In the region's order.
};
inline KnownRegion RandomFlat(Random& rnd, const Dims& shape) {
  const Box of = RandomBox(rnd, shape);
  const std::vector<std::int64_t> cells = CellsOf(of, shape);
  const std::int64_t first = rnd.Int(0, of.volume());
  const std::int64_t count = rnd.Int(0, of.volume() - first);
  return {F(of, first, count), {cells.begin() + first, cells.begin() + first + count}};
}
inline KnownRegion RandomRegion(Random& rnd, const Dims& shape) {
  if (rnd.OneIn(2)) return RandomFlat(rnd, shape);
  const Box box = RandomBox(rnd, shape);
  return {box, CellsOf(box, shape)};
}

// Disjoint regions that cover `box`: cut at random, `depth` times deep; leaves may be flat ranges.
inline void CutAtRandom(Random& rnd, const Box& box, int depth, std::vector<Region>& out) {
  const int axis = box.rank() == 0 ? 0 : static_cast<int>(rnd.Int(0, box.rank() - 1));
  if (depth == 0 || box.rank() == 0 || box.extent(axis) < 2) {
    if (rnd.OneIn(3)) {
      const std::int64_t cut = rnd.Int(0, box.volume());
      out.push_back(F(box, 0, cut));
      out.push_back(F(box, cut, box.volume() - cut));
    } else {
      out.push_back(box);
    }
    return;
  }
  const std::int64_t cut = rnd.Int(1, box.extent(axis) - 1);
  Dims begin = box.begin();
  Dims extent = box.extent();
  extent[axis] = cut;
  CutAtRandom(rnd, B(begin, extent), depth - 1, out);
  begin[axis] += cut;
  extent[axis] = box.extent(axis) - cut;
  CutAtRandom(rnd, B(begin, extent), depth - 1, out);
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SHARD_BOXES_H_
