// SPDX-License-Identifier: Apache-2.0
// Implements `diff` as a merge of two sorted key lists, so that neither list is in memory as a
// whole. If both sides have digests, the digests decide; other tensors (foreign files, values
// requested) are read.
//
// One thread merges. A tensor that has to be read becomes a Job. When kMostPending keys have been
// collected, several threads read the blocks of all jobs, and the results are reported in key
// order. The size of a batch bounds the memory.
#include "index/read/compare.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/glob.h"
#include "base/parallel.h"
#include "base/thread.h"

namespace tensormount {
namespace {

using Each = std::function<Status(const Mismatch&)>;

// Value of Job::first_element while no differing element is known.
constexpr std::uint64_t kNoElement = std::numeric_limits<std::uint64_t>::max();
// Largest number of keys in a batch. The metadata and results of a batch are in memory.
constexpr std::size_t kMostPending = 4096;

bool MatchesGlob(const std::string& glob, const std::string& key) {
  return glob.empty() || GlobMatches(glob, key);
}

// The tensors of one side in the order of their keys, kPage at a time.
class Cursor {
 public:
  Cursor(const CheckpointIndex& index, const std::string& glob) : index_(index), glob_(glob) {}

  // The current tensor; null at the end. Valid until Pop.
  Result<const TensorEntry*> Peek() {
    while (at_ == page_.size()) {
      if (end_) return static_cast<const TensorEntry*>(nullptr);
      page_.clear();
      at_ = 0;
      TENSORMOUNT_RETURN_IF_ERROR(Fill());
    }
    return &page_[at_];
  }
  void Pop() { ++at_; }

 private:
  static constexpr std::size_t kPage = 1024;

  Status Fill() {
    std::size_t seen = 0;
    TENSORMOUNT_RETURN_IF_ERROR(index_.ForEachTensor(next_, [&](const TensorEntry& tensor) {
      if (MatchesGlob(glob_, tensor.meta.key())) page_.push_back(tensor);
      return ++seen < kPage;
    }));
    next_ += static_cast<std::uint32_t>(seen);
    end_ = seen < kPage;
    return {};
  }

  const CheckpointIndex& index_;
  const std::string& glob_;
  std::uint32_t next_ = 0;
  std::vector<TensorEntry> page_;
  std::size_t at_ = 0;
  bool end_ = false;
};

// Two tensors whose bytes have to be read. They have the same shape and, unless values are
// compared, the same dtype.
struct Job {
  TensorEntry first;
  TensorEntry second;
  bool values = false;
  bool by_digest = false;   // Both have digests, which differ if the dtypes are the same.
  std::size_t entry = 0;    // Position of the result in the batch.
  std::uint64_t block = 0;  // Elements in a unit. A unit is a whole number of bytes.
  std::uint64_t units = 0;
  // Position of the first differing element. Threads lower it atomically; no other memory depends
  // on its value.
  std::atomic<std::uint64_t> first_element{kNoElement};
  std::mutex mutex;
  ValueMismatch sum;

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
    Cursor a(first_.index(), options_.keys);
    Cursor b(second_.index(), options_.keys);
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
      if (batch_.size() >= kMostPending) TENSORMOUNT_RETURN_IF_ERROR(Flush());
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
        outcome.reset();
        return;
      }
      d.reason = by_digest ? "digests differ" : "bytes differ";
    }
    const bool values =
        options_.values && same_shape && CanCompareValues(a.meta.dtype(), b.meta.dtype());
    const bool bytes = same_shape && same_type && (!by_digest || options_.values);
    if ((values || bytes) && a.meta.elements() > 0) AddJob(a, b, values, by_digest);
  }

  // Adds a job. A block is a multiple of 8 elements, so that blocks of f4 and narrower types begin
  // and end at whole bytes.
  void AddJob(const TensorEntry& a, const TensorEntry& b, bool values, bool by_digest) {
    Job& job = *jobs_.emplace_back(std::make_unique<Job>());
    job.first = a;
    job.second = b;
    job.values = values;
    job.by_digest = by_digest;
    job.entry = batch_.size() - 1;
    const std::uint64_t bits = std::max(a.meta.bits(), b.meta.bits());
    job.block = std::max<std::uint64_t>(8, options_.block_bytes * 8 / bits / 8 * 8);
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
        outcome.reset();
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
    return each_(*outcome);
  }

  // Reads all units of all jobs on several threads. A unit is one block of one job. Threads take
  // units in order from a counter, so that concurrent reads are neighbours in storage and all
  // threads are busy to the end.
  Status RunJobs() {
    // For each job, the number of units in it and all jobs before it.
    std::vector<std::uint64_t> ends;
    std::uint64_t units = 0;
    for (const auto& job : jobs_) ends.push_back(units += job->units);
    if (units == 0) return {};
    const std::uint64_t cores = HostCores();
    const std::uint64_t threads = std::min<std::uint64_t>(
        units, options_.threads > 0 ? static_cast<std::uint64_t>(options_.threads)
                                    : std::min<std::uint64_t>(cores, 8));
    std::atomic<std::uint64_t> next{0};
    std::atomic<bool> stop{false};
    std::mutex mutex;
    Status failure;
    const auto work = [&] {
      Status status;
      try {
        std::vector<std::byte> a;
        std::vector<std::byte> b;
        while (status.ok() && !stop) {
          const std::uint64_t unit = next++;
          if (unit >= units) break;
          const auto job = static_cast<std::size_t>(
              std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin());
          status = RunUnit(*jobs_[job], unit - (ends[job] - jobs_[job]->units), a, b);
        }
      } catch (const std::exception& error) {
        status = Status(Code::kResourceExhausted, std::string("compare: ") + error.what());
      }
      if (status.ok()) return;
      stop = true;
      std::lock_guard lock(mutex);
      if (failure.ok()) failure = status;
    };
    {
      // The threads are joined at the end of this block, before `failure` is read.
      std::vector<JoiningThread> others;
      for (std::uint64_t i = 1; i < threads; ++i) others.emplace_back(work);
      work();
    }
    return failure;
  }

  // Compares one unit. Without `values` only the first differing element counts, so blocks behind a
  // known differing element are skipped.
  Status RunUnit(Job& job, std::uint64_t unit, std::vector<std::byte>& a,
                 std::vector<std::byte>& b) {
    const std::uint64_t begin = unit * job.block;
    if (!job.values && begin >= job.first_element) return {};
    const TensorMeta& mine = job.first.meta;
    const std::uint64_t count = std::min(job.block, mine.elements() - begin);
    TENSORMOUNT_RETURN_IF_ERROR(ReadBlock(first_, job.first, begin, count, a));
    TENSORMOUNT_RETURN_IF_ERROR(ReadBlock(second_, job.second, begin, count, b));
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
    const std::uint64_t done = read_ += a.size() + b.size();
    return options_.watch ? options_.watch(done, total_) : Status();
  }

  // Reads elements in row-major order as whole bytes. `begin` is a multiple of 8 elements; the end
  // is too, or it is the tensor's end.
  static Status ReadBlock(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                          std::uint64_t begin, std::uint64_t count, std::vector<std::byte>& out) {
    const std::uint64_t bits = tensor.meta.bits();
    out.resize(count * bits / 8);
    return checkpoint.ReadBytes(tensor, begin / 8 * bits, out.data(), out.size(),
                                ReadVerify::kExtendLeaves, nullptr);
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
