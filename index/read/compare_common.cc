// SPDX-License-Identifier: Apache-2.0
// Compares common values and layer-name patterns for compare.h. Tensors and objects are in
// compare.cc.
#include <set>

#include "base/glob.h"
#include "index/read/compare.h"
#include "index/records/common_tree.h"
#include "index/records/layer_names.h"

namespace tensormount {
namespace {

using Each = std::function<Status(const Mismatch&)>;

// Longest text of a value that only one side has, in bytes.
constexpr std::size_t kMostText = 60;

// The text of a value, cut at a character boundary.
std::string Shown(const CommonValue& value) {
  std::string text = CommonToJson(value);
  if (text.size() <= kMostText) return text;
  std::size_t end = kMostText;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

// Compares dicts recursively. Their depth was limited when they were decoded. Paths have the form
// of the user's globs: "args.lr".
class Walk {
 public:
  Walk(const std::string& glob, CompareSummary& summary, const Each& each)
      : glob_(glob), summary_(summary), each_(each) {}

  // Compares two dicts. `prefix` is the beginning of the name for the report, such as "rank 3: ".
  // It is not part of the path that globs match.
  Status Dicts(const std::string& prefix, const std::string& path, const CommonDict& a,
               const CommonDict& b) {
    std::set<CommonKey> keys;
    for (const auto& [key, value] : a.items) keys.insert(key);
    for (const auto& [key, value] : b.items) keys.insert(key);
    for (const CommonKey& key : keys) {
      TENSORMOUNT_RETURN_IF_ERROR(
          Values(prefix, path + CommonPathPart(key, path.empty()), a.Find(key), b.Find(key)));
    }
    return {};
  }

  // Compares two texts of one name. An empty text means that a side does not have the name.
  Status Texts(const std::string& name, const std::string& a, const std::string& b) {
    const CommonValue first(a);
    const CommonValue second(b);
    return Values("", name, a.empty() ? nullptr : &first, b.empty() ? nullptr : &second);
  }

 private:
  // Compares two values; null means that a side has none. Dicts are compared entry by entry. Two
  // empty dicts count as one equal value.
  Status Values(const std::string& prefix, const std::string& path, const CommonValue* a,
                const CommonValue* b) {
    if (a != nullptr && b != nullptr) {
      const auto* dict_a = a->get_if<CommonDict>();
      const auto* dict_b = b->get_if<CommonDict>();
      if (dict_a != nullptr && dict_b != nullptr &&
          !(dict_a->items.empty() && dict_b->items.empty())) {
        return Dicts(prefix, path, *dict_a, *dict_b);
      }
    }
    if (!glob_.empty() && !GlobMatches(glob_, path)) return {};
    Mismatch d;
    d.subject = Mismatch::Subject::kCommon;
    d.key = prefix + path;
    if (a == nullptr || b == nullptr) {
      d.kind = a == nullptr ? Mismatch::Kind::kAdded : Mismatch::Kind::kRemoved;
      ++(a == nullptr ? summary_.added : summary_.removed);
      d.reason = Shown(a == nullptr ? *b : *a);
      return each_(d);
    }
    const std::optional<CommonSides> sides = CompareAt(path, *a, *b, {});
    if (!sides) {
      ++summary_.equal;
      return {};
    }
    ++summary_.changed;
    d.key = prefix + sides->path;
    d.reason = sides->SidesText("in the first", "in the second");
    return each_(d);
  }

  const std::string& glob_;
  CompareSummary& summary_;
  const Each& each_;
};

CommonDict AsDict(const CommonValues& values) {
  CommonDict dict;
  for (const auto& [name, value] : values) dict.items.emplace(name, value);
  return dict;
}

}  // namespace

Status CompareCommon(const CheckpointIndex& first, const CheckpointIndex& second,
                     const CompareOptions& options, CompareSummary& summary, const Each& each) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const CommonState a, first.Common());
  TENSORMOUNT_ASSIGN_OR_RETURN(const CommonState b, second.Common());
  Walk walk(options.keys, summary, each);
  TENSORMOUNT_RETURN_IF_ERROR(walk.Dicts("", "", AsDict(a.values), AsDict(b.values)));
  std::set<int> ranks;
  for (const auto& [rank, values] : a.ranks) ranks.insert(rank);
  for (const auto& [rank, values] : b.ranks) ranks.insert(rank);
  const auto of_rank = [](const CommonState& state, int rank) {
    const auto found = state.ranks.find(rank);
    return found == state.ranks.end() ? CommonDict() : AsDict(found->second);
  };
  for (const int rank : ranks) {
    TENSORMOUNT_RETURN_IF_ERROR(
        walk.Dicts("rank " + std::to_string(rank) + ": ", "", of_rank(a, rank), of_rank(b, rank)));
  }
  TENSORMOUNT_RETURN_IF_ERROR(walk.Dicts("content: ", "", a.content, b.content));

  TENSORMOUNT_ASSIGN_OR_RETURN(const auto first_layers, first.Layers());
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto second_layers, second.Layers());
  // Layer-name patterns by the key of the stacked tensor.
  std::map<std::string, std::string> mine = first_layers->patterns();
  std::map<std::string, std::string> theirs = second_layers->patterns();
  // A key that only this side has is added to the other side with an empty pattern, which means
  // "none".
  for (const auto& [key, pattern] : mine) theirs.try_emplace(key, "");
  for (const auto& [key, pattern] : theirs) {
    TENSORMOUNT_RETURN_IF_ERROR(walk.Texts("layers of " + key, mine[key], pattern));
  }
  return {};
}

}  // namespace tensormount
