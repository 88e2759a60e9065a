// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATE_DICT_H_
#define TENSORMOUNT_STATE_DICT_H_

#include <cstdint>
#include <functional>
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

// The position of an object on a grid of objects: {.index = {rank}, .grid = {world}}; both empty
// for one object that is equal on all ranks that add it. Objects are opaque bytes (pickled RNG
// states, samplers). On a grid each rank has its own part under one key, and the save checks that
// no part is missing.
struct GridPosition {
  Dims index;
  Dims grid;
};
using ObjectPlace [[deprecated("GridPosition")]] = GridPosition;  // Old name, until 0.2.

// Initial contents of memory that a StateDict allocates.
enum class Fill : std::uint8_t { kUninitialized, kZero };

// One rank's part of a checkpoint: the data it saves, or wants to load. Holds views of tensor
// memory (see BufferView), and copies of objects and common values. Calls check their arguments at
// once and return the failure; an ignored failure is remembered and fails the Save or Load on all
// ranks. Not thread-safe.
//
// Example, a matrix whose rows are spread over the ranks:
//
//   StateDict state;
//   state.AddTensor("w", {.global_shape = {4096, 4096},
//                         .region = Box::Make({1024 * rank, 0}, {1024, 4096}).value(),
//                         .data = BufferView::Host(DType::kBF16, mine, {1024, 4096})});
//   state.SetCommon("iteration", 1000);
//
// Tensor memory belongs to the caller (except that of AllocateData) and must not change until the
// save or load has ended (SaveHandle::WaitStaged for saves in the background).
class TENSORMOUNT_EXPORT StateDict {
 public:
  StateDict();
  ~StateDict();
  StateDict(StateDict&&) noexcept;
  StateDict& operator=(StateDict&&) noexcept;

  // Adds a shard. Several shards of one key may be added; they must not overlap on one rank.
  const Status& AddTensor(std::string_view key, const Shard& shard);
  // For saving: adds an object, whose bytes are copied.
  const Status& AddObject(std::string_view key, std::string_view bytes,
                          const GridPosition& place = {});
  // For loading: requests an object, which the load report returns.
  const Status& WantObject(std::string_view key, const GridPosition& place = {});

  // For saving: sets a common value, which must be equal on every rank that sets it.
  const Status& SetCommon(std::string_view name, CommonValue value);
  // Sets a value of this rank, which is stored, and read back by rank and name.
  const Status& SetRankCommon(std::string_view name, CommonValue value);
  // Sets application metadata about the whole checkpoint; equal on every rank.
  const Status& SetContentMetadata(CommonDict content);
  // Sets a value that is not stored: the report of a load returns the local values of its request.
  const Status& SetLocal(std::string_view name, CommonValue value);

  // Makes the tensor `key`, whose first axis counts layers, readable layer by layer, too: `pattern`
  // has one "{}" for the number, "layers.{}.w". No tensor with such a name may be saved beside it.
  // Call it after AddTensor, on one or several ranks that hold some of the tensor; at most 65,536
  // layers.
  const Status& NameLayers(std::string_view key, std::string_view pattern);

  // Allocates packed memory, owned by this object, for every shard without data
  // (Shard::metadata_only); buffers of a page or more are page-aligned. `tensors()` has the
  // addresses. kUnsupported, kUnavailable: the device cannot be used; kResourceExhausted: no
  // memory.
  Status AllocateData(Device device = {}, Fill fill = Fill::kUninitialized);

  // Reports an error that the caller found: the Save or Load then fails on all ranks, instead of
  // waiting for this rank. No-op for ok.
  const Status& Fail(const Status& failure);

  struct TensorItem {
    std::string key;
    Shard shard;
  };
  struct ObjectItem {
    std::string key;
    GridPosition place;
    std::string bytes;
    bool wanted = false;  // Added by WantObject, without bytes.
  };
  // The entries in the order of the calls; the references are valid until the next change.
  const std::vector<TensorItem>& tensors() const;
  const std::vector<ObjectItem>& objects() const;
  const std::map<std::string, CommonValue>& common() const;
  const std::map<std::string, CommonValue>& rank_common() const;
  const CommonDict* content_metadata() const;  // Null if not set.
  const std::map<std::string, CommonValue>& locals() const;
  const std::map<std::string, std::string>& layer_names() const;  // Key → pattern.
  // The first failure of the calls above; ok if none failed.
  const Status& status() const;

 private:
  friend StateDict WithShards(const StateDict&, const std::function<Shard(std::size_t)>&);
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_DICT_H_
