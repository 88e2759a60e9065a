// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_INDEX_RECORDS_H_
#define TENSORMOUNT_INDEX_RECORDS_INDEX_RECORDS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "index/records/checkpoint_index.h"
#include "index/records/inventory.h"

// The records of the chunk index (docs/format.md, "Index"): what stands under which key.

namespace tensormount::index_record {

inline constexpr char kCommon = 'c';       // key -> value
inline constexpr char kExtents = 'e';      // be32 ordinal, be32 page -> rows
inline constexpr char kFile = 'f';         // be32 number -> file
inline constexpr char kSafetensors = 'h';  // be32 page -> bytes of the header
inline constexpr char kInfo = 'i';         // -> info and counts
inline constexpr char kKey = 'k';          // key -> be32 ordinal
inline constexpr char kManifest = 'm';     // be32 number -> name
inline constexpr char kObject = 'o';       // key, NUL, be32 part -> object
inline constexpr char kTensor = 't';       // be32 ordinal -> entry
inline constexpr char kExtra = 'x';        // be32 number -> extra piece

// A value longer than this is cut into pages of their own keys, so that a reader of a huge extent
// table needs no value of hundreds of MiB in one block of the SST file.
inline constexpr std::size_t kPageBytes = std::size_t{1} << 20;
// Of the index: readers that do not know it rebuild the index from the manifests.
inline constexpr std::uint32_t kVersion = 1;

// Keys of records. Numbers are big-endian, so that the byte order of RocksDB is numeric order and a
// scan meets ordinals, pages and parts in sequence. The kind's letter comes first: a scan of one
// kind is a scan of one prefix.
std::string Key(char kind);
std::string Key(char kind, std::uint32_t number);
std::string Key(char kind, std::uint32_t number, std::uint32_t page);
std::string Key(char kind, std::string_view name);
std::uint32_t LoadBig32(const char* p);

// What the info record says about the others: an open knows sizes without counting, and a list that
// lacks its end is told from a short one.
struct Counts {
  std::uint32_t tensors = 0;
  std::uint64_t tensor_bytes = 0;
  std::uint64_t chunks = 0;
  std::uint64_t safetensors_header_bytes = 0;  // 0: the format cannot hold them.
  std::uint32_t files = 0;
  std::uint32_t manifests = 0;
};

// Calls fn for every record in key order until it fails. `to_memory`: chunks may be pending, and
// model.safetensors is not laid out: few of those who open a foreign checkpoint want that file.
// `pass`: hands over each tensor of `inventory`, in order, with its extents, which nobody else is
// asked for; they may be gone afterwards. Files, objects, extras and info are read after it
// returned; metas, digests and common values before.
Status ForEach(const Inventory& inventory, bool to_memory, const TensorPass& pass,
               const std::function<Status(std::string_view key, std::string_view value)>& fn);
// Of an inventory that has its extents.
TensorPass AllTensors(const Inventory& inventory);

// `from_memory`: of a table that never was on disk, where chunks may be pending.
// Checks the record's own fields. That `ordinal` is the right one for a key is for
// CheckpointIndex::Find.
Result<TensorEntry> DecodeTensor(std::string_view value, std::uint32_t ordinal, bool from_memory);
// kUnsupported for another version, kDataLoss for damage.
Result<Counts> DecodeInfoRecord(std::string_view value, CheckpointInfo& info);

}  // namespace tensormount::index_record

#endif  // TENSORMOUNT_INDEX_RECORDS_INDEX_RECORDS_H_
