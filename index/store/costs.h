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

// What checkpoints cost that share data files by hard links, and who shares a file.

namespace tensormount {

// Of one checkpoint: lengths of files, as `du --apparent-size` adds them up (not blocks), of all
// that COMMIT lists (manifests and index, too) and COMMIT itself. Files of other programs, which an
// adopted checkpoint reads in place, are no part of it.
struct CheckpointCost {
  CheckpointListing listing;
  std::uint64_t bytes = 0;
  // What removing it frees: files whose inode no other checkpoint of the store has.
  std::uint64_t own_bytes = 0;
  std::uint64_t shared_bytes() const { return bytes - own_bytes; }
  std::uint64_t data_bytes = 0;  // Of `bytes`: data/.
  // Seconds since 1970: when it was published, or, where that cannot be read, the mtime of COMMIT.
  std::int64_t created = 0;
  bool self_contained = true;  // As far as that could be read.
};

// Of all checkpoints of a store, as they were when it was looked at. Immutable; thread-safe.
// Each COMMIT is read once, and the begin of one manifest for the date; files are only looked at
// (stat) where several COMMITs have one of that name, length and hash, and of a file whose number
// of names is that of the checkpoints that list it only two names. On as many threads as there are
// cores. Memory: about 80 bytes for each file of each checkpoint while it is made.
class StoreCosts {
 public:
  static Result<StoreCosts> Of(FileSystem& fs, const Store& store);

  // By name, as Store::List has them. Those with a problem cost nothing that is known.
  const std::vector<CheckpointCost>& checkpoints() const { return checkpoints_; }
  // Null: no such checkpoint.
  const CheckpointCost* Find(std::string_view name) const;
  std::vector<CheckpointListing> Listings() const;
  // Of all checkpoints together, a file that several have once; and how much of it several have.
  std::uint64_t stored_bytes() const { return stored_bytes_; }
  std::uint64_t shared_bytes() const { return shared_bytes_; }

  // With whom a checkpoint shares how much, by name.
  struct Sharer {
    std::string name;
    std::uint64_t bytes = 0;
    std::uint64_t files = 0;
  };
  std::vector<Sharer> SharersOf(std::string_view name) const;

 private:
  // One inode, and the checkpoints that have it: members_[begin, end).
  struct SharedFile {
    std::uint64_t length = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  struct Gathered;  // Of COMMITs, while it is made.
  Status Gather(FileSystem& fs, const Store& store, Gathered& gathered);
  static void CountElsewhere(FileSystem& fs, const Store& store, Gathered& gathered);
  Status FindShared(FileSystem& fs, const Store& store, Gathered& gathered);

  std::vector<CheckpointCost> checkpoints_;
  std::vector<SharedFile> shared_;
  std::vector<std::uint32_t> members_;  // Positions in checkpoints_.
  std::uint64_t stored_bytes_ = 0;
  std::uint64_t shared_bytes_ = 0;
};

// Bytes of files of which every name lies below what was added: what deleting it frees. Only looks
// (stat); what cannot be looked at counts nothing. Of one thread.
class OwnBytes {
 public:
  explicit OwnBytes(FileSystem& fs) : fs_(fs) {}
  void Add(const std::string& path, int depth);
  std::uint64_t Sum() const;
  // Of all below one folder; 0 where there is none. Fails where a part of it cannot be looked at.
  static Result<std::uint64_t> Below(FileSystem& fs, const std::string& folder);

 private:
  void NotSeen(const Status& why);
  struct Names {
    std::uint64_t seen = 0;
    std::uint64_t links = 0;
    std::uint64_t bytes = 0;
  };
  FileSystem& fs_;
  Status status_;  // Why something was not looked at, the first time.
  std::map<std::pair<std::uint64_t, std::uint64_t>, Names> files_;  // By device and inode.
};

// Names in every damage of `report`, which is of checkpoint `name` of the store at `store_path`,
// the other checkpoints of the store that have the damaged file, too (the same inode): what harms
// the one harms them. Only looks at files (stat), one for each checkpoint and damaged file; what
// cannot be looked at is not named.
void NameSharers(FileSystem& fs, const std::string& store_path, const std::string& name,
                 VerifyReport& report);
// The same of a checkpoint at `directory`; nothing where that stands in no store.
void NameSharers(FileSystem& fs, const std::string& directory, VerifyReport& report);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_COSTS_H_
