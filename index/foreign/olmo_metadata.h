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
// part of every tensor stands in which rank's safetensors file.

// This is what the JSON says, checked in itself and nothing more: olmo.cc joins it with the headers
// of the safetensors files. Only shares that hold something are kept: a tensor of 1,000 ranks, one
// of which has it, is one OlmoShard.
namespace tensormount {

// What a file holds of a tensor: a box in row-major order, or ranges of the flattened tensor one
// after the other. Regions lie within the tensor; empty ones are left out.
// Where in the file these bytes stand is in its safetensors header, under the key of the tensor.
struct OlmoShard {
  std::uint32_t file = 0;  // Index into OlmoMetadata::files.
  std::vector<Region> regions;
};

// `problem` instead of an error: one unknown dtype leaves one tensor out, while a shape that
// overflows ends the read.
struct OlmoTensor {
  std::string key;
  std::optional<DType> dtype;  // The first releases did not say.
  Dims shape;
  std::vector<OlmoShard> shards;  // In the order of file names.
  Status problem;                 // Why it cannot be shown: a dtype that we do not know.
};

// Files by first use; OlmoShard::file counts them. Names are as in the JSON, unchecked:
// ForeignFolder refuses those that lead out.
struct OlmoMetadata {
  std::vector<OlmoTensor> tensors;  // In the order of the file.
  std::vector<std::string> files;
};

// kDataLoss: no such JSON (duplicate keys, wrong types), shapes that overflow, ranges and boxes
// outside of their tensor; names the tensor. kUnsupported: more axes than tensors have.
// `json` is not kept.
Result<OlmoMetadata> ParseOlmoMetadata(std::string_view json);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_OLMO_METADATA_H_
