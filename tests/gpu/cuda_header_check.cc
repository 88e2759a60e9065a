// SPDX-License-Identifier: Apache-2.0
// Compares what gpu/cuda_api.h declares with the header of a toolkit, where one is there. Nothing
// of it runs: it compiles, or says what differs.
#include <cstddef>
#include <cuda.h>
#include <type_traits>

#include "gpu/cuda_api.h"

namespace {

namespace ours = tensormount::gpu::cuda;

// Whether two types are one on the wire: numbers of one size and sign (enumerations of theirs are
// int of ours), pointers to whatever has no definition, pointers and functions of such.
template <typename A, typename B, typename = void>
struct Alike : std::is_same<A, B> {};
template <typename A>
constexpr bool kNumber = std::is_integral_v<A> || std::is_enum_v<A>;
template <typename A, typename B>
struct Alike<A, B, std::enable_if_t<kNumber<A> && kNumber<B>>>
    : std::bool_constant<sizeof(A) == sizeof(B)> {};
template <typename A, typename B>
struct Alike<A*, B*, std::enable_if_t<!std::is_function_v<A> && !std::is_function_v<B>>>
    : std::bool_constant<std::is_const_v<A> == std::is_const_v<B> &&
                         ((std::is_class_v<std::remove_cv_t<A>> &&
                           std::is_class_v<std::remove_cv_t<B>>) ||
                          Alike<std::remove_cv_t<A>, std::remove_cv_t<B>>::value)> {};
template <typename R, typename... A, typename S, typename... B>
struct Alike<R (*)(A...), S (*)(B...)>
    : std::bool_constant<Alike<R, S>::value && sizeof...(A) == sizeof...(B)> {
  static constexpr bool AllAlike() {
    if constexpr (sizeof...(A) == sizeof...(B)) {
      return (Alike<A, B>::value && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = Alike<R, S>::value && AllAlike();
};

// Names of theirs are macros for the newest version of each, which may be another one than that
// which we ask for: these are the same ones today.
#define TENSORMOUNT_CHECK(name, parameters) \
  static_assert(Alike<decltype(ours::Driver::name), decltype(&::name)>::value, #name);
TENSORMOUNT_CUDA_FUNCTIONS(TENSORMOUNT_CHECK)
#undef TENSORMOUNT_CHECK
static_assert(Alike<decltype(ours::Driver::cuFuncLoad), decltype(&::cuFuncLoad)>::value);

static_assert(Alike<int, CUresult>::value && !Alike<int, long>::value);
static_assert(!Alike<int (*)(int), CUresult (*)(int, int)>::value);
static_assert(!Alike<int (*)(const char*), CUresult (*)(char*)>::value);

static_assert(sizeof(ours::Uuid) == sizeof(CUuuid));
static_assert(sizeof(ours::Location) == sizeof(CUmemLocation));
static_assert(sizeof(ours::PoolProperties) == sizeof(CUmemPoolProps));
static_assert(offsetof(ours::PoolProperties, location) == offsetof(CUmemPoolProps, location));
static_assert(sizeof(ours::PoolAccess) == sizeof(CUmemAccessDesc));
static_assert(offsetof(ours::PoolAccess, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(ours::kPinnedAllocation == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(ours::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(ours::kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(ours::kAttributeMemoryPools == CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
static_assert(ours::kSuccess == CUDA_SUCCESS);
static_assert(ours::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(ours::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(ours::kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(ours::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(ours::kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(ours::kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(ours::kNoBinaryForGpu == CUDA_ERROR_NO_BINARY_FOR_GPU);
static_assert(ours::kEccUncorrectable == CUDA_ERROR_ECC_UNCORRECTABLE);
static_assert(ours::kInvalidHandle == CUDA_ERROR_INVALID_HANDLE);
static_assert(ours::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ours::kIllegalAddress == CUDA_ERROR_ILLEGAL_ADDRESS);
static_assert(ours::kLaunchTimeout == CUDA_ERROR_LAUNCH_TIMEOUT);
static_assert(ours::kContextIsDestroyed == CUDA_ERROR_CONTEXT_IS_DESTROYED);
static_assert(ours::kAssert == CUDA_ERROR_ASSERT);
static_assert(ours::kHardwareStackError == CUDA_ERROR_HARDWARE_STACK_ERROR);
static_assert(ours::kIllegalInstruction == CUDA_ERROR_ILLEGAL_INSTRUCTION);
static_assert(ours::kMisalignedAddress == CUDA_ERROR_MISALIGNED_ADDRESS);
static_assert(ours::kInvalidAddressSpace == CUDA_ERROR_INVALID_ADDRESS_SPACE);
static_assert(ours::kInvalidPc == CUDA_ERROR_INVALID_PC);
static_assert(ours::kLaunchFailed == CUDA_ERROR_LAUNCH_FAILED);
static_assert(ours::kNotPermitted == CUDA_ERROR_NOT_PERMITTED);
static_assert(ours::kCaptureUnsupported == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
static_assert(ours::kCaptureImplicit == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(ours::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ours::kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(ours::kCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(ours::kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(ours::kPointerMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(ours::kPointerIsManaged == CU_POINTER_ATTRIBUTE_IS_MANAGED);
static_assert(ours::kDeviceUnavailable == CUDA_ERROR_DEVICE_UNAVAILABLE);
static_assert(ours::kNvlinkUncorrectable == CUDA_ERROR_NVLINK_UNCORRECTABLE);
static_assert(ours::kContained == CUDA_ERROR_CONTAINED);
static_assert(ours::kTensorMemoryLeak == CUDA_ERROR_TENSOR_MEMORY_LEAK);
static_assert(ours::kMpsRpcFailure == CUDA_ERROR_MPS_RPC_FAILURE);
static_assert(ours::kMpsClientTerminated == CUDA_ERROR_MPS_CLIENT_TERMINATED);
static_assert(ours::kExternalDevice == CUDA_ERROR_EXTERNAL_DEVICE);
static_assert(ours::kUnknown == CUDA_ERROR_UNKNOWN);
static_assert(ours::kPointerDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(ours::kMemoryHost == CU_MEMORYTYPE_HOST);
static_assert(ours::kMemoryDevice == CU_MEMORYTYPE_DEVICE);
static_assert(ours::kAttributeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ours::kAttributeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(ours::kAttributeHostNumaId == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);

}  // namespace
