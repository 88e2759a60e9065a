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

// Inputs of a layout exchange besides the state dict. All but `kept_plan_job` must be equal on all
// ranks.
struct CallDescription {
  // Pairs of name and value, such as ("path", "STORE/NAME") or ("placement", "auto"). Ranks compare
  // a hash of them; a difference is reported as "option placement is auto on rank 0 and rank-shard
  // on rank 1".
  std::vector<std::pair<std::string, std::string>> options;
  CommonCheck common = CommonCheck::kError;
  std::vector<std::string> common_exempt;
  bool validate = true;
  bool keep_lowest = false;  // If objects differ: keep the lowest rank's, without an error.
  bool plan = true;          // Whether to fill JobLayout::layout.
  std::size_t limit = 100;
  // The job whose plan this rank has kept (JobLayout::fingerprint of an earlier call); zero: none.
  // The fingerprint does not cover options: keep one plan for each set of options that the plan
  // depends on.
  Hash128 kept_plan_job;
};

// Results of the exchange.
struct JobLayout {
  // Hash over the layouts of all ranks, in the order of ranks. Lengths and contents of objects are
  // not hashed, because they change with every save.
  Hash128 fingerprint;
  // Whether all ranks had kept the plan of this job. If so, `layout` is empty, and the report's
  // counts of tensors, objects and bytes have no meaning. Ranks exchanged only 64 bytes each,
  // unless ranks have different common values or different objects, which are compared again.
  bool unchanged = false;
  std::uint32_t owners = 1;  // Ranks 0 to owners - 1 check and plan the keys.
  LayoutReport report;       // Report for the whole job, the same on every rank.
  GlobalLayout layout;       // Layout of the keys that this rank checks (OwnerOf).
  // At rank 0: every common value that any rank set, in stored form, including content metadata and
  // layer names.
  std::map<std::string, CommonValue> common;
  // On every rank: the layer names that any rank set (StateDict::NameLayers).
  std::map<std::string, std::string> layer_names;
  std::vector<std::string> warnings;  // Differing common values that are no error.
};

// Collective, with the same verdict on every rank:
//   1. 64 bytes from each rank: fingerprints of its layout, of the call, of its common values, and
//      of the kept plan. Rank 0 answers "unchanged", or which ranks have equal layouts.
//   2. Only if a rank failed, or options or common values differ: their texts.
//   3. One rank of each set of equal layouts sends its layout, cut by owner, to the owners.
//   4. Owners check; rank 0 merges the reports and sends the result to all.
// Owners are the ranks that check keys; their number follows from the number of boxes
// (ForceOwners). Fails if a rank cannot take part ("rank 2: ..."), options differ
// (kInvalidArgument), a Collective call fails, or a layout that is not validated cannot be planned.
// A layout with findings is *not* a failure: the caller checks report.ok().
Result<JobLayout> ExchangeLayouts(Collective& collective, const StateDict& state,
                                  const CallDescription& call);

// Sets the number of ranks that check keys (owners) for jobs whose rank 0 is in this process; 0:
// the number follows from the number of boxes. For tests, which have no jobs of millions of boxes.
void ForceOwners(std::uint32_t owners);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_EXCHANGE_H_
