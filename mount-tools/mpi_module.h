// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_MPI_MODULE_H_
#define TENSORMOUNT_MOUNT_TOOLS_MPI_MODULE_H_

#include <memory>
#include <string>

#include "tensormount/mpi.h"

// The command's MPI, in a file of its own (lib/tensormount/mpi.so beside bin/), which is opened
// only when MPI is asked for: so the command runs, and starts as fast, where no MPI is installed.
namespace tensormount::tools {

// MpiSession::Init() of the module. kUnsupported, with words that name the file and what to
// install, where it is not there, is of another version, or the MPI library that it needs cannot be
// opened. The module stays open for as long as the process lives.
Result<std::unique_ptr<MpiSession>> InitMpi();

// The module's file, or why MPI cannot be had; opens the module and does not initialise MPI.
Result<std::string> FindMpi();

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_MPI_MODULE_H_
