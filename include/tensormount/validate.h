// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_VALIDATE_H_
#define TENSORMOUNT_VALIDATE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/communicator.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Errors of a layout. The names are part of the JSON form.
enum class FindingKind : std::uint8_t {
  kMissing,         // "missing": cells that no rank holds.
  kOverlap,         // "overlap": cells in two unequal regions, or twice on one rank.
  kDType,           // "dtype": the element type differs between ranks.
  kShape,           // "shape": the global shape differs between ranks.
  kNoMain,          // "no_main": labelled replicas, none of which is main.
  kSeveralMains,    // "several_mains": several main replicas of one region.
  kMixedLabels,     // "mixed_labels": labelled and unlabelled shards of one key.
  kObjectMissing,   // "object_missing": a part of a grid that no rank has.
  kObjectTwice,     // "object_twice": a part twice on one rank.
  kObjectGrid,      // "object_grid": the grid of an object differs between ranks.
  kObjectContents,  // "object_contents": replicas of an object differ.
  kKind,            // "kind": a tensor on one rank and an object on another.
  kLayerName,       // "layer_name": a key that a stacked tensor also has as a layer.
  kCommon,          // "common": a common value differs.
};
TENSORMOUNT_EXPORT std::string_view FindingKindName(FindingKind kind);

// An error of a layout. Findings are equal on every rank, so that any rank's log is complete.
struct Finding {
  FindingKind kind = FindingKind::kMissing;
  std::string key;
  std::vector<int> ranks;        // Affected ranks, ascending; at most 64 are listed.
  std::uint64_t rank_count = 0;  // Number of all affected ranks, listed or not.
  std::optional<Box> box;        // The exact cells of a tensor, if they are one box.
  std::uint64_t elements = 0;    // Number of these cells.
  // One line: "tensor w: [4:5, 0:8] is held by no rank (parts are held by ranks 0, 1)".
  std::string message;
  // The likely cause as text; may be empty.
  std::string cause;
};

// The result of a layout check, equal on every rank.
struct TENSORMOUNT_EXPORT LayoutReport {
  int world = 0;
  std::uint64_t tensors = 0;
  std::uint64_t boxes = 0;          // Boxes of all ranks; each replica counts.
  std::uint64_t bytes = 0;          // Size of the tensors.
  std::uint64_t replica_bytes = 0;  // Bytes held more than once, counted per extra rank.
  std::uint64_t objects = 0;
  std::uint64_t layouts = 0;      // Distinct layouts among the ranks.
  std::vector<Finding> findings;  // Sorted by key, kind, position; at most the limit.
  // Number of all findings, listed or not. At most 4,096 holes and 4,096 overlaps per tensor are
  // distinguished.
  std::uint64_t finding_count = 0;
  // Differences that are not errors in this call (ReplicaCheck::kWarn), at most as many as the
  // limit.
  std::vector<std::string> warnings;

  bool ok() const { return finding_count == 0; }
  // Ok, or kInvalidArgument with the first finding, its cause, and how many more there are.
  Status ToStatus() const;
  std::string ToText() const;  // Several lines, for people.
  std::string ToJson() const;  // One document; later versions may add fields.
};

// Options of a check. All except `cancel` must be equal on every rank.
struct ValidateOptions {
  std::size_t limit = 100;  // Largest number of findings listed.
  Timeouts timeouts = {};
  // If not null, setting it ends the call: a rank that has waited for others for three seconds
  // since then fails with kCancelled.
  const std::atomic<bool>* cancel = nullptr;
};

// Collective: checks whether the ranks' parts together form a complete checkpoint: every cell of
// every tensor exactly once except for replicas; dtypes, shapes, objects and common values equal.
// Reads no data: shards may be metadata only. The status is about the call (a rank died, or its
// state has a failure); errors of the layout are in the report.
//
// Example, before a first save of a new parallel layout:
//
//   const auto report = Validate(state, comm);
//   if (report.ok() && !report.value().ok()) puts(report.value().ToText().c_str());
//
// Costs one exchange of layouts, as the first save does; Save runs the same check
// (SaveOptions::validate).
TENSORMOUNT_EXPORT Result<LayoutReport> Validate(const StateDict& state, Communicator& comm,
                                                 const ValidateOptions& options = {});

// ---- A described job -----------------------------------------------------------------------
// The layout of a whole job as JSON (docs/spec.md), for `tensormount check` and for people: written
// by rank 0 of a running job, or by hand before there is one.

// Collective: returns the job's layout as a spec on rank 0, and "" elsewhere. Equal layouts are
// written once.
TENSORMOUNT_EXPORT Result<std::string> DumpSpec(const StateDict& state, Communicator& comm,
                                                const Timeouts& timeouts = {});
// Like DumpSpec above. `cancel` is as in ValidateOptions.
TENSORMOUNT_EXPORT Result<std::string> DumpSpec(const StateDict& state, Communicator& comm,
                                                const Timeouts& timeouts,
                                                const std::atomic<bool>* cancel);
// Runs the check of Validate on a spec of a job of any size, in one process without data. The
// message of kInvalidArgument gives the position of the error.
TENSORMOUNT_EXPORT Result<LayoutReport> CheckSpec(std::string_view json, std::size_t limit = 100);

}  // namespace tensormount

#endif  // TENSORMOUNT_VALIDATE_H_
