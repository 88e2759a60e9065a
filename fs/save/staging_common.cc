// SPDX-License-Identifier: Apache-2.0
// Converts common.json of a staging to common records.
#include "fs/save/staging_common.h"

#include <charconv>
#include <utility>

#include <nlohmann/json.hpp>

namespace tensormount::fs {
namespace {

constexpr const char* kRanksMember = "$ranks";

Status BadCommonError(std::string message) {
  return Status(Code::kInvalidArgument, "common.json: " + std::move(message));
}

Result<CommonDict> DictFrom(const std::string& json, const std::string& at) {
  Result<CommonValue> value = CommonFromJson(json);
  if (!value.ok()) return BadCommonError(at + value.status().message());
  CommonDict* dict = value.value().get_if<CommonDict>();
  if (dict == nullptr) return BadCommonError(at + "not an object");
  return std::move(*dict);
}

}  // namespace

Result<CommonValues> CommonRecordsOf(std::string_view text) {
  CommonValues records;
  std::string rest(text);
  // "$content" and "$ranks", which are not common values, are removed first. The tree keeps floats
  // and integers exactly, but not duplicate members: those are detected only in a text without
  // these two.
  nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return BadCommonError("not a JSON object");
  if (const auto content = json.find(std::string(kContentMetadataRecord)); content != json.end()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(CommonDict dict, DictFrom(content->dump(), "$content: "));
    records[std::string(kContentMetadataRecord)] = CommonValue(std::move(dict));
    json.erase(content);
    rest = json.dump();
  }
  if (const auto ranks = json.find(kRanksMember); ranks != json.end()) {
    if (!ranks->is_object()) return BadCommonError("$ranks: not an object");
    for (const auto& member : ranks->items()) {
      const std::string& name = member.key();
      int rank = -1;
      const auto end = std::from_chars(name.data(), name.data() + name.size(), rank);
      if (end.ec != std::errc() || rank < 0 || std::to_string(rank) != name) {
        return BadCommonError("$ranks: \"" + name.substr(0, 64) + "\" is not a rank number");
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(CommonDict dict,
                                   DictFrom(member.value().dump(), "$ranks." + name + ": "));
      const Result<CommonValues> checked = ValuesOf(CommonValue(dict), "$ranks." + name);
      if (!checked.ok()) return BadCommonError(checked.status().message());
      records[RankRecordName(rank)] = CommonValue(std::move(dict));
    }
    json.erase(ranks);
    rest = json.dump();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(CommonDict values, DictFrom(rest, ""));
  for (auto& [key, value] : values.items) {
    const std::string* name = std::get_if<std::string>(&key);
    if (name == nullptr) return BadCommonError("the name of a common value is not a string");
    const Status fits = CheckCommonName(*name);
    if (!fits.ok()) return BadCommonError(fits.message());
    records[*name] = std::move(value);
  }
  return records;
}

}  // namespace tensormount::fs
