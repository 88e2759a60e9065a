// SPDX-License-Identifier: Apache-2.0
// Parses the JSON of name maps (docs/mapping.md). Unknown fields are refused, so that a misspelled
// one does not silently change what a rule does.
#include "index/records/name_rules.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "index/records/checkpoint_index.h"
#include "index/records/key_rule.h"
#include "index/records/made_config.h"
#include "index/records/named_values.h"
#include "shard/strict_json.h"

namespace tensormount {
namespace {

using Json = nlohmann::json;

Status BadNameMap(const std::string& why) {
  return Status(Code::kInvalidArgument, "name map: " + why);
}

Status BadField(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

// Operations that a map cannot do, because it moves cells and computes none.
constexpr const char* kArithmetic[] = {"add", "subtract", "scale", "multiply", "value", "constant"};

// The line, from 1, on which each element of the list of rules begins. `text` is valid JSON: a
// list, or an object whose member "rules" is the list.
std::vector<std::size_t> LinesOfRules(std::string_view text) {
  std::vector<std::size_t> lines;
  std::size_t line = 1;
  int depth = 0;
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  // The depth of the list's elements, and whether the list is open.
  const int inside = first != std::string_view::npos && text[first] == '[' ? 1 : 2;
  bool open = false;
  bool expects = false;  // Whether the next token begins an element.
  std::string_view last_string;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') ++line;
    if (c == ' ' || c == '\t' || c == '\r' || c == '\n') continue;
    if (expects && c != ']') lines.push_back(line);
    expects = false;
    if (c == '"') {
      const std::size_t begin = i + 1;
      for (++i; i < text.size() && text[i] != '"'; ++i) {
        if (text[i] == '\\') ++i;
      }
      last_string = text.substr(begin, std::min(i, text.size()) - begin);
    } else if (c == '[' || c == '{') {
      ++depth;
      if (c == '[' && depth == inside && (inside == 1 || last_string == "rules")) {
        open = expects = true;
      }
    } else if (c == ']' || c == '}') {
      if (depth == inside) open = false;
      --depth;
    } else if (c == ',' && open && depth == inside) {
      expects = true;
    }
  }
  return lines;
}

Result<std::string> StringOf(const Json& json, const std::string& field) {
  if (!json.is_string()) return BadField("\"" + field + "\" must be a string");
  return json.get<std::string>();
}

// A side of a rule with brackets, "layers[.{l}].w : [l] a b", is two: with the text in the brackets
// of the key and without that of the axes, or the reverse. "[[" and "]]" are the characters.
Result<std::string> FormOf(const std::string& text, bool in_key, bool& has_brackets) {
  std::string out;
  const std::size_t axes = std::min(text.find(" : "), text.size());
  bool inside = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c != '[' && c != ']') {
      if (!inside || (i < axes) == in_key) out += c;
      continue;
    }
    if (i + 1 < text.size() && text[i + 1] == c) {
      out += c;
      ++i;
      continue;
    }
    if (inside == (c == '[')) return BadField("\"" + text + "\": brackets do not match");
    inside = c == '[';
    has_brackets = true;
  }
  if (inside) return BadField("\"" + text + "\": brackets do not match");
  return out;
}

// A rule with each text in the form that FormOf gives.
Result<Json> FormOf(const Json& rule, bool in_key, bool& has_brackets) {
  Json form = rule;
  for (const char* const field : {"from", "to"}) {
    const auto sides = form.find(field);
    if (sides == form.end()) continue;
    const auto replace = [&](Json& side) -> Status {
      if (!side.is_string()) return Status();  // ParseSides refuses it.
      TENSORMOUNT_ASSIGN_OR_RETURN(side, FormOf(side.get<std::string>(), in_key, has_brackets));
      return Status();
    };
    if (!sides->is_array()) {
      TENSORMOUNT_RETURN_IF_ERROR(replace(*sides));
      continue;
    }
    for (Json& side : *sides) TENSORMOUNT_RETURN_IF_ERROR(replace(side));
  }
  return form;
}

// "KEY : AXES" or "KEY". The separator is " : " or a colon at the end: keys may have colons.
Result<NameRule::Side> ParseSide(const std::string& text) {
  NameRule::Side side;
  std::size_t colon = text.find(" : ");
  if (colon == std::string::npos && text.ends_with(" :")) colon = text.size() - 2;
  std::string key = text.substr(0, colon);
  while (key.ends_with(' ')) key.pop_back();
  TENSORMOUNT_ASSIGN_OR_RETURN(side.key, KeyPattern::Parse(key));
  if (colon != std::string::npos) {
    TENSORMOUNT_ASSIGN_OR_RETURN(side.axes, AxisNames::Parse(text.substr(colon + 2)));
  }
  return side;
}

Result<std::vector<NameRule::Side>> ParseSides(const Json& json, const std::string& field) {
  std::vector<NameRule::Side> sides;
  if (!json.is_array()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, StringOf(json, field));
    TENSORMOUNT_ASSIGN_OR_RETURN(sides.emplace_back(), ParseSide(text));
    return sides;
  }
  if (json.empty()) return BadField("\"" + field + "\" is empty");
  if (json.size() > NameRules::kMaxSides) {
    return BadField("\"" + field + "\" has more than " + std::to_string(NameRules::kMaxSides) +
                    " tensors");
  }
  for (const Json& one : json) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, StringOf(one, field));
    TENSORMOUNT_ASSIGN_OR_RETURN(sides.emplace_back(), ParseSide(text));
  }
  return sides;
}

Result<std::map<std::string, SizeFormula>> ParseSizes(const Json& json) {
  if (!json.is_object()) return BadField("\"sizes\" must be an object");
  if (json.size() > NameRules::kMaxSizes) {
    return BadField("\"sizes\" has more than " + std::to_string(NameRules::kMaxSizes) + " names");
  }
  std::map<std::string, SizeFormula> sizes;
  for (const auto& [name, value] : json.items()) {
    if (!AxisNames::IsName(name)) return BadField("\"sizes\": \"" + name + "\" is not a name");
    std::string text;
    if (value.is_number_unsigned()) {
      text = value.dump();
    } else if (value.is_string()) {
      text = value.get<std::string>();
    } else {
      return BadField("the size of " + name + " must be a number or a formula");
    }
    Result<SizeFormula> formula = SizeFormula::Parse(text);
    if (!formula.ok()) return formula.status().WithContext("the size of " + name);
    sizes.emplace(name, std::move(formula).value());
  }
  return sizes;
}

Result<std::map<std::string, std::int64_t>> ParseWhen(const Json& json) {
  if (!json.is_object()) return BadField("\"when\" must be an object");
  std::map<std::string, std::int64_t> when;
  for (const auto& [number, expected] : json.items()) {
    if (!expected.is_number_integer()) return BadField("\"when\": the values must be integers");
    when.emplace(number, expected.get<std::int64_t>());
  }
  return when;
}

constexpr std::string_view kSlotKey = "{key}";

// A key of a slot, with "{key}" once.
Result<std::string> ParseSlotKey(const Json& json, const std::string& field) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string text, StringOf(json, field));
  const std::size_t at = text.find(kSlotKey);
  if (at == std::string::npos || text.find(kSlotKey, at + 1) != std::string::npos) {
    return BadField("\"" + text + "\" must have {key} once");
  }
  if (text.find_first_of("{}", at + kSlotKey.size()) != std::string::npos ||
      text.find_first_of("{}") != at) {
    return BadField("\"" + text + "\" has other braces than {key}");
  }
  return text;
}

Result<NameRules::Slot> ParseSlot(const Json& json) {
  if (!json.is_object()) return BadField("expected an object");
  NameRules::Slot slot;
  for (const auto& [name, value] : json.items()) {
    if (name == "from") {
      for (const Json& form : value.is_array() ? value : Json::array({value})) {
        TENSORMOUNT_ASSIGN_OR_RETURN(slot.from.emplace_back(), ParseSlotKey(form, name));
        if (slot.from.back() == kSlotKey) return BadField("\"from\" is the tensor itself");
      }
    } else if (name == "to") {
      TENSORMOUNT_ASSIGN_OR_RETURN(slot.to, ParseSlotKey(value, name));
    } else if (name == "when") {
      TENSORMOUNT_ASSIGN_OR_RETURN(slot.when, ParseWhen(value));
    } else {
      return BadField("unknown field \"" + name + "\"");
    }
  }
  if (slot.from.empty()) return BadField("\"from\" is missing");
  if (slot.to.empty()) return BadField("\"to\" is missing");
  return slot;
}

// `text` with the key pattern of a tensor instead of "{key}".
std::string SlotKeyOf(const std::string& text, const KeyPattern& key) {
  const std::size_t at = text.find(kSlotKey);
  return text.substr(0, at) + key.text() + text.substr(at + kSlotKey.size());
}

NameRule::SlotKey SplitSlotKey(const std::string& text) {
  const std::size_t at = text.find(kSlotKey);
  return {text.substr(0, at), text.substr(at + kSlotKey.size())};
}

std::set<std::string> CapturesOf(const NameRule::Side& side) {
  std::set<std::string> names;
  for (const KeyPattern::Capture& capture : side.key.captures()) names.insert(capture.name);
  return names;
}

// Completes a rule of kind kAxes or kAlias: gives a side without axes those of the other side, and
// finds the captures that all keys have.
Status Complete(NameRule& rule) {
  std::vector<NameRule::Side*> sides;
  for (NameRule::Side& side : rule.from) sides.push_back(&side);
  for (NameRule::Side& side : rule.to) sides.push_back(&side);
  const auto with_axes = static_cast<std::size_t>(
      std::count_if(sides.begin(), sides.end(), [](const auto* s) { return s->axes.has_value(); }));
  if (with_axes < sides.size()) {
    if (sides.size() > 2) {
      return BadField("a rule of several tensors needs the axes of each: \"KEY : AXES\"");
    }
    if (with_axes == 1)
      (sides[0]->axes ? sides[1] : sides[0])->axes =
          sides[0]->axes ? sides[0]->axes : sides[1]->axes;
  }
  // Also of axes that came from the other side.
  for (const NameRule::Side* side : sides) {
    if (!side->axes) continue;
    for (const KeyPattern::Capture& capture : side->key.captures()) {
      if (side->axes->names().contains(capture.name)) {
        return BadField("\"" + side->key.text() + "\": " + capture.name +
                        " is in the key and among the axes");
      }
    }
  }
  rule.group = CapturesOf(*sides[0]);
  for (const NameRule::Side* side : sides) {
    const std::set<std::string> captures = CapturesOf(*side);
    std::erase_if(rule.group, [&](const std::string& name) { return !captures.contains(name); });
  }
  for (const NameRule::Side* side : sides) {
    for (const KeyPattern::Capture& capture : side->key.captures()) {
      if (rule.group.contains(capture.name)) continue;
      if (!capture.is_index) {
        return BadField("{" + capture.name + "*} must be in every key of the rule");
      }
      if (with_axes == 0) {
        return BadField("{" + capture.name + "} must be in every key, or among the axes");
      }
    }
  }
  return Status();
}

// One rule with "from" and "to", or "alias" and "of".
Result<NameRule> ParseRule(const Json& json) {
  NameRule rule;
  const bool alias = json.contains("alias");
  rule.kind = alias ? NameRule::Kind::kAlias : NameRule::Kind::kAxes;
  for (const auto& [name, value] : json.items()) {
    if (name == (alias ? "of" : "from")) {
      TENSORMOUNT_ASSIGN_OR_RETURN(rule.from, ParseSides(value, name));
    } else if (name == (alias ? "alias" : "to")) {
      TENSORMOUNT_ASSIGN_OR_RETURN(rule.to, ParseSides(value, name));
    } else if (name == "optional") {
      if (!value.is_boolean()) return BadField("\"optional\" must be true or false");
      rule.optional = value.get<bool>();
    } else if (name == "when") {
      TENSORMOUNT_ASSIGN_OR_RETURN(rule.when, ParseWhen(value));
    } else if (name == "back") {
      if (!value.is_boolean()) return BadField("\"back\" must be true or false");
      rule.back = value.get<bool>();
    } else if (name == "slots" && !alias) {
      if (value != "only" && value != "none") {
        return BadField("\"slots\" must be \"only\" or \"none\"");
      }
      rule.slots = value == "only" ? NameRule::Slots::kOnly : NameRule::Slots::kNone;
    } else if (name == "sizes" && !alias) {
      TENSORMOUNT_ASSIGN_OR_RETURN(rule.sizes, ParseSizes(value));
    } else if (name == "unused" && !alias) {
      if (!value.is_array()) return BadField("\"unused\" must be a list of names");
      for (const Json& one : value) {
        TENSORMOUNT_ASSIGN_OR_RETURN(std::string unused, StringOf(one, "unused"));
        rule.unused.insert(std::move(unused));
      }
    } else if (std::find(std::begin(kArithmetic), std::end(kArithmetic), name) !=
               std::end(kArithmetic)) {
      return Status(Code::kUnsupported, "\"" + name + "\": a map moves cells and computes none");
    } else {
      return BadField("unknown field \"" + name + "\"");
    }
  }
  if (rule.from.empty()) return BadField(alias ? "\"of\" is missing" : "\"from\" is missing");
  if (rule.to.empty()) return BadField("\"to\" is missing");
  if (alias &&
      (rule.from.size() > 1 || rule.to.size() > 1 || rule.from[0].axes || rule.to[0].axes)) {
    return BadField("an alias is one key, without axes");
  }
  TENSORMOUNT_RETURN_IF_ERROR(Complete(rule));
  std::set<std::string> known = rule.NamesOfAxes();
  for (const auto* sides : {&rule.from, &rule.to}) {
    for (const NameRule::Side& side : *sides) known.merge(CapturesOf(side));
  }
  for (const std::string& name : rule.unused) {
    if (!known.contains(name)) return BadField("\"unused\": the rule has no name " + name);
  }
  return rule;
}

Result<NameRule> RuleFromJson(const Json& json) {
  if (!json.is_object()) return BadField("expected an object");
  if (json.contains("from") || json.contains("alias") || json.contains("of")) {
    return ParseRule(json);
  }
  NameRule rule;
  Json keys = json;
  if (const auto when = keys.find("when"); when != keys.end()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(rule.when, ParseWhen(*when));
    keys.erase(when);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(rule.keys, KeyRuleFromJson(keys));
  return rule;
}

// The patterns of "detect" or "absent", each with its forms.
Result<std::vector<std::vector<KeyPattern>>> ParsePatterns(const Json& json,
                                                           const std::string& field) {
  if (!json.is_array()) return BadField("\"" + field + "\" must be a list");
  std::vector<std::vector<KeyPattern>> all;
  for (const Json& one : json) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, StringOf(one, field));
    std::vector<KeyPattern>& forms = all.emplace_back();
    for (const bool in_key : {false, true}) {
      bool has_brackets = false;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::string form, FormOf(text, in_key, has_brackets));
      if (in_key && !has_brackets) break;
      TENSORMOUNT_ASSIGN_OR_RETURN(forms.emplace_back(), KeyPattern::Parse(form));
    }
  }
  return all;
}

// One member of "numbers": an integer, or a list of places.
Status AddNumber(const std::string& name, const Json& value, NameRules& rules) {
  if (!AxisNames::IsName(name)) return BadField("\"" + name + "\" is not the name of a number");
  if (value.is_number_unsigned() && value.get<std::uint64_t>() <= INT64_MAX) {
    rules.numbers.emplace(name, value.get<std::int64_t>());
    return {};
  }
  std::vector<std::string>& places = rules.sources[name];
  for (const Json& place : value.is_array() ? value : Json::array()) {
    const std::string text = place.is_string() ? place.get<std::string>() : std::string();
    const std::size_t condition = text.find(" if ");
    if (!NamedValues::IsPlace(text) ||
        (condition != std::string::npos && !NamedValues::IsPlace(text.substr(condition + 4)))) {
      places.clear();
      break;
    }
    places.push_back(text);
  }
  if (!places.empty()) return {};
  return BadField("number " + name +
                  " must be an integer, or a list of places \"config.NAME\" and \"common.PATH\"");
}

// The key that a rename without axes gives to a key with these captures of its "from".
std::string RenamedBy(const NameRule& rule, const std::vector<std::string_view>& captures) {
  std::vector<std::string> filled;
  for (const KeyPattern::Capture& capture : rule.to[0].key.captures()) {
    const auto& names = rule.from[0].key.captures();
    const auto at = std::find_if(names.begin(), names.end(),
                                 [&](const auto& known) { return known.name == capture.name; });
    filled.emplace_back(captures[static_cast<std::size_t>(at - names.begin())]);
  }
  return rule.to[0].key.Fill(filled);
}

}  // namespace

std::set<std::string> NameRule::NamesOfAxes() const {
  std::set<std::string> names;
  for (const auto* sides : {&from, &to}) {
    for (const Side& side : *sides) {
      if (side.axes) names.insert(side.axes->names().begin(), side.axes->names().end());
    }
  }
  return names;
}

bool NameRule::HasIndex(std::string_view name) const {
  const auto has = [&](const Side& side) {
    return std::ranges::any_of(side.key.captures(), [&](const KeyPattern::Capture& capture) {
      return capture.is_index && capture.name == name;
    });
  };
  return std::ranges::any_of(from, has) || std::ranges::any_of(to, has);
}

Result<NameRules> NameRules::FromJson(std::string_view json) {
  if (json.size() > kMaxBytes) return BadNameMap("more than 4 MiB");
  const std::size_t first = json.find_first_not_of(" \t\r\n");
  const bool list = first != std::string_view::npos && json[first] == '[';
  // The strict parser takes objects only.
  const std::string text = list ? "{\"rules\":" + std::string(json) + "}" : std::string(json);
  Result<Json> parsed = ParseStrictJson(text);
  if (!parsed.ok()) return BadNameMap(parsed.status().message());
  Result<NameRules> rules =
      FromParsed(list ? parsed.value()["rules"] : parsed.value(), LinesOfRules(json), 0);
  return rules.ok() ? std::move(rules) : rules.status().WithContext("name map");
}

// `lines`: where the rules begin; empty if that is not known. `depth`: number of maps around it.
Result<NameRules> NameRules::FromParsed(const Json& json, const std::vector<std::size_t>& lines,
                                        int depth) {
  const bool list = json.is_array();
  if (!list && !json.is_object()) return BadField("expected a list of rules, or an object");
  NameRules rules;
  if (!list) {
    rules.others = Others::kRefuse;
    const auto version = json.find("version");
    if (version == json.end()) return BadField("\"version\" is missing");
    if (*version != 1) {
      return Status(Code::kUnsupported,
                    "version " + version->dump() + " is not known to this program, which knows 1");
    }
  }
  const Json* entries = list ? &json : nullptr;
  const Json none = Json::object();
  for (const auto& [name, value] : (list ? none : json).items()) {
    if (name == "base") {
      if (depth == kMaxBases) {
        return BadField("more than " + std::to_string(kMaxBases) + " maps in one another");
      }
      Result<NameRules> base = FromParsed(value, {}, depth + 1);
      if (!base.ok()) return base.status().WithContext("\"base\"");
      rules.base.push_back(std::move(base).value());
    } else if (name == "rules") {
      if (!value.is_array()) return BadField("\"rules\" must be a list");
      entries = &value;
    } else if (name == "others") {
      static constexpr std::pair<const char*, Others> kOthers[] = {
          {"keep", Others::kKeep}, {"drop", Others::kDrop}, {"refuse", Others::kRefuse}};
      const auto* const found =
          std::find_if(std::begin(kOthers), std::end(kOthers),
                       [&, &v = value](const auto& other) { return v == other.first; });
      if (found == std::end(kOthers)) {
        return BadField("\"others\" must be \"keep\", \"drop\" or \"refuse\"");
      }
      rules.others = found->second;
    } else if (name == "sizes") {
      Result<std::map<std::string, SizeFormula>> sizes = ParseSizes(value);
      if (!sizes.ok()) return BadField(sizes.status().message());
      rules.sizes = std::move(sizes).value();
    } else if (name == "numbers") {
      if (!value.is_object()) return BadField("\"numbers\" must be an object");
      for (const auto& [number, size] : value.items()) {
        TENSORMOUNT_RETURN_IF_ERROR(AddNumber(number, size, rules));
      }
    } else if (name == "guards") {
      if (!value.is_object()) return BadField("\"guards\" must be an object");
      for (const auto& [place, expected] : value.items()) {
        if (!NamedValues::IsPlace(place) || !expected.is_number_integer()) {
          return BadField("guard " + place + " must be a place and an integer");
        }
        rules.guards.push_back({place, expected.get<std::int64_t>()});
      }
    } else if (name == "config") {
      const Status valid = MadeConfig::Check(value);
      if (!valid.ok()) return valid.WithContext("\"config\"");
      rules.config_rules = std::make_shared<const Json>(value);
    } else if (name == "counts") {
      if (!value.is_object()) return BadField("\"counts\" must be an object");
      for (const auto& [index, number] : value.items()) {
        TENSORMOUNT_ASSIGN_OR_RETURN(rules.counts[index], StringOf(number, name));
      }
    } else if (name == "needs") {
      if (!value.is_array()) return BadField("\"needs\" must be a list");
      for (const Json& forms : value) {
        if (forms.is_array() && forms.empty()) return BadField("\"needs\" has an empty list");
        rules.needs.emplace_back();
        for (const Json& form : forms.is_array() ? forms : Json::array({forms})) {
          TENSORMOUNT_ASSIGN_OR_RETURN(rules.needs.back().emplace_back(), StringOf(form, name));
        }
      }
    } else if (name == "slots") {
      if (!value.is_array()) return BadField("\"slots\" must be a list");
      std::size_t forms = 0;
      for (const Json& one : value) {
        const std::string position = "slots[" + std::to_string(rules.slots.size()) + "]";
        Result<Slot> slot = ParseSlot(one);
        if (!slot.ok()) return slot.status().WithContext(position);
        forms += slot.value().from.size();
        if (forms > kMaxSlots) {
          return BadField("more than " + std::to_string(kMaxSlots) + " slots");
        }
        slot.value().position = position;
        rules.slots.push_back(std::move(slot).value());
      }
    } else if (name == "family" || name == "layout") {
      TENSORMOUNT_ASSIGN_OR_RETURN((name == "family" ? rules.family : rules.layout),
                                   StringOf(value, name));
    } else if (name == "detect" || name == "absent") {
      TENSORMOUNT_ASSIGN_OR_RETURN((name == "detect" ? rules.detect : rules.absent),
                                   ParsePatterns(value, name));
    } else if (name != "version" && name != "about") {
      return BadField("unknown field \"" + name + "\"");
    }
  }
  if (entries == nullptr) return BadField("\"rules\" is missing");
  if (entries->size() > kMaxRules) {
    return BadField("more than " + std::to_string(kMaxRules) + " rules");
  }
  for (std::size_t i = 0; i < entries->size(); ++i) {
    const std::string position =
        "rules[" + std::to_string(i) + "]" +
        (i < lines.size() ? " (line " + std::to_string(lines[i]) + ")" : "");
    const auto add = [&]() -> Status {
      bool has_brackets = false;
      for (const bool in_key : {false, true}) {
        const Json& entry = (*entries)[i];
        const bool has_sides = entry.is_object() && entry.contains("from");
        TENSORMOUNT_ASSIGN_OR_RETURN(
            const Json form, has_sides ? FormOf(entry, in_key, has_brackets) : Result<Json>(entry));
        if (in_key && !has_brackets) break;
        TENSORMOUNT_ASSIGN_OR_RETURN(NameRule rule, RuleFromJson(form));
        rule.position = position;
        rule.second_form = in_key;
        rules.rules.push_back(std::move(rule));
      }
      return Status();
    };
    if (const Status added = add(); !added.ok()) {
      return added.WithContext(position);
    }
  }
  for (const auto& [index, number] : rules.counts) {
    const bool known = std::ranges::any_of(
        rules.rules, [&, &i = index](const NameRule& rule) { return rule.HasIndex(i); });
    if (!known) return BadField("\"counts\": no key has {" + index + "}");
  }
  return rules;
}

std::string NameRules::NameOf(std::string_view key) const {
  const std::optional<std::size_t> r = RuleFor(key);
  if (!r) return others == Others::kDrop ? std::string() : std::string(key);
  const NameRule& rule = rules[*r];
  if (rule.kind == NameRule::Kind::kKeys) return ApplyKeyRule(rule.keys, key)->name;
  if (rule.kind == NameRule::Kind::kReplaced) return {};
  return rule.from[0].axes ? std::string() : RenamedBy(rule, *rule.from[0].key.Match(key));
}

bool NameRules::Splits(std::string_view key) const {
  const std::optional<std::size_t> r = RuleFor(key);
  return r && rules[*r].kind == NameRule::Kind::kAxes && rules[*r].from[0].axes;
}

std::optional<std::size_t> NameRules::RuleFor(std::string_view key) const {
  for (std::size_t r = 0; r < rules.size(); ++r) {
    const NameRule& rule = rules[r];
    const bool applies = std::all_of(rule.when.begin(), rule.when.end(), [&](const auto& when) {
      const auto number = numbers.find(when.first);
      return number != numbers.end() && number->second == when.second;
    });
    if (!applies) continue;
    if (rule.kind == NameRule::Kind::kKeys && ApplyKeyRule(rule.keys, key)) return r;
    if (rule.kind == NameRule::Kind::kAlias) continue;
    for (const NameRule::Side& side : rule.from) {
      if (side.key.Match(key)) return r;
    }
  }
  return std::nullopt;
}

Result<std::shared_ptr<const NameRules>> NameRules::FromMap(const NameMap& map) {
  if (map.rules.empty()) return std::shared_ptr<const NameRules>();
  TENSORMOUNT_ASSIGN_OR_RETURN(NameRules rules, FromJson(map.rules));
  TENSORMOUNT_RETURN_IF_ERROR(rules.AddGiven(map));
  if (map.as.empty()) TENSORMOUNT_RETURN_IF_ERROR(CheckGiven(map, {&rules}));
  return std::make_shared<const NameRules>(std::move(rules));
}

std::set<std::string> NameRules::NamesOfNumbers() const {
  std::set<std::string> names;
  const auto add_formulas = [&](const std::map<std::string, SizeFormula>& formulas) {
    for (const auto& [name, formula] : formulas) {
      names.insert(name);
      names.insert(formula.names().begin(), formula.names().end());
    }
  };
  for (const NameRules& first : base) names.merge(first.NamesOfNumbers());
  for (const auto& [name, number] : numbers) names.insert(name);
  for (const auto& [name, places] : sources) names.insert(name);
  for (const auto& [index, name] : counts) names.insert(name);
  add_formulas(sizes);
  for (const Slot& slot : slots) {
    for (const auto& [name, value] : slot.when) names.insert(name);
  }
  for (const NameRule& rule : rules) {
    add_formulas(rule.sizes);
    for (const auto& [name, value] : rule.when) names.insert(name);
    names.merge(rule.NamesOfAxes());
  }
  return names;
}

Status NameRules::CheckGiven(const NameMap& map, std::initializer_list<const NameRules*> all) {
  std::set<std::string> known;
  for (const NameRules* rules : all) known.merge(rules->NamesOfNumbers());
  for (const auto& [name, value] : map.numbers) {
    if (known.contains(name)) continue;
    std::string names;
    for (const std::string& other : known) names += (names.empty() ? "" : ", ") + other;
    return BadNameMap("no rule uses the number " + name + "; known are: " + names);
  }
  return {};
}

Status NameRules::AddGiven(const NameMap& map) {
  for (NameRules& first : base) TENSORMOUNT_RETURN_IF_ERROR(first.AddGiven(map));
  const std::set<std::string> own = NamesOfNumbers();
  for (const auto& [name, value] : map.numbers) {
    if (!AxisNames::IsName(name)) return BadNameMap("\"" + name + "\" is not the name of a number");
    if (value < 0) return BadNameMap("number " + name + " is negative");
    if (own.contains(name)) numbers[name] = value;  // Instead of the file's.
  }
  if (!map.config.empty()) {
    Result<Json> json = ParseStrictJson(map.config);
    if (!json.ok()) return BadNameMap("config.json: " + json.status().message());
    const auto type = json.value().find("model_type");
    if (type == json.value().end() || !type->is_string()) {
      return BadNameMap("config.json has no \"model_type\", so it is not that of a model");
    }
    model_type = type->get<std::string>();
    config = std::make_shared<const Json>(std::move(json).value());
  }
  return {};
}

std::string NameRules::ModelTypeOf(std::string_view config) {
  const Result<Json> json = ParseStrictJson(config);
  if (!json.ok()) return {};
  const auto type = json.value().find("model_type");
  return type == json.value().end() || !type->is_string() ? "" : type->get<std::string>();
}

NameRules NameRules::Inverse(bool layers) const {
  NameRules inverse = *this;
  inverse.rules.clear();
  for (std::size_t r = 0; r < rules.size(); ++r) {
    const bool has_second = r + 1 < rules.size() && rules[r + 1].second_form;
    if (rules[r].second_form ? !layers : layers && has_second) continue;
    NameRule rule = rules[r];
    if (!rule.back) continue;
    rule.second_form = false;
    if (rule.kind == NameRule::Kind::kKeys) {
      if (rule.keys.kind == KeyMap::Rule::Kind::kDrop) continue;
      std::swap(rule.keys.from, rule.keys.to);
    } else if (rule.kind == NameRule::Kind::kAlias) {
      // The second name goes; captures of the pattern are stars.
      rule.kind = NameRule::Kind::kKeys;
      std::string glob;
      bool inside = false;
      for (const char c : rule.to[0].key.text()) {
        if (c == '{') glob += '*';
        inside = c == '{' || (inside && c != '}');
        if (!inside && c != '}') glob += c;
      }
      rule.keys = {.kind = KeyMap::Rule::Kind::kDrop, .from = glob, .to = {}};
    } else {
      std::swap(rule.from, rule.to);
    }
    inverse.rules.push_back(std::move(rule));
  }
  // A slot that takes the place of its tensor has no inverse: two would come from one.
  inverse.slots.clear();
  for (const Slot& slot : slots) {
    if (slot.to == kSlotKey) continue;
    inverse.slots.push_back({{slot.to}, slot.from[0], slot.when, slot.position});
  }
  return inverse;
}

// The rules of slots come first, because a rule that drops all of an optimizer's tensors may
// follow. Nobody asks for most slots of a pack, so those that cannot apply cost nothing here.
Status NameRules::ExpandSlots() {
  std::vector<NameRule> expanded;
  std::vector<NameRule> replaced;
  const auto only = std::stable_partition(rules.begin(), rules.end(), [](const NameRule& rule) {
    return rule.slots != NameRule::Slots::kOnly;
  });
  const auto tensors = static_cast<std::size_t>(only - rules.begin());
  for (const Slot& slot : slots) {
    const bool may_apply = std::ranges::all_of(slot.when, [&](const auto& when) {
      const auto number = numbers.find(when.first);
      return number == numbers.end() || number->second == when.second;
    });
    if (!may_apply) continue;
    for (std::size_t r = 0; r < rules.size(); ++r) {
      if (rules[r].kind != NameRule::Kind::kAxes) continue;
      if (rules[r].slots == NameRule::Slots::kNone) continue;
      NameRule rule = rules[r];
      rule.position += ", " + slot.position;
      const bool possible = std::ranges::all_of(slot.when, [&](const auto& when) {
        return rule.when.emplace(when).first->second == when.second;
      });
      if (!possible) continue;
      if (slot.to == kSlotKey && r < tensors) {
        NameRule& left_out = replaced.emplace_back(rule);
        left_out.kind = NameRule::Kind::kReplaced;
        left_out.replaces = r;
        for (const std::string& form : slot.from) left_out.slot.push_back(SplitSlotKey(form));
      }
      rule.optional = true;
      rule.second_form = false;
      for (NameRule::Side& side : rule.to) {
        TENSORMOUNT_ASSIGN_OR_RETURN(side.key, KeyPattern::Parse(SlotKeyOf(slot.to, side.key)));
      }
      for (const std::string& form : slot.from) {
        rule.slot = {SplitSlotKey(form)};
        for (std::size_t s = 0; s < rule.from.size(); ++s) {
          TENSORMOUNT_ASSIGN_OR_RETURN(rule.from[s].key,
                                       KeyPattern::Parse(SlotKeyOf(form, rules[r].from[s].key)));
        }
        expanded.push_back(rule);
      }
    }
  }
  const std::size_t before = expanded.size() + replaced.size();
  for (NameRule& rule : replaced) {
    rule.replaces += before;
    expanded.push_back(std::move(rule));
  }
  expanded.insert(expanded.end(), std::make_move_iterator(rules.begin()),
                  std::make_move_iterator(only));
  rules = std::move(expanded);
  slots.clear();
  return {};
}

bool NameRules::HasReplacing(const std::vector<std::string>& keys) const {
  for (const Slot& slot : slots) {
    if (slot.to != kSlotKey) continue;
    for (const std::string& form : slot.from) {
      const NameRule::SlotKey parts = SplitSlotKey(form);
      if (std::ranges::any_of(keys, [&](const std::string& key) {
            return key.starts_with(parts.before) && key.ends_with(parts.after);
          })) {
        return true;
      }
    }
  }
  return false;
}

Status NameRules::FindNumbers(const CheckpointIndex& index) {
  NamedValues places(index, config.get(), trainer_values.get());
  for (const auto& [name, texts] : sources) {
    for (const std::string& text : texts) {
      if (numbers.contains(name)) break;
      const std::size_t condition = text.find(" if ");
      if (condition != std::string::npos) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const auto holds, places.NumberAt(text.substr(condition + 4)));
        if (holds.value_or(0) == 0) continue;
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto found, places.NumberAt(text.substr(0, condition)));
      if (found && *found >= 0) numbers.emplace(name, *found);
    }
  }
  for (const Guard& guard : guards) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto found, places.NumberAt(guard.place));
    if (!found || *found == guard.expected) continue;
    return Status(Code::kUnsupported, "name map: " + guard.place + " is " + std::to_string(*found) +
                                          ", and the rules are for " +
                                          std::to_string(guard.expected));
  }
  return {};
}

}  // namespace tensormount
