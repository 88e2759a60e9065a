// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_NAME_RULES_H_
#define TENSORMOUNT_INDEX_RECORDS_NAME_RULES_H_

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/common_value.h"
#include "tensormount/key_map.h"
#include "tensormount/name_map.h"
#include "tensormount/status.h"

#include "index/records/key_pattern.h"
#include "index/records/size_formula.h"
#include "shard/axis_names.h"

namespace tensormount {

class CheckpointIndex;

// One rule of a name map (docs/mapping.md).
struct NameRule {
  enum class Kind {
    kKeys,   // {"key" | "prefix" | "match" | "drop"}: renames or drops (tensormount/key_map.h)
    kAxes,   // {"from", "to"}: cells of stored tensors are cells of mapped tensors
    kAlias,  // {"alias", "of"}: a mapped tensor has one more name
    // Tensors of `from` are left out, because others take their place (NameRules::Slot).
    kReplaced,
  } kind = Kind::kKeys;
  std::string position;  // For messages: "rules[3] (line 12)".
  KeyMap::Rule keys;     // For kKeys.
  // One tensor, or one tensor for each value of the captures in its key, and its axes. Without axes
  // the cells are those of the only other side.
  struct Side {
    KeyPattern key;
    std::optional<AxisNames> axes;
  };
  std::vector<Side> from;  // For kAlias: the mapped tensor.
  std::vector<Side> to;    // For kAlias: its other name.
  std::map<std::string, SizeFormula> sizes;
  // Names whose cells only one side has. Such cells of a stored tensor are left out; such cells of
  // a mapped tensor are zeros.
  std::set<std::string> unused;
  // Whether the rule may have no match, or, for an alias, a mapped tensor may have its name.
  bool optional = false;
  std::map<std::string, std::int64_t> when;  // The rule applies if all numbers have these values.
  // Whether the rule is for the tensors themselves, for those of slots, or for both.
  enum class Slots { kBoth, kOnly, kNone } slots = Slots::kBoth;
  bool back = true;  // Whether the inverse has the rule.
  // Whether this is the second form of the rule before it, which the file has once, with brackets.
  // One of the two must match.
  bool second_form = false;

  // The stored key of a slot is the text `before`, the key of the tensor, and the text `after`. A
  // rule of kind kAxes that has one is a slot's. For kReplaced: the keys of the tensors that take
  // the place; one of these forms must be stored.
  struct SlotKey {
    std::string before;
    std::string after;
  };
  std::vector<SlotKey> slot;
  std::size_t replaces = SIZE_MAX;  // For kReplaced: the position of the rule for these tensors.

  // The names of the axes of all sides.
  std::set<std::string> NamesOfAxes() const;

  // Whether a key of the rule has the index `name`.
  bool HasIndex(std::string_view name) const;

  // Names of captures that are in every key of the rule. Each combination of their values is one
  // application of the rule, with sizes of its own.
  std::set<std::string> group;
};

// A list of rules that gives the tensors of a checkpoint other names, and puts them together from
// parts of stored tensors. The first rule that matches a stored key applies. Immutable.
struct NameRules {
  // One name map that is applied first, or none. These rules apply to its result.
  std::vector<NameRules> base;
  // What happens to tensors that no rule matches. Objects are kept with kKeep and kRefuse.
  enum class Others { kKeep, kDrop, kRefuse } others = Others::kKeep;
  std::map<std::string, SizeFormula> sizes;  // For all rules.
  std::vector<NameRule> rules;
  // Sizes that are known before the rules are applied, such as the number of heads.
  AxisSizes numbers;
  // Where numbers that are not known are looked for, in this order: "config.PATH" is a member of
  // the model's config.json, "common.PATH" a common value of the checkpoint. "PLACE if PLACE"
  // counts only if the second place has a number that is not 0.
  std::map<std::string, std::vector<std::string>> sources;
  // Places whose number, if they have one, must be this one: the rules are wrong for other models.
  struct Guard {
    std::string place;
    std::int64_t expected = 0;
  };
  std::vector<Guard> guards;
  // The model's config.json; null: none was given.
  std::shared_ptr<const nlohmann::json> config;
  std::string model_type;  // Of config.json.
  // Common values that the trainer saved outside of the checkpoint; null: none.
  std::shared_ptr<const CommonDict> trainer_values;
  std::string trainer_problem;  // Why they cannot be read, if they exist.
  // Of a pack that is applied: whether the result is a whole model of Hugging Face, which needs a
  // config.json.
  bool makes_model = false;
  // How config.json is made if there is none (MadeConfig); null: it cannot be made.
  std::shared_ptr<const nlohmann::json> config_rules;

  // Of a rule pack: the family of models ("qwen3") and the trainer whose layout it reads
  // ("megatron"). Empty for a user's rules.
  std::string family;
  std::string layout;
  // Names of indices, such as that of layers, and the numbers that say how many there are. Each key
  // pattern with such a name has all its indices, from 0, or no tensor, and all rules have as many.
  std::map<std::string, std::string> counts;
  // Key patterns as rules have them, on either side: of each list one must have tensors.
  std::vector<std::vector<std::string>> needs;
  // Tensors that belong to others and have their shapes, such as an optimizer's moments. Each rule
  // with "from" and "to" applies to them, too. Texts have "{key}" for the key of the tensor.
  struct Slot {
    std::vector<std::string> from;  // Several forms; of a tensor, one is stored.
    // "{key}" alone: the slot takes the place of the tensor itself.
    std::string to;
    std::map<std::string, std::int64_t> when;
    std::string position;  // For messages: "slots[1]".
  };
  std::vector<Slot> slots;
  // A checkpoint has the layout if some key matches each pattern of `detect` and no key matches one
  // of `absent`. Several patterns in a row are forms of one, of which any may match.
  std::vector<std::vector<KeyPattern>> detect;
  std::vector<std::vector<KeyPattern>> absent;

  // The rules from the mapped names back to the stored ones, with `layers` one tensor for each
  // layer where the file allows both. What these rules drop does not come back.
  NameRules Inverse(bool layers) const;
  // Replaces `slots` by rules. Call it after FindNumbers: slots whose "when" does not hold are left
  // out.
  Status ExpandSlots();
  // Whether one of `keys` is that of a slot that takes the place of its tensor.
  bool HasReplacing(const std::vector<std::string>& keys) const;
  // Adds to `numbers` those that `sources` gives. kUnsupported: a guard does not hold.
  Status FindNumbers(const CheckpointIndex& index);

  // Limits that bound the work for a hostile file.
  static constexpr std::size_t kMaxBytes = std::size_t{4} << 20;
  static constexpr std::size_t kMaxRules = 1024;
  static constexpr std::size_t kMaxSides = 64;  // Of one side of a rule.
  static constexpr std::size_t kMaxSizes = 256;
  static constexpr std::size_t kMaxSlots = 32;  // With all their forms.
  static constexpr int kMaxBases = 3;           // One in another.

  // `json`: a list of rules, or an object with "version": 1 and "rules" (docs/mapping.md).
  // kInvalidArgument names the rule, its line and the field.
  static Result<NameRules> FromJson(std::string_view json);
  // The rules and numbers of `map`; null if it has no rules. kInvalidArgument: also a number that
  // no rule uses, unless a pack is applied afterwards, and a `config` that is not JSON, or has no
  // "model_type" (OLMo-core writes another file of that name).
  static Result<std::shared_ptr<const NameRules>> FromMap(const NameMap& map);
  // Adds those numbers of `map` that the rules use, and its config, also to `base`.
  Status AddGiven(const NameMap& map);
  // kInvalidArgument: `map` has a number that none of `all` uses.
  static Status CheckGiven(const NameMap& map, std::initializer_list<const NameRules*> all);
  // The "model_type" of a config.json; empty if it is not that of a model.
  static std::string ModelTypeOf(std::string_view config);

  // The new name of something that has a key and no cells: an object, a pattern of layer names, a
  // second name of a tied tensor, a tensor that is lost. Only rules for keys and renames without
  // axes apply. Empty: it is left out.
  std::string NameOf(std::string_view key) const;
  // Whether a rule with axes uses the tensor `key`, which then has no new name of its own.
  bool Splits(std::string_view key) const;
  // The position in `rules` of the rule that takes the stored tensor `key`; nullopt if none does.
  // Rules whose "when" does not hold for `numbers` are skipped.
  std::optional<std::size_t> RuleFor(std::string_view key) const;

  // The names that `--set` may give a number, with those of `base`.
  std::set<std::string> NamesOfNumbers() const;

 private:
  static Result<NameRules> FromParsed(const nlohmann::json& json,
                                      const std::vector<std::size_t>& lines, int depth);
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_NAME_RULES_H_
