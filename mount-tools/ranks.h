// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_RANKS_H_
#define TENSORMOUNT_MOUNT_TOOLS_RANKS_H_

#include <functional>
#include <memory>

#include "tensormount/communicator.h"
#include "tensormount/mpi.h"
#include "tensormount/status.h"

#include "mount-tools/terminal.h"

namespace tensormount::tools {

// Converts seconds to timeouts in milliseconds.
Timeouts MakeTimeouts(double liveness_seconds, double arrival_seconds);

// The ranks of a command. Under mpirun this process is one rank; without mpirun each rank is a
// thread of this process. The destructor ends MPI.
class Ranks {
 public:
  // `wanted`: --ranks, or 0 if the option was not given. Under mpirun any other value is an error,
  // because mpirun sets the number. Fails under mpirun if MPI is not available, because each
  // process would run as a job of its own.
  static Result<Ranks> Make(int wanted);

  int size() const { return size_; }
  bool is_mpi() const { return mpi_ != nullptr; }
  // Whether this process runs rank 0 and so prints the results.
  bool prints_results() const { return !mpi_ || world_->rank() == 0; }
  // Prints the error of a command that failed on the ranks, with a hint for some errors, and
  // returns kFailed. All ranks have the same error, so only rank 0 prints it; but after
  // kDeadlineExceeded or kUnavailable the ranks may not have reached each other, and every process
  // prints its error.
  int Fail(Terminal& terminal, const Status& failure) const;
  // Runs `body` once for each rank of this process and returns the failure of the lowest rank.
  // After a failure the MPI session is abandoned, because other ranks may be gone.
  Status Run(const std::function<Status(Communicator&)>& body);

 private:
  int size_ = 1;
  // Null without mpirun. Declared before world_, because members are destroyed in reverse order,
  // and world_ must be destroyed first.
  std::unique_ptr<MpiSession> mpi_;
  // Null without mpirun; threads get their communicators from RunOnThreads.
  std::unique_ptr<Communicator> world_;
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_RANKS_H_
