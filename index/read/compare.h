// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_COMPARE_H_
#define TENSORMOUNT_INDEX_READ_COMPARE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tensormount/status.h"

#include "base/watch.h"
#include "index/read/checkpoint.h"
#include "shard/compare_values.h"
#include "shard/tensor_meta.h"
#include "shard/value_statistics.h"

// Compares two opened checkpoints, native or foreign, whatever their sharding.

// Tensors of the same dtype and shape are compared by their digests, which do not depend on the
// sharding. Foreign checkpoints have no digests, so their data are read.
namespace tensormount {

// One mismatch. `subject` and `kind` determine which members are set; the others are empty.
struct Mismatch {
  enum class Subject { kTensor, kObject, kCommon };
  enum class Kind { kAdded, kRemoved, kChanged };  // kAdded: only in the second.
  Subject subject = Subject::kTensor;
  Kind kind = Kind::kChanged;
  // Key of a tensor or object, or "rng [0]" for an object part, or the path of a common value
  // ("args.lr", "rank 3: seed", "content: run.name", "layers of w").
  std::string key;
  // Tensors: the metadata on each side that has the key.
  std::optional<TensorMeta> first;
  std::optional<TensorMeta> second;
  // Objects: the size on each side that has the key.
  std::optional<std::uint64_t> first_bytes;
  std::optional<std::uint64_t> second_bytes;
  // For kChanged: how the sides differ, such as "dtype bf16 and f32", "shape [4] and [5]", "digests
  // differ", "bytes differ", "0.1 in the first and 0.2 in the second". For a common value that only
  // one side has: the value, shortened.
  std::string reason;
  // Position of the first differing element of a tensor, if bytes were compared.
  std::optional<std::uint64_t> first_element;
  // Numeric differences, if CompareOptions::values is set and both sides are numeric and of one
  // shape.
  std::optional<ValueMismatch> values;
  // The change of the values, if CompareOptions::stats is set, both sides have one shape, and both
  // or neither are complex.
  std::optional<ValueChange> change;
};

// Numbers of the keys that match the glob. added + removed + changed is the number of calls of
// `each`.
struct CompareSummary {
  std::uint64_t added = 0;
  std::uint64_t removed = 0;
  std::uint64_t changed = 0;
  std::uint64_t equal = 0;
  // Tensors of equal dtype and shape, and object parts of equal grid and size, by the kind of
  // comparison.
  std::uint64_t by_digest = 0;  // Both sides have digests or hashes, or no bytes.
  // Compared by reading data.
  std::uint64_t by_bytes = 0;
  std::uint64_t bytes_read = 0;  // Bytes read of both sides together.
  // With CompareOptions::stats: the sum of Mismatch::change, and the values of tensors that are
  // equal.
  ValueChange change;
  std::uint64_t unchanged_values = 0;
  bool same() const { return added + removed + changed == 0; }
};

struct CompareOptions {
  bool values = false;  // Also read tensors that differ, and fill Mismatch::values.
  bool stats = false;   // Also read tensors that differ, and fill Mismatch::change.
  // Compare only keys that match this glob (fnmatch, '*' crosses '/'). Empty: all.
  std::string keys;
  int threads = 0;  // Number of threads; 0: the number of cores, at most 8.
  std::size_t block_bytes = std::size_t{4} << 20;  // Size of a block. Each thread has two blocks.
  Watch watch;                                     // Counts the bytes of both sides. May be empty.
};

// Calls `each` on this thread for every mismatch: tensors by key, then objects, then common values.
// Data are read only where a side has no digest (objects: no hash), or if `values` or `stats` is
// set. Several threads read blocks in row-major order; every byte that has a hash is verified.
// Memory is two blocks for each thread, a few thousand keys and the object parts. The first error
// of a read (with tensor and file), of `each` or of the watch ends the call.
Result<CompareSummary> CompareCheckpoints(const OpenedCheckpoint& first,
                                          const OpenedCheckpoint& second,
                                          const CompareOptions& options,
                                          const std::function<Status(const Mismatch&)>& each);

// Compares only the common state (compare_common.cc): values, per-rank values, content metadata,
// layer-name patterns. Dicts are compared entry by entry, lists up to the first mismatch.
Status CompareCommon(const CheckpointIndex& first, const CheckpointIndex& second,
                     const CompareOptions& options, CompareSummary& summary,
                     const std::function<Status(const Mismatch&)>& each);

// Multi-dimensional index of the element at a row-major position within the shape. Example: element
// 7 of [2, 4] is [1, 3].
Dims IndexOf(std::uint64_t element, const Dims& shape);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_COMPARE_H_
