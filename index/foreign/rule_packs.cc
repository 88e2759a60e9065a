// SPDX-License-Identifier: Apache-2.0
// Chooses among the rule packs. The layout of a checkpoint is found by its keys, the family of
// models by its keys and by config.json. Nothing is guessed from shapes.
#include "index/foreign/rule_packs.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "index/foreign/dcp_objects.h"
#include "index/foreign/megatron.h"
#include "index/records/made_config.h"
#include "index/records/name_binding.h"
#include "index/records/named_values.h"

namespace tensormount {
namespace {

constexpr std::string_view kHuggingFace = "hf";
constexpr std::string_view kMegatronLayout = "megatron";
// The checkpoint that tensormount.megatron saves within Megatron's directory of an iteration.
constexpr std::string_view kMegatronCheckpoint = "/tm-state";
// The family of a pack whose rules do not depend on the model.
constexpr std::string_view kAnyFamily = "any";

Status BadPackName(const std::string& why) {
  return Status(Code::kInvalidArgument, "name map: " + why);
}

// "megatron:qwen3" is {"megatron", "qwen3"}, "hf" is {"hf", ""}.
std::pair<std::string, std::string> LayoutAndFamily(const std::string& name) {
  const std::size_t colon = name.find(':');
  if (colon == std::string::npos) return {name, ""};
  return {name.substr(0, colon), name.substr(colon + 1)};
}

Result<std::vector<NameRules>> ParsePacks() {
  std::vector<NameRules> packs;
  for (const RulePack& pack : RulePacks()) {
    Result<NameRules> rules = NameRules::FromJson(pack.json);
    if (!rules.ok()) return rules.status().WithContext(std::string(pack.file));
    packs.push_back(std::move(rules).value());
  }
  return packs;
}

// Parsed once for each process: a mount maps each step of a store.
const Result<std::vector<NameRules>>& ParsedPacks() {
  static const Result<std::vector<NameRules>> packs = ParsePacks();
  return packs;
}

std::string PackName(const NameRules& pack) { return pack.layout + ":" + pack.family; }

std::string Listed(const std::vector<const NameRules*>& packs) {
  std::string text;
  for (const NameRules* pack : packs) text += (text.empty() ? "" : ", ") + PackName(*pack);
  return text;
}

bool MatchesAny(const std::vector<KeyPattern>& forms, const std::vector<std::string>& keys) {
  return std::ranges::any_of(keys, [&](const std::string& key) {
    return std::ranges::any_of(forms,
                               [&](const KeyPattern& form) { return form.Match(key).has_value(); });
  });
}

// Why the checkpoint with these keys does not have the layout that the pack reads; empty if it
// does.
std::string MisfitOf(const NameRules& pack, const std::vector<std::string>& keys) {
  for (const std::vector<KeyPattern>& forms : pack.detect) {
    if (!MatchesAny(forms, keys)) return "has no " + forms[0].text();
  }
  for (const std::vector<KeyPattern>& forms : pack.absent) {
    if (MatchesAny(forms, keys)) return "has " + forms[0].text();
  }
  return {};
}

// The keys of the stored and the lost tensors. A family may be told by tensors that are lost.
Result<std::vector<std::string>> KeysOf(const OpenedCheckpoint& source) {
  std::vector<std::string> keys;
  TENSORMOUNT_RETURN_IF_ERROR(source.index().ForEachTensor(0, [&](const TensorEntry& entry) {
    keys.push_back(entry.meta.key());
    return true;
  }));
  for (const ForeignLoss& loss : source.lost()) {
    keys.insert(keys.end(), loss.tensors.begin(), loss.tensors.end());
  }
  return keys;
}

// The first loss of which nobody knows the keys; null if there is none.
const ForeignLoss* UnknownLoss(const OpenedCheckpoint& source) {
  for (const ForeignLoss& loss : source.lost()) {
    if (loss.tensors.empty() && loss.objects.empty()) return &loss;
  }
  return nullptr;
}

bool IsHuggingFace(const std::vector<std::string>& keys) {
  return std::ranges::any_of(keys, [](const std::string& key) {
    return key == "model.embed_tokens.weight" || key == "transformer.wte.weight";
  });
}

// Why no pack fits, beyond what single packs say.
std::string OtherReasons(const std::string& family, const std::string& type,
                         const std::vector<NameRules>& packs,
                         const std::vector<std::string>& keys) {
  std::string text;
  const auto knows = [&](const std::string& name) {
    return std::ranges::any_of(packs, [&](const NameRules& pack) { return pack.family == name; });
  };
  if (!family.empty() && !knows(family)) text += "; there are no rules for family " + family;
  if (!type.empty() && !knows(type)) {
    text += "; the model_type of its config.json is " + type + ", for which there are no rules";
  } else if (!type.empty() && !family.empty() && type != family) {
    text += "; the model_type of its config.json is " + type;
  }
  if (IsHuggingFace(keys)) text += "; its names are those of Hugging Face already";
  return text;
}

// Finds values that the trainer saved outside of the checkpoint's common values. Checkpoints of
// tensormount.megatron have them in the object of Megatron's common state (0.19), or in Megatron's
// own file in the directory around (0.16).
void FindTrainerValues(const OpenedCheckpoint& source, NameRules& rules) {
  const auto use = [&](const std::string& name, const std::string& bytes) {
    const std::optional<TorchArchive> archive = ArchiveOfObject(bytes, name);
    if (archive) {
      rules.trainer_values = std::make_shared<const CommonDict>(MegatronValues(*archive));
    } else {
      rules.trainer_problem = name + " is no file of torch.save that can be read safely";
    }
  };
  const auto parts = source.index().ObjectParts(std::string(kMegatronCommonObject));
  if (parts.ok() && parts.value().size() == 1 && parts.value()[0].length <= kMaxMegatronCommon) {
    std::string bytes(static_cast<std::size_t>(parts.value()[0].length), '\0');
    const Status read = source.ReadObject(parts.value()[0], 0, bytes.data(), bytes.size());
    if (!read.ok()) {
      rules.trainer_problem = read.message();
      return;
    }
    use("object " + std::string(kMegatronCommonObject), bytes);
    return;
  }
  if (!source.directory().ends_with(kMegatronCheckpoint)) return;
  const std::string around =
      source.directory().substr(0, source.directory().size() - kMegatronCheckpoint.size());
  const std::string path = JoinPath(around, std::string(kMegatronCommonFile));
  const auto bytes = source.fs().ReadFile(path, kMaxMegatronCommon);
  if (bytes.ok()) return use(path, bytes.value());
  if (bytes.status().code() != Code::kNotFound) rules.trainer_problem = bytes.status().message();
}

// From a trainer's layout to Hugging Face names.
Result<NameRules> ToHuggingFace(const OpenedCheckpoint& source, const NameMap& map,
                                const std::string& family, const std::vector<NameRules>& packs,
                                const std::vector<std::string>& keys) {
  const ForeignLoss* const unknown = UnknownLoss(source);
  if (unknown != nullptr && (map.from.empty() || family.empty())) {
    return Status(Code::kDataLoss,
                  "name map: names of tensors are lost, so the rules cannot be chosen by them (" +
                      unknown->ToString() + "): name family and layout, as in --as " +
                      std::string(kHuggingFace) + ":llama --from megatron");
  }
  std::vector<const NameRules*> fitting;
  std::string misfits;
  const std::string type = NameRules::ModelTypeOf(map.config);
  for (const NameRules& pack : packs) {
    const bool is_named = (map.from.empty() || pack.layout == map.from) &&
                          (family.empty() || pack.family == family || pack.family == kAnyFamily) &&
                          (type.empty() || type == pack.family || pack.family == kAnyFamily);
    if (!is_named) continue;
    const std::string misfit = MisfitOf(pack, keys);
    if (misfit.empty()) {
      fitting.push_back(&pack);
    } else {
      misfits += (misfits.empty() ? ": for " : ", for ") + PackName(pack) + " it " + misfit;
    }
  }
  if (fitting.size() == 1) {
    NameRules chosen = *fitting[0];
    chosen.makes_model = chosen.family != kAnyFamily;
    if (chosen.layout == kMegatronLayout) FindTrainerValues(source, chosen);
    TENSORMOUNT_RETURN_IF_ERROR(chosen.AddGiven(map));
    return chosen;
  }
  if (!map.config.empty() && type.empty()) {
    TENSORMOUNT_RETURN_IF_ERROR(NameRules().AddGiven(map));  // Says what is wrong with it.
  }
  if (fitting.empty()) {
    return BadPackName("the checkpoint fits none of the known rules" + misfits +
                       OtherReasons(family, type, packs, keys) +
                       "; or write rules yourself (docs/mapping.md)");
  }
  return BadPackName("the keys fit several layouts (" + Listed(fitting) +
                     "): name the family, as in " + std::string(kHuggingFace) + ":" +
                     fitting[0]->family + ", or the layout");
}

// From Hugging Face names to a trainer's layout. Numbers of `map` are not added.
Result<NameRules> FromHuggingFace(const NameMap& map, const std::string& layout,
                                  const std::string& family, const std::vector<NameRules>& packs) {
  // "megatron@layers": one tensor for each layer.
  const std::size_t at = layout.find('@');
  const bool layers = at != std::string::npos;
  if (layers && layout.substr(at + 1) != "layers") {
    return BadPackName("\"" + layout + "\": after \"@\" only \"layers\" is known");
  }
  const std::string name = layout.substr(0, at);
  std::vector<const NameRules*> all;
  for (const NameRules& pack : packs) {
    all.push_back(&pack);
    if (pack.layout != name || pack.family != family) continue;
    const std::string type = NameRules::ModelTypeOf(map.config);
    if (!type.empty() && type != family && family != kAnyFamily) {
      return BadPackName("the model_type of its config.json is " + type + ", and not " + family);
    }
    return pack.Inverse(layers);
  }
  return BadPackName("there are no rules for " + map.as + "; known are " +
                     std::string(kHuggingFace) + ", " + Listed(all));
}

// The config.json of the model, if the checkpoint has one: an object of that key, or a file beside
// the data of a foreign checkpoint. Empty: there is none with a "model_type".
std::string ModelConfigOf(const OpenedCheckpoint& source) {
  constexpr std::uint64_t kMaxConfig = std::uint64_t{1} << 20;
  std::string text;
  const auto parts = source.index().ObjectParts("config.json");
  if (parts.ok() && parts.value().size() == 1 && parts.value()[0].length <= kMaxConfig) {
    text.resize(parts.value()[0].length);
    const Status read = source.ReadObject(parts.value()[0], 0, text.data(), text.size());
    if (!read.ok()) text.clear();
  } else if (source.commit() == nullptr) {
    const auto file = source.fs().ReadFile(JoinPath(source.directory(), "config.json"), kMaxConfig);
    if (file.ok()) text = file.value();
  }
  // OLMo-core writes another file of that name.
  return NameRules::ModelTypeOf(text).empty() ? std::string() : text;
}

// Chooses, where the caller did not, what becomes of an optimizer's tensors on the way from one
// trainer's layout to another's. A run goes on, so moments are kept. Weights that the optimizer has
// with more precision take the place of the model's, unless both layouts are the same.
void ChooseSlots(const NameMap& map, const std::vector<std::string>& keys, NameRules& first,
                 NameRules& second) {
  const auto choose = [&](const char* name, std::int64_t value) {
    if (map.numbers.contains(name)) return;
    for (NameRules* rules : {&first, &second}) {
      if (rules->numbers.contains(name)) rules->numbers[name] = value;
    }
  };
  choose("moments", !first.slots.empty() && !second.slots.empty() ? 1 : 0);
  if (first.layout == second.layout) {
    choose("masters", 1);
  } else {
    choose("main", first.HasReplacing(keys) ? 1 : 0);
  }
}

using Opened = std::shared_ptr<const OpenedCheckpoint>;

// The config.json of a mapped checkpoint that has none.
Result<MadeConfig> MadeConfigOf(const OpenedCheckpoint& mapped, const NameRules& rules) {
  if (!rules.config_rules) return MadeConfig{.text = {}, .why = "the trainer does not save it"};
  NamedValues places(mapped.source()->index(), nullptr, rules.trainer_values.get());
  TENSORMOUNT_ASSIGN_OR_RETURN(MadeConfig made, MadeConfig::Make(*rules.config_rules, places,
                                                                 rules.numbers, mapped.index()));
  if (!rules.trainer_problem.empty()) made.why += " (" + rules.trainer_problem + ")";
  return made;
}

Result<Opened> Mapped(Opened source, const NameRules& rules) {
  Result<std::shared_ptr<OpenedCheckpoint>> mapped =
      OpenedCheckpoint::Mapped(std::move(source), rules);
  if (!mapped.ok()) {
    // A number may be missing because its source cannot be read.
    const Status& failed = mapped.status();
    return rules.trainer_problem.empty()
               ? failed
               : Status(failed.code(), failed.message() + " (" + rules.trainer_problem + ")");
  }
  const NameRules& bound = mapped.value()->binding()->rules();
  if (bound.makes_model && !bound.config) {
    TENSORMOUNT_ASSIGN_OR_RETURN(MadeConfig config, MadeConfigOf(*mapped.value(), bound));
    mapped.value()->SetMadeConfig(std::move(config));
  }
  return Opened(std::move(mapped).value());
}

Result<Opened> ApplyMaps(Opened source, const NameRules& rules) {
  for (const NameRules& first : rules.base) {
    TENSORMOUNT_ASSIGN_OR_RETURN(source, ApplyMaps(std::move(source), first));
  }
  return Mapped(std::move(source), rules);
}

// By packs: to Hugging Face names, from them, or from one trainer's layout to another's, which is
// both. `before`: rules that were applied to `source` already.
Result<Opened> ApplyPacks(Opened source, const NameMap& map, const NameRules& before) {
  const Result<std::vector<NameRules>>& parsed = ParsedPacks();
  TENSORMOUNT_RETURN_IF_ERROR(parsed.status());
  const std::vector<NameRules>& packs = parsed.value();
  const auto [layout, family] = LayoutAndFamily(map.as);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, KeysOf(*source));
  if (layout == kHuggingFace) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const NameRules rules,
                                 ToHuggingFace(*source, map, family, packs, keys));
    TENSORMOUNT_RETURN_IF_ERROR(NameRules::CheckGiven(map, {&before, &rules}));
    return Mapped(std::move(source), rules);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(NameRules back, FromHuggingFace(map, layout, family, packs));
  TENSORMOUNT_RETURN_IF_ERROR(back.AddGiven(map));
  const bool is_trained = std::ranges::any_of(
      packs, [&](const NameRules& pack) { return MisfitOf(pack, keys).empty(); });
  if (map.from == kHuggingFace || (map.from.empty() && (IsHuggingFace(keys) || !is_trained))) {
    TENSORMOUNT_RETURN_IF_ERROR(NameRules::CheckGiven(map, {&before, &back}));
    return Mapped(std::move(source), back);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(NameRules rules, ToHuggingFace(*source, map, family, packs, keys));
  TENSORMOUNT_RETURN_IF_ERROR(NameRules::CheckGiven(map, {&before, &rules, &back}));
  ChooseSlots(map, keys, rules, back);
  TENSORMOUNT_ASSIGN_OR_RETURN(Opened named, Mapped(std::move(source), rules));
  for (const auto& [name, number] : named->binding()->rules().numbers) {
    if (back.sources.contains(name)) back.numbers.emplace(name, number);
  }
  return Mapped(std::move(named), back);
}

}  // namespace

Result<std::shared_ptr<const OpenedCheckpoint>> ApplyNames(
    std::shared_ptr<const OpenedCheckpoint> source, const NameMap& map) {
  if (map.empty()) return source;
  NameMap given = map;
  if (!given.as.empty() && given.config.empty()) given.config = ModelConfigOf(*source);
  auto before = std::make_shared<const NameRules>();
  if (!given.rules.empty()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(before, NameRules::FromMap(given));
    TENSORMOUNT_ASSIGN_OR_RETURN(source, ApplyMaps(std::move(source), *before));
  }
  return given.as.empty() ? source : ApplyPacks(std::move(source), given, *before);
}

}  // namespace tensormount
