// SPDX-License-Identifier: Apache-2.0
// That what gpu/nccl_api.h says of NCCL is what its own header says. Compiled where there is one
// (TENSORMOUNT_NCCL_HEADER); there is nothing to run.
#include <climits>
#include <cstddef>
#include <nccl.h>
#include <type_traits>

#include "gpu/nccl_api.h"

namespace tensormount::gpu {
namespace {

// A type of the header, as we write it.
template <typename T>
struct Translate {
  using Type = T;
};
template <>
struct Translate<ncclResult_t> {
  using Type = NcclResult;
};
template <>
struct Translate<ncclResult_t*> {
  using Type = NcclResult*;
};
template <>
struct Translate<ncclDataType_t> {
  using Type = NcclDataType;
};
template <>
struct Translate<ncclComm_t> {
  using Type = NcclComm*;
};
template <>
struct Translate<ncclComm_t*> {
  using Type = NcclComm**;
};
template <>
struct Translate<ncclUniqueId> {
  using Type = NcclUniqueId;
};
template <>
struct Translate<ncclUniqueId*> {
  using Type = NcclUniqueId*;
};
template <>
struct Translate<ncclConfig_t*> {
  using Type = NcclConfig*;
};
template <>
struct Translate<cudaStream_t> {
  using Type = void*;
};
template <typename Out, typename... In>
struct Translate<Out (*)(In...)> {
  using Type = typename Translate<Out>::Type (*)(typename Translate<In>::Type...);
};

#define SAME_CALL(theirs, ours) \
  static_assert(std::is_same_v<Translate<decltype(&theirs)>::Type, decltype(NcclApi::ours)>)

SAME_CALL(ncclGetVersion, get_version);
SAME_CALL(ncclGetErrorString, get_error_string);
SAME_CALL(ncclGetUniqueId, get_unique_id);
SAME_CALL(ncclCommInitRankConfig, comm_init_rank_config);
SAME_CALL(ncclCommGetAsyncError, comm_get_async_error);
SAME_CALL(ncclCommFinalize, comm_finalize);
SAME_CALL(ncclCommDestroy, comm_destroy);
SAME_CALL(ncclCommAbort, comm_abort);
SAME_CALL(ncclGroupStart, group_start);
SAME_CALL(ncclGroupEnd, group_end);
SAME_CALL(ncclSend, send);
SAME_CALL(ncclRecv, recv);
SAME_CALL(ncclGetLastError, get_last_error);

#define SAME_NUMBER(theirs, ours) \
  static_assert(static_cast<long long>(theirs) == static_cast<long long>(ours))

SAME_NUMBER(ncclSuccess, NcclResult::kSuccess);
SAME_NUMBER(ncclUnhandledCudaError, NcclResult::kUnhandledCudaError);
SAME_NUMBER(ncclSystemError, NcclResult::kSystemError);
SAME_NUMBER(ncclInternalError, NcclResult::kInternalError);
SAME_NUMBER(ncclInvalidArgument, NcclResult::kInvalidArgument);
SAME_NUMBER(ncclInvalidUsage, NcclResult::kInvalidUsage);
SAME_NUMBER(ncclRemoteError, NcclResult::kRemoteError);
SAME_NUMBER(ncclInProgress, NcclResult::kInProgress);
SAME_NUMBER(ncclUint8, NcclDataType::kUint8);
static_assert(sizeof(ncclResult_t) == sizeof(NcclResult));
static_assert(sizeof(ncclDataType_t) == sizeof(NcclDataType));

static_assert(sizeof(ncclUniqueId) == sizeof(NcclUniqueId));
static_assert(alignof(ncclUniqueId) == alignof(NcclUniqueId));

// The beginning of theirs is ours.
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(alignof(NcclConfig) == alignof(ncclConfig_t));
static_assert(NCCL_VERSION(2, 14, 0) == NcclConfig::kVersion);
SAME_NUMBER(NcclConfig::kVersion, kFirstNcclVersion);
SAME_NUMBER(NCCL_CONFIG_UNDEF_INT, NcclConfig{}.blocking);

#define SAME_MEMBER(name)                                                    \
  static_assert(offsetof(ncclConfig_t, name) == offsetof(NcclConfig, name)); \
  static_assert(std::is_same_v<decltype(ncclConfig_t::name), decltype(NcclConfig::name)>)

SAME_MEMBER(size);
SAME_MEMBER(magic);
SAME_MEMBER(version);
SAME_MEMBER(blocking);
// As its own initializer has them.
constexpr ncclConfig_t kTheirConfig = NCCL_CONFIG_INITIALIZER;
SAME_NUMBER(kTheirConfig.magic, NcclConfig::kMagic);
SAME_NUMBER(kTheirConfig.blocking, NcclConfig{}.blocking);

#if defined(NCCL_REVOKE_DEFAULT)
SAME_CALL(ncclCommRevoke, comm_revoke);
SAME_NUMBER(NCCL_REVOKE_DEFAULT, 0);
#endif
#if defined(NCCL_SUSPEND_MEM)
SAME_CALL(ncclCommSuspend, comm_suspend);
SAME_CALL(ncclCommResume, comm_resume);
SAME_NUMBER(NCCL_SUSPEND_MEM, kNcclSuspendMemory);
#endif
#if NCCL_VERSION_CODE >= 23203
SAME_NUMBER(ncclTimeout, NcclResult::kTimeout);
#endif

}  // namespace
}  // namespace tensormount::gpu
