// SPDX-License-Identifier: Apache-2.0
// mount_session.h in a build without libfuse: kUnsupported, in words.
#include "fs/mount/mount_session.h"

// Without libfuse.

namespace tensormount::fs {

Result<std::unique_ptr<MountSession>> MountSession::Start(FileSystem&, const MountOptions&) {
  return Status(Code::kUnsupported,
                "mounting is not built in: libfuse 3 was missing when tensormount was built");
}

}  // namespace tensormount::fs
