// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_SHARD_RULE_H_
#define TENSORMOUNT_STATE_SHARD_RULE_H_

#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

namespace tensormount {

// The box that is piece `index[a]` of `parts[a]` pieces along each axis a of `parts`; further axes
// of the tensor are whole. Pieces are ceil-sized like torch.chunk's, the last ones may be empty,
// and cuts fall on whole bytes. kInvalidArgument if `parts` has more axes than the tensor, or an
// index is not below its parts.
Result<Box> CutBox(DType dtype, const Dims& shape, const Dims& parts, const Dims& index);
// Piece `index` of `parts` pieces of the row-major order of a box of a tensor.
Result<Region> CutFlat(DType dtype, const Box& box, std::int64_t parts, std::int64_t index);

// How rules cut tensors over ranks (--shard, job specs): `dim:K` (`rows` = dim:0, `cols` = dim:1),
// `grid:2x4`, `flat`, `replicate`, or a JSON file of [{"match": GLOB, "shard": RULE}, ...], of
// which the first match applies (default: `rows`). Splits are ceil-sized like torch.chunk and may
// leave the last ranks empty; a tensor without axis K, or with fewer axes than the grid, is
// replicated.
class ShardRule {
 public:
  // A rule for all tensors. kInvalidArgument if `text` is no rule, or the product of a grid is not
  // `ranks`.
  static Result<ShardRule> Parse(const std::string& text, int ranks);
  // Like Parse; `text` may also be the name of a JSON file, which must end in ".json".
  static Result<ShardRule> ParseOrRead(const std::string& text, int ranks);

  // Whether the rule for `key` cuts a tensor of `axes` axes; false: the rule replicates the tensor.
  bool Cuts(std::string_view key, int axes) const;
  // The region of a tensor that `rank` holds; may be empty. Sub-byte types are cut on whole bytes.
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
  // The rule of the first matching glob; null: none matches.
  const Rule* RuleOf(std::string_view key) const;
  static Result<Rule> ParseRule(std::string_view text, int ranks);
  static Result<Region> Cut(const Rule& rule, DType dtype, const Dims& shape, int rank, int ranks);

  std::vector<Matcher> matchers_;
  int ranks_ = 1;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_SHARD_RULE_H_
