// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_COMMON_RECORDS_H_
#define TENSORMOUNT_STATE_COMMON_RECORDS_H_

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "tensormount/state_dict.h"

#include "index/records/common_state.h"

// What a state dict has for the common records of a checkpoint (index/records/common_state.h).

namespace tensormount {

// What must be the same on every rank that sets it: common values, content metadata, names
// of layers.
CommonValues SharedCommonRecords(const StateDict& state);

// What this rank set for itself, under the name that it is stored as; nothing where it set nothing.
// kInvalidArgument where it is too large as a whole.
Result<std::optional<std::pair<std::string, CommonValue>>> RankCommonRecord(const StateDict& state,
                                                                            int rank);

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_COMMON_RECORDS_H_
