// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_VERIFY_FOREIGN_H_
#define TENSORMOUNT_INDEX_FOREIGN_VERIFY_FOREIGN_H_

#include <string>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// Verifies the foreign checkpoint at `path` (resolved), which has no hashes. Checks its metadata,
// every item, that each element of a tensor is stored exactly once, the CRCs of zip archives
// (torch.save, .npz, DCP items), that all bytes of tensors and objects can be read, and that no
// file changes meanwhile. With options.quick, items and data are not read. Data that are found
// missing at opening are damage in the report. Fails if the source cannot be opened (kDataLoss:
// because of damage), if options.watch ends the verification, or if no damage was found but
// something could not be checked. Data are read by several threads, zip entries by one.
Result<VerifyReport> VerifyForeign(FileSystem& fs, const std::string& path,
                                   const VerifyOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_VERIFY_FOREIGN_H_
