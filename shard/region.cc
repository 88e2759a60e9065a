// SPDX-License-Identifier: Apache-2.0
// Region of tensormount/box.h: a box, or a flat range of the row-major order of a box. A flat range
// that is a box becomes one (Region::Flat), so that equal sets of cells have one form, as hashes
// and comparisons require.
#include <algorithm>
#include <string>

#include "tensormount/box.h"

#include "base/checked.h"
#include "shard/box_access.h"

namespace tensormount {
namespace {

// Appends positions [lo, hi) of the row-major order of `box`, counted over the axes from `axis` on
// (the axes before have extent 1), as disjoint boxes in that order: the rest of a partial row,
// whole rows, the beginning of the last row. Each end recurses into one axis less, and below the
// first split only one of its ends is partial: at most 2 * axes - 1 boxes. For example, 5:17 of
// [0:4, 0:8] is [0:1, 5:8], [1:2, 0:8], [2:3, 0:1].
void Split(const Box& box, int axis, std::int64_t lo, std::int64_t hi, std::vector<Box>& out) {
  if (lo == hi) return;
  if (axis == box.rank()) {
    out.push_back(box);
    return;
  }
  // Number of elements in one step along `axis`.
  std::int64_t row = 1;
  for (int a = axis + 1; a < box.rank(); ++a) row *= box.extent(a);
  std::int64_t first = lo / row;
  const std::int64_t last = hi / row;  // The row of the end; rows before it end within the range.
  const auto rows = [&](std::int64_t from, std::int64_t count) {
    return BoxAccess::WithAxis(box, axis, box.begin(axis) + from, count);
  };
  if (first == last) {
    Split(rows(first, 1), axis + 1, lo - first * row, hi - first * row, out);
    return;
  }
  if (lo % row != 0) {
    Split(rows(first, 1), axis + 1, lo % row, row, out);
    ++first;
  }
  if (last > first) out.push_back(rows(first, last - first));
  if (hi % row != 0) Split(rows(last, 1), axis + 1, 0, hi % row, out);
}

}  // namespace

Region::Region(const Box& box) : box_(box) {}

// The canonical form of a flat range counts in the smallest box around its cells, and a range that
// fills that box is the box. One walk from the outermost axis inwards computes both: while the
// range stays in one row of an axis, that axis shrinks to this row; the first axis on which it
// touches several rows shrinks to these, and all further axes are spanned (the first row reaches
// its end and the next starts at its beginning). So two ranges have equal forms exactly if they
// have equal cells, whatever box they were counted in.
Result<Region> Region::Flat(const Box& of, std::int64_t first, std::int64_t count) {
  const auto end = CheckedAdd(first, count);
  if (first < 0 || count < 0 || !end || *end > of.volume()) {
    return Status(Code::kInvalidArgument,
                  "flat range of " + std::to_string(count) + " elements from " +
                      std::to_string(first) + " does not lie within the " +
                      std::to_string(of.volume()) + " elements of " + of.ToString());
  }
  Region region;
  region.box_ = of;
  if (count == 0) {
    region.flat_ = true;
    return region;
  }
  for (int axis = 0; axis < of.rank(); ++axis) {
    std::int64_t row = 1;
    for (int a = axis + 1; a < of.rank(); ++a) row *= of.extent(a);
    const std::int64_t from = first / row;
    const std::int64_t to = (first + count - 1) / row + 1;
    region.box_ = BoxAccess::WithAxis(region.box_, axis, of.begin(axis) + from, to - from);
    first -= from * row;
    if (to - from > 1) {
      region.flat_ = count != (to - from) * row;  // Whether the first or last row is partial.
      break;
    }
  }
  if (region.flat_) {
    region.first_ = first;
    region.count_ = count;
  }
  return region;
}

bool operator==(const Region& a, const Region& b) {
  if (a.empty() || b.empty()) return a.empty() == b.empty();
  return a.flat_ == b.flat_ && a.first_ == b.first_ && a.count_ == b.count_ && a.box_ == b.box_;
}

std::string Region::ToString() const {
  std::string s = box_.ToString();
  if (flat_) s += " flat " + std::to_string(first_) + ":" + std::to_string(first_ + count_);
  return s;
}

std::vector<Box> Region::Boxes() const {
  std::vector<Box> boxes;
  if (empty()) return boxes;
  if (!flat_) {
    boxes.push_back(box_);
  } else {
    Split(box_, 0, first_, first_ + count_, boxes);
  }
  return boxes;
}

}  // namespace tensormount
