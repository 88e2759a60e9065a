// SPDX-License-Identifier: Apache-2.0
// The list of all checks is kChecks. A check looks at saved structures and common values first, and
// reads tensor data only if these show the kind of state that the check is for.
#include "index/read/known_defects.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/counted.h"
#include "index/read/saved_paths.h"
#include "index/records/common_state.h"
#include "shard/element_values.h"

namespace tensormount {
namespace {

constexpr std::size_t kMostListed = 3;
constexpr std::size_t kMostMoments = 64;  // Largest number of moments read of an optimizer.
// Largest number of values that are read of one tensor.
constexpr std::size_t kMostNumbers = 1024;

struct Subject {
  const OpenedCheckpoint& opened;
  const CommonState& common;
};
using Notes = std::vector<std::string>;

std::string ListText(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMostListed); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kMostListed) text += " and others";
  return text;
}

bool HasTensor(const Subject& of, std::string_view key) { return of.opened.index().Find(key).ok(); }

// The first values of a tensor, at most kMostNumbers. Empty if they cannot be read.
std::vector<double> FirstNumbers(const Subject& of, std::string_view key) {
  const Result<TensorEntry> tensor = of.opened.index().Find(key);
  if (!tensor.ok()) return {};
  const TensorMeta& meta = tensor.value().meta;
  const NumberKind kind = NumberKindOf(meta.dtype());
  if (kind == NumberKind::kNone || kind == NumberKind::kComplex) return {};
  const std::size_t width = InfoOf(meta.dtype()).bits / 8;
  const std::size_t count = std::min<std::uint64_t>(meta.bytes() / width, kMostNumbers);
  std::vector<std::byte> bytes(count * width);
  if (!of.opened
           .ReadBytes(tensor.value(), 0, bytes.data(), bytes.size(), ReadVerify::kExtendLeaves,
                      nullptr)
           .ok()) {
    return {};
  }
  std::vector<double> numbers(count);
  DecodeNumbers(meta.dtype(), bytes.data(), count, numbers.data());
  return numbers;
}

// Until November 28, 2026, if torch.distributed.checkpoint cached its plans, the second and later
// saves through tensormount.torch.Writer stored no tensors.
void CheckEmpty(const Subject& of, Notes& notes) {
  const CheckpointIndex& index = of.opened.index();
  std::vector<std::string> mapped;
  bool some = false;
  for (const auto& [name, value] : of.common.values) {
    if (!name.starts_with(kMappingsPrefix)) continue;
    for (std::string& key : MappedKeys(value)) {
      some = some || HasTensor(of, key) || of.common.values.contains(key) ||
             index.ObjectParts(key).ok();
      mapped.push_back(std::move(key));
    }
  }
  const char* const reason =
      "; up to November 28, 2026, saves through torch.distributed.checkpoint with "
      "enable_plan_caching=True made such checkpoints";
  if (!mapped.empty() && !some) {
    notes.push_back("the saved state dict had " + Counted(mapped.size(), "value") + " (" +
                    ListText(mapped) + "), but none of them is stored" + reason);
    return;
  }
  const Result<std::vector<ObjectRecord>> objects = index.Objects();
  if (mapped.empty() && of.opened.commit() != nullptr && index.tensor_count() == 0 &&
      of.common.values.empty() && of.common.ranks.empty() && objects.ok() &&
      objects.value().empty()) {
    notes.push_back(
        std::string("the checkpoint contains no tensor, no object and no common value") + reason);
  }
}

// Until November 28, 2026, imports and exports of torch files turned the integer keys of an
// optimizer's state into text, so that load_state_dict found no state.
void CheckTextKeys(const Subject& of, Notes& notes) {
  const auto found = of.common.values.find(std::string(kPlannerData));
  if (found == of.common.values.end()) return;
  const auto* paths = found->second.get_if<CommonDict>();
  if (paths == nullptr) return;
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
  };
  // For each optimizer, whether its groups name parameters by integers.
  // torch.distributed.checkpoint stores each value of a group as a separate item, and text keys are
  // correct there.
  std::map<std::string, bool> numbered;
  const auto has_numbers = [&](const std::string& optimizer) {
    const auto groups = of.common.values.find(optimizer + "param_groups");
    const auto* list = groups == of.common.values.end() ? nullptr : ListItems(groups->second);
    if (list == nullptr || list->empty()) return false;
    const auto* group = list->front().get_if<CommonDict>();
    const CommonValue* params = group == nullptr ? nullptr : group->Find(std::string("params"));
    const auto* items = params == nullptr ? nullptr : ListItems(*params);
    return items != nullptr && !items->empty() && items->front().get_if<std::int64_t>() != nullptr;
  };
  std::set<std::string> told;
  for (const auto& [key, path] : paths->items) {
    const std::vector<CommonValue>* steps = ListItems(path);
    if (steps == nullptr) continue;
    std::string before;
    for (std::size_t i = 0; i + 1 < steps->size(); ++i) {
      const auto* name = (*steps)[i].get_if<std::string>();
      const auto* next = (*steps)[i + 1].get_if<std::string>();
      if (name == nullptr) break;
      if (*name == "state" && next != nullptr && is_number(*next)) {
        const auto [at, added] = numbered.try_emplace(before, false);
        if (added) at->second = has_numbers(before);
        if (at->second && told.insert(before).second) {
          notes.push_back(
              before + "state has text keys (\"" + *next + "\") where " + before +
              "param_groups has integers, so load_state_dict of an optimizer silently skips its "
              "moments; up to November 28, 2026, imports and exports of torch.save files made such "
              "checkpoints. Import or export the file again");
        }
      }
      before += *name + ".";
    }
  }
}

// Until November 28, 2026, a rank with several empty shards in one buffer took these shards for
// tied tensors.
void CheckFalseTies(const Subject& of, Notes& notes) {
  std::map<SavedPath, std::set<std::string>> names;
  std::set<SavedPath> tied;
  for (const auto& [name, value] : of.common.values) {
    if (!name.starts_with(kStructurePrefix)) continue;
    const std::vector<StructureLeaf> leaves = StructureLeaves(value);
    std::map<std::string_view, int> count;
    for (const StructureLeaf& leaf : leaves) count[leaf.name] += leaf.tensor ? 1 : 0;
    for (const StructureLeaf& leaf : leaves) {
      if (!leaf.tensor) continue;
      names[leaf.path].insert(leaf.name);
      if (count[leaf.name] > 1 && leaf.name != Dotted(leaf.path)) tied.insert(leaf.path);
    }
  }
  std::vector<std::string> listed;
  for (const SavedPath& path : tied) {
    const std::string own = Dotted(path);
    const std::set<std::string>& all = names.at(path);
    // A tensor with the path's own name is stored too, by a rank with or without a structure.
    if ((all.size() > 1 || !all.contains(own)) && HasTensor(of, own)) {
      const auto other = std::ranges::find_if(all, [&](const auto& name) { return name != own; });
      listed.push_back(own + " with " + *other);
    }
  }
  if (listed.empty()) return;
  notes.push_back(
      "some ranks had tied tensors that other ranks stored separately: " + ListText(listed) +
      "; up to November 28, 2026, empty shards were taken for tied tensors, and loads gave one "
      "tensor the values of the other. The stored data are correct, and this version loads them "
      "correctly");
}

// Until November 28, 2026, tensormount.torch ran a step with a learning rate of 0 when it saved or
// loaded an optimizer before its first step, and then reset the step counter. That step changed the
// moments of some optimizers.
struct FreshMoments {
  std::string_view optimizer;
  // An option that only the parameter groups of this optimizer have.
  std::string_view option;
  std::string_view moment;
  // If `is_fresh`: the value of the moment before any step. If not: a value that the moment has
  // only after the step with a learning rate of 0.
  double number;
  bool is_fresh;
};
constexpr FreshMoments kFreshMoments[] = {{"NAdam", ".momentum_decay", ".mu_product", 1.0, true},
                                          {"ASGD", ".t0", ".eta", 0.0, false},
                                          {"Rprop", ".step_sizes", ".step_size", 0.0, false}};

void CheckFreshMoments(const Subject& of, Notes& notes) {
  for (const FreshMoments& kind : kFreshMoments) {
    const bool named = std::ranges::any_of(of.common.values, [&](const auto& item) {
      return item.first.ends_with(kind.option) &&
             item.first.find("param_groups.") != item.first.npos;
    });
    if (!named) continue;
    std::vector<std::string> keys;
    (void)of.opened.index().ForEachTensor(0, [&](const TensorEntry& tensor) {
      const std::string& key = tensor.meta.key();
      if (key.ends_with(kind.moment))
        keys.push_back(key.substr(0, key.size() - kind.moment.size()));
      return keys.size() < kMostMoments;
    });
    std::vector<std::string> wrong;
    for (const std::string& key : keys) {
      const std::vector<double> step = FirstNumbers(of, key + ".step");
      if (step.size() != 1 || step.front() != 0.0) continue;
      const std::vector<double> moments = FirstNumbers(of, key + std::string(kind.moment));
      const bool stepped = !moments.empty() && std::ranges::all_of(moments, [&](double moment) {
        return (moment == kind.number) != kind.is_fresh;
      });
      if (stepped) wrong.push_back(key);
    }
    if (wrong.empty()) continue;
    notes.push_back(
        "the moments of " + std::string(kind.optimizer) + " (" + ListText(wrong) +
        ") have step 0, but their " + std::string(kind.moment.substr(1)) +
        " is not that of a fresh optimizer: up to November 28, 2026, a save or load before the "
        "first step left it changed, and training from it differs. Reset the optimizer");
  }
}

constexpr void (*kChecks[])(const Subject&, Notes&) = {CheckEmpty, CheckTextKeys, CheckFalseTies,
                                                       CheckFreshMoments};

}  // namespace

std::vector<std::string> FindKnownDefects(const OpenedCheckpoint& opened) {
  Notes notes;
  const Result<CommonState> common = opened.index().Common();
  if (!common.ok()) return notes;
  for (const auto check : kChecks) check({opened, common.value()}, notes);
  return notes;
}

}  // namespace tensormount
