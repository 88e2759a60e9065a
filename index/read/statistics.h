// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_STATISTICS_H_
#define TENSORMOUNT_INDEX_READ_STATISTICS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "tensormount/status.h"

#include "base/watch.h"
#include "index/read/checkpoint.h"
#include "shard/value_statistics.h"
#include "shard/wide_sum.h"

// Statistics of the values of tensors (docs/numbers.md, "Full statistics"), for `stats --full`.

namespace tensormount {

// The values of one tensor. A complex number counts as two values.
struct TensorStatistics {
  std::uint64_t count = 0;
  std::uint64_t zeros = 0;
  std::uint64_t subnormals = 0;
  std::uint64_t nan = 0;
  std::uint64_t posinf = 0;
  std::uint64_t neginf = 0;
  // Of the finite values; 0 if there is none. The norm is Euclidean, and infinite if it exceeds all
  // doubles.
  double min = 0;
  double max = 0;
  double mean = 0;
  double norm = 0;
  // Exact, of integer types; 0 for others.
  Int128 integer_sum = 0;
  Int128 integer_min = 0;
  Int128 integer_max = 0;

  std::uint64_t finite() const { return count - nan - posinf - neginf; }
  double absmax() const { return std::max(-min, max); }
};
TensorStatistics StatisticsOf(const ValueSums& values, bool integers);

struct StatisticsOptions {
  // Only keys that match this glob (fnmatch, '*' crosses '/'). Empty: all.
  std::string keys;
  int threads = 0;  // Number of threads; 0: the number of cores, at most 8.
  std::size_t block_bytes = std::size_t{4} << 20;  // Size of a read. Each thread has one buffer.
  Watch watch;                                     // Counts bytes. May be empty.
  // Statistics that are known already; null if they are not. May be empty.
  std::function<const TensorStatistics*(const TensorEntry&)> known;
};

struct StatisticsSummary {
  std::uint64_t tensors = 0;
  std::uint64_t known = 0;  // Tensors whose statistics were known.
  std::uint64_t values = 0;
  std::uint64_t nan = 0;
  std::uint64_t infinite = 0;
  std::uint64_t bytes_read = 0;
  WideSum squares;  // Of the finite values.
};

// Calls `each` on this thread for every tensor, by key. Several threads read blocks in row-major
// order; every byte that has a hash is verified. Memory is a block for each thread, and a few
// thousand keys. The first error of a read, of `each` or of the watch ends the call.
using EachStatistics =
    std::function<Status(const TensorEntry&, const TensorStatistics&, bool known)>;
Result<StatisticsSummary> MeasureTensors(const OpenedCheckpoint& checkpoint,
                                         const StatisticsOptions& options,
                                         const EachStatistics& each);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_STATISTICS_H_
