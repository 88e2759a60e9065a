// SPDX-License-Identifier: Apache-2.0
// What a step costs that changes little, beside the same save with everything written.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/file_system.h"
#include "bench/bench_tensors.h"
#include "bench/ckptbench.h"

namespace tensormount::bench {
namespace {

// A store with one checkpoint, and saves beside it that are removed again.
class Steps {
 public:
  Steps(const Options& options, const WorkFolder& folder, Cut cut)
      : options_(options), tensors_(options, cut), store_(folder.Join("store")) {
    tensors_.Fill();
    for (int r = 0; r < options.ranks; ++r) states_.push_back(tensors_.State(r));
  }

  RankTensors& tensors() { return tensors_; }
  const ReuseReport& reused() const { return reused_; }

  Result<double> Save(Reuse reuse) {
    const std::string path = store_ + "/step-" + std::to_string(number_++);
    SaveOptions how;
    how.reuse = reuse;
    how.full_every = 0;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const double seconds, TimeRanks(options_, {}, [&](Communicator& comm) -> Status {
          const auto saved =
              tensormount::Save(states_[static_cast<std::size_t>(comm.rank())], path, comm, how);
          TENSORMOUNT_RETURN_IF_ERROR(saved.status());
          if (comm.rank() == 0) reused_ = saved.value().reused;
          return Status();
        }));
    last_ = path;
    return seconds;
  }

  Status Forget() {
    return last_.empty() ? Status() : HostFileSystem().RemoveTree(std::exchange(last_, {}));
  }
  // The first one stays: it is the base of all others.
  Status Begin() {
    TENSORMOUNT_RETURN_IF_ERROR(Save(Reuse::kOff).status());
    last_.clear();
    return {};
  }

  // Changes a byte in each page of the first `part` of every rank's memory.
  void Change(double part) {
    for (int r = 0; r < options_.ranks; ++r) {
      PageBuffer& memory = tensors_.memory(r);
      const auto end = static_cast<std::size_t>(part * static_cast<double>(memory.size()));
      for (std::size_t at = 0; at < end; at += 4096) memory.data()[at] ^= std::byte{1};
    }
  }

 private:
  const Options& options_;
  RankTensors tensors_;
  const std::string store_;
  std::vector<StateDict> states_;
  int number_ = 0;
  std::string last_;
  ReuseReport reused_;
};

}  // namespace

Status BenchSteps(const Options& options) {
  struct Kind {
    const char* name;
    double part;
  };
  for (const Kind& kind :
       {Kind{"unchanged", 0}, Kind{"2 % changed", 0.02}, Kind{"all changed", 1}}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder,
                                 WorkFolder::Make(options));
    Steps steps(options, *folder, Cut::kRows);
    TENSORMOUNT_RETURN_IF_ERROR(steps.Begin());
    Case c;
    c.workload = "steps";
    c.name = kind.name;
    c.bytes = steps.tensors().bytes();
    c.floor_name = "the same save with reuse off";
    // Every round, changed or not, is another state than that of the base.
    if (kind.part > 0) steps.Change(kind.part);
    c.before = [&] { return steps.Forget(); };
    c.ours = [&] { return steps.Save(Reuse::kAuto); };
    c.floor = [&] { return steps.Save(Reuse::kOff); };
    c.facts = [&]() -> std::map<std::string, double> {
      return {{"tensors", static_cast<double>(steps.tensors().tensors())},
              {"tensors_reused", static_cast<double>(steps.reused().tensors)}};
    };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
  }
  return {};
}

}  // namespace tensormount::bench
