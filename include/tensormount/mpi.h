// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MPI_H_
#define TENSORMOUNT_MPI_H_

#include <memory>

#include "tensormount/communicator.h"

namespace tensormount {

// Whether this build has an MPI communicator.
TENSORMOUNT_EXPORT bool MpiIsBuilt();

// Whether an MPI launcher started this process (from its environment; works without MPI). With it a
// program built without MPI can refuse to run under a launcher, instead of running N times alone.
TENSORMOUNT_EXPORT bool UnderMpiLauncher();

// Init initialises MPI with MPI_THREAD_MULTIPLE if the program has not; in this case the destructor
// finalises MPI (or logs why not: unfinished messages, ranks that do not come). After a failed
// collective call, Abandon() skips MPI_Finalize, which would wait for dead ranks.
class TENSORMOUNT_EXPORT MpiSession {
 public:
  // Makes the session of this process. kUnsupported without MPI, or if MPI provides less than
  // MPI_THREAD_MULTIPLE.
  static Result<std::unique_ptr<MpiSession>> Init();
  virtual ~MpiSession() = default;
  virtual void Abandon() = 0;
  // The communicator of all processes, over a duplicate of MPI_COMM_WORLD. Collective over all
  // processes.
  virtual Result<std::unique_ptr<Communicator>> World() = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_MPI_H_
