// SPDX-License-Identifier: Apache-2.0
// A configuration that is wrong would make a model that computes something else without an error.
// So nothing is assumed: each value is a constant of the family, or is found, or nothing is made.
#include "index/records/made_config.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "index/records/checkpoint_index.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kNot = "not ";
constexpr std::string_view kNumbers = "numbers.";
constexpr std::string_view kDType = "dtype.";

Status BadConfigRules(const std::string& why) { return Status(Code::kInvalidArgument, why); }

// The text after "=", which says where a value is found; nullopt for constants.
std::optional<std::string> PlaceOf(const Json& value) {
  if (!value.is_string()) return std::nullopt;
  std::string text = value.get<std::string>();
  if (!text.starts_with('=')) return std::nullopt;
  return text.substr(1);
}

bool IsKnown(std::string_view place) {
  if (place.starts_with(kNot)) return NamedValues::IsPlace(place.substr(kNot.size()));
  return NamedValues::IsPlace(place) || place.starts_with(kNumbers) || place.starts_with(kDType);
}

// JSON's null: nothing is known.
Result<Json> Find(std::string_view place, NamedValues& places, const AxisSizes& numbers,
                  const CheckpointIndex& index) {
  if (place.starts_with(kNumbers)) {
    const auto number = numbers.find(place.substr(kNumbers.size()));
    return number == numbers.end() ? Json() : Json(number->second);
  }
  if (place.starts_with(kDType)) {
    const Result<TensorEntry> tensor = index.Find(place.substr(kDType.size()));
    if (tensor.status().code() == Code::kNotFound) return Json();
    TENSORMOUNT_RETURN_IF_ERROR(tensor.status());
    std::string_view name = InfoOf(tensor.value().meta.dtype()).torch;  // "torch.bfloat16"
    return Json(std::string(name.substr(name.find('.') + 1)));
  }
  if (!place.starts_with(kNot)) return places.At(place);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Json found, places.At(place.substr(kNot.size())));
  return found.is_boolean() ? Json(!found.get<bool>()) : Json();
}

}  // namespace

Status MadeConfig::Check(const Json& rules) {
  if (!rules.is_object()) return BadConfigRules("must be an object");
  for (const auto& [name, value] : rules.items()) {
    if (name != "if" && name != "values") return BadConfigRules("unknown field \"" + name + "\"");
    if (!value.is_object()) return BadConfigRules("\"" + name + "\" must be an object");
  }
  const Json conditions = rules.value("if", Json::object());
  for (const auto& [place, allowed] : conditions.items()) {
    const bool valid = allowed.is_array() && !allowed.empty() &&
                       std::ranges::none_of(allowed, &Json::is_structured);
    if (NamedValues::IsPlace(place) && valid) continue;
    return BadConfigRules("\"if\": " + place + " must be a place and a list of values");
  }
  const Json values = rules.value("values", Json::object());
  if (!values.contains("model_type")) return BadConfigRules("\"values\" has no model_type");
  for (const auto& [name, value] : values.items()) {
    const std::optional<std::string> place = PlaceOf(value);
    if (place && !IsKnown(*place)) {
      return BadConfigRules("\"values\": " + name + ": \"=" + *place + "\" is no place");
    }
  }
  return {};
}

Result<MadeConfig> MadeConfig::Make(const Json& rules, NamedValues& places,
                                    const AxisSizes& numbers, const CheckpointIndex& index) {
  MadeConfig made;
  const Json conditions = rules.value("if", Json::object());
  for (const auto& [place, allowed] : conditions.items()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Json found, places.At(place));
    if (std::ranges::find(allowed, found) != allowed.end()) continue;
    made.why = found.is_null() ? place + " is not known" : place + " is " + found.dump();
    return made;
  }
  Json config = rules.at("values");
  for (auto& [name, value] : config.items()) {
    const std::optional<std::string> place = PlaceOf(value);
    if (!place) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(value, Find(*place, places, numbers, index));
    if (!value.is_null()) continue;
    made.why = *place + " is not known";
    return made;
  }
  made.text = config.dump(2) + "\n";
  return made;
}

}  // namespace tensormount
