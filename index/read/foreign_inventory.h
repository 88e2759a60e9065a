// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_FOREIGN_INVENTORY_H_
#define TENSORMOUNT_INDEX_READ_FOREIGN_INVENTORY_H_

#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/foreign_loss.h"
#include "index/records/inventory.h"
#include "shard/tensor_meta.h"

// What an adapter of a foreign format hands over to be opened.

namespace tensormount {

// Finds where in a foreign item the bytes of a chunk are, when they are wanted for the first time:
// a checkpoint of a million items opens without a million small reads. Thread-safe.
class ItemResolver {
 public:
  virtual ~ItemResolver() = default;
  // `chunk` is pending: its offset and length name the item in `file`. Replaces them and the
  // strides by those of the bytes, which hold chunk.region. kDataLoss where the item is not what
  // the metadata says (dtype, shape, size), kUnsupported where its bytes cannot be read in place.
  virtual Status Resolve(const TensorMeta& meta, File& file, ChunkRecord& chunk) const = 0;
};

// A foreign checkpoint, ready to be opened.
struct ForeignInventory {
  Inventory inventory;
  std::shared_ptr<const ItemResolver> resolver;  // Null: no chunk is pending.
  // What was left out or is not whole, and why, cut at some number. What is lost comes first.
  std::vector<std::string> warnings;
  std::vector<ForeignLoss> lost;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_FOREIGN_INVENTORY_H_
