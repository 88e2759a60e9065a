// SPDX-License-Identifier: Apache-2.0
// A pool of device memory for snapshots. If a device has room, a background save copies the shards
// within the device, so that the caller is delayed only by a copy at the speed of device memory.
#include "collective/async/device_snapshots.h"

#include <algorithm>
#include <utility>

namespace tensormount {

DeviceSnapshots::~DeviceSnapshots() {
  for (Block& block : blocks_) Free(block);
}

DeviceSnapshots::Memory::~Memory() {
  std::lock_guard lock(pool_->mutex_);
  Block& block = pool_->blocks_[block_index_];
  block.taken = false;
  block.still_accessed = block.still_accessed || still_accessed_;
  if (writes_) block.writes = std::move(writes_);
}

bool DeviceSnapshots::HaveWritesEnded(Block& block) {
  if (!block.writes) return true;
  if (!block.writes->ok()) return false;
  const Result<bool> reached = block.writes->value()->Reached();
  if (!reached.ok()) {
    block.writes = reached.status();
    return false;
  }
  if (!reached.value()) return false;
  block.writes.reset();
  return true;
}

bool DeviceSnapshots::IsIdle(Block& block) {
  if (block.still_accessed)
    block.still_accessed = !block.device->pending_work->HasNoPendingWork(block.data);
  return !block.still_accessed && HaveWritesEnded(block);
}

void DeviceSnapshots::Free(Block& block) {
  if (block.data == nullptr) return;
  // An idle block has no pending reads or writes, so freeing it need not wait for work on other
  // memory.
  if (IsIdle(block)) block.device->pending_work->ResetPendingWork(block.data);
  block.device->pending_work->Free(block.data);
  block.data = nullptr;
  block.size = 0;
}

std::unique_ptr<DeviceSnapshots::Memory> DeviceSnapshots::Take(
    const std::shared_ptr<const OpenedDevice>& device, std::uint64_t bytes) {
  if (bytes > bound_) return nullptr;
  std::lock_guard lock(mutex_);
  std::uint64_t held = 0;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    Block& block = blocks_[i];
    if (block.device != device || block.data == nullptr) continue;
    if (!block.taken && block.size >= bytes && HaveWritesEnded(block)) {
      if (!block.still_accessed) device->pending_work->ResetPendingWork(block.data);
      block.taken = true;
      return std::unique_ptr<Memory>(new Memory(shared_from_this(), i, block.data));
    }
    held += block.size;
  }
  // Frees idle blocks before a larger one is allocated.
  for (Block& block : blocks_) {
    if (block.device != device || block.taken || block.data == nullptr || !IsIdle(block)) continue;
    held -= block.size;
    Free(block);
  }
  if (held > bound_ - bytes) return nullptr;
  const Result<std::byte*> data = device->pending_work->Allocate(static_cast<std::size_t>(bytes));
  if (!data.ok()) return nullptr;
  const auto unused = std::find_if(blocks_.begin(), blocks_.end(), [](const Block& block) {
    return block.data == nullptr && !block.taken;
  });
  const auto number = static_cast<std::size_t>(unused - blocks_.begin());
  if (unused == blocks_.end()) blocks_.emplace_back();
  blocks_[number] = {device, data.value(), bytes, true, false, std::nullopt};
  return std::unique_ptr<Memory>(new Memory(shared_from_this(), number, data.value()));
}

}  // namespace tensormount
