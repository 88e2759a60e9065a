// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_STAGING_WALK_H_
#define TENSORMOUNT_TESTS_STAGING_WALK_H_

#include <algorithm>
#include <string_view>

#include "fs/staging/staging_tree.h"

namespace tensormount::fs {

// The node of a path below .staging; references are not given back.
inline Result<StagingTree::Node> WalkStaging(StagingTree& tree, std::string_view path) {
  StagingTree::Node node{.item = StagingTree::kRoot, .attributes = {}};
  while (!path.empty()) {
    const std::size_t slash = std::min(path.find('/'), path.size());
    TENSORMOUNT_ASSIGN_OR_RETURN(node, tree.Lookup(node.item, path.substr(0, slash)));
    path.remove_prefix(std::min(slash + 1, path.size()));
  }
  return node;
}

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_TESTS_STAGING_WALK_H_
