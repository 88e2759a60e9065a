// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_NEAREST_H_
#define TENSORMOUNT_MOUNT_TOOLS_NEAREST_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "index/read/checkpoint.h"

namespace tensormount::tools {

// Finds the name that is most similar to a mistyped text: the name with the fewest characters
// inserted, deleted, replaced or swapped with a neighbour. The allowed number of such edits is a
// third of the text's length, but at least 1 and at most 8.
class NearestName {
 public:
  explicit NearestName(std::string_view text);
  void Consider(std::string_view name);
  // The most similar name so far; empty if no name is similar.
  const std::string& best() const { return best_; }

 private:
  const std::string text_;
  // Number of edits from the text to best_. Without a best_, one more than the allowed number.
  std::size_t distance_;
  std::string best_;
};

// The hint for a key (maybe with a slice) that does not exist: "did you mean ...", an error in its
// brackets, that it is a common value, or the command that lists the keys. `source`: the SOURCE
// argument of the user.
std::string KeyHint(const OpenedCheckpoint& checkpoint, std::string_view source,
                    std::string_view key);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_NEAREST_H_
