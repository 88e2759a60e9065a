// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_DERIVE_H_
#define TENSORMOUNT_INDEX_STORE_DERIVE_H_

#include <string_view>

#include "tensormount/derive.h"
#include "tensormount/status.h"

#include "base/file_system.h"

namespace tensormount {

// Derive of tensormount/derive.h on the file system `fs`.
Result<DeriveReport> DeriveOn(FileSystem& fs, std::string_view path, std::string_view from,
                              const DeriveOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_DERIVE_H_
