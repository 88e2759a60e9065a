// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_FOREIGN_INVENTORY_H_
#define TENSORMOUNT_INDEX_READ_FOREIGN_INVENTORY_H_

#include <functional>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/read/foreign_loss.h"
#include "index/records/inventory.h"
#include "shard/tensor_meta.h"

// Result of an adapter for a foreign format.

// Declared in read/ because opening a checkpoint does not know the formats: an adapter of foreign/
// fills the inventory, and OpenedCheckpoint::OpenForeign takes it.
namespace tensormount {

// Locates the bytes of a pending chunk at the first read, so that a checkpoint of a million items
// opens without a million small reads. Called on any thread, several at a time.
// On entry, offset and length of `chunk` describe an item of `file`. The resolver replaces these
// two and the strides by those of the bytes of chunk.region. kDataLoss: the item contradicts the
// metadata (dtype, shape, size). kUnsupported: the item's bytes cannot be read in place. Or the
// errno of a read.
using ItemResolver = std::function<Status(const TensorMeta& meta, File& file, ChunkRecord& chunk)>;

// A foreign checkpoint, ready to be opened.
struct ForeignInventory {
  Inventory inventory;
  ItemResolver resolver;  // Empty if no chunk is pending.
  // Texts about omitted or incomplete data, with the reason; losses that concern a file first.
  // Limited in number.
  std::vector<std::string> warnings;
  std::vector<ForeignLoss> lost;
  // Names of files and directories beside the checkpoint that hold data but are not part of it
  // (optimizer.pt beside a model). Limited in number.
  std::vector<std::string> beside = {};
  // Narrower limits for opening files (ForeignBase::bounds).
  std::vector<std::string> bounds = {};
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_FOREIGN_INVENTORY_H_
