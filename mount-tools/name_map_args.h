// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_NAME_MAP_ARGS_H_
#define TENSORMOUNT_MOUNT_TOOLS_NAME_MAP_ARGS_H_

#include <string>
#include <vector>

namespace tensormount::tools {

// The options of a command that say which names the tensors of its source get (docs/mapping.md).
struct NameMapArgs {
  std::string rules;                 // JSON file; empty: none.
  std::string as;                    // NameMap::as
  std::string from;                  // NameMap::from
  std::string with;                  // Directory with the model's config.json; empty: none.
  std::vector<std::string> numbers;  // NAME=NUMBER
  std::string experts;               // "fused" or "split": the number "split"; empty: not given.
  bool empty() const { return rules.empty() && as.empty(); }
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_NAME_MAP_ARGS_H_
