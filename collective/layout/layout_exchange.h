// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_EXCHANGE_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_EXCHANGE_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/common_value.h"
#include "tensormount/save.h"
#include "tensormount/state_dict.h"
#include "tensormount/validate.h"

#include "base/hash.h"
#include "collective/comm/collective.h"
#include "collective/layout/layout.h"

namespace tensormount {

// What must be the same on all ranks that make a call together, besides their layouts.
struct CallDescription {
  // (what, value): ("path", "STORE/NAME"), ("placement", "auto"). Compared by hash; where they
  // differ: "option placement is auto on rank 0 and rank-shard on rank 1".
  std::vector<std::pair<std::string, std::string>> options;
  CommonCheck common = CommonCheck::kError;
  std::vector<std::string> common_exempt;
  bool validate = true;
  bool plan = true;  // Whether JobLayout::layout is wanted, where it is sound.
  std::size_t limit = 100;
  // The job whose plan this rank has at hand (JobLayout::fingerprint of an earlier call); zero:
  // none. Options are not in it: where a plan depends on them, keep one for each set of options.
  Hash128 plan_at_hand;
};

// What the ranks found out about each other.
struct JobLayout {
  // Over the layouts of all ranks, their number, and the version of this software. Lengths and
  // contents of objects are not part of it: they change with every save.
  Hash128 fingerprint;
  // All ranks had the plan of this very job at hand: nothing below but common, warnings, findings
  // and the report's world, boxes and layouts is filled in, and no more than 64 bytes a rank were
  // exchanged (but for common values that differ; and where ranks have different objects, these are
  // compared again).
  bool unchanged = false;
  std::uint32_t owners = 1;  // Ranks [0, owners) judge and plan, each the keys that are its own.
  LayoutReport report;       // Of the whole job, the same on every rank.
  GlobalLayout layout;       // Of this rank's own keys; empty on ranks that own none.
  // At rank 0: every common value that any rank set (content metadata and layer names included, in
  // the form in which they are stored).
  std::map<std::string, CommonValue> common;
  // On every rank: the names of layers that any rank gave (StateDict::NameLayers).
  std::map<std::string, std::string> layer_names;
  std::vector<std::string> warnings;  // Common values that differ, where that only warns.
};

// Collective, the same verdict on every rank:
//   1. 64 bytes from each rank: fingerprints of its layout, of the call, of its common values, and
//      the plan at hand. Rank 0 answers with "unchanged", or with which ranks have equal layouts.
//   2. Only where they differ: the texts of options, common values, statuses.
//   3. One rank of each set of equal layouts sends its layout, cut by owner, to the owners.
//   4. Owners judge; rank 0 merges the reports and tells all.
// The number of owners follows from the number of boxes (ForceOwners).
// Failures: of ranks that could not take part ("rank 2: ..."), options that differ
// (kInvalidArgument), and those of Collective. A layout with findings is *not* a failure here: the
// caller looks at report.ok().
Result<JobLayout> ExchangeLayouts(Collective& collective, const StateDict& state,
                                  const CallDescription& call);

// From now on the jobs whose rank 0 is in this process have so many owners, however small they are;
// 0: as many as their boxes ask for. For tests, which have no jobs of millions of boxes.
void ForceOwners(std::uint32_t owners);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_EXCHANGE_H_
