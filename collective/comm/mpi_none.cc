// SPDX-License-Identifier: Apache-2.0
#include "tensormount/mpi.h"

namespace tensormount {

bool MpiIsBuilt() { return false; }

Result<std::unique_ptr<MpiSession>> MpiSession::Init() {
  return Status(Code::kUnsupported, "this build of tensormount has no MPI");
}

}  // namespace tensormount
