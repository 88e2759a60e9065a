// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_CHECKPOINT_INDEX_H_
#define TENSORMOUNT_INDEX_RECORDS_CHECKPOINT_INDEX_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/commit_record.h"
#include "index/records/common_state.h"
#include "index/records/inventory.h"
#include "index/records/lru_cache.h"

namespace tensormount {

// Name of the index below the checkpoint's folder, as COMMIT lists it.
inline constexpr std::string_view kIndexName = "index/index.sst";
// How much of its end is checked at open.
inline constexpr std::uint64_t kIndexTailBytes = 64 * 1024;
// An index of up to this size is compared with its hash at open: a millisecond where it is cached.
inline constexpr std::uint64_t kIndexCheckedWhole = 4 << 20;

// What the index says of one tensor, without its extents.
struct TensorEntry {
  // Tensors are numbered in the byte order of their keys, from 0 without gaps: the mount lists and
  // pages by ordinal, and a prefix of keys is a range of ordinals.
  std::uint32_t ordinal = 0;  // Position in key order.
  TensorMeta meta;
  Crc64 digest = 0;
  bool has_digest = false;
  std::int64_t mtime = 0;
  // Rows of its extent table. Compared with the table when that is read.
  std::uint64_t chunks = 0;
  // Of its bytes in model.safetensors; if in_safetensors.
  std::uint64_t safetensors_offset = 0;
  bool in_safetensors = false;  // False: a dtype that the format lacks, or an index in memory.
  bool wide = false;            // A chunk may be strided.
  bool pending = false;         // A chunk is pending: OpenedCheckpoint::Extents.
};

class LayerNames;
class MemoryTable;
struct LayerEntry;

// Sorted key/value records; the one thing that differs between an SST file and memory.
// How records are kept, and the only seam between an index and its storage. There are three:
//   SstTable         the file index/index.sst, as every published checkpoint has it
//   MemoryTable      records made from an Inventory: of checkpoints in foreign formats, which have
//                    no index, and of an index that had to be rebuilt in place
//   RecoveringTable  an SstTable with a way to such a MemoryTable, for a block that turns out to be
//                    damaged when it is read, maybe hours after the open
// A table knows bytes only; what a record must be is checked by CheckpointIndex, which treats all
// three as data from outside. Get and Scan are thread-safe in all of them.
class Table {
 public:
  virtual ~Table() = default;
  virtual Result<std::string> Get(std::string_view key) const = 0;  // kNotFound
  // Calls fn for records with this prefix in key order from `from` on, until it returns false.
  virtual Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const = 0;
  // CheckpointIndex::recovered.
  virtual std::string recovered() const { return {}; }
};

// The chunk index of one checkpoint: an SST file, or the same records in memory (foreign files,
// rebuilt ones). Immutable; thread-safe. Extent tables are decoded once and kept in a bounded
// cache. docs/format.md, "Index", has the record kinds.
// Costs: an open reads the end of the file, the info record and the lists of files and manifests,
// whatever the number of tensors. Find and At are one or two look-ups in the table (a binary search
// over the blocks, then inside of one), Extents one more for each MiB of rows. Nothing is kept of
// what ForEachTensor passes over.
//
// What callers may rely on, because it is checked here on every read: ordinals and numbers of files
// and manifests are dense, names are safe to be joined to the checkpoint's folder, and a record is
// of the key under which it was found. Rows of extent tables are checked by ExtentTable::At, and
// that they cover their tensor when they were written (completeness.h) and by `verify`, not at each
// open.
class CheckpointIndex {
 public:
  // Builds the records from `content` (sorted, complete, roots of files computed) into a new file
  // `name` (kIndexName) below `directory`, the checkpoint's, whose index/ exists. The file is
  // fsynced, its folder is not. Returns the commit entry (name, length, hash, tail). On failure the
  // file may be there in part.
  static Result<CommitRecord::Entry> WriteSst(FileSystem& fs, const Inventory& inventory,
                                              const Hash128& content_root,
                                              const std::string& directory,
                                              const std::string& name);
  // The same where extents come by in a pass (index_record::ForEach), for which nothing needs to be
  // known but the tables of tensors: `pass` may prove them on the way, and fill in roots of files
  // and `content_root`, which are read when it has returned.
  static Result<CommitRecord::Entry> WriteSst(FileSystem& fs, const Inventory& inventory,
                                              const TensorPass& pass, const Hash128& content_root,
                                              const std::string& directory,
                                              const std::string& name);
  static Result<std::shared_ptr<const CheckpointIndex>> FromInventory(const Inventory& inventory);
  // Checks length, tail and, up to `check_bytes`, the hash of all of it against COMMIT, and uuid
  // and content root in the SST's properties: an index of another checkpoint is kDataLoss.
  //
  // `check_bytes`: a file of up to this size is compared with its hash, a larger one only its tail.
  // `again`: the same records from elsewhere, for when damage shows only as they are read
  // (RecoveringTable). It is called at most once at a time, until it succeeds; without it damage is
  // an error of the read that meets it.
  static Result<std::shared_ptr<const CheckpointIndex>> OpenSst(
      FileSystem& fs, const std::string& directory, const CommitRecord& commit,
      std::uint64_t check_bytes = kIndexCheckedWhole,
      std::function<Result<std::shared_ptr<const Table>>()> again = {});

  // What Inventory's records are in an SST file, in memory.
  static Result<std::shared_ptr<const MemoryTable>> RecordsOf(const Inventory& inventory);

  // Whether a failure of reading it is a matter of this copy: the same records may stand elsewhere.
  // False for failures of this process: no memory, cancelled, a bug. True for all that reading the
  // same file again would not mend, kNotFound too.
  static bool IsLost(const Status& status);
  // What was found damaged since it was opened and is read from elsewhere now; empty: nothing.
  std::string recovered() const { return table_->recovered(); }
  // Made by FromInventory.
  // Where this is true chunks may be pending, and there is no header of model.safetensors.
  bool in_memory() const { return in_memory_; }
  const CheckpointInfo& info() const { return info_; }
  const std::vector<FileRecord>& files() const { return files_; }
  const std::vector<std::string>& manifests() const { return manifests_; }
  std::uint32_t tensor_count() const { return tensor_count_; }
  std::uint64_t tensor_bytes() const { return tensor_bytes_; }
  std::uint64_t chunk_count() const { return chunk_count_; }

  Result<TensorEntry> Find(std::string_view key) const;  // kNotFound "no tensor KEY"
  Result<TensorEntry> At(std::uint32_t ordinal) const;
  // In key order from `first` on; fn returns false to stop.
  Status ForEachTensor(std::uint32_t first,
                       const std::function<bool(const TensorEntry&)>& fn) const;
  // First ordinal whose key is >= `key`: prefix listings of the mount.
  // tensor_count() where all keys are smaller. So [LowerBound("a."), LowerBound("a/")) are the keys
  // that begin with "a.", '/' being the byte behind '.'.
  Result<std::uint32_t> LowerBound(std::string_view key) const;
  // As recorded: what is pending is resolved by OpenedCheckpoint::Extents.
  Result<std::shared_ptr<const ExtentTable>> Extents(std::uint32_t ordinal) const;

  // All parts of all objects, by key and then by their index on the grid. These lists are decoded
  // anew on each call: they are asked for once an open or a listing.
  Result<std::vector<ObjectRecord>> Objects() const;
  Result<std::vector<ObjectRecord>> ObjectParts(std::string_view key) const;  // kNotFound
  Result<std::vector<ExtraRange>> Extras() const;
  // Every common record, reserved ones too, and the state that they hold.
  Result<CommonValues> CommonRecords() const;
  Result<CommonState> Common() const;
  // One record. kNotFound.
  // Decodes no other: `info` and the mount ask for single values of checkpoints with large trees.
  Result<CommonValue> CommonRecord(std::string_view name) const;
  // Which names stand for layers of which stacked tensors (index/records/layer_names.h). Decoded
  // once.
  Result<std::shared_ptr<const LayerNames>> Layers() const;
  // What a key that is no tensor's own may stand for: one layer of a stacked tensor. nullopt:
  // nothing. Cheap: no scan.
  Result<std::optional<LayerEntry>> ResolveLayer(std::string_view key) const;
  // Bytes of model.safetensors before its data; made when the index was written, never in memory.
  // Tensors stand in it by falling element size, then by key, so that each is aligned. kUnsupported
  // where the header would pass the format's limit.
  Result<std::string> SafetensorsHeader() const;
  // Its length without reading it; 0 where there is none.
  std::uint64_t safetensors_header_bytes() const { return safetensors_header_bytes_; }

  // All records again as Inventory (verify, fsck, derive).
  Result<Inventory> ToInventory() const;
  const Table& table() const { return *table_; }

 private:
  CheckpointIndex() = default;
  // Reads what is kept in memory.
  static Result<std::shared_ptr<const CheckpointIndex>> Load(std::unique_ptr<Table> table,
                                                             bool in_memory);
  // The info record, and the tables of files and manifests, which every read needs.
  Status LoadLists();

  // Immutable once Load returned; what follows needs no lock but for the two caches.
  std::unique_ptr<Table> table_;
  bool in_memory_ = false;
  // Extent tables by ordinal, weighed by their packed rows: 100 bytes a chunk of a matrix.
  static constexpr std::size_t kExtentCacheBytes = std::size_t{16} << 20;
  mutable LruCache<std::uint32_t, const ExtentTable> extents_{kExtentCacheBytes};
  mutable std::mutex layers_mutex_;
  mutable std::shared_ptr<const LayerNames> layers_;  // Null until it is asked for; by the mutex.
  CheckpointInfo info_;
  std::vector<FileRecord> files_;
  std::vector<std::string> manifests_;
  std::uint32_t tensor_count_ = 0;
  std::uint64_t tensor_bytes_ = 0;
  std::uint64_t chunk_count_ = 0;
  std::uint64_t safetensors_header_bytes_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_CHECKPOINT_INDEX_H_
