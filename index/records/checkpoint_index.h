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

// Path of the index file below the checkpoint's directory. COMMIT lists the index under this name.
inline constexpr std::string_view kIndexName = "index/index.sst";
// Number of bytes at the end of the index file. Their hash is checked at every open.
inline constexpr std::uint64_t kIndexTailBytes = 64 * 1024;
// An index of up to this size is compared with its hash at open, which takes a millisecond from the
// page cache.
inline constexpr std::uint64_t kMaxFullyCheckedIndexBytes = 4 << 20;

// The index record of one tensor. The extents are separate records.
struct TensorEntry {
  // Position in the byte order of the keys, from 0 without gaps. The mount lists keys by ordinal,
  // and the keys with a common prefix are a range of ordinals.
  std::uint32_t ordinal = 0;
  TensorMeta meta;
  Crc64 digest = 0;
  bool has_digest = false;
  std::int64_t mtime = 0;
  // Number of table rows in the tensor's extent table. Reading an extent table of another size
  // fails.
  std::uint64_t chunks = 0;
  // Offset of the tensor's bytes in model.safetensors. Valid only if in_safetensors is true.
  std::uint64_t safetensors_offset = 0;
  // Whether model.safetensors has the tensor. Always false in an index in memory.
  bool in_safetensors = false;
  // Whether the extent table may have strided chunks.
  bool wide = false;
  // Whether the extent table may have pending chunks, which OpenedCheckpoint::Extents locates.
  bool pending = false;
};

class LayerNames;
class MemoryTable;
class NameBinding;
struct LayerEntry;

// Sorted key/value records: the interface between an index and its storage, with four
// implementations:
//   SstTable         the file index/index.sst of a published checkpoint
//   MemoryTable      records made from an Inventory: for foreign checkpoints, which have no
//                    index, and for an index that was rebuilt
//   MappedTable      records that a name map makes from those of another index
//   RecoveringTable  an SstTable that switches to another table when a read meets a damaged block
// Tables hold bytes; CheckpointIndex checks the records, and treats all of them as untrusted input.
// Get and Scan are thread-safe.
class Table {
 public:
  virtual ~Table() = default;
  // The value of record `key`. kNotFound if the table has no such record.
  virtual Result<std::string> Get(std::string_view key) const = 0;
  // Calls fn for the records with this prefix in key order, beginning at key `from`, until fn
  // returns false.
  virtual Status Scan(
      std::string_view prefix, std::string_view from,
      const std::function<bool(std::string_view key, std::string_view value)>& fn) const = 0;
  // The damage that RecoveringTable bypasses, as text. Empty: none was found.
  virtual std::string recovered() const { return {}; }
};

// The chunk index of one checkpoint: an SST file, or the same records in memory. Immutable;
// thread-safe. Extent tables that were read are kept in a bounded cache. docs/format.md, "Index",
// has the record kinds.
// Costs: an open reads the end of the file, the info record and the lists of files and manifests,
// whatever the number of tensors, and all of a small file (kMaxFullyCheckedIndexBytes). At makes
// one look-up in the table, Find two. Extents makes one look-up and reads one record for each MiB
// of the extent table. ForEachTensor caches nothing.
//
// An open checks that the numbers of files and manifests are dense, and that names are safe to be
// joined to the checkpoint's directory. Reads of tensors check that ordinals are dense, and
// look-ups by key that the record has the key. ExtentTable::At checks the fields of a table row.
// Whether all rows cover their tensor is checked when they are written (completeness.h) and by
// `verify`, not at open.
class CheckpointIndex {
 public:
  // Writes the records of `inventory` (sorted, complete, with file roots) to a new file `name`
  // (kIndexName) below the checkpoint's `directory`, whose index/ exists. Syncs the file but not
  // its directory. Returns the commit entry (name, length, hash, tail). After a failure a partial
  // file may remain.
  static Result<CommitRecord::Entry> WriteSst(FileSystem& fs, const Inventory& inventory,
                                              const Hash128& content_root,
                                              const std::string& directory,
                                              const std::string& name);
  // WriteSst for extents that `pass` hands over tensor by tensor (index_record::ForEach). The
  // extents in `inventory` are not used. `pass` may check the extents, and may set the file roots
  // of `inventory` and `content_root`: both are read after `pass` has returned.
  static Result<CommitRecord::Entry> WriteSst(FileSystem& fs, const Inventory& inventory,
                                              const TensorPass& pass, const Hash128& content_root,
                                              const std::string& directory,
                                              const std::string& name);
  static Result<std::shared_ptr<const CheckpointIndex>> FromInventory(const Inventory& inventory);
  // Opens the index file and compares it with COMMIT: length, hash of the tail, hash of the whole
  // file if it has at most `check_bytes` bytes, uuid, content root, generation and parent.
  // kDataLoss for the index of another checkpoint.
  // `again` makes the same records from another source when a later read meets damage
  // (RecoveringTable). One thread at a time calls `again`, until a call succeeds. If `again` is
  // empty, a read that meets damage fails.
  static Result<std::shared_ptr<const CheckpointIndex>> OpenSst(
      FileSystem& fs, const std::string& directory, const CommitRecord& commit,
      std::uint64_t check_bytes = kMaxFullyCheckedIndexBytes,
      std::function<Result<std::shared_ptr<const Table>>()> again = {});

  // The index of `source` as a name map shows it (index/records/mapped_table.h), without the common
  // records for which `leave_out`, if not empty, returns true.
  static Result<std::shared_ptr<const CheckpointIndex>> Mapped(
      std::shared_ptr<const CheckpointIndex> source, std::shared_ptr<const NameBinding> binding,
      const std::function<bool(std::string_view name)>& leave_out = {});

  // A table in memory with the same records that WriteSst writes for `inventory`.
  static Result<std::shared_ptr<const MemoryTable>> RecordsOf(const Inventory& inventory);

  // Whether another copy of the records may succeed where a read failed with `status`. False for OK
  // and for failures of this process (memory, descriptors, cancellation, a bug). True for all other
  // errors, including kNotFound.
  static bool IsCopyDamaged(const Status& status);
  // The damage that another copy of the records bypasses, as text. Empty: none was found.
  std::string recovered() const { return table_->recovered(); }
  // Whether FromInventory or Mapped made this index. Chunks may then be pending, and
  // SafetensorsHeader has no header.
  bool in_memory() const { return in_memory_; }
  const CheckpointInfo& info() const { return info_; }
  const std::vector<FileRecord>& files() const { return files_; }
  const std::vector<std::string>& manifests() const { return manifests_; }
  std::uint32_t tensor_count() const { return tensor_count_; }
  std::uint64_t tensor_bytes() const { return tensor_bytes_; }
  std::uint64_t chunk_count() const { return chunk_count_; }

  // The index record of tensor `key`. kNotFound: "no tensor KEY".
  Result<TensorEntry> Find(std::string_view key) const;
  Result<TensorEntry> At(std::uint32_t ordinal) const;
  // Calls fn for each tensor in key order, beginning at ordinal `first`, until fn returns false.
  Status ForEachTensor(std::uint32_t first,
                       const std::function<bool(const TensorEntry&)>& fn) const;
  // The first ordinal whose key is >= `key`, for prefix listings of the mount. Returns
  // tensor_count() if all keys are smaller. [LowerBound("a."), LowerBound("a/")) are the keys that
  // begin with "a.", because '/' follows '.'.
  Result<std::uint32_t> LowerBound(std::string_view key) const;
  // The recorded extent table of tensor `ordinal`. Pending chunks are not located:
  // OpenedCheckpoint::Extents does that.
  Result<std::shared_ptr<const ExtentTable>> Extents(std::uint32_t ordinal) const;
  // The same without a look-up of the tensor. `entry` is of this index. `keep`: whether the table
  // is kept in the index's cache; false for callers that keep it themselves.
  Result<std::shared_ptr<const ExtentTable>> Extents(const TensorEntry& entry,
                                                     bool keep = true) const;

  // All object parts, by key and then by grid index. Objects, ObjectParts and Extras decode the
  // records on each call, because an open or a listing calls them once.
  Result<std::vector<ObjectRecord>> Objects() const;
  // The parts of object `key`. kNotFound if there is no such object.
  Result<std::vector<ObjectRecord>> ObjectParts(std::string_view key) const;
  Result<std::vector<ExtraRange>> Extras() const;
  // All common records, including those with reserved names.
  Result<CommonValues> CommonRecords() const;
  // The common records, sorted by kind.
  Result<CommonState> Common() const;
  // The value of one common record. Other records are not decoded, because `info` and the mount ask
  // for single values of large trees. kNotFound if there is no such record.
  Result<CommonValue> CommonRecord(std::string_view name) const;
  // The common value that a path names, as in rules and `log --show`: "eval.loss" is the value
  // "eval.loss" or, if that does not exist, the item "loss" of the value "eval" (CommonValue::At).
  // Names may contain dots, so longer names are tried first. kNotFound if there is none.
  Result<CommonValue> CommonAt(std::string_view path) const;
  // The layer names of stacked tensors (index/records/layer_names.h), decoded once.
  Result<std::shared_ptr<const LayerNames>> Layers() const;
  // The layer of a stacked tensor with the name `key`; nullopt if no layer has that name. Does not
  // scan the tensors.
  Result<std::optional<LayerEntry>> ResolveLayer(std::string_view key) const;
  // The header of model.safetensors, made when the index was written. The tensors are sorted by
  // falling element size, then by key, so that each is aligned. kUnsupported if there is no header,
  // for example because it would exceed the format's limit.
  Result<std::string> SafetensorsHeader() const;
  // Length of the header of model.safetensors; 0 if there is none. Reads nothing.
  std::uint64_t safetensors_header_bytes() const { return safetensors_header_bytes_; }

  // All records of the index as an Inventory, for verify, adopt and repair.
  Result<Inventory> ToInventory() const;
  const Table& table() const { return *table_; }

 private:
  CheckpointIndex() = default;
  // Makes an index from `table`, and reads the records that the index keeps in memory.
  static Result<std::shared_ptr<const CheckpointIndex>> Load(std::unique_ptr<Table> table,
                                                             bool in_memory);
  // Reads the info record and the lists of files and manifests.
  Status LoadLists();

  // These members are immutable after Load. Only the two caches need locks.
  std::unique_ptr<Table> table_;
  bool in_memory_ = false;
  // Extent tables by ordinal. The weight of a table is the size of its packed rows (100 bytes for a
  // chunk of a matrix).
  static constexpr std::size_t kExtentCacheBytes = std::size_t{16} << 20;
  mutable LruCache<std::uint32_t, const ExtentTable> extents_{kExtentCacheBytes};
  mutable std::mutex layers_mutex_;
  // Null until first use. Guarded by layers_mutex_.
  mutable std::shared_ptr<const LayerNames> layers_;
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
