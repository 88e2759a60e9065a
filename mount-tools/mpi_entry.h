// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_MPI_ENTRY_H_
#define TENSORMOUNT_MOUNT_TOOLS_MPI_ENTRY_H_

#include <memory>

#include "tensormount/mpi.h"

// What the command looks up in its MPI module. Both are built together: types of C++ may pass, once
// the versions are found to be equal.
extern "C" {
TENSORMOUNT_EXPORT extern const char tensormount_mpi_module_version[];
// Replaces *out by what MpiSession::Init() answers.
TENSORMOUNT_EXPORT void tensormount_mpi_module_init(
    tensormount::Result<std::unique_ptr<tensormount::MpiSession>>* out);
}

#endif  // TENSORMOUNT_MOUNT_TOOLS_MPI_ENTRY_H_
