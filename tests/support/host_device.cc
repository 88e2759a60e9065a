// SPDX-License-Identifier: Apache-2.0
#include "tests/support/host_device.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "device/devices.h"
#include "shard/leaf_hash.h"
#include "shard/strided_digest.h"
#include "tests/support/random.h"

namespace tensormount {
namespace {

[[noreturn]] void Abort(const std::string& why) {
  std::fprintf(stderr, "host device: %s\n", why.c_str());
  std::abort();
}

}  // namespace

// One piece of memory, mapped twice: where the device says it is nobody may touch it.
struct HostDevice::Memory {
  explicit Memory(std::size_t bytes) : size(std::max<std::size_t>(bytes, 1)) {
    const int fd = memfd_create("host device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) Abort("memfd");
    void* const here = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void* const there = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (here == MAP_FAILED || there == MAP_FAILED) Abort("mmap");
    close(fd);
    bytes_here = static_cast<std::byte*>(here);
    address = static_cast<std::byte*>(there);
  }
  ~Memory() {
    munmap(bytes_here, size);
    munmap(address, size);
  }
  const std::size_t size;
  std::byte* address = nullptr;
  std::byte* bytes_here = nullptr;
};

class HostDevice::Mark : public DeviceMark {
 public:
  Result<bool> Reached() override {
    std::lock_guard lock(mutex_);
    if (!status_.ok()) return status_;
    return reached_;
  }
  void Reach(const Status& status) {
    {
      std::lock_guard lock(mutex_);
      reached_ = true;
      status_ = status;
    }
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Status status_;
};

// A thread that does what it is given, in order, each after a while.
class HostDevice::Worker {
 public:
  Worker(std::uint64_t seed, int delay_us) : random_(seed), delay_us_(delay_us) {
    thread_ = std::thread([this] { Work(); });
  }
  // Does all that is left.
  ~Worker() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void Add(std::function<Status()> work) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  std::shared_ptr<Mark> Here() {
    auto mark = std::make_shared<Mark>();
    Add([this, mark]() -> Status {
      mark->Reach(failure_);
      return {};
    });
    return mark;
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<Status()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (delay_us_ > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_.Int(0, delay_us_)));
      }
      const Status status = work();
      // As on a device, what failed stays.
      if (failure_.ok()) failure_ = status;
      lock.lock();
    }
  }

  Random random_;
  const int delay_us_;
  Status failure_;  // Of the thread.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<Status()>> queue_;
  bool stop_ = false;
  std::thread thread_;
};

class HostDevice::Queue : public DeviceQueue {
 public:
  Queue(std::shared_ptr<HostDevice> device, std::uint64_t seed)
      : device_(std::move(device)),
        random_(seed),
        worker_(std::make_shared<Worker>(seed, device_->options_.delay_us)) {}
  // What was submitted goes on: on a thread of its own, since that of a queue may hang.
  ~Queue() override {
    std::thread([worker = std::move(worker_)]() mutable { worker.reset(); }).detach();
  }

  Status After(const std::shared_ptr<DeviceMark>& mark) override {
    worker_->Add([mark]() -> Status {
      auto& own = static_cast<HostDevice::Mark&>(*mark);
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
      hasher.Finish();
      std::copy(hasher.leaves().begin(), hasher.leaves().end(), out);
    });
  }

  Status Digest(std::span<const PlacedBox> placed, const std::byte* base, const Dims& byte_shape,
                Crc64* out) override {
    std::vector<PlacedBox> boxes(placed.begin(), placed.end());
    return Add("digest", [=, device = device_.get(), boxes = std::move(boxes)] {
      // Not the same twice, or two would cancel.
      Crc64 digest = device->lies_ ? reinterpret_cast<std::uintptr_t>(base) | 1 : 0;
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
  std::shared_ptr<Worker> worker_;
};

HostDevice::HostDevice(const Options& options) : options_(options) {}
HostDevice::~HostDevice() = default;

std::shared_ptr<HostDevice::Memory> HostDevice::Find(const void* data) {
  std::lock_guard lock(mutex_);
  const auto* const at = static_cast<const std::byte*>(data);
  auto above = memory_.upper_bound(at);
  if (above == memory_.begin()) return nullptr;
  const std::shared_ptr<Memory>& memory = std::prev(above)->second;
  return at < memory->address + memory->size ? memory : nullptr;
}

std::byte* HostDevice::Reveal(const void* data) {
  const std::shared_ptr<Memory> memory = Find(data);
  if (memory == nullptr) Abort("a pointer that is not of this device");
  return memory->bytes_here + (static_cast<const std::byte*>(data) - memory->address);
}

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
  const std::shared_ptr<Memory> memory = Find(base + low);
  if (memory == nullptr || base + high > memory->address + memory->size) {
    Abort("an access outside of what was allocated");
  }
  return memory->bytes_here + (base - memory->address);
}

std::size_t HostDevice::allocations() {
  std::lock_guard lock(mutex_);
  return memory_.size();
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

std::shared_ptr<HostDevice::Worker> HostDevice::StreamOf(void* handle) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Worker>& stream = streams_[handle];
  if (stream == nullptr) {
    stream = std::make_shared<Worker>(options_.seed + ++seeds_, options_.delay_us);
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
  if (view.data == nullptr || Find(view.data) != nullptr) return {};
  return {Code::kInvalidArgument, "the buffer is no memory of " + name()};
}

Result<std::byte*> HostDevice::AllocatePinned(std::size_t bytes) {
  TENSORMOUNT_RETURN_IF_ERROR(Faulted("pin"));
  void* data = nullptr;
  if (posix_memalign(&data, 4096, bytes) != 0) Abort("no memory");
  return static_cast<std::byte*>(data);
}

void HostDevice::FreePinned(std::byte* data) { std::free(data); }

Result<std::byte*> HostDevice::Allocate(std::size_t bytes) {
  TENSORMOUNT_RETURN_IF_ERROR(Faulted("allocate"));
  auto memory = std::make_shared<Memory>(bytes);
  std::lock_guard lock(mutex_);
  memory_.emplace(memory->address, memory);
  return memory->address;
}

void HostDevice::Free(std::byte* data) {
  std::lock_guard lock(mutex_);
  if (memory_.erase(data) == 0) Abort("freed what was not allocated");
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

Result<std::unique_ptr<DeviceQueue>> HostDevice::MakeQueue() {
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
