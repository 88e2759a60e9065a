// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_RANK_TASK_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_RANK_TASK_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/hash.h"
#include "collective/layout/layout.h"
#include "collective/save/save_plan.h"
#include "index/records/inventory.h"
#include "shard/tensor_meta.h"

namespace tensormount {

// What one rank does in a save: all that it must know of the plan. Depends on the layout alone, so
// that it serves every save of the same layout. Items are positions in the rank's state dict.
// Each owner sends its keys' part of it (EncodeTasks); the rank joins the parts (DecodeTasks).
//
// Example: rank 1 of two holds rows [2:4] of "w" ([4, 8] of f32) alone, and a replica of "b", which
// rank 0 writes: tensors {w}, chunks {w#1: item 0, begin 0, 64 bytes, region [2:4, 0:8]}, replicas
// {item 1, holders 2, position 1, 32 bytes}, of which it only tells hashes.
struct RankTask {
  struct Tensor {
    TensorMeta meta;
    Placement placement = Placement::kPack;
    std::string file;     // kTensorFile: "t0123456789abcdef", the middle of the name.
    bool shared = false;  // Others write the same file.
    bool seals = false;   // This rank seals the shared file when all have written.
    bool empty = false;   // Without cells, and recorded by this rank.
  };
  // A part of the packed bytes of one of its shards, which it writes.
  struct Chunk {
    std::uint32_t tensor = 0;  // In `tensors`.
    std::uint32_t item = 0;
    std::uint32_t part = 0;   // The n of KEY#n.
    std::uint64_t begin = 0;  // In the packed bytes of the item.
    std::uint64_t bytes = 0;
    std::uint64_t offset = 0;  // kTensorFile: in the file.
    Region region;
  };
  // A shard that others hold too.
  struct Replica {
    std::uint32_t item = 0;
    std::uint32_t holders = 0;   // How many ranks hold it,
    std::uint32_t position = 0;  // and the how-manieth this one is.
    std::uint64_t bytes = 0;
  };

  std::vector<Tensor> tensors;         // That it writes or records, by key.
  std::vector<Chunk> chunks;           // By tensor, then part.
  std::vector<std::uint32_t> objects;  // Items that it writes, by key, then index.
  // By owner of the key, to whom the hashes go; in the order of the owner's layout.
  std::vector<std::vector<Replica>> replicas;
};

// The middle of the names of tensor files, for keys of these hashes: all of them different.
std::vector<std::string> TensorFileStems(std::span<const std::uint64_t> key_hashes);

// The task of every rank as far as an owner's keys go, by rank, as it travels.
std::vector<std::string> EncodeTasks(const GlobalLayout& layout, const SavePlan& plan);
// Instead: why the owner has no plan.
std::string EncodeNoTask(const Status& failure);

// The failure of the lowest owner that failed: the same on every rank.
Status FailureOfOwners(std::span<const std::string> by_owner);
// Puts together what the owners sent to one of `world` ranks; they speak of its `state`.
// kDataLoss where bytes break a rule or do not fit the state dict.
Result<RankTask> DecodeTasks(std::span<const std::string> by_owner, const StateDict& state,
                             int world);

// Of everything of this rank that its task and the proof of its layout depend on, but for labels:
// items in their order, with key, dtype, shape and region, objects with their place, the names of
// layers, and the two options.
Hash128 TaskFingerprint(const StateDict& state, PlacementRule placement, SaveStrategy strategy);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_RANK_TASK_H_
