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

// Whether a failure to read something says that it is damaged. Where this process has no
// descriptors or no permission, the storage does not answer or has lost a handle, nothing is known.
bool ProvesDamage(const Status& status);
// The reason without the name of its file, which a Damage has for itself.
std::string ReasonWithout(std::string_view file, const Status& status);
// What a verification ends with: `unread` is why something was not checked (ok: everything was). An
// error, unless there is damage, which is damage whatever else could not be looked at.
Result<VerifyReport> Concluded(VerifyReport report, const Status& unread);

// Reads every stored range of `inventory` on several threads (index/read/scan.h), compares their
// roots, and the digests of tensors of which every chunk was whole. `leaves`: leaf hashes by name
// of manifest, to say which byte is wrong; where a manifest is not there, only the range is named.
// Adds damages and bytes to `report`. Fails where some range could not be checked, after all
// others. `base`: what foreign files are opened below.
Status VerifyRanges(FileSystem& fs, const std::string& directory, const ForeignBase& base,
                    const Inventory& inventory,
                    const std::map<std::string, std::vector<Hash128>>& leaves,
                    const VerifyOptions& options, VerifyReport& report);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_VERIFY_RANGES_H_
