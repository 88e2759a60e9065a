// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_CUDA_API_H_
#define TENSORMOUNT_GPU_CUDA_API_H_

#include <cstddef>
#include <cstdint>

// Our own declarations of the CUDA driver API. With them all of gpu/ except kernels.cu and
// cuda_module.cc compiles without a CUDA toolkit, under every sanitizer, and tests can implement a
// driver (tests/gpu/fake_cuda.cc). With a toolkit, tests/gpu/cuda_header_check.cc compares them
// with its header.
// Source: CUDA Driver API reference, functions as of CUDA 12.0.

namespace tensormount::gpu::cuda {

using Result = int;  // 0: success.
inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kDeviceUnavailable = 46;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kNoBinaryForGpu = 209;
inline constexpr Result kEccUncorrectable = 214;
inline constexpr Result kNvlinkUncorrectable = 220;
inline constexpr Result kContained = 226;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotReady = 600;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kLaunchTimeout = 702;
inline constexpr Result kContextIsDestroyed = 709;
inline constexpr Result kAssert = 710;
inline constexpr Result kHardwareStackError = 714;
inline constexpr Result kIllegalInstruction = 715;
inline constexpr Result kMisalignedAddress = 716;
inline constexpr Result kInvalidAddressSpace = 717;
inline constexpr Result kInvalidPc = 718;
inline constexpr Result kLaunchFailed = 719;
inline constexpr Result kTensorMemoryLeak = 721;
inline constexpr Result kNotPermitted = 800;
inline constexpr Result kMpsRpcFailure = 806;
inline constexpr Result kMpsClientTerminated = 810;
inline constexpr Result kCaptureUnsupported = 900;
inline constexpr Result kCaptureImplicit = 906;
inline constexpr Result kExternalDevice = 911;
inline constexpr Result kUnknown = 999;

using Device = int;
using Address = std::uint64_t;  // Device memory.
struct ContextRep;
using Context = ContextRep*;
struct StreamRep;
using Stream = StreamRep*;
struct EventRep;
using Event = EventRep*;
struct ModuleRep;
using Module = ModuleRep*;
struct FunctionRep;
using Function = FunctionRep*;
struct PoolRep;
using Pool = PoolRep*;
struct Uuid {
  std::uint8_t bytes[16];
};
// Of memory pools: a place of memory (CUmemLocation), the properties of a pool (CUmemPoolProps),
// and the access of a device to a pool (CUmemAccessDesc).
struct Location {
  int type = 0;
  int ordinal = 0;
};
struct PoolProperties {
  int type = 0;     // Type of memory.
  int handles = 0;  // Handle types for other processes.
  Location location;
  void* security = nullptr;
  std::size_t most_bytes = 0;
  std::uint8_t reserved[56] = {};
};
struct PoolAccess {
  Location location;
  int flags = 0;
};

// Special handles of the default streams.
inline constexpr std::uintptr_t kLegacyStream = 1;
inline constexpr std::uintptr_t kPerThreadStream = 2;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kRegisterPortable = 1;

inline constexpr int kPinnedAllocation = 1;
inline constexpr int kLocationDevice = 1;
inline constexpr int kAccessReadWrite = 3;

inline constexpr int kCaptureNone = 0;         // Capture status of a stream.
inline constexpr int kCaptureModeRelaxed = 2;  // Capture mode of a thread.

inline constexpr int kPointerMemoryType = 2;
inline constexpr int kPointerIsManaged = 8;
inline constexpr int kPointerDeviceOrdinal = 9;
inline constexpr unsigned kMemoryHost = 1;
inline constexpr unsigned kMemoryDevice = 2;

inline constexpr int kAttributeMajor = 75;
inline constexpr int kAttributeMinor = 76;
inline constexpr int kAttributeMemoryPools = 115;
inline constexpr int kAttributeHostNumaId = 134;

// Functions and the API version requested for them: X(name, parameters).
inline constexpr int kVersion = 12000;
#define TENSORMOUNT_CUDA_FUNCTIONS(X)                                                             \
  X(cuInit, (unsigned flags))                                                                     \
  X(cuDriverGetVersion, (int* version))                                                           \
  X(cuGetErrorName, (Result error, const char** name))                                            \
  X(cuGetErrorString, (Result error, const char** words))                                         \
  X(cuDeviceGetCount, (int* count))                                                               \
  X(cuDeviceGet, (Device * device, int ordinal))                                                  \
  X(cuDeviceGetName, (char* name, int bytes, Device device))                                      \
  X(cuDeviceGetUuid, (Uuid * uuid, Device device))                                                \
  X(cuDeviceGetAttribute, (int* value, int attribute, Device device))                             \
  X(cuDeviceCanAccessPeer, (int* can, Device device, Device peer))                                \
  X(cuDevicePrimaryCtxRetain, (Context * context, Device device))                                 \
  X(cuDevicePrimaryCtxRelease, (Device device))                                                   \
  X(cuCtxPushCurrent, (Context context))                                                          \
  X(cuCtxPopCurrent, (Context * context))                                                         \
  X(cuCtxGetId, (Context context, std::uint64_t * id))                                            \
  X(cuCtxGetStreamPriorityRange, (int* least, int* greatest))                                     \
  X(cuThreadExchangeStreamCaptureMode, (int* mode))                                               \
  X(cuModuleLoadData, (Module * module, const void* image))                                       \
  X(cuModuleUnload, (Module module))                                                              \
  X(cuModuleGetFunction, (Function * function, Module module, const char* name))                  \
  X(cuModuleGetGlobal, (Address * address, std::size_t * bytes, Module module, const char* name)) \
  X(cuLaunchKernel, (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,        \
                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,       \
                     Stream stream, void** parameters, void** extra))                             \
  X(cuMemAlloc, (Address * address, std::size_t bytes))                                           \
  X(cuMemFree, (Address address))                                                                 \
  X(cuMemPoolCreate, (Pool * pool, const PoolProperties* properties))                             \
  X(cuMemPoolDestroy, (Pool pool))                                                                \
  X(cuMemPoolSetAccess, (Pool pool, const PoolAccess* access, std::size_t count))                 \
  X(cuMemAllocFromPoolAsync, (Address * address, std::size_t bytes, Pool pool, Stream stream))    \
  X(cuMemFreeAsync, (Address address, Stream stream))                                             \
  X(cuMemHostRegister, (void* data, std::size_t bytes, unsigned flags))                           \
  X(cuMemHostUnregister, (void* data))                                                            \
  X(cuPointerGetAttributes, (unsigned count, int* attributes, void** values, Address address))    \
  X(cuStreamCreateWithPriority, (Stream * stream, unsigned flags, int priority))                  \
  X(cuStreamDestroy, (Stream stream))                                                             \
  X(cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))                              \
  X(cuStreamIsCapturing, (Stream stream, int* status))                                            \
  X(cuEventCreate, (Event * event, unsigned flags))                                               \
  X(cuEventDestroy, (Event event))                                                                \
  X(cuEventRecord, (Event event, Stream stream))                                                  \
  X(cuEventQuery, (Event event))                                                                  \
  X(cuMemcpyHtoDAsync, (Address to, const void* from, std::size_t bytes, Stream stream))          \
  X(cuMemcpyDtoHAsync, (void* to, Address from, std::size_t bytes, Stream stream))                \
  X(cuMemsetD8Async, (Address to, unsigned char value, std::size_t bytes, Stream stream))

// Type of kGetProcAddress, the driver's entry point (since CUDA 12) that finds all other functions
// by name and API version.
using GetProcAddress = Result (*)(const char* name, void** function, int version,
                                  std::uint64_t flags, int* found);
inline constexpr char kGetProcAddress[] = "cuGetProcAddress_v2";
inline constexpr char kLibrary[] = "libcuda.so.1";
// Since CUDA 12.4; older drivers lack it.
inline constexpr char kFuncLoad[] = "cuFuncLoad";
inline constexpr int kFuncLoadVersion = 12040;
// Older versions of cuDeviceGetUuid return the UUID of the whole device for a MIG instance.
inline constexpr int kPhysicalUuidVersion = 9020;

// The functions of a driver.
struct Driver {
#define TENSORMOUNT_CUDA_MEMBER(name, parameters) Result(*name) parameters = nullptr;
  TENSORMOUNT_CUDA_FUNCTIONS(TENSORMOUNT_CUDA_MEMBER)
#undef TENSORMOUNT_CUDA_MEMBER
  // cuDeviceGetUuid of version kPhysicalUuidVersion.
  decltype(cuDeviceGetUuid) physical_uuid = nullptr;
  // Null: the driver is too old.
  Result (*cuFuncLoad)(Function function) = nullptr;
};

}  // namespace tensormount::gpu::cuda

#endif  // TENSORMOUNT_GPU_CUDA_API_H_
