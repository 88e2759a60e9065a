// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_COSTS_H_
#define TENSORMOUNT_INDEX_STORE_COSTS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/store/store.h"

// Space of checkpoints that share data files by hard links, and which checkpoints share a file.

namespace tensormount {

// Space of one checkpoint: the sum of the lengths of COMMIT and of all files that it lists, like
// `du --apparent-size`. The original files of an adopted checkpoint do not count.
struct CheckpointCost {
  CheckpointListing listing;
  std::uint64_t bytes = 0;
  // The sum of the files that no other checkpoint of the store shares (by inode). Removing the
  // checkpoint frees these bytes, unless the files have links elsewhere.
  std::uint64_t own_bytes = 0;
  std::uint64_t shared_bytes() const { return bytes - own_bytes; }
  std::uint64_t data_bytes = 0;  // The part of `bytes` in data/.
  // Time of the publish, in seconds since 1970; the mtime of COMMIT if the time cannot be read.
  std::int64_t created = 0;
  bool self_contained = true;  // Also true if unknown.
};

// The costs of all checkpoints of a store at one moment. Immutable; thread-safe. Of() reads each
// COMMIT, and the first bytes of one manifest of each checkpoint for the date, and lists data/ of
// the entries of .trash/ and .staging/. Of data files, it calls stat only for those that several
// COMMITs list alike, and only for two names of such a file if its link count equals the number of
// its known names. It uses as many threads as cores, and about 80 bytes for each file of each
// checkpoint.
class StoreCosts {
 public:
  static Result<StoreCosts> Of(FileSystem& fs, const Store& store);

  // All checkpoints, sorted by name as in Store::List. Checkpoints with a problem have no costs.
  const std::vector<CheckpointCost>& checkpoints() const { return checkpoints_; }
  // The costs of checkpoint `name`; null if there is no such checkpoint.
  const CheckpointCost* Find(std::string_view name) const;
  std::vector<CheckpointListing> Listings() const;
  // Bytes of all checkpoints together, with each file counted once. shared_bytes() counts only the
  // files that several checkpoints share.
  std::uint64_t stored_bytes() const { return stored_bytes_; }
  std::uint64_t shared_bytes() const { return shared_bytes_; }

  // A checkpoint that shares data with a given one, and how much.
  struct Sharer {
    std::string name;
    std::uint64_t bytes = 0;
    std::uint64_t files = 0;
  };
  std::vector<Sharer> SharersOf(std::string_view name) const;

 private:
  // A file (inode) that several checkpoints share. Their positions are members_[begin, end).
  struct SharedFile {
    std::uint64_t length = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  // Contents of the COMMIT files. Exists only while Of() runs.
  struct Gathered;
  Status Gather(FileSystem& fs, const Store& store, Gathered& gathered);
  static void CountElsewhere(FileSystem& fs, const Store& store, Gathered& gathered);
  Status FindShared(FileSystem& fs, const Store& store, Gathered& gathered);

  std::vector<CheckpointCost> checkpoints_;
  std::vector<SharedFile> shared_;
  // For SharedFile: positions in checkpoints_.
  std::vector<std::uint32_t> members_;
  std::uint64_t stored_bytes_ = 0;
  std::uint64_t shared_bytes_ = 0;
};

// Computes the bytes that deleting the added paths would free: the sum of the files that have no
// links outside of these paths. Uses only stat and listings. Paths that cannot be read count as 0
// in Sum. For one thread.
class OwnBytes {
 public:
  explicit OwnBytes(FileSystem& fs) : fs_(fs) {}
  void Add(const std::string& path, int depth);
  std::uint64_t Sum() const;
  // The sum for one directory; 0 if it does not exist. Fails if a part of the directory cannot be
  // read.
  static Result<std::uint64_t> Below(FileSystem& fs, const std::string& folder);

 private:
  void NoteUnseen(const Status& why);
  struct Names {
    std::uint64_t seen = 0;
    std::uint64_t links = 0;
    std::uint64_t bytes = 0;
  };
  FileSystem& fs_;
  // The first error for a path that could not be read.
  Status status_;
  // The files among the added paths, by device and inode.
  std::map<std::pair<std::uint64_t, std::uint64_t>, Names> files_;
};

// Adds to each damage of a file in data/ in `report`, which is about checkpoint `name` of the
// store, the names of other checkpoints that share the file (same inode), because they are damaged
// too. Calls stat at most once for each checkpoint and damaged file. Checkpoints that cannot be
// read are omitted.
void NameSharers(FileSystem& fs, const std::string& store_path, const std::string& name,
                 VerifyReport& report);
// NameSharers for the checkpoint at `directory`. Does nothing if `directory` is not in a store.
void NameSharers(FileSystem& fs, const std::string& directory, VerifyReport& report);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_COSTS_H_
