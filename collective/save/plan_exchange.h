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

// From a sound layout to what each rank writes, in two exchanges at most:
//
//   owner: Survey  --->  rank 0: Decide  --->  owner: Plan  --- letters --->  rank: DecodeTasks
//
// Owners talk to the ranks that have something of their keys and to no others, so that the number
// of messages grows with the ranks and not with their pairs.

// What a rank has of the plan of a job. Immutable, shared by the saves that use it.
struct JobPlan {
  std::shared_ptr<const RankTask> task;
  std::shared_ptr<const GlobalLayout> layout;  // Of the keys that this rank owns.
  std::uint32_t owners = 1;
};

// Collective: the owners plan their keys, and every rank gets its task. Fails on all ranks alike,
// but for `local`: what only this rank found wrong, with an empty plan returned. It is for the
// caller to tell the others.
Result<JobPlan> ExchangePlans(Collective& collective, const StateDict& state,
                              std::shared_ptr<const GlobalLayout> layout, const PlanRules& rules,
                              Status* local);

// A plan as it is kept for the next save of the same job (comm/agreement.h).
struct KeptPlan {
  Hash128 job;  // Agreement::job
  // TaskFingerprint: what this rank's part of it depends on, besides the layouts of the other
  // ranks. Those are in `job`, a hash over what all ranks bring.
  Hash128 task;
  bool validated = false;  // The layout was proved sound.
  LayoutReport report;     // Sound: a job with findings has no plan.
  JobPlan plan;

  // Whether a save may use it: one that asks for the proof only where there was one.
  bool Fits(const Hash128& wanted, bool validate) const {
    return task == wanted && (validated || !validate);
  }
};

std::shared_ptr<KeptPlans<KeptPlan>> SavePlansOf(Communicator& comm);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_PLAN_EXCHANGE_H_
