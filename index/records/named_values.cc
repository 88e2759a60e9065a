// SPDX-License-Identifier: Apache-2.0
// Looks up members of config.json and common values for name maps.
#include "index/records/named_values.h"

#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "index/records/checkpoint_index.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kConfig = "config.";
constexpr std::string_view kCommon = "common.";
const Json kNoScalar = Json::object();

Json ScalarIn(const Json& config, std::string_view path) {
  const Json* at = &config;
  for (;;) {
    const std::size_t dot = path.find('.');
    if (!at->is_object()) return nullptr;
    const auto member = at->find(std::string(path.substr(0, dot)));
    if (member == at->end()) return nullptr;
    at = &*member;
    if (dot == std::string_view::npos) break;
    path.remove_prefix(dot + 1);
  }
  return at->is_structured() ? kNoScalar : *at;
}

Json ScalarOf(const CommonValue& value) {
  if (const auto* number = value.get_if<std::int64_t>()) return *number;
  if (const auto* flag = value.get_if<bool>()) return *flag;
  if (const auto* number = value.get_if<double>()) return *number;
  if (const auto* text = value.get_if<std::string>()) return *text;
  return value.get_if<CommonNone>() != nullptr ? Json() : kNoScalar;
}

// A name may have dots itself.
Json ScalarIn(const CommonDict& values, std::string_view path) {
  for (std::size_t dot = path.find('.');; dot = path.find('.', dot + 1)) {
    const CommonValue* const value = values.Find(std::string(path.substr(0, dot)));
    if (dot == std::string_view::npos) return value == nullptr ? Json() : ScalarOf(*value);
    const auto* inner = value == nullptr ? nullptr : value->get_if<CommonDict>();
    if (inner == nullptr) continue;
    if (Json found = ScalarIn(*inner, path.substr(dot + 1)); !found.is_null()) return found;
  }
}

}  // namespace

bool NamedValues::IsPlace(std::string_view text) {
  return text.starts_with(kConfig) || text.starts_with(kCommon);
}

Result<Json> NamedValues::At(std::string_view place) {
  if (place.starts_with(kConfig)) {
    return config_ == nullptr ? Json() : ScalarIn(*config_, place.substr(kConfig.size()));
  }
  if (!common_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const CommonState state, index_.Common());
    common_.emplace();
    for (const auto& [key, value] : state.values) common_->items.emplace(key, value);
    if (more_ != nullptr) common_->items.insert(more_->items.begin(), more_->items.end());
  }
  return ScalarIn(*common_, place.substr(kCommon.size()));
}

Result<std::optional<std::int64_t>> NamedValues::NumberAt(std::string_view place) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Json found, At(place));
  const std::optional<std::int64_t> none;
  if (found.is_boolean()) return std::optional<std::int64_t>(found.get<bool>() ? 1 : 0);
  if (!found.is_number_integer()) return none;
  if (found.is_number_unsigned() && found.get<std::uint64_t>() > INT64_MAX) return none;
  return std::optional<std::int64_t>(found.get<std::int64_t>());
}

}  // namespace tensormount
