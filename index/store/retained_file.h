// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_RETAINED_FILE_H_
#define TENSORMOUNT_INDEX_STORE_RETAINED_FILE_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/file_system.h"

// Replaces small files beside checkpoints. A reader finds either the old or the new content
// complete (ExchangeFallback is the exception).

namespace tensormount {

// Age from which a file with a hidden name is abandoned: a running writer would have renamed it by
// then.
inline constexpr std::chrono::seconds kHiddenFileAge(600);

// Largest file that is read. The limit exists because people may write such a file by hand.
inline constexpr std::uint64_t kMaxRetainedFileBytes = 64 * 1024;

struct RetainedText {
  Result<std::string> text;
  // The file could not be read and may be intact. `text` alone does not tell this, because its
  // error for a failing disk (EIO) has the same code as for damage.
  bool unread = false;
};
RetainedText ReadRetained(FileSystem& fs, const std::string& path);

// How to replace a file if the filesystem cannot exchange two files (NFS). kBrieflyMissing: for a
// moment no file exists. kSecondName: the new file is FOLDER/NAME.<8 hex digits>, which readers
// accept too.
enum class ExchangeFallback { kBrieflyMissing, kSecondName };

// Writes FOLDER/NAME durably and replaces an existing file. If several processes write at the same
// time, the file has the content of one of them.
Status ReplaceRetained(FileSystem& fs, const std::string& folder, std::string_view name,
                       std::string_view data, ExchangeFallback instead);

// Creates the directory `name` of a store durably if it is missing.
Status EnsureFolderDurably(FileSystem& fs, const std::string& store, std::string_view name);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_RETAINED_FILE_H_
