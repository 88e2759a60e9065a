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

class BucketSave;

// Inputs of a save on this rank that only internal callers set (asynchronous saves, import).
struct SaveControl {
  // Set to end the save. Checked while bytes are read, and before each exchange of verdicts up to
  // the decision to publish, so that either all ranks that can be reached end with kCancelled or
  // none does.
  const std::atomic<bool>* cancel = nullptr;
  // `on_staging_made` runs on every rank once the staging exists; `on_staging_end` runs at rank 0
  // before the staging is published or aborted.
  std::function<void(FileSystem&, const Staging&)> on_staging_made = {};
  std::function<void(const Staging&)> on_staging_end = {};
  // Source of the bytes of shards without memory, for import, which copies tensors without holding
  // them in memory. If empty, such shards cannot be saved. The
  // save's writers call it from several threads at once.
  ShardReader read = {};
  // Time for mtimes, in seconds since 1970; 0: the current time.
  std::int64_t now = 0;
  // For a background save: marks of the work that was in the caller's streams at the time of its
  // call. Reads of device memory wait for that work only. Null: they wait for all work in those
  // streams now.
  std::shared_ptr<const DeviceFences> fences = nullptr;
  // The state is the library's own copy: failures do not set ErrorFields::memory_in_use.
  bool copied = false;
  bool background = false;  // The caller goes on meanwhile.
  // The bucket that the checkpoint is copied to after the publish; null: none.
  const BucketSave* bucket = nullptr;
};

// Inputs of a load on this rank that only internal callers set (loads in the background).
struct LoadControl {
  // Set to end the load. Checked before the plan is made, between tensors while this rank reads for
  // itself, and in waits for devices; then passed to the next exchange, which fails with kCancelled
  // on all ranks.
  const std::atomic<bool>* cancel = nullptr;
  std::shared_ptr<const DeviceFences> fences = nullptr;  // The same as SaveControl::fences.
  // Whether the program continues during the load. If so, the program may use NCCL itself, and two
  // NCCL communicators at a time may deadlock (docs/bulk.md), so an exchange goes between devices
  // only if the caller requires it.
  bool background = false;
  // An exchange of fewer bytes goes between devices only if the caller requires it, because NCCL
  // takes a second or two to connect.
  std::uint64_t min_device_exchange_bytes = std::uint64_t{2} << 30;
};

// Returns marks of the work that is now in the streams of the state's device buffers. Errors name
// the tensor.
Result<std::shared_ptr<const DeviceFences>> FencesOf(const StateDict& state);

// Returns `failure`, with ErrorFields::memory_in_use set if a device may still access the caller's
// memory. Call after all queues of the save or load are destroyed.
Status AfterDevices(const Status& failure, const DeviceFences* fences);
// Runs a job (SaveSession or LoadJob). The job, and with it its queues, is destroyed before
// AfterDevices looks at the verdict.
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

// Sets `fences` to FencesOf(state) if it is null. Exceptions become failures.
Status FencesAtCall(const StateDict& state, std::shared_ptr<const DeviceFences>& fences);

// How long a background save waits for earlier saves.
// Other time limits for one rank's own work are a part of this time.
inline std::chrono::milliseconds PatienceOf(const Timeouts& timeouts) {
  const bool limited = timeouts.total > std::chrono::milliseconds(0);
  return limited ? std::min(timeouts.arrival, timeouts.total) : timeouts.arrival;
}

// The time limit for waiting for a device, or for staging memory, before or between exchanges. It
// is shorter than PatienceOf, so that this rank reports the device before other ranks report that
// this rank did not come.
inline std::chrono::milliseconds DevicePatienceOf(const Timeouts& timeouts) {
  return PatienceOf(timeouts) * 3 / 4;
}

// Fails with kInvalidArgument if a shard has cells but no data (Shard::metadata_only), and so
// cannot be saved; names the first such shard.
Status CheckHasData(const StateDict& state);

// Save and Load with a control, on the file system that `path` names (FileSystemFor).
Result<SaveReport> Save(const StateDict& state, std::string_view path, Communicator& comm,
                        const SaveOptions& options, const SaveControl& control);
Result<LoadReport> Load(const StateDict& request, std::string_view path, Communicator& comm,
                        const LoadOptions& options, const LoadControl& control);
// Save and Load with a control, on a given FileSystem; tests use one that fails or crashes.
Result<SaveReport> SaveOn(FileSystem& fs, const StateDict& state, std::string_view path,
                          Communicator& comm, const SaveOptions& options,
                          const SaveControl& control = {});
Result<LoadReport> LoadOn(FileSystem& fs, const StateDict& request, std::string_view path,
                          Communicator& comm, const LoadOptions& options,
                          const LoadControl& control = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_SAVE_LOAD_H_
