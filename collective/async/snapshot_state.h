// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_STATE_H_
#define TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_STATE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "collective/async/device_snapshots.h"
#include "collective/async/snapshot_pool.h"
#include "device/device_queues.h"

namespace tensormount {

// Total size in bytes of a state's shards, packed, and objects.
std::uint64_t BytesOf(const StateDict& state);

// A copy of the state whose shards are views of the same memory; everything else is copied. A
// failure in `state` is kept.
StateDict ShareState(const StateDict& state);

// The snapshot of a state for a save in the background. Once it is made, the caller may change the
// tensors, and the save reads the snapshot. Objects and common values are copied, too.
//
// The snapshot's shards are packed copies in memory of the pools: in device memory if `devices` has
// room for all shards of the device, in host memory if not. A failure to stage becomes the failure
// of `dict`, so that the save reports it to the other ranks. `rules` are for devices; their
// patience also limits the wait for pool memory.
struct SnapshotState {
  std::unique_ptr<SnapshotPool::Memory> memory;  // Null: no host copies.
  std::vector<std::unique_ptr<DeviceSnapshots::Memory>> on_devices;
  StateDict dict;
  Status status;  // The result of staging.
};
SnapshotState StageState(const StateDict& state, SnapshotPool& pool, DeviceSnapshots& devices,
                         const DeviceLimits& rules, std::atomic<std::uint64_t>* staged,
                         std::atomic<std::int64_t>* stalled);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_STATE_H_
