// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_RANDOM_STRIDED_H_
#define TENSORMOUNT_TESTS_SUPPORT_RANDOM_STRIDED_H_

#include <cstddef>

#include "tensormount/box.h"

#include "shard/tensor_meta.h"
#include "tests/support/random.h"

namespace tensormount {

// A box of bytes of a tensor with elements of 1 to 16 bytes, and how it lies in memory: axes in any
// order, with gaps, some of them backwards.
struct StridedBytes {
  Dims byte_shape;
  Box box;
  PlacedBox placed;
  std::size_t bytes = 0;  // Of the memory.
};
StridedBytes MakeStridedBytes(Random& random);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_RANDOM_STRIDED_H_
