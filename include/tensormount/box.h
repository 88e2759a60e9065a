// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BOX_H_
#define TENSORMOUNT_BOX_H_

#include <cassert>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Largest number of axes of a tensor; part of the disk format.
inline constexpr int kMaxRank = 16;
// Largest number of axes inside the library, where the bytes of an element are one more axis.
inline constexpr int kMaxAxes = kMaxRank + 1;

class Dims;
TENSORMOUNT_EXPORT bool operator==(const Dims& a, const Dims& b);

// Extents, coordinates or strides, one per axis. Up to kInline values are stored in the object,
// because a rank keeps such objects for 10^6 tensors. A value type; copying more than kInline
// values may throw std::bad_alloc.
class TENSORMOUNT_EXPORT Dims {
 public:
  Dims() = default;  // No axes.
  // `v` has at most kMaxAxes values; more is a programming error, because external data are checked
  // before.
  Dims(std::initializer_list<std::int64_t> v);  // NOLINT
  explicit Dims(std::span<const std::int64_t> v);
  static Dims Filled(int rank, std::int64_t value);
  Dims(const Dims& other) : rank_(other.rank_), v_(other.v_) {
    if (!is_inline()) v_.heap = CopyOf(other.v_.heap);
  }
  Dims(Dims&& other) noexcept : rank_(std::exchange(other.rank_, 0)), v_(other.v_) {}
  Dims& operator=(const Dims& other) {
    Dims copy(other);
    return *this = std::move(copy);
  }
  Dims& operator=(Dims&& other) noexcept {
    std::swap(rank_, other.rank_);
    std::swap(v_, other.v_);
    return *this;
  }
  ~Dims() {
    if (!is_inline()) delete[] v_.heap;
  }

  int rank() const { return rank_; }
  std::int64_t operator[](int axis) const {
    assert(axis >= 0 && axis < rank_);
    return data()[axis];
  }
  std::int64_t& operator[](int axis) {
    assert(axis >= 0 && axis < rank_);
    return data()[axis];
  }
  void push_back(std::int64_t v) {
    if (rank_ < kInline) {
      v_.here[rank_++] = v;
    } else {
      Grow(v);
    }
  }
  std::span<const std::int64_t> span() const { return {data(), static_cast<std::size_t>(rank_)}; }
  const std::int64_t* begin() const { return data(); }
  const std::int64_t* end() const { return data() + rank_; }
  friend bool operator==(const Dims& a, const Dims& b);
  std::string ToString() const;  // Text such as "[2, 3]".

 private:
  static constexpr int kInline = 5;  // Enough for a convolution weight and the bytes of an element.
  // The values: up to kInline in `here`; more in `heap`, which has room for kMaxAxes.
  union Values {
    std::int64_t here[kInline];
    std::int64_t* heap;
  };

  static std::int64_t* CopyOf(const std::int64_t* values);  // Copies kMaxAxes values.
  void Grow(std::int64_t v);  // push_back, if the values in the object are kInline or more.
  bool is_inline() const { return rank_ <= kInline; }
  const std::int64_t* data() const { return is_inline() ? v_.here : v_.heap; }
  std::int64_t* data() { return is_inline() ? v_.here : v_.heap; }

  int rank_ = 0;
  Values v_{};
};

// The product of the extents; nullopt if one is negative or the product exceeds 2^63 - 1.
TENSORMOUNT_EXPORT std::optional<std::int64_t> CheckedProduct(const Dims& extents);

// A hyperrectangle of elements: begin and extent per axis, in elements and in coordinates of the
// whole tensor. For example, the second half of an [8, 4] tensor is begin [4, 0], extent [4, 4].
// A box without axes is one element; extents of zero are valid. A value type.
class TENSORMOUNT_EXPORT Box {
 public:
  Box() = default;  // The one element of a scalar.
  // kInvalidArgument: `begin` and `extent` have different numbers of axes; a number is negative;
  // begin + extent or the volume exceeds 2^63 - 1.
  static Result<Box> Make(const Dims& begin, const Dims& extent);
  // The box of a whole tensor, whose `shape` must have been checked.
  static Box Whole(const Dims& shape);

  int rank() const { return begin_.rank(); }
  // Begin, extent and end of the box on one axis; `axis` must be in [0, rank()).
  std::int64_t begin(int axis) const { return begin_[axis]; }
  std::int64_t extent(int axis) const { return extent_[axis]; }
  std::int64_t end(int axis) const { return begin_[axis] + extent_[axis]; }
  const Dims& begin() const { return begin_; }
  const Dims& extent() const { return extent_; }
  std::int64_t volume() const;  // Number of elements.
  bool empty() const { return volume() == 0; }
  // Whether the box lies within a tensor of shape `shape`.
  bool Within(const Dims& shape) const;
  bool Contains(const Box& inner) const;

  friend bool operator==(const Box& a, const Box& b) = default;
  // NumPy's spelling: "[0:4, 128:256]"; "[]" for a scalar.
  std::string ToString() const;

 private:
  friend class BoxAccess;  // Unchecked construction inside the library.
  Box(const Dims& begin, const Dims& extent) : begin_(begin), extent_(extent) {}
  Dims begin_;
  Dims extent_;
};

// The intersection; an empty box if the boxes have no element in common. Both must have the same
// number of axes.
TENSORMOUNT_EXPORT Box Intersect(const Box& a, const Box& b);

class Region;
TENSORMOUNT_EXPORT bool operator==(const Region& a, const Region& b);

// The part of a global tensor that one rank holds: a box, or a flat range of the row-major order of
// a box (ZeRO and FSDP cut tensors into such ranges). Canonical: a flat range that is itself a box
// (whole rows, part of one row, or everything) is stored as that box, so equal cells compare equal.
class TENSORMOUNT_EXPORT Region {
 public:
  Region() = default;      // The one element of a scalar.
  Region(const Box& box);  // NOLINT(google-explicit-constructor)
  // Elements [first, first + count) of the row-major order of `of`.
  // kInvalidArgument: the range does not lie within the box.
  // Example: Flat([0:4, 0:8], 5, 12) is elements 5 to 16 of these 32, parts of three rows;
  // Flat([0:4, 0:8], 8, 16) is whole rows, and so equal to the box [1:3, 0:8].
  static Result<Region> Flat(const Box& of, std::int64_t first, std::int64_t count);

  bool is_flat() const { return flat_; }
  // The box itself, or the smallest box around a flat range, in whose row-major order it counts.
  const Box& box() const { return box_; }
  std::int64_t flat_first() const { return first_; }  // Start of the flat range; 0 for a box.
  std::int64_t volume() const { return flat_ ? count_ : box_.volume(); }
  bool empty() const { return volume() == 0; }
  bool Within(const Dims& shape) const { return box_.Within(shape); }

  friend bool operator==(const Region& a, const Region& b);
  // Text such as "[0:4, 0:8]" for a box, "[0:3, 0:8] flat 5:17" for a flat range.
  std::string ToString() const;

  // The disjoint boxes that make up a region, in row-major order: one for a box, at most 2 *
  // (number of axes) - 1 for a flat range, none if empty. The elements of these boxes, one box
  // after the other, are the elements of the region in order.
  std::vector<Box> Boxes() const;

 private:
  Box box_;
  std::int64_t first_ = 0;
  std::int64_t count_ = 0;
  bool flat_ = false;
};

// A part of a tensor, and the shape in which it is returned.
struct Slice {
  Box box;
  Dims kept;  // Extents of the result, without axes at which a single index was given.
};
// Parses NumPy basic indexing with step 1, as in `cat KEY[0:4096, :, 7]`: `text` is the part
// between the brackets. An integer selects one index and drops that axis from Slice::kept. Trailing
// axes that `text` leaves out are taken whole; negative numbers count from the end; an index out of
// range is kInvalidArgument, not clipped.
// Example: "0:4, :, 7" of shape [8, 16, 32] is the box [0:4, 0:16, 7:8], and `kept` is [4, 16].
TENSORMOUNT_EXPORT Result<Slice> ParseSlice(std::string_view text, const Dims& shape);

}  // namespace tensormount

#endif  // TENSORMOUNT_BOX_H_
