// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_GPU_FAKE_CUDA_H_
#define TENSORMOUNT_TESTS_GPU_FAKE_CUDA_H_

#include <cstddef>
#include <functional>
#include <string_view>

#include "gpu/cuda_api.h"

// A driver of CUDA for tests, in a library that is opened as libcuda is (libfake_cuda.so): devices
// of twin memory (tests/support/twin_memory.h), streams that are threads, and the kernels by their
// templates on the host. It aborts where a real one would be undefined: a handle of a context that
// is gone, an access outside of what was allocated, memory freed under work.
//
// What each function does is what its description in the CUDA Driver API reference says of the
// cases that tensormount meets; docs/devices.md has what it takes for granted.

namespace tensormount {

// What a test asks of it beside the functions of CUDA. For all of its devices where none is named.
struct FakeCuda {
  // As if other work of the program was on device `ordinal`. Null: the legacy default stream.
  void* (*make_stream)(int ordinal);
  void (*enqueue)(int ordinal, void* stream, std::function<void()> work);
  void (*synchronize)(int ordinal, void* stream);
  void (*begin_capture)(void* stream);
  void (*end_capture)(void* stream);
  std::byte* (*reveal)(const void* data);
  // Memory that was mapped in two parts, as expandable segments are; memory of host and device.
  std::byte* (*make_mapped)(int ordinal, std::size_t bytes);
  std::byte* (*make_managed)(std::size_t bytes);
  // cudaDeviceReset.
  void (*reset)(int ordinal);
  // A kernel of the program went wrong: from now on all that is asked of the context fails so.
  void (*break_context)(int ordinal, gpu::cuda::Result error);
  // Called with the name of each function, and with "run NAME" when its work is done; what it
  // returns is the failure (0: none), and it may wait, as what never ends does. From any thread.
  void (*set_fault)(std::function<gpu::cuda::Result(std::string_view what)> fault);
  void (*lie_about_hashes)(bool lies);
  void (*set_memory_limit)(std::size_t bytes);  // Of each device.
  void (*set_delay)(int microseconds);          // Of work of streams that are made from now on.
  // Until all that was given to streams is done.
  void (*quiesce)();
  // What there is of each kind, in all.
  struct Counts {
    std::size_t allocations = 0;  // That the program has not freed.
    std::size_t pinned_bytes = 0;
    std::size_t streams = 0;
    std::size_t events = 0;
    std::size_t launches = 0;  // Since the library was opened.
    std::size_t copies = 0;
    std::size_t crossed_bytes = 0;  // Between host and device.
  };
  Counts (*counts)();
  // Of the calling thread.
  int (*contexts_on_stack)();
  int (*capture_mode)();
  int (*current_device)();  // Its ordinal; -1: none.
  // How often a pool was opened to another device, since the library was opened.
  std::size_t (*pools_opened)();
};

// The name of `const FakeCuda* fake_cuda_control()` in the library.
inline constexpr char kFakeCudaControl[] = "fake_cuda_control";

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_GPU_FAKE_CUDA_H_
