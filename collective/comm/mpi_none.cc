// SPDX-License-Identifier: Apache-2.0
// tensormount/mpi.h in a build without MPI: MpiSession::Init returns kUnsupported, so that programs
// link and report the reason.
#include "tensormount/mpi.h"

namespace tensormount {

bool MpiIsBuilt() { return false; }

Result<std::unique_ptr<MpiSession>> MpiSession::Init() {
  return Status(Code::kUnsupported, "this build of tensormount has no MPI");
}

}  // namespace tensormount
