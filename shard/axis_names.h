// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_AXIS_NAMES_H_
#define TENSORMOUNT_SHARD_AXIS_NAMES_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

namespace tensormount {

// The sizes of named axes.
using AxisSizes = std::map<std::string, std::int64_t, std::less<>>;

// The part of a tensor that is left if one summand is taken of every sum in its axes: a product of
// named axes. The cell with the indices i, j, … of these names is, on each axis of the tensor, at
// `begin` plus the sum of index * step over the digits of that axis.
struct AxisTerm {
  struct Digit {
    std::string name;
    std::int64_t size = 0;
    std::int64_t step = 0;  // In cells of `axis`.
    int axis = 0;
  };
  std::vector<Digit> digits;  // Axis by axis, the slowest digit of an axis first.
  Dims begin;                 // One for each axis of the tensor.
};

// Names for the axes of a tensor, written like in einops, with sums for concatenation:
//
//   "l d"                     two axes
//   "(h i j) d"               the first axis has h * i * j cells; j varies fastest
//   "(gate + up) d"           the first axis has `gate` cells, then `up` cells
//   "l (g (q + k + v) h) d"   for each g: q * h rows, k * h rows, v * h rows
//   "e 1 d"                   the second axis has one cell
//   ""                        a scalar
//
// A rule of a name map (docs/mapping.md) has such names on both sides; equal names are equal
// indices. A value type; immutable.
class AxisNames {
 public:
  // Limits of one text. They bound the work for a hostile rule.
  static constexpr int kMaxDepth = 8;
  static constexpr std::size_t kMaxNames = 64;
  static constexpr std::size_t kMaxTerms = 256;

  struct Node {
    enum class Kind { kName, kOne, kProduct, kSum } kind = Kind::kName;
    std::string name;         // For kName.
    std::vector<Node> parts;  // For kProduct and kSum: at least two.
  };

  AxisNames() = default;  // The axes of a scalar.
  // kInvalidArgument names the byte of the first error: an unclosed parenthesis, a character that
  // no name has, an axis that is empty, more axes than kMaxRank, a limit above.
  static Result<AxisNames> Parse(std::string_view text);
  // Whether `name` may be the name of an axis: letters, digits and '_', not beginning with a digit.
  static bool IsName(std::string_view name);

  int rank() const { return static_cast<int>(axes_.size()); }
  const std::set<std::string>& names() const { return names_; }
  // The text in its shortest form.
  std::string ToString() const;

  // Learns sizes from the extents of a tensor with these axes: an axis with one unknown name gives
  // it, also if the name is in several summands, "(gate f + up f)". Call it again with more sizes
  // until `sizes` no longer grows. kInvalidArgument: another number of axes, or an extent that does
  // not fit the sizes that are known; the message names the axis and these sizes.
  Status LearnSizes(const Dims& shape, AxisSizes& sizes) const;
  // The extents if all names have these sizes. kInvalidArgument: a name without a size (its name is
  // in the message), a negative size, or more cells than 63 bits can count.
  Result<Dims> ShapeOf(const AxisSizes& sizes) const;

  // All terms, in order of the text; terms without cells are left out. kInvalidArgument: an error
  // of ShapeOf, a name twice in one term (a diagonal), more than kMaxTerms.
  Result<std::vector<AxisTerm>> Terms(const AxisSizes& sizes) const;

 private:
  std::vector<Node> axes_;
  std::set<std::string> names_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_AXIS_NAMES_H_
