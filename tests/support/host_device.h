// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_HOST_DEVICE_H_
#define TENSORMOUNT_TESTS_SUPPORT_HOST_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "device/device_ops.h"
#include "tests/support/test_device.h"
#include "tests/support/twin_memory.h"
#include "tests/support/work_thread.h"

// A device for tests, made of host memory, that behaves as a real one where that matters: its
// memory cannot be read through its pointers (who tries ends with SIGSEGV), and what it is given it
// does later, on a thread for each queue and stream, in an order that only marks tell, the copies
// of one submission in any.

namespace tensormount {

class HostDevice : public DeviceOps,
                   public TestDevice,
                   public std::enable_shared_from_this<HostDevice> {
 public:
  struct Options {
    int ordinal = 0;
    // Small, so that states of a few hundred KiB go around the ring.
    PinnedShape pinned{4, 64 * 1024};
    std::uint64_t seed = 1;
    // Before each piece of work, at most; 0: none.
    int delay_us = 50;
  };
  explicit HostDevice(const Options& options);
  ~HostDevice() override;

  // ---- What a test asks of it ----

  // Memory that can be read: that behind a pointer of the device.
  std::byte* Reveal(const void* data) { return memory_.Reveal(data); }
  // Work for a stream. `handle`: as MakeStream gave it, null for the legacy default stream.
  void Enqueue(void* handle, std::function<void()> kernel);
  Device device() const override { return {DeviceKind::kCuda, options_.ordinal}; }
  std::byte* NewMemory(std::size_t bytes) override { return Allocate(bytes).value(); }
  void FreeMemory(std::byte* there) override { Free(there); }
  void Put(std::byte* there, const void* here, std::size_t bytes) override {
    std::memcpy(memory_.Reveal(there, bytes), here, bytes);
  }
  void Get(void* here, const std::byte* there, std::size_t bytes) override {
    std::memcpy(here, memory_.Reveal(there, bytes), bytes);
  }
  void* MakeStream() override;
  void PutLater(void* stream, std::byte* there,
                std::shared_ptr<const std::vector<std::byte>> here) override {
    Enqueue(stream, [this, there, here] { Put(there, here->data(), here->size()); });
  }
  void Synchronize(void* handle) override;
  // Until what was submitted to queues is done, also to those that are gone.
  void Quiesce();
  // As if it recorded a graph.
  void BeginCapture(void* handle);

  // What goes wrong. Called at "allocate", "pin", "mark", "copy-out", "copy-in", "copy-within",
  // "hash", "digest" when they are asked for, and at "run ..." of them when they are done. What it
  // returns is the failure; it may also wait, as what never ends does. From any thread.
  using Fault = std::function<Status(std::string_view what)>;
  void SetFault(Fault fault);
  // From now on hashes and digests are of other bytes.
  void LieAboutHashes(bool lies) { lies_ = lies; }

  std::uint64_t bytes_out() const { return bytes_out_; }
  std::uint64_t bytes_in() const { return bytes_in_; }
  std::size_t allocations() { return memory_.count(); }  // That are not freed.

  // ---- DeviceOps ----

  std::string name() const override;
  PinnedShape pinned() const override { return options_.pinned; }
  Status Check(const BufferView& view) override;
  Result<std::byte*> AllocatePinned(std::size_t bytes) override;
  void FreePinned(std::byte* data) override;
  Result<std::byte*> Allocate(std::size_t bytes) override;
  void Free(std::byte* data) override;
  Result<std::shared_ptr<DeviceMark>> MarkStream(const DeviceStream& stream) override;
  Status HoldStream(const DeviceStream& stream, const std::shared_ptr<DeviceMark>& mark) override;
  Result<std::unique_ptr<DeviceQueue>> MakeQueue(const QueueLimits& rules = {}) override;

 private:
  class Queue;

  std::byte* RevealPlan(const StridedCopy& plan, const std::byte* base, bool destination);
  Status Faulted(std::string_view what);
  std::shared_ptr<WorkThread> StreamOf(void* handle);

  const Options options_;
  std::atomic<bool> lies_ = false;
  std::atomic<std::uint64_t> lied_ = 0;  // So often about digests.
  std::atomic<std::uint64_t> bytes_out_ = 0;
  std::atomic<std::uint64_t> bytes_in_ = 0;
  std::atomic<int> pending_ = 0;  // Submissions.
  TwinMemories memory_;
  std::mutex mutex_;
  Fault fault_;
  std::uint64_t seeds_ = 0;
  std::map<void*, std::shared_ptr<WorkThread>> streams_;  // By handle; null: the default.
  std::vector<void*> capturing_;
};

// Devices cuda:0 to cuda:n-1 of this process, for as long as it lives; what there was before is
// forgotten.
class HostDevices {
 public:
  explicit HostDevices(std::vector<HostDevice::Options> options);
  ~HostDevices();
  HostDevice& operator[](std::size_t i) { return *devices_[i]; }
  std::size_t size() const { return devices_.size(); }

 private:
  std::vector<std::shared_ptr<HostDevice>> devices_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_HOST_DEVICE_H_
