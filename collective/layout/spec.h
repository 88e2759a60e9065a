// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_LAYOUT_SPEC_H_
#define TENSORMOUNT_COLLECTIVE_LAYOUT_SPEC_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/dtype.h"
#include "tensormount/shard.h"
#include "tensormount/status.h"

#include "shard/tensor_meta.h"
#include "state/shard_rule.h"

// The described layout of a whole job (docs/spec.md), parsed from JSON, before any shards are made.
// A description of 4,096 ranks stays small, because rules state what the ranks hold: shards are
// made only while one batch of tensors is checked (spec_check.cc). Texts that many tensors share
// (rules, sets of ranks) are stored once, and referred to by position.

namespace tensormount {

// A set of ranks, rising. As text: "0-7,16,32-60/4".
using SpecRanks = std::vector<int>;
std::string SpecRanksText(const SpecRanks& ranks);

struct JobSpec {
  static constexpr int kMaxWorld = 1 << 24;
  // Counted after "repeat" is expanded.
  static constexpr std::size_t kMaxTensors = std::size_t{1} << 24;

  struct MeshAxis {
    std::string name;
    int size = 1;
    int stride = 1;  // Difference of the ranks of neighbours on this axis.
  };

  // One region and the ranks that hold it, if the spec lists the ranks. `ranks` is a position in
  // rank_sets.
  struct Shard {
    std::uint32_t ranks = 0;
    Region region;
    Replica replica = Replica::kUnlabelled;
  };
  // Only ranks at these positions of a mesh axis hold the tensor, such as a pipeline stage.
  struct MeshSelection {
    int mesh_axis = 0;
    std::vector<int> places;  // Positions on the axis; rising.
  };
  // A tensor axis that is cut evenly over the product of mesh axes, of which the first varies
  // slowest.
  struct Cut {
    int axis = 0;           // Tensor axis.
    std::vector<int> over;  // Mesh axes.
  };
  struct Tensor {
    TensorMeta meta;
    // How the spec gives the parts of the ranks: by a rule over all ranks ("rows"), by the mesh, or
    // as a list of shards.
    enum class Kind : std::uint8_t { kRule, kSplit, kShards } kind = Kind::kShards;
    std::uint32_t rule = 0;  // With kRule: position in `rules`.
    std::vector<Cut> cuts;   // With kSplit: how tensor axes are cut.
    // With kSplit: mesh axes over which cells are cut as flat ranges; empty: none.
    std::vector<int> flat;
    std::vector<MeshSelection> only;  // With kSplit: which ranks hold the tensor; empty: all.
    std::vector<Shard> shards;        // With kShards: the listed shards.
  };
  // A part of an object. `ranks` is a position in rank_sets. `contents` is a text that stands for
  // the bytes: equal texts mean equal bytes.
  struct ObjectPart {
    std::uint32_t ranks = 0;
    Dims index;
    Dims grid;
    std::string contents;
  };
  struct Object {
    std::string key;
    bool by_rank = false;  // Each rank has its own part, numbered by rank.
    std::string contents;
    std::vector<ObjectPart> parts;  // Empty with by_rank.
  };
  // A dumped layout: everything that the ranks of one set hold.
  struct Layout {
    std::uint32_t ranks = 0;
    struct Item {
      TensorMeta meta;
      Region region;
      Replica replica = Replica::kUnlabelled;
    };
    std::vector<Item> items;
    std::vector<std::pair<std::string, ObjectPart>> objects;
  };

  int world = 0;
  std::vector<MeshAxis> mesh;
  std::vector<SpecRanks> rank_sets;  // Distinct sets of ranks.
  std::vector<ShardRule> rules;      // Rules with distinct texts.
  // By rule: whether each rank holds whole tensors ("replicate").
  std::vector<bool> whole;
  std::vector<Tensor> tensors;  // Tensors with distinct keys.
  std::vector<Object> objects;  // Objects with distinct keys, unlike any tensor's.
  std::vector<Layout> layouts;  // Given instead of tensors and objects.
  std::map<std::string, std::string> layers;

  // Parses a spec. An error (kInvalidArgument) names the entry and the rule that it breaks.
  static Result<JobSpec> Parse(std::string_view json);
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_SPEC_H_
