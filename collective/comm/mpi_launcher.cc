// SPDX-License-Identifier: Apache-2.0
// Whether an MPI launcher started this process (UnderMpiLauncher of tensormount/mpi.h). A file of
// its own, because it is called before MPI is initialized, and in builds without MPI.
#include <cstdlib>

#include "tensormount/mpi.h"

namespace tensormount {

bool UnderMpiLauncher() {
  // Set, in this order, by Open MPI; by MPICH, Intel MPI and Slurm's PMI (two names); by PMIx; by
  // MVAPICH.
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

}  // namespace tensormount
