// SPDX-License-Identifier: Apache-2.0
// The ranks of a command (ranks.h): threads, or processes of mpirun.
#include "mount-tools/ranks.h"

#include <fmt/core.h>

#include "mount-tools/mpi_module.h"

namespace tensormount::tools {

Timeouts MakeTimeouts(double liveness_seconds, double arrival_seconds) {
  return {.liveness = std::chrono::milliseconds(static_cast<std::int64_t>(liveness_seconds * 1e3)),
          .arrival = std::chrono::milliseconds(static_cast<std::int64_t>(arrival_seconds * 1e3))};
}

Result<Ranks> Ranks::Make(int wanted) {
  Ranks out;
  // mpirun is recognised by its environment variables, so that MPI is not initialised outside of
  // it.
  if (UnderMpiLauncher()) {
    if (wanted != 0) {
      return Status(Code::kInvalidArgument,
                    "--ranks cannot be used under mpirun: mpirun -n sets the number of ranks");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(out.mpi_, InitMpi());
    TENSORMOUNT_ASSIGN_OR_RETURN(out.world_, out.mpi_->World());
    out.size_ = out.world_->size();
    return out;
  }
  if (wanted < 0 || wanted > 4096) {
    return Status(Code::kInvalidArgument, fmt::format("--ranks {}: must be 1 to 4096", wanted));
  }
  out.size_ = wanted == 0 ? 1 : wanted;
  return out;
}

int Ranks::Fail(Terminal& terminal, const Status& failure) const {
  // With these errors the ranks may not reach each other, so each process prints its own error.
  const bool alone =
      failure.code() == Code::kDeadlineExceeded || failure.code() == Code::kUnavailable;
  if (!prints_results() && !alone) return kFailed;
  // The error for a full disk has a cause that tells how to free space.
  const std::string_view hint =
      failure.code() == Code::kAlreadyExists ? "choose another name, or pass --if-exists replace"
      : failure.code() == Code::kResourceExhausted ? std::string_view(failure.fields().cause)
                                                   : std::string_view();
  return terminal.Fail(failure, hint);
}

Status Ranks::Run(const std::function<Status(Communicator&)>& body) {
  if (!mpi_) return RunOnThreads(size_, body);
  Status status = body(*world_);
  // Abandon() skips MPI_Finalize, which would wait for ranks that may be dead.
  if (!status.ok()) mpi_->Abandon();
  return status;
}

}  // namespace tensormount::tools
