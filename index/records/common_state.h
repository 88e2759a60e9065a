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

// The common state of a checkpoint, and the records that hold it: one common value a name.
// Names that begin with '$' are reserved (docs/format.md, "Common state").

namespace tensormount {

// Sorted by name, so that ranks encode and compare equal states alike.
using CommonValues = std::map<std::string, CommonValue>;

// Records with reserved names. An old reader passes over those that it does not know, so a new one
// needs no new version of the format.
inline constexpr std::string_view kContentMetadataRecord = "$content";
inline constexpr std::string_view kRankRecordPrefix = "$rank.";

// Of a record's name: a reserved one may have a key after its prefix.
inline constexpr std::size_t kMaxCommonRecordName = kMaxKeyBytes + 64;

// "$rank.3"; `rank` is not negative.
// Decimal without leading zeros, so that each rank has exactly one name.
std::string RankRecordName(int rank);

inline bool IsReservedCommonName(std::string_view name) { return name.starts_with('$'); }
// Of names that applications give: a key (CheckKey) that is not reserved. kInvalidArgument.
Status CheckCommonName(std::string_view name);

// The values of one rank travel and are stored as one dict; these two go there and back.
CommonValue DictOf(const CommonValues& values);
// kDataLoss where the value is not a dict with string keys alone; `what` begins the message.
Result<CommonValues> ValuesOf(CommonValue value, std::string_view what);

// The records of a checkpoint, sorted out by what their names say.
// Copies are deep: trees of up to 64 MiB each. Callers who want one value ask the index for it
// (CheckpointIndex::CommonRecord).
struct CommonState {
  CommonValues values;                // The same on every rank.
  std::map<int, CommonValues> ranks;  // What each rank set for itself; ranks that did, only.
  CommonDict content;                 // Content metadata.
};
// Reserved names that it does not know are left out: they are of newer versions. kDataLoss.
Result<CommonState> SplitCommonRecords(CommonValues records);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_COMMON_STATE_H_
