// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_VERIFY_FOREIGN_H_
#define TENSORMOUNT_INDEX_FOREIGN_VERIFY_FOREIGN_H_

#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// What can be checked of a checkpoint in a foreign format at `path` (as resolved), which has no
// hashes: everything that describes it, every item that stands for a tensor, that the chunks of
// each tensor are all there and none twice, the CRCs of zip archives (torch.save, .npz, items of
// DCP), and that every byte of tensors and objects can be read while no file changes. `quick`:
// without reading items and data. Fails only where the source cannot be opened at all (kDataLoss:
// because of damage); what was left out at open is damage in the report.
// The scan of data is on threads; zip entries are read one after the other.
Result<VerifyReport> VerifyForeign(FileSystem& fs, const std::string& path,
                                   const VerifyOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_VERIFY_FOREIGN_H_
