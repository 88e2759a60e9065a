// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGING_COMMON_H_
#define TENSORMOUNT_FS_SAVE_STAGING_COMMON_H_

#include <string_view>

#include "tensormount/status.h"

#include "index/records/common_state.h"

namespace tensormount::fs {

// Converts common.json of a staging to common records, one for each member (of "$ranks": one for
// each rank). "$content" and "$ranks" mean the same as in common.json of a checkpoint, so that such
// a file can be copied here. kInvalidArgument: a rule is violated (docs/format.md, "common.json").
Result<CommonValues> CommonRecordsOf(std::string_view json);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGING_COMMON_H_
