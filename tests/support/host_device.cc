// SPDX-License-Identifier: Apache-2.0
#include "tests/support/host_device.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "device/devices.h"
#include "shard/leaf_hash.h"
#include "shard/strided_digest.h"
#include "tests/support/random.h"

namespace tensormount {
class HostDevice::Queue : public DeviceQueue {
 public:
  Queue(std::shared_ptr<HostDevice> device, std::uint64_t seed)
      : device_(std::move(device)),
        random_(seed),
        worker_(std::make_shared<WorkThread>(seed, device_->options_.delay_us)) {}
  // What was submitted goes on: on a thread of its own, since that of a queue may hang.
  ~Queue() override {
    std::thread([worker = std::move(worker_)]() mutable { worker.reset(); }).detach();
  }

  Status WaitFor(const std::shared_ptr<DeviceMark>& mark) override {
    worker_->Add([mark]() -> Status {
      auto& own = static_cast<WorkMark&>(*mark);
      own.Wait();
      return own.Reached().status();
    });
    return {};
  }
  Status CopyOut(std::span<const DeviceCopy> copies) override {
    return Copy("copy-out", copies, true, false);
  }
  Status CopyIn(std::span<const DeviceCopy> copies) override {
    return Copy("copy-in", copies, false, true);
  }
  Status CopyWithin(std::span<const DeviceCopy> copies) override {
    return Copy("copy-within", copies, true, true);
  }

  Status HashLeaves(std::span<const StridedCopy> gather, const std::byte* base, std::uint64_t bytes,
                    std::uint64_t leaf_bytes, Hash128* out) override {
    std::vector<StridedCopy> plans(gather.begin(), gather.end());
    return Add("hash", [=, device = device_.get(), plans = std::move(plans)] {
      std::string packed(static_cast<std::size_t>(bytes), '\0');
      for (const StridedCopy& plan : plans) {
        ExecuteCopy(plan, device->RevealPlan(plan, base, false),
                    reinterpret_cast<std::byte*>(packed.data()));
      }
      if (device->lies_ && !packed.empty()) packed[0] = static_cast<char>(packed[0] ^ 1);
      LeafHasher hasher(leaf_bytes);
      hasher.Update(packed.data(), packed.size());
      std::ranges::copy(hasher.Take(), out);
    });
  }

  Status Digest(std::span<const PlacedBox> placed, const std::byte* base, const Dims& byte_shape,
                Crc64* out) override {
    std::vector<PlacedBox> boxes(placed.begin(), placed.end());
    return Add("digest", [=, device = device_.get(), boxes = std::move(boxes)] {
      // Not the same twice, or two would cancel.
      Crc64 digest = device->lies_ ? ++device->lied_ * 0x9E3779B97F4A7C15 : 0;
      for (const PlacedBox& box : boxes) {
        const StridedCopy all = PlanCopy(box.box, box, PlacePacked(Region(box.box), 0).front());
        digest ^= DigestOfPlaced(box, device->RevealPlan(all, base, false), byte_shape);
      }
      *out = digest;
    });
  }

  Result<std::shared_ptr<DeviceMark>> Mark() override {
    TENSORMOUNT_RETURN_IF_ERROR(device_->Faulted("mark"));
    return std::shared_ptr<DeviceMark>(worker_->Here());
  }

 private:
  Status Add(std::string_view what, std::function<void()> work) {
    TENSORMOUNT_RETURN_IF_ERROR(device_->Faulted(what));
    ++device_->pending_;
    worker_->Add([device = device_, what = "run " + std::string(what), work = std::move(work)] {
      Status status = device->Faulted(what);
      if (status.ok()) work();
      --device->pending_;
      return status;
    });
    return {};
  }
  Status Copy(std::string_view what, std::span<const DeviceCopy> copies, bool from_device,
              bool to_device) {
    std::vector<DeviceCopy> shuffled(copies.begin(), copies.end());
    random_.Shuffle(shuffled);
    return Add(what, [=, device = device_.get(), shuffled = std::move(shuffled)] {
      for (const DeviceCopy& copy : shuffled) {
        const std::byte* from = copy.from;
        std::byte* to = copy.to;
        if (from_device) from = device->RevealPlan(copy.plan, copy.from, false);
        if (to_device) to = device->RevealPlan(copy.plan, copy.to, true);
        ExecuteCopy(copy.plan, from, to);
        (to_device ? device->bytes_in_ : device->bytes_out_) += copy.plan.bytes();
      }
    });
  }

  const std::shared_ptr<HostDevice> device_;
  Random random_;
  std::shared_ptr<WorkThread> worker_;
};

HostDevice::HostDevice(const Options& options) : options_(options) {}
HostDevice::~HostDevice() = default;

// The base of a plan in memory that can be read; all that the plan touches must be of one piece.
std::byte* HostDevice::RevealPlan(const StridedCopy& plan, const std::byte* base,
                                  bool destination) {
  if (plan.run == 0) return nullptr;
  std::int64_t low = destination ? plan.dst_offset : plan.src_offset;
  std::int64_t high = low + static_cast<std::int64_t>(plan.run);
  for (const StridedCopy::Axis& axis : plan.loops()) {
    if (axis.count == 0) return nullptr;
    const std::int64_t reach = (axis.count - 1) * (destination ? axis.dst : axis.src);
    (reach < 0 ? low : high) += reach;
  }
  return memory_.Reveal(base + low, static_cast<std::size_t>(high - low)) - low;
}

void HostDevice::SetFault(Fault fault) {
  std::lock_guard lock(mutex_);
  fault_ = std::move(fault);
}

Status HostDevice::Faulted(std::string_view what) {
  std::unique_lock lock(mutex_);
  const Fault fault = fault_;
  lock.unlock();
  return fault ? fault(what) : Status();
}

std::shared_ptr<WorkThread> HostDevice::StreamOf(void* handle) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<WorkThread>& stream = streams_[handle];
  if (stream == nullptr) {
    stream = std::make_shared<WorkThread>(options_.seed + ++seeds_, options_.delay_us);
  }
  return stream;
}

void* HostDevice::MakeStream() {
  std::unique_lock lock(mutex_);
  void* const handle = reinterpret_cast<void*>(0x1000 + ++seeds_ * 16);
  lock.unlock();
  (void)StreamOf(handle);
  return handle;
}

void HostDevice::Enqueue(void* handle, std::function<void()> kernel) {
  StreamOf(handle)->Add([kernel = std::move(kernel)]() -> Status {
    kernel();
    return {};
  });
}

void HostDevice::Synchronize(void* handle) { StreamOf(handle)->Here()->Wait(); }

void HostDevice::Quiesce() {
  while (pending_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void HostDevice::BeginCapture(void* handle) {
  std::lock_guard lock(mutex_);
  capturing_.push_back(handle);
}

std::string HostDevice::name() const {
  return "cuda:" + std::to_string(options_.ordinal) + " (host device)";
}

Status HostDevice::Check(const BufferView& view) {
  if (view.data == nullptr || memory_.Find(view.data) != nullptr) return {};
  return {Code::kInvalidArgument, "the buffer is no memory of " + name()};
}

Result<std::byte*> HostDevice::AllocatePinned(std::size_t bytes) {
  TENSORMOUNT_RETURN_IF_ERROR(Faulted("pin"));
  void* data = nullptr;
  if (posix_memalign(&data, 4096, bytes) != 0) AbortDevice("no memory");
  return static_cast<std::byte*>(data);
}

void HostDevice::FreePinned(std::byte* data) { std::free(data); }

Result<std::byte*> HostDevice::Allocate(std::size_t bytes) {
  TENSORMOUNT_RETURN_IF_ERROR(Faulted("allocate"));
  return memory_.Add(bytes);
}

void HostDevice::Free(std::byte* data) {
  if (!memory_.Remove(data)) AbortDevice("freed what was not allocated");
}

Result<std::shared_ptr<DeviceMark>> HostDevice::MarkStream(const DeviceStream& stream) {
  TENSORMOUNT_RETURN_IF_ERROR(Faulted("mark"));
  {
    std::lock_guard lock(mutex_);
    if (std::find(capturing_.begin(), capturing_.end(), stream.handle) != capturing_.end()) {
      return Status(Code::kInvalidArgument, name() + ": the stream records a graph");
    }
  }
  return std::shared_ptr<DeviceMark>(StreamOf(stream.handle)->Here());
}

Status HostDevice::HoldStream(const DeviceStream& stream, const std::shared_ptr<DeviceMark>& mark) {
  TENSORMOUNT_RETURN_IF_ERROR(Faulted("hold"));
  Enqueue(stream.handle, [mark] { static_cast<WorkMark&>(*mark).Wait(); });
  return {};
}

Result<std::unique_ptr<DeviceQueue>> HostDevice::MakeQueue(const QueueLimits& /*rules*/) {
  std::unique_lock lock(mutex_);
  const std::uint64_t seed = options_.seed + ++seeds_;
  lock.unlock();
  return std::unique_ptr<DeviceQueue>(std::make_unique<Queue>(shared_from_this(), seed));
}

HostDevices::HostDevices(std::vector<HostDevice::Options> options) {
  for (std::size_t i = 0; i < options.size(); ++i) {
    options[i].ordinal = static_cast<int>(i);
    options[i].seed += 1000 * i;
    devices_.push_back(std::make_shared<HostDevice>(options[i]));
  }
  SetDeviceSource([devices = devices_](const Device& device) -> Result<std::shared_ptr<DeviceOps>> {
    const auto i = static_cast<std::size_t>(device.ordinal);
    if (device.ordinal < 0 || i >= devices.size()) {
      return Status(Code::kUnavailable, "there is no cuda:" + std::to_string(device.ordinal));
    }
    return std::shared_ptr<DeviceOps>(devices[i]);
  });
}

HostDevices::~HostDevices() { SetDeviceSource({}); }

}  // namespace tensormount
