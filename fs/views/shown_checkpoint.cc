// SPDX-License-Identifier: Apache-2.0
// Object parts of a checkpoint, in the order of their paths. The parts of a grid are files under
// one key.
#include "fs/views/shown_checkpoint.h"

#include <algorithm>
#include <utility>

namespace tensormount::fs {
namespace {

// File name of a grid's part: "0.3" for index [0, 3].
std::string PartName(const Dims& index) {
  std::string name;
  for (const std::int64_t i : index) {
    if (!name.empty()) name += '.';
    name += std::to_string(i);
  }
  return name;
}

}  // namespace

Result<std::unique_ptr<const ShownObjects>> ShownObjects::Make(const CheckpointIndex& index) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ObjectRecord> parts, index.Objects());
  // A part of a grid is a file in a directory with the key's name. If other keys lie below "KEY/"
  // too, the directory is called "KEY%00" (an escaped NUL) to keep them apart: no key contains a
  // NUL.
  std::vector<std::pair<std::string, std::size_t>> paths;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::string path = parts[i].key;
    if (parts[i].grid.rank() > 0) {
      // `parts` are sorted by key here, so a search finds the first key that could be below this
      // one.
      const std::string prefix = path + '/';
      const auto below =
          std::lower_bound(parts.begin(), parts.end(), prefix,
                           [](const ObjectRecord& o, const std::string& p) { return o.key < p; });
      if (below != parts.end() && below->key.starts_with(prefix)) path += '\0';
      path += '/' + PartName(parts[i].index);
    }
    paths.emplace_back(std::move(path), i);
  }
  // Paths have another order than keys: as text, index 10 of a grid comes before index 2.
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> keys;
  std::vector<ObjectRecord> sorted;
  for (auto& [path, i] : paths) {
    keys.push_back(std::move(path));
    sorted.push_back(std::move(parts[i]));
  }
  std::unique_ptr<ShownObjects> objects(new ShownObjects(std::move(keys)));
  objects->parts_ = std::move(sorted);
  return std::unique_ptr<const ShownObjects>(std::move(objects));
}

Result<ShownTensor> ShownCheckpoint::TensorAt(const KeyNumber& key) const {
  if (key.hidden) return layers.At(opened.index(), key.number);
  ShownTensor tensor;
  TENSORMOUNT_ASSIGN_OR_RETURN(tensor.shown, tensors.EntryAt(key.number));
  tensor.source = tensor.shown;
  return tensor;
}

Result<std::string> ShownCheckpoint::StoredTensorKey(std::uint32_t n,
                                                     std::string_view shown_key) const {
  if (!opened.is_mapped()) return std::string(shown_key);
  return opened.StoredKeyOf(n);
}

}  // namespace tensormount::fs
