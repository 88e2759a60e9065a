// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_COMMON_RECORDS_H_
#define TENSORMOUNT_STATE_COMMON_RECORDS_H_

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "tensormount/state_dict.h"

#include "index/records/common_state.h"

// Converts a state dict's values to the common records of a checkpoint
// (index/records/common_state.h).

namespace tensormount {

// The values that must be equal on every rank that sets them, as records: common values, content
// metadata, layer names.
CommonValues SharedCommonRecords(const StateDict& state);

// The values that this rank set for itself, as one record with its name; nullopt if there are none.
// kInvalidArgument if the record is too large.
Result<std::optional<std::pair<std::string, CommonValue>>> RankCommonRecord(const StateDict& state,
                                                                            int rank);

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_COMMON_RECORDS_H_
