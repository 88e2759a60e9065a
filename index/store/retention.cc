// SPDX-License-Identifier: Apache-2.0
// Prune of retention.h: gathers the candidates and removes checkpoints, with checks before and
// after each removal. The steps, and the reason why concurrent prunes are safe, are in
// docs/format.md, "Keeping and removing".
#include "index/store/retention.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/log.h"
#include "base/parallel.h"
#include "index/read/checkpoint.h"
#include "index/records/store_paths.h"
#include "index/store/bucket.h"
#include "index/store/costs.h"
#include "index/store/pins.h"
#include "index/store/store_moves.h"
#include "index/store/trash.h"

namespace tensormount::retention {
namespace {

// The number in a value, for comparisons by rules, or the reason why the value has none.
MetricValue NumberOf(const std::string& metric, const CommonValue& value) {
  if (const auto* n = value.get_if<std::int64_t>()) {
    return {.number = static_cast<long double>(*n), .problem = {}};
  }
  if (const auto* n = value.get_if<std::uint64_t>()) {
    return {.number = static_cast<long double>(*n), .problem = {}};
  }
  if (const auto* x = value.get_if<double>()) {
    if (std::isnan(*x))
      return {.number = {}, .problem = "has a value of " + metric + " that is NaN"};
    return {.number = static_cast<long double>(*x), .problem = {}};
  }
  return {.number = {},
          .problem = "has a value of " + metric +
                     " that is not a number: " + std::string(value.kind_name())};
}

Result<MetricValue> ReadMetric(const CheckpointIndex& index, const std::string& metric) {
  const Result<CommonValue> value = index.CommonAt(metric);
  if (value.ok()) return NumberOf(metric, value.value());
  if (value.status().code() != Code::kNotFound) return value.status();
  return MetricValue{.number = {}, .problem = "has no " + metric};
}

// Reads date and metrics of a candidate from the checkpoint's index.
Status ReadFromIndex(FileSystem& fs, const std::string& directory, const RetentionRules& rules,
                     const std::vector<std::string>& roots, Candidate& c) {
  OpenedCheckpoint::Options how;
  how.roots = roots;
  // The index is not compared with its hash at open. Only a few records are read, and each read
  // checks its records.
  how.check_index_bytes = 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened, OpenedCheckpoint::Open(fs, directory, how));
  const CheckpointIndex& index = opened->index();
  if (index.info().uuid != c.uuid) {
    return Status(Code::kStale, directory + ": the checkpoint was replaced by another one");
  }
  c.created = index.info().created;
  c.metrics.clear();
  for (const RetentionRules::Best& best : rules.keep_best) {
    TENSORMOUNT_ASSIGN_OR_RETURN(MetricValue value, ReadMetric(index, best.metric));
    c.metrics.push_back(std::move(value));
  }
  return {};
}

class Pruner {
 public:
  Pruner(FileSystem& fs, const Store& store, const PruneOptions& options,
         const PruneContext& context)
      : fs_(fs),
        store_(store),
        options_(options),
        now_(context.now != 0 ? context.now : fs.NowSeconds()),
        saved_(context.saved),
        free_for_(context.free_for) {}

  Result<PruneReport> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(store_.CheckChangeable());
    TENSORMOUNT_RETURN_IF_ERROR(CheckRules(options_.rules));
    // The lock is held until the removals are done. So, if the filesystem has locks, the rules
    // cannot change meanwhile, because setting a policy also takes the lock.
    std::unique_ptr<File> lock;
    if (!options_.dry_run) {
      TENSORMOUNT_ASSIGN_OR_RETURN(lock, pins::Lock(fs_, store_.path(), options_.wait_seconds));
    }
    TENSORMOUNT_RETURN_IF_ERROR(ReadRules());
    TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<Candidate> candidates, Gather());
    report_.notes = UnmetRules(rules_, candidates);
    report_.decisions = Decide(rules_, std::move(candidates));
    report_.dry_run = options_.dry_run;
    const bool any =
        std::ranges::any_of(report_.decisions, [](const auto& decision) { return !decision.kept; });
    if (!any) {
      lock.reset();
      FreeLeftovers();
      return std::move(report_);
    }
    // If a checkpoint is to be removed, at least one is readable. The first decision is about the
    // newest readable checkpoint that the rules count (Decide).
    anchor_ = report_.decisions.front();
    TENSORMOUNT_RETURN_IF_ERROR(VerifyAnchor());
    if (!options_.dry_run) RemoveAll();
    // FreeTrash takes the lock itself when it moves a pinned checkpoint back.
    lock.reset();
    FreeRemoved();
    FreeLeftovers();
    return std::move(report_);
  }

 private:
  // Reads the rules. The policy is read even if other rules were given: a policy of a newer
  // version, or a damaged one, forbids all removals.
  Status ReadRules() {
    Result<std::optional<RetentionRules>> policy = pins::ReadPolicy(fs_, store_.path());
    if (!policy.ok()) return policy.status().WithContext("nothing is removed");
    policy_ = policy.value();
    if (!options_.rules.of_store) {
      rules_ = options_.rules;
    } else if (policy.value()) {
      rules_ = *policy.value();
    }
    report_.rules = rules_.ToText();
    return {};
  }

  Result<std::vector<Candidate>> Gather() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<CheckpointListing> listed, store_.List());
    TENSORMOUNT_ASSIGN_OR_RETURN(const pins::PinMap pinned,
                                 pins::ReadAll(fs_, store_.path(), now_));
    TENSORMOUNT_ASSIGN_OR_RETURN(ephemeral_, pins::ReadEphemeral(fs_, store_.path()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto bases, pins::ReadBases(fs_, store_.path()));
    std::vector<Candidate> candidates;
    for (const CheckpointListing& item : listed) {
      // A directory that is not a checkpoint has no decision.
      if (item.state == CheckpointListing::State::kNoCheckpoint) continue;
      Candidate& c = candidates.emplace_back();
      c.name = item.name;
      c.problem = item.problem;
      if (!item.problem.ok()) continue;
      c.uuid = item.uuid;
      ++listed_[item.uuid];
      c.generation = item.generation;
      c.saved_now = item.uuid == saved_;
      c.derived = item.derived;
      if (const auto pin = pinned.find(item.uuid); pin != pinned.end()) {
        (pin->second.expired ? c.expired_pin : c.pinned) = pins::Describe(pin->second);
      }
      if (const auto base = bases.find(item.uuid); base != bases.end()) c.base_of = base->second;
      c.metrics.resize(rules_.keep_best.size());
    }
    for (Candidate& c : candidates) {
      const auto mark = ephemeral_.find(c.uuid);
      if (!c.problem.ok() || mark == ephemeral_.end()) continue;
      // A checkpoint is ephemeral only under the name that it was marked with. If the mark has no
      // name, a second name means that the checkpoint is meant to stay.
      c.ephemeral = mark->second.empty() ? listed_[c.uuid] == 1 : mark->second == c.name;
    }
    if (!NeedsOpening(rules_)) return candidates;
    struct Nothing {};
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachParallel<Nothing>(candidates.size(), 0, [&](std::size_t i, Nothing&) -> Status {
          Candidate& c = candidates[i];
          if (!c.problem.ok() || c.ephemeral) return {};
          const std::string directory = store_.CheckpointPath(c.name);
          c.opened = ReadFromIndex(fs_, directory, rules_, options_.roots, c);
          return {};
        }));
    return candidates;
  }

  // Verifies the newest checkpoint quickly (without its data) before others are removed.
  Status VerifyAnchor() {
    const auto failed = [&](const Status& why) {
      // If the newest checkpoint was removed or replaced meanwhile, CheckAnchor reports this
      // instead.
      const Status anchored = CheckAnchor();
      if (anchored.code() == Code::kStale) return anchored;
      return why.WithContext("nothing is removed: " + anchor_.checkpoint +
                             ", the newest, fails a quick verification");
    };
    VerifyOptions quick;
    quick.quick = true;
    quick.roots = options_.roots;
    const Result<VerifyReport> verified =
        VerifyCheckpoint(fs_, store_.CheckpointPath(anchor_.checkpoint), quick);
    if (!verified.ok()) return failed(verified.status());
    for (const VerifyReport::Damage& d : verified.value().damages) {
      return failed(Status(Code::kDataLoss, d.object + ": " + d.file + ": " + d.reason));
    }
    return {};
  }

  // Removes checkpoints in the reverse order of the decisions. The newest come last, so that after
  // a crash they remain.
  void RemoveAll() {
    for (auto it = report_.decisions.rbegin(); it != report_.decisions.rend(); ++it) {
      if (it->kept) continue;
      const Status anchored = CheckAnchor();
      if (!anchored.ok()) {
        for (; it != report_.decisions.rend(); ++it) {
          if (!it->kept) it->failed = anchored;
        }
        return;
      }
      RemoveOne(*it);
    }
  }

  // Checks that the newest checkpoint still exists and that the policy is unchanged. A save may
  // have replaced the checkpoint and, without locks, another process may have removed it or changed
  // the policy.
  Status CheckAnchor() {
    const auto policy = pins::ReadPolicy(fs_, store_.path());
    if (!policy.ok()) return policy.status().WithContext("nothing more is removed");
    const auto text = [](const std::optional<RetentionRules>& rules) {
      return rules ? rules->ToText() : std::string();
    };
    if (text(policy.value()) != text(policy_)) {
      return Status(Code::kStale,
                    "nothing more is removed: the policy of the store was changed meanwhile");
    }
    const Result<DecodedCommit> commit =
        store_moves::ReadCommit(fs_, store_.CheckpointPath(anchor_.checkpoint));
    const bool there = commit.ok() && commit.value().record.uuid.ToString() == anchor_.uuid;
    if (there) return {};
    if (!commit.ok() && commit.status().code() != Code::kNotFound) {
      return commit.status().WithContext("nothing more is removed");
    }
    return Status(Code::kStale, "nothing more is removed: " + anchor_.checkpoint +
                                    ", which was the newest, was removed or replaced meanwhile");
  }

  void RemoveOne(PruneReport::Decision& d) {
    const Uuid uuid = *Uuid::Parse(d.uuid);
    const auto [removed, held, entry] = store_.RemoveUnlessHeld(
        d.checkpoint, uuid, [this](const Uuid& one) { return HeldBy(one); });
    if (held) {
      d.kept = true;
      d.reason = *held;
      return;
    }
    if (!entry.empty()) entries_.emplace_back(entry, d.checkpoint);
    const Code there = fs_.LinkStat(store_.CheckpointPath(d.checkpoint)).status().code();
    d.removed = removed.ok() || there == Code::kNotFound;
    // Another process may have removed the checkpoint first, which is not an error.
    if (removed.code() != Code::kNotFound || !d.removed) d.failed = removed;
    // Removes the ephemeral mark if it is for this name. If this fails, gc removes the mark.
    const auto mark = ephemeral_.find(uuid);
    if (removed.ok() && mark != ephemeral_.end() &&
        (mark->second.empty() || mark->second == d.checkpoint)) {
      (void)pins::ForgetEphemeral(fs_, store_.path(), uuid);
    }
  }

  // Frees the space of removed checkpoints that nobody reads, so that a run does not fill its disk.
  // The rest is left to gc.
  void FreeRemoved() {
    if (entries_.empty()) return;
    std::vector<std::string> entries;
    for (const auto& [entry, name] : entries_) entries.push_back(entry);
    const Store::GcReport freed = store_.FreeTrash(entries, now_);
    report_.bytes_freed = freed.bytes_freed;
    for (const auto& [entry, name] : entries_) {
      const bool in_bucket = fs_.object_writer() != nullptr;
      const auto bytes = in_bucket ? bucket::BytesBelow(fs_, store_.CheckpointPath(name))
                                   : OwnBytes::Below(fs_, JoinPath(store_.path(), entry));
      if (bytes.ok() && bytes.value() == 0) continue;
      report_.bytes_waiting += bytes.ok() ? bytes.value() : 0;
      for (const auto* lines : {&freed.kept, &freed.failed}) {
        for (const std::string& line : *lines) {
          if (!line.starts_with(entry + ":")) continue;
          report_.waiting.push_back(name + line.substr(entry.size()));
        }
      }
      if (!in_bucket) store_moves::MarkRemovedByRules(fs_, JoinPath(store_.path(), entry), name);
    }
  }

  // Frees what earlier prunes could not free.
  void FreeLeftovers() {
    if (options_.dry_run) return;
    report_.bytes_freed += trash::FreeLeftovers(store_, now_, free_for_).bytes_freed;
  }

  // The reason why the checkpoint must stay now; nullopt if it may be removed.
  Result<std::optional<std::string>> HeldBy(const Uuid& uuid) const {
    std::optional<std::string> held;
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto pin, pins::Find(fs_, store_.path(), uuid, now_));
    if (pin) held = pins::Describe(*pin);
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto bases, pins::ReadBases(fs_, store_.path()));
    if (const auto base = bases.find(uuid); base != bases.end()) {
      held = (held ? *held + "; " : std::string()) +
             "a running save reuses its files: " + base->second;
    }
    return held;
  }

  FileSystem& fs_;
  const Store& store_;
  const PruneOptions& options_;
  const std::int64_t now_;
  const Uuid saved_;
  const std::chrono::seconds free_for_;
  RetentionRules rules_;
  std::optional<RetentionRules> policy_;  // nullopt: the store has no policy.
  PruneReport report_;
  PruneReport::Decision anchor_;
  std::map<Uuid, int> listed_;  // For each uuid, the number of names that it has.
  std::map<Uuid, std::string> ephemeral_;
  // Removed checkpoints: path below the store, and the name that each had.
  std::vector<std::pair<std::string, std::string>> entries_;
};

}  // namespace

Result<PruneReport> Prune(FileSystem& fs, const Store& store, const PruneOptions& options,
                          const PruneContext& context) {
  return Pruner(fs, store, options, context).Run();
}

Status WithTrashHint(FileSystem& fs, const std::string& store, const Status& failure) {
  const int err = failure.ToErrno();
  if (store.empty() || failure.code() != Code::kResourceExhausted ||
      (err != ENOSPC && err != EDQUOT)) {
    return failure;
  }
  OwnBytes own(fs);
  const std::string trash = JoinPath(store, store_paths::kTrashFolder);
  const auto entries = fs.List(trash);
  if (!entries.ok()) return failure;
  for (const DirectoryEntry& e : entries.value()) {
    // Entries of aborted saves are not counted, because their data are usually deleted at once.
    if (!e.name.ends_with(store_paths::kAbortedSuffix)) own.Add(JoinPath(trash, e.name), 8);
  }
  const std::uint64_t bytes = own.Sum();
  if (bytes == 0) return failure;
  const std::string hint = trash + " holds " + HumanBytes(bytes) +
                           " of removed checkpoints: `tensormount gc " + store +
                           "` frees those that are no longer read";
  if (failure.message().find(hint) != std::string::npos) return failure;
  return failure.WithMessage(failure.message() + "; " + hint).With({.cause = hint});
}

nlohmann::ordered_json PruneJson(const PruneReport& report) {
  nlohmann::ordered_json checkpoints = nlohmann::ordered_json::array();
  for (const PruneReport::Decision& d : report.decisions) {
    nlohmann::ordered_json& one =
        checkpoints.emplace_back(nlohmann::ordered_json{{"checkpoint", d.checkpoint},
                                                        {"uuid", d.uuid},
                                                        {"generation", d.generation},
                                                        {"kept", d.kept},
                                                        {"removed", d.removed},
                                                        {"reason", d.reason}});
    if (d.unread) one["unread"] = true;
    if (!d.failed.ok()) one["failed"] = d.failed.ToString();
  }
  return {{"rules", report.rules},
          {"dry_run", report.dry_run},
          {"removed", report.removed()},
          {"notes", report.notes},
          {"bytes_freed", report.bytes_freed},
          {"bytes_waiting", report.bytes_waiting},
          {"waiting", report.waiting},
          {"checkpoints", std::move(checkpoints)}};
}

nlohmann::ordered_json PinJson(const PinnedCheckpoint& pin) {
  nlohmann::ordered_json json = {
      {"uuid", pin.uuid},       {"name", pin.name},       {"reason", pin.reason},  {"by", pin.by},
      {"created", pin.created}, {"expires", pin.expires}, {"expired", pin.expired}};
  if (!pin.problem.empty()) json["problem"] = pin.problem;
  return json;
}

}  // namespace tensormount::retention
