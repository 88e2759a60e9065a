// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_DCP_OBJECTS_H_
#define TENSORMOUNT_INDEX_FOREIGN_DCP_OBJECTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "index/foreign/dcp_metadata.h"
#include "index/foreign/foreign.h"
#include "index/foreign/megatron.h"

namespace tensormount {

// Objects of DCP checkpoints: opaque bytes each, and where these are a torch archive of plain data
// and small, a common value too. What a checkpoint has of them stands at the beginnings of its
// files, so that they are read in a few large pieces.
class DcpObjects {
 public:
  struct Item {
    MegatronObject object;  // Without a grid: `key` is all.
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
  };

  explicit DcpObjects(ForeignBuilder& builder) : builder_(builder) {}
  // The item must lie within its file.
  void Add(Item item) { items_.push_back(std::move(item)); }
  // Gives all to the builder. `megatron`: objects are wrapped in lists, and one of them may be the
  // common state.
  Status Finish(bool megatron, LeftOut& left_out);

 private:
  Status AddCommon(bool megatron);
  Status AddValue(const Item& item, const std::string& bytes, bool megatron);

  ForeignBuilder& builder_;
  std::vector<Item> items_;
  ValueBudget budget_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_DCP_OBJECTS_H_
