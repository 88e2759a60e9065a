// SPDX-License-Identifier: Apache-2.0
// A configuration that is wrong would make a model that computes something else without an error.
// So nothing is assumed: each value is a constant of the family, or is found, or nothing is made.
#include "index/records/made_config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "index/records/checkpoint_index.h"
#include "index/records/named_values.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kNot = "not ";
constexpr std::string_view kOr = " or ";
constexpr std::string_view kNumbers = "numbers.";
constexpr std::string_view kDType = "dtype.";
constexpr std::string_view kShape = "shape.";
constexpr std::string_view kTensor = "tensor.";

Status BadConfigRules(const std::string& why) { return Status(Code::kInvalidArgument, why); }

// The text after "=", which says where a value is found; nullopt for constants.
std::optional<std::string> PlaceOf(const Json& value) {
  if (!value.is_string()) return std::nullopt;
  std::string text = value.get<std::string>();
  if (!text.starts_with('=')) return std::nullopt;
  return text.substr(1);
}

// "A or B" is {"A", "B"}.
std::vector<std::string_view> Alternatives(std::string_view text) {
  std::vector<std::string_view> all;
  for (std::size_t at = text.find(kOr); at != std::string_view::npos; at = text.find(kOr)) {
    all.push_back(text.substr(0, at));
    text.remove_prefix(at + kOr.size());
  }
  all.push_back(text);
  return all;
}

bool IsKnown(std::string_view text) {
  return std::ranges::all_of(Alternatives(text), [](std::string_view place) {
    if (place.starts_with(kNot)) place.remove_prefix(kNot.size());
    return NamedValues::IsPlace(place) || place.starts_with(kNumbers) ||
           place.starts_with(kDType) || place.starts_with(kShape) || place.starts_with(kTensor);
  });
}

// Finds the values that a "config" names by their places.
class ConfigValues {
 public:
  ConfigValues(NamedValues& places, const AxisSizes& numbers, const CheckpointIndex& index)
      : places_(places), numbers_(numbers), index_(index) {}

  // A finite number, a boolean, or the name of a type; JSON's null: nothing of that is known.
  Result<Json> Find(std::string_view text) {
    for (const std::string_view place : Alternatives(text)) {
      TENSORMOUNT_ASSIGN_OR_RETURN(Json found, FindOne(place));
      if (!found.is_null()) return found;
    }
    return Json();
  }

 private:
  Result<Json> FindOne(std::string_view place) {
    if (place.starts_with(kNumbers)) {
      const auto number = numbers_.find(place.substr(kNumbers.size()));
      return number == numbers_.end() ? Json() : Json(number->second);
    }
    for (const std::string_view kind : {kDType, kShape, kTensor}) {
      if (place.starts_with(kind)) return OfTensor(kind, place.substr(kind.size()));
    }
    const bool negated = place.starts_with(kNot);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Json found,
                                 places_.At(negated ? place.substr(kNot.size()) : place));
    if (found.is_boolean()) return Json(found.get<bool>() != negated);
    const bool usable = found.is_number() && std::isfinite(found.get<double>()) && !negated;
    return usable ? found : Json();
  }

  // "shape.KEY.AXIS", "dtype.KEY", "tensor.KEY".
  Result<Json> OfTensor(std::string_view kind, std::string_view key) {
    std::size_t axis = 0;
    if (kind == kShape) {
      const std::size_t dot = key.rfind('.');
      if (dot == std::string_view::npos) return Json();
      const std::string_view digits = key.substr(dot + 1);
      const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), axis);
      if (read.ec != std::errc() || read.ptr != digits.data() + digits.size()) return Json();
      key = key.substr(0, dot);
    }
    const Result<TensorEntry> tensor = index_.Find(key);
    const bool missing = tensor.status().code() == Code::kNotFound;
    if (kind == kTensor && (missing || tensor.ok())) return Json(!missing);
    if (missing) return Json();
    TENSORMOUNT_RETURN_IF_ERROR(tensor.status());
    const TensorMeta& meta = tensor.value().meta;
    if (kind == kDType) {
      const std::string_view name = InfoOf(meta.dtype()).torch;  // "torch.bfloat16"
      return Json(std::string(name.substr(name.find('.') + 1)));
    }
    if (axis >= static_cast<std::size_t>(meta.shape().rank())) return Json();
    return Json(meta.shape()[static_cast<int>(axis)]);
  }

  NamedValues& places_;
  const AxisSizes& numbers_;
  const CheckpointIndex& index_;
};

}  // namespace

Status MadeConfig::Check(const Json& rules) {
  if (!rules.is_object()) return BadConfigRules("must be an object");
  for (const auto& [name, value] : rules.items()) {
    if (name == "same" ? value.is_array() : value.is_object()) continue;
    return BadConfigRules("\"" + name + "\" must be " +
                          (name == "same" ? "a list of pairs" : "an object"));
  }
  for (const auto& [name, value] : rules.items()) {
    if (name == "if") {
      for (const auto& [place, allowed] : value.items()) {
        const bool valid = allowed.is_array() && !allowed.empty() &&
                           std::ranges::none_of(allowed, &Json::is_structured);
        if (NamedValues::IsPlace(place) && valid) continue;
        return BadConfigRules("\"if\": " + place + " must be a place and a list of values");
      }
    } else if (name == "same") {
      for (const Json& pair : value) {
        const bool valid =
            pair.is_array() && pair.size() == 2 && std::ranges::all_of(pair, [](const Json& place) {
              return place.is_string() && IsKnown(place.get<std::string>());
            });
        if (!valid) return BadConfigRules("\"same\": " + pair.dump() + " must be two places");
      }
    } else if (name == "values") {
      for (const auto& [member, constant] : value.items()) {
        const std::optional<std::string> place = PlaceOf(constant);
        if (!place || IsKnown(*place)) continue;
        return BadConfigRules("\"values\": " + member + ": \"=" + *place + "\" is no place");
      }
    } else {
      return BadConfigRules("unknown field \"" + name + "\"");
    }
  }
  const auto values = rules.find("values");
  if (values == rules.end() || !values->contains("model_type")) {
    return BadConfigRules("\"values\" has no model_type");
  }
  return {};
}

Result<MadeConfig> MadeConfig::Make(const Json& rules, NamedValues& places,
                                    const AxisSizes& numbers, const CheckpointIndex& index) {
  MadeConfig made;
  ConfigValues values(places, numbers, index);
  const Json none = Json::object();
  const auto conditions = rules.find("if");
  for (const auto& [place, allowed] : (conditions == rules.end() ? none : *conditions).items()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Json found, places.At(place));
    if (std::ranges::find(allowed, found) != allowed.end()) continue;
    made.why = place + (found.is_null()     ? " is not known"
                        : found.is_object() ? " is not one value"
                                            : " is " + found.dump());
    return made;
  }
  const auto pairs = rules.find("same");
  for (const Json& pair : pairs == rules.end() ? Json::array() : *pairs) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Json one, values.Find(pair[0].get<std::string>()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Json other, values.Find(pair[1].get<std::string>()));
    if (!one.is_null() && one == other) continue;
    made.why = pair[0].get<std::string>() + " is " + one.dump() + ", but " +
               pair[1].get<std::string>() + " is " + other.dump();
    return made;
  }
  Json config = rules.at("values");
  for (auto& [name, value] : config.items()) {
    const std::optional<std::string> place = PlaceOf(value);
    if (!place) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(value, values.Find(*place));
    const bool flag = place->starts_with(kNot) || place->starts_with(kTensor);
    if (!value.is_null() && value.is_boolean() == flag) continue;
    made.why = *place + " is not known, or not of this kind";
    return made;
  }
  made.text = config.dump(2) + "\n";
  return made;
}

}  // namespace tensormount
