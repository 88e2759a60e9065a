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

// What can be wrong with a layout. The names are part of the JSON form.
enum class FindingKind : std::uint8_t {
  kMissing,         // "missing": cells that no rank holds.
  kOverlap,         // "overlap": cells of two unequal regions, or twice on one rank.
  kDType,           // "dtype": differs between ranks.
  kShape,           // "shape": differs between ranks.
  kNoMain,          // "no_main": labelled replicas, none of which is main.
  kSeveralMains,    // "several_mains"
  kMixedLabels,     // "mixed_labels": labelled and unlabelled shards of one key.
  kObjectMissing,   // "object_missing": a part of a grid that no rank has.
  kObjectTwice,     // "object_twice": a part twice on one rank.
  kObjectGrid,      // "object_grid": differs between ranks.
  kObjectContents,  // "object_contents": replicas of an object differ.
  kKind,            // "kind": a tensor on one rank and an object on another.
  kLayerName,       // "layer_name": a key that a stacked tensor also has as a layer.
  kCommon,          // "common": a common value differs.
};
TENSORMOUNT_EXPORT std::string_view FindingKindName(FindingKind kind);

// One thing that is wrong. Findings are the same on every rank, so that any rank's log has all of
// it.
struct Finding {
  FindingKind kind = FindingKind::kMissing;
  std::string key;
  std::vector<int> ranks;        // Concerned ones, rising; at most 64 are listed...
  std::uint64_t rank_count = 0;  // ... of so many.
  std::optional<Box> box;        // The exact cells, of tensors.
  std::uint64_t elements = 0;    // In it.
  // One line: "tensor w: [4:5, 0:8] is held by no rank (parts are held by ranks 0, 1)".
  std::string message;
  // What most likely happened, in words; empty where nothing is likely:
  // "ranks 8-15 report the boxes of ranks 0-7: wrong tensor-parallel rank?".
  std::string cause;
};

// The verdict about a layout, the same on every rank.
// Nothing in it is of one rank alone, so any rank may print it.
struct TENSORMOUNT_EXPORT LayoutReport {
  int world = 0;
  std::uint64_t tensors = 0;
  std::uint64_t boxes = 0;          // Of all ranks; replicas counted each.
  std::uint64_t bytes = 0;          // Of the tensors.
  std::uint64_t replica_bytes = 0;  // Per extra holder.
  std::uint64_t objects = 0;
  std::uint64_t layouts = 0;      // Different ones among the ranks.
  std::vector<Finding> findings;  // By key, then kind, then place; at most the limit...
  // ... of so many. Of one tensor, 4,096 holes and as many overlaps are told apart.
  std::uint64_t finding_count = 0;

  bool ok() const { return finding_count == 0; }
  // Ok, or kInvalidArgument with the first finding, its cause, and how many more there are.
  Status ToStatus() const;
  std::string ToText() const;  // Several lines, for people.
  std::string ToJson() const;  // One document; fields are only ever added.
};

// The same on every rank.
struct ValidateOptions {
  std::size_t limit = 100;  // Findings listed.
  Timeouts timeouts = {};
  // Where not null, set to end the call: a rank that has waited for others for three seconds since
  // then gives up with kCancelled.
  const std::atomic<bool>* cancel = nullptr;
};

// Collective: whether what the ranks hold together is a checkpoint: every cell of every tensor
// exactly once but for replicas, dtypes, shapes, objects and common values agreed on. Reads no
// data: shards may be metadata only. The status is about the call (a rank died, a rank's state has
// a failure); what is wrong with the layout is in the report.
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
// The layout of a whole job as JSON (docs/spec.md), for `tensormount check` and for people: what
// rank 0 gets of a live job, or what somebody writes before there is one.

// Collective: the job's layout as a spec at rank 0, empty elsewhere. Ranks with equal layouts are
// written once.
TENSORMOUNT_EXPORT Result<std::string> DumpSpec(const StateDict& state, Communicator& comm,
                                                const Timeouts& timeouts = {});
// `cancel`: as in ValidateOptions.
TENSORMOUNT_EXPORT Result<std::string> DumpSpec(const StateDict& state, Communicator& comm,
                                                const Timeouts& timeouts,
                                                const std::atomic<bool>* cancel);
// The same check, of a described job of any size, by one process without data.
// kInvalidArgument says where the text breaks a rule.
TENSORMOUNT_EXPORT Result<LayoutReport> CheckSpec(std::string_view json, std::size_t limit = 100);

}  // namespace tensormount

#endif  // TENSORMOUNT_VALIDATE_H_
