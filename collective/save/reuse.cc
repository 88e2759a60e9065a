// SPDX-License-Identifier: Apache-2.0
// What ranks say to each other about a base. Lists of tensors travel as runs of equal answers: what
// is frozen is mostly neighbours, and a rank of a large job has something of every tensor.
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

// `use(position, value)` for each of exactly `size` values up to `most`.
template <typename Use>
Status ReadRuns(ByteReader& in, std::size_t size, std::uint8_t most, Use use) {
  std::size_t at = 0;
  const std::uint32_t runs = in.U32();
  for (std::uint32_t r = 0; r < runs && in.status().ok(); ++r) {
    const std::uint32_t length = in.U32();
    const std::uint8_t value = in.U8();
    if (length > size - at || value > most) return DataLoss("reuse: a list that cannot be");
    for (std::uint32_t i = 0; i < length; ++i) use(at++, value);
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.status());
  return at == size ? Status() : DataLoss("reuse: a list that is too short");
}

// ---- What rank 0 decides ----

struct Decision {
  bool any = false;
  std::string why_not;
  TakenFromBase taken;
  LinkPlan plan;
  ReuseReport report;
};

std::string EncodeDecision(const Decision& decision) {
  ByteWriter out;
  out.U8(decision.any ? 1 : 0);
  out.String(decision.why_not);
  if (!decision.any) return std::move(out.bytes());
  WriteRuns(out, decision.taken.tensors);
  WriteRuns(out, decision.taken.objects);
  WriteRuns(out, decision.plan.files);
  WriteRuns(out, decision.plan.header_lies);
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
  ByteReader in(bytes, "what rank 0 decided of the base");
  Decision decision;
  decision.any = in.U8() != 0;
  decision.why_not = std::string(in.String(kMaxText));
  if (decision.any) {
    TENSORMOUNT_RETURN_IF_ERROR(ReadFlags(in, tensors, decision.taken.tensors));
    TENSORMOUNT_RETURN_IF_ERROR(ReadFlags(in, objects, decision.taken.objects));
    decision.plan.files.assign(files, BaseFileUse::kNone);
    TENSORMOUNT_RETURN_IF_ERROR(ReadRuns(in, files,
                                         static_cast<std::uint8_t>(BaseFileUse::kForeign),
                                         [&](std::size_t i, std::uint8_t v) {
                                           decision.plan.files[i] = static_cast<BaseFileUse>(v);
                                         }));
    TENSORMOUNT_RETURN_IF_ERROR(ReadFlags(in, files, decision.plan.header_lies));
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

// As where ranks vote, and that one asked to end the save.
std::vector<Vote> VotesWithCancel(std::size_t rank) {
  std::vector<Vote> votes(rank + 1);
  votes[rank].cancel = true;
  return votes;
}

// Whether a save after so many that reused files writes everything anew.
bool IsFull(const SaveOptions& options, std::uint64_t in_a_row) {
  return options.full_every != 0 && in_a_row + 1 >= options.full_every;
}

// Of the save of one rank.
class Taking {
 public:
  Taking(Collective& collective, const ReuseInput& input, const CommonValues& common)
      : collective_(collective), input_(input), common_(common) {}

  Result<Reused> Run() {
    const Status compared = Guarded([&] { return Compare(); });
    if (compared.code() == Code::kCancelled) cancelled_ = true;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string told,
        collective_.Decide(EncodeFindings(compared), "reuse",
                           [&](std::vector<std::string>& found) -> Result<std::string> {
                             Decision decision;
                             const Status decided =
                                 Guarded([&] { return Decide(found, decision); });
                             if (!decided.ok() && (must() || decided.code() == Code::kCancelled)) {
                               return decided;
                             }
                             if (!decided.ok()) {
                               decision = Decision();
                               decision.why_not = decided.message();
                             }
                             return EncodeDecision(decision);
                           }));
    // Something is taken only where every rank has the base open.
    const Result<Decision> decision =
        DecodeDecision(told, found_.tensors.size(), found_.objects.size(),
                       compared.ok() ? base_->index().files().size() : 0);
    if (decision.ok() && !decision.value().any) return Nothing(decision.value().why_not);
    Reused reused;
    const Status linked =
        decision.ok() ? Guarded([&] { return Link(decision.value(), reused); }) : decision.status();
    if (linked.code() == Code::kCancelled) cancelled_ = true;
    Result<std::string> verdict =
        collective_.Decide(EncodeVote({cancelled_ ? Status() : linked, cancelled_}), "link",
                           [&](std::vector<std::string>& votes) -> Result<std::string> {
                             const Status all = VerdictOf(votes);
                             if (all.code() == Code::kCancelled || (must() && !all.ok())) {
                               return all;
                             }
                             return all.ok() ? std::string() : all.message();
                           });
    TENSORMOUNT_RETURN_IF_ERROR(verdict.status());
    if (!verdict.value().empty()) {
      // Room for what is written now.
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
  bool must() const { return !input_.options.inherit.empty(); }

  Reused Nothing(const std::string& why) const {
    Reused reused;
    reused.report.base = input_.staging.base_name;
    reused.report.note = why;
    return reused;
  }

  Status Compare() {
    // A slow base may cost the others half of their patience. A tensor that is written anew is the
    // smaller harm.
    const auto patience = std::min(PatienceOf(input_.options.timeouts), kLongestWait);
    const Deadline deadline = Deadline::After(patience / 2);
    TENSORMOUNT_ASSIGN_OR_RETURN(base_, OpenBaseOf(input_.fs, input_.staging));
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

  // At rank 0, which has the base open if anybody has.
  Status Decide(std::vector<std::string>& findings, Decision& decision) {
    std::vector<InBase> tensors(found_.tensors.size(), InBase::kNotHere);
    std::vector<InBase> objects(found_.objects.size(), InBase::kNotHere);
    const auto merge = [](std::vector<InBase>& all) {
      return [&all](std::size_t i, std::uint8_t value) {
        // What differs somewhere differs.
        all[i] = std::max(all[i], static_cast<InBase>(value));
      };
    };
    for (std::size_t r = 0; r < findings.size(); ++r) {
      ByteReader in(findings[r], "what a rank found in the base");
      const Status compared = ReadStatus(in);
      if (compared.code() == Code::kCancelled) {
        return VerdictOf(VotesWithCancel(r));
      }
      if (!compared.ok()) return FromRank(static_cast<int>(r), compared);
      constexpr auto kMost = static_cast<std::uint8_t>(InBase::kDiffers);
      TENSORMOUNT_RETURN_IF_ERROR(ReadRuns(in, tensors.size(), kMost, merge(tensors)));
      TENSORMOUNT_RETURN_IF_ERROR(ReadRuns(in, objects.size(), kMost, merge(objects)));
      decision.report.bytes_by_leaf += in.U64();
      decision.report.bytes_by_comparison += in.U64();
      const Status problem = ReadStatus(in);
      if (!problem.ok() && decision.why_not.empty()) {
        decision.why_not = FromRank(static_cast<int>(r), problem).message();
      }
      TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
      findings[r] = {};
    }
    const std::uint64_t in_a_row = SavesInARowThatReused(base_->index());
    const bool reuses = input_.options.reuse == Reuse::kAuto && input_.options.validate &&
                        !IsFull(input_.options, in_a_row);
    const auto taken = [&](InBase found) {
      return found == InBase::kSame ? reuses : found == InBase::kNotHere && must();
    };
    decision.taken = TakenFromBase::Nothing(tensors.size(), objects.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      decision.taken.tensors[i] = taken(tensors[i]);
      decision.report.tensors += decision.taken.tensors[i] ? 1 : 0;
    }
    for (std::size_t i = 0; i < objects.size(); ++i) {
      decision.taken.objects[i] = taken(objects[i]);
      decision.report.objects += decision.taken.objects[i] ? 1 : 0;
    }
    if (must()) TENSORMOUNT_RETURN_IF_ERROR(KeepObjectsApart(objects, decision));
    of_ranks_ = std::move(tensors);
    // Common values are inherited where nothing else is.
    if (!decision.taken.any() && !must()) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(decision.plan, PlanLinks(*base_, input_.staging, decision.taken));
    decision.report.bytes = decision.plan.live_bytes;
    decision.any = true;
    return Status();
  }

  // An object of which a rank has a part is the ranks' as a whole.
  Status KeepObjectsApart(const std::vector<InBase>& found, Decision& decision) const {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts, base_->index().Objects());
    std::set<std::string_view> of_ranks;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (found[i] != InBase::kNotHere) of_ranks.insert(parts[i].key);
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (found[i] != InBase::kNotHere || !of_ranks.contains(parts[i].key)) continue;
      decision.report.objects -= decision.taken.objects[i] ? 1 : 0;
      decision.taken.objects[i] = false;
    }
    return Status();
  }

  Status Link(const Decision& decision, Reused& reused) {
    reused.report = decision.report;
    reused.report.base = input_.staging.base_name;
    reused.report.note = decision.why_not;
    const auto part = static_cast<std::uint32_t>(collective_.rank());
    const auto parts = static_cast<std::uint32_t>(collective_.size());
    BaseLinker linker(input_.fs, *base_, input_.staging, decision.taken, decision.plan,
                      input_.rules.cancel);
    TENSORMOUNT_RETURN_IF_ERROR(linker.LinkFiles(part, parts, reused.linked));
    TENSORMOUNT_ASSIGN_OR_RETURN(reused.records, linker.Records(part, parts, reused.linked));
    LeaveOut(decision.taken, reused.left);
    const std::uint64_t in_a_row = SavesInARowThatReused(base_->index());
    // What is inherited is linked in any case, and counts anew.
    reused.in_a_row = IsFull(input_.options, in_a_row) ? 1 : in_a_row + 1;
    return part == 0 ? ForCoordinator(reused) : Status();
  }

  // The task without what is taken.
  void LeaveOut(const TakenFromBase& taken, RankTask& left) const {
    const RankTask& task = input_.task;
    const auto is_taken = [](const std::vector<bool>& all, std::uint32_t number) {
      return number != ComparedWithBase::kNotInBase && all[number];
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

  Status ForCoordinator(Reused& reused) const {
    const CheckpointIndex& index = base_->index();
    if (!index.info().self_contained) reused.root = index.info().root;
    if (!must()) return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(const CommonValues records, index.CommonRecords());
    for (const auto& [name, value] : records) {
      if (common_.contains(name)) continue;
      if (name.starts_with(kLayersRecordPrefix)) {
        // A tensor that a rank has, has the names that the ranks say.
        const auto tensor = index.Find(std::string_view(name).substr(kLayersRecordPrefix.size()));
        if (!tensor.ok() || of_ranks_[tensor.value().ordinal] != InBase::kNotHere) continue;
      }
      reused.inherited.emplace(name, value);
    }
    return Status();
  }

  Collective& collective_;
  const ReuseInput& input_;
  const CommonValues& common_;
  std::shared_ptr<OpenedCheckpoint> base_;
  ComparedWithBase found_;
  std::vector<InBase> of_ranks_;  // At rank 0: what all of them found of each tensor.
  bool cancelled_ = false;
};

}  // namespace

Status CheckBase(FileSystem& fs, const SaveOptions& options, Staging& staging) {
  if (staging.base.IsZero() && staging.base_problem.ok()) return Status();
  const auto check = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(staging.base_problem);
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto base, OpenBaseOf(fs, staging));
    if (!options.inherit.empty()) return Status();
    if (!base->index().info().self_contained) {
      return Status(Code::kUnsupported, staging.base_name +
                                            ": its data are files of another program, which are "
                                            "not linked; `inherit` takes them where they are");
    }
    const std::uint64_t in_a_row = SavesInARowThatReused(base->index());
    if (IsFull(options, in_a_row)) {
      staging.base_note = "written anew, as the option full_every says";
      staging.base = Uuid();
    }
    return Status();
  };
  const Status checked = Guarded(check);
  if (checked.ok() || !options.inherit.empty()) return checked;
  staging.base_note = checked.message();
  staging.base = Uuid();
  return Status();
}

Result<Reused> TakeFromBase(Collective& collective, const ReuseInput& input,
                            const CommonValues& common) {
  return Taking(collective, input, common).Run();
}

}  // namespace tensormount
