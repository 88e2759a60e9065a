// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_OPTIMIZER_H_
#define TENSORMOUNT_OPTIMIZER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/buffer.h"
#include "tensormount/common_value.h"
#include "tensormount/shard.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

// The state of an optimizer, keyed by the parameters of the model: what it keeps for a parameter
// (a slot: exp_avg, exp_avg_sq, step, master_param) is the tensor
//   <prefix>.state.<slot>.<key of the parameter>
// of the parameter's shape, sharded as the parameter is; its groups of parameters are the common
// value <prefix>.param_groups. So it is loaded under any other sharding, as the model is.

namespace tensormount {

// A shard and the tensor that it is of.
struct KeyedShard {
  std::string key;
  Shard shard;
};
// What a buffer of a rank is to the checkpoint: shards of one or more tensors, as views of the
// buffer. Called for the parameter's own memory and, with other memory of the same shape, for each
// of its slots; the keys and regions must not depend on the dtype.
using ShardView = std::function<Result<std::vector<KeyedShard>>(const BufferView& local)>;

// One of several parameters in a flat buffer.
struct BucketEntry {
  std::string key;
  std::int64_t offset = 0;  // In elements of the whole bucket.
  // What the rank would hold of the parameter if it held all of the bucket: a region of it (its
  // part under tensor parallelism), row-major in the bucket.
  Dims global_shape;
  Region region;
};
// A distributed optimizer's bucket: `data` has one axis and holds elements [first, first + its
// length) of a bucket in which `entries` stand, in any order, not overlapping; elements between
// them are padding. The parts of parameters that `data` holds, as flat shards: no byte is copied,
// and the ranks' parts of all buckets cover every parameter.
TENSORMOUNT_EXPORT Result<std::vector<KeyedShard>> BucketShards(
    const BufferView& data, std::int64_t first, std::span<const BucketEntry> entries);

// Parameters that an optimizer treats alike. The same on every rank, so that it names the
// parameters of all ranks, in the order of the optimizer.
struct OptimizerGroup {
  CommonDict hyperparameters;             // lr, betas, ...
  std::vector<std::string> parameters{};  // Keys of tensors.
  // Of each parameter that is not frozen. Words without a dot.
  std::vector<std::string> slots{};    // Of the parameter's shape.
  std::vector<std::string> scalars{};  // Of shape [].
  std::vector<std::string> frozen{};   // Parameters without slots.
};

// Builds the optimizer's part of a state dict, and proves that no slot was forgotten. Buffers are
// views, as in StateDict. Calls check their arguments and return the failure. Not thread-safe.
//
// Example, Adam for one parameter:
//
//   OptimizerState adam;
//   TENSORMOUNT_RETURN_IF_ERROR(adam.AddParameter("w", shard_of_w));
//   TENSORMOUNT_RETURN_IF_ERROR(adam.AddSlot("w", "exp_avg", m));
//   TENSORMOUNT_RETURN_IF_ERROR(adam.AddSlot("w", "exp_avg_sq", v));
//   TENSORMOUNT_RETURN_IF_ERROR(adam.AddGroup({.hyperparameters = args,
//                                              .parameters = {"w"},
//                                              .slots = {"exp_avg", "exp_avg_sq"}}));
//   TENSORMOUNT_RETURN_IF_ERROR(adam.AddTo(state));
class TENSORMOUNT_EXPORT OptimizerState {
 public:
  explicit OptimizerState(std::string prefix = "optimizer");
  ~OptimizerState();
  OptimizerState(OptimizerState&&) noexcept;
  OptimizerState& operator=(OptimizerState&&) noexcept;

  // A parameter whose memory is one shard of the tensor `key`.
  Status AddParameter(std::string_view key, const Shard& shard);
  // Memory that is several shards (views, buckets). `name` is only a name for AddSlot; the keys of
  // the shards are what groups list. `local` needs no memory, only dtype and shape.
  Status AddParameters(std::string_view name, const BufferView& local, ShardView view);

  // Memory of a slot, of the same shape as the parameter's (of any dtype); `parameter` is the key
  // or name that the parameter was added with.
  Status AddSlot(std::string_view parameter, std::string_view slot, const BufferView& data);
  // One element for a whole parameter, whose key this is; the same on all ranks that hold some of
  // the parameter.
  Status AddScalar(std::string_view key, std::string_view slot, const BufferView& data);

  Status AddGroup(OptimizerGroup group);

  // Adds all to `state` for a save, or for a load, which does not set the groups.
  // kInvalidArgument names parameter and slot: a parameter of this rank that is in no group or in
  // two, that lacks a slot of its group, or has one that the group does not list.
  Status AddTo(StateDict& state) const;
  Status AddToLoad(StateDict& state) const;

 private:
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

// ---- Of a stored optimizer -----------------------------------------------------------------

TENSORMOUNT_EXPORT std::string OptimizerGroupsName(std::string_view prefix = "optimizer");
TENSORMOUNT_EXPORT std::string OptimizerSlotKey(std::string_view slot, std::string_view parameter,
                                                std::string_view prefix = "optimizer");

TENSORMOUNT_EXPORT CommonValue OptimizerGroupsToCommon(std::span<const OptimizerGroup> groups);
// From the common value OptimizerGroupsName(). kDataLoss where it is not what was written.
TENSORMOUNT_EXPORT Result<std::vector<OptimizerGroup>> OptimizerGroupsFromCommon(
    const CommonValue& value);
// The parameter that a program which numbers them (torch) knows as `id`: they count on through the
// groups. kNotFound.
TENSORMOUNT_EXPORT Result<std::string> ParameterById(std::span<const OptimizerGroup> groups,
                                                     std::int64_t id);

// The shape of a stored tensor; kNotFound where there is none.
using ShapeOf = std::function<Result<Dims>(std::string_view key)>;
// Of an opened Checkpoint, which must stay.
template <typename OpenedCheckpoint>
ShapeOf ShapesOf(const OpenedCheckpoint& checkpoint) {
  return [&checkpoint](std::string_view key) -> Result<Dims> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto tensor, checkpoint.tensor(key));
    return tensor.shape();
  };
}
// Proves of a checkpoint that every slot of every parameter is stored, in the parameter's shape
// (where the model is not in the checkpoint: all slots of a parameter in one shape). kDataLoss
// names the first parameter and slot that is not, and how many there are.
TENSORMOUNT_EXPORT Status CheckOptimizer(std::span<const OptimizerGroup> groups,
                                         const ShapeOf& shape_of,
                                         std::string_view prefix = "optimizer");

}  // namespace tensormount

#endif  // TENSORMOUNT_OPTIMIZER_H_
