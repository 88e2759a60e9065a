// SPDX-License-Identifier: Apache-2.0
// The way into the command's MPI module, which mpi_module.cc opens. Not part of the command itself.
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
