// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_COMMON_COMPARE_H_
#define TENSORMOUNT_STATE_COMMON_COMPARE_H_

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tensormount/common_value.h"

#include "base/hash.h"

// Whether ranks hold the same common state. Pure functions.
//
// What may differ is told by globs (fnmatch, '*' crosses everything) of paths: the name of a common
// value as it is, then as CommonValue::At has it: "rng*", "args.rank", "args.groups*.seed". What a
// glob names is left out with all that is below it, as if it were not there.

namespace tensormount {

using CommonGlobs = std::span<const std::string>;

bool IsExempt(CommonGlobs exempt, std::string_view path);

// Of one common value: equal where nothing that counts differs. nullopt: all of it is exempt.
std::optional<Hash128> CommonHash(std::string_view name, const CommonValue& value,
                                  CommonGlobs exempt);

// The first difference, in the order of names, of what both ranks have set:
//   "common value args.lr: 0.1 on rank 0 and 0.2 on rank 3"
//   "common value args.fp8: only on rank 3"
// nullopt where there is none.
std::optional<std::string> FirstCommonDifference(const std::map<std::string, CommonValue>& a,
                                                 int rank_a,
                                                 const std::map<std::string, CommonValue>& b,
                                                 int rank_b, CommonGlobs exempt);

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_COMMON_COMPARE_H_
