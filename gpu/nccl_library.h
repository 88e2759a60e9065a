// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_GPU_NCCL_LIBRARY_H_
#define TENSORMOUNT_GPU_NCCL_LIBRARY_H_

#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "gpu/nccl_api.h"

namespace tensormount::gpu {

// NCCL as the process has it. Never closed: its threads may outlive whoever opened it. Thread-safe.
class NcclLibrary {
 public:
  // libnccl.so.2 that the process has loaded already (torch's), else the file that the
  // environment's TENSORMOUNT_NCCL names, else the one that the loader finds; with a path, that
  // file. In words: kUnavailable where there is none, kUnsupported where it is older than 2.14 or
  // lacks an entry point.
  static Result<std::shared_ptr<const NcclLibrary>> Open(const std::string& path = {});

  const NcclApi& api() const { return api_; }
  int version() const { return version_; }
  std::string VersionText() const;  // "2.32.3".

  // What `result` of `action` means to a caller; ok of success and in progress. `comm` may be null.
  Status ToStatus(NcclResult result, std::string_view action, NcclComm* comm) const;

 private:
  NcclLibrary() = default;

  NcclApi api_;
  int version_ = 0;
};

}  // namespace tensormount::gpu

#endif  // TENSORMOUNT_GPU_NCCL_LIBRARY_H_
