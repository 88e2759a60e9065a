// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_REGION_SET_H_
#define TENSORMOUNT_SHARD_REGION_SET_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensormount/box.h"

namespace tensormount {

// Regions of one tensor as columns of plain numbers, for very many regions: each takes 16 bytes per
// axis and 4 more, and another 16 if any region of the set is a flat range. Every region is
// non-empty, lies within the shape, and is canonical as Region is: equal cells, equal numbers.
// Thread-compatible.
//
// Example, shape [4, 6]: the flat range 4:9 of box [1:3, 0:6] is stored as low [1, 0], high [3, 6],
// first 4, count 5. The range 0:6 of the same box is one row and becomes the box [1:2, 0:6].
//
// Regions are checked when they are added, so readers (coverage, partition proofs, layouts of a
// save) use plain operators: sums of bounds and products of extents are at most the shape's volume,
// which fits 63 bits.
class RegionSet {
 public:
  RegionSet() = default;  // An empty set for a scalar (no axes).
  // The shape must be checked (its volume fits 63 bits).
  explicit RegionSet(const Dims& shape) { Reset(shape); }
  // Empties the set and sets its shape; the memory is kept.
  void Reset(const Dims& shape);
  // Reserves space for `regions` regions in all.
  void Reserve(std::size_t regions);

  // Add a region, or nothing if it is empty. `owner` is any number that the caller chooses. Return
  // false, and add nothing, if the region does not lie within the shape. The numbers may be
  // untrusted. `begin` and `extent` have one number per axis of the shape.
  bool AddBox(const std::int64_t* begin, const std::int64_t* extent, std::uint32_t owner);
  // Adds elements [first, first + count) of the row-major order of the box; also returns false if
  // these do not lie within the box.
  bool AddFlat(const std::int64_t* begin, const std::int64_t* extent, std::int64_t first,
               std::int64_t count, std::uint32_t owner);
  // Also returns false if the region has another number of axes.
  bool Add(const Region& region, std::uint32_t owner);

  const Dims& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  std::size_t size() const { return owners_.size(); }
  bool empty() const { return owners_.empty(); }
  // First and past-the-end index on each axis, of the box or of the box around the flat range.
  const std::int64_t* low(std::size_t i) const { return bounds_.data() + i * stride_; }
  const std::int64_t* high(std::size_t i) const { return low(i) + shape_.rank(); }
  std::uint32_t owner(std::size_t i) const { return owners_[i]; }
  bool is_flat(std::size_t i) const { return !flats_.empty() && flats_[i].count != 0; }
  bool has_flats() const { return !flats_.empty(); }  // False: all regions are boxes.
  // For flat ranges: the first element in the row-major order of [low, high), and the number of
  // elements.
  std::int64_t flat_first(std::size_t i) const { return flats_[i].first; }
  std::int64_t flat_count(std::size_t i) const { return flats_[i].count; }
  std::int64_t volume(std::size_t i) const;
  Region At(std::size_t i) const;

  // Appends region `i` of another set of the same shape.
  void AddFrom(const RegionSet& other, std::size_t i, std::uint32_t owner);

 private:
  // Separate from bounds_, because most tensors have no flat ranges: then the array is empty, and
  // is_flat only checks its size.
  struct Flat {
    std::int64_t first = 0;
    std::int64_t count = 0;  // 0: a box.
  };

  bool Within(const std::int64_t* begin, const std::int64_t* extent, bool* empty) const;

  Dims shape_;
  std::size_t stride_ = 0;            // Numbers of one region in bounds_: two per axis.
  std::vector<std::int64_t> bounds_;  // For each region its lows, then its highs.
  std::vector<std::uint32_t> owners_;
  std::vector<Flat> flats_;  // As long as owners_, or empty while all are boxes.
};

// Puts the distinct regions of `all`, in order of first appearance, into `distinct`, with their
// position in `distinct` as owner; returns that position for each region of `all`. Expected linear
// time; regions in rank order are mostly grouped without hashing.
std::vector<std::uint32_t> GroupEqual(const RegionSet& all, RegionSet* distinct);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_REGION_SET_H_
