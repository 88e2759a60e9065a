// SPDX-License-Identifier: Apache-2.0
// Implements `diff` as a merge of two sorted key lists, so that neither list is in memory as a
// whole. If both sides have digests, the digests decide; other tensors (foreign files, values
// requested) are read.
//
// One thread merges. A tensor that has to be read becomes a Job. When kMostPendingKeys keys have
// been collected, several threads read the blocks of all jobs, and the results are reported in key
// order. The size of a batch bounds the memory.
#include "index/read/compare.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/glob.h"
#include "base/parallel.h"
#include "index/read/tensor_units.h"

namespace tensormount {
namespace {

using Each = std::function<Status(const Mismatch&)>;

// Value of Job::first_element while no differing element is known.
constexpr std::uint64_t kNoElement = std::numeric_limits<std::uint64_t>::max();

bool MatchesGlob(const std::string& glob, const std::string& key) {
  return glob.empty() || GlobMatches(glob, key);
}

// Two tensors whose bytes have to be read. They have the same shape and, unless values are
// compared, the same dtype.
struct Job {
  TensorEntry first;
  TensorEntry second;
  bool values = false;
  bool stats = false;
  bool by_digest = false;   // Both have digests, which differ if the dtypes are the same.
  std::size_t entry = 0;    // Position of the result in the batch.
  std::uint64_t block = 0;  // Elements in a unit. A unit is a whole number of bytes.
  std::uint64_t units = 0;
  // Position of the first differing element. Threads lower it atomically; no other memory depends
  // on its value.
  std::atomic<std::uint64_t> first_element{kNoElement};
  std::mutex mutex;
  ValueMismatch sum;
  OrderedSum<BlockChange, ValueChange> change;

  bool same_type() const { return first.meta.dtype() == second.meta.dtype(); }
};

class CheckpointComparison {
 public:
  CheckpointComparison(const OpenedCheckpoint& first, const OpenedCheckpoint& second,
                       const CompareOptions& options, const Each& each)
      : first_(first), second_(second), options_(options), each_(each) {}

  Result<CompareSummary> Run() {
    TENSORMOUNT_RETURN_IF_ERROR(Tensors());
    TENSORMOUNT_RETURN_IF_ERROR(Objects());
    TENSORMOUNT_RETURN_IF_ERROR(
        CompareCommon(first_.index(), second_.index(), options_, summary_, each_));
    return summary_;
  }

 private:
  // The result for one key. Empty: the sides are equal.
  using Outcome = std::optional<Mismatch>;

  Status Tensors() {
    TensorCursor a(first_.index(), options_.keys);
    TensorCursor b(second_.index(), options_.keys);
    for (;;) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry* mine, a.Peek());
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry* theirs, b.Peek());
      if (mine == nullptr && theirs == nullptr) break;
      int order = mine == nullptr ? 1 : -1;
      if (mine != nullptr && theirs != nullptr)
        order = mine->meta.key().compare(theirs->meta.key());
      if (order == 0) {
        CompareTensors(*mine, *theirs);
      } else {
        Mismatch& alone = batch_.emplace_back().emplace();
        alone.kind = order < 0 ? Mismatch::Kind::kRemoved : Mismatch::Kind::kAdded;
        alone.key = (order < 0 ? mine : theirs)->meta.key();
        (order < 0 ? alone.first : alone.second) = order < 0 ? mine->meta : theirs->meta;
      }
      if (order <= 0) a.Pop();
      if (order >= 0) b.Pop();
      if (batch_.size() >= kMostPendingKeys) TENSORMOUNT_RETURN_IF_ERROR(Flush());
    }
    return Flush();
  }

  // Compares two tensors of one key by metadata and digests, or adds a job.
  void CompareTensors(const TensorEntry& a, const TensorEntry& b) {
    Outcome& outcome = batch_.emplace_back();
    Mismatch& d = outcome.emplace();
    d.key = b.meta.key();
    d.first = a.meta;
    d.second = b.meta;
    if (a.meta.shape() != b.meta.shape()) {
      d.reason = "shape " + a.meta.shape().ToString() + " and " + b.meta.shape().ToString();
    }
    const bool same_type = a.meta.dtype() == b.meta.dtype();
    if (!same_type) {
      if (!d.reason.empty()) d.reason += ", ";
      d.reason += "dtype " + std::string(InfoOf(a.meta.dtype()).name) + " and " +
                  std::string(InfoOf(b.meta.dtype()).name);
    }
    const bool same_shape = a.meta.shape() == b.meta.shape();
    const bool by_digest = a.has_digest && b.has_digest;
    if (same_shape && same_type) {
      const bool empty = a.meta.bytes() == 0;
      ++(empty || by_digest ? summary_.by_digest : summary_.by_bytes);
      if (empty || (by_digest && a.digest == b.digest)) {
        SetEqual(outcome);
        return;
      }
      d.reason = by_digest ? "digests differ" : "bytes differ";
    }
    const bool values =
        options_.values && same_shape && CanCompareValues(a.meta.dtype(), b.meta.dtype());
    const bool stats =
        options_.stats && same_shape && CanMeasureChange(a.meta.dtype(), b.meta.dtype());
    const bool bytes = same_shape && same_type && (!by_digest || options_.values || stats);
    if ((values || stats || bytes) && a.meta.elements() > 0) AddJob(a, b, values, stats, by_digest);
  }

  // Adds a job. A block is a multiple of 8 elements, so that blocks of f4 and narrower types begin
  // and end at whole bytes. With `stats` it is a multiple of the blocks of value_statistics.h.
  void AddJob(const TensorEntry& a, const TensorEntry& b, bool values, bool stats, bool by_digest) {
    Job& job = *jobs_.emplace_back(std::make_unique<Job>());
    job.first = a;
    job.second = b;
    job.values = values;
    job.stats = stats;
    job.by_digest = by_digest;
    job.entry = batch_.size() - 1;
    const std::uint64_t bits = std::max(a.meta.bits(), b.meta.bits());
    const std::uint64_t step = stats ? BlockElements(a.meta.dtype()) : 8;
    job.block = std::max<std::uint64_t>(1, options_.block_bytes * 8 / bits / step) * step;
    job.units = (a.meta.elements() - 1) / job.block + 1;
    total_ += a.meta.bytes() + b.meta.bytes();
  }

  // Runs the jobs and reports the results of the batch. Jobs refer to batch entries by position,
  // because the batch grows while jobs are added.
  Status Flush() {
    TENSORMOUNT_RETURN_IF_ERROR(RunJobs());
    for (const auto& job : jobs_) {
      Outcome& outcome = batch_[job->entry];
      if (!job->by_digest && job->same_type() && job->first_element == kNoElement) {
        SetEqual(outcome);
      } else {
        Conclude(*job, *outcome);
      }
    }
    jobs_.clear();
    for (const Outcome& outcome : batch_) TENSORMOUNT_RETURN_IF_ERROR(Emit(outcome));
    batch_.clear();
    return {};
  }

  // Sets the result of a job. If the digests differ but the bytes are equal, a record is wrong: the
  // mismatch is reported, and verify finds which record.
  static void Conclude(const Job& job, Mismatch& d) {
    const std::uint64_t at = job.first_element;
    if (at != kNoElement) {
      d.first_element = at;
    } else if (job.same_type()) {
      d.reason = "digests differ, but the bytes are equal: one digest is wrong";
    }
    if (job.values) d.values = job.sum;
    if (job.stats) d.change = job.change.sum();
  }

  void SetEqual(Outcome& outcome) {
    const TensorMeta& meta = *outcome->first;
    summary_.unchanged_values += meta.elements() * ValuesPerElement(meta.dtype());
    outcome.reset();
  }

  Status Emit(const Outcome& outcome) {
    if (!outcome) {
      ++summary_.equal;
      return {};
    }
    switch (outcome->kind) {
      case Mismatch::Kind::kAdded:
        ++summary_.added;
        break;
      case Mismatch::Kind::kRemoved:
        ++summary_.removed;
        break;
      case Mismatch::Kind::kChanged:
        ++summary_.changed;
        break;
    }
    if (outcome->change) summary_.change.Add(*outcome->change);
    return each_(*outcome);
  }

  // Reads all units of all jobs on several threads. A unit is one block of one job.
  Status RunJobs() {
    TensorUnits units;
    for (const auto& job : jobs_) units.Add(job->units);
    if (units.count() == 0) return {};
    struct Buffers {
      std::vector<std::byte> a;
      std::vector<std::byte> b;
    };
    return ForEachParallel<Buffers>(
        units.count(), ReadingThreads(options_.threads), [&](std::size_t i, Buffers& buffers) {
          const TensorUnits::Unit unit = units.At(i);
          return RunUnit(*jobs_[unit.tensor], unit.number, buffers.a, buffers.b);
        });
  }

  // Compares one unit. Without `values` and `stats` only the first differing element counts, so
  // blocks behind a known differing element are skipped.
  Status RunUnit(Job& job, std::uint64_t unit, std::vector<std::byte>& a,
                 std::vector<std::byte>& b) {
    const std::uint64_t begin = unit * job.block;
    if (!job.values && !job.stats && begin >= job.first_element) return {};
    const TensorMeta& mine = job.first.meta;
    const std::uint64_t count = std::min(job.block, mine.elements() - begin);
    TENSORMOUNT_RETURN_IF_ERROR(ReadElements(first_, job.first, begin, count, a));
    TENSORMOUNT_RETURN_IF_ERROR(ReadElements(second_, job.second, begin, count, b));
    std::uint64_t found = kNoElement;
    if (job.same_type() && std::memcmp(a.data(), b.data(), a.size()) != 0) {
      const auto byte = static_cast<std::uint64_t>(
          std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
      found = begin + byte * 8 / mine.bits();
    }
    // Stores the smaller of `found` and the known position.
    std::uint64_t known = job.first_element;
    while (found < known && !job.first_element.compare_exchange_weak(known, found)) {
    }
    if (job.values) {
      ValueMismatch sum;
      CompareValues(mine.dtype(), a.data(), job.second.meta.dtype(), b.data(), count, begin, &sum);
      std::lock_guard lock(job.mutex);
      job.sum.Add(sum);
    }
    if (job.stats) job.change.Add(unit, ChangesOf(job, a, b, count));
    const std::uint64_t done = read_ += a.size() + b.size();
    return options_.watch ? options_.watch(done, total_) : Status();
  }

  // The changes of the blocks of a unit.
  static std::vector<BlockChange> ChangesOf(const Job& job, const std::vector<std::byte>& a,
                                            const std::vector<std::byte>& b, std::uint64_t count) {
    const DType type_a = job.first.meta.dtype();
    const DType type_b = job.second.meta.dtype();
    const std::uint64_t step = BlockElements(type_a);
    std::vector<BlockChange> changes;
    for (std::uint64_t at = 0; at < count; at += step) {
      const std::uint64_t values = std::min(step, count - at) * ValuesPerElement(type_a);
      changes.push_back(MeasureChange(ValueDType(type_a), a.data() + at * InfoOf(type_a).bits / 8,
                                      ValueDType(type_b), b.data() + at * InfoOf(type_b).bits / 8,
                                      values));
    }
    return changes;
  }

  // ---- Objects ----

  struct Part {
    ObjectRecord object;
    std::vector<std::int64_t> index;
    auto order() const { return std::tie(object.key, index); }
    std::string Text() const {
      return object.grid.rank() == 0 ? object.key : object.key + " " + object.index.ToString();
    }
  };

  // The object parts of one side, sorted. They are in memory, because there are few.
  Result<std::vector<Part>> PartsOf(const OpenedCheckpoint& checkpoint) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ObjectRecord> objects, checkpoint.index().Objects());
    std::vector<Part> parts;
    for (ObjectRecord& object : objects) {
      if (!MatchesGlob(options_.keys, object.key)) continue;
      std::vector<std::int64_t> index(object.index.begin(), object.index.end());
      parts.push_back({.object = std::move(object), .index = std::move(index)});
    }
    std::sort(parts.begin(), parts.end(),
              [](const Part& a, const Part& b) { return a.order() < b.order(); });
    return parts;
  }

  Status Objects() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Part> mine, PartsOf(first_));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Part> theirs, PartsOf(second_));
    auto a = mine.begin();
    auto b = theirs.begin();
    while (a != mine.end() || b != theirs.end()) {
      const bool only_a = b == theirs.end() || (a != mine.end() && a->order() < b->order());
      const bool only_b = a == mine.end() || (b != theirs.end() && b->order() < a->order());
      Outcome outcome;
      Mismatch& d = outcome.emplace();
      d.subject = Mismatch::Subject::kObject;
      d.key = only_a ? a->Text() : b->Text();
      if (!only_b) d.first_bytes = a->object.length;
      if (!only_a) d.second_bytes = b->object.length;
      if (only_a || only_b) {
        d.kind = only_a ? Mismatch::Kind::kRemoved : Mismatch::Kind::kAdded;
      } else {
        TENSORMOUNT_RETURN_IF_ERROR(CompareObjectParts(a->object, b->object, outcome));
      }
      TENSORMOUNT_RETURN_IF_ERROR(Emit(outcome));
      if (!only_b) ++a;
      if (!only_a) ++b;
    }
    return {};
  }

  Status CompareObjectParts(const ObjectRecord& a, const ObjectRecord& b, Outcome& outcome) {
    std::string& reason = outcome->reason;
    bool equal = false;
    if (a.grid != b.grid) {
      reason = "grid " + a.grid.ToString() + " and " + b.grid.ToString();
    } else if (a.length != b.length) {
      reason = std::to_string(a.length) + " and " + std::to_string(b.length) + " bytes";
    } else if (a.has_hash() && b.has_hash()) {
      ++summary_.by_digest;
      equal = a.hash == b.hash;
      reason = "hashes differ";
    } else {
      ++summary_.by_bytes;
      TENSORMOUNT_ASSIGN_OR_RETURN(equal, SameBytes(a, b));
      reason = "bytes differ";
    }
    if (equal) outcome.reset();
    return {};
  }

  // Compares the bytes of two object parts up to the first block that differs.
  Result<bool> SameBytes(const ObjectRecord& a, const ObjectRecord& b) {
    std::vector<std::byte> left;
    std::vector<std::byte> right;
    for (std::uint64_t at = 0; at < a.length; at += left.size()) {
      left.resize(std::min<std::uint64_t>(options_.block_bytes, a.length - at));
      right.resize(left.size());
      TENSORMOUNT_RETURN_IF_ERROR(first_.ReadObject(a, at, left.data(), left.size()));
      TENSORMOUNT_RETURN_IF_ERROR(second_.ReadObject(b, at, right.data(), right.size()));
      read_ += 2 * left.size();
      if (left != right) return false;
    }
    return true;
  }

  const OpenedCheckpoint& first_;
  const OpenedCheckpoint& second_;
  const CompareOptions& options_;
  const Each& each_;
  std::vector<Outcome> batch_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::uint64_t total_ = 0;
  std::atomic<std::uint64_t> read_{0};
  CompareSummary summary_;

 public:
  std::uint64_t bytes_read() const { return read_; }
};

}  // namespace

Result<CompareSummary> CompareCheckpoints(const OpenedCheckpoint& first,
                                          const OpenedCheckpoint& second,
                                          const CompareOptions& options, const Each& each) {
  CheckpointComparison comparison(first, second, options, each);
  TENSORMOUNT_ASSIGN_OR_RETURN(CompareSummary summary, comparison.Run());
  summary.bytes_read = comparison.bytes_read();
  return summary;
}

Dims IndexOf(std::uint64_t element, const Dims& shape) {
  Dims index = Dims::Filled(shape.rank(), 0);
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    const auto extent = static_cast<std::uint64_t>(std::max<std::int64_t>(1, shape[axis]));
    index[axis] = static_cast<std::int64_t>(element % extent);
    element /= extent;
  }
  return index;
}

}  // namespace tensormount
