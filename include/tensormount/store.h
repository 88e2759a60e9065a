// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STORE_H_
#define TENSORMOUNT_STORE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Behaviour of a save if STORE/NAME exists. kFail: kAlreadyExists on every rank. kReplace: the
// commit exchanges the old checkpoint for the new one in one step, and a failed save leaves the old
// checkpoint unchanged.
enum class IfExists { kFail, kReplace };

// Store administration for programs without a shell. Thread-safe. Retention rules are in
// tensormount/retention.h.

struct StoredCheckpoint {
  std::string name;
  std::string uuid;  // 32 hex digits; zeros if it could not be read.
  std::uint64_t generation = 0;
  bool latest = false;  // False for all checkpoints if the latest cannot be determined.
  bool pinned = false;
  Status pins_read;  // Not ok: `pinned` is unknown, for example if another user owns the pins.
  Status problem;    // Not ok: the directory exists, but cannot be read as a checkpoint.
  // The members below are valid if `problem` is ok. Bytes are lengths of files.
  std::int64_t created = 0;        // Seconds since 1970.
  std::uint64_t file_bytes = 0;    // Data files.
  std::uint64_t stored_bytes = 0;  // All files.
  std::uint64_t own_bytes = 0;     // Bytes that removing it frees; the rest is shared.
};
// Sorted by name. Reads each commit record once, and opens no checkpoint. kNotFound: no store.
TENSORMOUNT_EXPORT Result<std::vector<StoredCheckpoint>> ListCheckpoints(const std::string& store);

struct RemoveOptions {
  bool force = false;  // Removes a pinned checkpoint, too.
};
// Removes "STORE/NAME", durably. Readers that have it open can read on; CollectGarbage frees its
// space.
//   kNotFound          no such checkpoint
//   kPermissionDenied  it is pinned
//   kInvalidArgument   the directory is not a checkpoint
//   kUnknown           cannot tell whether it is removed; or it is, but a power cut may bring it
//                      back; or it was pinned while it was being removed, and moving it back failed
//                      or is not durable
TENSORMOUNT_EXPORT Status RemoveCheckpoint(const std::string& path,
                                           const RemoveOptions& options = {});

struct GarbageOptions {
  bool dry_run = false;
  // Minimum age since removal; negative: 60, and removed checkpoints are kept if the filesystem has
  // no file locks.
  std::int64_t grace_seconds = -1;
  std::int64_t staging_age_seconds = 86400;  // Staging untouched this long is abandoned.
};
struct GarbageReport {
  std::vector<std::string> removed;  // Relative to the store; filled in a dry run, too.
  std::vector<std::string> kept;     // Each with the reason.
  std::vector<std::string> failed;   // Each with the error.
  std::uint64_t bytes_freed = 0;
};
// Deletes removed checkpoints that no reader has open, and files left by crashed saves.
TENSORMOUNT_EXPORT Result<GarbageReport> CollectGarbage(const std::string& store,
                                                        const GarbageOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_STORE_H_
