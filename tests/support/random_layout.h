// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_RANDOM_LAYOUT_H_
#define TENSORMOUNT_TESTS_SUPPORT_RANDOM_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/dtype.h"
#include "tensormount/state_dict.h"

#include "shard/tensor_meta.h"
#include "tests/support/random.h"

// Random tensors and random ways to cut them over ranks, with a slow and obvious oracle: a tensor's
// bytes depend on nothing but its seed.

namespace tensormount {

struct RandomTensor {
  std::string key;
  DType dtype = DType::kU8;  // Under a byte: only for OracleBytes.
  Dims shape;
  std::string bytes;  // Row-major.

  std::size_t element_bytes() const { return InfoOf(dtype).bits / 8; }
};

// Rank 0 to 5, sometimes with a zero extent, element sizes 1, 2, 4, 8 and 16 in turn, at most about
// `max_bytes`.
RandomTensor MakeRandomTensor(Random& random, const std::string& key, std::uint64_t max_bytes);

// Who holds which regions of one tensor: pieces[rank]. Every cell is held by somebody, cells of two
// ranks are the same region or disjoint, no rank holds a cell twice.
using Partition = std::vector<std::vector<Region>>;

// Cuts that are uneven, by rows, columns, blocks, recursive random boxes, flat ranges of the whole
// or of boxes, with empty pieces, some ranks left out and some pieces held by several.
Partition RandomPartition(Random& random, const Dims& shape, int ranks);

// A request: like a partition, but cells may be asked for by several ranks in overlapping regions
// and, where `holes`, by none.
Partition RandomRequest(Random& random, const Dims& shape, int ranks, bool holes);

// Memory of one shard, packed or strided, possibly with gaps and negative strides.
struct ShardMemory {
  std::vector<std::byte> memory;
  BufferView view;
  Region region;
};
// With the cells of `region` in it where `filled`; other bytes are 0xA5.
ShardMemory MakeShardMemory(Random& random, const RandomTensor& tensor, const Region& region,
                            bool filled);

// The packed bytes of a region, cell by cell.
std::string OracleBytes(const RandomTensor& tensor, const Region& region);
// What the memory's cells hold, in packed order, cell by cell.
std::string CellsOf(const RandomTensor& tensor, const ShardMemory& shard);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_RANDOM_LAYOUT_H_
