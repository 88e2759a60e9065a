// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_OLMO_METADATA_H_
#define TENSORMOUNT_INDEX_FOREIGN_OLMO_METADATA_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"

// metadata.json of OLMo-core 0.1 (src/olmo_core/distributed/checkpoint.py of that release): which
// part of each tensor is in which rank's safetensors file.

// The parser checks only the JSON; olmo.cc compares it with the headers of the safetensors files.
// Empty shards are dropped: a tensor that only one of 1,000 ranks stores has one OlmoShard.
namespace tensormount {

// The part of a tensor in a file: a box in row-major order, or ranges of the flattened tensor that
// follow each other in the file. Regions are within the tensor and not empty. The header of the
// safetensors file gives the position of the bytes, under the key of the tensor.
struct OlmoShard {
  std::uint32_t file = 0;  // Index into OlmoMetadata::files.
  std::vector<Region> regions;
};

// A tensor of metadata.json.
struct OlmoTensor {
  std::string key;
  std::optional<DType> dtype;  // nullopt: not in the JSON, as in the first releases.
  Dims shape;
  std::vector<OlmoShard> shards;  // In the order of file names.
  Status problem;                 // Not OK for an unknown dtype; the tensor is left out.
};

// The parsed metadata.json. `files` are names as in the JSON, in the order of their first use;
// ForeignFolder refuses names that lead out of the bounds.
struct OlmoMetadata {
  std::vector<OlmoTensor> tensors;  // In the order of the JSON.
  std::vector<std::string> files;
};

// Parses metadata.json. kDataLoss: invalid JSON (duplicate keys, wrong types), shapes that
// overflow, or ranges and boxes that are not within their tensor. kUnsupported: more axes than
// kMaxRank.
Result<OlmoMetadata> ParseOlmoMetadata(std::string_view json);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_OLMO_METADATA_H_
