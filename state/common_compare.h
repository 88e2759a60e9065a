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

// Compares the common values of ranks. Pure functions.
//
// Exempt values are given by globs (fnmatch, '*' matches any characters) of paths: the name of a
// common value, then as in CommonValue::At: "rng*", "args.rank", "args.groups*.seed". A matched
// value is ignored with everything below it, as if it did not exist. Layer names are never exempt,
// nor are single items of lists and tuples ("args.list[0]").

namespace tensormount {

using CommonGlobs = std::span<const std::string>;

bool IsExempt(CommonGlobs exempt, std::string_view path);

// Hash of one common value without its exempt parts. nullopt: the whole value is exempt.
std::optional<Hash128> CommonHash(std::string_view name, const CommonValue& value,
                                  CommonGlobs exempt);

// The first difference, in the order of names, between values that both ranks set:
//   "common value args.lr: 0.1 on rank 0 and 0.2 on rank 3"
//   "common value args.fp8: only on rank 3"
// nullopt if there is no difference.
std::optional<std::string> FirstCommonDifference(const std::map<std::string, CommonValue>& a,
                                                 int rank_a,
                                                 const std::map<std::string, CommonValue>& b,
                                                 int rank_b, CommonGlobs exempt);

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_COMMON_COMPARE_H_
