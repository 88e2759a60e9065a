// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_NODE_H_
#define TENSORMOUNT_FS_NODE_H_

#include <cstdint>

namespace tensormount::fs {

// A node of the mount: which checkpoint (slot), which of its views, which item of that view. Ids
// are what the kernel keeps; slots are never used again while a mount lives, so an id always means
// the same thing or nothing (ESTALE). Items are computed from the index; only those of slices and
// of stagings are made, counted and forgotten.
// Example: item 7 of view 2 of slot 5 is 5 << 44 | 2 << 40 | 7. An id of a sealed checkpoint needs
// no table: a lookup computes it and a read takes it apart, so a mount of millions of tensors keeps
// nothing for names that were looked up.
using NodeId = std::uint64_t;

struct Node {
  std::uint32_t slot = 0;  // Below kMaxSlots. 0: the mount itself.
  std::uint8_t view = 0;   // Below kMaxViews; see below.
  std::uint64_t item = 0;  // Below kMaxItems; the view's own number.

  friend bool operator==(const Node&, const Node&) = default;
};

// 20, 4 and 40 bits: together the 64 of a FUSE node id.
inline constexpr std::uint32_t kMaxSlots = 1u << 20;
inline constexpr std::uint8_t kMaxViews = 1u << 4;
inline constexpr std::uint64_t kMaxItems = std::uint64_t{1} << 40;

// View 0 of slot 0 are the mount's own nodes (Fixed), view 1 the items of StagingTree. View 0 of
// another slot is that checkpoint's folder, whose only item is kRootItem; view n its n-th View.
inline constexpr std::uint8_t kOwnView = 0;
inline constexpr std::uint8_t kStagingView = 1;
// A view's folder or only file, StagingTree::kRoot, the mount's root.
inline constexpr std::uint64_t kRootItem = 1;

// Items of slot 0, view 0.
// Numbers are part of what the kernel keeps, so they stay as they are while a mount lives, and need
// not beyond.
enum class Fixed : std::uint64_t {
  kRoot = kRootItem,
  kLatest = 16,
  kControl = 17,  // .tensormount
  kStatus = 18,
  kStats = 19,
  kErrors = 20,
  kMetrics = 21,
};

// The mount's root, which the kernel knows without asking.
inline constexpr NodeId kRootId = 1;

// The fields must be below their limits.
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
