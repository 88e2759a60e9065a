// SPDX-License-Identifier: Apache-2.0
// Key renaming rules (tensormount/key_map.h): whole keys, prefixes, and patterns with stars. The
// first rule that matches a key applies. The rules' JSON is parsed strictly, and errors name the
// field.
#include "tensormount/key_map.h"

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include "index/records/glob_captures.h"
#include "index/records/key_rule.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

using Rule = KeyMap::Rule;
using RuleKind = Rule::Kind;
using Json = nlohmann::json;

std::string QuotedJson(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

Status BadKeyRule(std::string why) { return Status(Code::kInvalidArgument, std::move(why)); }

Status InRule(const Status& status, std::size_t number) {
  return status.WithContext("key map: rule " + std::to_string(number + 1));
}

std::size_t Stars(std::string_view text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '*'));
}

// `to` with its stars replaced by the captures in order.
std::string Fill(std::string_view to, const std::vector<std::string_view>& captures) {
  std::string out;
  std::size_t n = 0;
  for (const char c : to) {
    if (c == '*') {
      out += captures[n++];
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

std::optional<RenamedKey> ApplyKeyRule(const Rule& rule, std::string_view key) {
  switch (rule.kind) {
    case RuleKind::kKey:
      if (key != rule.from) return std::nullopt;
      return RenamedKey{.name = rule.to};
    case RuleKind::kPrefix:
      if (!key.starts_with(rule.from)) return std::nullopt;
      return RenamedKey{.name = rule.to + std::string(key.substr(rule.from.size()))};
    case RuleKind::kMatch: {
      const auto captures = GlobCaptures(rule.from, key);
      if (!captures) return std::nullopt;
      return RenamedKey{.name = Fill(rule.to, *captures)};
    }
    case RuleKind::kDrop:
      if (!GlobCaptures(rule.from, key)) return std::nullopt;
      return RenamedKey{.name = {}, .dropped = true};
  }
  return std::nullopt;
}

Result<Rule> KeyRuleFromJson(const Json& json) {
  static constexpr std::pair<const char*, RuleKind> kKinds[] = {{"key", RuleKind::kKey},
                                                                {"prefix", RuleKind::kPrefix},
                                                                {"match", RuleKind::kMatch},
                                                                {"drop", RuleKind::kDrop}};
  if (!json.is_object()) return BadKeyRule("expected an object");
  Rule rule;
  bool has_kind = false;
  bool has_to = false;
  for (const auto& [name, value] : json.items()) {
    if (!value.is_string()) return BadKeyRule(QuotedJson(name) + " must be a string");
    if (name == "to") {
      rule.to = value.get<std::string>();
      has_to = true;
      continue;
    }
    const auto* kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                    [&, &n = name](const auto& k) { return n == k.first; });
    if (kind == std::end(kKinds)) return BadKeyRule("unknown field " + QuotedJson(name));
    if (has_kind) return BadKeyRule("expected only one of key, prefix, match and drop");
    has_kind = true;
    rule.kind = kind->second;
    rule.from = value.get<std::string>();
  }
  if (!has_kind) return BadKeyRule("expected one of key, prefix, match and drop");
  if (has_to != (rule.kind != RuleKind::kDrop)) {
    return BadKeyRule(has_to ? "a rule with drop takes no \"to\"" : "\"to\" is missing");
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckKeyRule(rule));
  return rule;
}

Status CheckKeyRule(const Rule& rule) {
  if (rule.from.empty()) return BadKeyRule("the key, prefix or pattern to match is empty");
  if (rule.kind == RuleKind::kDrop && !rule.to.empty()) return BadKeyRule("drop takes no \"to\"");
  if (rule.kind == RuleKind::kKey) {
    const Status legal = CheckKey(rule.to);
    if (!legal.ok()) return BadKeyRule("\"to\": " + legal.message());
  }
  if (rule.kind == RuleKind::kMatch && Stars(rule.from) != Stars(rule.to)) {
    return BadKeyRule(QuotedJson(rule.from) + " has " + std::to_string(Stars(rule.from)) +
                      " '*' and " + QuotedJson(rule.to) + " has " + std::to_string(Stars(rule.to)));
  }
  return Status();
}

namespace {

// The new name by the first matching rule. A key that no rule matches keeps its name.
RenamedKey ApplyRules(const std::vector<Rule>& rules, std::string_view key) {
  for (const Rule& rule : rules) {
    if (std::optional<RenamedKey> renamed = ApplyKeyRule(rule, key)) return *std::move(renamed);
  }
  return {.name = std::string(key)};
}

}  // namespace

Result<KeyMap> KeyMap::FromJson(std::string_view json) {
  // If two fields have the same name, the parser silently keeps the last. Names are therefore
  // checked during parsing, with one set for each open object.
  std::vector<std::set<std::string>> fields;
  std::string repeated;
  const Json::parser_callback_t watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) fields.emplace_back();
    if (event == Json::parse_event_t::object_end) fields.pop_back();
    if (event == Json::parse_event_t::key && repeated.empty() &&
        !fields.back().insert(value.get<std::string>()).second) {
      repeated = value.get<std::string>();
    }
    return true;
  };
  const Json parsed = Json::parse(json, watch, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) return Status(Code::kInvalidArgument, "key map: not JSON");
  if (!repeated.empty()) {
    return Status(Code::kInvalidArgument,
                  "key map: field " + QuotedJson(repeated) + " occurs twice");
  }
  if (!parsed.is_array()) return Status(Code::kInvalidArgument, "key map: expected a list");
  std::vector<Rule> rules;
  for (std::size_t i = 0; i < parsed.size(); ++i) {
    Result<Rule> rule = KeyRuleFromJson(parsed[i]);
    if (!rule.ok()) return InRule(rule.status(), i);
    rules.push_back(std::move(rule).value());
  }
  return Make(std::move(rules));
}

Result<KeyMap> KeyMap::Make(std::vector<Rule> rules) {
  for (std::size_t i = 0; i < rules.size(); ++i) {
    if (Status bad = CheckKeyRule(rules[i]); !bad.ok()) return InRule(bad, i);
  }
  KeyMap map;
  map.rules_ = std::move(rules);
  return map;
}

bool KeyMap::Matches(const Rule& rule, std::string_view key) {
  return ApplyKeyRule(rule, key).has_value();
}

std::string KeyMap::Apply(std::string_view key) const { return ApplyRules(rules_, key).name; }

Result<std::vector<std::string>> KeyMap::ApplyToAll(std::span<const std::string> keys) const {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const std::string& key : keys) {
    RenamedKey renamed = ApplyRules(rules_, key);
    if (!renamed.dropped) {
      const Status legal = CheckKey(renamed.name);
      if (!legal.ok()) {
        return Status(Code::kInvalidArgument, "key map: " + key + " becomes " +
                                                  QuotedJson(renamed.name) +
                                                  ", which is not a valid key: " + legal.message());
      }
    }
    names.push_back(std::move(renamed.name));
  }
  // The keys of `first` are views into `names`, which no longer grows.
  std::unordered_map<std::string_view, std::size_t> first;
  first.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].empty()) continue;
    const auto [it, fresh] = first.emplace(names[i], i);
    if (!fresh) {
      return Status(Code::kInvalidArgument, "key map: " + keys[it->second] + " and " + keys[i] +
                                                " would both be called " + names[i]);
    }
  }
  return names;
}

}  // namespace tensormount
