// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_PLAN_EXCHANGE_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_PLAN_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/validate.h"

#include "base/hash.h"
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

// The plans of the last jobs of a communicator's ranks, this rank's part of them. Thread-safe.
class PlanCache {
 public:
  // What a plan depends on, besides the layouts of the other ranks.
  struct Key {
    Hash128 items;  // ItemsFingerprint.
    PlacementRule placement = PlacementRule::kAuto;
    SaveStrategy strategy = SaveStrategy::kParallel;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Entry {
    Hash128 job;  // JobLayout::fingerprint
    Key key;
    bool validated = false;  // The layout was proved sound.
    LayoutReport report;     // Without findings.
    JobPlan plan;
  };
  static constexpr std::size_t kKept = 2;

  // That of `comm`: made at the first call.
  static std::shared_ptr<PlanCache> Of(Communicator& comm);

  // The latest one that fits. `validated`: only a layout that was.
  std::optional<Entry> Find(const Key& key, bool validated) const;
  // Before a job is planned anew, on every rank, so that no two ranks ever hold plans of one job
  // that were made at different times.
  void Forget(const Hash128& job);
  void Keep(Entry entry);

 private:
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;  // The latest last.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_PLAN_EXCHANGE_H_
