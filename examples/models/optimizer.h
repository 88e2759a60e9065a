// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_EXAMPLES_MODELS_OPTIMIZER_H_
#define TENSORMOUNT_EXAMPLES_MODELS_OPTIMIZER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tensormount/buffer.h>
#include <tensormount/common_value.h>
#include <tensormount/shard.h>
#include <tensormount/state_dict.h>
#include <tensormount/status.h>

// An example: the state of an optimizer over the public API, keyed by the parameters of the model.
// Each slot of a parameter (exp_avg, exp_avg_sq, step, master_param) is the tensor
//   <prefix>.state.<slot>.<key of the parameter>
// of the parameter's shape, sharded as the parameter is. The groups of parameters are the common
// value <prefix>.param_groups. Any number of ranks can load the state, as it can load the model.
// Copy it into a program and change it.

namespace tensormount::examples {

// A shard of the tensor `key`.
struct KeyedShard {
  std::string key;
  Shard shard;
};
// Returns the shards of one or more tensors that a buffer of a rank holds, as views of the buffer.
// Called for the parameter's own memory and, with other memory of the same shape, for each of its
// slots. The keys and regions must not depend on the dtype.
using ShardView = std::function<Result<std::vector<KeyedShard>>(const BufferView& local)>;

// One of several parameters in a flat buffer.
struct BucketEntry {
  std::string key;
  std::int64_t offset = 0;  // In elements of the whole bucket.
  // The region of the parameter that the whole bucket holds (its part under tensor parallelism),
  // row-major in the bucket.
  Dims global_shape;
  Region region;
};
// The parts of parameters that a rank's part of a distributed optimizer's bucket holds, as flat
// shards; no byte is copied. `data` has one axis and holds elements [first, first + its length) of
// the bucket. `entries` come in any order and do not overlap; elements between them are padding.
// The parts of all ranks cover every parameter.
Result<std::vector<KeyedShard>> BucketShards(const BufferView& data, std::int64_t first,
                                             std::span<const BucketEntry> entries);

// Parameters that an optimizer treats alike. The same on every rank: it names the parameters of all
// ranks, in the order of the optimizer.
struct OptimizerGroup {
  CommonDict hyperparameters;             // lr, betas, ...
  std::vector<std::string> parameters{};  // Keys of tensors.
  // Slots of each parameter that is not frozen. Words without a dot.
  std::vector<std::string> slots{};    // Tensors of the parameter's shape.
  std::vector<std::string> scalars{};  // Tensors of shape [].
  std::vector<std::string> frozen{};   // Parameters without slots.
};

// Builds the optimizer's part of a state dict, and checks that no slot is missing. Buffers are
// views, as in StateDict, which checks keys, shapes and regions in AddTo. Not thread-safe.
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
class OptimizerState {
 public:
  explicit OptimizerState(std::string prefix = "optimizer");
  ~OptimizerState();
  OptimizerState(OptimizerState&&) noexcept;
  OptimizerState& operator=(OptimizerState&&) noexcept;

  // A parameter whose memory is one shard of the tensor `key`.
  Status AddParameter(std::string_view key, const Shard& shard);
  // Memory that holds several shards (views, buckets). `name` is only a name for AddSlot; groups
  // list the keys of the shards. `local` needs no memory, only dtype and shape.
  Status AddParameters(std::string_view name, const BufferView& local, ShardView view);

  // Memory of a slot, of the same shape as the parameter's (of any dtype); `parameter` is the key
  // or name that the parameter was added with.
  Status AddSlot(std::string_view parameter, std::string_view slot, const BufferView& data);
  // One element for the whole parameter `key`; the same on all ranks that hold some of it.
  Status AddScalar(std::string_view key, std::string_view slot, const BufferView& data);

  Status AddGroup(OptimizerGroup group);

  // Adds all slots to `state`; for a save the groups, too. kInvalidArgument names a parameter of
  // this rank that is in no group or in two, lacks a slot of its group, or has a slot that the
  // group does not list.
  Status AddTo(StateDict& state) const;
  Status AddToLoad(StateDict& state) const;

 private:
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

// ---- Stored optimizers ---------------------------------------------------------------------

std::string OptimizerGroupsName(std::string_view prefix = "optimizer");
std::string OptimizerSlotKey(std::string_view slot, std::string_view parameter,
                             std::string_view prefix = "optimizer");

CommonValue OptimizerGroupsToCommon(std::span<const OptimizerGroup> groups);
// From the common value OptimizerGroupsName(). kDataLoss where the value is malformed.
Result<std::vector<OptimizerGroup>> OptimizerGroupsFromCommon(const CommonValue& value);
// The key of parameter `id` as torch numbers parameters: counted through all groups. kNotFound.
Result<std::string> ParameterById(std::span<const OptimizerGroup> groups, std::int64_t id);

// The shape of a stored tensor; kNotFound for a tensor that does not exist.
using ShapeOf = std::function<Result<Dims>(std::string_view key)>;
// The shapes of an opened Checkpoint, which must outlive the function.
template <typename OpenedCheckpoint>
ShapeOf ShapesOf(const OpenedCheckpoint& checkpoint) {
  return [&checkpoint](std::string_view key) -> Result<Dims> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto tensor, checkpoint.tensor(key));
    return tensor.shape();
  };
}
// Checks that a checkpoint has every slot of every parameter, in the parameter's shape (where the
// model is not in the checkpoint: all slots of a parameter in one shape). kDataLoss names the first
// slot that fails and counts the others.
Status CheckOptimizer(std::span<const OptimizerGroup> groups, const ShapeOf& shape_of,
                      std::string_view prefix = "optimizer");

}  // namespace tensormount::examples

#endif  // TENSORMOUNT_EXAMPLES_MODELS_OPTIMIZER_H_
