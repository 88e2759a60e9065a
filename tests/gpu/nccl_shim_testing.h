// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_GPU_NCCL_SHIM_TESTING_H_
#define TENSORMOUNT_TESTS_GPU_NCCL_SHIM_TESTING_H_

#include <cstdint>
#include <memory>
#include <string>

#include "tensormount/status.h"

#include "gpu/nccl_library.h"
#include "gpu/nccl_link.h"
#include "tests/gpu/nccl_shim.h"

namespace tensormount::gpu {

// The library of nccl_shim.cc, and what it has for tests. Resets it when made and when it goes.
class NcclShim {
 public:
  // That of 2.32, or one without what came after 2.14.
  enum class Version { kNew, kOld };
  explicit NcclShim(Version version = Version::kNew);
  ~NcclShim() { reset(); }
  NcclShim(const NcclShim&) = delete;
  NcclShim& operator=(const NcclShim&) = delete;

  static std::string PathOf(Version version);
  const Result<std::shared_ptr<const NcclLibrary>>& library() const { return library_; }
  // `device`: as the shim numbers them; `name`: as the transport compares them.
  std::shared_ptr<NcclStream> MakeStream(int device = -1, std::string name = {}) const;
  // Over a stream of its own where none is given.
  Result<std::unique_ptr<DeviceLink>> MakeLink(const NcclOptions& options = {},
                                               std::shared_ptr<NcclStream> stream = nullptr) const;

  void Fault(const char* call, int rank, int at, NcclShimAction action, int value = 0) const {
    const NcclShimFault fault{call, rank, at, action, value};
    add_fault(&fault);
  }
  void Fail(const char* call, int rank, int at, NcclResult result) const {
    Fault(call, rank, at, kNcclShimError, static_cast<int>(result));
  }

  void (*clear_faults)() = nullptr;
  void (*reset)() = nullptr;
  int (*calls)(const char* call) = nullptr;
  int (*live)() = nullptr;
  const char* (*misuse)() = nullptr;
  std::uint64_t (*largest)() = nullptr;

 private:
  friend class ShimStream;
  Result<std::shared_ptr<const NcclLibrary>> library_;
  void (*add_fault)(const NcclShimFault*) = nullptr;
  void (*set_device)(int) = nullptr;
  void* (*stream_create)() = nullptr;
  void (*stream_destroy)(void*) = nullptr;
  std::uint64_t (*stream_mark)(void*) = nullptr;
  int (*stream_done)(void*, std::uint64_t) = nullptr;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_TESTS_GPU_NCCL_SHIM_TESTING_H_
