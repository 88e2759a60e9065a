// SPDX-License-Identifier: Apache-2.0
// Each slot of an optimizer (exp_avg, ...) is sharded as its parameter is, so that a load on other
// ranks reshards both alike. Groups and hyperparameters are a common value.
#include "examples/models/optimizer.h"

#include <algorithm>
#include <set>
#include <utility>

namespace tensormount::examples {
namespace {

Status Invalid(std::string why) { return Status(Code::kInvalidArgument, std::move(why)); }

std::string SlotText(std::string_view slot, std::string_view parameter) {
  return "slot " + std::string(slot) + " of parameter " + std::string(parameter);
}

// A slot's name ends at the first dot of what follows "state.".
Status CheckSlotName(std::string_view slot) {
  if (!slot.empty() && slot.find('.') == std::string_view::npos) return Status();
  return Invalid("slot \"" + std::string(slot) + "\": must be a word without dots");
}

CommonValue Words(const std::vector<std::string>& words) {
  CommonList list;
  for (const std::string& word : words) list.items.emplace_back(word);
  return CommonValue(std::move(list));
}

// nullopt where it is not a list of strings.
std::optional<std::vector<std::string>> WordsFrom(const CommonValue* value) {
  const auto* list = value == nullptr ? nullptr : value->get_if<CommonList>();
  if (list == nullptr) return std::nullopt;
  std::vector<std::string> words;
  for (const CommonValue& item : list->items) {
    const auto* word = item.get_if<std::string>();
    if (word == nullptr) return std::nullopt;
    words.push_back(*word);
  }
  return words;
}

}  // namespace

Result<std::vector<KeyedShard>> BucketShards(const BufferView& data, std::int64_t first,
                                             std::span<const BucketEntry> entries) {
  if (data.shape.rank() != 1) {
    return Invalid("a buffer of shape " + data.shape.ToString() + " is no part of a bucket");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box held, Box::Make({first}, data.shape));
  struct Placed {
    const BucketEntry* entry;
    Box box;  // Of the bucket.
  };
  std::vector<Placed> sorted;
  for (const BucketEntry& entry : entries) {
    const Result<Box> box = Box::Make({entry.offset}, {entry.region.volume()});
    if (!box.ok()) return box.status().WithContext("parameter " + entry.key + " in its bucket");
    if (!entry.region.empty()) sorted.push_back({&entry, box.value()});
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const Placed& a, const Placed& b) { return a.box.begin(0) < b.box.begin(0); });
  std::vector<KeyedShard> parts;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const auto& [entry, box] = sorted[i];
    if (i + 1 < sorted.size() && !Intersect(box, sorted[i + 1].box).empty()) {
      return Invalid("parameters " + entry->key + " and " + sorted[i + 1].entry->key +
                     " overlap in their bucket");
    }
    const Box part = Intersect(held, box);
    if (part.empty()) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const Region region,
        Region::Flat(entry->region.box(),
                     entry->region.flat_first() + part.begin(0) - entry->offset, part.extent(0)));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Box inside,
                                 Box::Make({part.begin(0) - first}, part.extent()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const BufferView view, SliceView(data, inside));
    parts.push_back(
        {entry->key, {.global_shape = entry->global_shape, .region = region, .data = view}});
  }
  return parts;
}

struct OptimizerState::Rep {
  struct Source {
    BufferView local;  // Dtype and shape of the parameter's memory.
    ShardView view;
  };
  // What this rank holds of one tensor of the model.
  struct Parameter {
    std::vector<Shard> shards;  // Without memory.
    // One for each of `shards`, as far as they were added.
    std::map<std::string, std::vector<Shard>, std::less<>> slots;
    std::map<std::string, BufferView, std::less<>> scalars;
  };
  std::string prefix;
  std::map<std::string, Source, std::less<>> sources;
  // Where the shards of a source stand among those of its parameters: the n-th of its view is
  // shard number places[n] of its key.
  std::map<std::string, std::vector<std::size_t>, std::less<>> places;
  std::map<std::string, Parameter, std::less<>> parameters;
  std::set<std::pair<std::string, std::string>> filled;  // Source and slot.
  std::vector<OptimizerGroup> groups;

  Status CheckComplete() const;
  Status CheckParameter(const std::string& key, const Parameter& parameter,
                        const OptimizerGroup& group) const;
  Status Add(StateDict& state) const;
};

OptimizerState::OptimizerState(std::string prefix) : rep_(std::make_unique<Rep>()) {
  rep_->prefix = std::move(prefix);
}
OptimizerState::~OptimizerState() = default;
OptimizerState::OptimizerState(OptimizerState&&) noexcept = default;
OptimizerState& OptimizerState::operator=(OptimizerState&&) noexcept = default;

Status OptimizerState::AddParameter(std::string_view key, const Shard& shard) {
  return AddParameters(
      key, shard.data,
      [name = std::string(key), shard](const BufferView& local) -> Result<std::vector<KeyedShard>> {
        Shard part = shard;
        part.data = local;
        part.metadata_only = local.data == nullptr && !part.region.empty();
        return std::vector<KeyedShard>{{name, part}};
      });
}

Status OptimizerState::AddParameters(std::string_view name, const BufferView& local,
                                     ShardView view) {
  const auto fail = [&](const Status& status) {
    return status.WithContext("parameter " + std::string(name));
  };
  if (rep_->sources.contains(name)) return fail(Invalid("added twice"));
  Result<std::vector<KeyedShard>> parts = view(local);
  if (!parts.ok()) return fail(parts.status());
  std::vector<std::size_t>& places = rep_->places[std::string(name)];
  for (const KeyedShard& part : parts.value()) {
    std::vector<Shard>& shards = rep_->parameters[part.key].shards;
    places.push_back(shards.size());
    shards.push_back(MetadataOnly(part.shard.data.dtype, part.shard.global_shape, part.shard.region,
                                  part.shard.replica));
  }
  rep_->sources.emplace(name, Rep::Source{local, std::move(view)});
  return Status();
}

Status OptimizerState::AddSlot(std::string_view parameter, std::string_view slot,
                               const BufferView& data) {
  const auto fail = [&](const Status& status) {
    return status.WithContext(SlotText(slot, parameter));
  };
  if (Status status = CheckSlotName(slot); !status.ok()) return fail(status);
  const auto source = rep_->sources.find(parameter);
  if (source == rep_->sources.end()) return fail(Invalid("no such parameter was added"));
  if (!(data.shape == source->second.local.shape)) {
    return fail(Invalid("shape " + data.shape.ToString() + ", but the parameter's is " +
                        source->second.local.shape.ToString()));
  }
  Result<std::vector<KeyedShard>> parts = source->second.view(data);
  if (!parts.ok()) return fail(parts.status());
  const std::vector<std::size_t>& places = rep_->places.find(parameter)->second;
  if (parts.value().size() != places.size()) {
    return fail(Invalid("is " + std::to_string(parts.value().size()) +
                        " shards, but the parameter is " + std::to_string(places.size())));
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    const KeyedShard& part = parts.value()[i];
    const auto of = rep_->parameters.find(part.key);
    if (of == rep_->parameters.end() || of->second.shards.size() <= places[i] ||
        !(of->second.shards[places[i]].region == part.shard.region) ||
        !(of->second.shards[places[i]].global_shape == part.shard.global_shape)) {
      return fail(Invalid("is " + part.shard.region.ToString() + " of " + part.key +
                          ", which the parameter is not"));
    }
  }
  if (!rep_->filled.emplace(parameter, slot).second) return fail(Invalid("added twice"));
  for (const KeyedShard& part : parts.value()) {
    rep_->parameters.find(part.key)->second.slots[std::string(slot)].push_back(part.shard);
  }
  return Status();
}

Status OptimizerState::AddScalar(std::string_view key, std::string_view slot,
                                 const BufferView& data) {
  const auto fail = [&](const Status& status) { return status.WithContext(SlotText(slot, key)); };
  if (Status status = CheckSlotName(slot); !status.ok()) return fail(status);
  const auto found = rep_->parameters.find(key);
  if (found == rep_->parameters.end()) return fail(Invalid("no such parameter was added"));
  if (!found->second.scalars.emplace(slot, data).second) return fail(Invalid("added twice"));
  return Status();
}

Status OptimizerState::AddGroup(OptimizerGroup group) {
  const std::string context = "parameter group " + std::to_string(rep_->groups.size());
  std::set<std::string_view> names;
  for (const std::vector<std::string>* slots : {&group.slots, &group.scalars}) {
    for (const std::string& slot : *slots) {
      if (Status status = CheckSlotName(slot); !status.ok()) return status.WithContext(context);
      if (!names.insert(slot).second) return Invalid(context + ": slot " + slot + " twice");
    }
  }
  std::set<std::string_view> parameters(group.parameters.begin(), group.parameters.end());
  if (parameters.size() != group.parameters.size()) {
    return Invalid(context + ": lists a parameter twice");
  }
  for (const std::string& frozen : group.frozen) {
    if (!parameters.contains(frozen)) {
      return Invalid(context + ": frozen parameter " + frozen + " is not one of it");
    }
  }
  rep_->groups.push_back(std::move(group));
  return Status();
}

Status OptimizerState::Rep::CheckParameter(const std::string& key, const Parameter& parameter,
                                           const OptimizerGroup& group) const {
  const bool frozen =
      std::find(group.frozen.begin(), group.frozen.end(), key) != group.frozen.end();
  const auto listed = [frozen](const std::vector<std::string>& slots, const std::string& slot) {
    return !frozen && std::find(slots.begin(), slots.end(), slot) != slots.end();
  };
  for (const auto& [slot, shards] : parameter.slots) {
    if (!listed(group.slots, slot)) {
      return Invalid(SlotText(slot, key) +
                     (frozen ? " was added, though it is frozen" : " is not one of its group"));
    }
    if (shards.size() != parameter.shards.size()) {
      return Invalid(SlotText(slot, key) + " has " + std::to_string(shards.size()) + " of the " +
                     std::to_string(parameter.shards.size()) + " shards of the parameter");
    }
  }
  for (const auto& [slot, data] : parameter.scalars) {
    if (!listed(group.scalars, slot)) {
      return Invalid("scalar " + SlotText(slot, key) +
                     (frozen ? " was added, though it is frozen" : " is not one of its group"));
    }
  }
  if (frozen) return Status();
  for (const std::string& slot : group.slots) {
    if (!parameter.slots.contains(slot)) return Invalid(SlotText(slot, key) + " is missing");
  }
  for (const std::string& slot : group.scalars) {
    if (!parameter.scalars.contains(slot)) {
      return Invalid("scalar " + SlotText(slot, key) + " is missing");
    }
  }
  return Status();
}

Status OptimizerState::Rep::CheckComplete() const {
  std::map<std::string_view, const OptimizerGroup*> group_of;
  for (const OptimizerGroup& group : groups) {
    for (const std::string& key : group.parameters) {
      if (!group_of.emplace(key, &group).second) {
        return Invalid("parameter " + key + " is in two groups");
      }
    }
  }
  for (const auto& [key, parameter] : parameters) {
    const auto group = group_of.find(key);
    if (group == group_of.end()) return Invalid("parameter " + key + " is in no group");
    TENSORMOUNT_RETURN_IF_ERROR(CheckParameter(key, parameter, *group->second));
  }
  return Status();
}

Status OptimizerState::Rep::Add(StateDict& state) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckComplete());
  for (const auto& [key, parameter] : parameters) {
    for (const auto& [slot, shards] : parameter.slots) {
      for (const Shard& shard : shards) {
        TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(OptimizerSlotKey(slot, key, prefix), shard));
      }
    }
    for (const auto& [slot, data] : parameter.scalars) {
      TENSORMOUNT_RETURN_IF_ERROR(
          state.AddTensor(OptimizerSlotKey(slot, key, prefix),
                          {.global_shape = {}, .region = Region(), .data = data}));
    }
  }
  return Status();
}

Status OptimizerState::AddTo(StateDict& state) const {
  Status status = rep_->Add(state);
  if (status.ok()) {
    status =
        state.SetCommon(OptimizerGroupsName(rep_->prefix), OptimizerGroupsToCommon(rep_->groups));
  }
  return status.ok() ? status : state.Fail(status.WithContext(rep_->prefix));
}

Status OptimizerState::AddToLoad(StateDict& state) const {
  const Status status = rep_->Add(state);
  return status.ok() ? status : state.Fail(status.WithContext(rep_->prefix));
}

std::string OptimizerGroupsName(std::string_view prefix) {
  return std::string(prefix) + ".param_groups";
}

std::string OptimizerSlotKey(std::string_view slot, std::string_view parameter,
                             std::string_view prefix) {
  std::string key(prefix);
  key.append(".state.").append(slot).append(".").append(parameter);
  return key;
}

CommonValue OptimizerGroupsToCommon(std::span<const OptimizerGroup> groups) {
  CommonList list;
  for (const OptimizerGroup& group : groups) {
    CommonDict dict;
    dict.items["hyperparameters"] = group.hyperparameters;
    dict.items["params"] = Words(group.parameters);
    dict.items["slots"] = Words(group.slots);
    dict.items["scalars"] = Words(group.scalars);
    dict.items["frozen"] = Words(group.frozen);
    list.items.emplace_back(std::move(dict));
  }
  return CommonValue(std::move(list));
}

Result<std::vector<OptimizerGroup>> OptimizerGroupsFromCommon(const CommonValue& value) {
  const auto bad = [](const std::string& what) {
    return Status(Code::kDataLoss, "parameter groups of an optimizer: " + what);
  };
  const auto* list = value.get_if<CommonList>();
  if (list == nullptr) return bad("not a list");
  std::vector<OptimizerGroup> groups;
  for (const CommonValue& item : list->items) {
    const std::string which = "group " + std::to_string(groups.size());
    const auto* dict = item.get_if<CommonDict>();
    if (dict == nullptr) return bad(which + " is not a dict");
    const CommonValue* hyper = dict->Find("hyperparameters");
    const auto* hyper_dict = hyper == nullptr ? nullptr : hyper->get_if<CommonDict>();
    auto parameters = WordsFrom(dict->Find("params"));
    auto slots = WordsFrom(dict->Find("slots"));
    auto scalars = WordsFrom(dict->Find("scalars"));
    auto frozen = WordsFrom(dict->Find("frozen"));
    if (hyper_dict == nullptr || !parameters || !slots || !scalars || !frozen) {
      return bad(which + " lacks a field");
    }
    groups.push_back({.hyperparameters = *hyper_dict,
                      .parameters = std::move(*parameters),
                      .slots = std::move(*slots),
                      .scalars = std::move(*scalars),
                      .frozen = std::move(*frozen)});
  }
  return groups;
}

Result<std::string> ParameterById(std::span<const OptimizerGroup> groups, std::int64_t id) {
  if (id >= 0) {
    auto rest = static_cast<std::uint64_t>(id);
    for (const OptimizerGroup& group : groups) {
      if (rest < group.parameters.size()) return group.parameters[rest];
      rest -= group.parameters.size();
    }
  }
  return Status(Code::kNotFound, "the optimizer has no parameter " + std::to_string(id));
}

Status CheckOptimizer(std::span<const OptimizerGroup> groups, const ShapeOf& shape_of,
                      std::string_view prefix) {
  std::string first;
  std::uint64_t faults = 0;
  const auto fault = [&](const std::string& what) {
    if (faults++ == 0) first = what;
  };
  for (const OptimizerGroup& group : groups) {
    const std::set<std::string_view> frozen(group.frozen.begin(), group.frozen.end());
    for (const std::string& key : group.parameters) {
      if (frozen.contains(key)) continue;
      Result<Dims> model = shape_of(key);
      if (!model.ok() && model.status().code() != Code::kNotFound) return model.status();
      std::optional<Dims> wanted;
      if (model.ok()) wanted = model.value();
      const auto check = [&](const std::string& slot, bool scalar) -> Status {
        const Result<Dims> shape = shape_of(OptimizerSlotKey(slot, key, prefix));
        if (!shape.ok()) {
          if (shape.status().code() != Code::kNotFound) return shape.status();
          fault(SlotText(slot, key) + " is not stored");
          return Status();
        }
        if (!scalar && !wanted) wanted = shape.value();
        const Dims expected = scalar ? Dims() : *wanted;
        if (!(shape.value() == expected)) {
          fault(SlotText(slot, key) + " is stored with shape " + shape.value().ToString() +
                ", not " + expected.ToString());
        }
        return Status();
      };
      for (const std::string& slot : group.slots) TENSORMOUNT_RETURN_IF_ERROR(check(slot, false));
      for (const std::string& slot : group.scalars) {
        TENSORMOUNT_RETURN_IF_ERROR(check(slot, true));
      }
    }
  }
  if (faults == 0) return Status();
  return Status(Code::kDataLoss,
                std::string(prefix) + ": " + first +
                    (faults > 1 ? ", and " + std::to_string(faults - 1) + " more" : ""));
}

}  // namespace tensormount::examples
