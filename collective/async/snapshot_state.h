// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_STATE_H_
#define TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_STATE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "collective/async/device_snapshots.h"
#include "collective/async/snapshot_pool.h"
#include "device/device_queues.h"

namespace tensormount {

// Bytes of the shards of a state, packed, and of its objects.
std::uint64_t BytesOf(const StateDict& state);

// The same state again, but for its shards: `shard_of` gives the one that takes the place of an
// item's.
StateDict WithShards(const StateDict& state, const std::function<Shard(std::size_t)>& shard_of);

// The same state again: views of the same memory, copies of everything else. A failure in `state`
// is in the copy too.
StateDict ShareState(const StateDict& state);

// The copy is what `hold` of an asynchronous save waits for: once it is made the caller may change
// its tensors, and the save reads the copy. Objects and common values are copied with it.
//
// A state whose shards are packed copies in memory of the pools: of their device where `devices`
// has room for all that is on it, otherwise of the host. What cannot be staged becomes the failure
// of `dict`, so that a save of it tells the other ranks. `rules`: of devices; its patience is for
// memory of the pool, too.
struct SnapshotState {
  std::unique_ptr<SnapshotPool::Memory> memory;  // Null where there is nothing to hold.
  std::vector<std::unique_ptr<DeviceSnapshots::Memory>> on_devices;
  StateDict dict;
  Status status;  // Of staging.
};
SnapshotState StageState(const StateDict& state, SnapshotPool& pool, DeviceSnapshots& devices,
                         const DeviceRules& rules, std::atomic<std::uint64_t>* staged,
                         std::atomic<std::int64_t>* stalled);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_SNAPSHOT_STATE_H_
