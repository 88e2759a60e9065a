// SPDX-License-Identifier: Apache-2.0
// MountSession (mount_session.h) for builds without libfuse: Start returns an error.
#include "fs/mount/mount_session.h"

namespace tensormount::fs {

Result<std::unique_ptr<MountSession>> MountSession::Start(FileSystem&, const MountOptions& how) {
  return Start(how);
}

Result<std::unique_ptr<MountSession>> MountSession::Start(const MountOptions&) {
  return Status(
      Code::kUnsupported,
      "mounting is not supported by this build: libfuse 3 was missing when tensormount was built");
}

MountSession::~MountSession() = default;

Status MountSession::Wait() { return {}; }

void MountSession::Stop() {}

std::string MountSession::StatusJson() const { return "{}\n"; }

}  // namespace tensormount::fs
