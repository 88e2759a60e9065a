// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_LINKING_H_
#define TENSORMOUNT_INDEX_STORE_LINKING_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "base/hash.h"
#include "index/read/checkpoint.h"
#include "index/records/inventory.h"
#include "index/records/leaf_section.h"
#include "index/store/range_check.h"
#include "index/store/store.h"

// Makes a new checkpoint that shares data files with an earlier checkpoint of its store, its base
// (docs/format.md, "Steps that share data files"). Used by saves that find tensors unchanged, by
// saves that inherit tensors, and by `derive`. The caller decides which tensors and objects are
// taken, and then calls:
//
//   ReusedFromBase taken = ...;                  // Which tensors and objects.
//   PlanLinks(base, staging, taken)             // Once: which files are linked or copied.
//   BaseLinker::LinkFiles(part, parts)          // On each of `parts` ranks: its share.
//   BaseLinker::Records(part, parts)            // On each rank: the records of its manifest.
//
// The base does not change, except that its files get links in the staging.

namespace tensormount {

struct Manifest;

// The tensors and objects that a new checkpoint takes from its base.
struct ReusedFromBase {
  // Whether each tensor is taken, by its ordinal in the base.
  std::vector<bool> tensors;
  // Whether each object part is taken, by its position in the base's Objects().
  std::vector<bool> objects;
  // New keys of tensors by ordinal, and of object parts by position. An empty vector: keys do not
  // change.
  std::vector<std::string> tensor_keys;
  std::vector<std::string> object_keys;
  static ReusedFromBase Nothing(std::size_t tensors, std::size_t objects);
  bool any() const;
};

// How a new checkpoint uses a data file of its base. The numbers are sent between ranks.
enum class BaseFileUse : std::uint8_t {
  kNone = 0,     // Nothing in the file is taken.
  kLink = 1,     // The file is hard-linked into the new checkpoint.
  kCopy = 2,     // Live ranges are copied: too little is live, or the new save needs the name.
  kForeign = 3,  // A file of an adopted base: only records are taken.
};

struct LinkPlan {
  // The use of each file, by its number in the base's index.
  std::vector<BaseFileUse> files;
  // Whether the header of a used file, by number, lists tensors that are dead or have new keys.
  std::vector<bool> stale_safetensors_header;
  std::uint64_t live_bytes = 0;  // Stored bytes that are taken.
};

// Decides the use of each file of the base by the live share of its bytes. Reads the extents of all
// tensors of the base, which must be a checkpoint of a store. kDataLoss if a record of the base
// breaks a rule.
Result<LinkPlan> PlanLinks(const OpenedCheckpoint& base, const Staging& staging,
                           const ReusedFromBase& taken);

// Statistics of one rank, or the sums of all ranks.
struct LinkCounts {
  std::uint64_t files_linked = 0;
  std::uint64_t bytes_linked = 0;  // Sum of the lengths of the linked files.
  // Number of files that were copied because a link was refused. `refused` is the first reason.
  std::uint64_t files_copied = 0;
  // Bytes of copied files and of live ranges that were copied into a pack.
  std::uint64_t bytes_copied = 0;
  std::string refused;
  void Add(const LinkCounts& o);
};

// Records for one new manifest, with their leaf hashes. File numbers are positions in
// `inventory.files`.
struct LinkedRecords {
  Inventory inventory;
  std::vector<Hash128> leaves;
  LeafExtras extras = {.counts = true};
  bool empty() const { return inventory.files.empty() && inventory.tensors.empty(); }
};

// Executes a plan in `parts` independent shares, one for each rank (or a single share). The
// arguments of the constructor must outlive the object. For one thread.
class BaseLinker {
 public:
  // If `cancel` is not null and becomes true, calls return kCancelled.
  BaseLinker(FileSystem& fs, const OpenedCheckpoint& base, const Staging& staging,
             const ReusedFromBase& taken, const LinkPlan& plan,
             const std::atomic<bool>* cancel = nullptr)
      : fs_(fs), base_(base), staging_(staging), taken_(taken), plan_(plan), cancel_(cancel) {}

  // Links the files of share number `part` into the staging. If a link is refused, copies the file,
  // seals and syncs it. Does not sync the directory. Errors name the file.
  Status LinkFiles(std::uint32_t part, std::uint32_t parts, LinkCounts& counts);

  // Makes the records of share number `part`: records of all data that are taken, and of the dead
  // ranges of linked files. Copies the live ranges of files with kCopy into a new pack; the pack is
  // verified, sealed and synced. kDataLoss: the base is damaged.
  Result<LinkedRecords> Records(std::uint32_t part, std::uint32_t parts, LinkCounts& counts);

  // Calls LinkFiles and Records for a single share, and writes the share's manifest
  // (LinkedManifestName) durably.
  Status LinkAll(std::uint64_t consecutive_linked, LinkCounts& counts);

  // Removes the links and files that a share made. Used if the new checkpoint takes nothing after
  // all.
  void Discard(std::uint32_t part, std::uint32_t parts);

 private:
  class Gatherer;
  // Calls `use(file number)` for each linked file of a share.
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
  // Calls `use(name, manifest)` for the manifests of share number `part` of the base's manifests.
  Status ForEachManifest(const std::function<Status(const std::string&, const Manifest&)>& use,
                         std::uint32_t part = 0, std::uint32_t parts = 1);
  Status CopyFile(std::uint32_t number, File& from, const std::string& to);

  FileSystem& fs_;
  const OpenedCheckpoint& base_;
  const Staging& staging_;
  const ReusedFromBase& taken_;
  const LinkPlan& plan_;
  const std::atomic<bool>* const cancel_;
  // Hashed ranges of each file of one share, for CopyFile. Empty: not collected yet.
  std::vector<std::vector<CheckedRange>> ranges_;
};

// Opens the base of a staging: the checkpoint `uuid` at STORE/NAME, or in .trash. Tries a few
// times, because a pruner that sees the staging's BASE may be moving the checkpoint back. kNotFound
// or kStale: the checkpoint does not exist any more, or another one has its name. Other codes: the
// error of the open.
Result<std::shared_ptr<OpenedCheckpoint>> OpenBase(FileSystem& fs, const std::string& store,
                                                   const std::string& name, const Uuid& uuid);

// Name of the pack with the ranges that share number `part` copied: "data/<short uuid>-c3.bin".
std::string CopiedPackName(const Staging& staging, std::uint32_t part);

// Name of the manifest with the records that share number `part` linked: "manifest/l3-12.tmm".
// `consecutive_linked` is the number of consecutive saves that linked files.
std::string LinkedManifestName(std::uint32_t part, std::uint64_t consecutive_linked);

// Number of consecutive saves that linked files, up to this checkpoint, taken from the names of its
// manifests. 0 if this checkpoint linked no files. A full save that links inherited data counts 1.
std::uint64_t ConsecutiveLinkedSaves(const CheckpointIndex& index);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_STORE_LINKING_H_
