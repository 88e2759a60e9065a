// SPDX-License-Identifier: Apache-2.0
// ExchangeLayouts: finds with few messages whether the shards of all ranks make whole tensors.
// First each rank sends 64 bytes (layout_round.h). Then one rank of each set of ranks with equal
// layouts sends its layout, split among the ranks that check keys (owners), and rank 0 merges their
// reports. Each key is assigned to an owner by hash, so that no rank sees all of a large job.
#include "collective/layout/layout_exchange.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>

#include "base/coding.h"
#include "collective/guarded.h"
#include "collective/layout/call_options.h"
#include "collective/layout/common_exchange.h"
#include "collective/layout/layout_gather.h"
#include "collective/layout/layout_round.h"
#include "collective/layout/report.h"
#include "collective/layout/wire.h"
#include "index/records/common_tree.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

constexpr std::string_view kPhase = "validate";
constexpr std::size_t kMaxOption = std::size_t{1} << 20;

using Parts = std::vector<std::string>;

std::atomic<std::uint32_t> forced_owners = 0;

Status CheckItemCount(const StateDict& state) {
  constexpr std::size_t kMost = std::numeric_limits<std::uint32_t>::max() - 1;
  if (state.tensors().size() > kMost || state.objects().size() > kMost) {
    return Status(Code::kInvalidArgument, "more than 2^32 shards or objects on one rank");
  }
  return Status();
}

class Exchange {
 public:
  Exchange(Collective& collective, const StateDict& state, const CallDescription& call)
      : collective_(collective),
        state_(state),
        call_(call),
        rank_(collective.rank()),
        world_(static_cast<std::uint32_t>(collective.size())),
        rules_{call.common, call.common_exempt} {}

  Result<JobLayout> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(FirstRound());
    switch (answer_.next) {
      case RoundAnswer::Next::kFailed:
        return ShareFailures();
      case RoundAnswer::Next::kOptionsDiffer:
        return ShareOptions();
      case RoundAnswer::Next::kProceed:
        break;
    }
    job_.fingerprint = answer_.agreed.job;
    job_.unchanged = answer_.agreed.unchanged;
    job_.owners = answer_.owners;
    job_.layout.world = static_cast<int>(world_);
    if (!answer_.common.empty()) {
      TENSORMOUNT_RETURN_IF_ERROR(CommonRound());
    } else if (rank_ == 0) {
      job_.common = std::move(own_.values);
    }
    if (!answer_.tensors.empty() || !answer_.objects.empty()) {
      TENSORMOUNT_RETURN_IF_ERROR(LayoutRound());
    }
    AddCommonFindings();
    job_.layer_names = std::move(layers_);
    job_.report.world = static_cast<int>(world_);
    job_.report.boxes = answer_.boxes;
    job_.report.layouts = answer_.layouts;
    if (!job_.report.ok()) job_.layout = {};
    return std::move(job_);
  }

 private:
  // Sends the fingerprints to rank 0, or a flag if this rank has failed, and receives rank 0's
  // answer.
  Status FirstRound() {
    RoundMessage mine;
    mine.world = world_;
    failure_ = state_.status();
    if (failure_.ok()) failure_ = Guarded([&] { return Describe(mine); });
    if (!failure_.ok()) {
      mine = {};
      mine.world = world_;
      mine.failed = true;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string told,
        collective_.Decide(EncodeRound(mine), kPhase, [](Parts& parts) -> Result<std::string> {
          TENSORMOUNT_ASSIGN_OR_RETURN(const RoundAnswer answer, AnswerRound(parts, forced_owners));
          return EncodeAnswer(answer);
        }));
    TENSORMOUNT_ASSIGN_OR_RETURN(answer_, DecodeAnswer(told, world_));
    return Status();
  }

  Status Describe(RoundMessage& mine) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckItemCount(state_));
    encoder_.emplace(state_);
    own_ = CommonOf(state_, rank_);
    layers_ = LayersOf(own_.values);
    mine.boxes = static_cast<std::uint32_t>(state_.tensors().size());
    mine.layout = encoder_->Hashes();
    mine.call = Xxh3Low64(EncodeOptions());
    mine.common = FingerprintOf(own_, rules_);
    mine.plan = call_.kept_plan_job.low;
    return Status();
  }

  std::vector<std::pair<std::string, std::string>> Options() const {
    std::vector<std::pair<std::string, std::string>> options = call_.options;
    static constexpr const char* kChecks[] = {"off", "warn", "error"};
    options.emplace_back("common", kChecks[static_cast<std::size_t>(call_.common)]);
    std::string globs;
    for (const std::string& glob : call_.common_exempt) {
      globs += (globs.empty() ? "" : ", ") + QuoteJson(glob);
    }
    options.emplace_back("common_exempt", "[" + globs + "]");
    options.emplace_back("validate", call_.validate ? "on" : "off");
    options.emplace_back("limit", std::to_string(call_.limit));
    return options;
  }
  std::string EncodeOptions() const {
    ByteWriter out;
    for (const auto& [what, value] : Options()) {
      out.String(CutUtf8(what, kMaxOption));
      out.String(CutUtf8(value, kMaxOption));
    }
    return std::move(out.bytes());
  }

  Status ShareFailures() {
    const Status status = collective_.Agree(failure_, kPhase);
    if (!status.ok()) return status;
    return Status(Code::kInternal, "internal error: a rank reported a failure without a cause");
  }

  Status ShareOptions() {
    const int differing_rank = static_cast<int>(answer_.differing_rank);
    const bool tells = rank_ == 0 || rank_ == differing_rank;
    const Result<std::string> told = collective_.Decide(
        tells ? EncodeOptions() : std::string(), kPhase, [&](Parts& parts) -> Result<std::string> {
          return CompareOptions(parts[0], parts[answer_.differing_rank], differing_rank);
        });
    if (!told.ok()) return told.status();
    return Status(Code::kInternal,
                  "internal error: ranks disagree on options, but none reported a difference");
  }

  // Returns an error that names the first difference between the options of rank 0 (`mine`) and of
  // `rank` (`other`); never ok.
  static Status CompareOptions(std::string_view mine, std::string_view other, int rank) {
    const std::string who = "rank " + std::to_string(rank);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<DifferentOption> found,
                                 FindDifferentOption(mine, other, rank, kMaxOption));
    if (!found)
      return Status(Code::kInvalidArgument, "rank 0 and " + who + " make different calls");
    return Status(Code::kInvalidArgument, "option " + found->name + " is " + found->on_rank_0 +
                                              " on rank 0 and " + found->on_rank + " on " + who);
  }

  // One rank of each set of ranks with equal common values sends its values, and rank 0 merges
  // them.
  Status CommonRound() {
    const bool speaks = std::find(answer_.common.begin(), answer_.common.end(),
                                  static_cast<std::uint32_t>(rank_)) != answer_.common.end();
    std::string mine;
    if (speaks) {
      failure_ = Guarded([&] {
        mine = EncodeRankCommon(own_);
        return Status();
      });
    }
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(failure_, kPhase));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string told,
        collective_.Decide(mine, kPhase, [&](Parts& parts) { return UniteCommon(parts); }));
    ByteReader in(told, "the common values that rank 0 sent");
    TENSORMOUNT_ASSIGN_OR_RETURN(common_report_, DecodeReport(in, "report on common values"));
    const std::uint32_t warnings = in.U32();
    for (std::uint32_t i = 0; i < warnings && in.status().ok(); ++i) {
      job_.warnings.emplace_back(in.String(kMaxOption));
    }
    const std::uint32_t layers = in.U32();
    layers_.clear();
    for (std::uint32_t i = 0; i < layers && in.status().ok(); ++i) {
      std::string key(in.String(kMaxKeyBytes));
      layers_.insert_or_assign(std::move(key), std::string(in.String(kMaxKeyBytes)));
    }
    return in.Finish();
  }

  Result<std::string> UniteCommon(const Parts& parts) {
    std::vector<RankCommon> ranks;
    for (const std::uint32_t r : answer_.common) {
      TENSORMOUNT_ASSIGN_OR_RETURN(RankCommon common,
                                   DecodeRankCommon(parts[r], static_cast<int>(r)));
      ranks.push_back(std::move(common));
    }
    CommonUnion united = MergeCommon(ranks, rules_);
    LayoutReport report;
    report.finding_count = united.findings.size();
    if (united.findings.size() > call_.limit) united.findings.resize(call_.limit);
    report.findings = std::move(united.findings);
    ByteWriter out;
    EncodeReport(out, report);
    out.U32(static_cast<std::uint32_t>(united.warnings.size()));
    for (const std::string& warning : united.warnings) {
      out.String(CutUtf8(warning, kMaxOption));
    }
    const std::map<std::string, std::string> layers = LayersOf(united.all.values);
    out.U32(static_cast<std::uint32_t>(layers.size()));
    for (const auto& [key, pattern] : layers) {
      out.String(key);
      out.String(pattern);
    }
    job_.common = std::move(united.all.values);
    return std::move(out.bytes());
  }

  void AddCommonFindings() {
    if (common_report_.ok()) return;
    const LayoutReport both[] = {std::move(job_.report), std::move(common_report_)};
    job_.report = MergeReports(both, call_.limit);
  }

  // Sends layouts to the ranks that check them (owners); rank 0 merges the reports.
  Status LayoutRound() {
    std::vector<Collective::Letter> letters;
    if (IsClassLeader(rank_)) {
      letters.resize(answer_.owners);
      for (std::uint32_t o = 0; o < answer_.owners; ++o) letters[o].peer = static_cast<int>(o);
      failure_ = Guarded([&] { return Pack(letters); });
      // A rank that failed sends empty layouts here, and its status in Agree below.
      if (!failure_.ok()) {
        for (Collective::Letter& letter : letters) letter.text.clear();
      }
    }
    std::vector<int> from;
    for (int r = 0; IsOwner() && r < static_cast<int>(world_); ++r) {
      if (IsClassLeader(r)) from.push_back(r);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(Parts told_here,
                                 collective_.NeighborAllToAll(letters, from, kPhase));
    letters.clear();
    Parts from_each(world_);
    for (std::size_t i = 0; i < from.size(); ++i) {
      from_each[static_cast<std::size_t>(from[i])] = std::move(told_here[i]);
    }
    LayoutReport mine;
    if (failure_.ok()) failure_ = Guarded([&] { return CheckOwnKeys(from_each, mine); });
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(failure_, kPhase));
    ByteWriter out;
    if (IsOwner()) EncodeReport(out, mine);
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string told,
        collective_.Decide(out.bytes(), kPhase, [&](Parts& parts) { return Merge(parts); }));
    ByteReader in(told, "report of rank 0");
    TENSORMOUNT_ASSIGN_OR_RETURN(job_.report, DecodeReport(in, "report of rank 0"));
    return in.Finish();
  }

  bool IsClassLeader(int rank) const {
    return SendsForClass(answer_.tensors, rank) || SendsForClass(answer_.objects, rank);
  }
  bool IsOwner() const { return static_cast<std::uint32_t>(rank_) < answer_.owners; }

  // Fills the message for each owner: u64 size of the encoded tensors, the tensors, the objects.
  Status Pack(std::span<Collective::Letter> to_owners) const {
    Parts tensors(answer_.owners);
    Parts objects(answer_.owners);
    if (SendsForClass(answer_.tensors, rank_))
      tensors = encoder_->Encode(answer_.owners, LayoutPart::kTensors);
    if (SendsForClass(answer_.objects, rank_))
      objects = encoder_->Encode(answer_.owners, LayoutPart::kObjects);
    for (std::uint32_t o = 0; o < answer_.owners; ++o) {
      if (tensors[o].empty() && objects[o].empty()) continue;
      ByteWriter out;
      out.U64(tensors[o].size());
      out.Raw(tensors[o].data(), tensors[o].size());
      out.Raw(objects[o].data(), objects[o].size());
      to_owners[o].text = std::move(out.bytes());
      tensors[o] = {};
      objects[o] = {};
    }
    return Status();
  }

  Status CheckOwnKeys(Parts& from_each, LayoutReport& report) {
    if (!IsOwner()) return Status();
    const std::vector<std::vector<int>> tensor_ranks = RanksByClass(answer_.tensors);
    const std::vector<std::vector<int>> object_ranks = RanksByClass(answer_.objects);
    LayoutTable table;
    for (std::uint32_t r = 0; r < world_; ++r) {
      if (from_each[r].empty()) continue;
      const std::string what = "layout of rank " + std::to_string(r);
      ByteReader in(from_each[r], what);
      const std::uint64_t size = in.U64();
      if (size > in.left() || (size > 0 && tensor_ranks.empty()) ||
          (in.left() > size && object_ranks.empty())) {
        return Status(Code::kDataLoss, what + ": damaged");
      }
      const std::string_view tensors = in.Raw(size);
      const std::string_view objects = in.Raw(in.left());
      if (size > 0) TENSORMOUNT_RETURN_IF_ERROR(table.Add(tensors, tensor_ranks[r]));
      if (!objects.empty()) TENSORMOUNT_RETURN_IF_ERROR(table.Add(objects, object_ranks[r]));
      from_each[r] = {};
    }
    if (call_.validate) {
      report =
          CheckLayout(table, {static_cast<int>(world_), call_.limit, &layers_, call_.keep_lowest});
    }
    // Contents of objects change without the layout, so MakeLayout compares them even if the plan
    // is kept and the layout is not validated.
    if (answer_.agreed.unchanged && !call_.validate) {
      return MakeLayout(table, static_cast<int>(world_), call_.keep_lowest).status();
    }
    if (answer_.agreed.unchanged || !report.ok() || (call_.validate && !call_.plan))
      return Status();
    TENSORMOUNT_ASSIGN_OR_RETURN(job_.layout,
                                 MakeLayout(table, static_cast<int>(world_), call_.keep_lowest));
    if (!call_.validate) {
      report.tensors = job_.layout.tensors.size();
      report.objects = job_.layout.objects.size();
      report.bytes = job_.layout.tensor_bytes;
      report.replica_bytes = job_.layout.replica_bytes;
    }
    return Status();
  }

  Result<std::string> Merge(const Parts& parts) const {
    std::vector<LayoutReport> reports;
    for (std::uint32_t o = 0; o < answer_.owners; ++o) {
      const std::string what = "report of rank " + std::to_string(o);
      ByteReader in(parts[o], what);
      TENSORMOUNT_ASSIGN_OR_RETURN(LayoutReport report, DecodeReport(in, what));
      TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
      reports.push_back(std::move(report));
    }
    ByteWriter out;
    EncodeReport(out, MergeReports(reports, call_.limit));
    return std::move(out.bytes());
  }

  Collective& collective_;
  const StateDict& state_;
  const CallDescription& call_;
  const int rank_;
  const std::uint32_t world_;
  const CommonRules rules_;
  Status failure_;  // A failure that this rank has not sent yet.
  std::optional<LayoutEncoder> encoder_;
  RankCommon own_;
  std::map<std::string, std::string> layers_;  // Layer names that any rank set.
  RoundAnswer answer_;
  LayoutReport common_report_;
  JobLayout job_;
};

}  // namespace

Result<JobLayout> ExchangeLayouts(Collective& collective, const StateDict& state,
                                  const CallDescription& call) {
  return Exchange(collective, state, call).Run();
}

Result<std::vector<GatheredLayout>> GatherLayouts(Collective& collective, const StateDict& state) {
  std::string encoded;
  Status failure = state.status();
  if (failure.ok()) failure = CheckItemCount(state);
  if (failure.ok()) {
    failure = Guarded([&] {
      encoded = std::move(LayoutEncoder(state).Encode(1, LayoutPart::kAll)[0]);
      return Status();
    });
  }
  TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(failure, kPhase));
  const Hash128 hash = Xxh3(encoded);
  ByteWriter mine;
  mine.Hash(hash);
  const auto world = static_cast<std::uint32_t>(collective.size());
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::string told,
      collective.Decide(mine.bytes(), kPhase, [&](Parts& parts) -> Result<std::string> {
        std::vector<Hash128> hashes;
        for (const std::string& part : parts) {
          ByteReader in(part, "layout fingerprint that a rank sent");
          hashes.push_back(in.Hash());
          TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
        }
        ByteWriter out;
        WriteClasses(out, ClassesOf(hashes.size(), [&](std::size_t r) { return hashes[r]; }));
        return std::move(out.bytes());
      }));
  ByteReader in(told, "answer of rank 0");
  RankClasses classes;
  TENSORMOUNT_RETURN_IF_ERROR(ReadClasses(in, world, classes));
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  if (!SendsForClass(classes, collective.rank())) encoded.clear();
  TENSORMOUNT_ASSIGN_OR_RETURN(Parts parts, collective.Gather(encoded, kPhase));
  std::vector<GatheredLayout> layouts;
  if (collective.rank() != 0) return layouts;
  std::vector<std::vector<int>> ranks = RanksByClass(classes);
  for (std::uint32_t r = 0; r < world; ++r) {
    if (!ranks[r].empty()) layouts.push_back({std::move(parts[r]), std::move(ranks[r])});
  }
  return layouts;
}

void ForceOwners(std::uint32_t owners) { forced_owners = owners; }

}  // namespace tensormount
