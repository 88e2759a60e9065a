// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_CELL_MAP_H_
#define TENSORMOUNT_SHARD_CELL_MAP_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "shard/axis_names.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// The cells of a tensor that belong to one term of a rule, as an affine map from the indices of the
// term's names to the coordinates of the tensor. Names are numbers here (CellTerm::extents). Every
// name is either a digit of one axis, or its index is part of the tensor's key.
struct TermSide {
  struct Digit {
    int name = 0;
    int axis = 0;
    std::int64_t size = 0;
    std::int64_t step = 0;  // In cells of `axis`; 1 or more.
  };
  std::vector<Digit> digits;  // Axis by axis, the slowest digit of an axis first.
  std::vector<int> in_key;    // Names whose index is in the tensor's key.
  Dims begin;                 // The first cell on each axis.

  // Appends the parts of `native`, a placed box of the tensor's bytes, that belong to the term: as
  // disjoint boxes over the names and the byte of an element, at the same bytes. `key` has the
  // index of each name in `in_key`; `names` is the number of names. On an axis with k digits a box
  // becomes at most 2k - 1 boxes.
  void Fold(const PlacedBox& native, std::span<const std::int64_t> key, int names,
            std::vector<PlacedBox>& out) const;
  // The smallest box of the tensor's bytes that contains a box over the names and the byte of an
  // element.
  Box Unfold(const Box& box) const;
  // Appends boxes of the tensor's bytes that hold `folded`, a placed box over the names and the
  // byte of an element, at the same bytes: the reverse of Fold. Digits that do not follow each
  // other in memory are cut into single cells. kResourceExhausted: more than kMaxPlaced boxes in
  // `out`.
  static constexpr std::size_t kMaxPlaced = std::size_t{1} << 20;
  Status Place(const PlacedBox& folded, std::vector<PlacedBox>& out) const;
};

// One term of a rule: which cells of a stored tensor are which cells of a mapped tensor. Both sides
// number the names alike. A value type; immutable.
struct CellTerm {
  Dims extents;  // Of the names; at most kMaxRank of them.
  TermSide to;
  // Which of the rule's sources has the cells. Without a source the cells of the mapped tensor are
  // zeros.
  std::uint32_t source = 0;
  std::optional<TermSide> from;

  // Names that are neighbours on both sides become one, so that a box is cut into fewer boxes.
  // `to_key`, `from_key`: the names whose index is in the key on that side. `from` may be null.
  // kUnsupported: more than kMaxRank names are left.
  static Result<CellTerm> Make(const AxisTerm& to, std::span<const std::string> to_key,
                               const AxisTerm* from, std::span<const std::string> from_key,
                               std::uint32_t source, const AxisSizes& sizes);

  // Whether each cell of the mapped tensor is the cell with the same coordinates of the stored one.
  bool IsIdentity() const;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_CELL_MAP_H_
