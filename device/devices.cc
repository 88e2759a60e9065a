// SPDX-License-Identifier: Apache-2.0
// The devices of this process, each opened once, and again after a reset. A module that is loaded
// at run time opens them, so that all directories but gpu/ compile and link without CUDA.
#include "device/devices.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <pthread.h>
#include <string>

#include "device/device_module.h"
#include "shard/host_memory.h"

namespace tensormount {
namespace {

struct Known {
  std::mutex mutex;
  DeviceSource source;
  struct Entry {
    Device device;
    std::shared_ptr<const OpenedDevice> opened;
  };
  std::vector<Entry> entries;
};

Known& Devices() {
  static auto* const known = new Known;  // Saves that end at process exit still use it.
  return *known;
}

// Whether this process has opened a device, and whether it was forked from one that had. Atomic
// instead of protected by the mutex, which in a forked child may be locked forever. A fork handler
// sets them, because comparing getpid() would cost a system call for each tensor.
std::atomic<bool> opened_here = false;
std::atomic<bool> opened_by_parent = false;
void NoteForks() {
  static const int noted = pthread_atfork(nullptr, nullptr, [] {
    if (opened_here) opened_by_parent = true;
  });
  (void)noted;
}

Result<std::shared_ptr<DeviceOps>> OpenByModule(const Device& device) {
  Result<const DeviceModule*> module = OpenDeviceModule();
  if (!module.ok()) return module.status().WithContext("the buffer is in device memory");
  return module.value()->open(device);
}

std::string NameOf(const Device& device) { return "cuda:" + std::to_string(device.ordinal); }

}  // namespace

void SetDeviceSource(DeviceSource source) {
  Known& known = Devices();
  std::lock_guard lock(known.mutex);
  known.source = std::move(source);
  known.entries.clear();
  opened_here = false;
  opened_by_parent = false;
}

Result<std::shared_ptr<const OpenedDevice>> OpenDevice(const Device& device) {
  if (opened_by_parent) {
    return Status(Code::kUnavailable,
                  NameOf(device) +
                      ": the parent process had opened the device before it forked this process; "
                      "start this process with spawn instead of fork")
        .With({.device = NameOf(device)});
  }
  Known& known = Devices();
  std::lock_guard lock(known.mutex);
  // Forgets devices that were reset, so that they are opened again. Their present users get errors.
  std::erase_if(known.entries, [](const Known::Entry& entry) { return entry.opened->ops->gone(); });
  for (const Known::Entry& entry : known.entries) {
    if (entry.device == device) return entry.opened;
  }
  // Set before the device is opened: a child forked meanwhile has a half-open device and a locked
  // mutex.
  NoteForks();
  opened_here = true;
  Result<std::shared_ptr<DeviceOps>> found =
      known.source ? known.source(device) : OpenByModule(device);
  if (!found.ok()) {
    if (known.entries.empty()) opened_here = false;
    return found.status().With({.device = NameOf(device)});
  }
  std::shared_ptr<DeviceOps> ops = std::move(found).value();
  // Two descriptions, with and without UUID, may name one device; they share its OpenedDevice.
  std::shared_ptr<const OpenedDevice> opened;
  for (const Known::Entry& entry : known.entries) {
    if (entry.opened->ops == ops) opened = entry.opened;
  }
  if (opened == nullptr) {
    opened = std::make_shared<const OpenedDevice>(std::move(ops));
  }
  known.entries.push_back({device, opened});
  return opened;
}

Result<std::unique_ptr<DeviceLink>> OpenDeviceLink(const Device& device) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const OpenedDevice> opened,
                               OpenDevice(device));
  Result<std::unique_ptr<DeviceLink>> link = opened->ops->OpenLink();
  if (!link.ok()) return link.status().With({.device = opened->ops->name()});
  return link;
}

Status CheckMemory(const BufferView& view) {
  if (!IsDeviceMemory(view)) return CheckHostMemory(view);
  TENSORMOUNT_RETURN_IF_ERROR(CheckDescription(view));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<const OpenedDevice> device,
                               OpenDevice(view.device));
  // Frameworks pass arbitrary pointers for empty tensors, so these are not checked.
  const bool empty = std::find(view.shape.begin(), view.shape.end(), 0) != view.shape.end();
  const Status checked = empty ? Status() : device->ops->Check(view);
  return checked.ok() ? checked : checked.With({.device = device->ops->name()});
}

void PendingDeviceWork::Add(Slot slot, const Result<std::shared_ptr<DeviceMark>>& work) noexcept {
  std::lock_guard lock(mutex_);
  slot.front() = {work.ok() ? work.value() : nullptr, ++count_};
  work_.splice(work_.end(), slot);
  Sweep();
}

// Forgets work that has ended, and frees the waiting memory that no remaining work can access.
void PendingDeviceWork::Sweep() noexcept {
  work_.remove_if([](QueueWork& left) {
    if (left.mark == nullptr) return false;
    try {
      const Result<bool> reached = left.mark->Reached();
      // After an error the entry stays without a mark: work behind the failed work may still run.
      if (!reached.ok()) left.mark.reset();
      return reached.ok() && reached.value();
    } catch (const std::exception&) {  // Out of memory: the next Sweep tries again.
      return false;
    }
  });
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    if (!HasNoPendingWorkLocked(at->second)) {
      ++at;
      continue;
    }
    try {
      if (!ops_->gone()) ops_->Free(at->first);
    } catch (const std::exception&) {  // Out of memory during the call: the area is leaked.
    }
    at = waiting_.erase(at);
  }
}

bool PendingDeviceWork::HasNoPendingWorkLocked(const Area& area) const {
  return std::none_of(work_.begin(), work_.end(), [&](const QueueWork& left) {
    return area.since < left.number && left.number <= area.until;
  });
}

bool PendingDeviceWork::IsIdle() noexcept {
  std::lock_guard lock(mutex_);
  Sweep();
  return work_.empty();
}

Result<std::byte*> PendingDeviceWork::Allocate(std::size_t bytes) {
  std::map<std::byte*, Area> entry;
  entry[nullptr];  // Allocated before the device memory, which would be lost if this threw later.
  (void)IsIdle();
  TENSORMOUNT_ASSIGN_OR_RETURN(std::byte* const data, ops_->Allocate(bytes));
  std::lock_guard lock(mutex_);
  auto node = entry.extract(entry.begin());
  node.key() = data;
  node.mapped().since = count_;
  areas_.insert(std::move(node));
  return data;
}

void PendingDeviceWork::Free(std::byte* data) noexcept {
  std::lock_guard lock(mutex_);
  auto node = areas_.extract(data);
  if (node.empty()) return;
  node.mapped().until = count_;
  waiting_.insert(std::move(node));
  Sweep();
}

bool PendingDeviceWork::HasNoPendingWork(std::byte* data) noexcept {
  std::lock_guard lock(mutex_);
  Sweep();
  const auto found = areas_.find(data);
  return found != areas_.end() && HasNoPendingWorkLocked({found->second.since, count_});
}

void PendingDeviceWork::ResetPendingWork(std::byte* data) noexcept {
  std::lock_guard lock(mutex_);
  const auto found = areas_.find(data);
  if (found != areas_.end()) found->second.since = count_;
}

Status DeviceFences::Add(const BufferView& view) {
  if (!IsDeviceMemory(view)) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const OpenedDevice> device, OpenDevice(view.device));
  if (view.stream.kind == StreamKind::kNone) {
    if (std::find(unordered_.begin(), unordered_.end(), device) == unordered_.end()) {
      unordered_.push_back(std::move(device));
    }
    return {};
  }
  for (const Fence& fence : fences_) {
    if (fence.device == device && fence.stream == view.stream) return {};
  }
  Result<std::shared_ptr<DeviceMark>> marked = device->ops->MarkStream(view.stream);
  if (!marked.ok()) return marked.status().With({.device = device->ops->name()});
  std::shared_ptr<DeviceMark> mark = std::move(marked).value();
  fences_.push_back({std::move(device), view.stream, std::move(mark), std::this_thread::get_id()});
  return {};
}

void DeviceFences::Hold(const OpenedDevice& device,
                        const Result<std::shared_ptr<DeviceMark>>& work) const {
  bool held = work.ok() && std::none_of(unordered_.begin(), unordered_.end(),
                                        [&](const auto& one) { return one.get() == &device; });
  for (const Fence& fence : fences_) {
    if (!work.ok() || fence.device.get() != &device) continue;
    // The handle of a per-thread default stream means the stream of the calling thread, so the
    // stream of another thread cannot be made to wait.
    const bool here = fence.stream.kind != StreamKind::kPerThreadDefault ||
                      fence.thread == std::this_thread::get_id();
    const bool alone = std::none_of(fences_.begin(), fences_.end(), [&](const Fence& other) {
      if (&other == &fence || other.device.get() != &device) return false;
      const Result<bool> reached = other.mark->Reached();
      return reached.ok() && !reached.value();
    });
    held = here && alone && device.ops->HoldStream(fence.stream, work.value()).ok() && held;
  }
  if (!held) memory_in_use_ = true;
}

Status DeviceFences::MakeQueueWait(DeviceQueue& queue, const OpenedDevice& device) const {
  for (const Fence& fence : fences_) {
    if (fence.device.get() == &device) TENSORMOUNT_RETURN_IF_ERROR(queue.WaitFor(fence.mark));
  }
  return {};
}

}  // namespace tensormount
