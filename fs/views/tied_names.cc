// SPDX-License-Identifier: Apache-2.0
// TiedNames: names of tied tensors, for views and exports that store a tensor under several names.
#include "fs/views/tied_names.h"

#include <algorithm>
#include <optional>
#include <set>

#include "index/read/saved_paths.h"
#include "index/records/common_state.h"
#include "index/records/name_binding.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {
namespace {

// The number of the tensor that is shown under `key`; nullopt if no tensor is.
Result<std::optional<std::uint32_t>> NumberOf(const ShownTensors& tensors, const std::string& key) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t number, tensors.LowerBound(key));
  if (number >= tensors.count()) return std::optional<std::uint32_t>();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string found, tensors.KeyAt(number));
  return found == key ? std::optional(number) : std::nullopt;
}

}  // namespace

Result<TiedNames> TiedNames::Make(const ShownCheckpoint& shown) {
  TiedNames out;
  // The recorded structures have stored keys.
  const CheckpointIndex& index = shown.opened.stored_index();
  TENSORMOUNT_ASSIGN_OR_RETURN(const CommonState common, index.Common());
  const SavedPaths paths =
      SavedPaths::Make(common.values, [&](std::string_view key) { return index.Find(key).ok(); });
  const auto shown_name = [&](const std::string& name) { return shown.opened.ShownNameOf(name); };
  std::set<std::string, std::less<>> taken;
  for (const auto& [stored, others] : paths.TiedPaths()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto number, NumberOf(shown.tensors, shown_name(stored)));
    if (!number) continue;
    for (const std::string& other : others) {
      std::string name = shown_name(other);
      if (!CheckKey(name).ok() || taken.contains(name)) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto same, NumberOf(shown.tensors, name));
      if (same) continue;
      taken.insert(name);
      out.names_[*number].push_back(std::move(name));
    }
  }
  return out;
}

bool IsOutputEmbedding(std::string_view name) {
  // The names in _tied_weights_keys of transformers that are tied to the input embedding.
  static constexpr std::string_view kNames[] = {
      "lm_head.weight",   "lm_head.decoder.weight", "cls.predictions.decoder.weight",
      "embed_out.weight", "proj_out.weight",        "output_projection.weight"};
  return std::ranges::any_of(kNames, [&](std::string_view known) {
    return name.ends_with(known) &&
           (name.size() == known.size() || name[name.size() - known.size() - 1] == '.');
  });
}

}  // namespace tensormount::fs
