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

#include "tensormount/status.h"

#include "index/checkpoint.h"

namespace tensormount::fs {

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
};
inline constexpr std::size_t kOps = 10;
std::string_view OpName(Op op);

// What a mount counts, and the failures that an operator should know of. Thread-safe.
class MountStats {
 public:
  using Clock = std::chrono::steady_clock;

  // One request that was answered after `took`.
  void Count(Op op, std::chrono::nanoseconds took, bool failed);
  void CountBytes(std::uint64_t served, const ReadStats& read);
  // Keeps the failure as one line of .tensormount/errors (the last 256 are kept), and logs it.
  void Report(std::string_view operation, std::string_view object, const Status& status);
  void CountInterrupted() { interrupted_.fetch_add(1, std::memory_order_relaxed); }

  // .tensormount/stats: one line of JSON. Latencies are upper bounds of power-of-two classes.
  std::string StatsJson() const;
  // .tensormount/errors: one line of JSON a failure, oldest first.
  std::string ErrorsJson() const;
  std::uint64_t errors() const { return errors_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kClasses = 32;  // Of microseconds, by powers of two.
  struct PerOp {
    std::atomic<std::uint64_t> requests{0};
    std::atomic<std::uint64_t> failed{0};
    std::array<std::atomic<std::uint64_t>, kClasses> latency{};
  };
  static std::uint64_t Percentile(const PerOp& op, int percent);

  const Clock::time_point started_ = Clock::now();
  std::array<PerOp, kOps> ops_;
  std::atomic<std::uint64_t> bytes_served_{0};
  std::atomic<std::uint64_t> bytes_read_{0};
  std::atomic<std::uint64_t> bytes_verified_{0};
  std::atomic<std::uint64_t> interrupted_{0};
  std::atomic<std::uint64_t> errors_{0};
  mutable std::mutex mutex_;
  std::deque<std::string> lines_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_STATS_H_
