// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_NEAREST_H_
#define TENSORMOUNT_MOUNT_TOOLS_NEAREST_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "index/read/checkpoint.h"

namespace tensormount::tools {

// The name that a slip of the fingers may have meant: that with the fewest letters added, left out,
// changed or exchanged with their neighbour, if they are at most a third of it.
class Nearest {
 public:
  explicit Nearest(std::string_view text);
  void Offer(std::string_view name);
  // Empty: none is near.
  const std::string& best() const { return best_; }

 private:
  const std::string text_;
  std::size_t distance_;  // Of the best so far; at first one more than is near.
  std::string best_;
};

// What to do where a source has no such key, which may end in a slice: "did you mean ...", what is
// wrong with its brackets, and the command that lists the keys. `source` as the user named it.
std::string KeyHint(const OpenedCheckpoint& checkpoint, std::string_view source,
                    std::string_view key);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_NEAREST_H_
