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
#include "index/records/leaf_section.h"

namespace tensormount {

// A manifest holds the records of one writer (docs/format.md, "Manifest"): a header with checksums
// of each part, the records, the leaf hashes. Numbers in records are positions in the manifest's
// own tables; InventoryMerger renumbers them. In a writer's manifest, TensorRecord::digest is the
// contribution of the writer's chunks, and info only identifies the checkpoint.
// CoordinatorInventory() makes the records of the coordinator's manifest.
// The header has its own checksum, so that ReadManifestLeaves reads a single leaf hash of a
// manifest of hundreds of MiB with two small reads. The records are hashed and decoded as a whole.
//
// Encodes a manifest. `leaves` has the leaf hashes of all chunks, objects and extra ranges, at the
// position `first_leaf` of each. `extras`: what else `leaves` has. kInvalidArgument if a limit of
// the format is exceeded.
Result<std::string> EncodeManifest(const Inventory& inventory, std::span<const Hash128> leaves,
                                   LeafExtras extras = {});
// The coordinator's manifest: CoordinatorInventory(merged), with the sums of the value counts if
// those of any tensor are known.
Result<std::string> EncodeCoordinatorManifest(const Inventory& merged);

// A decoded manifest: all checksums match, and each record obeys the rules of its kind. Table rows
// of chunks are not decoded; they, file numbers and the coverage of tensors are checked later, by
// the merge (InventoryMerger, CheckComplete). DecodeManifest accepts untrusted bytes. kDataLoss for
// a wrong checksum or a broken rule, kUnsupported for a newer version.
// `leaves` has 16 bytes for each 64 KiB of data: 4 MiB for 16 GiB of one rank, and 18 times that
// with page hashes. TensorRecord::counts of a writer's manifest are the sums over its own chunks;
// of the coordinator's manifest, those of whole tensors.
struct Manifest {
  Inventory inventory;
  std::vector<Hash128> leaves;
  LeafExtras extras;
};
Result<Manifest> DecodeManifest(std::string_view bytes, std::string_view name);

// Decodes only the info record, for display. `begin` is the first kManifestInfoBytes of a manifest,
// or all of a shorter one. Only the header's checksum is checked. Errors as for DecodeManifest.
inline constexpr std::size_t kManifestInfoBytes = std::size_t{16} << 10;
Result<CheckpointInfo> DecodeManifestInfo(std::string_view begin, std::string_view name);

// Reads hashes [first, first + count) of the leaf section of a manifest file, and nothing else of
// it but the header. The caller must prove the hashes with its chunk root. kDataLoss if the file
// has no such hashes. Sets `*paged`, if `paged` is not null, to whether the manifest has page
// hashes and more hashes follow the ones read. Those may be page hashes; this function can read
// them too.
Result<std::vector<Hash128>> ReadManifestLeaves(File& file, std::uint64_t first,
                                                std::uint64_t count, bool* paged = nullptr);

// Reads the value counts of a checkpoint's tensors from the coordinator's manifest, in the order of
// its records, and nothing else of the file but its header. nullopt: the manifest has none.
// kDataLoss if they are damaged.
Result<std::optional<std::vector<std::optional<ValueCounts>>>> ReadManifestTotals(File& file);

// Reads the value counts of one chunk from the manifest that has its leaf hashes. nullopt: they are
// not known.
Result<std::optional<ValueCounts>> ReadManifestCounts(File& file, const TensorMeta& meta,
                                                      const ChunkRecord& chunk);

// Name of the coordinator's manifest. The rank that merges writes it at publish, after all other
// manifests (docs/format.md, "Manifest").
inline constexpr std::string_view kCoordinatorManifest = "manifest/coordinator.tmm";
// The info record of a checkpoint's coordinator manifest, of which only the begin is read.
Result<CheckpointInfo> ReadManifestInfo(FileSystem& fs, const std::string& directory);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_MANIFEST_H_
