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
#include "tensormount/export.h"
#include "tensormount/status.h"

namespace tensormount {

// What one rank holds of a global tensor.
struct Shard {
  Dims global_shape;
  Region region;
  BufferView data;  // The region's extents (flat: one axis); the caller's memory.
};

// Where an object stands on a grid of objects: {.index = {rank}, .grid = {world}}; both empty for
// one object that is the same on all ranks that add it.
struct ObjectPlace {
  Dims index;
  Dims grid;
};

// One rank's part of a checkpoint: for saving what it holds, for loading what it wants. Holds
// views of tensor memory (see BufferView), copies of objects and common values.
// Calls check their arguments at once and return the failure; one that was ignored is remembered
// and fails the Save or Load for all ranks. Not thread-safe.
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
                          const ObjectPlace& place = {});
  // On load: ask for an object (the report returns it).
  const Status& WantObject(std::string_view key, const ObjectPlace& place = {});
  // The same on every rank that sets it. For saving.
  const Status& SetCommon(std::string_view name, CommonValue value);
  const Status& SetCommon(std::string_view name, int value) {
    return SetCommon(name, CommonValue(std::int64_t{value}));
  }
  const Status& SetCommon(std::string_view name, const char* value) {
    return SetCommon(name, CommonValue(std::string(value)));
  }

  // What the caller itself found wrong: fails the Save or Load for all ranks, instead of leaving
  // them waiting for one that gave up. No-op for ok.
  const Status& Fail(const Status& failure);

  struct TensorItem {
    std::string key;
    Shard shard;
  };
  struct ObjectItem {
    std::string key;
    ObjectPlace place;
    std::string bytes;
  };
  const std::vector<TensorItem>& tensors() const;
  const std::vector<ObjectItem>& objects() const;
  const std::map<std::string, CommonValue>& common() const;
  // The first failure of an Add call.
  const Status& status() const;

 private:
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_STATE_DICT_H_
