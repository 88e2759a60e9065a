// SPDX-License-Identifier: Apache-2.0
// Applies name rules to the keys of a checkpoint. First every stored key is given to the first rule
// that matches it. Then, for each application of a rule, sizes are solved and the terms of both
// sides are paired by their names: that the pairs are complete proves that every cell is used once,
// without looking at single cells.
#include "index/records/name_binding.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "index/records/key_rule.h"
#include "index/records/layer_names.h"

namespace tensormount {
namespace {

using NameSet = std::set<std::string>;

Status BadMap(std::string message) {
  return Status(Code::kInvalidArgument, "name map: " + std::move(message));
}

Status BadMapRule(const NameRule& rule, const std::string& why) {
  return BadMap(rule.position + ": " + why);
}

std::string Joined(const NameSet& names) {
  std::string out;
  for (const std::string& name : names) {
    if (!out.empty()) out += ", ";
    out += name;
  }
  return out.empty() ? "no names" : out;
}

// The indices of a side's key that are not in every key of the rule, in the order of the key.
std::vector<std::string> KeyNamesOf(const NameRule& rule, const NameRule::Side& side) {
  std::vector<std::string> names;
  for (const KeyPattern::Capture& capture : side.key.captures()) {
    if (!rule.group.contains(capture.name)) names.push_back(capture.name);
  }
  return names;
}

// Position of `indices` in row-major order of `sizes`, or nullopt outside of them.
std::optional<std::uint64_t> RowMajor(const Dims& sizes, const Dims& indices) {
  std::uint64_t at = 0;
  for (int i = 0; i < sizes.rank(); ++i) {
    if (indices[i] >= sizes[i]) return std::nullopt;
    at = at * static_cast<std::uint64_t>(sizes[i]) + static_cast<std::uint64_t>(indices[i]);
  }
  return at;
}

Dims IndicesAt(const Dims& sizes, std::uint64_t at) {
  Dims indices = Dims::Filled(sizes.rank(), 0);
  for (int i = sizes.rank(); i-- > 0;) {
    const auto size = static_cast<std::uint64_t>(sizes[i]);
    indices[i] = static_cast<std::int64_t>(at % size);
    at /= size;
  }
  return indices;
}

// One stored tensor that a rule uses.
struct Match {
  std::uint32_t ordinal = 0;
  Dims indices;  // Of KeyNamesOf.
};

// The stored tensors of one application of a rule. All of one source have the same shape.
struct Matches {
  std::map<std::string, std::string, std::less<>> captures;  // Those of NameRule::group.
  std::vector<std::vector<Match>> sources;                   // By side.
  std::vector<Dims> shapes;
  DType dtype = DType::kU8;
  std::string first_key;  // For messages.
};

// The key of a side with the captures of an application and these indices.
std::string SideKey(const NameRule& rule, const NameRule::Side& side,
                    const std::map<std::string, std::string, std::less<>>& captures,
                    const Dims& indices) {
  std::vector<std::string> filled;
  int next = 0;
  for (const KeyPattern::Capture& capture : side.key.captures()) {
    if (rule.group.contains(capture.name)) {
      filled.push_back(captures.find(capture.name)->second);
    } else {
      filled.push_back(std::to_string(indices[next++]));
    }
  }
  return side.key.Fill(filled);
}

// A term of one side with the indices of its key.
struct NamedTerm {
  std::uint32_t side = 0;
  AxisTerm term;
};

}  // namespace

class Binder {
 public:
  Binder(const CheckpointIndex& index, const NameRules& rules, std::span<const std::string> lost)
      : index_(index), rules_(rules), lost_(lost), binding_(new NameBinding) {}

  Result<std::shared_ptr<const NameBinding>> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(rules_.FindNumbers(index_));
    TENSORMOUNT_RETURN_IF_ERROR(rules_.ExpandSlots());
    TENSORMOUNT_RETURN_IF_ERROR(SelectRules());
    TENSORMOUNT_RETURN_IF_ERROR(MatchTensors());
    TENSORMOUNT_RETURN_IF_ERROR(CheckLost());
    for (std::size_t r = 0; r < rules_.rules.size(); ++r) {
      TENSORMOUNT_RETURN_IF_ERROR(ApplyRule(r));
    }
    for (std::size_t r = 0; r < rules_.rules.size(); ++r) {
      if (applies_[r] && rules_.rules[r].kind == NameRule::Kind::kAlias) {
        TENSORMOUNT_RETURN_IF_ERROR(ApplyAlias(rules_.rules[r]));
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(SortTargets());
    if (lost_.empty()) TENSORMOUNT_RETURN_IF_ERROR(CheckComplete());
    TENSORMOUNT_RETURN_IF_ERROR(NameObjects());
    TENSORMOUNT_RETURN_IF_ERROR(NameLayers());
    // Spans into vectors that no longer move.
    for (NameBinding::Application& application : binding_->applications_) {
      std::size_t at = 0;
      for (const Dims& sizes : application.rule->from_key_sizes) {
        const auto count = static_cast<std::size_t>(*CheckedProduct(sizes));
        application.sources.push_back({std::span(application.ordinals).subspan(at, count), sizes});
        at += count;
      }
    }
    binding_->rules_ = std::move(rules_);
    return std::shared_ptr<const NameBinding>(std::move(binding_));
  }

 private:
  using SizedRule = NameBinding::SizedRule;

  // Which rules apply with these numbers.
  Status SelectRules() {
    matches_.resize(rules_.rules.size());
    used_.resize(rules_.rules.size());
    for (const NameRule& rule : rules_.rules) {
      bool applies = true;
      for (const auto& [name, value] : rule.when) {
        const auto it = rules_.numbers.find(name);
        if (it == rules_.numbers.end()) return UnknownNumber(rule, name);
        applies = applies && it->second == value;
      }
      applies_.push_back(applies);
    }
    return Status();
  }

  std::uint32_t NumberOf(const NameRule& rule) const {
    return static_cast<std::uint32_t>(&rule - rules_.rules.data());
  }

  Status UnknownNumber(const NameRule& rule, const std::string& name) const {
    std::string places;
    const auto found = rules_.sources.find(name);
    if (found != rules_.sources.end()) {
      for (const std::string& place : found->second) {
        places += (places.empty() ? " (looked for " : ", ") + place;
      }
      places += ")";
    }
    return BadMapRule(rule,
                      name + " is not known" + places + ": give it by --set " + name + "=NUMBER");
  }

  Status MatchTensors() {
    Status failure;
    TENSORMOUNT_RETURN_IF_ERROR(index_.ForEachTensor(0, [&](const TensorEntry& entry) {
      failure = MatchTensor(entry);
      return failure.ok();
    }));
    return failure;
  }

  // Fails if a lost tensor belongs to an application of a rule that has other tensors: a stack
  // would silently be shorter.
  Status CheckLost() {
    for (const std::string& key : lost_) {
      const std::optional<std::size_t> r = rules_.RuleFor(key);
      if (r) lost_rules_.insert(*r);
      if (!r || !rules_.Splits(key)) continue;
      const NameRule& rule = rules_.rules[*r];
      for (const NameRule::Side& side : rule.from) {
        const auto captures = side.key.Match(key);
        if (!captures) continue;
        const auto found = matches_[*r].find(GroupOf(rule, side, *captures));
        if (found == matches_[*r].end()) break;
        return Status(Code::kDataLoss, "name map: " + rule.position + " needs tensor " + key +
                                           " beside " + found->second.first_key +
                                           ", and it is lost");
      }
    }
    return {};
  }

  // The captures that all keys of the rule have, as one text. In the order of their names, which is
  // the same for all sides.
  static std::string GroupOf(const NameRule& rule, const NameRule::Side& side,
                             std::span<const std::string_view> captures) {
    const auto& names = side.key.captures();
    std::string group;
    for (const std::string& name : rule.group) {
      const auto c = std::find_if(names.begin(), names.end(),
                                  [&](const auto& capture) { return capture.name == name; });
      group += captures[static_cast<std::size_t>(c - names.begin())];
      group += '\0';  // Keys have none.
    }
    return group;
  }

  // Counts a comparison of a key with a pattern.
  Status Compare(const std::string& key) {
    compared_ += key.size();
    if (compared_ <= NameBinding::kMaxCompared) return {};
    return Status(Code::kResourceExhausted,
                  "name map: too many keys and rules: their comparison would take too long");
  }

  Status MatchTensor(const TensorEntry& entry) {
    const std::string& key = entry.meta.key();
    for (std::size_t r = 0; r < rules_.rules.size(); ++r) {
      const NameRule& rule = rules_.rules[r];
      if (!applies_[r] || rule.kind == NameRule::Kind::kAlias) continue;
      TENSORMOUNT_RETURN_IF_ERROR(Compare(key));
      if (rule.kind == NameRule::Kind::kKeys) {
        std::optional<RenamedKey> renamed = ApplyKeyRule(rule.keys, key);
        if (!renamed) continue;
        if (renamed->dropped) return Status();
        return AddWhole(std::move(renamed->name), entry.ordinal, key, r);
      }
      for (std::size_t s = 0; s < rule.from.size(); ++s) {
        const auto captures = rule.from[s].key.Match(key);
        if (!captures) continue;
        if (rule.kind == NameRule::Kind::kReplaced) {
          used_[rule.replaces] = true;
          return CheckReplaced(rule, key);
        }
        TENSORMOUNT_RETURN_IF_ERROR(CheckSlot(rule, entry));
        return AddMatch(r, s, *captures, entry);
      }
    }
    switch (rules_.others) {
      case NameRules::Others::kKeep:
        return AddWhole(key, entry.ordinal, key);
      case NameRules::Others::kDrop:
        return Status();
      case NameRules::Others::kRefuse:
        break;
    }
    return BadMap("no rule matches tensor " + key +
                  "; a rule {\"drop\": …} leaves tensors out, and \"others\" says what happens to "
                  "the rest")
        .With({.key = key});
  }

  // Fails unless a slot takes the place of the tensor `key`, which is left out.
  Status CheckReplaced(const NameRule& rule, const std::string& key) const {
    for (const NameRule::SlotKey& form : rule.slot) {
      const Result<TensorEntry> found = index_.Find(form.before + key + form.after);
      if (found.ok()) return {};
      if (found.status().code() != Code::kNotFound) return found.status();
    }
    const NameRule::SlotKey& form = rule.slot[0];
    return BadMapRule(rule, form.before + key + form.after + " is to take the place of " + key +
                                ", and is not stored");
  }

  // A tensor of a slot has the shape of the tensor to which it belongs, if that is stored.
  Status CheckSlot(const NameRule& rule, const TensorEntry& entry) const {
    if (rule.slot.empty()) return {};
    const std::string& key = entry.meta.key();
    const std::size_t begin = rule.slot[0].before.size();
    const std::string of = key.substr(begin, key.size() - begin - rule.slot[0].after.size());
    const Result<TensorEntry> found = index_.Find(of);
    if (found.status().code() == Code::kNotFound) return {};
    TENSORMOUNT_RETURN_IF_ERROR(found.status());
    if (found.value().meta.shape() == entry.meta.shape()) return {};
    return BadMapRule(rule, key + " has shape " + entry.meta.shape().ToString() + ", but " + of +
                                " has " + found.value().meta.shape().ToString());
  }

  Status AddTarget(NameBinding::Target target, const std::string& from) {
    if (const Status legal = CheckKey(target.key); !legal.ok()) {
      return BadMap(from + " becomes \"" + target.key +
                    "\", which is not a valid key: " + legal.message());
    }
    if (binding_->targets_.size() == NameBinding::kMaxTargets) {
      return BadMap("more than " + std::to_string(NameBinding::kMaxTargets) + " tensors");
    }
    keys_bytes_ += target.key.size();
    if (keys_bytes_ > NameBinding::kMaxKeysBytes) {
      return Status(Code::kResourceExhausted, "name map: the keys have more than " +
                                                  std::to_string(NameBinding::kMaxKeysBytes) +
                                                  " bytes");
    }
    binding_->targets_.push_back(std::move(target));
    return Status();
  }

  Status AddWhole(std::string name, std::uint32_t ordinal, const std::string& from,
                  std::size_t rule = NameBinding::kNoRule) {
    return AddTarget(
        {.key = std::move(name), .index = ordinal, .rule = static_cast<std::uint32_t>(rule)}, from);
  }

  // Gives a stored tensor to an application of rule `r`.
  Status AddMatch(std::size_t r, std::size_t side, std::span<const std::string_view> captures,
                  const TensorEntry& entry) {
    const NameRule& rule = rules_.rules[r];
    const auto& names = rule.from[side].key.captures();
    Match match{.ordinal = entry.ordinal, .indices = {}};
    for (std::size_t c = 0; c < names.size(); ++c) {
      if (rule.group.contains(names[c].name)) continue;
      match.indices.push_back(*KeyPattern::IndexOf(captures[c]));
    }
    const auto [it, fresh] = matches_[r].try_emplace(GroupOf(rule, rule.from[side], captures));
    Matches& matches = it->second;
    if (fresh) {
      matches.sources.resize(rule.from.size());
      matches.shapes.resize(rule.from.size());
      matches.dtype = entry.meta.dtype();
      matches.first_key = entry.meta.key();
      for (std::size_t c = 0; c < names.size(); ++c) {
        if (rule.group.contains(names[c].name)) matches.captures[names[c].name] = captures[c];
      }
    }
    const std::string& key = entry.meta.key();
    if (entry.meta.dtype() != matches.dtype) {
      return BadMapRule(rule, key + " is " + std::string(InfoOf(entry.meta.dtype()).name) +
                                  ", but " + matches.first_key + " is " +
                                  std::string(InfoOf(matches.dtype).name));
    }
    if (matches.sources[side].empty()) {
      matches.shapes[side] = entry.meta.shape();
    } else if (!(matches.shapes[side] == entry.meta.shape())) {
      return BadMapRule(rule, key + " has shape " + entry.meta.shape().ToString() +
                                  ", but tensors beside it have " +
                                  matches.shapes[side].ToString());
    }
    matches.sources[side].push_back(std::move(match));
    return Status();
  }

  Status ApplyRule(std::size_t r) {
    const NameRule& rule = rules_.rules[r];
    if (!applies_[r] || rule.kind != NameRule::Kind::kAxes) return Status();
    const bool other_form = rule.second_form && used_[r - 1];
    const bool second_follows = r + 1 < rules_.rules.size() && rules_.rules[r + 1].second_form;
    used_[r] = used_[r] || !matches_[r].empty();
    if (!used_[r] && !rule.optional && !other_form && !second_follows && !lost_rules_.contains(r)) {
      return Status(Code::kNotFound, "name map: " + rule.position + " needs " +
                                         rule.from[0].key.text() +
                                         ", which is not stored; \"optional\": true allows that");
    }
    for (auto& [group, matches] : matches_[r]) {
      TENSORMOUNT_RETURN_IF_ERROR(Apply(rule, matches));
    }
    matches_[r].clear();
    return Status();
  }

  Status Apply(const NameRule& rule, Matches& matches) {
    for (std::size_t s = 0; s < rule.from.size(); ++s) {
      if (!matches.sources[s].empty()) continue;
      return Status(Code::kNotFound, "name map: " + rule.position + " needs " +
                                         rule.from[s].key.text() + " beside " + matches.first_key +
                                         ", which is not stored");
    }
    for (const NameRule::Side& side : rule.from) patterns_.try_emplace(side.key.text());
    if (!rule.from[0].axes) {  // A rename with captures.
      Count(rule, rule.to[0], matches.captures, Dims());
      return AddWhole(SideKey(rule, rule.to[0], matches.captures, Dims()),
                      matches.sources[0][0].ordinal, matches.first_key, NumberOf(rule));
    }
    if (InfoOf(matches.dtype).bits % 8 != 0) {
      return Status(Code::kUnsupported, "name map: " + rule.position + ": " + matches.first_key +
                                            " is " + std::string(InfoOf(matches.dtype).name) +
                                            ": elements below one byte cannot be mapped");
    }
    AxisSizes sizes;
    TENSORMOUNT_RETURN_IF_ERROR(SolveSizes(rule, matches, sizes));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const SizedRule> sized,
                                 SizedRuleOf(rule, sizes, matches.first_key));
    for (const SizedRule::Target& target : sized->to) {
      if (const Status legal = CheckShape(matches.dtype, target.shape); !legal.ok()) {
        return BadMapRule(rule, matches.first_key + ": " + legal.message());
      }
    }
    return AddApplication(rule, sized, matches);
  }

  static NameSet NamesOf(const NameRule& rule) {
    NameSet names = rule.NamesOfAxes();
    for (const auto* sides : {&rule.from, &rule.to}) {
      for (const NameRule::Side& side : *sides) {
        for (std::string& name : KeyNamesOf(rule, side)) names.insert(std::move(name));
      }
    }
    return names;
  }

  // Finds the size of every name: from numbers, formulas, indices of keys, and shapes.
  Status SolveSizes(const NameRule& rule, const Matches& matches, AxisSizes& sizes) {
    const NameSet names = NamesOf(rule);
    for (std::size_t s = 0; s < rule.from.size(); ++s) {
      TENSORMOUNT_RETURN_IF_ERROR(CountIndices(rule, rule.from[s], matches.sources[s], sizes));
    }
    for (const std::string& name : names) {
      const auto it = rules_.numbers.find(name);
      if (it != rules_.numbers.end())
        TENSORMOUNT_RETURN_IF_ERROR(SetSize(rule, name, it->second, sizes));
    }
    std::map<std::string, const SizeFormula*> formulas;
    for (const auto* all :
         {&std::as_const(rules_.sizes), &rule.sizes}) {  // The rule's own come last and win.
      for (const auto& [name, formula] : *all) {
        if (names.contains(name) || all == &rule.sizes) formulas[name] = &formula;
      }
    }
    std::string unknown;  // A number that a formula needs; one with places, if there is one.
    std::size_t before = SIZE_MAX;
    while (sizes.size() != before) {
      before = sizes.size();
      AxisSizes known = rules_.numbers;
      known.insert(sizes.begin(), sizes.end());
      unknown.clear();
      for (const auto& [name, formula] : formulas) {
        const Result<std::int64_t> value = formula->Evaluate(known);
        if (value.status().code() == Code::kNotFound) {
          const std::string needed = value.status().message();
          if (unknown.empty() || rules_.sources.contains(needed)) unknown = needed;
          continue;
        }
        if (!value.ok())
          return BadMapRule(rule, "size of " + name + ": " + value.status().message());
        TENSORMOUNT_RETURN_IF_ERROR(SetSize(rule, name, value.value(), sizes));
      }
      for (std::size_t s = 0; s < rule.from.size(); ++s) {
        const Status learned = rule.from[s].axes->LearnSizes(matches.shapes[s], sizes);
        if (!learned.ok()) {
          return BadMapRule(rule, matches.first_key + ": " + learned.message());
        }
      }
    }
    for (const std::string& name : names) {
      if (sizes.contains(name)) continue;
      const auto missing = std::ranges::find_if(names, [&](const std::string& other) {
        return !sizes.contains(other) && rules_.sources.contains(other);
      });
      if (missing != names.end()) return UnknownNumber(rule, *missing);
      if (!unknown.empty()) return UnknownNumber(rule, unknown);
      return BadMapRule(rule,
                        "the size of " + name +
                            " does not follow from the shapes: give it under \"sizes\", or by "
                            "--set " +
                            name + "=NUMBER");
    }
    // Numbers and formulas may name other things than this rule's axes.
    std::erase_if(sizes, [&](const auto& size) { return !names.contains(size.first); });
    for (const auto& [name, number] : rules_.counts) {
      const auto size = sizes.find(name);
      if (size != sizes.end()) {
        TENSORMOUNT_RETURN_IF_ERROR(CheckCount(name, size->second, matches.first_key));
      }
    }
    return Status();
  }

  // NameRules::counts: all have as many, and as many as the number says.
  Status CheckCount(const std::string& name, std::int64_t count, const std::string& where) {
    const auto& number = rules_.counts.find(name)->second;
    const auto known = rules_.numbers.find(number);
    if (known != rules_.numbers.end() && known->second != count) {
      return BadMap(where + " has " + std::to_string(count) + " " + number + ", and " + number +
                    " is " + std::to_string(known->second) +
                    " by the configuration or a number that was given");
    }
    const auto [first, fresh] = counts_.try_emplace(name, count, where);
    if (fresh || first->second.first == count) return Status();
    return BadMap(where + " has " + std::to_string(count) + " " + number + ", and " +
                  first->second.second + " has " + std::to_string(first->second.first));
  }

  // Counts a mapped tensor for CheckComplete.
  void Count(const NameRule& rule, const NameRule::Side& side,
             const std::map<std::string, std::string, std::less<>>& captures, const Dims& indices) {
    Pattern& pattern = patterns_[side.key.text()];
    int next = 0;
    for (const KeyPattern::Capture& capture : side.key.captures()) {
      const bool grouped = rule.group.contains(capture.name);
      const std::optional<std::int64_t> index =
          grouped ? KeyPattern::IndexOf(captures.find(capture.name)->second)
                  : std::optional(indices[next]);
      if (!grouped) ++next;
      if (!index || !rules_.counts.contains(capture.name)) {
        pattern.counted = false;
      } else {
        std::int64_t& size = pattern.sizes[capture.name];
        size = std::max(size, *index + 1);
      }
    }
    ++pattern.tensors;
  }

  // NameRules::counts and NameRules::needs.
  Status CheckComplete() {
    for (const auto& [text, pattern] : patterns_) {
      if (!pattern.counted || pattern.sizes.empty()) continue;
      std::uint64_t all = 1;
      for (const auto& [name, size] : pattern.sizes) {
        TENSORMOUNT_RETURN_IF_ERROR(CheckCount(name, size, text));
        all = std::min<std::uint64_t>(all * static_cast<std::uint64_t>(size), UINT32_MAX);
      }
      if (all != pattern.tensors) {
        return BadMap(std::to_string(pattern.tensors) + " tensors would be called " + text +
                      ", but their indices need " + std::to_string(all) + ": one is not stored");
      }
    }
    for (const std::vector<std::string>& forms : rules_.needs) {
      if (std::ranges::any_of(forms, [&](const auto& form) { return patterns_.contains(form); })) {
        continue;
      }
      std::string text;
      for (const std::string& form : forms) text += (text.empty() ? "" : " or ") + form;
      return Status(Code::kNotFound,
                    "name map: no stored tensor belongs to " + text + ", which the model needs");
    }
    return Status();
  }

  static Status SetSize(const NameRule& rule, const std::string& name, std::int64_t size,
                        AxisSizes& sizes) {
    const auto [it, fresh] = sizes.emplace(name, size);
    if (fresh || it->second == size) return Status();
    return BadMapRule(rule, name + " is " + std::to_string(it->second) +
                                " by the keys or shapes, and " + std::to_string(size) +
                                " by a number or formula");
  }

  // The sizes of the indices in the keys of one source. Each combination must be stored.
  static Status CountIndices(const NameRule& rule, const NameRule::Side& side,
                             const std::vector<Match>& matches, AxisSizes& sizes) {
    const std::vector<std::string> names = KeyNamesOf(rule, side);
    std::uint64_t all = 1;
    for (std::size_t i = 0; i < names.size(); ++i) {
      std::int64_t size = 0;
      for (const Match& match : matches) {
        size = std::max(size, match.indices[static_cast<int>(i)] + 1);
      }
      TENSORMOUNT_RETURN_IF_ERROR(SetSize(rule, names[i], size, sizes));
      // Below 2^31 each, and the product stops growing once it exceeds the number of tensors.
      all = std::min<std::uint64_t>(all * static_cast<std::uint64_t>(size), UINT32_MAX);
    }
    if (all != matches.size()) {
      return BadMapRule(rule, std::to_string(matches.size()) + " tensors match " + side.key.text() +
                                  ", but their indices need " + std::to_string(all));
    }
    return Status();
  }

  // All terms of the sides, by their names.
  static Result<std::map<NameSet, NamedTerm>> TermsOf(const NameRule& rule,
                                                      const std::vector<NameRule::Side>& sides,
                                                      const AxisSizes& sizes) {
    std::map<NameSet, NamedTerm> all;
    for (std::size_t s = 0; s < sides.size(); ++s) {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<AxisTerm> terms, sides[s].axes->Terms(sizes));
      const std::vector<std::string> in_key = KeyNamesOf(rule, sides[s]);
      for (AxisTerm& term : terms) {
        NameSet names(in_key.begin(), in_key.end());
        for (const AxisTerm::Digit& digit : term.digits) names.insert(digit.name);
        if (names.size() != in_key.size() + term.digits.size()) {
          return Status(Code::kInvalidArgument,
                        "a name of " + Joined(names) + " is in the key and among the axes");
        }
        const auto [it, fresh] =
            all.emplace(names, NamedTerm{static_cast<std::uint32_t>(s), std::move(term)});
        if (!fresh) {
          return Status(Code::kInvalidArgument,
                        "the names " + Joined(names) + " occur twice on one side");
        }
      }
    }
    return all;
  }

  Result<std::shared_ptr<const SizedRule>> SizedRuleOf(const NameRule& rule, const AxisSizes& sizes,
                                                       const std::string& first_key) {
    std::string known_as = std::to_string(NumberOf(rule));
    for (const auto& [name, size] : sizes) known_as += "," + std::to_string(size);
    std::shared_ptr<const SizedRule>& known = sized_[known_as];
    if (known) return known;
    Result<SizedRule> made = MakeSizedRule(rule, sizes);
    if (!made.ok()) {
      return Status(made.status().code(), "name map: " + rule.position + ": " + first_key + ": " +
                                              made.status().message());
    }
    known = std::make_shared<const SizedRule>(std::move(made).value());
    return known;
  }

  // Pairs the terms of both sides.
  Result<SizedRule> MakeSizedRule(const NameRule& rule, const AxisSizes& sizes) {
    const auto key_sizes = [&](const NameRule::Side& side) {
      Dims out;
      for (const std::string& name : KeyNamesOf(rule, side)) {
        out.push_back(sizes.find(name)->second);
      }
      return out;
    };
    const auto unused = [&](const NameSet& names) {
      return std::any_of(names.begin(), names.end(),
                         [&](const std::string& name) { return rule.unused.contains(name); });
    };
    SizedRule sized;
    for (const NameRule::Side& side : rule.from) sized.from_key_sizes.push_back(key_sizes(side));
    for (const NameRule::Side& side : rule.to) {
      SizedRule::Target& target = sized.to.emplace_back();
      TENSORMOUNT_ASSIGN_OR_RETURN(target.shape, side.axes->ShapeOf(sizes));
      target.key_sizes = key_sizes(side);
    }
    using Terms = std::map<NameSet, NamedTerm>;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Terms from, TermsOf(rule, rule.from, sizes));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Terms to, TermsOf(rule, rule.to, sizes));
    terms_ += from.size() + to.size();
    if (terms_ > NameBinding::kMaxAllTerms) {
      return Status(Code::kResourceExhausted, "the rules have more than " +
                                                  std::to_string(NameBinding::kMaxAllTerms) +
                                                  " combinations of summands");
    }
    for (const auto& [names, term] : from) {
      if (to.contains(names) || unused(names)) continue;
      return Status(Code::kInvalidArgument,
                    "no tensor under \"to\" has the cells of " + Joined(names) +
                        "; to leave them out, name one of these under \"unused\"");
    }
    for (const auto& [names, term] : to) {
      const auto pair = from.find(names);
      const bool zeros = pair == from.end();
      if (zeros && !unused(names)) {
        return Status(Code::kInvalidArgument,
                      "no tensor under \"from\" has the cells of " + Joined(names) +
                          "; to fill them with zeros, name one of these under \"unused\"");
      }
      const std::vector<std::string> to_key = KeyNamesOf(rule, rule.to[term.side]);
      std::vector<std::string> from_key;
      if (!zeros) from_key = KeyNamesOf(rule, rule.from[pair->second.side]);
      TENSORMOUNT_ASSIGN_OR_RETURN(
          CellTerm cells, CellTerm::Make(term.term, to_key, zeros ? nullptr : &pair->second.term,
                                         from_key, zeros ? 0 : pair->second.side, sizes));
      sized.to[term.side].terms.push_back(std::move(cells));
    }
    MarkWhole(from, sized);
    return sized;
  }

  // Finds targets that are one whole stored tensor each.
  static void MarkWhole(const std::map<NameSet, NamedTerm>& from, SizedRule& sized) {
    for (SizedRule::Target& target : sized.to) {
      if (target.terms.size() != 1 || !target.terms[0].IsIdentity()) continue;
      const std::uint32_t source = target.terms[0].source;
      const auto terms = std::count_if(
          from.begin(), from.end(), [&](const auto& term) { return term.second.side == source; });
      // The identity has no indices in its keys. Of several terms, only one is the target.
      if (terms == 1 && target.key_sizes.rank() == 0) target.whole = source;
    }
  }

  Status AddApplication(const NameRule& rule, const std::shared_ptr<const SizedRule>& sized,
                        Matches& matches) {
    NameBinding::Application application;
    application.rule = sized;
    for (std::size_t s = 0; s < rule.from.size(); ++s) {
      const Dims& key_sizes = sized->from_key_sizes[s];
      std::vector<std::uint32_t> ordinals(matches.sources[s].size(), UINT32_MAX);
      for (const Match& match : matches.sources[s]) {
        // CountIndices has checked that there are as many matches as combinations of indices, and
        // keys are unique, so that each combination occurs once.
        ordinals[*RowMajor(key_sizes, match.indices)] = match.ordinal;
      }
      application.ordinals.insert(application.ordinals.end(), ordinals.begin(), ordinals.end());
    }
    const auto number = static_cast<std::uint32_t>(binding_->applications_.size());
    bool used = false;
    for (std::size_t t = 0; t < rule.to.size(); ++t) {
      const SizedRule::Target& target = sized->to[t];
      const std::optional<std::int64_t> count = CheckedProduct(target.key_sizes);
      if (!count || static_cast<std::uint64_t>(*count) > NameBinding::kMaxTargets) {
        return BadMapRule(rule,
                          "more than " + std::to_string(NameBinding::kMaxTargets) + " tensors");
      }
      for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(*count); ++i) {
        NameBinding::Target made;
        made.rule = NumberOf(rule);
        made.key = SideKey(rule, rule.to[t], matches.captures, IndicesAt(target.key_sizes, i));
        Count(rule, rule.to[t], matches.captures, IndicesAt(target.key_sizes, i));
        if (target.whole) {
          made.index = matches.sources[*target.whole][0].ordinal;
        } else {
          made.application = number;
          made.part = static_cast<std::uint32_t>(t);
          made.index = i;
          used = true;
        }
        TENSORMOUNT_RETURN_IF_ERROR(AddTarget(std::move(made), matches.first_key));
      }
    }
    if (used) binding_->applications_.push_back(std::move(application));
    return Status();
  }

  Status ApplyAlias(const NameRule& rule) {
    std::vector<NameBinding::Target> aliases;
    for (const NameBinding::Target& target : binding_->targets_) {
      TENSORMOUNT_RETURN_IF_ERROR(Compare(target.key));
      const auto captures = rule.from[0].key.Match(target.key);
      if (!captures) continue;
      std::map<std::string, std::string, std::less<>> values;
      const auto& names = rule.from[0].key.captures();
      for (std::size_t c = 0; c < names.size(); ++c) values[names[c].name] = (*captures)[c];
      NameBinding::Target alias = target;
      alias.rule = NumberOf(rule);
      alias.key = SideKey(rule, rule.to[0], values, Dims());
      aliases.push_back(std::move(alias));
    }
    if (aliases.empty()) {
      if (rule.optional) return {};
      return Status(Code::kNotFound, "name map: " + rule.position + ": no tensor is called " +
                                         rule.from[0].key.text());
    }
    if (rule.optional && known_.empty()) {
      for (const NameBinding::Target& target : binding_->targets_) known_.insert(target.key);
    }
    for (NameBinding::Target& alias : aliases) {
      if (rule.optional && known_.contains(alias.key)) continue;
      if (!known_.empty()) known_.insert(alias.key);
      TENSORMOUNT_RETURN_IF_ERROR(AddTarget(std::move(alias), rule.position));
    }
    return Status();
  }

  Status SortTargets() {
    std::vector<NameBinding::Target>& targets = binding_->targets_;
    // A stable sort, so that messages name two tensors always in the same order.
    std::stable_sort(targets.begin(), targets.end(),
                     [](const auto& a, const auto& b) { return a.key < b.key; });
    const auto twice =
        std::adjacent_find(targets.begin(), targets.end(),
                           [](const auto& a, const auto& b) { return a.key == b.key; });
    if (twice == targets.end()) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string first, SourceText(*twice));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string second, SourceText(*(twice + 1)));
    return BadMap(first + " and " + second + " would both be called " + twice->key);
  }

  // The key of the first stored tensor of a target, for messages.
  Result<std::string> SourceText(const NameBinding::Target& target) const {
    const std::uint32_t ordinal = target.application == NameBinding::kWhole
                                      ? target.index
                                      : binding_->applications_[target.application].ordinals[0];
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, index_.At(ordinal));
    return entry.meta.key();
  }

  Status NameObjects() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts, index_.Objects());
    std::string previous;
    for (const ObjectRecord& part : parts) {
      if (part.key == previous) continue;  // Parts of an object are neighbours.
      previous = part.key;
      std::string name = rules_.NameOf(part.key);
      if (name.empty()) continue;
      if (const Status legal = CheckKey(name); !legal.ok()) {
        return BadMap("object " + part.key + " becomes \"" + name +
                      "\", which is not a valid key: " + legal.message());
      }
      const std::uint32_t same = binding_->LowerBound(name);
      const bool is_tensor = same < binding_->size() && binding_->key(same) == name;
      const auto [it, fresh] = binding_->objects_.emplace(name, part.key);
      if (is_tensor || !fresh) {
        return BadMap("object " + part.key + " and " +
                      (is_tensor ? "a tensor" : "object " + it->second) + " would both be called " +
                      name);
      }
    }
    return Status();
  }

  // Layer names of stacks that are kept whole. A stack whose pattern is dropped, or no longer
  // valid, has no layer names.
  Status NameLayers() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const LayerNames> layers, index_.Layers());
    if (layers->empty()) return Status();
    for (std::uint32_t t = 0; t < binding_->size(); ++t) {
      const std::optional<std::uint32_t> whole = binding_->WholeSource(t);
      if (!whole) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, index_.At(*whole));
      const auto pattern = layers->patterns().find(entry.meta.key());
      if (pattern == layers->patterns().end()) continue;
      std::string name = rules_.NameOf(pattern->second);
      if (CheckLayerPattern(name).ok()) binding_->layers_.emplace_back(t, std::move(name));
    }
    return Status();
  }

  const CheckpointIndex& index_;
  NameRules rules_;  // With all numbers.
  std::span<const std::string> lost_;
  std::shared_ptr<NameBinding> binding_;
  std::vector<bool> applies_;
  std::vector<bool> used_;  // Whether a rule has matched a stored tensor.
  std::vector<std::map<std::string, Matches>> matches_;  // By rule; the key has the captures.
  std::unordered_map<std::string, std::shared_ptr<const SizedRule>> sized_;
  std::size_t terms_ = 0;  // Of all sized rules, on both sides.
  std::size_t keys_bytes_ = 0;
  std::uint64_t compared_ = 0;
  std::set<std::size_t> lost_rules_;  // Rules to which lost tensors belong.
  // A key pattern of rules that were used. `counted`: all its captures are in NameRules::counts.
  struct Pattern {
    std::uint64_t tensors = 0;
    std::map<std::string, std::int64_t> sizes;  // By capture.
    bool counted = true;
  };
  std::map<std::string, Pattern> patterns_;  // By text.
  // By name: how many indices there are, and which tensor says so.
  std::map<std::string, std::pair<std::int64_t, std::string>> counts_;
  std::unordered_set<std::string> known_;  // Keys of targets, if an optional alias asked for them.
};

Result<std::shared_ptr<const NameBinding>> NameBinding::Bind(const CheckpointIndex& index,
                                                             const NameRules& rules,
                                                             std::span<const std::string> lost) {
  return Binder(index, rules, lost).Run();
}

std::optional<std::uint32_t> NameBinding::WholeSource(std::uint32_t ordinal) const {
  const Target& target = targets_[ordinal];
  return target.application == kWhole ? std::optional(target.index) : std::nullopt;
}

MappedTensor NameBinding::At(std::uint32_t ordinal) const {
  const Target& target = targets_[ordinal];
  const Application& application = applications_[target.application];
  const SizedRule::Target& sized = application.rule->to[target.part];
  return {sized.terms, IndicesAt(sized.key_sizes, target.index), application.sources};
}

std::optional<std::uint32_t> NameBinding::RuleOf(std::uint32_t ordinal) const {
  const std::uint32_t rule = targets_[ordinal].rule;
  return rule == kNoRule ? std::nullopt : std::optional(rule);
}

const Dims& NameBinding::ShapeOf(std::uint32_t ordinal) const {
  const Target& target = targets_[ordinal];
  return applications_[target.application].rule->to[target.part].shape;
}

std::uint32_t NameBinding::FirstSource(std::uint32_t ordinal) const {
  return applications_[targets_[ordinal].application].ordinals[0];
}

std::uint32_t NameBinding::LowerBound(std::string_view key) const {
  const auto it = std::ranges::lower_bound(targets_, key, {}, &Target::key);
  return static_cast<std::uint32_t>(it - targets_.begin());
}

}  // namespace tensormount
