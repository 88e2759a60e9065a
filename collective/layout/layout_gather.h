// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_GATHER_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_GATHER_H_

#include <string>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "collective/comm/collective.h"

namespace tensormount {

// Collects the layouts of a job for a dump as a spec (docs/spec.md). All ranks send fingerprints
// first, then only one rank of each set of ranks with equal layouts sends its layout. Rank 0 needs
// memory for all different layouts together.

// An encoded layout (DecodeLayout in layout/wire.h) and the ranks that have it, rising. `encoded`
// is empty if these ranks have no shards or objects.
struct GatheredLayout {
  std::string encoded;
  std::vector<int> ranks;
};

// Collective. Returns all different layouts at rank 0, sorted by their lowest rank; an empty vector
// on other ranks. Fails on all ranks if a rank's state has a failure.
Result<std::vector<GatheredLayout>> GatherLayouts(Collective& collective, const StateDict& state);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_GATHER_H_
