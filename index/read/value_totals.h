// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_VALUE_TOTALS_H_
#define TENSORMOUNT_INDEX_READ_VALUE_TOTALS_H_

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/commit_record.h"
#include "shard/value_counts.h"

namespace tensormount {

// The value counts of a checkpoint's tensors by ordinal, read from the coordinator's manifest when
// they are first asked for. Takes 48 bytes for a tensor. Thread-safe.
class ValueTotals {
 public:
  using List = std::vector<std::optional<ValueCounts>>;
  // `directory`: of the checkpoint with this COMMIT and number of tensors. An empty list: the
  // checkpoint has no value counts. kDataLoss if they are damaged; a failure is not kept.
  Result<std::shared_ptr<const List>> Get(FileSystem& fs, const std::string& directory,
                                          const CommitRecord& commit, std::size_t tensors);

 private:
  std::mutex mutex_;  // Held during the read, so that it is done once.
  std::shared_ptr<const List> list_;
};

// Number of NaNs and infinities in the checkpoint `directory`, by the counts of its save, without
// reading its index. nullopt: the values of no tensor, or not of all, were counted. kNotFound:
// there is no checkpoint. kDataLoss: the counts are damaged.
Result<std::optional<std::uint64_t>> CountNonfinite(FileSystem& fs, const std::string& directory);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_VALUE_TOTALS_H_
