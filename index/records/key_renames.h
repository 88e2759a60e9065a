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

// What a map of keys makes of all keys of a checkpoint.
class KeyRenames {
 public:
  // kInvalidArgument as KeyMap::ApplyToAll, over tensors and objects together. Common values keep
  // their names. Costs one scan of the keys and a string for each.
  // All at once and before anything is read or copied, because a map may give two keys one name,
  // and that must be refused while nothing has happened yet.
  // `keeps`, where not empty, is asked of each key first: what it does not keep is dropped, and the
  // map never sees it.
  static Result<KeyRenames> Make(const CheckpointIndex& index, const KeyMap& map,
                                 const std::function<bool(const std::string& key)>& keeps = {});

  // New names; empty where the key is dropped.
  const std::vector<std::string>& tensors() const { return tensors_; }  // By ordinal.
  // Empty, too, for an object that the checkpoint does not have.
  const std::string& Object(const std::string& key) const;
  // Stacked tensors that are kept (ordinal), and the new pattern of their layers' names: the map is
  // applied to the pattern as to a key, so that a '*' may stand for "{}". Those whose pattern is
  // dropped or lost its "{}" have no names.
  const std::vector<std::pair<std::uint32_t, std::string>>& layers() const { return layers_; }

  // The same to all records of the checkpoint that this was made for: what is dropped is gone, the
  // rest is sorted by its new names; files stay as they are. kInvalidArgument names what cannot be
  // a key.
  Status Apply(Inventory& inventory) const;

 private:
  std::vector<std::string> tensors_;
  std::map<std::string, std::string> objects_;
  std::vector<std::pair<std::uint32_t, std::string>> layers_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_KEY_RENAMES_H_
