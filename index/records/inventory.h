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

namespace tensormount {

struct TensorRecord;
// A pass over the tensors of an inventory calls it for each, in order, with its extents.
using TensorUse = std::function<Status(const TensorRecord&)>;
using TensorPass = std::function<Status(const TensorUse&)>;

// 128 random bits, written as 32 hex digits.
struct Uuid {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  // From the kernel's generator, never a fork's copy of a seed: two ranks or two containers that
  // start at the same moment must not get the same one.
  static Uuid Random();
  // 32 lower-case hex digits, the one form that ToString has; anything else is nullopt.
  static std::optional<Uuid> Parse(std::string_view hex);
  std::string ToString() const;
  std::string Short() const { return ToString().substr(0, 8); }  // In names of data files.
  bool IsZero() const { return high == 0 && low == 0; }
  friend auto operator<=>(const Uuid&, const Uuid&) = default;
};

// What a data file is; numbers are on disk.
// It says how a data file may be read: byte n of a kTensorFile is byte n of its tensor; kRankShard
// and kSafetensors are read by other programs too; a kPack only makes sense with our records.
enum class Placement : std::uint8_t {
  kTensorFile = 1,   // One tensor, global row-major order, offset 0.
  kRankShard = 2,    // All regions of one writer, a valid safetensors file.
  kPack = 3,         // Small tensors and objects of one writer.
  kForeign = 4,      // Somebody else's file, adopted in place.
  kSafetensors = 5,  // One writer, whole tensors, a valid safetensors file with true names.
};
std::string_view PlacementName(Placement p);

struct FileRecord {
  // "data/<short uuid>-r0.safetensors", below the checkpoint; of a foreign file below info.root.
  std::string name;
  Placement placement = Placement::kRankShard;
  std::uint64_t length = 0;
  Hash128 root;  // Over its stored ranges (index/records/file_roots.h); zero for foreign files.
  // Of a foreign file: when it was written last, as it was when it was looked at. One that has
  // another length or time now is refused.
  std::int64_t mtime_seconds = 0;
  std::int64_t mtime_nanoseconds = 0;
};

// Bytes of a data file that belong to no tensor or object (safetensors headers): hashed and
// listed like chunks, so that every byte of a data file is vouched for.
struct ExtraRange {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  // Chunk hash over its leaves, which stand in that manifest's leaf section from `first_leaf` on;
  // the same three fields as in ChunkRecord and ObjectRecord.
  Hash128 hash;
  std::uint32_t manifest = 0;
  std::uint64_t first_leaf = 0;
};

// One tensor and all its chunks.
struct TensorRecord {
  TensorMeta meta;
  ExtentTable extents{0};
  Crc64 digest = 0;
  bool has_digest = false;  // False only for foreign files.
  std::int64_t mtime = 0;   // Whole seconds; decided at publish.
  explicit TensorRecord(TensorMeta m) : meta(std::move(m)), extents(meta.shape().rank()) {}
};

// Instead of a file number, in the coordinator's manifest: where the bytes are stands elsewhere.
inline constexpr std::uint32_t kNoFile = 0xFFFFFFFF;
// Instead of a manifest number: there are no hashes, which only foreign files may lack.
inline constexpr std::uint32_t kNoManifest = 0xFFFFFFFF;

// An opaque object, or one part of it on a grid (index within grid; both empty for the plain kind).
// Objects are never cut: a part is one stored range.
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

// Facts of a checkpoint as a whole.
struct CheckpointInfo {
  Uuid uuid;
  std::uint64_t generation = 0;
  Uuid parent;  // Zero: none.
  std::string parent_name;
  std::string producer;  // "tensormount 0.1".
  std::uint32_t world_size = 0;
  std::int64_t created = 0;     // Seconds since 1970, when published.
  std::int64_t json_mtime = 0;  // Of checkpoint.json.
  std::int64_t common_mtime = 0;
  bool self_contained = true;  // False: data live in foreign files,
  std::string root;            // all of them below this folder, which is an absolute path.
};

// Every logical record of a checkpoint: merged from manifests, or made from a foreign file. What
// the index is built from, what the content root is over.
// The one form in which a checkpoint's metadata goes from one part of the program to another:
//
//   manifests --InventoryMerger--> Inventory --index_record::ForEach--> index (SST file or memory)
//   foreign formats --ForeignBuilder--^         --ContentRoot--> COMMIT
//   index --CheckpointIndex::ToInventory--^     --CheckComplete--> the proof before a publish
//
// Numbers of files and manifests in its records are positions in its own two tables. "Sorted" below
// holds for what InventoryMerger::Finish returned and for what an index gives back; a manifest's
// own inventory is in the order of its writer. Needs memory for all rows: 100 bytes a chunk of a
// matrix. A value without locks.
struct Inventory {
  CheckpointInfo info;
  std::vector<FileRecord> files;       // Sorted by name.
  std::vector<std::string> manifests;  // Names below the checkpoint; position = manifest number.
  std::vector<TensorRecord> tensors;   // Sorted by key (bytes); position = ordinal.
  std::vector<ObjectRecord> objects;   // Sorted by key, then index.
  std::vector<ExtraRange> extras;
  std::map<std::string, CommonValue> common;
};

// XXH3-128 over the sorted logical records (key, dtype, shape, region, content hash; objects;
// common values) without file positions or mtimes: equal for the same logical content and cuts.
// Two saves of the same state with the same sharding have the same root. Cut otherwise, they have
// another, though all digests are equal: chunks are part of it.
Hash128 ContentRoot(const Inventory& inventory);

// The same, for tensors that come one by one. Not thread-safe.
class RootHasher {
 public:
  // `inventory` must outlive this: its objects and common values, and how many tensors it has.
  explicit RootHasher(const Inventory& inventory);
  // Each tensor once, in the order of the inventory.
  void Add(const TensorRecord& tensor);
  Hash128 Finish();

 private:
  void AddBytes(std::string_view bytes);
  void AddField();
  void Flush();

  const Inventory& inventory_;
  Xxh3Stream stream_;
  // Fields of a few bytes each, millions of them: one call of the hash for each would cost more
  // than the hashing.
  std::string pending_;
  ByteWriter field_;
};

// What the coordinator's manifest holds of merged content: info and common values as they are; of
// every tensor key, dtype, shape, digest and mtime without chunks; of every object part key, index,
// grid, length, hash and mtime with kNoFile. No files, extras or manifests.
Inventory CoordinatorInventory(const Inventory& merged);

// Merges what writers' manifests say. The one called kCoordinatorManifest has info and common
// values, and, where it was written already, mtimes and the list of all there must be.
// kDataLoss where writers disagree on uuid, dtype or shape, name the same file with different
// lengths, repeat an object part, or differ from the coordinator's list or digests, and where
// stored ranges of a file overlap or reach past its end (index/records/file_roots.h).
// One merger for one merge: Add each manifest once, then Finish once, or FinishTables and TakeRows.
// Not thread-safe. On a failure the merger is of no more use.
class InventoryMerger {
 public:
  // Rows of chunks wait in memory until they are taken.
  InventoryMerger() = default;
  // Those over `memory` bytes wait in a file that is made at `path`, where nothing may be, and has
  // no name afterwards (index/records/row_spool.h). `fs` must outlive the merger.
  InventoryMerger(FileSystem& fs, std::string path, std::uint64_t memory)
      : spool_fs_(&fs), spool_path_(std::move(path)), spool_memory_(memory) {}

  // Inventory numbered by the manifest's own file table.
  Status Add(const Inventory& from_manifest, const std::string& manifest_name);
  // Sorts everything, so that the order of Add does not matter. Digests of tensors are the XORs of
  // the writers' contributions. Chunk rows are not decoded.
  Result<Inventory> Finish();
  // The same but for rows: the extents of all tensors are empty, and roots of files that several
  // manifests name are not final. Memory for tensors and files, not for chunks.
  Result<Inventory> FinishTables();
  // For each tensor of what FinishTables returned, in order: puts its rows in and calls `use`,
  // which may move them away again. Fills in the roots that were left open.
  Status TakeRows(Inventory& inventory, const std::function<Status(TensorRecord&)>& use);

 private:
  Status AddTensor(const TensorRecord& tensor, std::span<const std::uint32_t> file_map,
                   std::uint32_t manifest);
  Status AddObject(const ObjectRecord& object, std::span<const std::uint32_t> file_map,
                   std::uint32_t manifest);
  // Compares with the coordinator's list, and takes its mtimes.
  Status ApplyCoordinator();
  // Numbers files and manifests by sorted names: Add gave numbers in the order of its calls, and
  // the same manifests must give the same index in whatever order a folder lists them. False: that
  // changed no number.
  bool SortNumbers();
  // Positions of merged_.tensors by key.
  std::vector<std::uint32_t> TensorsByKey() const;

  Inventory merged_;
  std::map<std::string, std::uint32_t, std::less<>> file_number_;
  // Position in merged_.tensors by key: they are sorted only at the end.
  std::unordered_map<std::string, std::size_t> tensor_number_;
  // By that position, with numbers of files and manifests in the order of Add.
  RowSpool rows_;
  FileSystem* spool_fs_ = nullptr;
  std::string spool_path_;
  std::uint64_t spool_memory_ = 0;
  // By number of the file in the order of Add.
  struct FileUse {
    std::uint64_t ranges = 0;
    bool shared = false;  // Several manifests name it, so its root is not that of one of them.
  };
  std::vector<FileUse> file_use_;
  // Set by FinishTables: numbers by sorted names, of the numbers in the order of Add; and the
  // latter of tensors by their final position.
  std::vector<std::uint32_t> file_map_;
  std::vector<std::uint32_t> manifest_map_;
  std::vector<std::uint32_t> tensor_order_;
  bool renumbered_ = false;
  std::optional<Inventory> coordinator_;
  Uuid uuid_;  // Of the first manifest that has one.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_INVENTORY_H_
