// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_COUNT_VALUES_H_
#define TENSORMOUNT_INDEX_READ_COUNT_VALUES_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/watch.h"
#include "index/read/checkpoint.h"
#include "shard/value_counts.h"

namespace tensormount {

// NaNs and infinities in a checkpoint.
struct NonfiniteSearch {
  // Globs of keys of tensors that may hold them.
  std::vector<std::string> exempt;
  // Whether tensors whose values were not counted when they were saved are left out instead of
  // read.
  bool recorded_only = false;
  Watch watch;  // Bytes of the tensors that are read; may be empty.
};
struct NonfiniteTensors {
  struct Found {
    TensorEntry tensor;
    ValueCounts counts;
  };
  std::vector<Found> found;      // By key.
  std::uint64_t left_out = 0;    // Tensors without counts, with `recorded_only`.
  std::uint64_t bytes_read = 0;  // Of tensors that were read.
};

// Looks for NaNs and infinities: by the counts that the save took, and in the bytes of tensors
// without counts. Errors as for OpenedCheckpoint::CountsOf and ReadBytes.
Result<NonfiniteTensors> FindNonfinite(const OpenedCheckpoint& checkpoint,
                                       const NonfiniteSearch& search);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_COUNT_VALUES_H_
