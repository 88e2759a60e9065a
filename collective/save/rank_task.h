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

// The work of one rank in a save: its part of the plan. Depends only on the layout and the options
// of TaskFingerprint, so it serves every save with the same ones. Items are positions in the rank's
// state dict. Each owner (a rank that plans keys) sends the part with its keys (EncodeTasks); the
// rank joins the parts (DecodeTasks).
//
// Example: rank 1 of two alone holds rows [2:4] of "w" ([4, 8] of f32), and a replica of "b", which
// rank 0 writes: tensors {w}, chunks {w#1: item 0, begin 0, 64 bytes, region [2:4, 0:8]}, replicas
// {item 1, holders 2, replica_index 1, 32 bytes}, for which it only sends hashes.
struct RankTask {
  struct Tensor {
    TensorMeta meta;
    Placement placement = Placement::kPack;
    std::string file;     // With kTensorFile: the middle of the file's name, "t0123456789abcdef".
    bool shared = false;  // Other ranks write the same file.
    bool seals = false;   // This rank seals the shared file when all have written.
    bool empty = false;   // The tensor has no cells, and this rank records it.
  };
  // A part of the packed bytes of one of the rank's shards, written by this rank.
  struct Chunk {
    std::uint32_t tensor = 0;  // Position in `tensors`.
    std::uint32_t item = 0;
    std::uint32_t part = 0;   // Number of the chunk in the tensor: the n of KEY#n.
    std::uint64_t begin = 0;  // Offset in the packed bytes of the item.
    std::uint64_t bytes = 0;
    std::uint64_t offset = 0;  // With kTensorFile: offset in the file.
    Region region;
  };
  // A shard that other ranks hold too.
  struct Replica {
    std::uint32_t item = 0;
    std::uint32_t holders = 0;        // Number of ranks that hold the shard.
    std::uint32_t replica_index = 0;  // Zero-based index of this rank's replica.
    std::uint64_t bytes = 0;
  };

  std::vector<Tensor> tensors;         // Tensors to write or record, sorted by key.
  std::vector<Chunk> chunks;           // Sorted by tensor, then part.
  std::vector<std::uint32_t> objects;  // Items to write, sorted by key, then index.
  // By owner of the key (the rank that compares the hashes), in the order of the owner's layout.
  std::vector<std::vector<Replica>> replicas;
};

// The variable part of tensor file names, for keys with these hashes; all different.
std::vector<std::string> TensorFileStems(std::span<const std::uint64_t> key_hashes);

// Encodes the task of each rank for one owner's keys.
std::vector<std::string> EncodeTasks(const GlobalLayout& layout, const SavePlan& plan);
// Encodes the failure of an owner that has no plan; sent instead of a task.
std::string EncodeTaskFailure(const Status& failure);

// The failure of the lowest owner that failed: the same on every rank.
Status FailureOfOwners(std::span<const std::string> by_owner);
// Joins the parts that the owners sent to one of `world` ranks, for its `state`. kDataLoss if bytes
// break a rule or do not fit the state dict.
Result<RankTask> DecodeTasks(std::span<const std::string> by_owner, const StateDict& state,
                             int world);

// Hash of everything on this rank that its task and the check of its layout depend on, except
// labels: items in order, with key, dtype, shape and region, objects with their place, layer names,
// and the two options.
Hash128 TaskFingerprint(const StateDict& state, PlacementRule placement, SaveStrategy strategy);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_RANK_TASK_H_
