// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_MPI_MODULE_H_
#define TENSORMOUNT_MOUNT_TOOLS_MPI_MODULE_H_

#include <memory>
#include <string>

#include "tensormount/mpi.h"

// MPI is in a separate module (lib/tensormount/mpi.so beside bin/), which is opened only when MPI
// is used, so that the command also runs without an MPI installation.
namespace tensormount::tools {

// Opens the module and calls its MpiSession::Init(). kUnsupported, with the file and what to
// install, if the module is missing, has another version, or its MPI library cannot be opened. The
// module stays open until the process ends.
Result<std::unique_ptr<MpiSession>> InitMpi();

// The path of the module, or an error that tells why MPI is not available. Opens the module, but
// does not initialise MPI.
Result<std::string> FindMpi();

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_MPI_MODULE_H_
