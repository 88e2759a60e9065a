// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STORE_H_
#define TENSORMOUNT_STORE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// What happens to a save where STORE/NAME exists. kReplace: an exchange at commit; a save that
// fails leaves the old checkpoint as it was.
// kFail: the save is refused with kAlreadyExists on every rank.
enum class IfExists { kFail, kReplace };

// What an operator does with a store, for programs without a shell. Thread-safe; the rules that
// keep and remove checkpoints are in tensormount/retention.h.

struct StoredCheckpoint {
  std::string name;
  std::string uuid;  // 32 hex digits; zeros where it could not be read.
  std::uint64_t generation = 0;
  bool latest = false;  // False for all where nobody can tell.
  bool pinned = false;
  Status pins_read;  // Not ok: whether it is pinned cannot be told (another user's pins).
  Status problem;    // Not ok: the folder is there, but cannot be read as a checkpoint.
  // Where there is no problem. Bytes are lengths of files.
  std::int64_t created = 0;        // Seconds since 1970.
  std::uint64_t file_bytes = 0;    // Of its data files.
  std::uint64_t stored_bytes = 0;  // Of all of its files.
  std::uint64_t own_bytes = 0;     // Of them, what removing it frees; others have the rest, too.
};
// By name. Reads each commit record once, and opens no checkpoint. kNotFound: no store.
TENSORMOUNT_EXPORT Result<std::vector<StoredCheckpoint>> ListCheckpoints(const std::string& store);

struct RemoveOptions {
  bool force = false;  // Also where it is pinned.
};
// Removes "STORE/NAME", durably: who has it open reads on, and CollectGarbage frees its space.
//   kNotFound          no such checkpoint
//   kPermissionDenied  it is pinned
//   kInvalidArgument   the folder has nothing of a checkpoint
//   kUnknown           it is gone from its name, but a power cut may bring it back; or it was
//                      pinned at that moment and could not be moved back, durably or at all
TENSORMOUNT_EXPORT Status RemoveCheckpoint(const std::string& path,
                                           const RemoveOptions& options = {});

struct GarbageOptions {
  bool dry_run = false;
  // Since it was removed; less than 0: 60, and nothing where the filesystem has no file locks.
  std::int64_t grace_seconds = -1;
  std::int64_t staging_age_seconds = 86400;  // Stagings untouched for so long were abandoned.
};
struct GarbageReport {
  std::vector<std::string> removed;  // Paths below the store, also in a dry run.
  std::vector<std::string> kept;     // With the reason.
  std::vector<std::string> failed;   // With the error.
  std::uint64_t bytes_freed = 0;
};
// Deletes what was removed and is read by nobody, and what crashed saves left.
TENSORMOUNT_EXPORT Result<GarbageReport> CollectGarbage(const std::string& store,
                                                        const GarbageOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_STORE_H_
