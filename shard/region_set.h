// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_REGION_SET_H_
#define TENSORMOUNT_SHARD_REGION_SET_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensormount/box.h"

namespace tensormount {

// Regions of one tensor as plain numbers in columns, so that very many can be joined and checked:
// 16 * rank + 4 bytes each, 16 more where one of them is a flat range. Every region in it is not
// empty, lies within the shape, and is canonical as Region is: equal cells, equal numbers.
// Thread-compatible.
//
// Example, shape [4, 6]: the flat range 4:9 of box [1:3, 0:6] is kept as low [1, 0], high [3, 6],
// first 4, count 5. The range 0:6 of the same box is one row and becomes the box [1:2, 0:6].
//
// Because everything in it was checked when it was added, whoever reads it (coverage, partition
// proofs, layouts of a save) calculates with plain operators: sums of bounds and products of
// extents stay below the shape's volume, which fits 63 bits.
class RegionSet {
 public:
  RegionSet() = default;  // Of a scalar.
  // The shape must be a checked one (its volume fits 63 bits).
  explicit RegionSet(const Dims& shape) { Reset(shape); }
  // Empties the set, for another shape; its memory is kept.
  void Reset(const Dims& shape);
  // Room for so many in all, so that adding them does not copy what is there again and again.
  void Reserve(std::size_t regions);

  // These add a region, or nothing where it is empty. `owner` is any number of the caller's. False,
  // and nothing added: it does not lie within the shape. The numbers may come from anywhere.
  // `begin` and `extent` have one number per axis of the shape.
  bool AddBox(const std::int64_t* begin, const std::int64_t* extent, std::uint32_t owner);
  // Elements [first, first + count) of the row-major order of the box; false also where these do
  // not lie within the box.
  bool AddFlat(const std::int64_t* begin, const std::int64_t* extent, std::int64_t first,
               std::int64_t count, std::uint32_t owner);
  // False also where the ranks differ.
  bool Add(const Region& region, std::uint32_t owner);

  const Dims& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  std::size_t size() const { return owners_.size(); }
  bool empty() const { return owners_.empty(); }
  // First index on each axis and the one behind the last, of the box or around the flat range.
  const std::int64_t* low(std::size_t i) const { return bounds_.data() + i * stride_; }
  const std::int64_t* high(std::size_t i) const { return low(i) + shape_.rank(); }
  std::uint32_t owner(std::size_t i) const { return owners_[i]; }
  bool is_flat(std::size_t i) const { return !flats_.empty() && flats_[i].count != 0; }
  bool has_flats() const { return !flats_.empty(); }  // That there may be some.
  // Of a flat range: where it begins in the row-major order of [low, high), and its elements.
  std::int64_t flat_first(std::size_t i) const { return flats_[i].first; }
  std::int64_t flat_count(std::size_t i) const { return flats_[i].count; }
  std::int64_t volume(std::size_t i) const;
  Region At(std::size_t i) const;

  // Appends region `i` of another set of the same shape.
  void AddFrom(const RegionSet& other, std::size_t i, std::uint32_t owner);

 private:
  // Kept apart from bounds_, because most tensors of most jobs have none: then there is no such
  // array at all, and is_flat costs a look at its size.
  struct Flat {
    std::int64_t first = 0;
    std::int64_t count = 0;  // 0: a box.
  };

  bool Within(const std::int64_t* begin, const std::int64_t* extent, bool* empty) const;

  Dims shape_;
  std::size_t stride_ = 0;            // 2 * rank.
  std::vector<std::int64_t> bounds_;  // Of each region its lows, then its highs.
  std::vector<std::uint32_t> owners_;
  std::vector<Flat> flats_;  // As long as the others, or empty while all are boxes.
};

// The distinct regions of `all`, in the order of their first appearance, into `distinct`, where the
// owner of a region is its position; gives that position for each region of `all`. Expected linear
// time; regions that come in turns (rank order) are grouped without hashing.
std::vector<std::uint32_t> GroupEqual(const RegionSet& all, RegionSet* distinct);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_REGION_SET_H_
