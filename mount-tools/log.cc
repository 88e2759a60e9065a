// SPDX-License-Identifier: Apache-2.0
// `tensormount log` and `blame` (commands.h). The log of a store reads each COMMIT and, with
// --show, each index. The history of a key reads indexes (index/store/history.h).
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/parallel.h"
#include "index/read/value_totals.h"
#include "index/records/layer_names.h"
#include "index/store/costs.h"
#include "index/store/history.h"
#include "index/store/pins.h"
#include "index/store/store_json.h"
#include "mount-tools/commands.h"
#include "mount-tools/nearest.h"
#include "mount-tools/shown_text.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

using history::Change;
using history::ChangeKind;
using history::KeyState;
using State = CheckpointListing::State;

// A time span with two units: "45s", "12m 5s", "3h 20m", "2d 4h".
std::string SpanText(std::int64_t seconds) {
  const std::string sign = seconds < 0 ? "-" : "";
  const std::uint64_t s =
      seconds < 0 ? 0 - static_cast<std::uint64_t>(seconds) : static_cast<std::uint64_t>(seconds);
  if (s < 60) return fmt::format("{}{}s", sign, s);
  if (s < 3600) return fmt::format("{}{}m {}s", sign, s / 60, s % 60);
  if (s < 86400) return fmt::format("{}{}h {}m", sign, s / 3600, s % 3600 / 60);
  return fmt::format("{}{}d {}h", sign, s / 86400, s % 86400 / 3600);
}

// Splits the values of --show at commas. A backslash before a comma makes it part of a path.
Result<std::vector<std::string>> PathsOf(const std::vector<std::string>& shown) {
  std::vector<std::string> paths;
  for (const std::string& text : shown) {
    std::string path;
    for (std::size_t i = 0; i <= text.size(); ++i) {
      if (i < text.size() && text[i] == '\\' && i + 1 < text.size() && text[i + 1] == ',') {
        path += text[++i];
      } else if (i < text.size() && text[i] != ',') {
        path += text[i];
      } else if (path.empty()) {
        return Status(Code::kInvalidArgument,
                      fmt::format("--show {}: a path is empty; write --show loss,lr", text));
      } else {
        paths.push_back(std::exchange(path, {}));
      }
    }
  }
  return paths;
}

// The text of a value in a column. NaN and infinity are what a reader looks for, so they are words.
std::string ValueText(const CommonValue& value) {
  if (const auto* x = value.get_if<double>(); x != nullptr && !std::isfinite(*x)) {
    return std::isnan(*x) ? "NaN" : *x > 0 ? "inf" : "-inf";
  }
  return ShortValue(value);
}

// A worse exit status, if a listed checkpoint is damaged or could not be read (RunLs).
void Worsen(int& status, State state) {
  if (state == State::kUnread) status = kFailed;
  if (state == State::kDamaged) status = std::max(status, kCheckFailed);
}

State StateOfFailure(const Status& status) {
  return status.ok()                        ? State::kGood
         : status.code() == Code::kDataLoss ? State::kDamaged
                                            : State::kUnread;
}

// A line of the log of a store.
struct LogRow {
  CheckpointListing listing;
  const CheckpointCost* cost = nullptr;
  std::optional<std::int64_t> since_previous;  // Seconds since the step before.
  std::vector<std::optional<CommonValue>> values;
  std::optional<std::uint64_t> nonfinite;  // NaNs and infinities; nullopt: not known.
  // Problems that do not keep the checkpoint from being read, and those of reading the values.
  std::vector<std::string> damage;
  State state = State::kGood;
};

class StoreLog {
 public:
  StoreLog(const Store& store, const LogArgs& args, std::vector<std::string> paths,
           Terminal& terminal)
      : store_(store), args_(args), paths_(std::move(paths)), terminal_(terminal) {}

  int Run() {
    const Result<StoreCosts> costs = StoreCosts::Of(store_.fs(), store_);
    if (!costs.ok()) return terminal_.Fail(costs.status());
    const auto latest = store_.LatestOf(costs.value().Listings());
    if (latest.ok()) latest_ = latest.value().uuid;
    auto pinned = pins::ReadAll(store_.fs(), store_.path(), store_.fs().NowSeconds());
    pins_read_ = pinned.status();
    if (!pinned.ok()) terminal_.Warn("cannot read the pins: " + pinned.status().message());
    if (pinned.ok()) pinned_ = std::move(pinned).value();
    MakeRows(costs.value());
    ReadCounts();
    ReadValues();
    // Removed since they were listed.
    std::erase_if(rows_,
                  [](const LogRow& row) { return row.listing.problem.code() == Code::kNotFound; });
    if (!terminal_.json) PrintTable();
    int worst = kDone;
    for (const LogRow& row : rows_) {
      if (terminal_.json) PrintJson(row);
      Worsen(worst, row.state);
    }
    const int flushed = terminal_.Flush();
    return flushed != kDone ? flushed : worst;
  }

 private:
  // The rows in the order of the output, the newest first or last.
  void MakeRows(const StoreCosts& costs) {
    history::Steps steps = history::StepsOf(store_, costs.Listings(), /*with_derived=*/true);
    const CheckpointCost* previous = nullptr;
    for (CheckpointListing& one : steps.in_order) {
      LogRow& row = rows_.emplace_back();
      row.cost = costs.Find(one.name);
      row.listing = std::move(one);
      row.state = row.listing.state;
      if (!row.listing.problem.ok()) continue;
      if (!row.listing.commit_damage.empty()) {
        row.damage.push_back(row.listing.commit_damage);
        row.state = State::kDamaged;
      }
      if (row.listing.derived) continue;
      if (previous != nullptr) row.since_previous = row.cost->created - previous->created;
      previous = row.cost;
    }
    // Checkpoints of unknown generation may be the newest.
    for (CheckpointListing& one : steps.unplaced) {
      LogRow& row = rows_.emplace_back();
      row.listing = std::move(one);
      row.state = row.listing.state;
    }
    const auto limit = static_cast<std::size_t>(args_.limit);
    if (limit > 0 && rows_.size() > limit) {
      rows_.erase(rows_.begin(), rows_.end() - static_cast<std::ptrdiff_t>(limit));
    }
    if (!args_.reverse) std::ranges::reverse(rows_);
  }

  void ReadCounts() {
    struct Nothing {};
    const Status read =
        ForEachParallel<Nothing>(rows_.size(), 0, [&](std::size_t i, Nothing&) -> Status {
          LogRow& row = rows_[i];
          if (!row.listing.problem.ok()) return Status();
          const Result<std::optional<std::uint64_t>> counted =
              CountNonfinite(store_.fs(), store_.CheckpointPath(row.listing.name));
          if (counted.ok()) {
            row.nonfinite = counted.value();
          } else if (counted.status().code() == Code::kNotFound) {
            row.listing.problem = counted.status();
          } else {
            row.damage.push_back(counted.status().ToString());
            row.state = StateOfFailure(counted.status());
          }
          return Status();
        });
    if (!read.ok()) terminal_.Fail(read);
  }

  void ReadValues() {
    if (paths_.empty()) return;
    struct Nothing {};
    const Status read =
        ForEachParallel<Nothing>(rows_.size(), 0, [&](std::size_t i, Nothing&) -> Status {
          LogRow& row = rows_[i];
          row.values.resize(paths_.size());
          if (!row.listing.problem.ok()) return Status();
          const Status status = history::ReadIndexOf(
              store_, row.listing, terminal_.roots, [&](const OpenedCheckpoint& opened) -> Status {
                for (std::size_t p = 0; p < paths_.size(); ++p) {
                  Result<CommonValue> value = opened.index().CommonAt(paths_[p]);
                  if (value.ok()) {
                    row.values[p] = std::move(value).value();
                  } else if (value.status().code() != Code::kNotFound) {
                    return value.status();
                  }
                }
                for (std::string& warning : opened.warnings()) {
                  if (warning == row.listing.commit_damage) continue;
                  row.damage.push_back(std::move(warning));
                  row.state = State::kDamaged;
                }
                return Status();
              });
          if (status.code() == Code::kNotFound) {
            row.listing.problem = status;
          } else if (!status.ok()) {
            row.damage.push_back(status.ToString());
            row.state = StateOfFailure(status);
          }
          return Status();
        });
    if (!read.ok()) terminal_.Fail(read);
  }

  bool IsPinned(const LogRow& row) const {
    const auto pin = pinned_.find(row.listing.uuid);
    return pin != pinned_.end() && !pin->second.expired;
  }

  bool IsLatest(const LogRow& row) const {
    return row.listing.problem.ok() && latest_ && *latest_ == row.listing.uuid;
  }

  // What is special about a checkpoint: "latest,pin".
  std::string MarksOf(const LogRow& row) const {
    std::string marks;
    const auto add = [&](bool is, std::string_view word) {
      if (is) marks += (marks.empty() ? "" : ",") + std::string(word);
    };
    add(IsLatest(row), "latest");
    add(IsPinned(row), "pin");
    add(!pins_read_.ok(), "pin?");
    add(row.listing.derived, "derived");
    add(row.nonfinite.value_or(0) > 0, fmt::format("nonfinite={}", row.nonfinite.value_or(0)));
    add(row.state == State::kDamaged, "damaged");
    add(row.state == State::kUnread, "unread");
    return marks.empty() ? "-" : marks;
  }

  // Columns are as wide as their longest text, and the name is last.
  void PrintTable() {
    std::vector<std::vector<std::string>> table;
    std::vector<std::string> head = {"DATE", "SINCE", "SIZE", "OWN", "STATE"};
    for (const std::string& path : paths_) head.push_back(ShownText(path));
    if (!terminal_.quiet) table.push_back(head);
    for (const LogRow& row : rows_) {
      std::vector<std::string>& cells = table.emplace_back(head.size(), "-");
      if (row.listing.problem.ok()) {
        cells[0] = DateText(row.cost->created);
        if (row.since_previous) cells[1] = SpanText(*row.since_previous);
        cells[2] = HumanBytes(row.cost->bytes);
        cells[3] = HumanBytes(row.cost->own_bytes);
        for (std::size_t p = 0; p < row.values.size(); ++p) {
          if (row.values[p]) cells[head.size() - paths_.size() + p] = ValueText(*row.values[p]);
        }
      }
      cells[4] = MarksOf(row);
    }
    std::vector<std::size_t> widths(head.size(), 0);
    for (const auto& cells : table) {
      for (std::size_t c = 0; c < cells.size(); ++c) {
        widths[c] = std::max(widths[c], ShownText(cells[c]).size());
      }
    }
    std::size_t next = 0;
    const auto columns = [&] {
      std::string line;
      const std::vector<std::string>& cells = table[next++];
      for (std::size_t c = 0; c < cells.size(); ++c) {
        const std::string text = ShownText(cells[c]);
        const std::string blank(widths[c] - text.size(), ' ');
        const bool right = c >= 1 && c <= 3;
        line += (right ? blank + text : text + blank) + "  ";
      }
      return line;
    };
    if (!terminal_.quiet) terminal_.Line(columns() + "NAME");
    for (const LogRow& row : rows_) {
      std::string line = columns();
      line += terminal_.LastName(row.listing.name, line.size());
      if (!row.listing.problem.ok()) line += ": " + row.listing.problem.ToString();
      terminal_.Line(line);
      for (const std::string& damage : row.damage) terminal_.Warn(row.listing.name + ": " + damage);
    }
  }

  void PrintJson(const LogRow& row) {
    nlohmann::ordered_json json = ListingJson(row.listing, IsLatest(row));
    json["derived"] = row.listing.derived;
    if (row.listing.problem.ok()) {
      AddCostJson(*row.cost, json);
      json["since_previous"] = nullptr;
      if (row.since_previous) json["since_previous"] = *row.since_previous;
      json["pinned"] = IsPinned(row);
      if (!pins_read_.ok()) json["pinned"] = nullptr;
      json["nonfinite"] = nullptr;
      if (row.nonfinite) json["nonfinite"] = *row.nonfinite;
    }
    json["damage"] = row.damage;
    if (!paths_.empty()) {
      auto& values = json["values"] = nlohmann::ordered_json::object();
      for (std::size_t p = 0; p < row.values.size(); ++p) {
        if (row.values[p]) {
          values[paths_[p]] = nlohmann::ordered_json::parse(CommonToJson(*row.values[p]), nullptr,
                                                            /*allow_exceptions=*/false);
        }
      }
    }
    terminal_.Json(json);
  }

  const Store& store_;
  const LogArgs& args_;
  const std::vector<std::string> paths_;
  Terminal& terminal_;
  std::optional<Uuid> latest_;
  pins::PinMap pinned_;
  Status pins_read_;
  std::vector<LogRow> rows_;
};

std::string JoinedBy(const std::vector<std::string>& names, std::string_view word) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : std::string(word)) + name;
  return text;
}

// The step of a change, with those that may have been it: "step-31, or step-30, which cannot be
// read".
std::string StepText(const Change& change) {
  if (change.unread_before.empty()) return change.step.name;
  return fmt::format("{} or {}, which cannot be read", change.step.name,
                     JoinedBy(change.unread_before, " or "));
}

std::string StateText(const KeyState& state) {
  if (state.kind == KeyState::Kind::kAbsent) return "absent";
  if (state.kind == KeyState::Kind::kObject) {
    return fmt::format("object, {} bytes", state.bytes);
  }
  return fmt::format("{} {} {}", InfoOf(state.dtype).name, state.shape.ToString(),
                     state.digest ? DigestHex(*state.digest) : std::string("without a digest"));
}

// What a change was: "dtype F32 -> BF16".
std::string DifferenceText(const Change& change) {
  const KeyState& before = change.before;
  const KeyState& after = change.state;
  switch (change.kind) {
    case ChangeKind::kFirst:
      return "in the oldest step: " + StateText(after);
    case ChangeKind::kAdded:
      return "added: " + StateText(after);
    case ChangeKind::kRemoved:
      return "removed: was " + StateText(before);
    case ChangeKind::kDType:
      return fmt::format("dtype {} -> {}", InfoOf(before.dtype).name, InfoOf(after.dtype).name);
    case ChangeKind::kShape:
      return fmt::format("shape {} -> {}", before.shape.ToString(), after.shape.ToString());
    case ChangeKind::kDigest:
      if (after.kind == KeyState::Kind::kObject) {
        return before.bytes == after.bytes
                   ? std::string("object: other bytes")
                   : fmt::format("object: {} -> {} bytes", before.bytes, after.bytes);
      }
      return fmt::format("digest {} -> {}", before.digest ? DigestHex(*before.digest) : "none",
                         after.digest ? DigestHex(*after.digest) : "none");
    case ChangeKind::kUnknown:
      return fmt::format("may have changed: {} has no digest",
                         before.digest ? change.step.name : change.before_step);
    case ChangeKind::kKind:
    case ChangeKind::kNone:
      break;
  }
  return StateText(before) + " -> " + StateText(after);
}

nlohmann::ordered_json ChangeJson(const Change& change) {
  nlohmann::ordered_json json = {{"key", change.key},
                                 {"checkpoint", change.step.name},
                                 {"uuid", change.step.uuid.ToString()},
                                 {"generation", change.step.generation},
                                 {"created", change.created},
                                 {"change", std::string(history::ChangeName(change.kind))}};
  const auto add = [](const KeyState& state, nlohmann::ordered_json& to) {
    if (state.kind == KeyState::Kind::kAbsent) return;
    if (state.kind == KeyState::Kind::kTensor) {
      to["dtype"] = InfoOf(state.dtype).name;
      to["shape"] = std::vector<std::int64_t>(state.shape.begin(), state.shape.end());
    }
    to["bytes"] = state.bytes;
    if (state.digest && state.kind == KeyState::Kind::kTensor)
      to["digest"] = DigestHex(*state.digest);
  };
  add(change.state, json);
  if (!change.before_step.empty()) {
    nlohmann::ordered_json& before = json["before"] = {{"checkpoint", change.before_step}};
    add(change.before, before);
  }
  json["unread"] = change.unread_before;
  json["unread_since"] = change.unread_after;
  return json;
}

// Prints the failure of a search for a key, with the key that was probably meant.
int FailSearch(const Store& store, const std::string& key, const Status& status,
               Terminal& terminal) {
  if (status.code() != Code::kNotFound) return terminal.Fail(status);
  const auto latest = store.Latest();
  if (!latest.ok()) return terminal.Fail(status);
  const std::string path = store.CheckpointPath(latest.value().name);
  const auto opened = OpenedCheckpoint::Open(store.fs(), path, {.roots = terminal.roots});
  if (!opened.ok()) return terminal.Fail(status);
  const auto layer = opened.value()->index().ResolveLayer(key);
  if (layer.ok() && layer.value()) {
    return terminal.Fail(
        Status(Code::kNotFound,
               fmt::format("{}: is a layer of {}, and only the whole tensor has a digest", key,
                           layer.value()->stacked.meta.key())),
        fmt::format("name the tensor, {}", layer.value()->stacked.meta.key()));
  }
  return terminal.Fail(status, KeyHint(*opened.value(), path, key));
}

// Warns about the steps that could not be read, and returns the exit status.
int ReportUnread(const history::Report& report, Terminal& terminal) {
  int worst = kDone;
  for (const CheckpointListing& one : report.unread) {
    const bool unplaced = std::ranges::find(report.unplaced, one.name) != report.unplaced.end();
    terminal.Warn(fmt::format(
        "{} cannot be read{}: {}", one.name,
        unplaced ? ", and its place among the steps is unknown: it may have other data" : "",
        one.problem.message()));
    Worsen(worst, one.state);
  }
  return worst;
}

int LogKey(const Store& store, const LogArgs& args, Terminal& terminal) {
  const auto report = history::Changes(
      store,
      {.key = args.key, .limit = static_cast<std::size_t>(args.limit), .roots = terminal.roots});
  if (!report.ok()) return FailSearch(store, args.key, report.status(), terminal);
  std::vector<Change> changes = report.value().changes;
  if (args.reverse) std::ranges::reverse(changes);
  // A glob stands for keys that the reader cannot know.
  const bool several =
      std::ranges::any_of(changes, [&](const Change& change) { return change.key != args.key; });
  for (const Change& change : changes) {
    if (terminal.json) {
      terminal.Json(ChangeJson(change));
      continue;
    }
    terminal.Line(fmt::format("{}  {}{}: {}", DateText(change.created),
                              several ? change.key + "  " : "", StepText(change),
                              DifferenceText(change)));
  }
  const int worst = ReportUnread(report.value(), terminal);
  const int flushed = terminal.Flush();
  return flushed != kDone ? flushed : worst;
}

}  // namespace

int RunLog(const LogArgs& args, Terminal& terminal) {
  const auto paths = PathsOf(args.show);
  if (!paths.ok()) return terminal.Fail(paths.status());
  if (!args.key.empty() && !args.show.empty()) {
    return terminal.Fail(Status(Code::kInvalidArgument,
                                "--show is for the log of a store: it shows values of each step, "
                                "and KEY the steps at which one tensor changed"));
  }
  const auto store = OpenStoreArgument(args.store, terminal);
  if (!store.ok()) return terminal.Fail(store.status());
  if (!args.key.empty()) return LogKey(store.value(), args, terminal);
  return StoreLog(store.value(), args, paths.value(), terminal).Run();
}

int RunBlame(const BlameArgs& args, Terminal& terminal) {
  const auto store = OpenStoreArgument(args.store, terminal);
  if (!store.ok()) return terminal.Fail(store.status());
  const auto report =
      history::Changes(store.value(), {.key = args.key, .limit = 1, .roots = terminal.roots});
  if (!report.ok()) return FailSearch(store.value(), args.key, report.status(), terminal);
  for (const Change& change : report.value().changes) {
    if (terminal.json) {
      terminal.Json(ChangeJson(change));
      continue;
    }
    std::string line = fmt::format("{}: ", change.key);
    const std::string step = StepText(change);
    if (change.kind == ChangeKind::kFirst) {
      line += fmt::format("unchanged since {}, the oldest step", step);
    } else if (change.kind == ChangeKind::kUnknown) {
      line += fmt::format("changed at {}, or earlier", step);
    } else {
      line += fmt::format("changed at {}", step);
    }
    line += fmt::format(" ({})", DateText(change.created));
    if (change.kind != ChangeKind::kFirst) line += ": " + DifferenceText(change);
    if (!change.unread_after.empty()) {
      line += fmt::format("; {} cannot be read and may have had other data",
                          JoinedBy(change.unread_after, ", "));
    }
    terminal.Line(line);
  }
  const int worst = ReportUnread(report.value(), terminal);
  const int flushed = terminal.Flush();
  return flushed != kDone ? flushed : worst;
}

}  // namespace tensormount::tools
