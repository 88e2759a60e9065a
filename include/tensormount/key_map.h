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

// Rules that give keys other names: `--map RULES.json` of import, load, export and mount, and for
// programs. A list; the first rule that matches a key holds, other keys stay as they are.
//
//   [{"key": "lm_head.weight", "to": "output.weight"},      this key
//    {"prefix": "model.", "to": "decoder."},                keys that begin so
//    {"match": "layers.*.attn.*", "to": "blocks.*.self_attention.*"},  the n-th * of "to" is what
//                                                           the n-th * of "match" stood for
//    {"drop": "optimizer.*"}]                               left out
// Rules are tried in the order of the list and only one is applied, so the special goes before the
// general. '*' stands for any bytes, dots and slashes too, and takes as few as it can. A value;
// immutable once made, so it may be shared by threads.
class TENSORMOUNT_EXPORT KeyMap {
 public:
  struct Rule {
    enum class Kind { kKey, kPrefix, kMatch, kDrop } kind = Kind::kKey;
    std::string from;
    std::string to;  // Not of kDrop.
  };

  KeyMap() = default;  // Changes nothing.
  // kInvalidArgument names the rule that is not one: numbers of '*' that differ, an empty key,
  // unknown fields.
  static Result<KeyMap> FromJson(std::string_view json);
  static Result<KeyMap> Make(std::vector<Rule> rules);

  bool empty() const { return rules_.empty(); }
  const std::vector<Rule>& rules() const { return rules_; }
  // Whether a rule says something of a key, also that it stays.
  static bool Matches(const Rule& rule, std::string_view key);
  // The new name; empty where the key is dropped.
  std::string Apply(std::string_view key) const;

  // All keys of a checkpoint at once: for each, its new name (empty: dropped).
  // kInvalidArgument where two keys get the same name (names both), or a name that no key may have.
  Result<std::vector<std::string>> ApplyToAll(std::span<const std::string> keys) const;

 private:
  std::vector<Rule> rules_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_KEY_MAP_H_
