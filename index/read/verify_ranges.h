// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_VERIFY_RANGES_H_
#define TENSORMOUNT_INDEX_READ_VERIFY_RANGES_H_

#include <map>
#include <string>
#include <vector>

#include "index/read/checkpoint.h"
#include "index/read/foreign_file.h"
#include "index/records/inventory.h"

namespace tensormount {

// Whether a read failure proves damage of the stored data. A failure does not if the process lacks
// memory, descriptors or permissions or was cancelled, if the storage does not answer, if a handle
// is stale, or if the format is newer.
bool ProvesDamage(const Status& status);
// The message of `status` without the file name, because VerifyReport::Damage has the file name
// separately.
std::string ReasonWithoutFile(std::string_view file, const Status& status);
// The result of a verification. `unread` is the reason why something was not checked, or OK. If the
// report has no damage, `unread` is returned as an error, else it becomes a warning.
Result<VerifyReport> ConcludeReport(VerifyReport report, const Status& unread);

// Reads every stored range of `inventory` on several threads (index/read/scan.h), and compares the
// roots of ranges, and the digests of tensors whose chunks are all intact. `leaves` has the leaf
// hashes of each manifest, by name, to locate damage; without the manifest's hashes only the range
// is named. `base` is the directory for foreign files. Adds the findings to `report`. Fails if the
// watch ends the scan, or, after reading all ranges, if one could not be checked.
Status VerifyRanges(FileSystem& fs, const std::string& directory, const ForeignBase& base,
                    const Inventory& inventory,
                    const std::map<std::string, std::vector<Hash128>>& leaves,
                    const VerifyOptions& options, VerifyReport& report);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_VERIFY_RANGES_H_
