// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_NCCL_API_H_
#define TENSORMOUNT_GPU_NCCL_API_H_

#include <climits>
#include <cstddef>

// Our own declarations of the NCCL entry points: programs are built without NCCL's header, and find
// the library at run time (nccl_library.h). Sizes, numbers and types must equal that header's;
// tests/gpu/nccl_header_check.cc compares them. CUDA streams are passed as pointers.

namespace tensormount::gpu {

struct NcclComm;  // Defined by NCCL.

// All results from 1 on are errors, except kInProgress; so are numbers that newer versions add.
enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  // Exists in NCCL 2.32, not yet in 2.14.
};

enum class NcclDataType : int { kUint8 = 1 };

struct NcclUniqueId {
  char internal[128];
};

// The members of version 2.14, the first with a configuration. Later versions append members and
// read only `size` bytes, so every version accepts this.
struct NcclConfig {
  static constexpr unsigned kMagic = 0xcafebeef;
  static constexpr unsigned kVersion = 21400;  // Equals kFirstNcclVersion.

  std::size_t size = sizeof(NcclConfig);
  unsigned magic = kMagic;
  unsigned version = kVersion;
  int blocking = INT_MIN;  // INT_MIN: not specified.
};

// The first supported version, as major * 10000 + minor * 100 + patch.
inline constexpr int kFirstNcclVersion = 21400;
// NCCL_SUSPEND_MEM: frees device memory that is not needed to resume.
inline constexpr int kNcclSuspendMemory = 1;

// NCCL's entry points. All accepted versions have the functions above the line "----"; those below
// are null if this version lacks them.
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
