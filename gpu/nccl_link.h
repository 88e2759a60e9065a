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

// What NCCL needs of a device: a stream of CUDA that nobody else gives work. Of one thread at a
// time, but Within, which any thread calls for itself.
class NcclStream {
 public:
  virtual ~NcclStream() = default;
  // The cudaStream_t.
  virtual void* handle() const = 0;
  // Which GPU it is of, the same text for each rank that is on it (its UUID); empty: not known.
  virtual std::string device() const = 0;
  // Makes `calls` with its device as the current one of this thread, from which NCCL takes it. The
  // thread may be the program's: what was current before is so again when this returns. Errors of
  // `calls`, which are not made where the device cannot be entered, with the reason.
  virtual Status Within(const std::function<Status()>& calls) = 0;
  // From now on Done speaks of what the stream was given before.
  virtual Status Mark() = 0;
  virtual Result<bool> Done() = 0;
};

struct NcclOptions {
  // NcclLibrary::Open's.
  std::string library;
  // Of one rank in one group, at most (one unit may be larger). Small ones cost launches; large
  // ones say less about where an exchange hangs.
  std::size_t group_units = 64;
  std::uint64_t group_bytes = std::uint64_t{256} << 20;
  // How long ncclCommRevoke may take before ncclCommAbort is called all the same, and how long the
  // destructor waits for a communicator that ends.
  std::chrono::milliseconds patience{2000};
};

// The way between GPUs over NCCL: a communicator of its own, never the trainer's, because a failure
// kills it. BulkTransport (collective/comm/bulk_transport.h) asks its mover.
//
// The communicator is made without waiting and asked again and again (ncclCommGetAsyncError), so
// that no call of it outlasts a deadline. Units go as ncclSend and ncclRecv, in groups that all
// ranks cut alike (NcclGroups); group after group, each when the one before has left the stream.
// NCCL's one-sided calls (ncclPutSignal) are not used: docs/bulk.md says why.
//
// A failure ends in ncclCommRevoke, where this version has it, and ncclCommAbort, on a thread of
// its own, because that call waits for other ranks of the machine. Settled says when it is over.
// Release suspends the communicator where this version can, and otherwise destroys it and makes
// another with the next exchange.
std::unique_ptr<DeviceLink> MakeNcclLink(std::shared_ptr<const NcclLibrary> library,
                                         std::shared_ptr<NcclStream> stream,
                                         const NcclOptions& options = {});

// The first unit of each group, rising. Worked out from the plan alone, so that all ranks have the
// same: a rank that were one group ahead could wait, while NCCL connects it, for one that waits for
// it. Units of 0 bytes count for nothing.
// Worked example, at most 2 units: 0->1, 0->2, 1->2, 0->1 gives {0, 3}: rank 0 is in three of them,
// so the third of its units begins a group.
std::vector<std::uint64_t> NcclGroups(const std::vector<BulkUnit>& plan, int ranks,
                                      const NcclOptions& options);

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_NCCL_LINK_H_
