// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MPI_H_
#define TENSORMOUNT_MPI_H_

#include <memory>

#include "tensormount/communicator.h"

namespace tensormount {

// Whether this build has an MPI communicator.
TENSORMOUNT_EXPORT bool MpiIsBuilt();

// Whether this process was started by an MPI launcher (looked up in its environment; MPI need not
// be built in). A build without MPI refuses to run so, instead of running N times alone.
TENSORMOUNT_EXPORT bool UnderMpiLauncher();

// Initialises MPI with MPI_THREAD_MULTIPLE where the program has not done so, and finalises it in
// that case when destroyed. After a failed collective use, Abandon() skips MPI_Finalize, which
// would wait for ranks that are gone.
class TENSORMOUNT_EXPORT MpiSession {
 public:
  // kUnsupported without MPI or where MPI gives less than MPI_THREAD_MULTIPLE.
  static Result<std::unique_ptr<MpiSession>> Init();
  virtual ~MpiSession() = default;
  virtual void Abandon() = 0;
  // On a duplicate of MPI_COMM_WORLD, made here: collective over all processes.
  virtual Result<std::unique_ptr<Communicator>> World() = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_MPI_H_
