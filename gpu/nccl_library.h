// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_NCCL_LIBRARY_H_
#define TENSORMOUNT_GPU_NCCL_LIBRARY_H_

#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "gpu/nccl_api.h"

namespace tensormount::gpu {

// The NCCL library of the process. Never closed, because its threads may outlive its users.
// Thread-safe.
class NcclLibrary {
 public:
  // Opens `path` if given; otherwise a libnccl.so.2 that the process has already loaded (torch's),
  // the file in the environment variable TENSORMOUNT_NCCL, or the one that the loader finds.
  // kUnavailable if there is no library, kUnsupported if it is older than 2.14 or lacks an entry
  // point.
  static Result<std::shared_ptr<const NcclLibrary>> Open(const std::string& path = {});

  const NcclApi& api() const { return api_; }
  int version() const { return version_; }
  std::string VersionText() const;  // "2.32.3".

  // The status of `action`, which returned `result`; ok for kSuccess and kInProgress. `comm` may be
  // null.
  Status ToStatus(NcclResult result, std::string_view action, NcclComm* comm) const;

 private:
  NcclLibrary() = default;

  NcclApi api_;
  int version_ = 0;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_NCCL_LIBRARY_H_
