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

// What ranks tell each other about what should be the same on all that set it: common values,
// content metadata, names of layers. Pure.
//
// Values are compared as CommonValue does: floats by their bits, 1 is not 1.0. What a rank did not
// set is no mismatch; a value that only some ranks have is stored all the same.

namespace tensormount {

// Of one rank.
struct RankCommon {
  int rank = 0;
  std::map<std::string, CommonValue> values;  // As they are stored, names of layers included.
};
// Stacked key → pattern, of what is stored so.
std::map<std::string, std::string> LayersOf(const std::map<std::string, CommonValue>& values);
RankCommon CommonOf(const StateDict& state, int rank);
std::string EncodeRankCommon(const RankCommon& common);
// kDataLoss "common values of rank N: ...".
Result<RankCommon> DecodeRankCommon(std::string_view bytes, int rank);

// How they are compared: whether what differs is a finding, a warning or nothing, and globs of the
// names that may differ (a rank's own seed). What `exempt` views must outlive the rules.
struct CommonRules {
  CommonCheck check = CommonCheck::kError;
  std::span<const std::string> exempt;
};
// Equal where nothing that counts differs and the same names are set.
std::uint64_t FingerprintOf(const RankCommon& common, const CommonRules& rules);

// What all have set, the lowest rank's where values differ, and where they do.
struct CommonUnion {
  RankCommon all;                     // Its `rank` says nothing.
  std::vector<Finding> findings;      // With kError; by key.
  std::vector<std::string> warnings;  // With kWarn.
};
CommonUnion Unite(std::span<const RankCommon> ranks, const CommonRules& rules);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_COMMON_EXCHANGE_H_
