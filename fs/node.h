// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_NODE_H_
#define TENSORMOUNT_FS_NODE_H_

#include <cstdint>
#include <optional>

namespace tensormount::fs {

// A node of the mount, computed and never stored: which checkpoint (slot), which view of it, which
// key, and how deep in the path of that key. Ids are what the kernel keeps; slots are never used
// again while a mount lives, so an id always means the same thing or nothing (ESTALE).
using NodeId = std::uint64_t;

enum class View : std::uint8_t {
  kFixed = 0,  // Slot 0: of the mount itself; other slots: of a checkpoint. `ordinal` is a Fixed.
  kTensors = 1,
  kNpy = 2,
  kExtents = 3,
  kObjects = 4,
  kLayers = 5,  // Files below tensors/ and npy/ that are opened by name and not listed: layers of
  kNpyLayers = 6,  // stacked tensors. `ordinal` counts their names.
};
inline constexpr std::uint8_t kViews = 7;

// Nodes that there is one of, per mount (slot 0) or per checkpoint.
enum class Fixed : std::uint32_t {
  kRoot = 0,  // Depth 1, like every folder.
  kCheckpointJson = 1,
  kCommonJson = 2,
  kSafetensors = 3,  // model.safetensors
  kLatest = 16,      // Slot 0 only, from here on.
  kControl = 17,     // .tensormount
  kStatus = 18,
  kStats = 19,
  kErrors = 20,
};

struct Node {
  std::uint32_t slot = 0;
  View view = View::kFixed;
  std::uint32_t ordinal = 0;
  std::uint32_t depth = 0;  // 0: a file; d + 1: the folder of the first d names of the key's path.

  bool is_folder() const { return depth > 0; }
  friend bool operator==(const Node&, const Node&) = default;
};

inline constexpr std::uint32_t kMaxSlots = 1u << 20;
inline constexpr std::uint32_t kMaxOrdinals = 1u << 28;
inline constexpr std::uint32_t kMaxDepth = (1u << 12) - 1;

// The mount's root, which the kernel knows without asking.
inline constexpr NodeId kRootId = 1;

// The fields must be below their limits.
constexpr NodeId IdOf(const Node& n) {
  return (NodeId{n.slot} << 44) | (NodeId{static_cast<std::uint8_t>(n.view)} << 40) |
         (NodeId{n.ordinal} << 12) | n.depth;
}
static_assert(IdOf({.slot = 0, .view = View::kFixed, .ordinal = 0, .depth = 1}) == kRootId);

// Nothing for numbers that IdOf never makes.
constexpr std::optional<Node> NodeOf(NodeId id) {
  const std::uint8_t view = static_cast<std::uint8_t>((id >> 40) & 15);
  if (view >= kViews) return std::nullopt;
  return Node{.slot = static_cast<std::uint32_t>(id >> 44),
              .view = static_cast<View>(view),
              .ordinal = static_cast<std::uint32_t>((id >> 12) & (kMaxOrdinals - 1)),
              .depth = static_cast<std::uint32_t>(id & kMaxDepth)};
}

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_NODE_H_
