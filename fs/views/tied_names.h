// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_TIED_NAMES_H_
#define TENSORMOUNT_FS_VIEWS_TIED_NAMES_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "fs/views/shown_checkpoint.h"

namespace tensormount::fs {

// The further names of tied tensors. The Python package stores a tensor that a state dict has in
// several places once, under the first of its names in the order of text; its structure
// (index/read/saved_paths.h) has the others. A map of keys renames them as it renames keys.
// Immutable.
class TiedNames {
 public:
  TiedNames() = default;
  // Reads the common values: as long as the structures of the checkpoint are. A name that another
  // tensor has, or that no key may have, is left out.
  static Result<TiedNames> Make(const ShownCheckpoint& shown);

  bool empty() const { return names_.empty(); }
  // By the number of the tensor in ShownCheckpoint::tensors; without its own key.
  const std::map<std::uint32_t, std::vector<std::string>>& all() const { return names_; }

 private:
  std::map<std::uint32_t, std::vector<std::string>> names_;
};

// Whether a model of transformers that ties its output layer to its input embedding leaves this
// name out of its files: "lm_head.weight", "model.lm_head.weight".
bool IsOutputEmbedding(std::string_view name);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_TIED_NAMES_H_
