// SPDX-License-Identifier: Apache-2.0
// What benchmarks and tests of large publishes publish.
#include "bench/synthetic_staging.h"

#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "index/records/manifest.h"
#include "shard/leaf_hash.h"

namespace tensormount {

Status WriteSyntheticStaging(FileSystem& fs, const Staging& staging, const SyntheticSpec& spec) {
  constexpr std::int64_t kColumns = 16;
  constexpr std::uint64_t kChunkBytes = kColumns * 4;
  for (int w = 0; w < spec.writers; ++w) {
    Inventory inventory;
    inventory.info.uuid = staging.uuid;
    std::vector<Hash128> leaves;
    std::uint64_t at = 0;
    for (int t = 0; t < spec.tensors; ++t) {
      char key[64];
      std::snprintf(key, sizeof(key), "model.layers.%06d.mlp.gate_proj.weight", t);
      TENSORMOUNT_ASSIGN_OR_RETURN(
          TensorMeta meta,
          TensorMeta::Make(key, DType::kF32,
                           {static_cast<std::int64_t>(spec.chunks_per_tensor), kColumns}));
      TensorRecord tensor(std::move(meta));
      tensor.has_digest = true;
      tensor.digest = (static_cast<Crc64>(t) * 31 + static_cast<Crc64>(w)) * spec.seed;
      for (int c = w; c < spec.chunks_per_tensor; c += spec.writers) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make({c, 0}, {1, kColumns}));
        const Hash128 leaf{at + spec.seed, static_cast<std::uint64_t>(w)};
        ChunkRecord chunk;
        chunk.region = Region(box);
        chunk.offset = at;
        chunk.length = kChunkBytes;
        chunk.first_leaf = leaves.size();
        chunk.hash = ChunkRoot({&leaf, 1}, kChunkBytes);
        leaves.push_back(leaf);
        tensor.extents.Append(chunk);
        at += kChunkBytes;
      }
      inventory.tensors.push_back(std::move(tensor));
    }
    const std::string rank = "r" + std::to_string(w);
    const std::string name = "data/" + staging.ShortId() + "-" + rank + ".safetensors";
    inventory.files.push_back({name, Placement::kRankShard, at, Hash128{}});
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                                 fs.CreateExclusive(JoinPath(staging.directory, name)));
    TENSORMOUNT_RETURN_IF_ERROR(file->Truncate(at));
    TENSORMOUNT_RETURN_IF_ERROR(file->Sync());
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string manifest, EncodeManifest(inventory, leaves));
    TENSORMOUNT_RETURN_IF_ERROR(
        fs.WriteFileDurably(JoinPath(staging.directory, "manifest/" + rank + ".tmm"), manifest));
  }
  return Status();
}

}  // namespace tensormount
