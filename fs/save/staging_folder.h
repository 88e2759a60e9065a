// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGING_FOLDER_H_
#define TENSORMOUNT_FS_SAVE_STAGING_FOLDER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/store/store.h"

// STORE/.staging/NAME as shared by several mounts (docs/format.md, "Staging of mounts"):
//   UUID, lock, data/, manifest/       as in every staging; lock: see StagingLease
//   journal/<incarnation>.tmj          what each mount wrote (journal.h)
//   schema/<incarnation>-<n>.json      the planned content (schema.h)
//   done/<r>                           marks: journals and their sizes when the mark was made
//   common/<incarnation>-<n>.json      the common values; the newest file counts
//   report.json, report.txt            the last failed publish

namespace tensormount::fs {

// Claims a generation and creates STORE/.staging/NAME, which appears with its directories and UUID
// in one atomic step. kAlreadyExists: the staging exists (join it), or STORE/NAME is published.
Result<Staging> CreateStaging(const Store& store, FileSystem& fs, const std::string& name);
// Opens an existing staging. kNotFound: there is none; kUnsupported: it is a staging of the library
// (NAME.<id>).
Result<Staging> OpenStaging(const Store& store, FileSystem& fs, const std::string& name);
// Names of the stagings of mounts, sorted.
Result<std::vector<std::string>> ListStagings(const Store& store, FileSystem& fs);
// Whether `staging` still exists under its name, by the UUID file in its directory: a new staging
// of the same name is another one. Costs one small read.
bool IsStagingInPlace(FileSystem& fs, const Staging& staging);
// Moves the staging to .trash, durably. The rename removes it in one step; data files are then
// deleted to free their space, and gc removes the rest.
Status RemoveStaging(const Store& store, FileSystem& fs, const Staging& staging);

// The right to write into a staging, or to publish it, while this object lives: a flock on its lock
// file, shared for writers, exclusive for the publisher. The lease keeps bytes from being written
// into a file after COMMIT covers it. Without filesystem locks the right is granted anyway, and
// only the check of IsStagingInPlace protects.
class StagingLease {
 public:
  // The right to write, held while anything is open for writing. kBusy: a publish is in progress
  // (try again); kStale: the staging was published or removed.
  static Result<std::unique_ptr<StagingLease>> ForWriting(FileSystem& fs, const Staging& staging);
  // The right to publish or remove the staging. kBusy: a mount, this one or another, has files open
  // for writing or is publishing; kStale: the staging was published or removed.
  static Result<std::unique_ptr<StagingLease>> ForPublishing(FileSystem& fs,
                                                             const Staging& staging);

  // Whether the lock file is locked; false if the filesystem has no locks.
  bool locked() const { return lock_ != nullptr; }

 private:
  explicit StagingLease(std::unique_ptr<File> lock) : lock_(std::move(lock)) {}

  const std::unique_ptr<File> lock_;  // Null if there are no locks.
};

// The content of done/<rank>: writer `rank` has finished, and relies on the first `journal_bytes`
// bytes of `journal`, its mount's journal, which were durable then. `journal` is empty if the mount
// had written nothing. A publish on another machine of a shared filesystem that sees the mark but
// not yet those bytes fails instead of publishing less.
struct DoneMark {
  std::uint32_t rank = 0;
  std::string journal;
  std::uint64_t journal_bytes = 0;
};
// Parses the number of a rank or of an object part's index; false for other spellings ("03").
bool ParseRank(std::string_view name, std::uint32_t* rank);
// Writes a mark durably; it replaces an older mark of the rank. kInvalidArgument: the rank is not
// below the schema's number of writers.
Status MakeDoneMark(FileSystem& fs, const Staging& staging, const DoneMark& mark);
Status RemoveDoneMark(FileSystem& fs, const Staging& staging, std::uint32_t rank);
Result<std::vector<DoneMark>> ReadDoneMarks(FileSystem& fs, const Staging& staging);

// Writes common.json durably. `json` is checked (CommonFromJson, an object).
// Each call writes a new numbered file, of which the newest counts, so that a reader on another
// machine never sees a partial text.
Status WriteCommonJson(FileSystem& fs, const Staging& staging, const std::string& incarnation,
                       std::string_view json);
// Reads the newest common.json; empty if there is none.
Result<std::string> ReadCommonJson(FileSystem& fs, const Staging& staging);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGING_FOLDER_H_
