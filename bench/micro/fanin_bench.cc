// SPDX-License-Identifier: Apache-2.0
// What a step of a collective job costs over TCP on one machine: 64 bytes of every rank to rank 0,
// and 64 bytes of rank 0 to every rank (Collective::Decide), with threads as ranks in a few forked
// processes. One JSON line: medians and the worst of all rounds.
//
//   faninbench [--ranks N] [--processes P] [--rounds R] [--unix | --ipv6]
//
// wall_ms: from one end of a step at rank 0 to the next, the others being there already.
// root_cpu_us_per_rank: what rank 0's thread computes in a step, system calls included, by ranks.
// connect_s: from the first address told to the end of the first step.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <signal.h>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#include "bench/tcp_ranks.h"
#include "collective/comm/collective.h"

namespace tensormount {
namespace {

double ThreadCpuSeconds() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

double SecondsNow() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct FanIn {
  int ranks = 1024;
  int processes = 4;
  int rounds = 21;
  TcpOptions options;
  const char* way = "ipv4";
};

Status RunRank(SharedTcpRanks& shared, int rank, const FanIn& fan) {
  const double begin = SecondsNow();
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto comm, shared.Join(rank, fan.options));
  constexpr std::chrono::minutes kLong{5};
  Collective c(*comm, {kLong, kLong});
  const std::string mine(64, static_cast<char>('a' + rank % 26));
  const auto step = [&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string told,
        c.Decide(mine, "step", [](std::vector<std::string>& parts) -> Result<std::string> {
          for (std::size_t r = 0; r < parts.size(); ++r) {
            if (parts[r] != std::string(64, static_cast<char>('a' + r % 26))) {
              return Status(Code::kInternal, "wrong bytes of rank " + std::to_string(r));
            }
          }
          return std::string(64, 'v');
        }));
    return told == std::string(64, 'v') ? Status() : Status(Code::kInternal, "wrong verdict");
  };
  TENSORMOUNT_RETURN_IF_ERROR(step());
  const double connected = SecondsNow() - begin;
  TENSORMOUNT_RETURN_IF_ERROR(step());
  std::vector<double> wall;
  std::vector<double> cpu;
  for (int i = 0; i < fan.rounds; ++i) {
    const double wall_begin = SecondsNow();
    const double cpu_begin = ThreadCpuSeconds();
    TENSORMOUNT_RETURN_IF_ERROR(step());
    wall.push_back((SecondsNow() - wall_begin) * 1e3);
    cpu.push_back((ThreadCpuSeconds() - cpu_begin) * 1e6 / fan.ranks);
  }
  if (rank != 0) return {};
  std::printf(
      "{\"bench\": \"fan-in\", \"ranks\": %d, \"processes\": %d, \"way\": \"%s\", "
      "\"rounds\": %d, \"cores\": %u, \"wall_ms\": %.2f, \"wall_ms_worst\": %.2f, "
      "\"root_cpu_us_per_rank\": %.2f, \"root_cpu_us_per_rank_worst\": %.2f, "
      "\"connect_s\": %.2f}\n",
      fan.ranks, fan.processes, fan.way, fan.rounds, std::thread::hardware_concurrency(),
      MedianOf(wall), *std::max_element(wall.begin(), wall.end()), MedianOf(cpu),
      *std::max_element(cpu.begin(), cpu.end()), connected);
  return {};
}

// The ranks r of r % processes == process.
int RunProcess(SharedTcpRanks& shared, int process, const FanIn& fan) {
  std::vector<Status> results(static_cast<std::size_t>(fan.ranks));
  std::vector<std::thread> threads;
  for (int r = process; r < fan.ranks; r += fan.processes) {
    threads.emplace_back(
        [&, r] { results[static_cast<std::size_t>(r)] = RunRank(shared, r, fan); });
  }
  for (std::thread& t : threads) t.join();
  for (std::size_t r = 0; r < results.size(); ++r) {
    if (results[r].ok()) continue;
    std::fprintf(stderr, "rank %zu: %s\n", r, results[r].ToString().c_str());
    return 1;
  }
  return 0;
}

int FanInMain(int argc, char** argv) {
  FanIn fan;
  fan.options.address = "127.0.0.1";
  fan.options.unix_sockets = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const auto number = [&](int* out) {
      if (i + 1 < argc) *out = std::atoi(argv[++i]);
    };
    if (arg == "--ranks") {
      number(&fan.ranks);
    } else if (arg == "--processes") {
      number(&fan.processes);
    } else if (arg == "--rounds") {
      number(&fan.rounds);
    } else if (arg == "--unix") {
      fan.options.unix_sockets = true;
      fan.way = "unix";
    } else if (arg == "--ipv6") {
      fan.options.address = "::1";
      fan.way = "ipv6";
    } else {
      std::fprintf(stderr, "faninbench: what is %s?\n", argv[i]);
      return 2;
    }
  }
  if (fan.ranks < 1 || fan.processes < 1 || fan.rounds < 1) return 2;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  auto shared = SharedTcpRanks::Make(fan.ranks);
  if (!shared.ok()) {
    std::fprintf(stderr, "%s\n", shared.status().ToString().c_str());
    return 1;
  }
  std::vector<pid_t> children;
  for (int p = 0; p < fan.processes; ++p) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int code = RunProcess(*shared.value(), p, fan);
      std::fflush(nullptr);
      ::_exit(code);
    }
    if (pid > 0) children.push_back(pid);
  }
  int failed = static_cast<int>(children.size()) == fan.processes ? 0 : 1;
  for (const pid_t pid : children) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) failed = 1;
  }
  return failed;
}

}  // namespace
}  // namespace tensormount

int main(int argc, char** argv) { return tensormount::FanInMain(argc, argv); }
