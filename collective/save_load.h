// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_SAVE_LOAD_H_
#define TENSORMOUNT_COLLECTIVE_SAVE_LOAD_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tensormount/load.h"
#include "tensormount/save.h"

#include "base/file_system.h"
#include "collective/save/packed_source.h"
#include "device/devices.h"
#include "index/read/checkpoint.h"
#include "index/store/store.h"

namespace tensormount {

// What stands behind a save that runs for somebody else (an asynchronous one). Of this rank alone.
struct SaveControl {
  // Set to end the save: looked at before each exchange of verdicts up to the decision to publish,
  // so that all ranks end with kCancelled or none does.
  const std::atomic<bool>* cancel = nullptr;
  // On every rank, when the staging exists; at rank 0 before it is published or aborted too.
  std::function<void(const Staging&)> begun = {};
  std::function<void(const Staging&)> ending = {};
  // Not empty: where the bytes of shards without memory come from (import, which need not hold what
  // it copies). Without it they cannot be saved.
  ShardReader read = {};
  // Seconds since 1970 for mtimes; 0: the clock's.
  std::int64_t now = 0;
  // What memory of devices waits for, where the caller's call was earlier than this one; null: what
  // its streams have been given by now.
  std::shared_ptr<const DeviceFences> fences = nullptr;
  // The state is a copy of ours: a failure says nothing of the caller's memory.
  bool copied = false;
};

// The same of a load.
struct LoadControl {
  // Set to end the load: looked at between tensors until everything that this rank reads for itself
  // is there, and brought to the next exchange, which fails with kCancelled on all ranks.
  const std::atomic<bool>* cancel = nullptr;
  std::shared_ptr<const DeviceFences> fences = nullptr;  // As in SaveControl.
  // The program goes on meanwhile, and may have NCCL at work itself: an exchange goes between
  // devices only where it must. Two communicators at a time may wait for each other (docs/bulk.md).
  bool background = false;
  // Below this an exchange goes between devices only where it must: NCCL takes a second or two to
  // connect.
  std::uint64_t worth_a_way = std::uint64_t{2} << 30;
};

// Of all streams that order shards of a state: what they were given up to now. Errors name the
// tensor.
Result<std::shared_ptr<const DeviceFences>> FencesOf(const StateDict& state);

// A failure of a call that had these fences, once all of its queues are gone: with
// ErrorFields::memory_in_use where that is so.
Status AfterDevices(const Status& failure, const DeviceFences* fences);
// Runs a job, a SaveSession or LoadJob, and returns its verdict as AfterDevices has it: the queues
// go with the job.
template <typename Job, typename... Arguments>
auto RunJob(Arguments&&... arguments) {
  std::shared_ptr<const DeviceFences> fences;
  auto verdict = [&] {
    Job job(std::forward<Arguments>(arguments)...);
    auto found = job.Run();
    fences = job.fences();
    return found;
  }();
  if (!verdict.ok()) verdict = AfterDevices(verdict.status(), fences.get());
  return verdict;
}

// The same into `fences`, where a call has none of an earlier moment. Also what is thrown is a
// failure.
Status FencesAtCall(const StateDict& state, std::shared_ptr<const DeviceFences>& fences);

// How long a save or a load waits for memory that earlier ones hold.
inline std::chrono::milliseconds PatienceOf(const Timeouts& timeouts) {
  const bool limited = timeouts.total > std::chrono::milliseconds(0);
  return limited ? std::min(timeouts.arrival, timeouts.total) : timeouts.arrival;
}

// The same for a device: less, so that this rank says what befell it before others say that it did
// not come.
inline std::chrono::milliseconds DevicePatienceOf(const Timeouts& timeouts) {
  return PatienceOf(timeouts) * 3 / 4;
}

// kInvalidArgument names the first shard with cells that is there for the layout alone
// (Shard::metadata_only): it cannot be saved.
Status CheckHasData(const StateDict& state);

// Save and Load on any FileSystem: what the public calls do on the host's, and what tests do on
// one that fails or crashes.
Result<SaveReport> SaveOn(FileSystem& fs, const StateDict& state, std::string_view path,
                          Communicator& comm, const SaveOptions& options,
                          const SaveControl& control = {});
Result<LoadReport> LoadOn(FileSystem& fs, const StateDict& request, std::string_view path,
                          Communicator& comm, const LoadOptions& options,
                          const LoadControl& control = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_LOAD_H_
