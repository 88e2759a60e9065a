// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_NCCL_API_H_
#define TENSORMOUNT_GPU_NCCL_API_H_

#include <climits>
#include <cstddef>

// The entry points of NCCL that we call, in our own words: a program is built without NCCL's header
// and finds the library at run time (nccl_library.h). Sizes, numbers and types must be those of
// that header; tests/gpu/nccl_header_check.cc compares them where there is one. Streams of CUDA are
// handed through as pointers.

namespace tensormount::gpu {

struct NcclComm;  // NCCL's own.

// Numbers that newer versions add are errors, as all from 1 on but kInProgress.
enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  // 2.32 has it; 2.14 did not.
};

enum class NcclDataType : int { kUint8 = 1 };

struct NcclUniqueId {
  char internal[128];
};

// The members that 2.14 had, which was the first version with a configuration. Later ones only
// append, and read of this one what `size` says: so this is what each of them takes.
struct NcclConfig {
  static constexpr unsigned kMagic = 0xcafebeef;
  static constexpr unsigned kVersion = 21400;  // As kFirstNcclVersion.

  std::size_t size = sizeof(NcclConfig);
  unsigned magic = kMagic;
  unsigned version = kVersion;
  int blocking = INT_MIN;  // Not said.
};

// major * 10000 + minor * 100 + patch.
inline constexpr int kFirstNcclVersion = 21400;
// NCCL_SUSPEND_MEM: what is allocated on the device, and not needed to find it again.
inline constexpr int kNcclSuspendMemory = 1;

// Null: this version has none. Those above the line are in every version that we take.
struct NcclApi {
  NcclResult (*get_version)(int* version) = nullptr;
  const char* (*get_error_string)(NcclResult result) = nullptr;
  NcclResult (*get_unique_id)(NcclUniqueId* id) = nullptr;
  NcclResult (*comm_init_rank_config)(NcclComm** comm, int ranks, NcclUniqueId id, int rank,
                                      NcclConfig* config) = nullptr;
  NcclResult (*comm_get_async_error)(NcclComm* comm, NcclResult* error) = nullptr;
  NcclResult (*comm_finalize)(NcclComm* comm) = nullptr;
  NcclResult (*comm_destroy)(NcclComm* comm) = nullptr;
  NcclResult (*comm_abort)(NcclComm* comm) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*send)(const void* data, std::size_t count, NcclDataType type, int peer,
                     NcclComm* comm, void* stream) = nullptr;
  NcclResult (*recv)(void* data, std::size_t count, NcclDataType type, int peer, NcclComm* comm,
                     void* stream) = nullptr;
  // ----
  const char* (*get_last_error)(NcclComm* comm) = nullptr;
  NcclResult (*comm_revoke)(NcclComm* comm, int flags) = nullptr;
  NcclResult (*comm_suspend)(NcclComm* comm, int flags) = nullptr;
  NcclResult (*comm_resume)(NcclComm* comm) = nullptr;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_NCCL_API_H_
