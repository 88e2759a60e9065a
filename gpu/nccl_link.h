// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_NCCL_LINK_H_
#define TENSORMOUNT_GPU_NCCL_LINK_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "device/bulk_mover.h"
#include "gpu/nccl_library.h"

namespace tensormount::gpu {

// The device side of NCCL: a CUDA stream that nothing else uses. Not thread-safe, except
// RunOnDevice, which any thread may call.
class NcclStream {
 public:
  virtual ~NcclStream() = default;
  // The stream as a cudaStream_t.
  virtual void* handle() const = 0;
  // The UUID of the GPU or MIG instance; empty: unknown.
  virtual std::string device() const = 0;
  // Runs `calls` with the device current on this thread, as NCCL requires, and restores the
  // previous device, because the thread may be the program's. Returns the error of `calls`, or an
  // error of making the device current, without running `calls`.
  virtual Status RunOnDevice(const std::function<Status()>& calls) = 0;
  // Mark marks the current work of the stream; Done reports whether the marked work is complete.
  virtual Status Mark() = 0;
  virtual Result<bool> Done() = 0;
};

struct NcclOptions {
  // Path of the library, passed to NcclLibrary::Open; empty: Open finds the library.
  std::string library;
  // Largest number of units and of bytes that one rank has in a group (a group of one unit may have
  // more bytes). Small groups cost launches; in a large group a hang is localised less precisely.
  std::size_t group_units = 64;
  std::uint64_t group_bytes = std::uint64_t{256} << 20;
  // How long ncclCommRevoke may take before ncclCommAbort is called anyway, and how long
  // BulkMover::Close waits for a communicator to end.
  std::chrono::milliseconds patience{2000};
};

// Transfers between GPUs over NCCL. The link has its own NCCL communicator, never the program's,
// because a failure destroys the communicator. BulkTransport (collective/comm/bulk_transport.h)
// calls the mover that the link makes.
//
// The communicator is nonblocking and polled (ncclCommGetAsyncError), so that no call exceeds a
// deadline. Units are sent with ncclSend and ncclRecv, in groups that are equal on all ranks
// (NcclGroups); a group starts when the previous one has left the stream. docs/bulk.md explains why
// NCCL's one-sided calls (ncclPutSignal) are not used.
//
// After a failure a separate thread calls ncclCommRevoke, if available, and ncclCommAbort. The
// thread is needed because ncclCommAbort waits for other ranks of the machine. Settled returns true
// once the thread has ended and the stream is idle. Release suspends the communicator if this
// version of NCCL can; otherwise Release destroys the communicator, and the next exchange makes
// another one.
std::unique_ptr<DeviceLink> MakeNcclLink(std::shared_ptr<const NcclLibrary> library,
                                         std::shared_ptr<NcclStream> stream,
                                         const NcclOptions& options = {});

// The first unit of each group, ascending. Computed from the plan only, so that all ranks agree: a
// rank one group ahead could deadlock with another while NCCL connects the two. Units of 0 bytes do
// not count. Example with group_units = 2: the units 0->1, 0->2, 1->2, 0->1 give {0, 3}, because
// rank 0 is in three of these units, so its third unit begins a group.
std::vector<std::uint64_t> NcclGroups(const std::vector<BulkUnit>& plan, int ranks,
                                      const NcclOptions& options);

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_NCCL_LINK_H_
