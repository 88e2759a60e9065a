// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_LOAD_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_LOAD_H_

#include <memory>
#include <string_view>

#include "base/file_system.h"
#include "index/checkpoint.h"
#include "tensormount/load.h"
#include "tensormount/save.h"

namespace tensormount {

// Save and Load on any FileSystem: what the public calls do on the host's, and what tests do on
// one that fails or crashes.
Result<SaveReport> SaveOn(FileSystem& fs, const StateDict& state, std::string_view path,
                          Communicator& comm, const SaveOptions& options);
Result<LoadReport> LoadOn(FileSystem& fs, const StateDict& request, std::string_view path,
                          Communicator& comm, const LoadOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_LOAD_H_
