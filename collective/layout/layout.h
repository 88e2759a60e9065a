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

// What all ranks hold together, and whether it is a checkpoint. Keys are spread over `owners` ranks
// by hash, so that no rank has to see all of a large job: what stands here is about the keys of one
// owner, or of all where there is one.

//
//   StateDict --EncodeLayout--> bytes --LayoutTable::Add--> columns --CheckLayout--> LayoutReport
//   of a rank                   per owner                   of all ranks \--MakeLayout-->
//   GlobalLayout
//
// All of it is pure and runs without ranks: `tensormount check` and the tests judge jobs of 16,384
// ranks in one process.

namespace tensormount {

// Which owner, of `owners`, judges a key. The same on every rank and machine.
std::uint32_t OwnerOf(std::string_view key, std::uint32_t owners);

// What one rank holds of the keys of one owner, as it travels (layout/wire.h says how). Ranks
// with equal layouts have equal bytes: nothing in it depends on the rank. Empty where it is
// nothing.
std::string EncodeLayout(const StateDict& state, std::uint32_t owner, std::uint32_t owners);

// Layouts of all ranks, column by column: many boxes of few tensors, cheap to add to and to walk.
class LayoutTable {
 public:
  LayoutTable();
  ~LayoutTable();
  LayoutTable(LayoutTable&&) noexcept;
  LayoutTable& operator=(LayoutTable&&) noexcept;

  // A layout and the ranks that have it (rising). Its tensors and its objects may come in two
  // calls. kDataLoss "layout of rank N: ..." where the bytes break a rule; the table is then of no
  // use.
  Status Add(std::string_view encoded, std::span<const int> ranks);
  std::uint64_t boxes() const;  // Of all ranks.

  struct Rep;
  const Rep& rep() const { return *rep_; }

 private:
  std::unique_ptr<Rep> rep_;
};

// What is wrong with what the ranks hold. Pure: the same on every machine. Checks: dtypes and
// shapes of a key agree, its shards cover every cell exactly once but for replicas, labels of
// replicas name one main holder, grids of objects are whole, no layer's name is another key. A
// check is added in layout_judge.cc, a function for what it looks at and a kind of finding for what
// it says.
struct LayoutRules {
  int world = 0;            // Ranks of the job; those that hold nothing count.
  std::size_t limit = 100;  // Findings listed; counted are all.
  // Keys of stacked tensors and the names of their layers (StateDict::NameLayers).
  const std::map<std::string, std::string>* layer_names = nullptr;
};
LayoutReport CheckLayout(const LayoutTable& table, const LayoutRules& rules);
// Reports about disjoint sets of keys as one.
LayoutReport MergeReports(std::span<const LayoutReport> reports, std::size_t limit);

// ---- A sound layout, for planning -----------------------------------------------------------

// Who has something: a rank, and where in its state dict.
struct Holder {
  int rank = 0;
  std::uint32_t item = 0;
  friend bool operator==(const Holder&, const Holder&) = default;
};

// Cells of a tensor that the same ranks hold: one holder, or replicas. Never empty.
struct Holding {
  Region region;
  std::uint64_t bytes = 0;
  std::vector<Holder> holders;  // By rank.
  int main = -1;                // The rank that is labelled so; -1 without labels.
};

// Example: "w" of shape [4, 8] in rows on ranks 0 and 1, replicated on 2 and 3, has two holdings:
// {[0:2, 0:8], 64 bytes, holders 0 and 2} and {[2:4, 0:8], 64 bytes, holders 1 and 3}.
struct LayoutTensor {
  TensorMeta meta;
  std::vector<Holding> holdings;  // By first element; together every cell exactly once.
  int first_rank = 0;  // The lowest rank that named it; it records tensors without cells.
};

// One part of an object (StateDict::AddObject); {} and {} for `index` and `grid` of a whole one.
struct LayoutObject {
  std::string key;
  Dims index;
  Dims grid;
  std::uint64_t length = 0;
  std::vector<Holder> holders;  // By rank.
};

// Of the keys of one owner.
struct GlobalLayout {
  int world = 0;
  std::vector<LayoutTensor> tensors;  // By key.
  std::vector<LayoutObject> objects;  // By key, then index.
  std::uint64_t tensor_bytes = 0;
  std::uint64_t replica_bytes = 0;  // Per extra holder.
};

// Requires a report without findings, or a caller who skipped the check: then cells may be missing
// or doubled, and whoever publishes finds out.
Result<GlobalLayout> MakeLayout(const LayoutTable& table, int world);

// "rank 3", "ranks 0, 1, 2", "ranks 8-15", and no more than 16 of them.
std::string RankList(std::vector<int> ranks);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_LAYOUT_H_
