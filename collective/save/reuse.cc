// SPDX-License-Identifier: Apache-2.0
// Messages and decisions of a save about its base. Lists with an answer for each tensor are sent as
// runs of equal answers: a list may cover all tensors of a large job, and unchanged tensors are
// mostly neighbours.
#include "collective/save/reuse.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "base/coding.h"
#include "base/deadline.h"
#include "base/errors.h"
#include "collective/comm/status_wire.h"
#include "collective/guarded.h"
#include "collective/save/save_messages.h"
#include "collective/save_load.h"
#include "index/records/layer_names.h"

namespace tensormount {
namespace {

constexpr std::size_t kMaxText = std::size_t{1} << 16;

// ---- Runs: u32 count, each u32 length, u8 value ----

template <typename List>
void WriteRuns(ByteWriter& out, const List& values) {
  std::vector<std::pair<std::uint32_t, std::uint8_t>> runs;
  for (const auto value : values) {
    const auto byte = static_cast<std::uint8_t>(value);
    if (runs.empty() || runs.back().second != byte) runs.emplace_back(0, byte);
    ++runs.back().first;
  }
  out.U32(static_cast<std::uint32_t>(runs.size()));
  for (const auto& [length, value] : runs) {
    out.U32(length);
    out.U8(value);
  }
}

// Reads what WriteRuns wrote: calls `use(position, value)` for each of exactly `size` values, each
// at most `most`.
template <typename Use>
Status ReadRuns(ByteReader& in, std::size_t size, std::uint8_t most, Use use) {
  std::size_t at = 0;
  const std::uint32_t runs = in.U32();
  for (std::uint32_t r = 0; r < runs && in.status().ok(); ++r) {
    const std::uint32_t length = in.U32();
    const std::uint8_t value = in.U8();
    if (length > size - at || value > most) {
      return DataLoss("reuse", "malformed list: a run of " + std::to_string(length) +
                                   " items has an unknown value, or ends past the " +
                                   std::to_string(size) + " items of the list");
    }
    for (std::uint32_t i = 0; i < length; ++i) use(at++, value);
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return at == size ? Status()
                    : DataLoss("reuse", "malformed list: only " + std::to_string(at) + " of " +
                                            std::to_string(size) + " items were sent");
}

// ---- What rank 0 decides ----

struct Decision {
  bool any = false;
  std::string refusal_reason;
  ReusedFromBase taken;
  LinkPlan plan;
  ReuseReport report;
};

std::string EncodeDecision(const Decision& decision) {
  ByteWriter out;
  out.U8(decision.any ? 1 : 0);
  out.String(decision.refusal_reason);
  if (!decision.any) return std::move(out.bytes());
  WriteRuns(out, decision.taken.tensors);
  WriteRuns(out, decision.taken.objects);
  WriteRuns(out, decision.plan.files);
  WriteRuns(out, decision.plan.stale_safetensors_header);
  out.U64(decision.report.tensors);
  out.U64(decision.report.objects);
  out.U64(decision.report.bytes);
  out.U64(decision.report.bytes_by_leaf);
  out.U64(decision.report.bytes_by_comparison);
  return std::move(out.bytes());
}

Status ReadFlags(ByteReader& in, std::size_t size, std::vector<bool>& flags) {
  flags.assign(size, false);
  return ReadRuns(in, size, 1, [&](std::size_t i, std::uint8_t v) { flags[i] = v != 0; });
}

Result<Decision> DecodeDecision(std::string_view bytes, std::size_t tensors, std::size_t objects,
                                std::size_t files) {
  ByteReader in(bytes, "reuse: the decision that rank 0 sent");
  Decision decision;
  decision.any = in.U8() != 0;
  decision.refusal_reason = std::string(in.String(kMaxText));
  if (decision.any) {
    TENSORMOUNT_RETURN_IF_ERROR(ReadFlags(in, tensors, decision.taken.tensors));
    TENSORMOUNT_RETURN_IF_ERROR(ReadFlags(in, objects, decision.taken.objects));
    decision.plan.files.assign(files, BaseFileUse::kNone);
    TENSORMOUNT_RETURN_IF_ERROR(ReadRuns(in, files,
                                         static_cast<std::uint8_t>(BaseFileUse::kForeign),
                                         [&](std::size_t i, std::uint8_t v) {
                                           decision.plan.files[i] = static_cast<BaseFileUse>(v);
                                         }));
    TENSORMOUNT_RETURN_IF_ERROR(ReadFlags(in, files, decision.plan.stale_safetensors_header));
    decision.report.tensors = in.U64();
    decision.report.objects = in.U64();
    decision.report.bytes = in.U64();
    decision.report.bytes_by_leaf = in.U64();
    decision.report.bytes_by_comparison = in.U64();
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return decision;
}

Result<std::shared_ptr<OpenedCheckpoint>> OpenBaseOf(FileSystem& fs, const Staging& staging) {
  return OpenBase(fs, staging.store, staging.base_name, staging.base);
}

// Votes as if rank `rank` had asked to end the save.
std::vector<Vote> CancelVotes(std::size_t rank) {
  std::vector<Vote> votes(rank + 1);
  votes[rank].cancel = true;
  return votes;
}

// Whether the values of every tensor of the base were counted, of a dtype that can be.
Result<bool> HasAllCounts(const OpenedCheckpoint& base) {
  bool all = true;
  Status failed;
  TENSORMOUNT_RETURN_IF_ERROR(base.index().ForEachTensor(0, [&](const TensorEntry& tensor) {
    if (!CanCount(tensor.meta.dtype())) return true;
    const Result<std::optional<ValueCounts>> counts = base.CountsOf(tensor);
    failed = counts.status();
    all = counts.ok() && counts.value().has_value();
    return all;
  }));
  TENSORMOUNT_RETURN_IF_ERROR(failed);
  return all;
}

// Whether a save after `consecutive_linked` saves that reused files writes everything.
bool IsFull(const SaveOptions& options, std::uint64_t consecutive_linked) {
  return options.full_every != 0 && consecutive_linked + 1 >= options.full_every;
}

class BaseReuse {
 public:
  BaseReuse(Collective& collective, const ReuseInput& input, const CommonValues& common)
      : collective_(collective), input_(input), common_(common) {}

  Result<ReuseResult> Run() {
    const Status compared = Guarded([&] { return Compare(); });
    if (compared.code() == Code::kCancelled) cancelled_ = true;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string told,
        collective_.Decide(
            EncodeFindings(compared), "reuse",
            [&](std::vector<std::string>& found) -> Result<std::string> {
              Decision decision;
              const Status decided = Guarded([&] { return Decide(found, decision); });
              if (!decided.ok() && (MustInherit() || decided.code() == Code::kCancelled)) {
                return decided;
              }
              if (!decided.ok()) {
                decision = Decision();
                decision.refusal_reason = decided.message();
              }
              return EncodeDecision(decision);
            }));
    // DecodeDecision fails on a rank that could not open the base; with this rank's vote below no
    // rank takes data.
    const Result<Decision> decision =
        DecodeDecision(told, found_.tensors.size(), found_.objects.size(),
                       compared.ok() ? base_->index().files().size() : 0);
    if (decision.ok() && !decision.value().any) return Nothing(decision.value().refusal_reason);
    ReuseResult reused;
    const Status linked =
        decision.ok() ? Guarded([&] { return Link(decision.value(), reused); }) : decision.status();
    if (linked.code() == Code::kCancelled) cancelled_ = true;
    Result<std::string> verdict =
        collective_.Decide(EncodeVote({cancelled_ ? Status() : linked, cancelled_}), "link",
                           [&](std::vector<std::string>& votes) -> Result<std::string> {
                             const Status all = VerdictOf(votes);
                             if (all.code() == Code::kCancelled || (MustInherit() && !all.ok())) {
                               return all;
                             }
                             return all.ok() ? std::string() : all.message();
                           });
    TENSORMOUNT_RETURN_IF_ERROR(verdict.status());
    if (!verdict.value().empty()) {
      // Removes the links, so that their space is free for the files that are written now.
      if (decision.ok()) {
        BaseLinker(input_.fs, *base_, input_.staging, decision.value().taken, decision.value().plan)
            .Discard(static_cast<std::uint32_t>(collective_.rank()),
                     static_cast<std::uint32_t>(collective_.size()));
      }
      return Nothing(verdict.value());
    }
    reused.any = true;
    return reused;
  }

 private:
  bool MustInherit() const { return !input_.options.inherit.empty(); }

  ReuseResult Nothing(const std::string& why) const {
    ReuseResult reused;
    reused.report.base = input_.staging.base_name;
    reused.report.note = why;
    return reused;
  }

  Status Compare() {
    // Comparing with a slow base takes at most half of the time that other ranks wait. Then the
    // remaining tensors are written again, which costs less than a timeout.
    const auto patience = std::min(PatienceOf(input_.options.timeouts), kLongestWait);
    const Deadline deadline = Deadline::After(patience / 2);
    base_ = input_.base;
    if (base_ == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(base_, OpenBaseOf(input_.fs, input_.staging));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        found_,
        CompareWithBase(input_.fs, *base_, input_.state, input_.task, input_.options.placement,
                        input_.options.page_hashes, input_.rules, deadline));
    return Status();
  }

  std::string EncodeFindings(const Status& compared) const {
    ByteWriter out;
    WriteStatus(out, compared);
    if (!compared.ok()) return std::move(out.bytes());
    WriteRuns(out, found_.tensors);
    WriteRuns(out, found_.objects);
    out.U64(found_.bytes_by_leaf);
    out.U64(found_.bytes_by_comparison);
    WriteStatus(out, found_.base_problem);
    return std::move(out.bytes());
  }

  // Runs at rank 0: merges the findings of all ranks and decides what is taken from the base.
  Status Decide(std::vector<std::string>& findings, Decision& decision) {
    std::vector<BaseMatch> tensors(found_.tensors.size(), BaseMatch::kNotWritten);
    std::vector<BaseMatch> objects(found_.objects.size(), BaseMatch::kNotWritten);
    const auto merge = [](std::vector<BaseMatch>& all) {
      return [&all](std::size_t i, std::uint8_t value) {
        // A difference on one rank makes the tensor differ.
        all[i] = std::max(all[i], static_cast<BaseMatch>(value));
      };
    };
    for (std::size_t r = 0; r < findings.size(); ++r) {
      ByteReader in(findings[r], "reuse: the comparison that a rank sent");
      const Status compared = ReadStatus(in);
      if (compared.code() == Code::kCancelled) {
        return VerdictOf(CancelVotes(r));
      }
      if (!compared.ok()) return FromRank(static_cast<int>(r), compared);
      constexpr auto kMost = static_cast<std::uint8_t>(BaseMatch::kDiffers);
      TENSORMOUNT_RETURN_IF_ERROR(ReadRuns(in, tensors.size(), kMost, merge(tensors)));
      TENSORMOUNT_RETURN_IF_ERROR(ReadRuns(in, objects.size(), kMost, merge(objects)));
      decision.report.bytes_by_leaf += in.U64();
      decision.report.bytes_by_comparison += in.U64();
      const Status problem = ReadStatus(in);
      if (!problem.ok() && decision.refusal_reason.empty()) {
        decision.refusal_reason = FromRank(static_cast<int>(r), problem).message();
      }
      TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
      findings[r] = {};
    }
    const std::uint64_t consecutive_linked = ConsecutiveLinkedSaves(base_->index());
    const bool reuses = input_.options.reuse == Reuse::kAuto && input_.options.validate &&
                        !IsFull(input_.options, consecutive_linked);
    const auto taken = [&](BaseMatch found) {
      return found == BaseMatch::kSame ? reuses : found == BaseMatch::kNotWritten && MustInherit();
    };
    decision.taken = ReusedFromBase::Nothing(tensors.size(), objects.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      decision.taken.tensors[i] = taken(tensors[i]);
      decision.report.tensors += decision.taken.tensors[i] ? 1 : 0;
    }
    for (std::size_t i = 0; i < objects.size(); ++i) {
      decision.taken.objects[i] = taken(objects[i]);
      decision.report.objects += decision.taken.objects[i] ? 1 : 0;
    }
    if (MustInherit()) TENSORMOUNT_RETURN_IF_ERROR(KeepObjectsApart(objects, decision));
    of_ranks_ = std::move(tensors);
    // Common values are inherited even if nothing else is.
    if (!decision.taken.any() && !MustInherit()) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(decision.plan, PlanLinks(*base_, input_.staging, decision.taken));
    decision.report.bytes = decision.plan.live_bytes;
    decision.any = true;
    return Status();
  }

  // If ranks have a part of an object, no part of this object is taken from the base.
  Status KeepObjectsApart(const std::vector<BaseMatch>& found, Decision& decision) const {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts, base_->index().Objects());
    std::set<std::string_view> of_ranks;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (found[i] != BaseMatch::kNotWritten) of_ranks.insert(parts[i].key);
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (found[i] != BaseMatch::kNotWritten || !of_ranks.contains(parts[i].key)) continue;
      decision.report.objects -= decision.taken.objects[i] ? 1 : 0;
      decision.taken.objects[i] = false;
    }
    return Status();
  }

  Status Link(const Decision& decision, ReuseResult& reused) {
    reused.report = decision.report;
    reused.report.base = input_.staging.base_name;
    reused.report.note = decision.refusal_reason;
    const auto part = static_cast<std::uint32_t>(collective_.rank());
    const auto parts = static_cast<std::uint32_t>(collective_.size());
    BaseLinker linker(input_.fs, *base_, input_.staging, decision.taken, decision.plan,
                      input_.rules.cancel);
    TENSORMOUNT_RETURN_IF_ERROR(linker.LinkFiles(part, parts, reused.linked));
    TENSORMOUNT_ASSIGN_OR_RETURN(reused.records, linker.Records(part, parts, reused.linked));
    RemoveTaken(decision.taken, reused.remaining);
    const std::uint64_t consecutive_linked = ConsecutiveLinkedSaves(base_->index());
    // A full save links inherited data, too; after it the count of consecutive saves begins again
    // at 1.
    reused.consecutive_linked =
        IsFull(input_.options, consecutive_linked) ? 1 : consecutive_linked + 1;
    return part == 0 ? AddInherited(reused) : Status();
  }

  // Fills `left` with the part of the task that is not taken from the base.
  void RemoveTaken(const ReusedFromBase& taken, RankTask& left) const {
    const RankTask& task = input_.task;
    const auto is_taken = [](const std::vector<bool>& all, std::uint32_t number) {
      return number != BaseMatches::kNotInBase && all[number];
    };
    std::vector<std::uint32_t> places(task.tensors.size(), 0);
    std::vector<bool> stays(task.tensors.size(), false);
    for (std::size_t t = 0; t < task.tensors.size(); ++t) {
      if (is_taken(taken.tensors, found_.task_tensors[t])) continue;
      stays[t] = true;
      places[t] = static_cast<std::uint32_t>(left.tensors.size());
      left.tensors.push_back(task.tensors[t]);
    }
    for (const RankTask::Chunk& chunk : task.chunks) {
      if (!stays[chunk.tensor]) continue;
      left.chunks.push_back(chunk);
      left.chunks.back().tensor = places[chunk.tensor];
    }
    for (std::size_t o = 0; o < task.objects.size(); ++o) {
      if (!is_taken(taken.objects, found_.task_objects[o])) left.objects.push_back(task.objects[o]);
    }
    left.replicas = task.replicas;
  }

  Status AddInherited(ReuseResult& reused) const {
    const CheckpointIndex& index = base_->index();
    if (!index.info().self_contained) reused.root = index.info().root;
    if (!MustInherit()) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(const CommonValues records, index.CommonRecords());
    for (const auto& [name, value] : records) {
      if (common_.contains(name)) continue;
      if (name.starts_with(kLayersRecordPrefix)) {
        // For a tensor that a rank has, the ranks' layer names apply, not the base's.
        const auto tensor = index.Find(std::string_view(name).substr(kLayersRecordPrefix.size()));
        if (!tensor.ok() || of_ranks_[tensor.value().ordinal] != BaseMatch::kNotWritten) continue;
      }
      reused.inherited.emplace(name, value);
    }
    return Status();
  }

  Collective& collective_;
  const ReuseInput& input_;
  const CommonValues& common_;
  std::shared_ptr<OpenedCheckpoint> base_;
  BaseMatches found_;
  std::vector<BaseMatch> of_ranks_;  // At rank 0: merged findings of all ranks.
  bool cancelled_ = false;
};

}  // namespace

Result<std::shared_ptr<OpenedCheckpoint>> CheckBase(FileSystem& fs, const SaveOptions& options,
                                                    Staging& staging) {
  std::shared_ptr<OpenedCheckpoint> base;
  if (staging.base.IsZero() && staging.base_problem.ok()) return base;
  const auto check = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(staging.base_problem);
    TENSORMOUNT_ASSIGN_OR_RETURN(base, OpenBaseOf(fs, staging));
    if (!options.inherit.empty()) return Status();
    if (!base->index().info().self_contained) {
      return Status(Code::kUnsupported,
                    staging.base_name +
                        ": its data files belong to another program and are not "
                        "linked; `inherit` uses them in place");
    }
    if (options.nonfinite != Nonfinite::kAllow) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool counted, HasAllCounts(*base));
      if (!counted) {
        staging.base_note = "written in full, because the values of " + staging.base_name +
                            " were not counted, which the option nonfinite needs";
        staging.base = Uuid();
        return Status();
      }
    }
    const std::uint64_t consecutive_linked = ConsecutiveLinkedSaves(base->index());
    if (IsFull(options, consecutive_linked)) {
      staging.base_note = "written in full, as the option full_every requires";
      staging.base = Uuid();
    }
    return Status();
  };
  const Status checked = Guarded(check);
  if (!options.inherit.empty()) TENSORMOUNT_RETURN_IF_ERROR(checked);
  if (!checked.ok()) {
    staging.base_note = checked.message();
    staging.base = Uuid();
  }
  return staging.base.IsZero() ? nullptr : base;
}

Result<ReuseResult> TakeFromBase(Collective& collective, const ReuseInput& input,
                                 const CommonValues& common) {
  return BaseReuse(collective, input, common).Run();
}

}  // namespace tensormount
