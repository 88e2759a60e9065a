// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_PLAN_TESTING_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_PLAN_TESTING_H_

#include <span>
#include <string>

#include "collective/save/save_plan.h"

namespace tensormount {

// All three steps of a plan for an only owner.
inline Result<SavePlan> PlanSave(const GlobalLayout& layout, PlacementRule rule,
                                 SaveStrategy strategy = SaveStrategy::kParallel) {
  PlanRules rules;
  rules.placement = rule;
  rules.strategy = strategy;
  SavePlanner planner(layout, rules);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string survey, planner.Survey());
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::string decision,
      SavePlanner::Decide(std::span<const std::string>(&survey, 1), rules, layout.world));
  return planner.Plan(decision, 0);
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_PLAN_TESTING_H_
