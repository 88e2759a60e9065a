// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_MANIFEST_H_
#define TENSORMOUNT_INDEX_RECORDS_MANIFEST_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/inventory.h"

namespace tensormount {

// A manifest: what one writer says it wrote (docs/format.md, "Manifest"): a header with checksums
// of each part, records, leaf hashes. Records are numbered within the manifest; InventoryMerger
// renumbers. In a writer's manifest TensorRecord::digest is the XOR contribution of its chunks and
// info only says which checkpoint it is of; the coordinator's manifest is CoordinatorInventory().
//
// `leaves`: leaf hashes of all its chunks, objects and extra pieces, at their `first_leaf`.
// kInvalidArgument where something is over the limits of the format.
// The header comes first and has checksums of its own, so that one leaf of a manifest of hundreds
// of MiB is found with two small reads (ReadManifestLeaves). Records are never read in part: they
// are hashed as a whole, and decoded as a whole.
// `paged`: behind the leaves of some ranges stand their page hashes (shard/page_hash.h).
Result<std::string> EncodeManifest(const Inventory& inventory, std::span<const Hash128> leaves,
                                   bool paged = false);

// kDataLoss where a checksum or a rule is broken, kUnsupported for a newer version.
// What DecodeManifest promises: every checksum held, every record obeys its own rules, and leaves
// exist. Not that numbers of files are in the table or that tensors are covered: whoever merges
// checks that (InventoryMerger, CheckComplete). The bytes may come from anywhere.
// `leaves` are 16 bytes for each 64 KiB of data: 4 MiB of them for 16 GiB that one rank wrote; 18
// times that with page hashes.
struct Manifest {
  Inventory inventory;
  std::vector<Hash128> leaves;
  bool paged = false;  // Page hashes are among them.
};
Result<Manifest> DecodeManifest(std::string_view bytes, std::string_view name);

// The info record alone, of the first kManifestInfoBytes of a manifest (or all of a shorter one),
// of which no checksum is compared but that of the header: for what is only shown. kDataLoss,
// kUnsupported.
inline constexpr std::size_t kManifestInfoBytes = std::size_t{16} << 10;
Result<CheckpointInfo> DecodeManifestInfo(std::string_view begin, std::string_view name);

// Leaf hashes [first, first + count) of a manifest file without reading the rest. They are proved
// by the chunk root that they belong to. kDataLoss where the file has no such leaves.
// `*paged`, where not null, whether the manifest says that it has page hashes, and hashes behind
// these, which may be such: those are read by this function, too.
Result<std::vector<Hash128>> ReadManifestLeaves(File& file, std::uint64_t first,
                                                std::uint64_t count, bool* paged = nullptr);

// Written last, at publish, by the one rank that merges (docs/format.md, "Manifest").
inline constexpr std::string_view kCoordinatorManifest = "manifest/coordinator.tmm";

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_MANIFEST_H_
