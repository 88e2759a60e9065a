// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_NODE_H_
#define TENSORMOUNT_FS_NODE_H_

#include <cstdint>

namespace tensormount::fs {

// Identifies a node of the mount: a checkpoint (slot), one of its views, and an item of that view.
// Item 7 of view 2 of slot 5 is 5 << 44 | 2 << 40 | 7. The kernel keeps ids. A slot is never reused
// while a mount lives, so an id always means the same node, or none (ESTALE).
//
// Items are computed from the checkpoint's index, so a mount of millions of tensors needs no memory
// for names that were looked up. Only items of slices/ and of stagings are made at lookup, counted,
// and forgotten.
using NodeId = std::uint64_t;

struct Node {
  std::uint32_t slot = 0;  // Below kMaxSlots; 0: the mount itself.
  std::uint8_t view = 0;   // Below kMaxViews; see kOwnView.
  std::uint64_t item = 0;  // Below kMaxItems; numbered by the view.

  friend bool operator==(const Node&, const Node&) = default;
};

// 20, 4 and 40 bits, together the 64 bits of a FUSE node id.
inline constexpr std::uint32_t kMaxSlots = 1u << 20;
inline constexpr std::uint8_t kMaxViews = 1u << 4;
inline constexpr std::uint64_t kMaxItems = std::uint64_t{1} << 40;

// Slot 0: view 0 has the mount's own nodes (Fixed), view 1 the items of StagingTree. Other slots:
// view 0 is the checkpoint's directory, whose only item is kRootItem; view n is its n-th View.
inline constexpr std::uint8_t kOwnView = 0;
inline constexpr std::uint8_t kStagingView = 1;
// Item of a view's directory or of its only file, of .staging/ itself, and of the mount's root.
inline constexpr std::uint64_t kRootItem = 1;

// Items of slot 0, view 0.
enum class Fixed : std::uint64_t {
  kRoot = kRootItem,
  kLatest = 16,
  kControl = 17,  // .tensormount
  kStatus = 18,
  kStats = 19,
  kErrors = 20,
  kMetrics = 21,
};

// The id of the mount's root, which FUSE prescribes (FUSE_ROOT_ID).
inline constexpr NodeId kRootId = 1;

// All fields must be below their limits.
constexpr NodeId IdOf(const Node& n) {
  return (NodeId{n.slot} << 44) | (NodeId{n.view} << 40) | n.item;
}
static_assert(IdOf({.slot = 0, .view = kOwnView, .item = kRootItem}) == kRootId);

constexpr Node NodeOf(NodeId id) {
  return {.slot = static_cast<std::uint32_t>(id >> 44),
          .view = static_cast<std::uint8_t>((id >> 40) & (kMaxViews - 1)),
          .item = id & (kMaxItems - 1)};
}

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_NODE_H_
