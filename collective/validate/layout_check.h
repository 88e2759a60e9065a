// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_VALIDATE_LAYOUT_CHECK_H_
#define TENSORMOUNT_COLLECTIVE_VALIDATE_LAYOUT_CHECK_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "collective/validate/descriptor.h"
#include "shard/tensor_meta.h"

namespace tensormount {
// While layout.h comes to replace this, both have types of these names in one program.
inline namespace descriptor_layout {

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
};

struct LayoutTensor {
  TensorMeta meta;
  std::vector<Holding> holdings;  // By first element; together every cell exactly once.
  int first_rank = 0;  // The lowest rank that named it; it records tensors without cells.
};

struct LayoutObject {
  std::string key;
  Dims index;
  Dims grid;
  std::uint64_t length = 0;
  std::vector<Holder> holders;  // By rank.
};

struct LayoutCommon {
  std::string name;
  int rank = 0;  // The lowest one that set it.
};

// What all ranks hold together. The same on every rank.
struct GlobalLayout {
  int world = 0;
  std::vector<LayoutTensor> tensors;  // By key.
  std::vector<LayoutObject> objects;  // By key, then index.
  std::vector<LayoutCommon> common;   // By name.
  std::uint64_t tensor_bytes = 0;
  std::uint64_t replica_bytes = 0;  // Per extra holder.
};

// Puts the descriptors of all ranks together, or says what is wrong with them. Pure: the same
// verdict, to the letter, on every rank. All failures are kInvalidArgument but those of ranks
// that could not take part, which keep their code ("rank 2: ...").
//   tensor w: dtype is f32 on rank 0 and bf16 on rank 1
//   tensor w: shape is [8, 8] on rank 0 and [8, 9] on rank 1
//   tensor w: [4:5, 0:8] is held by no rank (parts are held by ranks 0, 1)
//   tensor w: [4:5, 0:8] is held by rank 1 and rank 2
//   tensor w: [4:5, 0:8] is held twice by rank 1
//   object rng: part [2] of grid [4] is held by no rank
//   object rng: contents differ between rank 0 and rank 1
//   common value iteration: differs between rank 0 and rank 1
Result<GlobalLayout> CheckLayout(std::span<const RankDescriptor> ranks);

}  // namespace descriptor_layout

std::string RankList(std::vector<int> ranks);  // layout.h

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_VALIDATE_LAYOUT_CHECK_H_
