// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_KEY_RULE_H_
#define TENSORMOUNT_INDEX_RECORDS_KEY_RULE_H_

#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/key_map.h"
#include "tensormount/status.h"

namespace tensormount {

// Single rules of a KeyMap (tensormount/key_map.h), which name maps have, too. Users of
// KeyRuleFromJson include <nlohmann/json.hpp>.

// kInvalidArgument names the field. The result passed CheckKeyRule.
Result<KeyMap::Rule> KeyRuleFromJson(const nlohmann::json& json);
// kInvalidArgument: nothing to match, different numbers of '*', or an invalid new key.
Status CheckKeyRule(const KeyMap::Rule& rule);

// The result of a rule for a matching key.
struct RenamedKey {
  std::string name;
  bool dropped = false;
};
// nullopt if the rule does not match the key.
std::optional<RenamedKey> ApplyKeyRule(const KeyMap::Rule& rule, std::string_view key);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_KEY_RULE_H_
