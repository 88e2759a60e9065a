// SPDX-License-Identifier: Apache-2.0
// Compares the common values of all ranks by fingerprint. Only if the fingerprints differ, one rank
// for each fingerprint sends its values, and the first mismatch of each name is reported with both
// values.
#include "collective/layout/common_exchange.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "base/coding.h"
#include "base/hash.h"
#include "index/records/layer_names.h"
#include "index/records/record_coding.h"
#include "shard/tensor_meta.h"
#include "state/common_compare.h"
#include "state/common_records.h"

namespace tensormount {
namespace {

// Maximum length of a name: a key and the prefix of a reserved record.
constexpr std::size_t kMaxName = kMaxKeyBytes + 64;

// A glob that exempts every value except layer names from the comparison.
const std::vector<std::string>& Everything() {
  static const std::vector<std::string> everything = {"*"};
  return everything;
}

CommonGlobs ExemptOf(const CommonRules& rules) {
  return rules.check == CommonCheck::kOff ? CommonGlobs(Everything()) : rules.exempt;
}

}  // namespace

RankCommon CommonOf(const StateDict& state, int rank) { return {rank, SharedCommonRecords(state)}; }

std::map<std::string, std::string> LayersOf(const std::map<std::string, CommonValue>& values) {
  std::map<std::string, std::string> layers;
  for (auto at = values.lower_bound(std::string(kLayersRecordPrefix));
       at != values.end() && at->first.starts_with(kLayersRecordPrefix); ++at) {
    const auto* pattern = at->second.get_if<std::string>();
    if (pattern != nullptr) layers.emplace(at->first.substr(kLayersRecordPrefix.size()), *pattern);
  }
  return layers;
}

std::string EncodeRankCommon(const RankCommon& common) {
  ByteWriter out;
  out.U32(static_cast<std::uint32_t>(common.values.size()));
  for (const auto& [name, value] : common.values) {
    out.String(name);
    EncodeCommon(out, value);
  }
  return std::move(out.bytes());
}

Result<RankCommon> DecodeRankCommon(std::string_view bytes, int rank) {
  const std::string what = "common values of rank " + std::to_string(rank);
  ByteReader in(bytes, what);
  RankCommon common;
  common.rank = rank;
  const std::uint32_t values = in.U32();
  for (std::uint32_t i = 0; i < values && in.status().ok(); ++i) {
    std::string name(in.String(kMaxName));
    TENSORMOUNT_ASSIGN_OR_RETURN(CommonValue value, DecodeCommon(in, what));
    common.values.insert_or_assign(std::move(name), std::move(value));
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return common;
}

std::uint64_t FingerprintOf(const RankCommon& common, const CommonRules& rules) {
  ByteWriter out;
  for (const auto& [name, value] : common.values) {
    out.String(name);
    out.Hash(CommonHash(name, value, ExemptOf(rules)).value_or(Hash128{}));
  }
  return Xxh3Low64(out.bytes());
}

CommonUnion MergeCommon(std::span<const RankCommon> ranks, const CommonRules& rules) {
  CommonUnion result;
  std::map<std::string_view, std::pair<int, const CommonValue*>> first;
  std::set<std::string_view> told;
  const auto tell = [&](std::string_view key, int a, int b, std::string message) {
    // Only the first difference of each name is reported.
    if (!told.insert(key).second) return;
    Finding& finding = result.findings.emplace_back();
    finding.kind = FindingKind::kCommon;
    finding.key = key;
    finding.ranks = {a, b};
    finding.rank_count = 2;
    finding.message = std::move(message);
  };
  for (const RankCommon& rank : ranks) {
    for (const auto& [name, value] : rank.values) {
      const auto [at, added] = first.try_emplace(name, rank.rank, &value);
      if (added) {
        result.all.values.emplace(name, value);
        continue;
      }
      const CommonGlobs exempt = ExemptOf(rules);
      if (CommonHash(name, *at->second.second, exempt) == CommonHash(name, value, exempt)) continue;
      const std::optional<std::string> difference =
          FirstCommonDifference({{std::string(name), *at->second.second}}, at->second.first,
                                {{std::string(name), value}}, rank.rank, exempt);
      tell(name, at->second.first, rank.rank,
           difference.value_or("common value " + name + ": differs between rank " +
                               std::to_string(at->second.first) + " and rank " +
                               std::to_string(rank.rank)));
    }
  }
  std::stable_sort(result.findings.begin(), result.findings.end(),
                   [](const Finding& a, const Finding& b) { return a.key < b.key; });
  if (rules.check != CommonCheck::kError) {
    // Layer names are part of the layout, so differing layer names stay findings.
    std::erase_if(result.findings, [&](Finding& finding) {
      if (finding.key.starts_with(kLayersRecordPrefix)) return false;
      result.warnings.push_back(std::move(finding.message));
      return true;
    });
  }
  return result;
}

}  // namespace tensormount
