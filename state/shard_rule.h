// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_SHARD_RULE_H_
#define TENSORMOUNT_STATE_SHARD_RULE_H_

#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

#include "base/file_system.h"

namespace tensormount {

// The piece number `index[a]` of `parts[a]` along each of the first axes of a tensor; the axes
// behind are whole. Cuts are ceil-sized like torch.chunk's and may leave the last pieces empty;
// they fall on whole bytes. kInvalidArgument where there are more cuts than axes, or an index is
// not below its parts.
Result<Box> CutBox(DType dtype, const Dims& shape, const Dims& parts, const Dims& index);
// Piece `index` of `parts` of the row-major order of a box of a tensor.
Result<Region> CutFlat(DType dtype, const Box& box, std::int64_t parts, std::int64_t index);

// How rules cut tensors over ranks (--shard, specs of jobs): `dim:K` (`rows` = dim:0, `cols` =
// dim:1), `grid:2x4`, `flat`, `replicate`, or a JSON file of [{"match": GLOB, "shard": RULE}, ...],
// first match wins and `rows` is the default. Splits are ceil-sized like torch.chunk and may leave
// the last ranks empty; a tensor without that axis, or with fewer axes than the grid, is
// replicated.
class ShardRule {
 public:
  // A rule for all tensors. kInvalidArgument says what was not understood; a grid whose product is
  // not `ranks` too.
  static Result<ShardRule> Parse(const std::string& text, int ranks);
  // Also the name of a JSON file.
  static Result<ShardRule> ParseOrRead(FileSystem& fs, const std::string& text, int ranks);

  // Whether the rule of this key cuts a tensor of that many axes, or replicates it.
  bool Cuts(std::string_view key, int axes) const;
  // What `rank` holds of a tensor; may be empty. Types under a byte are cut on whole bytes.
  Result<Region> RegionOf(std::string_view key, DType dtype, const Dims& shape, int rank) const;

 private:
  struct Rule {
    enum class Kind { kDim, kGrid, kFlat, kReplicate } kind = Kind::kDim;
    int axis = 0;
    Dims grid;
  };
  struct Matcher {
    std::string glob;
    Rule rule;
  };
  // That of the first glob which matches; null: none does.
  const Rule* RuleOf(std::string_view key) const;
  static Result<Rule> ParseRule(std::string_view text, int ranks);
  static Result<Region> Cut(const Rule& rule, DType dtype, const Dims& shape, int rank, int ranks);

  std::vector<Matcher> matchers_;
  int ranks_ = 1;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_SHARD_RULE_H_
