// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_EXAMPLES_MODELS_TREE_WALK_H_
#define TENSORMOUNT_EXAMPLES_MODELS_TREE_WALK_H_

#include <string>

#include "examples/models/tree.h"

namespace tensormount::examples {

// "tensor f32 [4, 8]", "dict", "int": for messages.
std::string TypeText(const StateTree& tree);

// `status` with the path in front, but for the root.
Status AtPath(const Status& status, const TreePath& path);

// kInvalidArgument for a path deeper than kMaxTreeDepth.
Status CheckDepth(const TreePath& path);

// Calls fn(step, child) for every child, until one fails.
template <typename Tree, typename Fn>
Status ForEachChild(Tree& tree, Fn fn) {
  if (auto* dict = tree.template get_if<TreeDict>()) {
    for (auto& [key, child] : dict->items) {
      TENSORMOUNT_RETURN_IF_ERROR(fn(TreeStep{TreeStep::Kind::kKey, key}, child));
    }
  }
  const auto items = [&fn](auto& children, TreeStep::Kind kind) -> Status {
    std::int64_t index = 0;
    for (auto& child : children) TENSORMOUNT_RETURN_IF_ERROR(fn(TreeStep{kind, index++}, child));
    return Status();
  };
  if (auto* list = tree.template get_if<TreeList>()) {
    return items(list->items, TreeStep::Kind::kListItem);
  }
  if (auto* tuple = tree.template get_if<TreeTuple>()) {
    return items(tuple->items, TreeStep::Kind::kTupleItem);
  }
  return Status();
}

}  // namespace tensormount::examples

#endif  // TENSORMOUNT_EXAMPLES_MODELS_TREE_WALK_H_
