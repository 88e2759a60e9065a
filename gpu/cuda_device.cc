// SPDX-License-Identifier: Apache-2.0
// CUDA devices through the driver API: properties, checks of pointers, and making of streams, pools
// and queues. Copies and hashes are in cuda_queue.cc.
#include "gpu/cuda_device.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "base/at_exit.h"
#include "base/deadline.h"
#include "device/pinned_ring.h"
#include "gpu/cuda_driver.h"
#include "gpu/cuda_nccl_stream.h"
#include "gpu/cuda_queue.h"
#include "gpu/kernels/crc64.h"
#include "gpu/nccl_library.h"

namespace tensormount::gpu {
namespace {

// Byte offsets of a view's lowest byte and of the end of its highest byte, relative to its data.
struct Reach {
  std::int64_t low = 0;
  std::int64_t high = 0;
};
Reach ReachOf(const BufferView& view) {
  const auto bits = static_cast<std::int64_t>(InfoOf(view.dtype).bits);
  if (view.IsPacked()) {
    std::int64_t elements = 1;
    for (const std::int64_t extent : view.shape) elements *= extent;
    return {0, (elements * bits + 7) / 8};
  }
  Reach reach{0, bits / 8};  // A whole number: views of types below one byte are always packed.
  for (int a = 0; a < view.shape.rank(); ++a) {
    const std::int64_t far = (view.shape[a] - 1) * view.strides[a] * (bits / 8);
    (far < 0 ? reach.low : reach.high) += far;
  }
  return reach;
}

std::string Hexadecimal(const std::byte* data) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (auto rest = reinterpret_cast<std::uintptr_t>(data); rest != 0; rest /= 16) {
    text.insert(text.begin(), kDigits[rest % 16]);
  }
  return "0x" + (text.empty() ? "0" : text);
}

std::string UuidText(const std::array<std::uint8_t, 16>& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid[i] / 16];
    text += kDigits[uuid[i] % 16];
  }
  return text;
}

}  // namespace

Result<std::shared_ptr<CudaDevice>> CudaDevice::Open(std::shared_ptr<const cuda::Driver> driver,
                                                     int ordinal, std::span<const std::byte> image,
                                                     const CudaOptions& options) {
  std::string name = "cuda:" + std::to_string(ordinal);
  cuda::Device device = 0;
  const cuda::Result found = driver->cuDeviceGet(&device, ordinal);
  if (found != cuda::kSuccess) {
    return Status(Code::kUnavailable,
                  CudaStatus(*driver, found, "find the device").WithContext(name).message());
  }
  char words[128] = {};
  if (driver->cuDeviceGetName(words, sizeof(words) - 1, device) == cuda::kSuccess) {
    name += " (" + std::string(words) + ")";
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<CudaContext> context,
                               CudaContext::Retain(driver, device, name));
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): the constructor is private.
  std::shared_ptr<CudaDevice> made(new CudaDevice(std::move(context), ordinal, options));
  TENSORMOUNT_RETURN_IF_ERROR(made->Load(image));
  return made;
}

CudaDevice::~CudaDevice() {
  const CudaScope scope(*context_);
  if (module_ != nullptr && scope.status().ok()) {
    (void)context_->driver().cuModuleUnload(module_);
  }
}

Status CudaDevice::Load(std::span<const std::byte> image) {
  const cuda::Driver& driver = context_->driver();
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  const cuda::Result loaded = driver.cuModuleLoadData(&module_, image.data());
  if (loaded != cuda::kSuccess) {
    int major = 0;
    int minor = 0;
    int version = 0;
    (void)driver.cuDeviceGetAttribute(&major, cuda::kAttributeMajor, context_->device());
    (void)driver.cuDeviceGetAttribute(&minor, cuda::kAttributeMinor, context_->device());
    (void)driver.cuDriverGetVersion(&version);
    const Status status = context_->Check(
        loaded, "load tensormount's kernels for compute capability " + std::to_string(major) + "." +
                    std::to_string(minor) + " with a driver of CUDA " +
                    std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10));
    return {Code::kUnavailable, status.message()};
  }
  const std::pair<const char*, cuda::Function*> wanted[] = {{"tensormount_copy", &kernels_.copy},
                                                            {"tensormount_runs", &kernels_.runs},
                                                            {"tensormount_tiles", &kernels_.tiles},
                                                            {"tensormount_hash", &kernels_.hash},
                                                            {"tensormount_crc", &kernels_.crc}};
  for (const auto& [name, function] : wanted) {
    TENSORMOUNT_RETURN_IF_ERROR(
        context_->Check(driver.cuModuleGetFunction(function, module_, name), name));
    // By default the driver loads a kernel at its first launch, which may wait for all streams of
    // the context, without a deadline.
    if (driver.cuFuncLoad == nullptr) continue;
    TENSORMOUNT_RETURN_IF_ERROR(context_->Check(driver.cuFuncLoad(*function), name));
  }
  cuda::Address tables = 0;
  std::size_t bytes = 0;
  TENSORMOUNT_RETURN_IF_ERROR(
      context_->Check(driver.cuModuleGetGlobal(&tables, &bytes, module_, "tensormount_crc_tables"),
                      "find the checksum tables"));
  if (bytes != sizeof(kernels::CrcTables)) {
    return {
        Code::kInternal,
        name() + ": the GPU kernels belong to another version of tensormount than this library"};
  }
  TENSORMOUNT_RETURN_IF_ERROR(FillTables(tables));
  int greatest = 0;
  TENSORMOUNT_RETURN_IF_ERROR(
      context_->Check(driver.cuCtxGetStreamPriorityRange(&least_priority_, &greatest),
                      "get the stream priorities"));
  // Older drivers lack this attribute.
  if (driver.cuDeviceGetAttribute(&numa_node_, cuda::kAttributeHostNumaId, context_->device()) !=
      cuda::kSuccess) {
    numa_node_ = -1;
  }
  pinned_ = std::make_shared<PinnedMemory>(context_, numa_node_);
  TENSORMOUNT_ASSIGN_OR_RETURN(areas_, AreaPool::Make(context_, ordinal_));
  scratch_ = std::make_shared<ScratchPool>(context_, areas_, options_.scratch_bytes);
  results_ = std::make_shared<ResultSlabs>(pinned_);
  return {};
}

// Uses its own stream and waits for it, so that the default stream is not synchronised, no graph
// capture is disturbed, and queues need not wait for the tables.
Status CudaDevice::FillTables(cuda::Address tables) {
  constexpr std::chrono::seconds kPatience{30};
  const cuda::Driver& driver = context_->driver();
  const auto filled = std::make_unique<kernels::CrcTables>();
  kernels::FillCrcTables(*filled);
  cuda::Stream stream = nullptr;
  TENSORMOUNT_RETURN_IF_ERROR(context_->Check(
      driver.cuStreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0), "create a stream"));
  const AtExit destroy([&] { (void)driver.cuStreamDestroy(stream); });
  TENSORMOUNT_RETURN_IF_ERROR(
      context_->Check(driver.cuMemcpyHtoDAsync(tables, filled.get(), sizeof(*filled), stream),
                      "fill the checksum tables"));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto mark, CudaMark::Record(context_, stream));
  return AwaitMark(*mark, Deadline::After(kPatience)).WithContext(name());
}

// Checks that one address is memory of this device.
Status CudaDevice::CheckAddress(const std::byte* data) const {
  const cuda::Driver& driver = context_->driver();
  const auto address = reinterpret_cast<cuda::Address>(data);
  const auto no_memory = [&](const std::string& what) {
    return Status(Code::kInvalidArgument, "the buffer at " + Hexadecimal(data) +
                                              " does not belong to " + name() + ": it is " + what);
  };
  // One call instead of one for each attribute: a state has tens of thousands of tensors.
  unsigned managed = 0;
  unsigned type = 0;  // Stays 0 for memory that CUDA does not know, which is no error here.
  int ordinal = -1;
  std::array asked = {cuda::kPointerIsManaged, cuda::kPointerMemoryType,
                      cuda::kPointerDeviceOrdinal};
  std::array<void*, asked.size()> answers = {&managed, &type, &ordinal};
  TENSORMOUNT_RETURN_IF_ERROR(
      context_->Check(driver.cuPointerGetAttributes(static_cast<unsigned>(asked.size()),
                                                    asked.data(), answers.data(), address),
                      "query the owner of the buffer"));
  // Managed memory may be on any device or the host at this moment, so it is not checked further.
  if (managed != 0) return {};
  if (type == 0) return no_memory("not known to CUDA");
  if (type == cuda::kMemoryHost) return no_memory("host memory");
  if (ordinal != ordinal_) {
    return no_memory("memory of cuda:" + std::to_string(ordinal));
  }
  return {};
}

// Checks the first and the last byte of a buffer, not the allocation of its first byte, because a
// buffer may consist of separately mapped parts (expandable segments of PyTorch).
Status CudaDevice::Check(const BufferView& view) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  const Reach reach = ReachOf(view);
  const auto* const data = static_cast<const std::byte*>(view.data);
  TENSORMOUNT_RETURN_IF_ERROR(CheckAddress(data + reach.low));
  return CheckAddress(data + reach.high - 1);
}

Result<std::byte*> CudaDevice::AllocatePinned(std::size_t bytes) {
  return pinned_->Allocate(bytes);
}

void CudaDevice::FreePinned(std::byte* data) { pinned_->Free(data); }

Result<std::byte*> CudaDevice::Allocate(std::size_t bytes) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  // Rounded up to 16 bytes, because kernels read whole aligned words, also around the last byte.
  TENSORMOUNT_ASSIGN_OR_RETURN(const cuda::Address address,
                               areas_->Allocate(std::max<std::size_t>((bytes + 15) / 16 * 16, 16)));
  return reinterpret_cast<std::byte*>(address);
}

void CudaDevice::Free(std::byte* data) {
  const CudaScope scope(*context_);
  if (scope.status().ok()) areas_->Free(reinterpret_cast<cuda::Address>(data));
}

void CudaDevice::AllowPeerAccess(const CudaDevice& peer) {
  const CudaScope scope(*context_);
  if (scope.status().ok()) areas_->AllowPeerAccess(peer.context_->device(), peer.ordinal_);
}

// The driver's handle of a stream that accepts work. Requires a CudaScope.
Result<cuda::Stream> CudaDevice::StreamOf(const DeviceStream& stream) {
  std::uintptr_t handle = reinterpret_cast<std::uintptr_t>(stream.handle);
  if (stream.kind == StreamKind::kPerThreadDefault) handle = cuda::kPerThreadStream;
  // The runtime uses 0 for the legacy default stream, too.
  if (stream.kind == StreamKind::kLegacyDefault || handle == 0) handle = cuda::kLegacyStream;
  const auto native = reinterpret_cast<cuda::Stream>(handle);
  int capture = cuda::kCaptureNone;
  const cuda::Result asked = context_->driver().cuStreamIsCapturing(native, &capture);
  // The legacy stream accepts no work while a stream that synchronises with it is captured.
  if (asked == cuda::kCaptureImplicit || (asked == cuda::kSuccess && capture != 0)) {
    return Status(
        Code::kInvalidArgument,
        name() +
            ": the stream is capturing a graph; save or load before or after the capture, or "
            "on another stream");
  }
  TENSORMOUNT_RETURN_IF_ERROR(context_->Check(asked, "query the stream"));
  return native;
}

Result<std::shared_ptr<DeviceMark>> CudaDevice::MarkStream(const DeviceStream& stream) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  TENSORMOUNT_ASSIGN_OR_RETURN(const cuda::Stream native, StreamOf(stream));
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<CudaMark> mark, CudaMark::Record(context_, native));
  return std::shared_ptr<DeviceMark>(std::move(mark));
}

Status CudaDevice::HoldStream(const DeviceStream& stream, const std::shared_ptr<DeviceMark>& mark) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  TENSORMOUNT_ASSIGN_OR_RETURN(const cuda::Stream native, StreamOf(stream));
  return static_cast<CudaMark&>(*mark).Precede(*context_, native);
}

Result<std::unique_ptr<DeviceQueue>> CudaDevice::MakeQueue(const QueueLimits& limits) {
  const CudaScope scope(*context_);
  TENSORMOUNT_RETURN_IF_ERROR(scope.status());
  cuda::Stream stream = nullptr;
  // The lowest priority. Streams of PyTorch have it, too, unless the program asks for a higher one.
  TENSORMOUNT_RETURN_IF_ERROR(
      context_->Check(context_->driver().cuStreamCreateWithPriority(
                          &stream, cuda::kStreamNonBlocking, least_priority_),
                      "create a stream"));
  return std::unique_ptr<DeviceQueue>(
      std::make_unique<CudaQueue>(shared_from_this(), stream, limits));
}

Result<std::unique_ptr<DeviceLink>> CudaDevice::OpenLink() {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const NcclLibrary> library,
                               NcclLibrary::Open(options_.nccl.library));
  // A MIG instance has its own UUID: NCCL decides whether it accepts two ranks on two instances.
  cuda::Uuid uuid = {};
  TENSORMOUNT_RETURN_IF_ERROR(context_->Check(
      context_->driver().cuDeviceGetUuid(&uuid, context_->device()), "get the device's UUID"));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      std::shared_ptr<CudaNcclStream> stream,
      CudaNcclStream::Make(context_, least_priority_, UuidText(std::to_array(uuid.bytes))));
  return MakeNcclLink(std::move(library), std::move(stream), options_.nccl);
}

// ---- CudaDevices -----------------------------------------------------------------------------

Status CudaDevices::Begin() {
  if (driver_ != nullptr) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(driver_, OpenDriver(library_.c_str()));
  return {};
}

Result<int> CudaDevices::Count() {
  std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(Begin());
  int count = 0;
  const cuda::Result asked = driver_->cuDeviceGetCount(&count);
  if (asked != cuda::kSuccess) {
    return Status(Code::kUnavailable, CudaStatus(*driver_, asked, "count devices").message());
  }
  return count;
}

Result<int> CudaDevices::OrdinalOf(const Device& device) const {
  if (device.uuid == std::array<std::uint8_t, 16>{}) return device.ordinal;
  int count = 0;
  TENSORMOUNT_RETURN_IF_ERROR(
      CudaStatus(*driver_, driver_->cuDeviceGetCount(&count), "count devices"));
  // Programs identify a MIG instance by the UUID of the instance, or by that of the whole device.
  const auto is = [&](int ordinal) {
    cuda::Device there = 0;
    if (driver_->cuDeviceGet(&there, ordinal) != cuda::kSuccess) return false;
    for (const auto uuid_of : {driver_->cuDeviceGetUuid, driver_->physical_uuid}) {
      cuda::Uuid uuid = {};
      if (uuid_of(&uuid, there) == cuda::kSuccess &&
          std::equal(device.uuid.begin(), device.uuid.end(), uuid.bytes)) {
        return true;
      }
    }
    return false;
  };
  if (device.ordinal >= 0 && device.ordinal < count && is(device.ordinal)) return device.ordinal;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    if (is(ordinal)) return ordinal;
  }
  return Status(Code::kUnavailable, "device " + UuidText(device.uuid) + " is not among the " +
                                        std::to_string(count) +
                                        " devices that this process sees (CUDA_VISIBLE_DEVICES)");
}

Result<std::shared_ptr<DeviceOps>> CudaDevices::Open(const Device& device) {
  std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(Begin());
  TENSORMOUNT_ASSIGN_OR_RETURN(const int ordinal, OrdinalOf(device));
  std::shared_ptr<CudaDevice>& opened = opened_[ordinal];
  if (opened == nullptr || opened->gone()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(opened, CudaDevice::Open(driver_, ordinal, image_, options_));
    for (const auto& [number, other] : opened_) {
      if (other == nullptr || other == opened || other->gone()) continue;
      opened->AllowPeerAccess(*other);
      other->AllowPeerAccess(*opened);
    }
  }
  return std::shared_ptr<DeviceOps>(opened);
}

}  // namespace tensormount::gpu
