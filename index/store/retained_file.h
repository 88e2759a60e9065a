// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_RETAINED_FILE_H_
#define TENSORMOUNT_INDEX_STORE_RETAINED_FILE_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/file_system.h"

// How small files beside checkpoints are written, so that readers find the old one whole or the
// new.

namespace tensormount {

// A file under a hidden name that is older is nobody's any more: it would have got its own.
inline constexpr std::chrono::seconds kHiddenFileAge(600);

// Of what people may have written by hand.
inline constexpr std::uint64_t kMaxRetainedFileBytes = 64 * 1024;

// Where the filesystem cannot exchange two files (NFS): for a moment there is neither, or the new
// one is FOLDER/NAME.<8 hex digits>, and readers know that.
enum class InsteadOfExchange { kNoneForAMoment, kSecondName };

// Writes FOLDER/NAME, replacing what is there, durably. Others who do so at the same time: one of
// them holds.
Status ReplaceRetained(FileSystem& fs, const std::string& folder, std::string_view name,
                       std::string_view data, InsteadOfExchange instead);

// The folder `name` of a store, and its name durable.
Status EnsureFolderDurably(FileSystem& fs, const std::string& store, std::string_view name);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_RETAINED_FILE_H_
