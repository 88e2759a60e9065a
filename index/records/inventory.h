// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_INVENTORY_H_
#define TENSORMOUNT_INDEX_RECORDS_INVENTORY_H_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensormount/common_value.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "index/records/extent_table.h"
#include "shard/tensor_meta.h"

namespace tensormount {

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
  Hash128 root;  // FileRoot over its pieces; zero for foreign files.
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

// Root of a data file from its pieces (offset, length, chunk hash) sorted by offset: no second
// pass over data. Fills FileRecord::root for all files that are not foreign, and checks that the
// pieces of a file do not overlap and lie within its length (kDataLoss names file and piece).
// Changes `inventory` in nothing else. O(n) memory for the stored ranges, 32 bytes each.
Status ComputeFileRoots(Inventory& inventory);

// What the coordinator's manifest holds of merged content: info and common values as they are; of
// every tensor key, dtype, shape, digest and mtime without chunks; of every object part key, index,
// grid, length, hash and mtime with kNoFile. No files, extras or manifests.
Inventory CoordinatorInventory(const Inventory& merged);

// Merges what writers' manifests say. The one called kCoordinatorManifest has info and common
// values, and, where it was written already, mtimes and the list of all there must be.
// kDataLoss where writers disagree on uuid, dtype or shape, name the same file with different
// lengths, repeat an object part, or differ from the coordinator's list or digests.
// One merger for one merge: Add each manifest once, then Finish once. Not thread-safe. On a failure
// the merger is of no more use.
class InventoryMerger {
 public:
  // Inventory numbered by the manifest's own file table.
  Status Add(const Inventory& from_manifest, const std::string& manifest_name);
  // Sorts everything, so that the order of Add does not matter. Digests of tensors are the XORs of
  // the writers' contributions. Chunk rows are not decoded.
  Result<Inventory> Finish();

 private:
  Status AddTensor(const TensorRecord& tensor, std::span<const std::uint32_t> file_map,
                   std::uint32_t manifest);
  Status AddObject(const ObjectRecord& object, std::span<const std::uint32_t> file_map,
                   std::uint32_t manifest);
  // Compares with the coordinator's list, and takes its mtimes.
  Status ApplyCoordinator();
  // Numbers files and manifests by sorted names: Add gave numbers in the order of its calls, and
  // the same manifests must give the same index in whatever order a folder lists them.
  Status SortNumbers();

  Inventory merged_;
  std::map<std::string, std::uint32_t, std::less<>> file_number_;
  // Position in merged_.tensors by key: they are sorted only at the end.
  std::unordered_map<std::string, std::size_t> tensor_number_;
  std::optional<Inventory> coordinator_;
  Uuid uuid_;  // Of the first manifest that has one.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_INVENTORY_H_
