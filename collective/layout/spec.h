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

// The layout of a whole job as somebody described it (docs/spec.md): parsed, not yet cut. A
// description says by rules what a job of 4,096 ranks holds, and stays small that way: shards are
// made of it only while one batch of tensors is checked (spec_check.cc). Texts that many tensors
// share (rules, sets of ranks) are interned, and named by position.

namespace tensormount {

// Which ranks, rising. Text: "0-7,16,32-60/4".
using SpecRanks = std::vector<int>;
std::string SpecRanksText(const SpecRanks& ranks);

struct JobSpec {
  static constexpr int kMaxWorld = 1 << 24;
  static constexpr std::size_t kMaxTensors = std::size_t{1} << 24;  // After "repeat".

  struct MeshAxis {
    std::string name;
    int size = 1;
    int stride = 1;  // Of ranks, from one place on this axis to the next.
  };

  // One region and the ranks that hold it, where these are named one by one. `ranks` is a position
  // in rank_sets.
  struct Shard {
    std::uint32_t ranks = 0;
    Region region;
    Replica replica = Replica::kUnlabelled;
  };
  // Only ranks at these positions of a mesh axis hold the tensor: a pipeline stage, say.
  struct Only {
    int mesh_axis = 0;
    std::vector<int> places;  // Rising.
  };
  // Tensor axis cut evenly over the product of mesh axes, the first of them outermost.
  struct Cut {
    int axis = 0;           // Of the tensor.
    std::vector<int> over;  // Mesh axes.
  };
  struct Tensor {
    TensorMeta meta;
    // Who holds what: by a rule over all ranks ("rows"), by the mesh, or named rank by rank.
    enum class Kind : std::uint8_t { kRule, kSplit, kShards } kind = Kind::kShards;
    std::uint32_t rule = 0;     // kRule: position in rules.
    std::vector<Cut> cuts;      // kSplit
    std::vector<int> flat;      // kSplit: mesh axes; empty: not cut flat.
    std::vector<Only> only;     // kSplit
    std::vector<Shard> shards;  // kShards
  };
  // Contents are texts that stand for the bytes: equal texts are equal bytes, and no more of them
  // is looked at.
  struct ObjectPart {
    std::uint32_t ranks = 0;
    Dims index;
    Dims grid;
    std::string contents;
  };
  struct Object {
    std::string key;
    bool by_rank = false;  // Each rank has a part of its own, numbered by rank.
    std::string contents;
    std::vector<ObjectPart> parts;  // Unless by_rank.
  };
  // A dumped layout: all that some ranks hold.
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
  std::vector<SpecRanks> rank_sets;  // Different ones, interned.
  std::vector<ShardRule> rules;      // Interned by text.
  std::vector<bool> whole;           // Of each rule: gives every rank everything ("replicate").
  std::vector<Tensor> tensors;       // Keys differ.
  std::vector<Object> objects;       // Keys differ, from those of tensors too.
  std::vector<Layout> layouts;       // Instead of tensors and objects.
  std::map<std::string, std::string> layers;

  // kInvalidArgument says which entry breaks which rule.
  static Result<JobSpec> Parse(std::string_view json);
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_LAYOUT_SPEC_H_
