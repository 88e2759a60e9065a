// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_VALUE_GUARD_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_VALUE_GUARD_H_

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/hash.h"
#include "index/records/inventory.h"
#include "index/records/leaf_section.h"

namespace tensormount {

// ErrorFields::cause of a save that Nonfinite::kRefuse ended.
inline constexpr std::string_view kNotFinite = "values that are not finite";

// NaNs and infinities among the values that one rank saves (SaveOptions::nonfinite).
class NonfiniteFindings {
 public:
  // Adds what the value counts of a manifest of the rank show. `exempt`: globs of keys that are not
  // looked at.
  Status Add(const Inventory& inventory, std::span<const Hash128> leaves, LeafExtras extras,
             const std::vector<std::string>& exempt);

  bool any() const { return chunks_ > 0; }
  // "tensor w: 3 NaN and 1 infinite among the 4096 values of [0:64, 0:64] of [128, 64]", for the
  // first few chunks, with the number of others.
  std::string ToText() const;
  // kInvalidArgument with that text and the first key; ok if nothing was found.
  Status ToStatus() const;

 private:
  static constexpr std::size_t kMostListed = 4;
  std::vector<std::string> listed_;
  std::string first_key_;
  std::size_t chunks_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_VALUE_GUARD_H_
