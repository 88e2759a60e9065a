// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LOAD_RESOLVE_H_
#define TENSORMOUNT_COLLECTIVE_LOAD_RESOLVE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/load.h"

#include "collective/load/request.h"
#include "index/records/checkpoint_index.h"

// How what one rank asks for meets what is stored: shapes that differ are cropped or grown, layers
// are found in their stack, objects on their grid, as the rules of the load allow. From here on
// everything speaks of the stored tensors.

namespace tensormount {

// What becomes of one shard of the request. Examples, of a stored "w" of shape [6, 8]:
//   asked [6, 8], rows 2 to 3            regions {[2:4, 0:8]}
//   asked [8, 8] (Grow::kZero), rows 5 to 7   regions {[5:6, 0:8]}, uncovered {[6:8, 0:8]}, zero
//   asked "layers.3.w" of shape [8], where [6, 8] is a stack: regions {[3:4, 0:8]}, layer 3
struct ResolvedItem {
  std::uint32_t item = 0;    // Position in StateDict::tensors().
  std::uint32_t asked = 0;   // Position in LoadRequest::tensors.
  std::uint32_t stored = 0;  // Ordinal of the stored tensor.
  std::int64_t layer = -1;   // Of the stored tensor, whose first axis the asked one lacks.
  bool convert = false;      // Elements are of another type.
  // Disjoint parts of the stored tensor that are loaded; one, but where a flat range is cropped.
  std::vector<Region> regions;
  // What the stored tensor does not have, as boxes of the asked one.
  std::vector<Box> uncovered;
  bool zero = false;  // It is set to zero.
};

// One part of an object that is asked for, and the stored part that serves it.
struct ResolvedObject {
  std::string key;
  Dims asked_index;
  ObjectRecord part;
};

// A whole request, resolved. Immutable, and shared by the loads that use the same plan.
struct Resolved {
  // Why the request can never be served: kInvalidArgument, or kUnsupported for a conversion. Then
  // the rest is not filled in.
  Status refusal;
  // Those that items are about, by ordinal; shared with the plan.
  std::vector<std::shared_ptr<const TensorEntry>> tensors;
  std::vector<ResolvedItem> items;  // Not the empty ones; in order.
  std::vector<ResolvedObject> objects;
  std::vector<std::string> not_stored;     // Sorted; not exempt ones. "KEY[2]" is a part.
  std::vector<std::string> skipped;        // Keys, sorted.
  std::vector<std::string> asked_objects;  // Keys, sorted.

  // Of an item's tensor.
  const std::shared_ptr<const TensorEntry>& Stored(const ResolvedItem& of) const;
};

// Fails only where the index cannot be read. Without `objects`, of its tensors alone.
Result<Resolved> ResolveRequest(const CheckpointIndex& index, const LoadRequest& request,
                                const LoadOptions& options, bool objects);

// Whether one of the globs names the key.
bool IsExemptKey(const LoadOptions& options, std::string_view key);

// Which stored keys nobody asked for: from one bit a stored tensor (by ordinal) and the keys of
// objects that anybody did ask for. Sorted, without exempt ones.
Result<std::vector<std::string>> NotRequested(const CheckpointIndex& index,
                                              const std::vector<bool>& tensors,
                                              const std::vector<std::string>& objects,
                                              const LoadOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_RESOLVE_H_
