// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_REPAIR_H_
#define TENSORMOUNT_INDEX_STORE_REPAIR_H_

#include <memory>
#include <string>

#include "tensormount/status.h"
#include "tensormount/store_repair.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// RepairCheckpoint of tensormount/store_repair.h on the file system `fs`. `from` is the checkpoint
// that gives the bytes.
Result<RepairReport> RepairOn(FileSystem& fs, const std::string& path,
                              std::shared_ptr<OpenedCheckpoint> from, const RepairOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_REPAIR_H_
