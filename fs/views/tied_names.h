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

// The additional names of tied tensors. If a state dict contains one tensor several times, the
// Python package stores it once, under the first of its names in text order; the recorded structure
// (index/read/saved_paths.h) has the others. A key map renames them like keys. Immutable.
class TiedNames {
 public:
  TiedNames() = default;
  // Reads the common values, which contain the recorded structures. Omits names that another tensor
  // has, and invalid keys.
  static Result<TiedNames> Make(const ShownCheckpoint& shown);

  bool empty() const { return names_.empty(); }
  // The additional names of each tensor, by its number in ShownCheckpoint::tensors. The tensor's
  // own key is not among them.
  const std::map<std::uint32_t, std::vector<std::string>>& all() const { return names_; }

 private:
  std::map<std::uint32_t, std::vector<std::string>> names_;
};

// Whether transformers omits this name from the files of a model that ties its output layer to its
// input embedding: "lm_head.weight", "model.lm_head.weight".
bool IsOutputEmbedding(std::string_view name);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_TIED_NAMES_H_
