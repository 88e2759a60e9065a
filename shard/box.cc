// SPDX-License-Identifier: Apache-2.0
// Dims and Box of the public API. Dims store up to five axes in the object and more on the heap,
// because plans hold millions of them, and almost all tensors have few axes.
//
// Untrusted extents and products are checked here once (Box::Make, CheckedProduct); later code uses
// plain operators.
#include "tensormount/box.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <string>
#include <utility>

#include "base/checked.h"
#include "shard/box_access.h"

namespace tensormount {

Dims::Dims(std::initializer_list<std::int64_t> v) {
  for (const std::int64_t x : v) push_back(x);
}

Dims::Dims(std::span<const std::int64_t> v) {
  for (const std::int64_t x : v) push_back(x);
}

Dims Dims::Filled(int rank, std::int64_t value) {
  Dims d;
  for (int a = 0; a < rank; ++a) d.push_back(value);
  return d;
}

// The sixth value (kInline is 5) moves all values to the heap, with room for kMaxAxes, so that they
// move only once.
void Dims::Grow(std::int64_t v) {
  assert(rank_ < kMaxAxes);
  if (rank_ == kMaxAxes) return;
  if (rank_ == kInline) {
    auto* values = new std::int64_t[kMaxAxes]{};
    std::copy_n(v_.here, kInline, values);
    v_.heap = values;
  }
  ++rank_;
  data()[rank_ - 1] = v;
}

std::int64_t* Dims::CopyOf(const std::int64_t* values) {
  auto* copy = new std::int64_t[kMaxAxes];
  std::copy_n(values, kMaxAxes, copy);
  return copy;
}

bool operator==(const Dims& a, const Dims& b) {
  return a.rank_ == b.rank_ && std::equal(a.begin(), a.end(), b.begin());
}

std::string Dims::ToString() const {
  std::string s = "[";
  for (int a = 0; a < rank_; ++a) {
    if (a > 0) s += ", ";
    s += std::to_string((*this)[a]);
  }
  return s + "]";
}

std::optional<std::int64_t> CheckedProduct(const Dims& extents) {
  // Zeros first: [2^40, 2^40, 0] has no elements, but multiplying from the left would overflow.
  std::int64_t product = 1;
  for (const std::int64_t e : extents) {
    if (e < 0) return std::nullopt;
    if (e == 0) product = 0;
  }
  if (product == 0) return 0;
  for (const std::int64_t e : extents) {
    if (__builtin_mul_overflow(product, e, &product)) return std::nullopt;
  }
  return product;
}

Dims PackedStrides(const Dims& extents) {
  Dims strides = Dims::Filled(extents.rank(), 1);
  std::int64_t step = 1;
  for (int a = extents.rank() - 1; a >= 0; --a) {
    strides[a] = step;
    // The shape may be unchecked and overflow; callers check the shape before they use the strides.
    if (__builtin_mul_overflow(step, std::max<std::int64_t>(extents[a], 1), &step)) {
      step = std::numeric_limits<std::int64_t>::max();
    }
  }
  return strides;
}

Result<Box> Box::Make(const Dims& begin, const Dims& extent) {
  if (begin.rank() != extent.rank()) {
    return Status(Code::kInvalidArgument, "box at " + begin.ToString() + " of extents " +
                                              extent.ToString() +
                                              ": they have different numbers of axes");
  }
  const auto bad = [&](const char* why) {
    return Status(Code::kInvalidArgument,
                  "box at " + begin.ToString() + " of extents " + extent.ToString() + ": " + why);
  };
  for (int a = 0; a < begin.rank(); ++a) {
    if (begin[a] < 0 || extent[a] < 0) return bad("negative begin or extent");
    if (!CheckedAdd(begin[a], extent[a])) return bad("ends past 2^63 - 1");
  }
  if (!CheckedProduct(extent)) return bad("more than 2^63 - 1 elements");
  return Box(begin, extent);
}

Box Box::Whole(const Dims& shape) { return Box(Dims::Filled(shape.rank(), 0), shape); }

// Zeros first, as in CheckedProduct: for a checked box only the product of all extents is known to
// fit, and a partial product may overflow.
std::int64_t Box::volume() const {
  std::int64_t v = 1;
  for (const std::int64_t e : extent_) {
    if (e == 0) return 0;
  }
  for (const std::int64_t e : extent_) v *= e;
  return v;
}

bool Box::Within(const Dims& shape) const {
  if (rank() != shape.rank()) return false;
  for (int a = 0; a < rank(); ++a) {
    if (begin_[a] < 0 || end(a) > shape[a]) return false;
  }
  return true;
}

bool Box::Contains(const Box& inner) const {
  if (rank() != inner.rank()) return false;
  for (int a = 0; a < rank(); ++a) {
    if (inner.begin(a) < begin(a) || inner.end(a) > end(a)) return false;
  }
  return true;
}

std::string Box::ToString() const {
  std::string s = "[";
  for (int a = 0; a < rank(); ++a) {
    if (a > 0) s += ", ";
    s += std::to_string(begin(a)) + ":" + std::to_string(end(a));
  }
  return s + "]";
}

// On an axis on which the boxes do not meet the result has extent zero, so that it is an empty box.
Box Intersect(const Box& a, const Box& b) {
  assert(a.rank() == b.rank());
  const int rank = std::min(a.rank(), b.rank());
  Dims begin = Dims::Filled(rank, 0);
  Dims extent = begin;
  for (int i = 0; i < rank; ++i) {
    begin[i] = std::max(a.begin(i), b.begin(i));
    extent[i] = std::max<std::int64_t>(0, std::min(a.end(i), b.end(i)) - begin[i]);
  }
  return BoxAccess::Make(begin, extent);
}

void SubtractBox(std::vector<Box>& boxes, const Box& cut) {
  std::vector<Box> left;
  left.reserve(boxes.size());
  for (const Box& box : boxes) {
    const Box common = Intersect(box, cut);
    if (common.empty()) {
      left.push_back(box);
      continue;
    }
    // The part of `box` not yet in `left`: on the axes already processed it is as narrow as
    // `common`.
    Box rest = box;
    for (int a = 0; a < box.rank(); ++a) {
      const std::int64_t low = rest.begin(a);
      if (common.begin(a) > low) {
        left.push_back(BoxAccess::WithAxis(rest, a, low, common.begin(a) - low));
      }
      if (common.end(a) < rest.end(a)) {
        left.push_back(BoxAccess::WithAxis(rest, a, common.end(a), rest.end(a) - common.end(a)));
      }
      rest = BoxAccess::WithAxis(rest, a, common.begin(a), common.extent(a));
    }
  }
  boxes = std::move(left);
}

}  // namespace tensormount
