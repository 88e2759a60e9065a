// SPDX-License-Identifier: Apache-2.0
// The exchange of plan_exchange.h: owners (ranks that check keys) plan their keys, and all ranks
// get their tasks.
#include "collective/save/plan_exchange.h"

#include <numeric>
#include <string>
#include <utility>

#include "base/coding.h"
#include "collective/comm/status_wire.h"
#include "collective/guarded.h"

namespace tensormount {
namespace {

// Adds the owner's rank to a failure, except to kUnsupported, which is a property of the layout and
// so of the whole job.
Status WithOwner(std::size_t owner, const Status& status) {
  return status.code() == Code::kUnsupported ? status : FromRank(static_cast<int>(owner), status);
}

Result<std::string> DecideAll(const std::vector<std::string>& parts, const PlanRules& rules,
                              int world) {
  std::vector<std::string> surveys;
  for (std::size_t owner = 0; owner < rules.owners; ++owner) {
    ByteReader in(parts[owner], "the plan that a rank sent");
    if (const Status status = ReadStatus(in); !status.ok()) return WithOwner(owner, status);
    surveys.emplace_back(in.Raw(in.left()));
  }
  return SavePlanner::Decide(surveys, rules, world);
}

}  // namespace

Result<JobPlan> ExchangePlans(Collective& collective, const StateDict& state,
                              std::shared_ptr<const GlobalLayout> layout, const PlanRules& rules,
                              Status* local) {
  // Every rank must take part in both exchanges: a rank that is no owner sends an empty survey and
  // no tasks, and an owner that failed sends its failure instead.
  const auto ranks = static_cast<std::size_t>(collective.size());
  const auto rank = static_cast<std::size_t>(collective.rank());
  if (rules.owners == 0 || rules.owners > ranks) {
    return Status(Code::kInternal, "internal error: save plan: " + std::to_string(rules.owners) +
                                       " ranks plan, but there are " + std::to_string(ranks) +
                                       " ranks");
  }
  const bool owns = rank < rules.owners;
  std::unique_ptr<SavePlanner> planner;
  std::string survey;
  if (owns) {
    ByteWriter mine;
    const Status status = Guarded([&]() -> Status {
      planner = std::make_unique<SavePlanner>(*layout, rules);
      TENSORMOUNT_ASSIGN_OR_RETURN(survey, planner->Survey());
      return Status();
    });
    WriteStatus(mine, status);
    mine.Raw(survey.data(), survey.size());
    survey = std::move(mine.bytes());
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::string decision,
      collective.Decide(survey, "plan", [&](std::vector<std::string>& parts) {
        return DecideAll(parts, rules, collective.size());
      }));

  std::vector<Collective::Letter> letters;
  if (owns) {
    std::vector<std::string> to_each;
    const Status status = Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const SavePlan plan,
                                   planner->Plan(decision, static_cast<std::uint32_t>(rank)));
      to_each = EncodeTasks(*layout, plan);
      return Status();
    });
    if (!status.ok()) to_each.assign(ranks, EncodeTaskFailure(WithOwner(rank, status)));
    planner.reset();
    for (std::size_t r = 0; r < ranks; ++r) {
      letters.push_back({static_cast<int>(r), std::move(to_each[r])});
    }
  }
  std::vector<int> owners(rules.owners);
  std::iota(owners.begin(), owners.end(), 0);
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<std::string> from_each,
                               collective.NeighborAllToAll(letters, owners, "send the plan"));
  letters.clear();
  TENSORMOUNT_RETURN_IF_ERROR(FailureOfOwners(from_each));
  JobPlan plan;
  *local = Guarded([&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(RankTask task, DecodeTasks(from_each, state, collective.size()));
    plan.task = std::make_shared<const RankTask>(std::move(task));
    return Status();
  });
  plan.layout = std::move(layout);
  plan.owners = rules.owners;
  return plan;
}

std::shared_ptr<KeptPlans<KeptPlan>> SavePlansOf(Communicator& comm) {
  // All channels of the group share these plans.
  return KeptPlans<KeptPlan>::Of(comm, "save plans", 4);
}

}  // namespace tensormount
