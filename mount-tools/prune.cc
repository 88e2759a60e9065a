// SPDX-License-Identifier: Apache-2.0
// `tensormount prune`, `pin` and `unpin` (commands.h): calls of the library
// (tensormount/retention.h) and their reports.
#include <charconv>
#include <ctime>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "index/store/pins.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"
#include "mount-tools/commands.h"

namespace tensormount::tools {
namespace {

// Joins the options into one text, which RetentionRules::Parse parses with the error messages of
// the library.
Result<RetentionRules> RulesOf(const PruneArgs& args) {
  std::string text = args.rules;
  const auto add = [&](std::string_view word, const std::string& value) {
    if (!text.empty()) text += ',';
    text += std::string(word) + "=";
    for (const char c : value) {
      if (c == ',' || c == '\\') text += '\\';
      text += c;
    }
  };
  if (!args.match.empty()) add("match", args.match);
  if (!args.keep_last.empty()) add("last", args.keep_last);
  for (const std::string& every : args.keep_every) add("every", every);
  for (const std::string& best : args.keep_best) add("best", best);
  if (text.empty()) return RetentionRules::OfStore();
  return RetentionRules::Parse(text);
}

int ShowPolicy(const Store& store, Terminal& terminal) {
  const auto policy = pins::ReadPolicy(store.fs(), store.path());
  if (!policy.ok()) return terminal.Fail(policy.status());
  const std::string text = policy.value() ? policy.value()->ToText() : std::string();
  if (terminal.json) {
    nlohmann::ordered_json json = {{"store", store.path()}, {"rules", nullptr}};
    if (policy.value()) json["rules"] = text;
    terminal.Json(json);
  } else {
    terminal.Line(policy.value() ? text : "no policy: `prune` without rules removes nothing");
  }
  return terminal.Flush();
}

int ChangePolicy(const Store& store, const PruneArgs& args, const RetentionRules& rules,
                 Terminal& terminal) {
  Status changed = store.CheckWritable();
  if (changed.ok()) {
    changed = args.clear_policy ? pins::RemovePolicy(store.fs(), store.path())
                                : pins::WritePolicy(store.fs(), store.path(), rules);
  }
  if (!changed.ok()) return terminal.Fail(changed);
  return terminal.quiet && !terminal.json ? terminal.Flush() : ShowPolicy(store, terminal);
}

// Parses --expires: a duration from now ("30d", "12h", "90m", "45s", "2w"), a date in the machine's
// time zone, or with a Z in UTC ("2027-01-31", "2027-01-31T12:00"), or seconds since 1970
// ("@1800000000").
Result<std::int64_t> ParseExpiry(const std::string& text) {
  const auto bad = [&](std::string_view why) {
    return Status(Code::kInvalidArgument, fmt::format("--expires {}: {}", text, why));
  };
  const auto number = [](std::string_view digits) -> std::optional<std::int64_t> {
    std::int64_t n = 0;
    const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), n);
    const bool whole = end.ec == std::errc() && end.ptr == digits.data() + digits.size();
    return whole && !digits.empty() && n >= 0 ? std::optional(n) : std::nullopt;
  };
  constexpr std::int64_t kMost = 100'000'000'000;  // In seconds: the year 5138.
  if (text.starts_with('@')) {
    const auto seconds = number(std::string_view(text).substr(1));
    // 0 is an error, because it is probably an unset variable, as in @$((N)).
    return seconds && *seconds > 0 && *seconds <= kMost
               ? Result<std::int64_t>(*seconds)
               : bad("@ must be followed by seconds since 1970; without --expires a pin has no "
                     "end");
  }
  static constexpr std::pair<char, std::int64_t> kUnits[] = {
      {'s', 1}, {'m', 60}, {'h', 3600}, {'d', 86400}, {'w', 7 * 86400}};
  for (const auto& [letter, seconds] : kUnits) {
    if (!text.ends_with(letter)) continue;
    const auto count = number(std::string_view(text).substr(0, text.size() - 1));
    if (!count) break;
    if (*count > kMost / seconds) return bad("the time is too far in the future");
    return std::time(nullptr) + *count * seconds;
  }
  std::string wall = text;
  const bool utc = wall.ends_with('Z');
  if (utc) wall.pop_back();
  for (const char* form : {"%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d"}) {
    std::tm parts{};
    const char* const end = strptime(wall.c_str(), form, &parts);
    if (end == nullptr || *end != '\0') continue;
    parts.tm_isdst = -1;
    const int day = parts.tm_mday;
    const std::time_t seconds = utc ? timegm(&parts) : mktime(&parts);
    if (parts.tm_mday != day) return bad("this month does not have so many days");
    if (seconds > 0) return static_cast<std::int64_t>(seconds);
  }
  return bad(
      "must be a duration (30d, 12h, 90m), a date (2027-01-31, 2027-01-31T12:00, with a Z for UTC) "
      "or @SECONDS since 1970");
}

void PrintPin(const PinnedCheckpoint& pin, Terminal& terminal) {
  if (terminal.json) {
    terminal.Json(retention::PinJson(pin));
  } else {
    terminal.Line(fmt::format("{}\t{}\t{}\tby {}", pin.name.empty() ? pin.uuid : pin.name, pin.uuid,
                              pins::Describe(pin), pin.by.empty() ? "?" : pin.by));
  }
}

int ListAllPins(const Store& store, Terminal& terminal) {
  const auto all = pins::ReadAll(store.fs(), store.path(), store.fs().NowSeconds());
  if (!all.ok()) return terminal.Fail(all.status());
  for (const auto& [uuid, pin] : all.value()) PrintPin(pin, terminal);
  return terminal.Flush();
}

}  // namespace

int RunPrune(const PruneArgs& args, Terminal& terminal) {
  const auto rules = RulesOf(args);
  if (!rules.ok()) return terminal.Fail(rules.status());
  const auto store = Store::Open(args.store);
  if (!store.ok()) return terminal.Fail(store.status());
  if (args.set_policy && rules.value().of_store) {
    return terminal.Fail(
        Status(Code::kInvalidArgument, "--set-policy needs rules, for example --keep-last 3"));
  }
  if ((args.clear_policy || args.show_policy) && !rules.value().of_store) {
    return terminal.Fail(Status(Code::kInvalidArgument,
                                "--show-policy and --clear-policy take no rules; --set-policy "
                                "replaces the store's policy"));
  }
  if (args.set_policy || args.clear_policy) {
    return ChangePolicy(store.value(), args, rules.value(), terminal);
  }
  if (args.show_policy) return ShowPolicy(store.value(), terminal);

  PruneOptions options;
  options.rules = rules.value();
  options.dry_run = args.dry_run;
  options.roots = terminal.roots;
  const auto pruned = retention::Prune(store.value().fs(), store.value(), options);
  if (!pruned.ok()) return terminal.Fail(pruned.status());
  const PruneReport& report = pruned.value();
  const std::vector<std::string> failures = report.failures();
  if (terminal.json) {
    terminal.Json(retention::PruneJson(report));
  } else if (!terminal.quiet) {
    std::uint64_t kept = 0;
    std::uint64_t gone = 0;
    for (const PruneReport::Decision& d : report.decisions) {
      const bool goes = args.dry_run ? !d.kept : d.removed;
      (goes ? gone : kept) += 1;
      if (goes) {
        terminal.Line(fmt::format("{} {}: {}", args.dry_run ? "would remove" : "removed",
                                  d.checkpoint, d.reason));
      } else if (d.kept && (args.dry_run || terminal.verbose)) {
        terminal.Line(
            fmt::format("{} {}: {}", args.dry_run ? "would keep" : "kept", d.checkpoint, d.reason));
      }
    }
    if (report.rules.empty()) {
      terminal.Line(
          options.rules.of_store
              ? "no rules: none were given, and the store has no policy (--set-policy sets one)"
              : "no rules");
    }
    terminal.Line(fmt::format("{} {}, {} stay{}", Counted(gone, "checkpoint"),
                              args.dry_run ? "would be removed" : "removed", kept,
                              kept == 1 ? "s" : ""));
    if (report.bytes_freed > 0) terminal.Line(HumanBytes(report.bytes_freed) + " freed");
    if (!report.waiting.empty()) {
      terminal.Line(
          fmt::format("{} stay in .trash until a later prune or `tensormount gc {}` frees them:",
                      HumanBytes(report.bytes_waiting), store.value().path()));
      for (const std::string& waits : report.waiting) terminal.Line("  " + waits);
    }
  }
  for (const std::string& note : report.notes) terminal.Warn(note);
  for (const PruneReport::Decision& d : report.decisions) {
    if (!d.failed.ok()) terminal.Fail(d.failed.WithContext(d.checkpoint));
    // An unreadable checkpoint may be the newest one, so the user is warned.
    if (d.unread) terminal.Warn(d.checkpoint + ": " + d.reason);
  }
  const int flushed = terminal.Flush();
  return flushed == kDone && !failures.empty() ? kFailed : flushed;
}

int RunPin(const PinArgs& args, Terminal& terminal) {
  if (const auto whole = Store::Open(args.checkpoint); whole.ok()) {
    if (args.reason.empty() && args.expires.empty()) return ListAllPins(whole.value(), terminal);
    return terminal.Fail(
        Status(Code::kInvalidArgument,
               fmt::format("{}: is a store; name a checkpoint in it, {}/NAME", args.checkpoint,
                           WithoutTrailingSlashes(args.checkpoint))));
  }
  PinOptions options;
  options.reason = args.reason;
  if (!args.expires.empty()) {
    const auto expires = ParseExpiry(args.expires);
    if (!expires.ok()) return terminal.Fail(expires.status());
    options.expires = expires.value();
  }
  const auto parts = SplitCheckpointPath(args.checkpoint);
  if (!parts.ok()) return terminal.Fail(parts.status());
  const auto store = Store::Open(parts.value().store);
  if (!store.ok()) return terminal.Fail(store.status());
  const auto pin = pins::Pin(store.value().fs(), store.value(), parts.value().name, options);
  if (!pin.ok()) return terminal.Fail(pin.status());
  if (pin.value().expired)
    terminal.Warn("--expires is in the past: the pin does not protect the checkpoint");
  if (!terminal.quiet || terminal.json) PrintPin(pin.value(), terminal);
  return terminal.Flush();
}

int RunUnpin(const std::string& checkpoint, Terminal& terminal) {
  const auto parts = SplitCheckpointPath(checkpoint);
  if (!parts.ok()) return terminal.Fail(parts.status());
  const auto store = Store::Open(parts.value().store);
  if (!store.ok()) return terminal.Fail(store.status());
  const Status unpinned = pins::Unpin(store.value().fs(), store.value(), parts.value().name);
  if (!unpinned.ok()) return terminal.Fail(unpinned);
  const std::string path = store.value().CheckpointPath(parts.value().name);
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{{"event", "unpinned"}, {"checkpoint", path}});
  } else if (!terminal.quiet) {
    terminal.Line(fmt::format("unpinned {}", path));
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
