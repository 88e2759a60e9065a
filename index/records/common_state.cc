// SPDX-License-Identifier: Apache-2.0
// Names of per-rank records, and the split of common records into a CommonState.
#include "index/records/common_state.h"

#include <charconv>
#include <utility>

#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

// The rank in the name of a per-rank record. Fails unless the name is exactly RankRecordName of a
// rank.
Result<int> RankOf(std::string_view name) {
  std::string_view digits = name;
  digits.remove_prefix(kRankRecordPrefix.size());
  int rank = 0;
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  // Formatting the number again refuses "007", "+7" and trailing text, so that each rank has one
  // record.
  if (error != std::errc() || rank < 0 || RankRecordName(rank) != name) {
    return Status(Code::kDataLoss, "common record " + std::string(name) +
                                       ": its name does not end with a rank number");
  }
  return rank;
}

}  // namespace

std::string RankRecordName(int rank) {
  return std::string(kRankRecordPrefix) + std::to_string(rank);
}

Status CheckCommonName(std::string_view name) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckKey(name));
  if (IsReservedCommonName(name)) {
    return Status(Code::kInvalidArgument, "names that begin with '$' are reserved");
  }
  return Status();
}

CommonValue DictOf(const CommonValues& values) {
  CommonDict dict;
  for (const auto& [name, value] : values) dict.items.emplace_hint(dict.items.end(), name, value);
  return dict;
}

Result<CommonValues> ValuesOf(CommonValue value, std::string_view what) {
  CommonValues values;
  auto* dict = value.get_if<CommonDict>();
  if (dict == nullptr) {
    return Status(Code::kDataLoss,
                  std::string(what) + ": is a " + std::string(value.kind_name()) + ", not a dict");
  }
  for (auto& [key, item] : dict->items) {
    const auto* name = std::get_if<std::string>(&key);
    if (name == nullptr) {
      return Status(Code::kDataLoss, std::string(what) + ": has a key that is not a string");
    }
    values.emplace_hint(values.end(), *name, std::move(item));
  }
  return values;
}

Result<CommonState> SplitCommonRecords(CommonValues records) {
  CommonState state;
  for (auto& [name, value] : records) {
    if (!IsReservedCommonName(name)) {
      state.values.emplace_hint(state.values.end(), name, std::move(value));
    } else if (name == kContentMetadataRecord) {
      auto* dict = value.get_if<CommonDict>();
      if (dict == nullptr) {
        return Status(Code::kDataLoss, "common record " + name + ": is a " +
                                           std::string(value.kind_name()) + ", not a dict");
      }
      state.content = std::move(*dict);
    } else if (name.starts_with(kRankRecordPrefix)) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const int rank, RankOf(name));
      TENSORMOUNT_ASSIGN_OR_RETURN(state.ranks[rank],
                                   ValuesOf(std::move(value), "common record " + name));
    }
  }
  return state;
}

}  // namespace tensormount
