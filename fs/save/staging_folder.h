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

// STORE/.staging/NAME as several mounts share it (docs/format.md, "Staging of mounts"):
//   UUID, lock, data/, manifest/       as in every staging; lock: see StagingLease
//   journal/<incarnation>.tmj          what each mount wrote (journal.h)
//   schema/<incarnation>-<n>.json      what there shall be (schema.h)
//   done/<r>                           marks: which journals had how many bytes when it was made
//   common/<incarnation>-<n>.json      the common values, the last one holds
//   report.json, report.txt            the last failed publish

namespace tensormount::fs {

// Makes STORE/.staging/NAME with all of its folders and its uuid, and claims a generation, in one
// step: others see it whole or not at all. kAlreadyExists where it is there (join it) or where
// STORE/NAME is published.
Result<Staging> CreateStaging(const Store& store, FileSystem& fs, const std::string& name);
// One that is there. kNotFound; kUnsupported for one that the library writes (NAME.<id>).
Result<Staging> OpenStaging(const Store& store, FileSystem& fs, const std::string& name);
// Names of stagings of mounts, sorted.
Result<std::vector<std::string>> ListStagings(const Store& store, FileSystem& fs);
// Whether `staging` still stands at its name.
// By the UUID file in the folder, so a staging of the same name that was made anew is another one.
// One small read.
bool StagingInPlace(FileSystem& fs, const Staging& staging);
// Moves it to .trash, durably.
// Renamed to .trash first, so that it is gone in one step; data files are deleted at once to give
// their space back, the rest is left to gc.
Status RemoveStaging(const Store& store, FileSystem& fs, const Staging& staging);

// The right to write into a staging, or to publish it, for as long as this lives: a flock on its
// lock file, shared by all who write, exclusive for who publishes. So nothing that is published can
// still change: bytes written later would fall into a file that COMMIT vouches for. Where the
// filesystem has no locks the right is granted without one, and the check of StagingInPlace must
// do.
class StagingLease {
 public:
  // Held while anything is open for writing. kBusy: a publish is under way (try again); kStale: the
  // staging has left its name.
  static Result<std::unique_ptr<StagingLease>> ForWriting(FileSystem& fs, const Staging& staging);
  // kBusy: somebody, here or on another mount, has files open for writing, or publishes; kStale.
  static Result<std::unique_ptr<StagingLease>> ForPublishing(FileSystem& fs,
                                                             const Staging& staging);

  // False where the filesystem has no locks.
  bool locked() const { return lock_ != nullptr; }

 private:
  explicit StagingLease(std::unique_ptr<File> lock) : lock_(std::move(lock)) {}

  const std::unique_ptr<File> lock_;  // Null where there are no locks.
};

// done/<rank>. `journals`: name and synced bytes of this mount's journal, what the writer with that
// rank may rely on. Making a mark again replaces it. kInvalidArgument: not a number below
// `writers`.
// A mark says how much of a journal its writer relies on. A publish elsewhere that sees the mark
// but not yet those bytes (another machine of a shared filesystem) then fails instead of publishing
// less.
struct DoneMark {
  std::uint32_t rank = 0;
  std::string journal;
  std::uint64_t journal_bytes = 0;
};
// "3" as 3; false for what is not how a rank, or an index of an object part, is written ("03").
bool ParseRank(std::string_view name, std::uint32_t* rank);
Status MakeDoneMark(FileSystem& fs, const Staging& staging, const DoneMark& mark);
Status RemoveDoneMark(FileSystem& fs, const Staging& staging, std::uint32_t rank);
Result<std::vector<DoneMark>> ReadDoneMarks(FileSystem& fs, const Staging& staging);

// common.json: durable; the last one written holds. `json` is checked (CommonFromJson, an object).
// Numbered files, of which the last one counts: a reader on another machine never sees half of a
// text.
Status WriteCommonJson(FileSystem& fs, const Staging& staging, const std::string& incarnation,
                       std::string_view json);
Result<std::string> ReadCommonJson(FileSystem& fs, const Staging& staging);  // Empty: none.

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGING_FOLDER_H_
