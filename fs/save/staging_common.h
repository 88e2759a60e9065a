// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGING_COMMON_H_
#define TENSORMOUNT_FS_SAVE_STAGING_COMMON_H_

#include <string_view>

#include "tensormount/status.h"

#include "index/records/common_state.h"

namespace tensormount::fs {

// The common records that a common.json of a staging stands for: one for each of its members.
// "$content" and "$ranks" are what they are in the common.json of a checkpoint, so that one can be
// copied. kInvalidArgument says what breaks a rule (docs/format.md, "common.json").
Result<CommonValues> CommonRecordsOf(std::string_view json);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGING_COMMON_H_
