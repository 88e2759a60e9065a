// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_PLAN_EXCHANGE_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_PLAN_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/validate.h"

#include "base/hash.h"
#include "collective/comm/agreement.h"
#include "collective/comm/collective.h"
#include "collective/layout/layout.h"
#include "collective/save/rank_task.h"
#include "collective/save/save_plan.h"

namespace tensormount {

// Makes each rank's task from a layout without findings, in two exchanges:
//
//   owner: Survey  --->  rank 0: Decide  --->  owner: Plan  ---- tasks ---->  rank: DecodeTasks
//
// Owners are the ranks that check and plan keys (layout/layout.h). Each owner sends one message to
// every rank.

// One rank's part of the plan of a job. Immutable, shared by the saves that use it.
struct JobPlan {
  std::shared_ptr<const RankTask> task;
  std::shared_ptr<const GlobalLayout> layout;  // Layout of the keys that this rank plans.
  std::uint32_t owners = 1;
};

// Collective: the owners plan their keys, and every rank gets its task. Failures are the same on
// all ranks, except `local`: if only this rank fails, the function returns a plan without a task
// and sets `local`, which the caller must pass to the other ranks.
Result<JobPlan> ExchangePlans(Collective& collective, const StateDict& state,
                              std::shared_ptr<const GlobalLayout> layout, const PlanRules& rules,
                              Status* local);

// A plan kept for the next save of the same job (comm/agreement.h).
struct KeptPlan {
  Hash128 job;  // Hash of the job (Agreement::job).
  // TaskFingerprint of the rank's own state and options. The layouts of other ranks are covered by
  // `job`.
  Hash128 task;
  bool validated = false;  // Whether the layout was checked.
  LayoutReport report;     // Has no findings: a layout with findings has no plan.
  JobPlan plan;

  // Whether a save may use the plan. A save that validates needs a validated plan.
  bool Fits(const Hash128& wanted, bool validate) const {
    return task == wanted && (validated || !validate);
  }
};

std::shared_ptr<KeptPlans<KeptPlan>> SavePlansOf(Communicator& comm);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_PLAN_EXCHANGE_H_
