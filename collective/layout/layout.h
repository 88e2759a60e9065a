// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/validate.h"

#include "base/hash.h"
#include "shard/tensor_meta.h"

// The combined layout of all ranks, and the check that it makes whole tensors. Each key is assigned
// by hash to one of `owners` ranks, its owner, which checks the key. So no rank has to see all of a
// large job: the functions below work on the keys of one owner.
//
//   StateDict of a rank  --EncodeLayout-->      bytes, per owner
//   bytes of all ranks   --LayoutTable::Add-->  columns
//   columns              --CheckLayout-->       LayoutReport
//   columns              --MakeLayout-->        GlobalLayout
//
// All functions are pure and run without ranks: `tensormount check` and the tests check jobs of
// 16,384 ranks in one process.

namespace tensormount {

// The rank, below `owners`, that checks a key (its owner). The result is the same on every rank and
// machine.
std::uint32_t OwnerOf(std::string_view key, std::uint32_t owners);

// Encodes one rank's layout of the keys that rank `owner` checks (layout/wire.h). Ranks with equal
// layouts have equal bytes: nothing in the bytes depends on the rank. The result is empty if the
// rank holds none of the keys.
std::string EncodeLayout(const StateDict& state, std::uint32_t owner, std::uint32_t owners);

// Layouts of all ranks, stored by column, so that adding and visiting many boxes of few tensors is
// cheap.
class LayoutTable {
 public:
  LayoutTable();
  ~LayoutTable();
  LayoutTable(LayoutTable&&) noexcept;
  LayoutTable& operator=(LayoutTable&&) noexcept;

  // Adds the layout that all of `ranks` (rising) have. The tensors and the objects of a layout may
  // be added in two calls. Malformed bytes fail with kDataLoss "layout of rank N: ..."; the table
  // must not be used after a failure.
  Status Add(std::string_view encoded, std::span<const int> ranks);
  std::uint64_t boxes() const;  // Number of boxes of all ranks.

  struct Rep;
  const Rep& rep() const { return *rep_; }

 private:
  std::unique_ptr<Rep> rep_;
};

// Rules for CheckLayout.
struct LayoutRules {
  int world = 0;            // Number of ranks, including those that hold nothing.
  std::size_t limit = 100;  // Maximum number of findings to list.
  // By key of a stacked tensor: the pattern of its layers' names (StateDict::NameLayers).
  const std::map<std::string, std::string>* layer_names = nullptr;
  // Whether contents of an object may differ between ranks. If they differ, the lowest rank's are
  // kept, and the report has a warning.
  bool keep_lowest = false;
};
// Finds errors in the combined layout. Pure: the same on every machine. Checks that no key is both
// a tensor and an object, dtypes and shapes of a key agree, its shards cover every cell exactly
// once except for replicas, labels of replicas name one main holder, objects have equal contents on
// all ranks and grids that agree and are complete, and no layer's name is another key.
// To add a check, add a function in layout_judge.cc and a FindingKind in validate.h
// (docs/architecture.md, "A check of a layout").
LayoutReport CheckLayout(const LayoutTable& table, const LayoutRules& rules);
// Merges reports about disjoint sets of keys into one report with at most `limit` findings and
// `limit` warnings.
LayoutReport MergeReports(std::span<const LayoutReport> reports, std::size_t limit);

// ---- A sound layout, for planning -----------------------------------------------------------

// A rank that holds a region or an object part, and the position of this item in the rank's state
// dict.
struct Holder {
  int rank = 0;
  std::uint32_t item = 0;
  friend bool operator==(const Holder&, const Holder&) = default;
};

// A region of a tensor, never empty, and all ranks that hold it. If there are several, they hold
// replicas.
struct Holding {
  Region region;
  std::uint64_t bytes = 0;
  std::vector<Holder> holders;  // Sorted by rank.
  int main = -1;                // The rank labelled as main; -1 if none is.
};

// Example: "w" of shape [4, 8] in rows on ranks 0 and 1, replicated on 2 and 3, has two holdings:
// {[0:2, 0:8], 64 bytes, holders 0 and 2} and {[2:4, 0:8], 64 bytes, holders 1 and 3}.
struct LayoutTensor {
  TensorMeta meta;
  std::vector<Holding> holdings;  // Sorted by CompareRegions; they cover every cell exactly once.
  // Lowest rank that has the key; this rank records a tensor without cells.
  int first_rank = 0;
};

// One part of an object (StateDict::AddObject); `index` and `grid` are {} for a whole object.
struct LayoutObject {
  std::string key;
  Dims index;
  Dims grid;
  std::uint64_t length = 0;
  std::vector<Holder> holders;  // Sorted by rank.
};

// The layout of the keys that one rank checks (OwnerOf).
struct GlobalLayout {
  int world = 0;
  std::vector<LayoutTensor> tensors;  // Sorted by key.
  std::vector<LayoutObject> objects;  // Sorted by key, then index.
  std::uint64_t tensor_bytes = 0;
  std::uint64_t replica_bytes = 0;  // Bytes of all replicas but the first of each region.
};

// Makes the layout from which saves are planned. `table` should pass CheckLayout. If the caller
// skipped the check, some errors fail with kInvalidArgument here; cells may still be missing or
// stored twice, which rank 0 detects when it publishes.
Result<GlobalLayout> MakeLayout(const LayoutTable& table, int world, bool keep_lowest = false);

// A list of ranks as text: "rank 3", "ranks 0, 1, 2", "ranks 8-15". Lists at most 16 ranks or runs
// of ranks.
std::string RankList(std::vector<int> ranks);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_H_
