// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_COPY_H_
#define TENSORMOUNT_INDEX_STORE_COPY_H_

#include <string>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/store_copy.h"

#include "base/file_system.h"

namespace tensormount {

// CopyCheckpoints of tensormount/store_copy.h, for stores that are all on the file system `fs`.
Result<CopyReport> CopyCheckpoints(FileSystem& fs, const std::vector<std::string>& sources,
                                   const std::string& destination, const CopyOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_COPY_H_
