// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_GPU_NCCL_SHIM_H_
#define TENSORMOUNT_TESTS_GPU_NCCL_SHIM_H_

#include <cstdint>

// What libnccl_shim.so exports beside NCCL's entry points, to be found with dlsym. NcclShim of
// nccl_shim_testing.h has them for tests.

extern "C" {

enum NcclShimAction {
  kNcclShimDelay = 1,   // The call, or what it begins, takes `value` microseconds longer.
  kNcclShimError,       // It returns `value`, and does nothing.
  kNcclShimHang,        // What it begins never ends; ncclCommAbort itself does not return.
  kNcclShimAsyncError,  // It succeeds, and then the communicator has the error `value`.
};

// Of the `at`-th call of this entry point (from 1; 0: each) by this rank (-1: any).
struct NcclShimFault {
  const char* call;
  int rank;
  int at;
  int action;
  int value;
};

void nccl_shim_add_fault(const NcclShimFault* fault);
void nccl_shim_clear_faults(void);
// No faults, counters at 0; what hangs goes on.
void nccl_shim_reset(void);
int nccl_shim_calls(const char* call);
// Communicators that are not destroyed.
int nccl_shim_live(void);
// The first call that NCCL forbids since reset, in words; empty: none.
const char* nccl_shim_misuse(void);
// The largest count that a send was called with.
std::uint64_t nccl_shim_largest(void);

// The "current device" of this thread; -1, as at first: one of its own for each rank.
void nccl_shim_set_device(int device);
void* nccl_shim_stream_create(void);
// Waits for what it was given.
void nccl_shim_stream_destroy(void* stream);
// What it was given so far, and whether that is done.
std::uint64_t nccl_shim_stream_mark(void* stream);
int nccl_shim_stream_done(void* stream, std::uint64_t mark);

}  // extern "C"

#endif  // TENSORMOUNT_TESTS_GPU_NCCL_SHIM_H_
