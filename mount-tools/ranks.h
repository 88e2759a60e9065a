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

// Seconds, as options give them.
// Fractions are kept to milliseconds.
Timeouts MakeTimeouts(double liveness_seconds, double arrival_seconds);

// The ranks that a command runs on: MPI's under mpirun, otherwise threads of this process.
// With MPI this process is one rank; else it is all of them, a thread each, which is how the
// commands run on a laptop and in most tests. Ends MPI when it is destroyed.
class Ranks {
 public:
  // `wanted`: --ranks, 0 where it was not given. An error under mpirun; a build without MPI refuses
  // to run under it (it would run N times alone).
  static Result<Ranks> Make(int wanted);

  int size() const { return size_; }
  bool is_mpi() const { return mpi_ != nullptr; }
  // Whether this process prints the result: it has rank 0.
  bool prints() const { return !mpi_ || world_->rank() == 0; }
  // Ends a command that failed on the ranks. All of them have the same verdict, so one process
  // tells it, except where ranks could not be reached and each can only speak for itself.
  // Returns kFailed. kAlreadyExists gets a hint, because its remedy is an option.
  int Fail(Terminal& terminal, const Status& failure) const;
  // Runs `body` once a rank that lives in this process. The first failure by rank; after one under
  // MPI, the session is abandoned, because others may be gone.
  Status Run(const std::function<Status(Communicator&)>& body);

 private:
  int size_ = 1;
  // Null without mpirun. The communicator is destroyed before the session it is of.
  std::unique_ptr<MpiSession> mpi_;
  // Null without mpirun, too: threads get theirs from RunOnThreads.
  std::unique_ptr<Communicator> world_;
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_RANKS_H_
