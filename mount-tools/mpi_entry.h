// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_MPI_ENTRY_H_
#define TENSORMOUNT_MOUNT_TOOLS_MPI_ENTRY_H_

#include <memory>

#include "tensormount/mpi.h"

// The interface of the command's MPI module. It has C++ types, so the command compares the versions
// before it calls a function of the module.
extern "C" {
TENSORMOUNT_EXPORT extern const char tensormount_mpi_module_version[];
// Sets *out to the result of MpiSession::Init().
TENSORMOUNT_EXPORT void tensormount_mpi_module_init(
    tensormount::Result<std::unique_ptr<tensormount::MpiSession>>* out);
}

#endif  // TENSORMOUNT_MOUNT_TOOLS_MPI_ENTRY_H_
