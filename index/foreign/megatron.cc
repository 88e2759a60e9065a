// SPDX-License-Identifier: Apache-2.0
// The additions of Megatron-Core to a checkpoint in any of its formats (megatron.h): the grid in
// the names of sharded objects, plain values among the arguments of a run, and metadata.json, which
// names the backend.
#include "index/foreign/megatron.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <set>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

#include "index/archives/torch_archive.h"
#include "index/foreign/torch_tree.h"
#include "shard/strict_json.h"

namespace tensormount {
namespace {

using pickle::Kind;
using pickle::KnownClass;
using pickle::Value;

constexpr std::string_view kConfigFile = "metadata.json";
constexpr std::array<std::string_view, 2> kBackends = {"torch_dist", "zarr"};
constexpr const char* kBackendField = "sharded_backend";
constexpr const char* kCommonBackendField = "common_backend";  // The backend of common.pt.
constexpr std::string_view kCommonBackend = "torch";
constexpr int kBackendVersion = 1;  // The only version of any backend so far.

// Parses numbers like "1.0.3"; nullopt for other texts and more than kMaxRank numbers. from_chars
// refuses plus signs, spaces and overflow.
std::optional<Dims> ParseDotted(std::string_view text) {
  Dims out;
  while (true) {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || number < 0 || out.rank() == kMaxRank) return std::nullopt;
    out.push_back(number);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (text.empty()) return out;
    if (text.front() != '.') return std::nullopt;
    text.remove_prefix(1);
  }
}

// Parses the name of a part of a sharded object; nullopt for other names. Names of old releases
// lack the last extent of the grid.
std::optional<ObjectRecord> ParseName(std::string_view name) {
  constexpr std::string_view kMark = "/shard_";
  const std::size_t mark = name.rfind(kMark);
  if (mark == std::string_view::npos || mark == 0) return std::nullopt;
  const std::string_view rest = name.substr(mark + kMark.size());
  const std::size_t underscore = rest.find('_');
  if (underscore == std::string_view::npos) return std::nullopt;
  const std::optional<Dims> index = ParseDotted(rest.substr(0, underscore));
  const std::optional<Dims> grid = ParseDotted(rest.substr(underscore + 1));
  if (!index || !grid) return std::nullopt;
  if (grid->rank() != index->rank() && grid->rank() + 1 != index->rank()) return std::nullopt;
  return ObjectRecord{.key = std::string(name.substr(0, mark)), .index = *index, .grid = *grid};
}

// Whether `parts`, which have one key, fill their grid exactly. If the last extent of the grid is
// missing, as in old releases, it is set to the largest index along that axis plus one. O(parts log
// parts).
bool FillGrid(std::span<ObjectRecord* const> parts) {
  const int rank = parts.front()->index.rank();
  Dims grid = parts.front()->grid;
  for (const ObjectRecord* part : parts) {
    if (part->index.rank() != rank || !(part->grid == parts.front()->grid)) return false;
  }
  if (grid.rank() < rank) {
    std::int64_t last = 0;
    for (const ObjectRecord* part : parts) last = std::max(last, part->index[rank - 1]);
    if (last >= static_cast<std::int64_t>(parts.size())) return false;
    grid.push_back(last + 1);
  }
  const std::optional<std::int64_t> cells = CheckedProduct(grid);
  if (!cells || *cells != static_cast<std::int64_t>(parts.size())) return false;
  std::set<std::vector<std::int64_t>> seen;
  for (const ObjectRecord* part : parts) {
    for (int a = 0; a < rank; ++a) {
      if (part->index[a] >= grid[a]) return false;
    }
    if (!seen.emplace(part->index.begin(), part->index.end()).second) return false;
  }
  for (ObjectRecord* part : parts) part->grid = grid;
  return true;
}

std::string KeyText(const Value& key) {
  return key.kind() == Kind::kInt ? std::to_string(key.integer()) : std::string(key.text());
}

bool IsNamed(const Value& key) { return key.kind() == Kind::kString || key.kind() == Kind::kInt; }

// Whether a key exceeds kMaxKeyBytes. Such a key is not copied, because a pickle may use one long
// text a million times.
bool IsTooLong(const Value& key) {
  return key.kind() == Kind::kString && key.text().size() > kMaxKeyBytes;
}

std::string ShownKey(const Value& key) { return IsTooLong(key) ? "a very long key" : KeyText(key); }

// The plain data of a dict or namespace, such as the arguments of a run. Its items are converted
// one by one: an item that is not plain data (a dtype or an enum among hundreds of numbers) is left
// out and added to `lost`, so that the others are shown.
std::optional<CommonDict> PlainPart(const Value& value, std::string_view name, CountedNames& lost,
                                    ValueBudget& budget) {
  Value items = value;
  if (value.kind() == Kind::kObject && value.state().kind() == Kind::kDict) items = value.state();
  if (items.kind() != Kind::kDict) return std::nullopt;
  // Before anything is counted: such a dict is left out, and counted, as a whole.
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!IsNamed(items.key(i))) return std::nullopt;
  }
  // TorchTree adds tensors in a dict or namespace as tensors, but not those in other objects.
  const bool tensors_shown =
      value.kind() == Kind::kDict ||
      (value.Is(KnownClass::kDictLike) && value.callee().name() != "dict" && value.size() == 0);
  CommonDict out;
  for (std::size_t i = 0; i < items.size(); ++i) {
    std::optional<CommonValue> plain;
    if (!IsTooLong(items.key(i))) plain = budget.Convert(items.item(i));
    if (!plain) {
      const bool shown = tensors_shown && TorchArchive::IsTensor(items.item(i));
      if (!shown) lost.Add(std::string(name) + "." + ShownKey(items.key(i)));
      continue;
    }
    const CommonKey key = items.key(i).kind() == Kind::kInt
                              ? CommonKey(items.key(i).integer())
                              : CommonKey(std::string(items.key(i).text()));
    out.items.insert_or_assign(key, std::move(*plain));
  }
  return out;
}

// The dict of common state. Since Megatron-Core 0.19 it is a sharded object, a list with one item.
Value CommonItems(const TorchArchive& archive) {
  const Value root = archive.document().root();
  return root.kind() == Kind::kList && root.size() == 1 ? root.item(0) : root;
}

// The values of a dict that are plain data, or have a part that is. The others are added to `lost`.
CommonDict PlainItems(const Value& items, CountedNames& lost, ValueBudget& budget) {
  CommonDict out;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!IsNamed(items.key(i)) || TorchArchive::IsTensor(items.item(i))) continue;
    if (IsTooLong(items.key(i))) {
      lost.Add(ShownKey(items.key(i)));
      continue;
    }
    const std::string name = KeyText(items.key(i));
    if (std::optional<CommonValue> plain = budget.Convert(items.item(i))) {
      out.items.insert_or_assign(name, std::move(*plain));
    } else if (std::optional<CommonDict> part = PlainPart(items.item(i), name, lost, budget)) {
      out.items.insert_or_assign(name, std::move(*part));
    } else {
      lost.Add(ShownKey(items.key(i)));
    }
  }
  return out;
}

// Parses metadata.json; nullopt if the file cannot be read or parsed, or does not name a backend
// (then another program, such as OLMo-core, wrote it).
std::optional<nlohmann::json> ConfigOf(const ForeignFolder& folder) {
  const Result<std::string> text = folder.ReadFile(kConfigFile, std::uint64_t{1} << 20);
  if (!text.ok()) return std::nullopt;
  Result<nlohmann::json> json = ParseStrictJson(text.value());
  if (!json.ok()) return std::nullopt;
  const auto backend = json.value().find(kBackendField);
  if (backend == json.value().end() || !backend->is_string()) return std::nullopt;
  return std::move(json).value();
}

}  // namespace

std::string MegatronBackend(const ForeignFolder& folder) {
  const std::optional<nlohmann::json> json = ConfigOf(folder);
  return json ? json->at(kBackendField).get<std::string>() : std::string();
}

Status CheckMegatronBackend(const ForeignFolder& folder) {
  const std::optional<nlohmann::json> json = ConfigOf(folder);
  if (!json) return Status();
  const auto unsupported = [&](const std::string& what) {
    return Status(Code::kUnsupported, folder.Shown(kConfigFile) + ": " + what);
  };
  const std::string backend = json->at(kBackendField).get<std::string>();
  if (std::ranges::find(kBackends, backend) == kBackends.end()) {
    return unsupported("sharded_backend '" + backend.substr(0, 64) +
                       "' is not supported (supported: torch_dist, zarr)");
  }
  const auto common = json->find(kCommonBackendField);
  if (common != json->end() && *common != kCommonBackend) {
    return unsupported(std::string(kCommonBackendField) + " " + common->dump().substr(0, 64) +
                       " is not supported (supported: " + std::string(kCommonBackend) + ")");
  }
  const std::pair<const char*, std::string_view> written_by[] = {
      {kBackendField, backend}, {kCommonBackendField, kCommonBackend}};
  for (const auto& [field, which] : written_by) {
    const std::string name = std::string(field) + "_version";
    const auto version = json->find(name);
    if (version == json->end() || *version == kBackendVersion) continue;
    return unsupported(name + " " + version->dump().substr(0, 64) + " of " + std::string(which) +
                       " is not supported (supported: " + std::to_string(kBackendVersion) + ")");
  }
  return Status();
}

std::vector<ObjectRecord> MegatronObjects(std::span<const std::string> names) {
  std::vector<ObjectRecord> out;
  out.reserve(names.size());
  // Views of the caller's names, which outlive this call.
  const std::unordered_set<std::string_view> all(names.begin(), names.end());
  std::map<std::string, std::vector<std::size_t>> by_key;
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::optional<ObjectRecord> parsed = ParseName(names[i]);
    if (parsed) by_key[parsed->key].push_back(i);
    out.push_back(parsed ? std::move(*parsed) : ObjectRecord{.key = names[i]});
  }
  for (const auto& [key, numbers] : by_key) {
    std::vector<ObjectRecord*> parts;
    for (const std::size_t i : numbers) parts.push_back(&out[i]);
    // If another object has the key as its name, the parts are kept as separate objects.
    if (!all.contains(key) && FillGrid(parts)) continue;
    for (const std::size_t i : numbers) out[i] = ObjectRecord{.key = names[i]};
  }
  return out;
}

// Example: a tensor of original shape [4, 6] that is cut into a grid of [2, 3] is stored with shape
// [2, 3, 4], where 4 is the number of elements in a fragment [2, 2]. A chunk at [1, 0, 0] of size
// [1, 1, 4] is the box [2:4, 0:2].
std::optional<MegatronFlatShape> MegatronFlatShape::Make(const Dims& stored, const Dims& original) {
  if (stored.rank() != original.rank() + 1 || original.rank() == 0) return std::nullopt;
  MegatronFlatShape out;
  out.original_ = original;
  for (int a = 0; a < original.rank(); ++a) {
    if (stored[a] < 1 || original[a] % stored[a] != 0) return std::nullopt;
    out.fragment_.push_back(original[a] / stored[a]);
  }
  if (CheckedProduct(out.fragment_) != stored[original.rank()]) return std::nullopt;
  return out;
}

// A chunk has size 1 along the axes of the grid. Along the last axis it may have a part of the
// fragment, which is a flat range of the fragment's row-major order.
Result<Region> MegatronFlatShape::RegionOf(std::span<const std::int64_t> offsets,
                                           std::span<const std::int64_t> sizes) const {
  const int rank = original_.rank();
  const Status bad(Code::kDataLoss, "a chunk of flattened state is not within one fragment");
  if (offsets.size() != static_cast<std::size_t>(rank) + 1 || sizes.size() != offsets.size()) {
    return bad;
  }
  Dims begin;
  for (int a = 0; a < rank; ++a) {
    const std::int64_t at = offsets[static_cast<std::size_t>(a)];
    std::int64_t start = 0;
    if (sizes[static_cast<std::size_t>(a)] != 1 ||
        __builtin_mul_overflow(at, fragment_[a], &start)) {
      return bad;
    }
    begin.push_back(start);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, fragment_));
  if (!box.Within(original_)) return bad;
  Result<Region> region = Region::Flat(box, offsets.back(), sizes.back());
  if (!region.ok()) return bad;
  return region;
}

// TorchTree adds the tensors of the common state; other plain data become common values. Damaged or
// unsupported content is only a warning, because the whole archive is also shown as an object.
Status AddMegatronCommon(const TorchArchive& archive, std::uint32_t file, std::uint64_t at,
                         std::string_view from, ForeignBuilder& builder, ValueBudget& budget) {
  const Value items = CommonItems(archive);
  if (items.kind() != Kind::kDict) return Status();
  CountedNames lost;  // Items that are not shown, because they are not plain data.
  for (auto& [key, value] : PlainItems(items, lost, budget).items) {
    builder.AddCommon(std::get<std::string>(key), std::move(value));
  }
  if (lost.count > 0) {
    builder.Warn(std::string(from) + ": " + std::to_string(lost.count) +
                 (lost.count == 1 ? " value is" : " values are") +
                 " not plain data and only shown in the object (the first: " + lost.first + ")");
  }
  TorchNames tensors;
  TorchNames none;
  TorchTreeOptions tree;
  tree.root = items;
  tree.tensors_only = true;
  tree.at = at;
  const Status added = TorchTree(builder, archive, file, tensors, none, budget, tree).Add();
  if (added.code() != Code::kUnsupported && added.code() != Code::kDataLoss) return added;
  // This is only a warning, because the object has all of the bytes.
  builder.Warn(std::string(from) + ": not all of its tensors are shown: " + added.message());
  return Status();
}

// The file may be a legacy pickle, huge or damaged, so it is always added as an object; values and
// tensors are added if it has at most 64 MiB and can be parsed.
Status AddMegatronCommonFile(const ForeignFolder& folder, ForeignBuilder& builder) {
  if (!folder.Has(kMegatronCommonFile)) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t file, builder.AddFile(kMegatronCommonFile));
  const std::uint64_t length = builder.FileLength(file);
  TENSORMOUNT_RETURN_IF_ERROR(builder.AddObject(kMegatronCommonFile, file, 0, length));
  const auto opaque = [&](const std::string& why) {
    builder.Warn("common.pt: shown as an object only: " + why);
    return Status();
  };
  if (length > kMaxMegatronCommon) return opaque("the file is larger than 64 MiB");
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> opened, builder.OpenFile(file));
  const Result<TorchArchive> archive = TorchArchive::Read(*opened, 0, length);
  if (!archive.ok()) return opaque(archive.status().message());
  if (archive.value().document().root().kind() != Kind::kDict)
    return opaque("the file does not contain a dict");
  ValueBudget budget;
  return AddMegatronCommon(archive.value(), file, 0, kMegatronCommonFile, builder, budget);
}

CommonDict MegatronValues(const TorchArchive& archive) {
  const Value items = CommonItems(archive);
  if (items.kind() != Kind::kDict) return {};
  CountedNames lost;
  ValueBudget budget;
  return PlainItems(items, lost, budget);
}

}  // namespace tensormount
