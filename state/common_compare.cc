// SPDX-License-Identifier: Apache-2.0
// Equality and first difference of common values between ranks.
#include "state/common_compare.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/coding.h"
#include "base/glob.h"
#include "index/records/common_tree.h"
#include "index/records/layer_names.h"
#include "index/records/record_coding.h"

namespace tensormount {
namespace {

// The value `value`, whose path is `path`, without its exempt parts.
CommonValue WithoutExempt(const CommonValue& value, std::string& path, CommonGlobs exempt) {
  const std::size_t length = path.size();
  const auto items = [&](const std::vector<CommonValue>& from, char open, char close) {
    std::vector<CommonValue> kept;
    kept.reserve(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      path += open + std::to_string(i) + close;
      kept.push_back(WithoutExempt(from[i], path, exempt));
      path.resize(length);
    }
    return kept;
  };
  if (const auto* list = value.get_if<CommonList>()) {
    return CommonList{items(list->items, '[', ']')};
  }
  if (const auto* tuple = value.get_if<CommonTuple>()) {
    return CommonTuple{items(tuple->items, '(', ')')};
  }
  const auto* dict = value.get_if<CommonDict>();
  if (dict == nullptr) return value;
  CommonDict kept;
  for (const auto& [key, item] : dict->items) {
    path += CommonPathPart(key, path.empty());
    if (!IsExempt(exempt, path)) {
      kept.items.emplace_hint(kept.items.end(), key, WithoutExempt(item, path, exempt));
    }
    path.resize(length);
  }
  return kept;
}

// Appends name and value without exempt parts. False if the whole value is exempt.
bool AppendCompared(ByteWriter& out, std::string_view name, const CommonValue& value,
                    CommonGlobs exempt) {
  if (IsExempt(exempt, name)) return false;
  out.String(name);
  if (exempt.empty()) {
    EncodeCommon(out, value);
  } else {
    std::string path(name);
    EncodeCommon(out, WithoutExempt(value, path, exempt));
  }
  return true;
}

}  // namespace

bool IsExempt(CommonGlobs exempt, std::string_view path) {
  // Layer names are part of the layout, so they are never exempt.
  if (exempt.empty() || path.starts_with(kLayersRecordPrefix)) return false;
  const std::string text(path);
  return std::any_of(exempt.begin(), exempt.end(),
                     [&](const std::string& glob) { return GlobMatches(glob, text); });
}

std::optional<Hash128> CommonHash(std::string_view name, const CommonValue& value,
                                  CommonGlobs exempt) {
  ByteWriter out;
  if (!AppendCompared(out, name, value, exempt)) return std::nullopt;
  return Xxh3(out.bytes());
}

std::optional<std::string> FirstCommonDifference(const std::map<std::string, CommonValue>& a,
                                                 int rank_a,
                                                 const std::map<std::string, CommonValue>& b,
                                                 int rank_b, CommonGlobs exempt) {
  const CommonExempt is_exempt = [&](std::string_view path) { return IsExempt(exempt, path); };
  for (const auto& [name, value] : a) {
    const auto other = b.find(name);
    if (other == b.end() || IsExempt(exempt, name)) continue;
    if (const auto found = CompareAt(name, value, other->second, is_exempt)) {
      return "common value " + found->path + ": " +
             found->SidesText("on rank " + std::to_string(rank_a),
                              "on rank " + std::to_string(rank_b));
    }
  }
  return std::nullopt;
}

}  // namespace tensormount
