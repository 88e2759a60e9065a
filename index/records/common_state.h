// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_COMMON_STATE_H_
#define TENSORMOUNT_INDEX_RECORDS_COMMON_STATE_H_

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

#include "shard/tensor_meta.h"

// The common state of a checkpoint, stored as one record for each common value. Names that begin
// with '$' are reserved (docs/format.md, "Common state").

namespace tensormount {

// Common values by name. Sorted, so that ranks encode and compare equal states alike.
using CommonValues = std::map<std::string, CommonValue>;

// Reserved record names. Old readers skip unknown reserved names, so a new name needs no new format
// version.
inline constexpr std::string_view kContentMetadataRecord = "$content";
inline constexpr std::string_view kRankRecordPrefix = "$rank.";

// Longest name of a common record. A reserved name may be a prefix followed by a key.
inline constexpr std::size_t kMaxCommonRecordName = kMaxKeyBytes + 64;

// The record name of a rank's values: "$rank.3" for rank 3. Decimal without leading zeros, so that
// each rank has exactly one name. `rank` is not negative.
std::string RankRecordName(int rank);

inline bool IsReservedCommonName(std::string_view name) { return name.starts_with('$'); }
// Checks the name of an application's common value. kInvalidArgument unless the name is a valid key
// (CheckKey) that is not reserved.
Status CheckCommonName(std::string_view name);

// The values of one rank as one dict. In this form they are sent and stored; ValuesOf converts them
// back.
CommonValue DictOf(const CommonValues& values);
// Converts a dict to common values. kDataLoss unless `value` is a dict with only string keys.
// `what` begins the message.
Result<CommonValues> ValuesOf(CommonValue value, std::string_view what);

// The common records of a checkpoint, sorted by kind. Copies are deep (trees of up to 64 MiB each).
// CheckpointIndex::CommonRecord reads a single value.
struct CommonState {
  // Values that are equal on every rank.
  CommonValues values;
  // Values that single ranks set for themselves; other ranks have no entry.
  std::map<int, CommonValues> ranks;
  // Content metadata of the checkpoint ($content).
  CommonDict content;
};
// Sorts records by their kind. Other reserved names ($layers, names of a newer version) are
// skipped. kDataLoss if the content metadata or a per-rank record is malformed.
Result<CommonState> SplitCommonRecords(CommonValues records);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_COMMON_STATE_H_
