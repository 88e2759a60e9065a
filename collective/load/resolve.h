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

// Resolves one rank's request against the stored tensors: shapes that differ are cropped or grown,
// layers are found in their stack, objects on their grid, as the rules of the load allow. After
// this step all code works with stored tensors.

namespace tensormount {

// The resolution of one shard of the request. Examples, for a stored "w" of shape [6, 8]:
//   asked [6, 8], rows 2 to 3            regions {[2:4, 0:8]}
//   asked [8, 8] (Grow::kZero), rows 5 to 7   regions {[5:6, 0:8]}, uncovered {[6:8, 0:8]}, zero
//   asked "layers.3.w" of shape [8], where [6, 8] is a stack: regions {[3:4, 0:8]}, layer 3
struct ResolvedItem {
  std::uint32_t item = 0;    // Position in StateDict::tensors().
  std::uint32_t asked = 0;   // Position in LoadRequest::tensors.
  std::uint32_t stored = 0;  // Ordinal of the stored tensor.
  std::int64_t layer = -1;   // Number of the layer in the stored stack; -1: no layer.
  bool convert = false;      // The requested dtype differs from the stored one.
  // Disjoint parts of the stored tensor to load; one, except for a cropped flat range.
  std::vector<Region> regions;
  // Boxes of the requested tensor that lie outside of the stored one.
  std::vector<Box> uncovered;
  bool zero = false;  // Whether the load sets `uncovered` to zero.
};

// One requested part of an object, and the stored part that serves it.
struct ResolvedObject {
  std::string key;
  Dims requested_index;
  ObjectRecord part;
};

// A resolved request. Immutable, and shared by the loads that use the same plan.
struct ResolvedRequest {
  // The reason why the request can never be served: kInvalidArgument, or kUnsupported for a
  // conversion. If set, the other fields have no meaning.
  Status refusal;
  // The stored tensors of all items, sorted by ordinal; shared with the plan.
  std::vector<std::shared_ptr<const TensorEntry>> tensors;
  std::vector<ResolvedItem> items;  // Shards with cells, in the order of the request.
  std::vector<ResolvedObject> objects;
  std::vector<std::string> not_stored;         // Sorted, without exempt keys; "KEY[2]" for a part.
  std::vector<std::string> skipped;            // Requested keys that are not loaded, sorted.
  std::vector<std::string> requested_objects;  // Keys of requested objects, sorted.

  const std::shared_ptr<const TensorEntry>& Stored(const ResolvedItem& of) const;
};

// Fails only if the index cannot be read. Without `objects`, resolves tensors only.
Result<ResolvedRequest> ResolveRequest(const CheckpointIndex& index, const LoadRequest& request,
                                       const LoadOptions& options, bool objects);

// Whether LoadOptions::strict_exempt has a glob that matches `key`.
bool IsExemptKey(const LoadOptions& options, std::string_view key);

// Stored keys that no rank requested, from one bit for each stored tensor (by ordinal) and the
// requested keys of objects. Sorted, without exempt keys.
Result<std::vector<std::string>> NotRequested(const CheckpointIndex& index,
                                              const std::vector<bool>& tensors,
                                              const std::vector<std::string>& objects,
                                              const LoadOptions& options);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LOAD_RESOLVE_H_
