// SPDX-License-Identifier: Apache-2.0
// Saves of replicas beside a save of one copy, and saves with a plan at hand beside first saves.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "base/file_system.h"
#include "bench/bench_tensors.h"
#include "bench/ckptbench.h"

namespace tensormount::bench {
namespace {

// A model that every rank holds whole, each in memory of its own. The first rank's bytes are those
// of a model of one rank.
class Replicas {
 public:
  Replicas(const Options& options, int ranks) : one_(OneRank(options), Cut::kRows) {
    one_.Fill();
    for (int r = 1; r < ranks; ++r) {
      copies_.emplace_back(one_.memory(0).size());
      std::memcpy(copies_.back().data(), one_.memory(0).data(), one_.memory(0).size());
    }
  }

  std::uint64_t bytes() const { return one_.bytes(); }
  const PageBuffer& memory(int rank) {
    return rank == 0 ? one_.memory(0) : copies_[static_cast<std::size_t>(rank - 1)];
  }
  StateDict State(int rank) {
    StateDict state;
    const std::byte* data = memory(rank).data();
    for (std::size_t t = 0; t < one_.tensors(); ++t) {
      const Box whole = Box::Whole(one_.shape());
      // A failure stays in the state and fails the save.
      (void)state.AddTensor(
          "layers." + std::to_string(t) + ".weight",
          {one_.shape(), whole,
           BufferView::Host(DType::kF32, data + t * one_.tensor_bytes(), one_.shape())});
    }
    return state;
  }

 private:
  static Options OneRank(Options options) {
    options.ranks = 1;
    return options;
  }
  RankTensors one_;
  std::vector<PageBuffer> copies_;
};

class ReplicaBench {
 public:
  ReplicaBench(const Options& options, const WorkFolder& folder, Replicas& replicas)
      : options_(options), folder_(folder), replicas_(replicas) {}

  Result<double> Save(int ranks, ReplicaCheck check) {
    Options how = options_;
    how.ranks = ranks;
    last_ = folder_.Join("store" + std::to_string(number_++));
    const auto touch = [&](int rank) { replicas_.memory(rank).Touch(); };
    return TimeRanks(how, touch, [&](Communicator& comm) -> Status {
      SaveOptions save;
      save.replicas = check;
      Result<SaveReport> report =
          tensormount::Save(replicas_.State(comm.rank()), last_ + "/step", comm, save);
      if (report.ok() && comm.rank() == 0) {
        const SaveReport& r = report.value();
        facts_["written_of_one_copy"] =
            static_cast<double>(r.bytes_written) / static_cast<double>(r.bytes);
        facts_["compared_of_replicas"] = r.replica_bytes == 0
                                             ? 0
                                             : static_cast<double>(r.replica_bytes_compared) /
                                                   static_cast<double>(r.replica_bytes);
        facts_["write_seconds"] = r.write_seconds;
        facts_["compare_seconds"] = r.compare_seconds;
        facts_["publish_seconds"] = r.publish_seconds;
      }
      return report.status();
    });
  }

  // One copy by plain calls, by one thread.
  Result<double> Raw() {
    last_ = folder_.Join("raw" + std::to_string(number_++));
    TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().CreateDirectory(last_));
    return TimeThreads(1, [&](int) -> Status {
      const OwnedFd fd(last_ + "/copy", O_RDWR | O_CREAT);
      if (fd.get() < 0) return Status::FromErrno(errno, "create a file in", last_);
      TENSORMOUNT_RETURN_IF_ERROR(
          RawWrite(fd.get(), 0, replicas_.memory(0).data(), replicas_.bytes()));
      if (fsync(fd.get()) != 0) return Status::FromErrno(errno, "fsync a file in", last_);
      return {};
    });
  }

  // What the round before wrote is gone and its deletion over before the next begins.
  Status Clean() {
    if (last_.empty()) return {};
    TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().RemoveTree(last_));
    return HostFileSystem().SyncDirectory(folder_.Join(""));
  }
  std::map<std::string, double> facts() const { return facts_; }

 private:
  const Options& options_;
  const WorkFolder& folder_;
  Replicas& replicas_;
  int number_ = 0;
  std::string last_;
  std::map<std::string, double> facts_;
};

}  // namespace

Status BenchReplicas(const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  Replicas replicas(options, options.ranks);
  ReplicaBench bench(options, *folder, replicas);
  Case c;
  c.workload = "replicas";
  c.bytes = replicas.bytes();
  c.before = [&] { return bench.Clean(); };
  std::map<std::string, double> facts;
  c.facts = [&] { return facts; };
  c.name = "one copy, one rank";
  c.floor_name = "pwrite and fsync of one file by one thread";
  c.ours = [&] { return bench.Save(1, ReplicaCheck::kOff); };
  c.floor = [&] { return bench.Raw(); };
  TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
  c.floor_name = "one rank saves one copy, comparison off";
  c.floor = [&] { return bench.Save(1, ReplicaCheck::kOff); };
  const std::pair<const char*, ReplicaCheck> checks[] = {{"off", ReplicaCheck::kOff},
                                                         {"rotating", ReplicaCheck::kRotating},
                                                         {"full", ReplicaCheck::kFull}};
  for (const auto& [name, check] : checks) {
    c.name = std::to_string(options.ranks) + " replicas, comparison " + name;
    c.ours = [&, which = check] {
      Result<double> seconds = bench.Save(options.ranks, which);
      facts = bench.facts();
      return seconds;
    };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
  }
  return {};
}

Status BenchPlan(const Options& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  // Small tensors, every one cut over all ranks: what is measured is what happens before data move.
  const std::int64_t rows = 4 * options.ranks;
  const std::vector<float> memory(static_cast<std::size_t>(rows * 4));
  const auto state_of = [&](int rank) {
    StateDict state;
    const Region region = Box::Make({4 * rank, 0}, {4, 4}).value();
    for (int t = 0; t < options.tensors; ++t) {
      (void)state.AddTensor(
          "model.layers." + std::to_string(t) + ".weight",
          {{rows, 4}, region, BufferView::Host(DType::kF32, memory.data(), {4, 4})});
    }
    return state;
  };
  int number = 0;
  double first = 0;
  double cached = 0;
  const auto both = [&]() -> Status {
    const std::string store = folder->Join("store" + std::to_string(number++));
    std::vector<double> seconds(static_cast<std::size_t>(2 * options.ranks));
    TENSORMOUNT_RETURN_IF_ERROR(RunOnThreads(options.ranks, [&](Communicator& comm) -> Status {
      const StateDict state = state_of(comm.rank());
      for (int step = 0; step < 2; ++step) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const SaveReport report,
                                     Save(state, store + "/" + std::to_string(step), comm));
        if (report.plan_reused != (step == 1)) {
          return Status(Code::kInternal, "the second save made a plan, or the first one did not");
        }
        seconds[static_cast<std::size_t>(2 * comm.rank() + step)] =
            report.validate_seconds + report.plan_seconds;
      }
      return {};
    }));
    first = cached = 0;
    for (std::size_t r = 0; r < static_cast<std::size_t>(options.ranks); ++r) {
      first = std::max(first, seconds[2 * r]);
      cached = std::max(cached, seconds[2 * r + 1]);
    }
    return HostFileSystem().RemoveTree(store);
  };
  Case c;
  c.workload = "plan";
  c.name = "layout known, " + std::to_string(options.tensors) + " tensors";
  c.floor_name = "the first save of that layout: validation and planning, slowest rank";
  c.ours = [&]() -> Result<double> {
    TENSORMOUNT_RETURN_IF_ERROR(both());
    return cached;
  };
  c.floor = [&]() -> Result<double> {
    TENSORMOUNT_RETURN_IF_ERROR(both());
    return first;
  };
  return RunCase(options, c);
}

}  // namespace tensormount::bench
