// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BENCH_FORKED_GROUP_H_
#define TENSORMOUNT_BENCH_FORKED_GROUP_H_

#include <chrono>
#include <functional>
#include <memory>
#include <sys/types.h>
#include <vector>

#include "tensormount/communicator.h"

namespace tensormount {

// Ranks as forked processes that talk over socket pairs, or otherwise: the form in which a rank can
// really be killed or stopped. Fork before the first thread of the program starts.
class ForkedGroup {
 public:
  // Forks `ranks` children; each runs `body` with its communicator and ends by _exit(body's
  // result). The parent returns at once.
  static Result<std::unique_ptr<ForkedGroup>> Start(int ranks,
                                                    const std::function<int(Communicator&)>& body);
  // The same with communicators of another kind: `make` runs in the child, for its rank.
  using Maker = std::function<Result<std::unique_ptr<Communicator>>(int rank)>;
  static Result<std::unique_ptr<ForkedGroup>> Start(int ranks, const Maker& make,
                                                    const std::function<int(Communicator&)>& body);
  // Kills and reaps what still runs.
  virtual ~ForkedGroup() = default;

  virtual pid_t pid(int rank) const = 0;
  struct Exit {
    bool exited = false;  // False: still running at the deadline.
    int code = -1;        // Of a normal end.
    int signal = 0;       // That ended it.
  };
  // Reaps everybody who ends within `timeout`; one entry a rank.
  virtual std::vector<Exit> Wait(std::chrono::milliseconds timeout) = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BENCH_FORKED_GROUP_H_
