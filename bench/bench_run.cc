// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <new>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/file_system.h"
#include "bench/ckptbench.h"
#include "bench/forked_group.h"
#include "collective/comm/collective.h"

namespace tensormount::bench {
namespace {

constexpr std::uint64_t kStep = 1u << 20;

double Quantile(std::vector<double> sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  const double part = at - static_cast<double>(low);
  return sorted[low] * (1 - part) + sorted[high] * part;
}

struct Summary {
  double p50;
  double p99;
  double best;
};
Summary Summarize(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {Quantile(seconds, 0.5), Quantile(seconds, 0.99), seconds.front()};
}

// Of this process and of ranks that it forked: what a busy machine does not change much.
double CpuSeconds() {
  double seconds = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage use;
    if (getrusage(who, &use) != 0) continue;
    for (const timeval& t : {use.ru_utime, use.ru_stime}) {
      seconds += static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
    }
  }
  return seconds;
}

double Rounded(double v) {
  const double scale = std::pow(10, 4 - std::ceil(std::log10(std::max(std::fabs(v), 1e-9))));
  return std::round(v * scale) / scale;
}

}  // namespace

Status RunCase(const Options& options, const Case& c) {
  if ((c.workload + " " + c.name).find(options.only) == std::string::npos) return {};
  std::vector<double> ours;
  std::vector<double> floor;
  std::vector<double> ours_cpu;
  std::vector<double> floor_cpu;
  for (int round = -1; round < options.rounds; ++round) {
    for (int turn = 0; turn < 2; ++turn) {
      const bool is_ours = (turn + round) % 2 != 0;
      if (c.before) TENSORMOUNT_RETURN_IF_ERROR(c.before());
      const double cpu = CpuSeconds();
      TENSORMOUNT_ASSIGN_OR_RETURN(const double seconds, is_ours ? c.ours() : c.floor());
      if (round < 0) continue;
      (is_ours ? ours : floor).push_back(seconds);
      (is_ours ? ours_cpu : floor_cpu).push_back(CpuSeconds() - cpu);
    }
  }
  const Summary a = Summarize(ours);
  const Summary b = Summarize(floor);
  const bool rate = c.bytes != 0;
  const auto value = [&](double seconds) {
    return Rounded(rate ? static_cast<double>(c.bytes) / seconds / 1e9 : seconds * 1e3);
  };
  nlohmann::ordered_json line;
  line["workload"] = c.workload;
  line["case"] = c.name;
  line["unit"] = rate ? "GB/s" : "ms";
  line["figure"] = value(a.p50);
  line["floor"] = value(b.p50);
  // What share of the floor's speed is reached: 1 is the floor, more is better than it.
  line["of_floor"] = Rounded(b.p50 / a.p50);
  line["figure_p99"] = value(a.p99);
  line["floor_p99"] = value(b.p99);
  line["figure_best"] = value(a.best);
  line["floor_best"] = value(b.best);
  line["figure_cpu_seconds"] = Rounded(Summarize(ours_cpu).p50);
  line["floor_cpu_seconds"] = Rounded(Summarize(floor_cpu).p50);
  line["floor_is"] = c.floor_name;
  line["rounds"] = options.rounds;
  line["bytes"] = c.bytes;
  line["ranks"] = options.ranks;
  line["cache"] = options.cold ? "cold" : "warm";
  line["cores"] = std::thread::hardware_concurrency();
  if (c.facts) {
    for (const auto& [name, fact] : c.facts()) line[name] = Rounded(fact);
  }
  if (options.json) {
    std::printf("%s\n", line.dump().c_str());
  } else {
    std::printf(
        "%-10s %-34s %9.4g %-5s floor %9.4g  %5.2f of it  (p99 %.4g / %.4g, CPU s "
        "%.3g / %.3g)\n",
        c.workload.c_str(), c.name.c_str(), value(a.p50), rate ? "GB/s" : "ms", value(b.p50),
        b.p50 / a.p50, value(a.p99), value(b.p99), Summarize(ours_cpu).p50,
        Summarize(floor_cpu).p50);
  }
  std::fflush(stdout);
  return {};
}

PageBuffer::PageBuffer(std::size_t size) : data_(nullptr), size_(size) {
  if (size == 0) return;
  void* p =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(p);
}
PageBuffer::~PageBuffer() {
  if (data_ != nullptr) munmap(data_, size_);
}

Result<double> TimeThreads(int n, const std::function<Status(int)>& fn) {
  std::vector<Status> verdicts(static_cast<std::size_t>(n));
  const auto start = Clock::now();
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < n; ++i) {
      threads.emplace_back([&, i] { verdicts[static_cast<std::size_t>(i)] = fn(i); });
    }
  }
  const std::chrono::duration<double> took = Clock::now() - start;
  for (const Status& verdict : verdicts) TENSORMOUNT_RETURN_IF_ERROR(verdict);
  return took.count();
}

void PageBuffer::Touch() const {
  for (std::size_t at = 0; at < size_; at += 4096) {
    auto* p = reinterpret_cast<volatile std::byte*>(data_ + at);
    *p = *p;
  }
}

Result<double> TimeRanks(const Options& options, const std::function<void(int)>& prepare,
                         const std::function<Status(Communicator&)>& body) {
  // The clock is the machine's, so that ranks in other processes may read it too.
  PageBuffer shared(4096);
  auto* const times = reinterpret_cast<double*>(shared.data());
  const auto now = [] {
    return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  };
  const auto rank_body = [&](Communicator& comm) -> Status {
    if (prepare) prepare(comm.rank());
    {
      Collective start(comm, {});
      TENSORMOUNT_RETURN_IF_ERROR(start.Agree({}, "ckptbench: start"));
    }
    times[2 * comm.rank()] = now();
    const Status status = body(comm);
    times[2 * comm.rank() + 1] = now();
    return status;
  };
  if (options.sockets) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<ForkedGroup> group,
                                 ForkedGroup::Start(options.ranks, [&](Communicator& comm) {
                                   const Status status = rank_body(comm);
                                   if (status.ok()) return 0;
                                   std::fprintf(stderr, "rank %d: %s\n", comm.rank(),
                                                status.ToString().c_str());
                                   return 1;
                                 }));
    for (const ForkedGroup::Exit& e : group->Wait(std::chrono::minutes(10))) {
      if (!e.exited || e.code != 0) return Status(Code::kInternal, "a forked rank failed");
    }
  } else {
    TENSORMOUNT_RETURN_IF_ERROR(RunOnThreads(options.ranks, rank_body));
  }
  double first = times[0];
  double last = times[1];
  for (int r = 1; r < options.ranks; ++r) {
    first = std::max(first, times[2 * r]);
    last = std::max(last, times[2 * r + 1]);
  }
  return last - first;
}

Status RawRead(int fd, std::uint64_t offset, void* out, std::uint64_t size) {
  auto* to = static_cast<std::byte*>(out);
  for (std::uint64_t done = 0; done < size;) {
    const ssize_t n =
        pread(fd, to + done, std::min(kStep, size - done), static_cast<off_t>(offset + done));
    if (n <= 0) return Status::FromErrno(n == 0 ? EIO : errno, "pread", "the floor's file");
    done += static_cast<std::uint64_t>(n);
  }
  return {};
}

Status RawWrite(int fd, std::uint64_t offset, const void* data, std::uint64_t size) {
  const auto* from = static_cast<const std::byte*>(data);
  for (std::uint64_t done = 0; done < size;) {
    const ssize_t n =
        pwrite(fd, from + done, std::min(kStep, size - done), static_cast<off_t>(offset + done));
    if (n <= 0) return Status::FromErrno(errno, "pwrite", "the floor's file");
    done += static_cast<std::uint64_t>(n);
  }
  return {};
}

OwnedFd::OwnedFd(const std::string& path, int flags)
    : fd_(open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
OwnedFd::~OwnedFd() {
  if (fd_ >= 0) close(fd_);
}

std::vector<std::pair<std::string, std::uint64_t>> FilesBelow(const std::string& folder) {
  std::vector<std::pair<std::string, std::uint64_t>> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder, error)) {
    if (entry.is_regular_file()) files.emplace_back(entry.path().string(), entry.file_size());
  }
  std::sort(files.begin(), files.end());
  return files;
}

Status DropCaches(const std::string& folder) {
  for (const auto& [name, size] : FilesBelow(folder)) {
    const OwnedFd fd(name, O_RDONLY);
    if (fd.get() < 0) return Status::FromErrno(errno, "open", name);
    if (fsync(fd.get()) != 0) return Status::FromErrno(errno, "fsync", name);
    if (const int err = posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED); err != 0) {
      return Status::FromErrno(err, "drop cached pages of", name);
    }
  }
  return {};
}

Result<std::unique_ptr<WorkFolder>> WorkFolder::Make(const Options& options) {
  std::string path = options.dir + "/ckptbench-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) return Status::FromErrno(errno, "make a folder in", path);
  return std::unique_ptr<WorkFolder>(new WorkFolder(path));
}
WorkFolder::~WorkFolder() { (void)HostFileSystem().RemoveTree(path_); }  // Best effort at the end.

}  // namespace tensormount::bench
