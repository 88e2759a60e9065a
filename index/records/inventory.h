// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_INVENTORY_H_
#define TENSORMOUNT_INDEX_RECORDS_INVENTORY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

#include "base/coding.h"
#include "base/file_system.h"
#include "base/hash.h"
#include "index/records/extent_table.h"
#include "index/records/row_spool.h"
#include "shard/tensor_meta.h"
#include "shard/value_counts.h"

namespace tensormount {

struct TensorRecord;
// A TensorPass calls a TensorUse for each tensor in order, with its extents.
using TensorUse = std::function<Status(const TensorRecord&)>;
using TensorPass = std::function<Status(const TensorUse&)>;

// 128 bits, written as 32 hex digits. Random, except for a foreign checkpoint, where they are a
// hash.
struct Uuid {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  // Random bits from the kernel's generator, so that ranks, containers or forked processes that
  // start at the same time get different uuids.
  static Uuid Random();
  // Accepts only 32 lower-case hex digits, the form of ToString. Returns nullopt for other text.
  static std::optional<Uuid> Parse(std::string_view hex);
  std::string ToString() const;
  // The first 8 hex digits, which are part of data file names.
  std::string Short() const { return ToString().substr(0, 8); }
  bool IsZero() const { return high == 0 && low == 0; }
  friend auto operator<=>(const Uuid&, const Uuid&) = default;
};

// Kind of a data file, and how the file may be read. Byte n of a kTensorFile is byte n of its
// tensor. Other programs can read kRankShard and kSafetensors. A kPack can be read only with
// tensormount's records. The numbers are on disk.
enum class Placement : std::uint8_t {
  kTensorFile = 1,  // One tensor in global row-major order, from offset 0.
  kRankShard = 2,   // Regions of one writer; a valid safetensors file.
  kPack = 3,        // Small tensors and objects of one writer.
  kForeign = 4,     // Another program's file, read in place.
  // Whole tensors of one writer; a valid safetensors file with the tensors' keys.
  kSafetensors = 5,
};
std::string_view PlacementName(Placement p);

struct FileRecord {
  // Path below the checkpoint: "data/<short uuid>-r0.safetensors". Foreign files: path below
  // CheckpointInfo::root.
  std::string name;
  Placement placement = Placement::kRankShard;
  std::uint64_t length = 0;
  // Hash over the file's stored ranges (index/records/file_roots.h). Zero for foreign files.
  Hash128 root;
  // Foreign files: the mtime when the file was recorded. A file whose length or mtime differs now
  // is refused.
  std::int64_t mtime_seconds = 0;
  std::int64_t mtime_nanoseconds = 0;
};

// Bytes of a data file outside of tensors and objects (safetensors headers). They are hashed and
// listed like chunks, so that every byte of the file is covered.
struct ExtraRange {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  // ChunkRoot of the range's leaf hashes. The leaf hashes begin at position `first_leaf` in the
  // leaf section of manifest number `manifest`.
  Hash128 hash;
  std::uint32_t manifest = 0;
  std::uint64_t first_leaf = 0;
};

// One tensor and all its chunks.
struct TensorRecord {
  TensorMeta meta;
  ExtentTable extents{0};
  Crc64 digest = 0;
  bool has_digest = false;  // False only for tensors of foreign files.
  std::int64_t mtime = 0;   // Seconds since 1970; decided at publish.
  // Counts of the values of all its chunks, if a manifest has them (docs/format.md, "Value
  // counts").
  std::optional<ValueCounts> counts = std::nullopt;
  explicit TensorRecord(TensorMeta m) : meta(std::move(m)), extents(meta.shape().rank()) {}
};

// File number of an object part in the coordinator's manifest, which lists objects without file
// positions.
inline constexpr std::uint32_t kNoFile = 0xFFFFFFFF;
// Manifest number of a stored range without hashes. Only foreign files may have such ranges.
inline constexpr std::uint32_t kNoManifest = 0xFFFFFFFF;

// An opaque object without parts, or one part of an object. Parts form a grid: `index` is the
// position of the part in `grid`. Both are empty for an object without parts. A part is one stored
// range.
struct ObjectRecord {
  std::string key;
  Dims index;
  Dims grid;
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  Hash128 hash;
  std::uint32_t manifest = 0;
  std::uint64_t first_leaf = 0;
  std::int64_t mtime = 0;
  bool has_hash() const { return manifest != kNoManifest; }
};

// Facts about a checkpoint as a whole.
struct CheckpointInfo {
  Uuid uuid;
  std::uint64_t generation = 0;
  // Uuid of the parent. Zero: no parent.
  Uuid parent;
  std::string parent_name;
  // Program that made the checkpoint: "tensormount 0.1".
  std::string producer;
  std::uint32_t world_size = 0;
  std::int64_t created = 0;     // Time of the publish, in seconds since 1970.
  std::int64_t json_mtime = 0;  // Mtime of checkpoint.json.
  std::int64_t common_mtime = 0;
  // False: all data are in foreign files below the directory `root` (absolute path).
  bool self_contained = true;
  std::string root;
};

// All logical records of a checkpoint, merged from manifests or made from a foreign checkpoint: the
// form in which metadata pass between the parts of the program.
//
//   manifests --InventoryMerger--> Inventory --index_record::ForEach--> index (SST file or memory)
//   foreign formats --ForeignBuilder--^         --ContentRoot--> COMMIT
//   index --CheckpointIndex::ToInventory--^     --CheckComplete--> the check before a publish
//
// File and manifest numbers in the records are positions in the inventory's own tables. "Sorted"
// below is true for results of InventoryMerger::Finish and of an index; the inventory of a manifest
// has its writer's order. Takes 100 bytes for a chunk of a matrix. A value type without locks.
struct Inventory {
  CheckpointInfo info;
  std::vector<FileRecord> files;       // Sorted by name.
  std::vector<std::string> manifests;  // Names below the checkpoint; position = manifest number.
  std::vector<TensorRecord> tensors;   // Sorted by key (bytes); position = ordinal.
  std::vector<ObjectRecord> objects;   // Sorted by key, then index.
  std::vector<ExtraRange> extras;
  std::map<std::string, CommonValue> common;
};

// XXH3-128 of the sorted logical records (key, dtype, shape, region, content hash; objects; common
// values) without file positions and mtimes. Two saves of the same state with the same sharding
// have the same root; another sharding changes it, though all digests are equal.
Hash128 ContentRoot(const Inventory& inventory);

// Computes ContentRoot for tensors that are passed one by one. Not thread-safe.
class RootHasher {
 public:
  // `inventory` must outlive this object; it provides the objects, the common values and the number
  // of tensors.
  explicit RootHasher(const Inventory& inventory);
  // Adds a tensor. Call it once for each tensor, in the order of the inventory.
  void Add(const TensorRecord& tensor);
  Hash128 Finish();

 private:
  void AddBytes(std::string_view bytes);
  void AddField();
  void Flush();

  const Inventory& inventory_;
  Xxh3Stream stream_;
  // Input that is not hashed yet. Hashing each of millions of small fields by a call of its own
  // would cost more than the hash.
  std::string pending_;
  ByteWriter field_;
};

// The coordinator's manifest for a merged inventory. It has info and common values. It lists
// tensors without chunks (key, dtype, shape, digest, mtime, counts), and object parts without file
// positions (key, index, grid, length, hash, mtime; the file is kNoFile). It has no files, extra
// ranges or manifests.
Inventory CoordinatorInventory(const Inventory& merged);

// Merges the manifests of all writers. kCoordinatorManifest holds info and common values. That of a
// published checkpoint also has mtimes and the list of all tensors and objects. kDataLoss if
// writers disagree on uuid, dtype, shape, a file's properties or a common value, repeat an object
// part, or differ from the coordinator's list or digests, or if stored ranges overlap or exceed
// their file (index/records/file_roots.h).
// Use an object for one merge: Add each manifest once, then call Finish, or FinishTables and
// TakeRows. Discard the object after a failure. Not thread-safe.
class InventoryMerger {
 public:
  // A merger that keeps all extents in memory until they are taken.
  InventoryMerger() = default;
  // A merger that moves the extents to a file at `path` whenever they take more than `memory` bytes
  // (index/records/row_spool.h). `path` must not exist; the file is unlinked when it is made. `fs`
  // must outlive the merger.
  InventoryMerger(FileSystem& fs, std::string path, std::uint64_t memory)
      : spool_fs_(&fs), spool_path_(std::move(path)), spool_memory_(memory) {}

  // Adds a manifest. File numbers of `from_manifest` are positions in its own file table.
  Status Add(const Inventory& from_manifest, const std::string& manifest_name);
  // Merges and sorts everything, so the order of Add does not matter. A tensor's digest is the XOR
  // of the writers' contributions. Table rows are not decoded.
  Result<Inventory> Finish();
  // Like Finish, but all extents are empty, and roots of files that several manifests name are not
  // final yet. Needs memory for tensors and files, not for chunks.
  Result<Inventory> FinishTables();
  // Sets the extents of each tensor in order and calls `use`, which may move them away. `inventory`
  // is the result of FinishTables. Then sets the roots of files that several manifests name.
  Status TakeRows(Inventory& inventory, const std::function<Status(TensorRecord&)>& use);

 private:
  Status AddTensor(const TensorRecord& tensor, std::span<const std::uint32_t> file_map,
                   std::uint32_t manifest);
  Status AddObject(const ObjectRecord& object, std::span<const std::uint32_t> file_map,
                   std::uint32_t manifest);
  // Compares the merged tensors and objects with the coordinator's list, and takes the list's
  // mtimes.
  Status ApplyCoordinator();
  // Renumbers files and manifests by sorted name, so that the same manifests give the same index in
  // any order of Add. Returns false if no number changed.
  bool SortNumbers();
  // Positions in merged_.tensors, in the order of the keys.
  std::vector<std::uint32_t> TensorsByKey() const;

  Inventory merged_;
  std::map<std::string, std::uint32_t, std::less<>> file_number_;
  // Maps a key to the tensor's position in merged_.tensors, which are sorted only at the end.
  std::unordered_map<std::string, std::size_t> tensor_number_;
  // The extents of each tensor, by position in merged_.tensors. File and manifest numbers are in
  // the order of Add.
  RowSpool rows_;
  FileSystem* spool_fs_ = nullptr;
  std::string spool_path_;
  std::uint64_t spool_memory_ = 0;
  // Use of each file, by file number in the order of Add.
  struct FileUse {
    std::uint64_t ranges = 0;
    // Whether several manifests name the file. No single manifest gives the root of such a file.
    bool shared = false;
  };
  std::vector<FileUse> file_use_;
  // Set by FinishTables. file_map_ and manifest_map_ map numbers in the order of Add to numbers by
  // sorted name; tensor_order_ maps final positions of tensors to positions in the order of Add.
  std::vector<std::uint32_t> file_map_;
  std::vector<std::uint32_t> manifest_map_;
  std::vector<std::uint32_t> tensor_order_;
  bool renumbered_ = false;
  std::optional<Inventory> coordinator_;
  // Uuid of the first manifest that has one. The others must have the same.
  Uuid uuid_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_INVENTORY_H_
