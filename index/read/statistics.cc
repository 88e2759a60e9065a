// SPDX-License-Identifier: Apache-2.0
// Reads tensors block by block on several threads, and adds up the statistics of the blocks of each
// tensor in order.
#include "index/read/statistics.h"

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "base/parallel.h"
#include "index/read/tensor_units.h"

namespace tensormount {
namespace {

// A tensor of a batch. Without units it has no bytes, or its statistics are known.
struct MeasuredTensor {
  TensorEntry tensor;
  const TensorStatistics* known = nullptr;
  std::uint64_t block = 0;  // Elements in a unit.
  OrderedSum<BlockStatistics, ValueSums> sum;
};

class Measurement {
 public:
  Measurement(const OpenedCheckpoint& checkpoint, const StatisticsOptions& options,
              const EachStatistics& each)
      : checkpoint_(checkpoint), options_(options), each_(each) {}

  Result<StatisticsSummary> Run() {
    TensorCursor cursor(checkpoint_.index(), options_.keys);
    for (;;) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry* tensor, cursor.Peek());
      if (tensor == nullptr) break;
      Add(*tensor);
      cursor.Pop();
      if (batch_.size() >= kMostPendingKeys) TENSORMOUNT_RETURN_IF_ERROR(Flush());
    }
    TENSORMOUNT_RETURN_IF_ERROR(Flush());
    summary_.bytes_read = read_;
    return summary_;
  }

 private:
  void Add(const TensorEntry& tensor) {
    MeasuredTensor& added = *batch_.emplace_back(std::make_unique<MeasuredTensor>());
    added.tensor = tensor;
    if (options_.known) added.known = options_.known(tensor);
    std::uint64_t units = 0;
    if (added.known == nullptr && tensor.meta.elements() > 0) {
      const std::uint64_t step = BlockElements(tensor.meta.dtype());
      const std::uint64_t fit = options_.block_bytes * 8 / tensor.meta.bits() / step;
      added.block = std::max<std::uint64_t>(1, fit) * step;
      units = (tensor.meta.elements() - 1) / added.block + 1;
      total_ += tensor.meta.bytes();
    }
    units_.Add(units);
  }

  Status Flush() {
    struct Buffer {
      std::vector<std::byte> bytes;
    };
    TENSORMOUNT_RETURN_IF_ERROR(ForEachParallel<Buffer>(
        units_.count(), ReadingThreads(options_.threads), [&](std::size_t i, Buffer& buffer) {
          const TensorUnits::Unit unit = units_.At(i);
          return RunUnit(*batch_[unit.tensor], unit.number, buffer.bytes);
        }));
    for (const auto& one : batch_) TENSORMOUNT_RETURN_IF_ERROR(Report(*one));
    batch_.clear();
    units_ = {};
    return {};
  }

  Status RunUnit(MeasuredTensor& one, std::uint64_t unit, std::vector<std::byte>& bytes) {
    const TensorMeta& meta = one.tensor.meta;
    const std::uint64_t begin = unit * one.block;
    const std::uint64_t count = std::min(one.block, meta.elements() - begin);
    TENSORMOUNT_RETURN_IF_ERROR(ReadElements(checkpoint_, one.tensor, begin, count, bytes));
    const std::uint64_t step = BlockElements(meta.dtype());
    std::vector<BlockStatistics> blocks;
    for (std::uint64_t at = 0; at < count; at += step) {
      const std::uint64_t values = std::min(step, count - at) * ValuesPerElement(meta.dtype());
      blocks.push_back(
          MeasureBlock(ValueDType(meta.dtype()), bytes.data() + at * meta.bits() / 8, values));
    }
    one.sum.Add(unit, std::move(blocks));
    const std::uint64_t done = read_ += bytes.size();
    return options_.watch ? options_.watch(done, total_) : Status();
  }

  Status Report(const MeasuredTensor& one) {
    const TensorStatistics measured =
        one.known != nullptr ? *one.known
                             : StatisticsOf(one.sum.sum(), IsIntegerDType(one.tensor.meta.dtype()));
    ++summary_.tensors;
    summary_.known += one.known != nullptr ? 1 : 0;
    summary_.values += measured.count;
    summary_.nan += measured.nan;
    summary_.infinite += measured.posinf + measured.neginf;
    if (std::isfinite(measured.norm)) {
      int exponent = 0;
      const double mantissa = std::frexp(measured.norm, &exponent);
      summary_.squares.Add(mantissa * mantissa, 2 * exponent);
    }
    return each_(one.tensor, measured, one.known != nullptr);
  }

  const OpenedCheckpoint& checkpoint_;
  const StatisticsOptions& options_;
  const EachStatistics& each_;
  std::vector<std::unique_ptr<MeasuredTensor>> batch_;
  TensorUnits units_;
  std::uint64_t total_ = 0;
  std::atomic<std::uint64_t> read_{0};
  StatisticsSummary summary_;
};

}  // namespace

TensorStatistics StatisticsOf(const ValueSums& values, bool integers) {
  TensorStatistics out;
  out.count = values.count;
  out.zeros = values.zeros;
  out.subnormals = values.subnormals;
  out.nan = values.nan;
  out.posinf = values.posinf;
  out.neginf = values.neginf;
  if (values.finite() == 0) return out;
  // 0.0 instead of -0.0.
  out.min = values.min + 0.0;
  out.max = values.max + 0.0;
  out.norm = values.squares.Root();
  if (!integers) {
    out.mean = values.sum.DividedBy(static_cast<double>(values.finite())) + 0.0;
    return out;
  }
  out.integer_sum = values.integer_sum;
  out.integer_min = values.integer_min;
  out.integer_max = values.integer_max;
  const auto count = static_cast<Int128>(values.count);
  out.mean = static_cast<double>(values.integer_sum / count) +
             static_cast<double>(values.integer_sum % count) / static_cast<double>(values.count);
  return out;
}

Result<StatisticsSummary> MeasureTensors(const OpenedCheckpoint& checkpoint,
                                         const StatisticsOptions& options,
                                         const EachStatistics& each) {
  return Measurement(checkpoint, options, each).Run();
}

}  // namespace tensormount
