// SPDX-License-Identifier: Apache-2.0
// Looks for NaNs and infinities in the value counts of what a rank has written or linked, before
// the ranks vote on the save.
#include "collective/save/value_guard.h"

#include <algorithm>

#include "base/counted.h"
#include "base/glob.h"

namespace tensormount {

Status NonfiniteFindings::Add(const Inventory& inventory, std::span<const Hash128> leaves,
                              LeafExtras extras, const std::vector<std::string>& exempt) {
  for (const TensorRecord& tensor : inventory.tensors) {
    const std::string& key = tensor.meta.key();
    if (std::ranges::any_of(exempt, [&](const auto& glob) { return GlobMatches(glob, key); })) {
      continue;
    }
    for (std::size_t i = 0; i < tensor.extents.size(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, tensor.extents.At(i));
      const std::optional<ValueCounts> counts =
          CountsOfChunk(leaves, extras, tensor.meta, chunk.first_leaf, chunk.length, chunk.hash);
      if (!counts || counts->nonfinite() == 0) continue;
      if (first_key_.empty()) first_key_ = key;
      if (++chunks_ > kMostListed) continue;
      const std::uint64_t values =
          ValuesIn(tensor.meta.dtype(), static_cast<std::uint64_t>(chunk.region.volume()));
      listed_.push_back("tensor " + key + ": " + DescribeNonfinite(*counts) + " among the " +
                        std::to_string(values) + " values of " + chunk.region.ToString());
    }
  }
  return Status();
}

std::string NonfiniteFindings::ToText() const {
  std::string text;
  for (const std::string& one : listed_) text += (text.empty() ? "" : "; ") + one;
  if (chunks_ > listed_.size()) {
    text += "; and " + Counted(chunks_ - listed_.size(), "more chunk");
  }
  return text;
}

Status NonfiniteFindings::ToStatus() const {
  if (!any()) return Status();
  return Status(Code::kInvalidArgument, ToText() + "; nothing was saved (nonfinite is refuse)")
      .With({.key = first_key_, .cause = std::string(kNotFinite)});
}

}  // namespace tensormount
