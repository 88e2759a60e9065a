// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_KEY_MAP_H_
#define TENSORMOUNT_KEY_MAP_H_

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Rules that rename keys, for `--map RULES.json` of import, load, export and mount, and for
// programs. The first rule in the list that matches a key is applied; other keys stay unchanged.
//
//   [{"key": "lm_head.weight", "to": "output.weight"},      exactly this key
//    {"prefix": "model.", "to": "decoder."},                keys that begin with "model."
//    {"match": "layers.*.attn.*", "to": "blocks.*.self_attention.*"},  the n-th * of "to" is what
//                                                           the n-th * of "match" stood for
//    {"drop": "optimizer.*"}]                               matching keys are left out
// Only one rule is applied per key, so special rules go before general ones. '*' matches any bytes,
// also dots and slashes, and as few bytes as possible. A value type; immutable, so threads may
// share it.
class TENSORMOUNT_EXPORT KeyMap {
 public:
  struct Rule {
    enum class Kind { kKey, kPrefix, kMatch, kDrop } kind = Kind::kKey;
    std::string from;
    std::string to;  // Unused for kDrop.
  };

  KeyMap() = default;  // Renames nothing.
  // Makes a KeyMap from JSON or from a list of rules. kInvalidArgument names the invalid rule:
  // different numbers of '*', an empty key, unknown fields.
  static Result<KeyMap> FromJson(std::string_view json);
  static Result<KeyMap> Make(std::vector<Rule> rules);

  bool empty() const { return rules_.empty(); }
  const std::vector<Rule>& rules() const { return rules_; }
  // Whether a rule applies to a key, even if the rule leaves the key unchanged.
  static bool Matches(const Rule& rule, std::string_view key);
  // The new name; empty if the key is dropped.
  std::string Apply(std::string_view key) const;

  // Renames all keys of a checkpoint; dropped keys become empty. kInvalidArgument if two keys get
  // the same name (names both), or a name is not a valid key.
  Result<std::vector<std::string>> ApplyToAll(std::span<const std::string> keys) const;

 private:
  std::vector<Rule> rules_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_KEY_MAP_H_
