// SPDX-License-Identifier: Apache-2.0
// Node ids of names below .staging/: assigned at lookup, counted like the kernel's references,
// never reused.
#include "fs/staging/staged_nodes.h"

#include <algorithm>
#include <string_view>

#include "base/hash.h"

namespace tensormount::fs {
namespace {

std::string_view NameOf(NodeRole role) {
  switch (role) {
    case NodeRole::kRoot:
    case NodeRole::kStaging:
      return "";
    case NodeRole::kSchema:
      return "schema.json";
    case NodeRole::kCommon:
      return "common.json";
    case NodeRole::kReportJson:
      return "report.json";
    case NodeRole::kReportText:
      return "report.txt";
    case NodeRole::kDone:
    case NodeRole::kMark:
      return "done";
    case NodeRole::kTensors:
    case NodeRole::kTensor:
      return "tensors";
    case NodeRole::kSlices:
    case NodeRole::kSlice:
      return "slices";
    case NodeRole::kObjects:
    case NodeRole::kObject:
      return "objects";
  }
  return "";
}

// Identity of a node: staging, role and path. The role tells a file from a directory of the same
// path.
std::string Identity(const StagedNode& node) {
  std::string name = node.staged ? node.staged->staging().uuid.ToString() : std::string();
  name += static_cast<char>('a' + static_cast<int>(node.role));
  return name + node.path;
}

}  // namespace

bool StagedNode::folder() const {
  switch (role) {
    case NodeRole::kRoot:
    case NodeRole::kStaging:
    case NodeRole::kDone:
    case NodeRole::kTensors:
    case NodeRole::kSlices:
    case NodeRole::kObjects:
      return true;
    default:
      return false;
  }
}

std::string StagedNode::Label() const {
  std::string label = ".staging";
  if (staged) label += '/' + staged->name();
  if (!NameOf(role).empty()) label += '/' + std::string(NameOf(role));
  if (!path.empty()) label += '/' + path;
  return label;
}

std::uint64_t StagedNode::Inode() const {
  const std::string name = "staging/" + Identity(*this);
  return std::max<std::uint64_t>(Xxh3Low64(name), 2);
}

StagedNodes::StagedNodes() {
  StagedNode root;
  root.item = kRoot;
  root_ = std::make_shared<const StagedNode>(std::move(root));
}

// A name gets the same item again, unless all references were released meanwhile.
std::shared_ptr<const StagedNode> StagedNodes::Reference(StagedNode node) {
  if (node.role == NodeRole::kRoot) return root_;
  std::string name = Identity(node);
  const std::lock_guard lock(mutex_);
  const auto [at, fresh] = items_.try_emplace(name, next_);
  Counted& counted = nodes_[at->second];
  if (fresh) {
    node.item = next_++;
    counted.name = std::move(name);
    counted.node = std::make_shared<const StagedNode>(std::move(node));
  } else if (node.key != counted.node->key || !(node.box == counted.node->box)) {
    // A new schema, after the old one was withdrawn, defines this name differently.
    node.item = at->second;
    counted.node = std::make_shared<const StagedNode>(std::move(node));
  }
  ++counted.references;
  return counted.node;
}

Result<std::shared_ptr<const StagedNode>> StagedNodes::Find(std::uint64_t item) const {
  if (item == kRoot) return root_;
  const std::lock_guard lock(mutex_);
  const auto it = nodes_.find(item);
  if (it == nodes_.end())
    return Status(Code::kStale, "stale inode number: .staging/ has no such entry");
  return it->second.node;
}

// If the caller releases more references than were counted, which is an error, the node is dropped.
void StagedNodes::Forget(std::uint64_t item, std::uint64_t references) {
  if (item == kRoot) return;
  const std::lock_guard lock(mutex_);
  const auto it = nodes_.find(item);
  if (it == nodes_.end()) return;
  it->second.references -= std::min(it->second.references, references);
  if (it->second.references > 0) return;
  const auto named = items_.find(it->second.name);
  if (named != items_.end() && named->second == item) items_.erase(named);
  nodes_.erase(it);
}

// The node that had the name `to` keeps its item, for open handles, but can no longer be found by
// name.
void StagedNodes::Move(const StagedNode& from, StagedNode to) {
  const std::lock_guard lock(mutex_);
  std::string name = Identity(to);
  items_.erase(name);
  const auto at = items_.find(Identity(from));
  if (at == items_.end()) return;
  to.item = at->second;
  items_.erase(at);
  items_[name] = to.item;
  Counted& counted = nodes_[to.item];
  counted.name = std::move(name);
  counted.node = std::make_shared<const StagedNode>(std::move(to));
}

std::size_t StagedNodes::size() const {
  const std::lock_guard lock(mutex_);
  return nodes_.size();
}

}  // namespace tensormount::fs
