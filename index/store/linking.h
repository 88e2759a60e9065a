// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_LINKING_H_
#define TENSORMOUNT_INDEX_STORE_LINKING_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "base/hash.h"
#include "index/read/checkpoint.h"
#include "index/records/inventory.h"
#include "index/store/range_check.h"
#include "index/store/store.h"

// A new checkpoint that has data files in common with an earlier one of its store, its base
// (docs/format.md, "Steps that share data files"): by a save that finds tensors unchanged, by one
// that inherits what it does not save, by `derive`. Who decides what is taken is not known here.
//
//   TakenFromBase taken = ...;                        // Which tensors and objects.
//   PlanLinks(base, staging, taken)                   // Once: which files are linked, which
//   copied. BaseLinker::LinkFiles(part, parts)                // On each of `parts` ranks, its
//   share. BaseLinker::Records(part, parts) -> a manifest    // Likewise.
//
// No function here changes the base: its files get names in the staging, and that is all.

namespace tensormount {

// What a new checkpoint has of its base, as it is there.
struct TakenFromBase {
  std::vector<bool> tensors;  // By ordinal in the base.
  std::vector<bool> objects;  // By position in the base's Objects(): parts, not keys.
  // New keys, by ordinal and by position; empty: all as they are.
  std::vector<std::string> tensor_keys;
  std::vector<std::string> object_keys;
  static TakenFromBase Nothing(std::size_t tensors, std::size_t objects);
  bool any() const;
};

// What becomes of a data file of the base. Numbers travel between ranks.
enum class BaseFileUse : std::uint8_t {
  kNone = 0,     // Nothing of it is wanted.
  kLink = 1,     // It gets a name in the new checkpoint.
  kCopy = 2,     // What is live in it is copied: there is too little of that.
  kForeign = 3,  // Of an adopted base: its records are taken, nothing else.
};

struct LinkPlan {
  std::vector<BaseFileUse> files;  // By number in the base's index.
  // By number: whether the header of a linked file would speak of tensors that are dead, or that go
  // by other keys.
  std::vector<bool> header_lies;
  std::uint64_t live_bytes = 0;  // Of what is taken, as it is stored.
};

// Decides by how much of each file is live. Reads the extents of all tensors of the base, which
// must be one of a store (it has a COMMIT). kDataLoss where its records break a rule.
Result<LinkPlan> PlanLinks(const OpenedCheckpoint& base, const Staging& staging,
                           const TakenFromBase& taken);

// What was done, of one rank or of all.
struct LinkCounts {
  std::uint64_t files_linked = 0;
  std::uint64_t bytes_linked = 0;  // Lengths of these files.
  // Copied as a whole, because links were refused, and why the first of them was.
  std::uint64_t files_copied = 0;
  std::uint64_t bytes_copied = 0;  // Live ranges that were copied into a pack, too.
  std::string refused;
  void Add(const LinkCounts& o);
};

// Records for one manifest, numbered by itself, and their hashes.
struct LinkedRecords {
  Inventory inventory;
  std::vector<Hash128> leaves;
  bool paged = false;
  bool empty() const { return inventory.files.empty() && inventory.tensors.empty(); }
};

// Does what a plan says, in `parts` shares that need not know of each other (ranks, one process).
// Everything that it refers to must outlive it. Of one thread.
class BaseLinker {
 public:
  // `cancel`, where not null, set: ends with kCancelled.
  BaseLinker(FileSystem& fs, const OpenedCheckpoint& base, const Staging& staging,
             const TakenFromBase& taken, const LinkPlan& plan,
             const std::atomic<bool>* cancel = nullptr)
      : fs_(fs), base_(base), staging_(staging), taken_(taken), plan_(plan), cancel_(cancel) {}

  // Gives share `part` of the linked files their names in the staging; where that is refused,
  // copies them, sealed and synced. The folder is not synced. Errors name the file.
  Status LinkFiles(std::uint32_t part, std::uint32_t parts, LinkCounts& counts);

  // What share `part` of the base's manifests say of what is taken, and of the dead ranges of
  // linked files. Copies live ranges of files that are not linked into a pack of its own, compared
  // with their hashes, sealed and synced. kDataLoss where the base is damaged.
  Result<LinkedRecords> Records(std::uint32_t part, std::uint32_t parts, LinkCounts& counts);

  // All of it as one share, and its manifest (LinkedManifestName), durably.
  Status LinkAll(std::uint64_t in_a_row, LinkCounts& counts);

  // Takes the names and files of a share away again, as far as it made them, where nothing is taken
  // after all.
  void Discard(std::uint32_t part, std::uint32_t parts);

 private:
  class Gatherer;
  // `use(number of the file)` for each linked file of a share.
  template <typename Use>
  Status ForEachLinked(std::uint32_t part, std::uint32_t parts, Use use) {
    std::uint32_t number = 0;
    for (std::size_t f = 0; f < plan_.files.size(); ++f) {
      if (plan_.files[f] != BaseFileUse::kLink || number++ % parts != part) continue;
      TENSORMOUNT_RETURN_IF_ERROR(use(static_cast<std::uint32_t>(f)));
    }
    return Status();
  }
  Status LinkFile(std::uint32_t number, std::uint32_t part, std::uint32_t parts,
                  LinkCounts& counts);
  Status FindRanges(std::uint32_t part, std::uint32_t parts);
  Status CopyFile(std::uint32_t number, File& from, const std::string& to);

  FileSystem& fs_;
  const OpenedCheckpoint& base_;
  const Staging& staging_;
  const TakenFromBase& taken_;
  const LinkPlan& plan_;
  const std::atomic<bool>* const cancel_;
  std::vector<std::vector<CheckedRange>> ranges_;  // By file, of a share; empty: not found yet.
};

// The base of a staging: the checkpoint of this uuid at STORE/NAME, or in .trash where it was moved
// to meanwhile. Looks a few times: who prunes may be moving it back, since the staging names it.
// kNotFound, kStale: it is gone, or another one has its name; others: what opening it failed with.
Result<std::shared_ptr<OpenedCheckpoint>> OpenBase(FileSystem& fs, const std::string& store,
                                                   const std::string& name, const Uuid& uuid);

// "data/<short uuid>-c3.bin": what share `part` copied of files that are not linked.
std::string CopiedPackName(const Staging& staging, std::uint32_t part);

// "manifest/l3-12.tmm": what share `part` linked, in the `in_a_row`th save in a row that links
// files.
std::string LinkedManifestName(std::uint32_t part, std::uint64_t in_a_row);

// How many saves in a row have linked files, up to this checkpoint, as the names of its manifests
// say: 0 where it linked none.
std::uint64_t SavesInARowThatReused(const CheckpointIndex& index);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_LINKING_H_
