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

// What differs between two opened checkpoints, ours or foreign ones, however they are cut.

// Cheap where that can be: tensors of one dtype and shape are compared by their digests, which do
// not depend on how a tensor is cut into chunks. Foreign checkpoints have none and are read.
namespace tensormount {

class KeyRenames;

// One line of a diff. Which members mean something depends on `what` and `kind`; the others are
// empty.
struct Mismatch {
  enum class What { kTensor, kObject, kCommon };
  enum class Kind { kAdded, kRemoved, kChanged };  // Added: only the second has it.
  What what = What::kTensor;
  Kind kind = Kind::kChanged;
  // The key; "rng [0]" of an object part; the path of a common value ("args.lr", "rank 3: seed",
  // "content: run.name", "layers of w").
  std::string key;
  std::optional<TensorMeta> first;  // Of tensors, where it is there.
  std::optional<TensorMeta> second;
  std::optional<std::uint64_t> first_bytes;  // Of objects.
  std::optional<std::uint64_t> second_bytes;
  // Of what changed, and how: "dtype bf16 and f32", "shape [4] and [5]", "digests differ", "bytes
  // differ", "0.1 and 0.2". Of common values that one side has: the value, cut.
  std::string reason;
  // The first element of a tensor with other bytes, where bytes were compared.
  std::optional<std::uint64_t> first_element;
  // How far values are apart; where values were asked for and both are of numbers.
  std::optional<ValueMismatch> values;
};

// Over all keys that the glob lets through. added + removed + changed is how often `each` was
// called.
struct CompareSummary {
  std::uint64_t added = 0;
  std::uint64_t removed = 0;
  std::uint64_t changed = 0;
  std::uint64_t equal = 0;
  // Of the tensors and objects that both have with one dtype and shape: how they were compared.
  std::uint64_t by_digest = 0;  // Without reading.
  std::uint64_t by_bytes = 0;
  std::uint64_t bytes_read = 0;  // On both sides together.
  bool same() const { return added + removed + changed == 0; }
};

struct CompareOptions {
  bool values = false;                      // Read what differs and fill Mismatch::values.
  std::string keys;                         // Glob (fnmatch, '*' crosses '/'); empty: all.
  const KeyRenames* first_names = nullptr;  // What the keys of the first are called; must live.
  int threads = 0;                          // 0: as many as cores, at most 8.
  std::size_t block_bytes = std::size_t{4} << 20;  // Each thread has two.
  Watch watch;                                     // May be empty. Bytes of both are counted.
};

// Calls `each` for every mismatch, on this thread: tensors by key, then objects, then common
// values. Nothing is read where both sides have a digest (objects: a hash) and values are not asked
// for. The data of a tensor are read in blocks of its row-major bytes, by several threads; memory
// is two blocks a thread and what a few thousand keys take. Every byte that is read is verified
// where there are hashes. An error of reading ends it and names tensor and file; an error of `each`
// ends it too. Keys of the first are renamed first (first_names), so that a rename alone is no
// mismatch. Memory does not grow with the size of tensors, and with their number only where keys
// are renamed.
Result<CompareSummary> CompareCheckpoints(const OpenedCheckpoint& first,
                                          const OpenedCheckpoint& second,
                                          const CompareOptions& options,
                                          const std::function<Status(const Mismatch&)>& each);

// The common state alone (compare_common.cc): values, those of single ranks, content metadata,
// patterns of layers' names. Dicts are compared entry by entry, lists to their first mismatch.
Status CompareCommon(const CheckpointIndex& first, const CheckpointIndex& second,
                     const CompareOptions& options, CompareSummary& summary,
                     const std::function<Status(const Mismatch&)>& each);

// Multi-dimensional index of a row-major position, which must lie within the shape.
// Example: element 7 of [2, 4] is [1, 3].
Dims IndexOf(std::uint64_t element, const Dims& shape);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_COMPARE_H_
