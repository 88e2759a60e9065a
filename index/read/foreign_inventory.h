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

// What an adapter of a foreign format hands over to be opened.

// It is in read/ and not in foreign/, because opening knows nothing of formats: an adapter fills
// this in, and OpenedCheckpoint::OpenForeign takes it.
namespace tensormount {

// Finds where in a foreign item the bytes of a chunk are, when they are wanted for the first time:
// a checkpoint of a million items opens without a million small reads. Called by readers on any
// thread, several at a time.
// `chunk` is pending: its offset and length name the item in `file`. Replaces them and the strides
// by those of the bytes, which hold chunk.region. kDataLoss where the item is not what the metadata
// says (dtype, shape, size), kUnsupported where its bytes cannot be read in place.
using ItemResolver = std::function<Status(const TensorMeta& meta, File& file, ChunkRecord& chunk)>;

// A foreign checkpoint, ready to be opened.
struct ForeignInventory {
  Inventory inventory;
  ItemResolver resolver;  // Empty: no chunk is pending.
  // What was left out or is not whole, and why, cut at some number. What is lost comes first.
  std::vector<std::string> warnings;
  std::vector<ForeignLoss> lost;
  // Names of files and folders in the folder that hold data as well and are no part of this:
  // optimizer.pt beside a model. Cut at some number.
  std::vector<std::string> beside = {};
  // ForeignBase::bounds.
  std::vector<std::string> bounds = {};
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_FOREIGN_INVENTORY_H_
