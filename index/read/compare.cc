// SPDX-License-Identifier: Apache-2.0
// `diff`: two checkpoints key by key, as a merge of two sorted lists, so that neither is in memory.
// What digests tell is not read; what they cannot tell (other chunks of a foreign file, values
// wanted) is read in both, a batch of tensors at a time on several threads.
//
// One thread merges and judges; what it cannot judge without reading becomes a Job. When
// kMostPending keys have gathered, threads read the blocks of all jobs, and results are handed out
// in the order of keys. Memory is bounded by the batch, whatever the checkpoints hold.
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
#include "index/records/key_renames.h"

namespace tensormount {
namespace {

using Each = std::function<Status(const Mismatch&)>;

// No element is different, so far.
constexpr std::uint64_t kNoElement = std::numeric_limits<std::uint64_t>::max();
// Keys and tensors to be read that are worked on together; what is known of them is in memory.
constexpr std::size_t kMostPending = 4096;

bool Wanted(const std::string& glob, const std::string& key) {
  return glob.empty() || GlobMatches(glob, key);
}

// The tensors of one side in the order of the names that they are compared by.
// Without renames the index gives keys in order, page by page. With renames the order is another
// one, so ordinals are sorted by name first (4 bytes a tensor) and tensors are looked up one by
// one.
class Cursor {
 public:
  Cursor(const CheckpointIndex& index, const std::string& glob, const KeyRenames* names)
      : index_(index), glob_(glob), names_(names) {
    if (names == nullptr) return;
    for (std::uint32_t i = 0; i < names->tensors().size(); ++i) {
      if (!names->tensors()[i].empty()) order_.push_back(i);
    }
    std::sort(order_.begin(), order_.end(), [&](std::uint32_t a, std::uint32_t b) {
      return names->tensors()[a] < names->tensors()[b];
    });
  }

  // Null at the end; valid until Pop.
  Result<const TensorEntry*> Peek() {
    while (at_ == page_.size()) {
      if (end_) return static_cast<const TensorEntry*>(nullptr);
      page_.clear();
      at_ = 0;
      TENSORMOUNT_RETURN_IF_ERROR(names_ == nullptr ? FillInKeyOrder() : FillByName());
    }
    return &page_[at_];
  }
  void Pop() { ++at_; }
  const std::string& Name(const TensorEntry& tensor) const {
    return names_ == nullptr ? tensor.meta.key() : names_->tensors()[tensor.ordinal];
  }

 private:
  static constexpr std::size_t kPage = 1024;

  Status FillInKeyOrder() {
    std::size_t seen = 0;
    TENSORMOUNT_RETURN_IF_ERROR(index_.ForEachTensor(next_, [&](const TensorEntry& tensor) {
      if (Wanted(glob_, tensor.meta.key())) page_.push_back(tensor);
      return ++seen < kPage;
    }));
    next_ += static_cast<std::uint32_t>(seen);
    end_ = seen < kPage;
    return {};
  }
  Status FillByName() {
    while (page_.size() < kPage && next_ < order_.size()) {
      const std::uint32_t ordinal = order_[next_++];
      if (!Wanted(glob_, names_->tensors()[ordinal])) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(TensorEntry tensor, index_.At(ordinal));
      page_.push_back(std::move(tensor));
    }
    end_ = next_ == order_.size();
    return {};
  }

  const CheckpointIndex& index_;
  const std::string& glob_;
  const KeyRenames* names_;
  std::vector<std::uint32_t> order_;  // Ordinals by name, of renamed ones.
  std::uint32_t next_ = 0;
  std::vector<TensorEntry> page_;
  std::size_t at_ = 0;
  bool end_ = false;
};

// Two tensors whose bytes are to be read: of one shape, and of one dtype unless values are
// compared.
struct Job {
  TensorEntry first;
  TensorEntry second;
  bool values = false;
  bool by_digest = false;   // Known to differ.
  std::size_t entry = 0;    // Its position in the batch.
  std::uint64_t block = 0;  // Elements a unit; whole bytes.
  std::uint64_t units = 0;
  // Threads lower it; only the minimum matters, and no other memory depends on it.
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
  // What became of one key: a mismatch, or none where both sides are equal.
  using Outcome = std::optional<Mismatch>;

  Status Tensors() {
    Cursor a(first_.index(), options_.keys, options_.first_names);
    Cursor b(second_.index(), options_.keys, nullptr);
    for (;;) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry* mine, a.Peek());
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry* theirs, b.Peek());
      if (mine == nullptr && theirs == nullptr) break;
      int order = mine == nullptr ? 1 : -1;
      if (mine != nullptr && theirs != nullptr) order = a.Name(*mine).compare(theirs->meta.key());
      if (order == 0) {
        Judge(*mine, *theirs);
      } else {
        Mismatch& alone = batch_.emplace_back().emplace();
        alone.kind = order < 0 ? Mismatch::Kind::kRemoved : Mismatch::Kind::kAdded;
        alone.key = order < 0 ? a.Name(*mine) : theirs->meta.key();
        (order < 0 ? alone.first : alone.second) = order < 0 ? mine->meta : theirs->meta;
      }
      if (order <= 0) a.Pop();
      if (order >= 0) b.Pop();
      if (batch_.size() >= kMostPending) TENSORMOUNT_RETURN_IF_ERROR(Flush());
    }
    return Flush();
  }

  // What can be said of two tensors without reading; the rest becomes a job.
  void Judge(const TensorEntry& a, const TensorEntry& b) {
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

  // A block is a multiple of 8 elements, so that blocks of f4 and of narrower types begin and end
  // at whole bytes.
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

  // Jobs refer to entries of the batch by position: the batch grows while jobs are added.
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

  // Digests that differ over equal bytes mean that a record lies, which is worth a line: verify
  // will say which.
  static void Conclude(const Job& job, Mismatch& d) {
    const std::uint64_t at = job.first_element;
    if (at != kNoElement) {
      d.first_element = at;
    } else if (job.same_type()) {
      d.reason = "digests differ, bytes do not: one digest is wrong";
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

  // All units of all jobs by several threads, in order, so that what the threads read at one time
  // lies side by side.
  // A unit is one block of one job. Threads take units by a counter: blocks of a tensor are read
  // one after the other, and all threads are busy to the end.
  Status RunJobs() {
    std::vector<std::uint64_t> ends;  // Of each job's units among all.
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
      // Joined at the end of the block, before `failure` is read.
      std::vector<std::jthread> others;
      for (std::uint64_t i = 1; i < threads; ++i) others.emplace_back(work);
      work();
    }
    return failure;
  }

  // Only a thread that reads a block in front of everything found so far can lower the minimum, so
  // later blocks are skipped unless values are wanted.
  Status RunUnit(Job& job, std::uint64_t unit, std::vector<std::byte>& a,
                 std::vector<std::byte>& b) {
    const std::uint64_t begin = unit * job.block;
    // What lies behind a mismatch that was found already cannot become the first one.
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
    // Lowers the minimum, unless another thread has put a lower one there.
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

  // Elements as they stand in the row-major bytes. `begin` and `count` are whole bytes: `begin` is
  // a multiple of 8 elements, and the end one of them or the tensor's.
  static Status ReadBlock(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor,
                          std::uint64_t begin, std::uint64_t count, std::vector<std::byte>& out) {
    const std::uint64_t bits = tensor.meta.bits();
    out.resize(count * bits / 8);
    return checkpoint.ReadBytes(tensor, begin / 8 * bits, out.data(), out.size(),
                                ReadVerify::kExtendLeaves, nullptr);
  }

  // ---- Objects ----

  struct Part {
    std::string name;  // The key that it is compared by.
    ObjectRecord object;
    std::vector<std::int64_t> index;
    auto order() const { return std::tie(name, index); }
    std::string Text() const {
      return object.grid.rank() == 0 ? name : name + " " + object.index.ToString();
    }
  };

  // Object parts of both sides are kept and sorted in memory: they are few beside chunks.
  Result<std::vector<Part>> PartsOf(const OpenedCheckpoint& checkpoint, const KeyRenames* names) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ObjectRecord> objects, checkpoint.index().Objects());
    std::vector<Part> parts;
    for (ObjectRecord& object : objects) {
      std::string name = names == nullptr ? object.key : names->Object(object.key);
      if (name.empty() || !Wanted(options_.keys, name)) continue;
      std::vector<std::int64_t> index(object.index.begin(), object.index.end());
      parts.push_back(
          {.name = std::move(name), .object = std::move(object), .index = std::move(index)});
    }
    std::sort(parts.begin(), parts.end(),
              [](const Part& a, const Part& b) { return a.order() < b.order(); });
    return parts;
  }

  Status Objects() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Part> mine,
                                 PartsOf(first_, options_.first_names));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Part> theirs, PartsOf(second_, nullptr));
    auto a = mine.begin();
    auto b = theirs.begin();
    while (a != mine.end() || b != theirs.end()) {
      const bool only_a = b == theirs.end() || (a != mine.end() && a->order() < b->order());
      const bool only_b = a == mine.end() || (b != theirs.end() && b->order() < a->order());
      Outcome outcome;
      Mismatch& d = outcome.emplace();
      d.what = Mismatch::What::kObject;
      d.key = only_a ? a->Text() : b->Text();
      if (!only_b) d.first_bytes = a->object.length;
      if (!only_a) d.second_bytes = b->object.length;
      if (only_a || only_b) {
        d.kind = only_a ? Mismatch::Kind::kRemoved : Mismatch::Kind::kAdded;
      } else {
        TENSORMOUNT_RETURN_IF_ERROR(JudgeObjects(a->object, b->object, outcome));
      }
      TENSORMOUNT_RETURN_IF_ERROR(Emit(outcome));
      if (!only_b) ++a;
      if (!only_a) ++b;
    }
    return {};
  }

  Status JudgeObjects(const ObjectRecord& a, const ObjectRecord& b, Outcome& outcome) {
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

  // Stops at the first block that differs.
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
