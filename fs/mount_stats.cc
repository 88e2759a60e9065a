// SPDX-License-Identifier: Apache-2.0
#include "fs/mount_stats.h"

#include <bit>

#include <nlohmann/json.hpp>

#include "base/log.h"

namespace tensormount::fs {
namespace {

constexpr std::size_t kKeptErrors = 256;

std::string Dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

std::string_view OpName(Op op) {
  static constexpr std::array<std::string_view, kOps> kNames = {
      "lookup",   "getattr", "readdir", "open",    "read",
      "readlink", "xattr",   "statfs",  "refused", "other"};
  return kNames[static_cast<std::size_t>(op)];
}

void MountStats::Count(Op op, std::chrono::nanoseconds took, bool failed) {
  PerOp& counters = ops_[static_cast<std::size_t>(op)];
  counters.requests.fetch_add(1, std::memory_order_relaxed);
  if (failed) counters.failed.fetch_add(1, std::memory_order_relaxed);
  const auto us = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(took).count());
  const std::size_t n =
      std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(us)), kClasses - 1);
  counters.latency[n].fetch_add(1, std::memory_order_relaxed);
}

void MountStats::CountBytes(std::uint64_t served, const ReadStats& read) {
  bytes_served_.fetch_add(served, std::memory_order_relaxed);
  bytes_read_.fetch_add(read.bytes_read, std::memory_order_relaxed);
  bytes_verified_.fetch_add(read.bytes_by_leaf, std::memory_order_relaxed);
}

void MountStats::Report(std::string_view operation, std::string_view object, const Status& status) {
  errors_.fetch_add(1, std::memory_order_relaxed);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::string line = Dump(nlohmann::ordered_json{
      {"time", std::chrono::duration_cast<std::chrono::seconds>(now).count()},
      {"operation", operation},
      {"path", object},
      {"code", CodeName(status.code())},
      {"errno", status.ToErrno()},
      {"message", status.message()}});
  {
    const std::lock_guard lock(mutex_);
    lines_.push_back(std::move(line));
    if (lines_.size() > kKeptErrors) lines_.pop_front();
  }
  Log(LogLevel::kError,
      std::string(operation) + " " + std::string(object) + ": " + status.ToString());
}

std::uint64_t MountStats::Percentile(const PerOp& op, int percent) {
  std::uint64_t total = 0;
  for (const auto& n : op.latency) total += n.load(std::memory_order_relaxed);
  if (total == 0) return 0;
  const std::uint64_t wanted = (total * static_cast<std::uint64_t>(percent) + 99) / 100;
  std::uint64_t seen = 0;
  for (std::size_t i = 0; i < kClasses; ++i) {
    seen += op.latency[i].load(std::memory_order_relaxed);
    if (seen >= wanted) return std::uint64_t{1} << i;
  }
  return std::uint64_t{1} << (kClasses - 1);
}

std::string MountStats::StatsJson() const {
  nlohmann::ordered_json ops = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < kOps; ++i) {
    const PerOp& op = ops_[i];
    const std::uint64_t requests = op.requests.load(std::memory_order_relaxed);
    if (requests == 0) continue;
    ops[std::string(OpName(static_cast<Op>(i)))] = {
        {"requests", requests},
        {"failed", op.failed.load(std::memory_order_relaxed)},
        {"p50_us", Percentile(op, 50)},
        {"p99_us", Percentile(op, 99)}};
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - started_).count();
  return Dump(nlohmann::ordered_json{
      {"uptime_seconds", static_cast<std::int64_t>(seconds)},
      {"bytes", {{"daemon", bytes_served_.load(std::memory_order_relaxed)}, {"passthrough", 0}}},
      {"bytes_read_from_storage", bytes_read_.load(std::memory_order_relaxed)},
      {"bytes_verified", bytes_verified_.load(std::memory_order_relaxed)},
      {"interrupted", interrupted_.load(std::memory_order_relaxed)},
      {"errors", errors()},
      {"operations", ops}});
}

std::string MountStats::ErrorsJson() const {
  const std::lock_guard lock(mutex_);
  std::string all;
  for (const std::string& line : lines_) all += line;
  return all;
}

}  // namespace tensormount::fs
