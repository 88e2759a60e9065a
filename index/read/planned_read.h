// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_PLANNED_READ_H_
#define TENSORMOUNT_INDEX_READ_PLANNED_READ_H_

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "index/read/checkpoint.h"
#include "index/records/extent_table.h"
#include "shard/copy_plan.h"
#include "shard/tensor_meta.h"

// What a read of a tensor does. Private to index/read/.

namespace tensormount {

// The bounding box of bytes of a tensor, and the row-major byte range that contains it.
// ExtentLookup searches by the range. It is exact for whole tensor rows; for other boxes it goes
// from the first cell to the last.
struct ByteHull {
  Dims begin;
  Dims end;
  ByteRange bytes;
};
// `want` is not empty.
ByteHull HullOf(std::span<const PlacedBox> want, const Dims& byte_shape);

// The chunks that a read may touch, and how their bytes are copied.
struct OpenedCheckpoint::PlannedRead {
  std::vector<ChunkRecord> chunks;
  std::vector<const TensorMeta*> stored;  // The stored tensor of each chunk, for messages.
  // Parts of a chunk are neighbours.
  std::vector<CopyPlan::Part> parts;
  // Whether CopyPlan::Part::part is in coordinates of names (TermSide::Fold), not of the tensor.
  bool in_names = false;
  std::uint64_t bytes = 0;         // Of all parts.
  std::vector<PlacedBox> zeros;    // Parts of the destination that no chunk stores.
  std::deque<TensorEntry> mapped;  // Stored tensors of a mapped tensor; `stored` points to them.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_PLANNED_READ_H_
