// SPDX-License-Identifier: Apache-2.0
// common.json of a staging.
#include "fs/save/staging_common.h"

#include <charconv>
#include <utility>

#include <nlohmann/json.hpp>

namespace tensormount::fs {
namespace {

constexpr const char* kRanksMember = "$ranks";

Status BadCommon(std::string message) {
  return Status(Code::kInvalidArgument, "common.json: " + std::move(message));
}

Result<CommonDict> DictFrom(const std::string& json, const std::string& at) {
  Result<CommonValue> value = CommonFromJson(json);
  if (!value.ok()) return BadCommon(at + value.status().message());
  CommonDict* dict = value.value().get_if<CommonDict>();
  if (dict == nullptr) return BadCommon(at + "not an object");
  return std::move(*dict);
}

}  // namespace

Result<CommonValues> CommonRecordsOf(std::string_view text) {
  CommonValues records;
  std::string rest(text);
  // The two members that no common value has are taken out first. The tree keeps floats and
  // integers exactly; what it cannot keep (a member twice) is only looked for without them.
  nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return BadCommon("not a JSON object");
  if (const auto content = json.find(std::string(kContentMetadataRecord)); content != json.end()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(CommonDict dict, DictFrom(content->dump(), "$content: "));
    records[std::string(kContentMetadataRecord)] = CommonValue(std::move(dict));
    json.erase(content);
    rest = json.dump();
  }
  if (const auto ranks = json.find(kRanksMember); ranks != json.end()) {
    if (!ranks->is_object()) return BadCommon("$ranks: not an object");
    for (const auto& member : ranks->items()) {
      const std::string& name = member.key();
      int rank = -1;
      const auto end = std::from_chars(name.data(), name.data() + name.size(), rank);
      if (end.ec != std::errc() || rank < 0 || std::to_string(rank) != name) {
        return BadCommon("$ranks: \"" + name.substr(0, 64) + "\" is not the number of a rank");
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(CommonDict dict,
                                   DictFrom(member.value().dump(), "$ranks." + name + ": "));
      const Result<CommonValues> checked = ValuesOf(CommonValue(dict), "$ranks." + name);
      if (!checked.ok()) return BadCommon(checked.status().message());
      records[RankRecordName(rank)] = CommonValue(std::move(dict));
    }
    json.erase(ranks);
    rest = json.dump();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(CommonDict values, DictFrom(rest, ""));
  for (auto& [key, value] : values.items) {
    const std::string* name = std::get_if<std::string>(&key);
    if (name == nullptr) return BadCommon("a name that is no string");
    const Status fits = CheckCommonName(*name);
    if (!fits.ok()) return BadCommon(fits.message());
    records[*name] = std::move(value);
  }
  return records;
}

}  // namespace tensormount::fs
