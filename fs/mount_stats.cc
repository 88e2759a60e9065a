// SPDX-License-Identifier: Apache-2.0
// Counters of a mount, and their text form. Latency histograms have four classes for each power of
// two.
#include "fs/mount_stats.h"

#include <algorithm>
#include <bit>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/log.h"

namespace tensormount::fs {
namespace {

constexpr std::size_t kKeptErrors = 256;

std::string StatsLine(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

namespace {

// Name and tier of each Op, in the order of Op.
constexpr std::array<std::pair<std::string_view, Tier>, kOps> kFacts = {{
    {"lookup", Tier::kDaemon}, {"getattr", Tier::kDaemon},   {"readdir", Tier::kDaemon},
    {"open", Tier::kDaemon},   {"read", Tier::kDaemon},      {"readlink", Tier::kDaemon},
    {"xattr", Tier::kDaemon},  {"statfs", Tier::kDaemon},    {"refused", Tier::kDaemon},
    {"other", Tier::kDaemon},  {"open", Tier::kPassthrough}, {"open", Tier::kStaging},
    {"read", Tier::kStaging},  {"create", Tier::kStaging},   {"write", Tier::kStaging},
    {"flush", Tier::kStaging}, {"fsync", Tier::kStaging},    {"setattr", Tier::kStaging},
    {"mkdir", Tier::kStaging}, {"remove", Tier::kStaging},   {"rename", Tier::kStaging},
}};
static_assert(static_cast<std::size_t>(Op::kRename) + 1 == kOps);

double Microseconds(std::uint64_t ns) { return static_cast<double>(ns / 100) / 10; }

}  // namespace

std::string_view TierName(Tier tier) {
  static constexpr std::array<std::string_view, kTiers> kNames = {"daemon", "passthrough",
                                                                  "staging"};
  return kNames[static_cast<std::size_t>(tier)];
}

std::string_view OpName(Op op) { return kFacts[static_cast<std::size_t>(op)].first; }

Tier OpTier(Op op) { return kFacts[static_cast<std::size_t>(op)].second; }

// Values 0 to 3 have a class each. Above, each power of two has four classes, chosen by the two
// bits after the highest one: 5 ns is 101b, so octave 1 and quarter 1.
std::size_t MountStats::ClassOf(std::uint64_t ns) {
  const auto width = static_cast<int>(std::bit_width(ns));
  if (width < 3) return static_cast<std::size_t>(ns);
  const auto octave = static_cast<std::size_t>(width - 2);
  const auto quarter = static_cast<std::size_t>((ns >> (width - 3)) & 3);
  return std::min(4 * octave + quarter, kClasses - 1);
}

std::uint64_t MountStats::UpperBound(std::size_t latency_class) {
  if (latency_class < 4) return latency_class;
  return ((std::uint64_t{latency_class} % 4 + 5) << (latency_class / 4 - 1)) - 1;
}

// Lock-free: relaxed additions, and a compare-exchange for the maximum that rarely repeats.
void MountStats::Count(Op op, std::chrono::nanoseconds took, bool failed) {
  PerOp& counters = ops_[static_cast<std::size_t>(op)];
  counters.requests.fetch_add(1, std::memory_order_relaxed);
  if (failed) counters.failed.fetch_add(1, std::memory_order_relaxed);
  const auto ns = static_cast<std::uint64_t>(std::max<std::int64_t>(took.count(), 0));
  counters.latency[ClassOf(ns)].fetch_add(1, std::memory_order_relaxed);
  counters.total_ns.fetch_add(ns, std::memory_order_relaxed);
  std::uint64_t slowest = counters.slowest_ns.load(std::memory_order_relaxed);
  while (ns > slowest && !counters.slowest_ns.compare_exchange_weak(slowest, ns)) {
  }
}

void MountStats::CountBytes(std::uint64_t served, const ReadStats& read) {
  bytes_served_.fetch_add(served, std::memory_order_relaxed);
  bytes_read_.fetch_add(read.bytes_read, std::memory_order_relaxed);
  bytes_verified_.fetch_add(read.bytes_by_leaf, std::memory_order_relaxed);
}

void MountStats::Report(std::string_view operation, std::string_view object, const Status& status) {
  errors_.fetch_add(1, std::memory_order_relaxed);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::string line = StatsLine(nlohmann::ordered_json{
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
  const std::uint64_t slowest = op.slowest_ns.load(std::memory_order_relaxed);
  const std::uint64_t wanted = (total * static_cast<std::uint64_t>(percent) + 99) / 100;
  std::uint64_t seen = 0;
  for (std::size_t i = 0; i < kClasses; ++i) {
    seen += op.latency[i].load(std::memory_order_relaxed);
    if (seen >= wanted) return std::min(UpperBound(i), slowest);
  }
  return slowest;
}

std::string MountStats::StatsJson() const {
  nlohmann::ordered_json tiers = nlohmann::ordered_json::object();
  for (std::size_t t = 0; t < kTiers; ++t) {
    nlohmann::ordered_json ops = nlohmann::ordered_json::object();
    for (std::size_t i = 0; i < kOps; ++i) {
      const PerOp& op = ops_[i];
      const std::uint64_t requests = op.requests.load(std::memory_order_relaxed);
      if (requests == 0 || kFacts[i].second != static_cast<Tier>(t)) continue;
      ops[std::string(kFacts[i].first)] = {
          {"requests", requests},
          {"failed", op.failed.load(std::memory_order_relaxed)},
          {"p50_us", Microseconds(Percentile(op, 50))},
          {"p90_us", Microseconds(Percentile(op, 90))},
          {"p99_us", Microseconds(Percentile(op, 99))},
          {"max_us", Microseconds(op.slowest_ns.load(std::memory_order_relaxed))}};
    }
    if (!ops.empty()) tiers[std::string(TierName(static_cast<Tier>(t)))] = std::move(ops);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - started_).count();
  return StatsLine(nlohmann::ordered_json{
      {"uptime_seconds", static_cast<std::int64_t>(seconds)},
      {"bytes",
       {{"daemon", bytes_served_.load(std::memory_order_relaxed)},
        {"passthrough", passthrough_bytes_.load(std::memory_order_relaxed)},
        {"staging_read", staging_read_.load(std::memory_order_relaxed)},
        {"staging_written", staging_written_.load(std::memory_order_relaxed)}}},
      {"bytes_read_from_storage", bytes_read_.load(std::memory_order_relaxed)},
      {"bytes_verified", bytes_verified_.load(std::memory_order_relaxed)},
      {"interrupted", interrupted_.load(std::memory_order_relaxed)},
      {"errors", errors()},
      {"operations", std::move(tiers)}});
}

void MountStats::AddMetrics(MetricsText& text) const {
  using Type = MetricsText::Type;
  const auto load = [](const auto& counter) { return counter.load(std::memory_order_relaxed); };
  text.One("uptime_seconds", Type::kGauge, "Seconds since the mount was started",
           std::chrono::duration<double>(Clock::now() - started_).count());
  text.One("errors_total", Type::kCounter, "Failures reported in .tensormount/errors", errors());
  text.One("interrupted_total", Type::kCounter,
           "Requests whose programs were killed while they waited for storage", load(interrupted_));
  text.Family("sent_bytes_total", Type::kCounter, "Bytes that programs read through the daemon");
  text.Sample({{"tier", "daemon"}}, load(bytes_served_));
  text.Sample({{"tier", "staging"}}, load(staging_read_));
  text.One("staging_written_bytes_total", Type::kCounter, "Bytes that programs wrote",
           load(staging_written_));
  text.One("passthrough_opened_bytes_total", Type::kCounter,
           "Sizes of the files opened with kernel passthrough", load(passthrough_bytes_));
  text.One("storage_read_bytes_total", Type::kCounter, "Bytes of data files that the daemon read",
           load(bytes_read_));
  text.One("verified_bytes_total", Type::kCounter,
           "Bytes that the daemon compared with their hashes", load(bytes_verified_));
  text.One("open_files", Type::kGauge, "Files of the mount that programs have open",
           load(open_handles_));
  const auto tier = [](std::size_t op) { return TierName(kFacts[op].second); };
  text.Family("request_failures_total", Type::kCounter, "Requests that failed");
  for (std::size_t i = 0; i < kOps; ++i) {
    if (load(ops_[i].requests) == 0) continue;
    text.Sample({{"tier", tier(i)}, {"operation", kFacts[i].first}}, load(ops_[i].failed));
  }
  text.Family("request_seconds", Type::kHistogram,
              "Time from the arrival of a request to its answer");
  for (std::size_t i = 0; i < kOps; ++i) {
    const PerOp& op = ops_[i];
    if (load(op.requests) == 0) continue;
    // Reads each class once. Otherwise requests that are counted meanwhile could make a bucket
    // larger than the next one, although buckets are cumulative.
    std::uint64_t below = 0;
    std::size_t next = 0;
    for (std::uint64_t bound = 1024; bound <= (std::uint64_t{1} << 36); bound *= 4) {
      // Bounds are powers of two, at which classes end, so no class lies in two buckets.
      for (; next < kClasses && UpperBound(next) < bound; ++next) below += load(op.latency[next]);
      const std::string le = MetricsText::Number(static_cast<double>(bound) / 1e9);
      text.Part("_bucket", {{"tier", tier(i)}, {"operation", kFacts[i].first}, {"le", le}},
                std::to_string(below));
    }
    for (; next < kClasses; ++next) below += load(op.latency[next]);
    text.Part("_bucket", {{"tier", tier(i)}, {"operation", kFacts[i].first}, {"le", "+Inf"}},
              std::to_string(below));
    text.Part("_sum", {{"tier", tier(i)}, {"operation", kFacts[i].first}},
              MetricsText::Number(static_cast<double>(load(op.total_ns)) / 1e9));
    text.Part("_count", {{"tier", tier(i)}, {"operation", kFacts[i].first}}, std::to_string(below));
  }
}

std::string MountStats::ErrorsJson() const {
  const std::lock_guard lock(mutex_);
  std::string all;
  for (const std::string& line : lines_) all += line;
  return all;
}

}  // namespace tensormount::fs
