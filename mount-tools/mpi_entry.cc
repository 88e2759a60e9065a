// SPDX-License-Identifier: Apache-2.0
// The entry points of the command's MPI module (mpi_entry.h), which mpi_module.cc opens.
#include "mount-tools/mpi_entry.h"

#include <exception>

const char tensormount_mpi_module_version[] = TENSORMOUNT_VERSION;

void tensormount_mpi_module_init(
    tensormount::Result<std::unique_ptr<tensormount::MpiSession>>* out) {
  try {
    *out = tensormount::MpiSession::Init();
  } catch (const std::exception& e) {
    *out = tensormount::Status(tensormount::Code::kInternal, e.what());
  }
}
