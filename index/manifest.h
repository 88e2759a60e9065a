// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_MANIFEST_H_
#define TENSORMOUNT_INDEX_MANIFEST_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/file_system.h"
#include "index/content.h"
#include "tensormount/status.h"

namespace tensormount {

// A manifest: what one writer says it wrote (docs/format.md, "Manifest"): header, records, leaf
// hashes, footer with checksums of each part. Records are numbered within the manifest; ContentMerger
// renumbers. In a writer's manifest TensorContent::digest is the XOR contribution of its chunks,
// mtimes are 0; the coordinator's manifest ("manifest/coordinator.tmm") has info, common values,
// objects of its own, and for every tensor key, dtype, shape and mtime without chunks.
//
// `leaves`: leaf hashes of all its chunks, objects and extra pieces, at their `first_leaf`.
Result<std::string> EncodeManifest(const Content& content, std::span<const Hash128> leaves);

// kDataLoss where a checksum or a rule is broken, kUnsupported for a newer version.
struct Manifest {
  Content content;
  std::vector<Hash128> leaves;
};
Result<Manifest> DecodeManifest(std::string_view bytes, std::string_view name);

// Leaf hashes [first, first + count) of a manifest file without reading the rest. They are proved
// by the chunk root that they belong to.
Result<std::vector<Hash128>> ReadManifestLeaves(File& file, std::uint64_t first,
                                                std::uint64_t count);

inline constexpr std::string_view kCoordinatorManifest = "manifest/coordinator.tmm";

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_MANIFEST_H_
