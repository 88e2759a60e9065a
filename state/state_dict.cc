// SPDX-License-Identifier: Apache-2.0
#include "tensormount/state_dict.h"

#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "index/common_state.h"
#include "index/record_coding.h"
#include "shard/tensor_meta.h"

namespace tensormount {

namespace {

std::string Quoted(std::string_view kind, std::string_view key) {
  // A broken key may be megabytes of rubbish.
  constexpr std::size_t kShown = 200;
  std::string text(kind);
  text += ' ';
  text += key.substr(0, kShown);
  if (key.size() > kShown) text += "...";
  return text;
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
  // Where a key was first added: dtype and shape of its later shards must agree with that.
  std::unordered_map<std::string, std::size_t> first_of_key;
  std::set<std::pair<std::string, std::string>> object_parts;
  Status first_failure;
  Status last;

  const Status& Note(Status status) {
    if (!status.ok() && first_failure.ok()) first_failure = status;
    last = std::move(status);
    return last;
  }

  const Status& Set(std::map<std::string, CommonValue>& values, std::string_view name,
                    CommonValue value, int outer) {
    Status status = CheckCommonName(name);
    if (status.ok()) status = CheckCommon(value, outer);
    if (!status.ok()) return Note(status.WithContext(Quoted("common value", name)));
    values.insert_or_assign(std::string(name), std::move(value));
    return Note(Status());
  }
};

namespace {

Status CheckShard(std::string_view key, const Shard& shard) {
  if (shard.data.device.kind != DeviceKind::kHost) {
    return Status(Code::kUnsupported,
                  "the buffer is in device memory, which this build cannot reach");
  }
  Result<TensorMeta> meta =
      TensorMeta::Make(std::string(key), shard.data.dtype, shard.global_shape);
  if (!meta.ok()) return meta.status();
  if (shard.region.box().rank() != shard.global_shape.rank()) {
    return Status(Code::kInvalidArgument, "region " + shard.region.ToString() +
                                              " has another rank than shape " +
                                              shard.global_shape.ToString());
  }
  if (!shard.region.Within(shard.global_shape)) {
    return Status(Code::kInvalidArgument, "region " + shard.region.ToString() +
                                              " lies outside of shape " +
                                              shard.global_shape.ToString());
  }
  Result<Region> bytes = ByteRegion(shard.data.dtype, shard.global_shape, shard.region);
  if (!bytes.ok()) return bytes.status();
  Result<std::vector<PlacedBox>> placed =
      PlaceBuffer(shard.data, shard.data.dtype, shard.global_shape, shard.region);
  if (!placed.ok()) return placed.status();
  if (!shard.region.empty() && shard.data.data == nullptr) {
    return Status(Code::kInvalidArgument, "the buffer is null");
  }
  return Status();
}

Status CheckPlace(const ObjectPlace& place) {
  if (place.index.rank() != place.grid.rank()) {
    return Status(
        Code::kInvalidArgument,
        "index " + place.index.ToString() + " has another rank than grid " + place.grid.ToString());
  }
  if (place.grid.rank() > kMaxRank) {
    return Status(Code::kInvalidArgument, "a grid has at most 16 axes");
  }
  if (!CheckedProduct(place.grid).has_value()) {
    return Status(Code::kInvalidArgument, "grid " + place.grid.ToString() + " is not possible");
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
  if (Status status = CheckKey(key); !status.ok()) {
    return rep_->Note(status.WithContext(Quoted("tensor", key)));
  }
  if (Status status = CheckShard(key, shard); !status.ok()) {
    return rep_->Note(status.WithContext(Quoted("tensor", key)));
  }
  const auto [at, added] = rep_->first_of_key.try_emplace(std::string(key), rep_->tensors.size());
  if (!added) {
    const Shard& first = rep_->tensors[at->second].shard;
    if (first.data.dtype != shard.data.dtype) {
      return rep_->Note(Status(Code::kInvalidArgument,
                               Quoted("tensor", key) + ": added with dtype " +
                                   std::string(InfoOf(first.data.dtype).name) + " and with " +
                                   std::string(InfoOf(shard.data.dtype).name)));
    }
    if (!(first.global_shape == shard.global_shape)) {
      return rep_->Note(
          Status(Code::kInvalidArgument, Quoted("tensor", key) + ": added with shape " +
                                             first.global_shape.ToString() + " and with " +
                                             shard.global_shape.ToString()));
    }
  }
  rep_->tensors.push_back({std::string(key), shard});
  return rep_->Note(Status());
}

const Status& StateDict::AddObject(std::string_view key, std::string_view bytes,
                                   const ObjectPlace& place) {
  Status status = CheckKey(key);
  if (status.ok()) status = CheckPlace(place);
  if (status.ok() && !rep_->object_parts.emplace(std::string(key), place.index.ToString()).second) {
    status = Status(Code::kInvalidArgument,
                    place.index.rank() == 0 ? std::string("added twice")
                                            : "part " + place.index.ToString() + " added twice");
  }
  if (!status.ok()) return rep_->Note(status.WithContext(Quoted("object", key)));
  rep_->objects.push_back({std::string(key), place, std::string(bytes)});
  return rep_->Note(Status());
}

const Status& StateDict::WantObject(std::string_view key, const ObjectPlace& place) {
  Status status = CheckKey(key);
  // For wishes the grid may be left out: it is known to the checkpoint.
  if (status.ok() && place.grid.rank() != 0) status = CheckPlace(place);
  if (!status.ok()) return rep_->Note(status.WithContext(Quoted("object", key)));
  rep_->objects.push_back({std::string(key), place, std::string()});
  return rep_->Note(Status());
}

const Status& StateDict::SetCommon(std::string_view name, CommonValue value) {
  return rep_->Set(rep_->common, name, std::move(value), 0);
}

const Status& StateDict::SetRankCommon(std::string_view name, CommonValue value) {
  // All of a rank are stored as one dict.
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
