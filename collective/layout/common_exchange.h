// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_COMMON_EXCHANGE_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_COMMON_EXCHANGE_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/common_value.h"
#include "tensormount/save.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/validate.h"

// Exchange and comparison of common values, content metadata and layer names, which should be equal
// on all ranks that set them. All functions are pure.
//
// Values are compared as CommonValue does: floats by their bits, and 1 is not 1.0. A value that
// only some ranks set is stored without an error.

namespace tensormount {

// The common values of one rank.
struct RankCommon {
  int rank = 0;
  std::map<std::string, CommonValue> values;  // In stored form, including layer names.
};
// Returns the layer names among stored values: for each key of a stacked tensor the pattern of its
// layers' names.
std::map<std::string, std::string> LayersOf(const std::map<std::string, CommonValue>& values);
RankCommon CommonOf(const StateDict& state, int rank);
std::string EncodeRankCommon(const RankCommon& common);
// Reads what EncodeRankCommon wrote. Malformed bytes fail with kDataLoss "common values of rank N:
// ...".
Result<RankCommon> DecodeRankCommon(std::string_view bytes, int rank);

// Whether differing values are an error, a warning or ignored, and globs of the names whose values
// may differ (such as a rank's own seed). The strings of `exempt` must outlive the rules.
struct CommonRules {
  CommonCheck check = CommonCheck::kError;
  std::span<const std::string> exempt;
};
// Hash of a rank's common values. Equal on two ranks if both set the same names and no value that
// the rules compare differs.
std::uint64_t FingerprintOf(const RankCommon& common, const CommonRules& rules);

// All values that any rank set, and the differences between ranks. If ranks have different values,
// the lowest rank's is kept.
struct CommonUnion {
  RankCommon all;  // The field `rank` is unused.
  // Sorted by key. Unless `check` is kError, only differing layer names are findings.
  std::vector<Finding> findings;
  std::vector<std::string> warnings;  // With kWarn: other differing values.
};
CommonUnion MergeCommon(std::span<const RankCommon> ranks, const CommonRules& rules);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_COMMON_EXCHANGE_H_
