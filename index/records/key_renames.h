// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_KEY_RENAMES_H_
#define TENSORMOUNT_INDEX_RECORDS_KEY_RENAMES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/key_map.h"
#include "tensormount/status.h"

#include "index/records/checkpoint_index.h"

namespace tensormount {

// The result of a key map for all keys of a checkpoint.
class KeyRenames {
 public:
  // Applies the map to tensor and object keys together, before any data are read or copied, so that
  // collisions are refused early. kInvalidArgument as for KeyMap::ApplyToAll. Common values keep
  // their names. Costs one scan of the keys and a string for each key.
  // `keeps`, if not empty, selects the keys: a key for which it returns false is dropped, and the
  // map is not applied to that key.
  static Result<KeyRenames> Make(const CheckpointIndex& index, const KeyMap& map,
                                 const std::function<bool(const std::string& key)>& keeps = {});

  // The new name of each tensor, by ordinal. Empty: the tensor is dropped.
  const std::vector<std::string>& tensors() const { return tensors_; }
  // The new name of object `key`. Empty for a dropped object, and for an object that the checkpoint
  // does not have.
  const std::string& Object(const std::string& key) const;
  // Ordinals of stacked tensors that are kept, each with the new pattern of its layer names. The
  // map is applied to the pattern as to a key, so that a '*' may match "{}". A stack is omitted if
  // its pattern is dropped or is no longer valid (CheckLayerPattern).
  const std::vector<std::pair<std::uint32_t, std::string>>& layers() const { return layers_; }

  // Renames the records in `inventory`, removes dropped records, and sorts the others by their new
  // names. `inventory` must have the records of the checkpoint that Make received; its files do not
  // change. kInvalidArgument names an invalid new key.
  Status Apply(Inventory& inventory) const;

 private:
  std::vector<std::string> tensors_;
  std::map<std::string, std::string> objects_;
  std::vector<std::pair<std::uint32_t, std::string>> layers_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_KEY_RENAMES_H_
