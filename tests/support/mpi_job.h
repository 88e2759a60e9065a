// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_MPI_JOB_H_
#define TENSORMOUNT_TESTS_SUPPORT_MPI_JOB_H_

#include <memory>
#include <string>
#include <vector>

#include "tests/support/subprocess.h"

namespace tensormount {

// Empty where `program` ("tests/mpi_ranks") was built and MPI jobs can be run here, otherwise why
// not.
std::string WhyNoMpi(const std::string& program);

// Starts `program` on `ranks` oversubscribed processes. `options` are mpirun's own.
std::unique_ptr<Subprocess> StartMpi(const std::string& program, int ranks,
                                     const std::vector<std::string>& arguments,
                                     const std::vector<std::string>& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_MPI_JOB_H_
