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

// Kinds and keys of the records of the chunk index (docs/format.md, "Index"). A comment
// "A -> B" means that the key is the letter of the kind and A, and the value is B. be32 is a
// big-endian u32.

namespace tensormount::index_record {

inline constexpr char kCommon = 'c';       // name -> common value
inline constexpr char kExtents = 'e';      // be32 ordinal, be32 page -> table rows of extents
inline constexpr char kFile = 'f';         // be32 number -> file
inline constexpr char kSafetensors = 'h';  // be32 page -> bytes of the header of model.safetensors
inline constexpr char kInfo = 'i';         // -> info and counts
inline constexpr char kKey = 'k';          // key -> be32 ordinal
inline constexpr char kManifest = 'm';     // be32 number -> name
inline constexpr char kObject = 'o';       // key, NUL, be32 part -> object
inline constexpr char kTensor = 't';       // be32 ordinal -> entry
inline constexpr char kExtra = 'x';        // be32 number -> extra range

// Longer values are cut into pages with separate keys, so that reading a huge extent table needs no
// SST block of hundreds of MiB.
inline constexpr std::size_t kPageBytes = std::size_t{1} << 20;
// Version of the index format. A reader that does not know the version treats the index as damaged,
// and rebuilds it from the manifests.
inline constexpr std::uint32_t kVersion = 1;

// Keys of records. The letter of the kind comes first, so that all records of a kind have one
// prefix. Numbers are big-endian, so that byte order is numeric order and a scan meets ordinals,
// pages and parts in sequence.
std::string Key(char kind);
std::string Key(char kind, std::uint32_t number);
std::string Key(char kind, std::uint32_t number, std::uint32_t page);
std::string Key(char kind, std::string_view name);
std::uint32_t LoadBig32(const char* p);

// Counts in the info record. An open learns the sizes without counting, and detects a truncated
// list.
struct Counts {
  std::uint32_t tensors = 0;
  std::uint64_t tensor_bytes = 0;
  std::uint64_t chunks = 0;
  std::uint64_t safetensors_header_bytes = 0;  // 0: there is no header.
  std::uint32_t files = 0;
  std::uint32_t manifests = 0;
};

// Calls fn for every record in key order until fn fails. With `to_memory`, chunks may be pending,
// and model.safetensors is not laid out, because it is rarely read from foreign checkpoints.
// `pass` hands over each tensor of `inventory` in order with its extents. The extents are not used
// after that and may be freed. The layout of model.safetensors and the common values are read
// before the pass; digests, mtimes, files, objects, extra ranges and info after it.
Status ForEach(const Inventory& inventory, bool to_memory, const TensorPass& pass,
               const std::function<Status(std::string_view key, std::string_view value)>& fn);
// The pass over an inventory that has its extents in memory.
TensorPass AllTensors(const Inventory& inventory);

// Encodes a tensor record. `ordinal` is in the record's key.
void EncodeTensor(ByteWriter& out, const TensorEntry& entry);
void EncodeInfoRecord(ByteWriter& out, const CheckpointInfo& info, const Counts& counts);

// Decodes a tensor record and checks its fields. CheckpointIndex::Find checks that `ordinal`
// belongs to the key. `from_memory`: the record was never on disk, so chunks may be pending.
Result<TensorEntry> DecodeTensor(std::string_view value, std::uint32_t ordinal, bool from_memory);
// Decodes the info record. kUnsupported for another version of the index, kDataLoss for damage.
Result<Counts> DecodeInfoRecord(std::string_view value, bool from_memory, CheckpointInfo& info);

}  // namespace tensormount::index_record

#endif  // TENSORMOUNT_INDEX_RECORDS_INDEX_RECORDS_H_
