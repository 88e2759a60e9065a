// SPDX-License-Identifier: Apache-2.0
// RetentionRules of tensormount/retention.h (parsing and text), and Decide of retention.h. Pure
// functions: no file is read.
#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <tuple>

#include "base/counted.h"
#include "base/glob.h"
#include "index/store/retention.h"

namespace tensormount {
namespace {

constexpr std::string_view kGenerationsUnit = "-generations";
constexpr std::string_view kExpected = "expected a number above 0 and below 2^64";

Status BadRetentionRule(std::string_view rule, std::string_view why) {
  return Status(Code::kInvalidArgument,
                "rule \"" + std::string(rule.substr(0, 200)) + "\": " + std::string(why));
}

std::optional<std::uint64_t> CountOf(std::string_view text) {
  std::uint64_t n = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), n);
  if (text.empty() || end.ec != std::errc() || end.ptr != text.data() + text.size() || n == 0) {
    return std::nullopt;
  }
  return n;
}

Result<RetentionRules::Every> ParseEvery(std::string_view rule, std::string_view text) {
  RetentionRules::Every every;
  std::string_view number = text;
  if (text.ends_with(kGenerationsUnit)) {
    every.unit = RetentionRules::Every::Unit::kGenerations;
    number.remove_suffix(kGenerationsUnit.size());
  } else if (text.ends_with('h')) {
    every.unit = RetentionRules::Every::Unit::kHours;
    number.remove_suffix(1);
  }
  const std::optional<std::uint64_t> count = CountOf(number);
  if (!count) {
    return BadRetentionRule(rule, std::string(kExpected) +
                                      " of steps (1000), hours (6h) or generations "
                                      "(5-generations)");
  }
  // The number of seconds of a window must not overflow.
  if (every.unit == RetentionRules::Every::Unit::kHours && *count > 100'000'000) {
    return BadRetentionRule(rule, "at most 100000000 hours are allowed");
  }
  every.count = *count;
  return every;
}

// Parses METRIC:max|min:K from the right, because the path of a metric may contain colons.
Result<RetentionRules::Best> ParseBest(std::string_view rule, std::string_view text) {
  RetentionRules::Best best;
  const std::size_t last = text.rfind(':');
  const std::size_t first =
      last == std::string_view::npos || last == 0 ? last : text.rfind(':', last - 1);
  if (first == std::string_view::npos || first == 0 || last == first) {
    return BadRetentionRule(rule, "expected METRIC:max:K or METRIC:min:K");
  }
  const std::string_view how = text.substr(first + 1, last - first - 1);
  const std::optional<std::uint64_t> count = CountOf(text.substr(last + 1));
  if (how != "max" && how != "min")
    return BadRetentionRule(rule, "expected max or min before the number");
  if (!count) return BadRetentionRule(rule, std::string(kExpected) + " at the end");
  best.metric = std::string(text.substr(0, first));
  best.highest = how == "max";
  best.count = *count;
  return best;
}

// Splits rules at commas. A backslash makes the next character an ordinary one.
std::vector<std::string> CutRules(std::string_view text) {
  std::vector<std::string> rules(1);
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 1 < text.size()) {
      rules.back() += text[++i];
    } else if (text[i] == ',') {
      rules.emplace_back();
    } else {
      rules.back() += text[i];
    }
  }
  return rules;
}

}  // namespace

Result<RetentionRules> RetentionRules::Parse(std::string_view text) {
  RetentionRules rules;
  if (text.empty()) return rules;
  if (text == "policy") return OfStore();
  for (const std::string& rule : CutRules(text)) {
    const std::size_t equals = rule.find('=');
    const std::string_view word = std::string_view(rule).substr(0, equals);
    const std::string_view value = equals == std::string::npos
                                       ? std::string_view()
                                       : std::string_view(rule).substr(equals + 1);
    if (word == "last" && equals != std::string::npos) {
      const std::optional<std::uint64_t> count = CountOf(value);
      if (!count) return BadRetentionRule(rule, kExpected);
      if (rules.keep_last != 0)
        return BadRetentionRule(rule, "a rule of this kind was given before");
      rules.keep_last = *count;
    } else if (word == "every" && equals != std::string::npos) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Every every, ParseEvery(rule, value));
      rules.keep_every.push_back(every);
    } else if (word == "match" && equals != std::string::npos) {
      if (value.empty()) return BadRetentionRule(rule, "expected a pattern of names");
      if (!rules.match.empty())
        return BadRetentionRule(rule, "a rule of this kind was given before");
      rules.match = std::string(value);
    } else if (word == "best" && equals != std::string::npos) {
      TENSORMOUNT_ASSIGN_OR_RETURN(Best best, ParseBest(rule, value));
      rules.keep_best.push_back(std::move(best));
    } else {
      return BadRetentionRule(
          rule,
          "expected last=N, every=M, every=Mh, every=M-generations, best=METRIC:max|min:K or "
          "match=NAMES, separated by commas, or policy alone");
    }
  }
  if (rules.empty()) {
    return BadRetentionRule(
        "match=" + rules.match,
        "the rule only selects checkpoints: add a rule that keeps some of them");
  }
  return rules;
}

std::string RetentionRules::ToText() const {
  if (of_store) return "policy";
  std::string text;
  const auto add = [&](const std::string& rule) {
    if (!text.empty()) text += ',';
    text += rule;
  };
  const auto escaped = [](const std::string& word) {
    std::string out;
    for (const char c : word) {
      if (c == ',' || c == '\\') out += '\\';
      out += c;
    }
    return out;
  };
  if (!match.empty()) add("match=" + escaped(match));
  if (keep_last != 0) add("last=" + std::to_string(keep_last));
  for (const Every& every : keep_every) {
    add("every=" + std::to_string(every.count) +
        (every.unit == Every::Unit::kHours         ? std::string("h")
         : every.unit == Every::Unit::kGenerations ? std::string(kGenerationsUnit)
                                                   : std::string()));
  }
  for (const Best& best : keep_best) {
    add("best=" + escaped(best.metric) + (best.highest ? ":max:" : ":min:") +
        std::to_string(best.count));
  }
  return text;
}

std::uint64_t PruneReport::removed() const {
  return static_cast<std::uint64_t>(
      std::ranges::count_if(decisions, [](const Decision& d) { return d.removed; }));
}

std::vector<std::string> PruneReport::failures() const {
  std::vector<std::string> all;
  for (const Decision& d : decisions) {
    if (!d.failed.ok()) all.push_back(d.checkpoint + ": " + d.failed.ToString());
  }
  return all;
}

namespace retention {
namespace {

using Every = RetentionRules::Every;
using Best = RetentionRules::Best;

// Applies the rules to readable candidates that are neither ephemeral nor derived nor excluded by
// RetentionRules::match, sorted with the highest generation first. Several names of one checkpoint
// are neighbours and count as one, except for rules by steps.
class RetentionEvaluator {
  struct Group {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

 public:
  RetentionEvaluator(const RetentionRules& rules, const std::vector<Candidate>& counted)
      : rules_(rules), counted_(counted), reasons_(counted.size()) {
    for (std::size_t i = 0; i < counted.size(); ++i) {
      const bool same = i > 0 && counted[i].uuid == counted[i - 1].uuid &&
                        counted[i].generation == counted[i - 1].generation;
      if (!same) groups_.push_back({i, i});
      groups_.back().end = i + 1;
    }
    Last();
    for (const Every& every : rules.keep_every) {
      switch (every.unit) {
        case Every::Unit::kSteps:
          Steps(every.count);
          break;
        case Every::Unit::kGenerations:
          Generations(every.count);
          break;
        case Every::Unit::kHours:
          Hours(every.count);
          break;
      }
    }
    for (std::size_t i = 0; i < rules.keep_best.size(); ++i) BestOf(i);
  }
  // The reason why candidate i is kept. Empty if no rule keeps it.
  const std::string& reason(std::size_t i) const { return reasons_[i]; }

 private:
  void Keep(std::size_t i, const std::string& why) {
    if (!reasons_[i].empty()) reasons_[i] += "; ";
    reasons_[i] += why;
  }
  void KeepAll(const Group& group, const std::string& why) {
    for (std::size_t i = group.begin; i < group.end; ++i) Keep(i, why);
  }

  void Last() {
    for (std::size_t g = 0; g < groups_.size() && g < rules_.keep_last; ++g) {
      KeepAll(groups_[g], "one of the last " + std::to_string(rules_.keep_last));
    }
  }

  // The step number is taken from each name, because a copy of a checkpoint may have another name.
  void Steps(std::uint64_t count) {
    for (std::size_t i = 0; i < counted_.size(); ++i) {
      const std::optional<std::uint64_t> step = StepOf(counted_[i].name);
      if (!step) {
        Keep(i, "the name has no step number");
      } else if (*step % count == 0) {
        Keep(i, "step " + std::to_string(*step) + " is a multiple of " + std::to_string(count));
      }
    }
  }

  void Generations(std::uint64_t count) {
    std::optional<std::uint64_t> seen;
    for (const Group& group : groups_) {
      const std::uint64_t bucket = counted_[group.begin].generation / count;
      if (seen != bucket)
        KeepAll(group, "the newest in its window of " + Counted(count, "generation"));
      seen = bucket;
    }
  }

  // A window ends whenever its number changes, up or down. So clocks that run back make more
  // windows, which keep more checkpoints. A checkpoint with an unknown date is kept and belongs to
  // no window.
  void Hours(std::uint64_t count) {
    const auto seconds = static_cast<std::int64_t>(count) * 3600;
    std::optional<std::int64_t> seen;
    for (const Group& group : groups_) {
      const Candidate& c = counted_[group.begin];
      if (!c.opened.ok()) {
        KeepAll(group, "the date cannot be read: " + c.opened.message());
        continue;
      }
      const std::int64_t bucket = c.created / seconds - (c.created % seconds < 0 ? 1 : 0);
      if (seen != bucket) KeepAll(group, "the newest in its window of " + Counted(count, "hour"));
      seen = bucket;
    }
  }

  void BestOf(std::size_t rule) {
    const Best& best = rules_.keep_best[rule];
    std::vector<long double> values;
    for (const Group& group : groups_) {
      const Candidate& c = counted_[group.begin];
      if (!c.opened.ok()) {
        KeepAll(group, "the " + best.metric + " cannot be read: " + c.opened.message());
      } else if (c.metrics[rule].number) {
        values.push_back(*c.metrics[rule].number);
      } else {
        KeepAll(group, "the checkpoint " + c.metrics[rule].problem);
      }
    }
    if (values.empty()) return;
    const auto better = [&](long double a, long double b) { return best.highest ? a > b : a < b; };
    std::sort(values.begin(), values.end(), better);
    const std::size_t count =
        static_cast<std::size_t>(std::min<std::uint64_t>(best.count, values.size()));
    const long double worst = values[count - 1];
    const bool tied = count < values.size() && values[count] == worst;
    for (const Group& group : groups_) {
      const Candidate& c = counted_[group.begin];
      if (!c.opened.ok() || !c.metrics[rule].number) continue;
      const long double value = *c.metrics[rule].number;
      if (better(worst, value)) continue;
      KeepAll(group, "one of the " + std::to_string(best.count) + " with the " +
                         (best.highest ? "highest " : "lowest ") + best.metric +
                         (tied && value == worst ? " (tied)" : ""));
    }
  }

  const RetentionRules& rules_;
  const std::vector<Candidate>& counted_;
  std::vector<Group> groups_;
  std::vector<std::string> reasons_;
};

PruneReport::Decision DecisionOn(const Candidate& c) {
  PruneReport::Decision d;
  d.checkpoint = c.name;
  d.uuid = c.uuid.ToString();
  d.generation = c.generation;
  return d;
}

}  // namespace

std::vector<std::string> UnmetRules(const RetentionRules& rules,
                                    const std::vector<Candidate>& candidates) {
  std::vector<std::string> notes;
  for (std::size_t i = 0; i < rules.keep_best.size(); ++i) {
    const Best& best = rules.keep_best[i];
    std::uint64_t without = 0;
    bool any = false;
    for (const Candidate& c : candidates) {
      if (!c.problem.ok() || c.ephemeral || c.derived || !c.opened.ok()) continue;
      if (!rules.match.empty() && !GlobMatches(rules.match, c.name)) continue;
      any = any || c.metrics[i].number.has_value();
      without += c.metrics[i].number ? 0 : 1;
    }
    if (any || without == 0) continue;
    notes.push_back("best=" + best.metric + (best.highest ? ":max:" : ":min:") +
                    std::to_string(best.count) +
                    ": no checkpoint has a numeric value of this name, so all of them are kept");
  }
  return notes;
}

bool NeedsOpening(const RetentionRules& rules) {
  return !rules.keep_best.empty() || std::ranges::any_of(rules.keep_every, [](const Every& e) {
    return e.unit == Every::Unit::kHours;
  });
}

Status CheckRules(const RetentionRules& rules) {
  if (rules.of_store) {
    RetentionRules others = rules;
    others.of_store = false;
    if (others.empty()) return {};
    return Status(Code::kInvalidArgument,
                  "rules: the policy of the store cannot be combined with other rules; clear "
                  "of_store to use " +
                      others.ToText());
  }
  return RetentionRules::Parse(rules.ToText()).status();
}

std::optional<std::uint64_t> StepOf(std::string_view name) {
  const std::size_t last = name.find_last_of("0123456789");
  if (last == std::string_view::npos) return std::nullopt;
  const std::size_t before = name.find_last_not_of("0123456789", last);
  const std::size_t first = before == std::string_view::npos ? 0 : before + 1;
  return [&]() -> std::optional<std::uint64_t> {
    std::uint64_t n = 0;
    const auto end = std::from_chars(name.data() + first, name.data() + last + 1, n);
    return end.ec == std::errc() ? std::optional(n) : std::nullopt;
  }();
}

std::vector<PruneReport::Decision> Decide(const RetentionRules& rules,
                                          std::vector<Candidate> candidates) {
  for (Candidate& c : candidates) {
    c.other_run = !rules.match.empty() && !GlobMatches(rules.match, c.name);
  }
  std::ranges::sort(candidates, [](const Candidate& a, const Candidate& b) {
    if (a.problem.ok() != b.problem.ok()) return a.problem.ok();
    if (!a.problem.ok()) return a.name < b.name;
    if (a.other_run != b.other_run) return b.other_run;
    if (a.derived != b.derived) return b.derived;
    return std::tie(a.generation, a.uuid, a.name) > std::tie(b.generation, b.uuid, b.name);
  });
  std::vector<Candidate> counted;
  for (const Candidate& c : candidates) {
    if (c.problem.ok() && !c.ephemeral && !c.derived && !c.other_run) {
      counted.push_back(c);
    }
  }
  const RetentionEvaluator judge(rules, counted);

  std::vector<PruneReport::Decision> decisions;
  std::size_t next = 0;  // Position in `counted` of the next candidate.
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    PruneReport::Decision& d = decisions.emplace_back(DecisionOn(c));
    const auto keep = [&](const std::string& why) {
      if (!d.reason.empty()) d.reason += "; ";
      d.reason += why;
    };
    if (!c.problem.ok()) {
      d.unread = true;
      d.reason = "the checkpoint cannot be read, so no rule removes it: " + c.problem.message();
      continue;
    }
    if (c.other_run) {
      d.reason = "the name does not match " + rules.match;
      continue;
    }
    if (i == 0) keep("the newest");
    if (c.saved_now && i != 0) keep("saved just now");
    if (!c.pinned.empty()) keep(c.pinned);
    if (!c.base_of.empty()) keep("a running save reuses its files: " + c.base_of);
    if (c.derived) {
      keep("derived from another checkpoint: no rule removes it, only `rm`");
    } else if (!c.ephemeral) {
      const std::string& why = judge.reason(next++);
      if (!why.empty()) keep(why);
      if (rules.empty() && d.reason.empty()) keep("no rules are set");
    }
    d.kept = !d.reason.empty();
    if (!d.kept) {
      d.reason = c.ephemeral ? "ephemeral, and " + candidates[0].name + " was saved after it"
                             : "no rule keeps it";
    }
    if (!c.expired_pin.empty()) d.reason += " (" + c.expired_pin + ")";
  }
  return decisions;
}

}  // namespace retention
}  // namespace tensormount
