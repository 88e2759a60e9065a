// SPDX-License-Identifier: Apache-2.0
// `tensormount stats` (commands.h): the counters of a mount, from its file MNT/.tensormount/stats
// in JSON. --json prints all fields; text shows the most useful ones. Missing fields (of another
// version) count as 0. With --full: statistics of tensors (index/read/statistics.h).
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <optional>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "fs/mount/mount_session.h"
#include "index/read/report_json.h"
#include "index/read/statistics.h"
#include "index/store/kept_statistics.h"
#include "mount-tools/commands.h"
#include "mount-tools/sort_column.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// Milliseconds to wait for an answer of the mount, whose daemon may be stopped.
constexpr int kPatienceMs = 5000;
// Limit for the answer. A mount of another program may have an endless file there.
constexpr std::size_t kMaxBytes = 64u << 20;

// Reads a control file in a child process, which is killed if the mount does not answer. A thread
// would not suffice, because read(2) on a mount whose daemon is stopped ends only when the process
// is killed.
Result<std::string> ReadControl(const std::string& path) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return Status::FromErrno(errno, "make", "a pipe");
  // The fork is safe, because this command has no other threads and the child only makes system
  // calls.
  const pid_t child = fork();
  if (child < 0) {
    const Status status = Status::FromErrno(errno, "start", "a helper process");
    close(ends[0]);
    close(ends[1]);
    return status;
  }
  if (child == 0) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) _exit(errno);
    char block[4096];
    for (;;) {
      const ssize_t n = read(fd, block, sizeof block);
      if (n < 0) _exit(errno);
      if (n == 0) _exit(0);
      if (write(ends[1], block, static_cast<std::size_t>(n)) != n) _exit(EIO);
    }
  }
  close(ends[1]);
  std::string text;
  const auto deadline = Clock::now() + std::chrono::milliseconds(kPatienceMs);
  bool late = false;
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd wait{.fd = ends[0], .events = POLLIN, .revents = 0};
    const int ready = left > 0 ? poll(&wait, 1, static_cast<int>(left)) : 0;
    if (ready < 0 && errno == EINTR) continue;
    late = ready <= 0;
    if (late || text.size() > kMaxBytes) {
      kill(child, SIGKILL);
      break;
    }
    char block[4096];
    const ssize_t n = read(ends[0], block, sizeof block);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    text.append(block, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  int ended = 0;
  while (waitpid(child, &ended, 0) < 0 && errno == EINTR) {
  }
  if (late) {
    return Status(Code::kDeadlineExceeded,
                  fmt::format("read {}: no answer within {} s", path, kPatienceMs / 1000));
  }
  if (text.size() > kMaxBytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("read {}: the answer has more than {} MiB, so it is not from a mount "
                              "of tensormount",
                              path, kMaxBytes >> 20));
  }
  if (!WIFEXITED(ended))
    return Status(Code::kInternal, "read " + path + ": the helper process was killed");
  if (WEXITSTATUS(ended) != 0) return Status::FromErrno(WEXITSTATUS(ended), "read", path);
  return text;
}

Result<Json> ReadMountStats(const std::string& mount_point) {
  // Without this check a directory that is not a mount point would give the error "no such file".
  if (!fs::IsMountPoint(mount_point)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: nothing is mounted here (for statistics of the tensors of a "
                              "checkpoint, add --full)",
                              mount_point));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text,
                               ReadControl(mount_point + "/.tensormount/stats"));
  Json stats = Json::parse(text, nullptr, false);
  if (!stats.is_object()) {
    return Status(Code::kInvalidArgument, mount_point + ": not a mount of tensormount");
  }
  return stats;
}

std::uint64_t NumberIn(const Json& stats, std::string_view name) {
  const auto it = stats.find(name);
  return it != stats.end() && it->is_number() ? it->get<std::uint64_t>() : 0;
}

// The field `name` of `op`, a time in microseconds, as text in a suitable unit.
std::string Micros(const Json& op, std::string_view name) {
  const auto it = op.find(name);
  const double us = it != op.end() && it->is_number() ? it->get<double>() : 0;
  if (us >= 1e6) return fmt::format("{:.2f} s", us / 1e6);
  if (us >= 1e3) return fmt::format("{:.1f} ms", us / 1e3);
  return fmt::format("{:.1f} us", us);
}

// Prints bytes and requests per second since `before`, and the total number of errors. A counter
// that has decreased means that the mount was made again; its rate is shown as 0.
void PrintRates(const Json& stats, const Json& before, double seconds, Terminal& terminal) {
  std::string line;
  for (const auto& [name, value] : stats["bytes"].items()) {
    if (!value.is_number()) continue;
    const std::uint64_t now = value.get<std::uint64_t>();
    const std::uint64_t then = NumberIn(before["bytes"], name);
    const double rate = static_cast<double>(now - std::min(then, now)) / seconds;
    line += fmt::format("{}{} {}/s", line.empty() ? "" : ", ", name,
                        HumanBytes(static_cast<std::uint64_t>(rate)));
  }
  std::uint64_t requests = 0;
  std::uint64_t old_requests = 0;
  for (const auto& [tier, ops] : stats["operations"].items()) {
    for (const auto& [name, op] : ops.items()) {
      requests += NumberIn(op, "requests");
      const Json& old_ops = before["operations"];
      if (old_ops.contains(tier) && old_ops[tier].contains(name)) {
        old_requests += NumberIn(old_ops[tier][name], "requests");
      }
    }
  }
  const double rate = static_cast<double>(requests - std::min(old_requests, requests)) / seconds;
  terminal.Line(
      fmt::format("{}, {:.0f} requests/s, {} errors", line, rate, NumberIn(stats, "errors")));
}

void PrintStats(const Json& stats, Terminal& terminal) {
  terminal.Line(fmt::format("mounted for {} s, {} errors, {} requests of killed programs",
                            NumberIn(stats, "uptime_seconds"), NumberIn(stats, "errors"),
                            NumberIn(stats, "interrupted")));
  const Json& bytes = stats["bytes"];
  terminal.Line(fmt::format(
      "bytes: {} served by the daemon, {} in files handed to the kernel, {} read from and {} "
      "written to staging directories",
      HumanBytes(NumberIn(bytes, "daemon")), HumanBytes(NumberIn(bytes, "passthrough")),
      HumanBytes(NumberIn(bytes, "staging_read")), HumanBytes(NumberIn(bytes, "staging_written"))));
  terminal.Line(fmt::format("storage: {} read, {} of them verified",
                            HumanBytes(NumberIn(stats, "bytes_read_from_storage")),
                            HumanBytes(NumberIn(stats, "bytes_verified"))));
  terminal.Line(fmt::format("{:<12} {:<10} {:>10} {:>8} {:>10} {:>10} {:>10} {:>10}", "tier",
                            "operation", "requests", "failed", "p50", "p90", "p99", "max"));
  for (const auto& [tier, ops] : stats["operations"].items()) {
    for (const auto& [name, op] : ops.items()) {
      terminal.Line(fmt::format("{:<12} {:<10} {:>10} {:>8} {:>10} {:>10} {:>10} {:>10}", tier,
                                name, NumberIn(op, "requests"), NumberIn(op, "failed"),
                                Micros(op, "p50_us"), Micros(op, "p90_us"), Micros(op, "p99_us"),
                                Micros(op, "max_us")));
    }
  }
}

// The columns of --full that rows can be sorted by.
constexpr SortColumn<TensorStatistics> kStatisticsColumns[] = {
    {"count", [](const TensorStatistics& t) { return static_cast<double>(t.count); }},
    {"zeros", [](const TensorStatistics& t) { return static_cast<double>(t.zeros); }},
    {"subnormals", [](const TensorStatistics& t) { return static_cast<double>(t.subnormals); }},
    {"nan", [](const TensorStatistics& t) { return static_cast<double>(t.nan); }},
    {"inf", [](const TensorStatistics& t) { return static_cast<double>(t.posinf + t.neginf); }},
    {"min", [](const TensorStatistics& t) { return t.min; }, Direction::kSmallestFirst},
    {"max", [](const TensorStatistics& t) { return t.max; }},
    {"absmax", [](const TensorStatistics& t) { return t.absmax(); }},
    {"mean", [](const TensorStatistics& t) { return t.mean; }},
    {"norm", [](const TensorStatistics& t) { return t.norm; }},
};

// 61 columns before the name.
constexpr const char* kStatisticsRow = "{:>9} {:>9} {:>9} {:>9} {:>9} {:>9}  ";

// An integer in full if it fits its column.
std::string ExtremeText(double value, Int128 integer, bool integers) {
  const std::string text = integers ? DecimalText(integer) : std::string();
  return integers && text.size() <= 9 ? text : fmt::format("{:.3g}", value);
}

struct StatisticsLine {
  TensorEntry tensor;
  TensorStatistics statistics;
  bool kept = false;
};

void PrintLine(const StatisticsLine& line, Terminal& terminal) {
  const TensorStatistics& s = line.statistics;
  if (terminal.json) return terminal.Json(StatisticsJson(line.tensor, s, line.kept));
  const bool integers = IsIntegerDType(line.tensor.meta.dtype());
  const bool any = s.finite() > 0;
  const std::string row = fmt::format(kStatisticsRow, s.count - s.finite(), s.zeros,
                                      any ? ExtremeText(s.min, s.integer_min, integers) : "-",
                                      any ? ExtremeText(s.max, s.integer_max, integers) : "-",
                                      any ? fmt::format("{:.3g}", s.mean) : "-",
                                      any ? fmt::format("{:.3g}", s.norm) : "-");
  terminal.Line(row + terminal.LastName(line.tensor.meta.key(), row.size()));
}

void PrintMeasured(const StatisticsSummary& s, Terminal& terminal) {
  if (terminal.json) {
    nlohmann::ordered_json json = {{"event", "measured"}};
    json.update(MeasuredJson(s));
    return terminal.Json(json);
  }
  if (terminal.quiet) return;
  std::string text =
      fmt::format("{}, {}: {} NaN, {} infinite, norm {:.6g}", Counted(s.tensors, "tensor"),
                  Counted(s.values, "value"), s.nan, s.infinite, s.squares.Root());
  if (s.known > 0) text += fmt::format("; {} kept from an earlier call", s.known);
  if (s.bytes_read > 0) text += fmt::format("; {} read", HumanBytes(s.bytes_read));
  terminal.Line(text);
}

// What earlier calls kept. A damaged file is reported and replaced.
KeptStatistics ReadKept(const OpenedCheckpoint& checkpoint, Terminal& terminal) {
  Result<KeptStatistics> kept = KeptStatistics::Read(checkpoint);
  if (kept.ok()) return std::move(kept.value());
  if (kept.status().code() != Code::kNotFound) {
    terminal.Warn(kept.status().message() + "; the statistics are computed again");
  }
  const CommitRecord& commit = checkpoint.commit()->record;
  return KeptStatistics(commit.uuid, commit.content_root);
}

int RunFullStats(const StatsArgs& args, Terminal& terminal) {
  const auto sort = FindSortColumn<TensorStatistics>(kStatisticsColumns, args.sort);
  if (!sort.ok()) return terminal.Fail(sort.status());
  const auto opened = OpenSource(args.source, terminal);
  if (!opened.ok()) return terminal.Fail(opened.status());
  const OpenedCheckpoint& checkpoint = *opened.value();
  const Status can_keep =
      args.no_keep ? Status(Code::kCancelled, "--no-keep") : KeptStatistics::CanKeep(checkpoint);
  std::optional<KeptStatistics> kept;
  if (can_keep.ok()) kept = ReadKept(checkpoint, terminal);
  if (!terminal.json && !terminal.quiet) {
    terminal.Line(fmt::format(kStatisticsRow, "NONFINITE", "ZEROS", "MIN", "MAX", "MEAN", "NORM") +
                  "NAME");
  }
  std::vector<StatisticsLine> lines;
  bool any_new = false;
  const Result<StatisticsSummary> summary = [&] {
    Progress progress(terminal, "stats");
    StatisticsOptions options;
    options.keys = args.keys;
    options.watch = [&](std::uint64_t done, std::uint64_t total) {
      progress.Set(done, total);
      return Status();
    };
    if (kept) options.known = [&](const TensorEntry& tensor) { return kept->Find(tensor); };
    return MeasureTensors(
        checkpoint, options,
        [&](const TensorEntry& tensor, const TensorStatistics& statistics, bool is_known) {
          StatisticsLine line{tensor, statistics, is_known};
          if (kept && !is_known) kept->Put(tensor, statistics);
          any_new |= !is_known && tensor.has_digest;
          if (sort.value() == nullptr) {
            PrintLine(line, terminal);
          } else {
            lines.push_back(std::move(line));
          }
          return Status();
        });
  }();
  // After a failure, too: the next call then goes on from here.
  if (kept && any_new) {
    const Status written = kept->Write(checkpoint);
    const std::string text = "the statistics are not kept: " + written.ToString();
    // Usual for readers of a store of somebody else.
    const bool refused =
        written.code() == Code::kPermissionDenied || written.code() == Code::kReadOnly;
    if (!written.ok()) refused ? terminal.Note(text) : terminal.Warn(text);
  }
  if (!summary.ok()) return terminal.Fail(summary.status());
  if (!args.keys.empty() && summary.value().tensors == 0) {
    return terminal.Fail(
        Status(Code::kNotFound, fmt::format("--keys '{}': no key matches it", args.keys)));
  }
  SortRows(lines, sort.value(),
           [](const StatisticsLine& l) -> const TensorStatistics& { return l.statistics; });
  for (const StatisticsLine& line : lines) PrintLine(line, terminal);
  PrintMeasured(summary.value(), terminal);
  if (!can_keep.ok()) terminal.Note("the statistics are not kept: " + can_keep.message());
  const int flushed = terminal.Flush();
  if (flushed != kDone) return flushed;
  const Status whole = CheckSourceComplete(checkpoint, args.keys);
  return whole.ok() ? kDone : terminal.Fail(whole);
}

}  // namespace

int RunStats(const StatsArgs& args, Terminal& terminal) {
  if (args.full) return RunFullStats(args, terminal);
  std::optional<Json> before;
  Clock::time_point last;
  for (int round = 0;; ++round) {
    auto stats = ReadMountStats(args.source);
    if (!stats.ok()) {
      const bool dead = stats.status().ToErrno() == ENOTCONN;
      return terminal.Fail(stats.status(),
                           dead ? "the daemon of this mount is gone; mount again to clean up" : "");
    }
    Json& now = stats.value();
    if (!now.contains("bytes")) now["bytes"] = Json::object();
    if (!now.contains("operations")) now["operations"] = Json::object();
    const Clock::time_point at = Clock::now();
    if (terminal.json) {
      terminal.Json(now);
    } else if (before) {
      PrintRates(now, *before, std::chrono::duration<double>(at - last).count(), terminal);
    } else {
      PrintStats(now, terminal);
    }
    const int failed = terminal.Flush();
    if (failed != kDone || args.watch_seconds <= 0) return failed;
    if (args.rounds > 0 && round + 1 >= args.rounds) return kDone;
    before = std::move(now);
    last = at;
    // If a signal interrupts nanosleep, the loop sleeps for the remaining time.
    const auto nap = static_cast<std::int64_t>(args.watch_seconds * 1e9);
    timespec left{.tv_sec = nap / 1'000'000'000, .tv_nsec = nap % 1'000'000'000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
  }
}

}  // namespace tensormount::tools
