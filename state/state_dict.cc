// SPDX-License-Identifier: Apache-2.0
// A rank's shards, objects and common values, checked when they are added. The first failure is
// kept, so that Save reports it on all ranks even if the caller ignored it.
#include "tensormount/state_dict.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "device/device_queues.h"
#include "index/records/common_state.h"
#include "index/records/layer_names.h"
#include "index/records/record_coding.h"
#include "shard/host_memory.h"
#include "shard/tensor_meta.h"
#include "state/shard_check.h"
#include "state/state_copy.h"

namespace tensormount {

namespace {

// Limit for one stacked tensor, because layer names are checked one by one.
constexpr std::int64_t kMaxLayers = 1 << 16;
// Time limit for filling device memory with zeros.
constexpr std::chrono::milliseconds kDevicePatience{60'000};

Status WithItemName(std::string_view kind, std::string_view key, const Status& status) {
  // Shortens the key for the message, because an invalid key may have megabytes.
  constexpr std::size_t kShown = 200;
  std::string text(kind);
  text += ' ';
  text += key.substr(0, kShown);
  if (key.size() > kShown) text += "...";
  return status.WithContext(text).With({.key = std::string(key)});
}

}  // namespace

struct StateDict::Rep {
  std::vector<TensorItem> tensors;
  std::vector<ObjectItem> objects;
  std::map<std::string, CommonValue> common;
  std::map<std::string, CommonValue> rank_common;
  std::map<std::string, CommonValue> locals;
  std::optional<CommonDict> content;
  std::map<std::string, std::string> layer_names;
  // By key: position of the first shard with this key; all later shards must have its dtype and
  // shape. Copies of a state (WithShards) share it until one of them adds a tensor.
  using Positions = std::unordered_map<std::string, std::size_t>;
  std::shared_ptr<Positions> first_of_key = std::make_shared<Positions>();
  std::set<std::pair<std::string, std::string>> object_parts;
  LayerNames layers;  // Index of layer_names.
  struct Free {
    std::shared_ptr<const OpenedDevice> device;  // Null: host memory.
    void operator()(void* p) const {
      if (device != nullptr) {
        // Frees the memory only after the device work that a failed load may have left on it.
        device->pending_work->Free(static_cast<std::byte*>(p));
      } else {
        std::free(p);  // NOLINT(cppcoreguidelines-no-malloc)
      }
    }
  };
  std::vector<std::unique_ptr<void, Free>> owned;
  Status first_failure;
  Status last;

  // Fails if `name` is the name of a layer of a stacked tensor.
  Status CheckNoLayer(std::string_view name) const {
    const auto found = layers.Find(name);
    if (!found) return Status();
    const std::string stacked(found->stacked_key);
    const Shard& stack = tensors[first_of_key->at(stacked)].shard;
    if (found->layer >= stack.global_shape[0]) return Status();
    return Status(Code::kInvalidArgument,
                  "\"" + std::string(name) + "\" is already the name of layer " +
                      std::to_string(found->layer) + " of tensor " + stacked);
  }

  // Blocks of a page or more are page-aligned, smaller ones are cache-line-aligned.
  Result<void*> Allocate(std::uint64_t bytes, Fill fill) {
    constexpr std::size_t kPage = 4096;
    const std::size_t alignment = bytes >= kPage ? kPage : 64;
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, bytes) != 0) {
      return Status(Code::kResourceExhausted,
                    "cannot allocate " + std::to_string(bytes) + " bytes");
    }
    owned.emplace_back(memory, Free{});
    if (fill == Fill::kZero) std::memset(memory, 0, bytes);
    return memory;
  }
  Result<void*> AllocateOn(const std::shared_ptr<const OpenedDevice>& device, std::uint64_t bytes,
                           Fill fill) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::byte* const memory, device->pending_work->Allocate(bytes));
    std::unique_ptr<void, Free> own(memory, Free{device});
    owned.push_back(std::move(own));
    if (fill == Fill::kUninitialized) return memory;
    DeviceLimits rules;
    rules.patience = kDevicePatience;
    DeviceWriter writer(rules);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Box all,
                                 Box::Make(Dims{0}, Dims{static_cast<std::int64_t>(bytes)}));
    const PlacedBox placed{all, 0, Dims{1}};
    TENSORMOUNT_RETURN_IF_ERROR(writer.WriteZeros(device, all, placed, memory));
    TENSORMOUNT_RETURN_IF_ERROR(writer.Finish());
    return memory;
  }

  const Status& Note(Status status) {
    if (!status.ok() && first_failure.ok()) first_failure = status;
    last = std::move(status);
    return last;
  }

  const Status& Set(std::map<std::string, CommonValue>& values, std::string_view name,
                    CommonValue value, int outer) {
    Status status = CheckCommonName(name);
    if (status.ok()) status = CheckCommon(value, outer);
    if (!status.ok()) return Note(WithItemName("common value", name, status));
    values.insert_or_assign(std::string(name), std::move(value));
    return Note(Status());
  }
};

namespace {

// Checks the memory of an added shard, and the shard itself (CheckShard).
Status CheckAdded(const Shard& shard) {
  // CheckShard comes first: CheckMemory computes with strides that must not overflow.
  TENSORMOUNT_RETURN_IF_ERROR(CheckShard(shard));
  TENSORMOUNT_RETURN_IF_ERROR(shard.metadata_only ? CheckDescription(shard.data)
                                                  : CheckMemory(shard.data));
  if (!shard.metadata_only && !shard.region.empty() && shard.data.data == nullptr) {
    return Status(Code::kInvalidArgument, "the buffer is null");
  }
  return Status();
}

Status CheckAgree(const Shard& first, const Shard& shard) {
  const auto differ = [](const std::string& a, const std::string& b) {
    return Status(Code::kInvalidArgument, "added with " + a + " and with " + b);
  };
  if (first.data.dtype != shard.data.dtype) {
    return differ("dtype " + std::string(InfoOf(first.data.dtype).name),
                  std::string(InfoOf(shard.data.dtype).name));
  }
  if (!(first.global_shape == shard.global_shape)) {
    return differ("shape " + first.global_shape.ToString(), shard.global_shape.ToString());
  }
  if ((first.replica == Replica::kUnlabelled) != (shard.replica == Replica::kUnlabelled)) {
    return differ("a replica label", "none: either all shards of a tensor have one, or none has");
  }
  return Status();
}

Status CheckGridPosition(const GridPosition& place) {
  if (place.index.rank() != place.grid.rank()) {
    return Status(Code::kInvalidArgument, "index " + place.index.ToString() +
                                              " has another number of axes than grid " +
                                              place.grid.ToString());
  }
  if (place.grid.rank() > kMaxRank) {
    return Status(Code::kInvalidArgument, "a grid has at most 16 axes");
  }
  if (!CheckedProduct(place.grid).has_value()) {
    return Status(Code::kInvalidArgument, "grid " + place.grid.ToString() +
                                              " has a negative extent or more than 2^63 - 1 parts");
  }
  for (int a = 0; a < place.grid.rank(); ++a) {
    if (place.index[a] < 0 || place.index[a] >= place.grid[a]) {
      return Status(Code::kInvalidArgument, "index " + place.index.ToString() +
                                                " lies outside of grid " + place.grid.ToString());
    }
  }
  return Status();
}

}  // namespace

StateDict::StateDict() : rep_(std::make_unique<Rep>()) {}
StateDict::~StateDict() = default;
StateDict::StateDict(StateDict&&) noexcept = default;
StateDict& StateDict::operator=(StateDict&&) noexcept = default;

const Status& StateDict::AddTensor(std::string_view key, const Shard& shard) {
  Status status = CheckKey(key);
  if (status.ok()) status = CheckAdded(shard);
  if (status.ok()) status = rep_->CheckNoLayer(key);
  if (!status.ok()) return rep_->Note(WithItemName("tensor", key, status));
  if (rep_->first_of_key.use_count() > 1) {
    rep_->first_of_key = std::make_shared<Rep::Positions>(*rep_->first_of_key);
  }
  const auto [at, added] = rep_->first_of_key->try_emplace(std::string(key), rep_->tensors.size());
  if (!added) {
    status = CheckAgree(rep_->tensors[at->second].shard, shard);
    if (!status.ok()) return rep_->Note(WithItemName("tensor", key, status));
  }
  rep_->tensors.push_back({std::string(key), shard});
  Shard& kept = rep_->tensors.back().shard;
  if (kept.metadata_only) kept.data = WithoutMemory(kept.data.dtype, kept.region);
  return rep_->Note(Status());
}

StateDict WithShards(const StateDict& state, const std::function<Shard(std::size_t)>& shard_of) {
  StateDict out;
  const StateDict::Rep& from = *state.rep_;
  StateDict::Rep& to = *out.rep_;
  to.tensors.reserve(from.tensors.size());
  for (std::size_t i = 0; i < from.tensors.size(); ++i) {
    to.tensors.push_back({from.tensors[i].key, shard_of(i)});
  }
  to.objects = from.objects;
  to.common = from.common;
  to.rank_common = from.rank_common;
  to.locals = from.locals;
  to.content = from.content;
  to.layer_names = from.layer_names;
  to.first_of_key = from.first_of_key;
  to.object_parts = from.object_parts;
  to.layers = LayerNames(to.layer_names);
  to.first_failure = from.first_failure;
  return out;
}

const Status& StateDict::AddObject(std::string_view key, std::string_view bytes,
                                   const GridPosition& place) {
  Status status = CheckKey(key);
  if (status.ok()) status = CheckGridPosition(place);
  if (status.ok() && !rep_->object_parts.emplace(std::string(key), place.index.ToString()).second) {
    status = Status(Code::kInvalidArgument,
                    place.index.rank() == 0 ? std::string("added twice")
                                            : "part " + place.index.ToString() + " added twice");
  }
  if (!status.ok()) return rep_->Note(WithItemName("object", key, status));
  rep_->objects.push_back({std::string(key), place, std::string(bytes)});
  return rep_->Note(Status());
}

const Status& StateDict::WantObject(std::string_view key, const GridPosition& place) {
  Status status = CheckKey(key);
  // A request may omit the grid, which the checkpoint knows.
  if (status.ok() && place.grid.rank() != 0) status = CheckGridPosition(place);
  if (!status.ok()) return rep_->Note(WithItemName("object", key, status));
  rep_->objects.push_back({std::string(key), place, std::string(), true});
  return rep_->Note(Status());
}

const Status& StateDict::SetCommon(std::string_view name, CommonValue value) {
  return rep_->Set(rep_->common, name, std::move(value), 0);
}

const Status& StateDict::SetRankCommon(std::string_view name, CommonValue value) {
  // All values of a rank are stored in one dict, which is one more level of nesting.
  return rep_->Set(rep_->rank_common, name, std::move(value), 1);
}

const Status& StateDict::SetLocal(std::string_view name, CommonValue value) {
  return rep_->Set(rep_->locals, name, std::move(value), 0);
}

const Status& StateDict::SetContentMetadata(CommonDict content) {
  CommonValue value(std::move(content));
  if (Status status = CheckCommon(value); !status.ok()) {
    return rep_->Note(status.WithContext("content metadata"));
  }
  rep_->content = std::move(*value.get_if<CommonDict>());
  return rep_->Note(Status());
}

const Status& StateDict::NameLayers(std::string_view key, std::string_view pattern) {
  const auto fail = [&](Status status) -> const Status& {
    return rep_->Note(WithItemName("layer names of tensor", key, status));
  };
  const auto invalid = [](const std::string& why) { return Status(Code::kInvalidArgument, why); };
  if (Status status = CheckLayerPattern(pattern); !status.ok()) return fail(std::move(status));
  const auto at = rep_->first_of_key->find(std::string(key));
  if (at == rep_->first_of_key->end()) {
    return fail(invalid("no such tensor was added before"));
  }
  const Dims& shape = rep_->tensors[at->second].shard.global_shape;
  if (shape.rank() == 0) return fail(invalid("a scalar has no layers"));
  const std::int64_t layers = shape[0];
  if (layers > kMaxLayers) {
    return fail(invalid(std::to_string(layers) + " layers, at most " + std::to_string(kMaxLayers) +
                        " are allowed"));
  }
  const auto named = rep_->layer_names.find(std::string(key));
  if (named != rep_->layer_names.end()) {
    if (named->second == pattern) return rep_->Note(Status());
    return fail(invalid("already named \"" + named->second + "\""));
  }
  if (Status status = CheckKey(LayerKey(pattern, std::max<std::int64_t>(layers - 1, 0)));
      !status.ok()) {
    return fail(std::move(status));
  }
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = LayerKey(pattern, layer);
    if (rep_->first_of_key->contains(name)) {
      return fail(invalid("\"" + name + "\" is the key of another tensor"));
    }
    if (Status status = rep_->CheckNoLayer(name); !status.ok()) return fail(std::move(status));
  }
  rep_->layer_names.emplace(key, pattern);
  rep_->layers = LayerNames(rep_->layer_names);
  return rep_->Note(Status());
}

Status StateDict::AllocateData(Device device, Fill fill) {
  const auto allocate = [&]() -> Status {
    std::shared_ptr<const OpenedDevice> opened;
    if (device.kind != DeviceKind::kHost) {
      TENSORMOUNT_ASSIGN_OR_RETURN(opened, OpenDevice(device));
    }
    for (TensorItem& item : rep_->tensors) {
      Shard& shard = item.shard;
      if (!shard.metadata_only) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                                   RegionBytes(shard.data.dtype, shard.global_shape, shard.region));
      if (bytes > 0) {
        TENSORMOUNT_ASSIGN_OR_RETURN(shard.data.data, opened == nullptr
                                                          ? rep_->Allocate(bytes, fill)
                                                          : rep_->AllocateOn(opened, bytes, fill));
      }
      shard.data.device = device;
      shard.data.memory = opened == nullptr ? MemoryKind::kPageable : MemoryKind::kDevice;
      shard.data.stream = DeviceStream();
      shard.metadata_only = false;
    }
    return Status();
  };
  return rep_->Note(allocate().WithContext("allocate tensors"));
}

const Status& StateDict::Fail(const Status& failure) { return rep_->Note(failure); }

const std::vector<StateDict::TensorItem>& StateDict::tensors() const { return rep_->tensors; }
const std::vector<StateDict::ObjectItem>& StateDict::objects() const { return rep_->objects; }
const std::map<std::string, CommonValue>& StateDict::common() const { return rep_->common; }
const std::map<std::string, CommonValue>& StateDict::rank_common() const {
  return rep_->rank_common;
}
const CommonDict* StateDict::content_metadata() const {
  return rep_->content.has_value() ? &*rep_->content : nullptr;
}
const std::map<std::string, CommonValue>& StateDict::locals() const { return rep_->locals; }
const std::map<std::string, std::string>& StateDict::layer_names() const {
  return rep_->layer_names;
}
const Status& StateDict::status() const { return rep_->first_failure; }

}  // namespace tensormount
