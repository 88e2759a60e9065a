// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_DICT_H_
#define TENSORMOUNT_STATE_DICT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/common_value.h"
#include "tensormount/shard.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Where an object stands on a grid of objects: {.index = {rank}, .grid = {world}}; both empty for
// one object that is the same on all ranks that add it.
// Objects are opaque bytes (pickled RNG states, samplers). On a grid each rank has a part of its
// own under one key, and the save proves that no part is missing.
struct GridPosition {
  Dims index;
  Dims grid;
};
using ObjectPlace [[deprecated("GridPosition")]] = GridPosition;  // Until 0.2.

// What memory that a StateDict allocates holds at first.
enum class Fill : std::uint8_t { kUninitialized, kZero };

// One rank's part of a checkpoint: for saving what it holds, for loading what it wants. Holds
// views of tensor memory (see BufferView), copies of objects and common values.
// Calls check their arguments at once and return the failure; one that was ignored is remembered
// and fails the Save or Load for all ranks. Not thread-safe.
//
// Example, a matrix whose rows are spread over the ranks:
//
//   StateDict state;
//   state.AddTensor("w", {.global_shape = {4096, 4096},
//                         .region = Box::Make({1024 * rank, 0}, {1024, 4096}).value(),
//                         .data = BufferView::Host(DType::kBF16, mine, {1024, 4096})});
//   state.SetCommon("iteration", 1000);
//
// Tensor memory stays the caller's and must not change until the save or load has ended
// (SaveHandle::WaitStaged for saves in the background).
class TENSORMOUNT_EXPORT StateDict {
 public:
  StateDict();
  ~StateDict();
  StateDict(StateDict&&) noexcept;
  StateDict& operator=(StateDict&&) noexcept;

  // Several shards of one key may be added; they must not overlap on one rank.
  const Status& AddTensor(std::string_view key, const Shard& shard);
  // On save: the bytes, copied.
  const Status& AddObject(std::string_view key, std::string_view bytes,
                          const GridPosition& place = {});
  // On load: ask for an object (the report returns it).
  const Status& WantObject(std::string_view key, const GridPosition& place = {});

  // The same on every rank that sets it. For saving.
  const Status& SetCommon(std::string_view name, CommonValue value);
  // Of this rank alone: kept for each rank, read back by rank and name.
  const Status& SetRankCommon(std::string_view name, CommonValue value);
  // What the application says about the checkpoint as a whole. The same on every rank.
  const Status& SetContentMetadata(CommonDict content);
  // Never stored: a load's report gives back what the request had.
  const Status& SetLocal(std::string_view name, CommonValue value);

  // The tensor `key`, whose first axis counts layers, can also be read layer by layer: `pattern`
  // has one "{}" for the number, "layers.{}.w". No tensor of such a name may be saved beside it. To
  // be called after AddTensor, by one rank that holds some of the tensor or by several; at most
  // 65,536 layers.
  const Status& NameLayers(std::string_view key, std::string_view pattern);

  // Gives every shard without data (Shard::metadata_only) memory that this object owns, packed; of
  // a page or more, aligned to pages. `tensors()` says where it is. kUnsupported, kUnavailable:
  // such a device cannot be reached; kResourceExhausted: no memory.
  Status AllocateData(Device device = {}, Fill fill = Fill::kUninitialized);

  // What the caller itself found wrong: fails the Save or Load for all ranks, instead of leaving
  // them waiting for one that gave up. No-op for ok.
  const Status& Fail(const Status& failure);

  struct TensorItem {
    std::string key;
    Shard shard;
  };
  struct ObjectItem {
    std::string key;
    GridPosition place;
    std::string bytes;
    bool wanted = false;  // By WantObject: there are no bytes.
  };
  // What was added, in the order of the calls; references into this object, until the next change.
  const std::vector<TensorItem>& tensors() const;
  const std::vector<ObjectItem>& objects() const;
  const std::map<std::string, CommonValue>& common() const;
  const std::map<std::string, CommonValue>& rank_common() const;
  const CommonDict* content_metadata() const;  // Null: not set.
  const std::map<std::string, CommonValue>& locals() const;
  const std::map<std::string, std::string>& layer_names() const;  // Key → pattern.
  // The first failure of an Add call.
  const Status& status() const;

 private:
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_DICT_H_
