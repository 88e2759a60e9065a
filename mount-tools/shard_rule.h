// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_SHARD_RULE_H_
#define TENSORMOUNT_MOUNT_TOOLS_SHARD_RULE_H_

#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

#include "base/file_system.h"

namespace tensormount::tools {

// How --shard cuts tensors over ranks: `dim:K` (`rows` = dim:0, `cols` = dim:1), `grid:2x4`,
// `flat`, `replicate`, or a JSON file of [{"match": GLOB, "shard": RULE}, ...], first match wins
// and `rows` is the default. Splits are ceil-sized like torch.chunk and may leave the last ranks
// empty; a tensor without that axis, or with fewer axes than the grid, is replicated.
class ShardRule {
 public:
  // kInvalidArgument says what was not understood; a grid whose product is not `ranks` too.
  static Result<ShardRule> Parse(FileSystem& fs, const std::string& text, int ranks);

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
  static Result<Rule> ParseRule(std::string_view text, int ranks);
  static Result<Region> Cut(const Rule& rule, DType dtype, const Dims& shape, int rank, int ranks);

  std::vector<Matcher> matchers_;
  int ranks_ = 1;
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_SHARD_RULE_H_
