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

// Which part of a mount serves a request. kDaemon: the daemon, for published checkpoints and the
// mount's own files. kPassthrough: the kernel, which reads the backing file itself after the daemon
// has opened it. kStaging: the daemon, for files below .staging/.
enum class Tier : std::uint8_t { kDaemon, kPassthrough, kStaging };
inline constexpr std::size_t kTiers = 3;
std::string_view TierName(Tier tier);

// Kinds of requests, separate for each tier.
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
  kOpenPassthrough,  // An open that let the kernel read the file itself.
  kOpenStaged,       // This and all following kinds belong to Tier::kStaging.
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
// Name of a request. Requests of different tiers may have one name: kRead and kReadStaged are
// "read".
std::string_view OpName(Op op);
Tier OpTier(Op op);

// Counts the requests of a mount, and keeps the failures that an operator should know of.
// Thread-safe.
// Counting is on the path of every request: a few relaxed atomic additions without a lock, so a
// concurrent report may be off by requests in progress. Only Report and ErrorsJson take the lock.
class MountStats {
 public:
  using Clock = std::chrono::steady_clock;

  // Counts one request that was answered after `took`.
  void Count(Op op, std::chrono::nanoseconds took, bool failed);
  // Counts `served` bytes of published checkpoints that the daemon sent, and the bytes that it read
  // and verified for them.
  void CountBytes(std::uint64_t served, const ReadStats& read);
  // Counts the size of a file that was opened for passthrough; reads by the kernel cannot be
  // counted.
  void CountPassthrough(std::uint64_t file_bytes) {
    passthrough_bytes_.fetch_add(file_bytes, std::memory_order_relaxed);
  }
  // Counts bytes of stagings that programs read and wrote.
  void CountStaged(std::uint64_t read, std::uint64_t written) {
    staging_read_.fetch_add(read, std::memory_order_relaxed);
    staging_written_.fetch_add(written, std::memory_order_relaxed);
  }
  // Appends the failure as one line to .tensormount/errors, which keeps the last 256, and logs it.
  // Repeated failures are not merged: one may fill all 256 lines. errors() counts all failures.
  void Report(std::string_view operation, std::string_view object, const Status& status);
  void CountInterrupted() { interrupted_.fetch_add(1, std::memory_order_relaxed); }

  // .tensormount/stats: one line of JSON (docs/operations.md). Percentiles are taken from a
  // histogram, so they are up to a quarter too large.
  std::string StatsJson() const;
  // .tensormount/errors: one JSON line for each failure, oldest first.
  std::string ErrorsJson() const;
  // Adds the families of .tensormount/metrics. The bounds of histogram buckets rise by a factor of
  // 4, from a microsecond to about a minute.
  void AddMetrics(MetricsText& text) const;
  std::uint64_t errors() const { return errors_.load(std::memory_order_relaxed); }

  // Counts one open file of a program while it lives. Must not outlive the MountStats.
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
  // Number of classes in a latency histogram: four for each power of two of nanoseconds.
  static constexpr std::size_t kClasses = 156;
  // Counters of one kind of request. `latency` counts requests by class; the classes cover
  // nanoseconds to minutes with an error of at most a quarter.
  struct PerOp {
    std::atomic<std::uint64_t> requests{0};
    std::atomic<std::uint64_t> failed{0};
    std::atomic<std::uint64_t> slowest_ns{0};
    std::atomic<std::uint64_t> total_ns{0};
    std::array<std::atomic<std::uint64_t>, kClasses> latency{};
  };
  static std::size_t ClassOf(std::uint64_t ns);
  static std::uint64_t UpperBound(std::size_t latency_class);
  // Upper bound of the histogram class that contains the given percentile of the requests.
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
  // Lines of .tensormount/errors, guarded by mutex_.
  std::deque<std::string> lines_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_STATS_H_
