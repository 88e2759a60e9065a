// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_COMMIT_WATCH_H_
#define TENSORMOUNT_INDEX_STORE_COMMIT_WATCH_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/inventory.h"
#include "index/store/store.h"

namespace tensormount {

// A checkpoint that was published.
struct Commit {
  std::string store;  // Resolved path of the store.
  std::string name;   // Empty: unknown, because the checkpoint was removed before it could be read.
  Uuid uuid;
  // If the checkpoint was removed and its files were deleted before it could be read, the members
  // from here to `derived` are zero.
  std::uint64_t generation = 0;
  Uuid parent;
  std::int64_t created = 0;  // Seconds since 1970.
  bool derived = false;
  // Whether the checkpoint was removed or replaced when it was found.
  bool removed = false;
  // NaNs and infinities in all tensors, by the counts of the save; nullopt: not known.
  std::optional<std::uint64_t> nonfinite = std::nullopt;
  std::string path() const { return JoinPath(store, name); }
};

// Tells which checkpoints are published in a store, each exactly once, by uuid: a replaced name is
// another commit, a renamed or copied checkpoint (`cp -al`) is not. A thread looks at the store
// each second, because nothing reports changes by other machines; where inotify works it looks as
// soon as a name changes. It goes on while the caller is busy. A commit that is removed before a
// look is found in .trash, whose entries are named by uuid. It is missed only if its files are
// deleted, too, before a look and where inotify does not work. Next() and TakeWarnings() are for
// one thread.
class CommitWatch {
 public:
  struct Options {
    // Also the checkpoints that exist already, if their generation is above `above`.
    bool existing = false;
    std::uint64_t above = 0;
    // Name of a checkpoint. Not empty: as `existing`, above the generation of this checkpoint.
    std::string since;
    // Time between two looks; zero: a second, or five over the network.
    std::chrono::milliseconds interval{0};
  };
  // Begins to watch before it returns: all later commits are reported. If the store does not exist
  // yet, it is waited for. kInvalidArgument: `path` is a checkpoint or not a directory. kNotFound:
  // no checkpoint `since`.
  static Result<std::unique_ptr<CommitWatch>> Start(const std::string& path,
                                                    const Options& options);
  static Result<std::unique_ptr<CommitWatch>> Start(FileSystem& fs, const std::string& path,
                                                    const Options& options);
  ~CommitWatch();

  // The next commit; nullopt if none came within `patience`. Commits that are found together are in
  // the order of their generations. kStale: the store was removed. Other errors: the store could
  // not be read for kGiveUp.
  Result<std::optional<Commit>> Next(std::chrono::milliseconds patience);
  // Texts about checkpoints, or a store, that cannot be read now, each once.
  std::vector<std::string> TakeWarnings();

  static constexpr std::chrono::seconds kGiveUp{60};

 private:
  // The watching thread keeps it if storage blocks that thread longer than the CommitWatch lives.
  struct Core;
  explicit CommitWatch(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  std::shared_ptr<Core> core_;
};

// The fields of `watch --json`, for the command and the C interface.
nlohmann::ordered_json CommitJson(const Commit& commit);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_COMMIT_WATCH_H_
