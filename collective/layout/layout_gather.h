// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_GATHER_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_GATHER_H_

#include <string>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "collective/comm/collective.h"

namespace tensormount {

// For the dump of a job's layout as a spec (docs/spec.md). Two rounds: fingerprints first, so that
// of ranks that hold the same only one sends. Rank 0 needs as much memory as all different layouts
// together.

// A layout (DecodeLayout in layout/wire.h reads it; empty: holds nothing) and the ranks that have
// it, rising.
struct GatheredLayout {
  std::string encoded;
  std::vector<int> ranks;
};

// Collective: all different layouts at rank 0, by their lowest rank; nothing elsewhere. Fails on
// all ranks where a rank's state has a failure.
Result<std::vector<GatheredLayout>> GatherLayouts(Collective& collective, const StateDict& state);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_GATHER_H_
