// SPDX-License-Identifier: Apache-2.0
// What a job of many ranks costs besides its bytes, with threads as ranks; one JSON line a case.
//
//   ranksbench messages [--ranks N] FOLDER   a save with replicas into FOLDER, and a second one of
//                                            the same layout: messages of all ranks, and to how
//                                            many others a rank that is not rank 0 talks at most
//   ranksbench validate [--ranks N]          Validate, twice: wall and CPU seconds of all ranks
//   ranksbench wait [--ranks N]              all but one rank wait ten seconds for that one: the
//                                            share of a core that each takes meanwhile
//   ranksbench publish [--ranks N] [--tensors T] [--memory MIB] FOLDER
//                                            what rank 0 does last, with T tensors (10,000) of
//                                            which every rank wrote a row that is invented: its
//                                            memory. Needs 300 bytes of disk for each of the N * T
//                                            chunks
//
// Without --ranks: 8, 64, 256 and 1,024.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "tensormount/save.h"
#include "tensormount/validate.h"

#include "bench/counting_communicator.h"
#include "bench/peak_memory.h"
#include "bench/synthetic_staging.h"
#include "collective/comm/collective.h"
#include "collective/save_load.h"
#include "index/store/store.h"

namespace tensormount {
namespace {

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class Timer {
 public:
  double Wall() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  double Cpu() const { return CpuSeconds() - cpu_; }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double cpu_ = CpuSeconds();
};

// A rank's rows of `sharded` tensors, and all of one that every rank has.
struct RowsAndNorm {
  RowsAndNorm(const Communicator& comm, int sharded) {
    const std::int64_t n = comm.size();
    for (int t = 0; t < sharded; ++t) Add("layers." + std::to_string(t), {n, 4}, comm.rank(), 1);
    Add("norm", {16}, 0, 16);
  }
  void Add(const std::string& key, const Dims& shape, std::int64_t begin, std::int64_t rows) {
    Dims from = Dims::Filled(shape.rank(), 0);
    Dims extent = shape;
    from[0] = begin;
    extent[0] = rows;
    memory.emplace_back(64, 1.0f);
    Shard shard;
    shard.global_shape = shape;
    shard.region = Box::Make(from, extent).value();
    shard.data = BufferView::Host(DType::kF32, memory.back().data(), extent);
    status = status.ok() ? state.AddTensor(key, shard) : status;
  }
  StateDict state;
  std::vector<std::vector<float>> memory;
  Status status;
};

Status Messages(int ranks, const std::string& folder) {
  std::atomic<std::uint64_t> messages[2] = {0, 0};
  std::atomic<std::size_t> peers = 0;
  const std::string store = folder + "/ranks-" + std::to_string(ranks);
  const Status done = RunOnThreads(ranks, [&](Communicator& inner) -> Status {
    CountingCommunicator comm(inner);
    const RowsAndNorm rows(comm, 4);
    TENSORMOUNT_RETURN_IF_ERROR(rows.status);
    for (int save = 0; save < 2; ++save) {
      TENSORMOUNT_RETURN_IF_ERROR(
          Save(rows.state, store + "/step-" + std::to_string(save), comm, {}).status());
      messages[save] += comm.TakeMessages();
    }
    if (comm.rank() == 0) return Status();
    const std::size_t mine = comm.peers().size();
    for (std::size_t most = peers; mine > most && !peers.compare_exchange_weak(most, mine);) {
    }
    return Status();
  });
  TENSORMOUNT_RETURN_IF_ERROR(done);
  std::printf(
      "{\"case\": \"messages\", \"ranks\": %d, \"first_save\": %llu, \"second_save\": %llu, "
      "\"peers\": %zu}\n",
      ranks, static_cast<unsigned long long>(messages[0]),
      static_cast<unsigned long long>(messages[1]), peers.load());
  return Status();
}

Status Validation(int ranks) {
  double wall[2] = {};
  double cpu[2] = {};
  const Status done = RunOnThreads(ranks, [&](Communicator& comm) -> Status {
    const RowsAndNorm rows(comm, 400);
    TENSORMOUNT_RETURN_IF_ERROR(rows.status);
    for (int call = 0; call < 2; ++call) {
      {
        Collective collective(comm, {});
        TENSORMOUNT_RETURN_IF_ERROR(collective.Agree({}, "begin"));
      }
      const Timer timer;
      TENSORMOUNT_ASSIGN_OR_RETURN(const LayoutReport report, Validate(rows.state, comm));
      TENSORMOUNT_RETURN_IF_ERROR(report.ToStatus());
      if (comm.rank() != 0) continue;
      wall[call] = timer.Wall();
      cpu[call] = timer.Cpu();
    }
    return Status();
  });
  TENSORMOUNT_RETURN_IF_ERROR(done);
  std::printf(
      "{\"case\": \"validate\", \"ranks\": %d, \"wall_s\": [%.3f, %.3f], \"cpu_s\": [%.3f, "
      "%.3f]}\n",
      ranks, wall[0], wall[1], cpu[0], cpu[1]);
  return Status();
}

Status Waiting(int ranks) {
  constexpr int kSeconds = 10;
  double cpu = 0;
  const Status done = RunOnThreads(ranks, [&](Communicator& comm) -> Status {
    Collective collective(comm, {});
    TENSORMOUNT_RETURN_IF_ERROR(collective.Agree({}, "begin"));
    const Timer timer;
    if (comm.rank() == comm.size() - 1) {
      std::this_thread::sleep_for(std::chrono::seconds(kSeconds));
      cpu = timer.Cpu();
    }
    return collective.Agree({}, "end");
  });
  TENSORMOUNT_RETURN_IF_ERROR(done);
  std::printf("{\"case\": \"wait\", \"ranks\": %d, \"core_share_of_a_rank\": %.5f}\n", ranks,
              cpu / kSeconds / ranks);
  return Status();
}

// In a process of its own, which has no memory yet.
Status InChild(const std::function<Status()>& work) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const Status status = work();
    if (!status.ok()) std::fprintf(stderr, "ranksbench: %s\n", status.ToString().c_str());
    std::fflush(nullptr);
    _exit(status.ok() ? 0 : 1);
  }
  int ended = 0;
  if (child < 0 || waitpid(child, &ended, 0) != child || !WIFEXITED(ended) ||
      WEXITSTATUS(ended) != 0) {
    return {Code::kInternal, "a process of the benchmark failed"};
  }
  return {};
}

Status Publishing(int ranks, int tensors, std::uint64_t memory, const std::string& folder) {
  FileSystem& fs = HostFileSystem();
  const std::string path = JoinPath(folder, "publish-" + std::to_string(ranks));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::OpenOrCreate(fs, path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Staging staging, store.Begin("c", IfExists::kFail));
  TENSORMOUNT_RETURN_IF_ERROR(InChild([&] {
    return WriteSyntheticStaging(
        fs, staging, {.tensors = tensors, .chunks_per_tensor = ranks, .writers = ranks});
  }));
  TENSORMOUNT_RETURN_IF_ERROR(InChild([&]() -> Status {
    PeakMemory peak;
    peak.Begin();
    const Timer timer;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store::Published published,
                                 store.Publish(staging, Inventory(), {.rows_in_memory = memory}));
    std::printf(
        "{\"bench\":\"ranks\",\"case\":\"publish\",\"ranks\":%d,\"chunks\":%llu,"
        "\"memory_mib\":%.1f,\"wall_s\":%.3f,\"cpu_s\":%.3f,\"content_root\":\"%s\"}\n",
        ranks, static_cast<unsigned long long>(published.chunks), peak.MiB(), timer.Wall(),
        timer.Cpu(), published.content_root.ToHex().c_str());
    return {};
  }));
  return fs.RemoveTree(path);
}

int Main(int argc, char** argv) {
  std::vector<int> worlds = {8, 64, 256, 1024};
  std::string what;
  std::string folder;
  int tensors = 10000;
  std::uint64_t memory = Store::PublishOptions().rows_in_memory;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--ranks") == 0 && i + 1 < argc) {
      worlds = {std::max(1, std::atoi(argv[++i]))};
    } else if (std::strcmp(argv[i], "--tensors") == 0 && i + 1 < argc) {
      tensors = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--memory") == 0 && i + 1 < argc) {
      memory = std::strtoull(argv[++i], nullptr, 10) << 20;
    } else {
      (what.empty() ? what : folder) = argv[i];
    }
  }
  const bool in_folder = what == "messages" || what == "publish";
  if (in_folder ? folder.empty() : what != "validate" && what != "wait") {
    std::fprintf(stderr,
                 "usage: ranksbench messages FOLDER | validate | wait  [--ranks N]\n"
                 "       ranksbench publish FOLDER  [--ranks N] [--tensors T] [--memory MIB]\n");
    return 2;
  }
  for (const int ranks : worlds) {
    const Status status = what == "messages"   ? Messages(ranks, folder)
                          : what == "publish"  ? Publishing(ranks, tensors, memory, folder)
                          : what == "validate" ? Validation(ranks)
                                               : Waiting(ranks);
    if (!status.ok()) {
      std::fprintf(stderr, "ranksbench: %s\n", status.ToString().c_str());
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace tensormount

int main(int argc, char** argv) { return tensormount::Main(argc, argv); }
