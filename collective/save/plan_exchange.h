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
  // What a plan depends on, besides the layouts of the other ranks.
  // Those are in `job`: a hash over what all ranks bring.
  struct Key {
    Hash128 items;  // ItemsFingerprint.
    PlacementRule placement = PlacementRule::kAuto;
    SaveStrategy strategy = SaveStrategy::kParallel;
    friend bool operator==(const Key&, const Key&) = default;
  };
  Key key;
  bool validated = false;  // The layout was proved sound.
  LayoutReport report;     // Sound: a job with findings has no plan.
  JobPlan plan;

  // Whether a save may use it: one that asks for the proof only where there was one.
  bool Fits(const Key& wanted, bool validate) const {
    return key == wanted && (validated || !validate);
  }
};

std::shared_ptr<KeptPlans<KeptPlan>> SavePlansOf(Communicator& comm);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_PLAN_EXCHANGE_H_
