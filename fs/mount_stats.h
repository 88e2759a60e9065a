// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_STATS_H_
#define TENSORMOUNT_FS_MOUNT_STATS_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "tensormount/status.h"

#include "fs/metrics_text.h"
#include "index/read/checkpoint.h"

namespace tensormount::fs {

// Who serves a request: the daemon, from the files of a published checkpoint or from what it knows;
// the kernel, which reads the backing file itself once the daemon has opened it; a staging.
enum class Tier : std::uint8_t { kDaemon, kPassthrough, kStaging };
inline constexpr std::size_t kTiers = 3;
std::string_view TierName(Tier tier);

// What is counted: a kind of request, and for whom it was.
enum class Op : std::uint8_t {
  kLookup,
  kGetattr,
  kReaddir,
  kOpen,
  kRead,
  kReadlink,
  kXattr,
  kStatfs,
  kRefused,
  kOther,
  kOpenPassthrough,  // An open that handed the file to the kernel.
  kOpenStaged,       // From here on below .staging/.
  kReadStaged,
  kCreate,
  kWrite,
  kFlush,
  kFsync,
  kSetattr,
  kMkdir,
  kRemove,
  kRename,
};
inline constexpr std::size_t kOps = 21;
// "read" for kRead and for kReadStaged: names are told apart by their tier.
std::string_view OpName(Op op);
Tier OpTier(Op op);

// Counting is on the path of every request, so it is a few relaxed atomic additions and takes no
// lock; a report that is made meanwhile may be off by requests under way. Only failures that a
// person should read take the lock.
// What a mount counts, and the failures that an operator should know of. Thread-safe.
class MountStats {
 public:
  using Clock = std::chrono::steady_clock;

  // One request that was answered after `took`.
  void Count(Op op, std::chrono::nanoseconds took, bool failed);
  // Bytes of a published checkpoint that the daemon sent.
  void CountBytes(std::uint64_t served, const ReadStats& read);
  // A file that was opened for the kernel to read; what it then reads of it nobody is told.
  void CountPassthrough(std::uint64_t file_bytes) {
    passthrough_bytes_.fetch_add(file_bytes, std::memory_order_relaxed);
  }
  // Bytes of a staging that programs read and wrote.
  void CountStaged(std::uint64_t read, std::uint64_t written) {
    staging_read_.fetch_add(read, std::memory_order_relaxed);
    staging_written_.fetch_add(written, std::memory_order_relaxed);
  }
  // Keeps the failure as one line of .tensormount/errors (the last 256 are kept), and logs it.
  // A failure that comes again and again fills the 256 lines: the count of errors goes on.
  void Report(std::string_view operation, std::string_view object, const Status& status);
  void CountInterrupted() { interrupted_.fetch_add(1, std::memory_order_relaxed); }

  // .tensormount/stats: one line of JSON, described in docs/operations.md. Latencies are upper
  // bounds of classes that are a fifth to a quarter wide.
  std::string StatsJson() const;
  // .tensormount/errors: one line of JSON a failure, oldest first.
  std::string ErrorsJson() const;
  // Families for .tensormount/metrics. Buckets are powers of 4 from a microsecond to a minute.
  void AddMetrics(MetricsText& text) const;
  std::uint64_t errors() const { return errors_.load(std::memory_order_relaxed); }

  // One file that a program has open; counted for as long as this lives, which is not longer than
  // the MountStats.
  class OpenHandle {
   public:
    OpenHandle() = default;
    explicit OpenHandle(MountStats& stats) : stats_(&stats) {
      stats.open_handles_.fetch_add(1, std::memory_order_relaxed);
    }
    OpenHandle(OpenHandle&& other) noexcept : stats_(std::exchange(other.stats_, nullptr)) {}
    OpenHandle& operator=(OpenHandle&& other) noexcept {
      std::swap(stats_, other.stats_);
      return *this;
    }
    ~OpenHandle() {
      if (stats_ != nullptr) stats_->open_handles_.fetch_sub(1, std::memory_order_relaxed);
    }

   private:
    MountStats* stats_ = nullptr;
  };

 private:
  static constexpr std::size_t kClasses = 156;  // Of nanoseconds: four to each power of two.
  // A histogram with logarithmic classes: 156 counters hold latencies from nanoseconds to minutes
  // with an error of at most a quarter.
  struct PerOp {
    std::atomic<std::uint64_t> requests{0};
    std::atomic<std::uint64_t> failed{0};
    std::atomic<std::uint64_t> slowest_ns{0};
    std::atomic<std::uint64_t> total_ns{0};
    std::array<std::atomic<std::uint64_t>, kClasses> latency{};
  };
  static std::size_t ClassOf(std::uint64_t ns);
  static std::uint64_t UpperBound(std::size_t latency_class);
  // The upper bound of the class in which that share of the requests is reached.
  static std::uint64_t Percentile(const PerOp& op, int percent);

  const Clock::time_point started_ = Clock::now();
  std::array<PerOp, kOps> ops_;
  std::atomic<std::uint64_t> bytes_served_{0};
  std::atomic<std::uint64_t> bytes_read_{0};
  std::atomic<std::uint64_t> bytes_verified_{0};
  std::atomic<std::uint64_t> passthrough_bytes_{0};
  std::atomic<std::uint64_t> staging_read_{0};
  std::atomic<std::uint64_t> staging_written_{0};
  std::atomic<std::uint64_t> interrupted_{0};
  std::atomic<std::uint64_t> errors_{0};
  std::atomic<std::int64_t> open_handles_{0};
  mutable std::mutex mutex_;
  // Of errors, guarded by mutex_.
  std::deque<std::string> lines_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_STATS_H_
