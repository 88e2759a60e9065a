// SPDX-License-Identifier: Apache-2.0
// How long an asynchronous save holds its caller, beside a memcpy of the same bytes.
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/async_save.h"

#include "base/file_system.h"
#include "bench/bench_tensors.h"
#include "bench/ckptbench.h"

namespace tensormount::bench {

namespace {

// Measures the time that a call takes for each tensor: one rank saves --tensors tensors of 4 KiB,
// and its layout is known.
Status BenchManySmall(const Options& options) {
  constexpr std::int64_t kElements = 1024;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder, WorkFolder::Make(options));
  const std::size_t count = static_cast<std::size_t>(options.tensors);
  const std::vector<float> memory(count * kElements, 1.0F);
  std::vector<float> copy(memory.size());
  StateDict state;
  for (std::size_t t = 0; t < count; ++t) {
    TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(
        "model.layers." + std::to_string(t) + ".weight",
        {{kElements},
         Box::Make({0}, {kElements}).value(),
         BufferView::Host(DType::kF32, memory.data() + t * kElements, {kElements})}));
  }
  const std::vector<std::unique_ptr<Communicator>> group = MakeThreadGroup(1);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver,
                               AsyncSaver::Make(*group[0]));
  const std::string name = folder->Join("store/step");
  std::optional<SaveHandle> handle;
  const auto finish = [&]() -> Status {
    if (!handle.has_value()) return {};
    const Status verdict = handle->WaitCommitted().status();
    handle.reset();
    if (!verdict.ok()) return verdict;
    return HostFileSystem().RemoveTree(folder->Join("store"));
  };
  Case c;
  c.workload = "async";
  c.name = "small, " + std::to_string(count) + " tensors of 4 KiB";
  c.bytes = memory.size() * sizeof(float);
  c.floor_name = "memcpy of each tensor into memory with all pages present";
  c.before = finish;
  c.ours = [&] {
    return TimeThreads(1, [&](int) -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle held, saver->Save(state, name));
      handle.emplace(std::move(held));
      return {};
    });
  };
  c.floor = [&] {
    return TimeThreads(1, [&](int) -> Status {
      for (std::size_t t = 0; t < count; ++t) {
        std::memcpy(copy.data() + t * kElements, memory.data() + t * kElements,
                    kElements * sizeof(float));
      }
      return {};
    });
  };
  TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
  return finish();
}

}  // namespace

Status BenchAsync(const Options& options) {
  TENSORMOUNT_RETURN_IF_ERROR(BenchManySmall(options));
  for (const Cut cut : {Cut::kRows, Cut::kColumns}) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<WorkFolder> folder,
                                 WorkFolder::Make(options));
    RankTensors tensors(options, cut);
    tensors.Fill();
    const auto ranks = static_cast<std::size_t>(options.ranks);
    const std::vector<std::unique_ptr<Communicator>> group = MakeThreadGroup(options.ranks);
    std::vector<std::unique_ptr<AsyncSaver>> savers(ranks);
    std::vector<PageBuffer> copies;
    for (std::size_t r = 0; r < ranks; ++r) {
      copies.emplace_back(tensors.memory(static_cast<int>(r)).size());
    }
    // Makers of savers wait for nobody, so that one thread may make them all.
    for (std::size_t r = 0; r < ranks; ++r) {
      TENSORMOUNT_ASSIGN_OR_RETURN(savers[r], AsyncSaver::Make(*group[r]));
    }
    int number = 0;
    std::string last;
    std::vector<StateDict> states(ranks);
    std::vector<std::optional<SaveHandle>> handles(ranks);
    // What is measured is the call alone; the save itself is over before the next round of either.
    const auto finish = [&]() -> Status {
      Status failure;
      for (auto& handle : handles) {
        if (!handle.has_value()) continue;
        const Status verdict = handle->WaitCommitted().status();
        if (failure.ok()) failure = verdict;
        handle.reset();
      }
      if (!last.empty()) {
        TENSORMOUNT_RETURN_IF_ERROR(HostFileSystem().RemoveTree(std::exchange(last, {})));
      }
      return failure;
    };
    Case c;
    c.workload = "async";
    c.name = cut == Cut::kRows ? "rows" : "cols";
    c.bytes = tensors.bytes();
    c.floor_name = "memcpy of the same bytes by as many threads into memory with all pages present";
    c.before = [&]() -> Status {
      TENSORMOUNT_RETURN_IF_ERROR(finish());
      for (std::size_t r = 0; r < ranks; ++r) states[r] = tensors.State(static_cast<int>(r));
      return {};
    };
    c.ours = [&]() -> Result<double> {
      const std::string store = folder->Join("store-" + std::to_string(number++));
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const double seconds, TimeThreads(options.ranks, [&](int rank) -> Status {
            const auto r = static_cast<std::size_t>(rank);
            TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                         savers[r]->Save(states[r], store + "/step"));
            handles[r].emplace(std::move(handle));
            return {};
          }));
      last = store;
      return seconds;
    };
    c.floor = [&] {
      return TimeThreads(options.ranks, [&](int rank) -> Status {
        const PageBuffer& from = tensors.memory(rank);
        std::memcpy(copies[static_cast<std::size_t>(rank)].data(), from.data(), from.size());
        return {};
      });
    };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));
    TENSORMOUNT_RETURN_IF_ERROR(finish());
  }
  return {};
}

}  // namespace tensormount::bench
