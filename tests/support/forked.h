// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_FORKED_H_
#define TENSORMOUNT_TESTS_SUPPORT_FORKED_H_

#include <chrono>
#include <csignal>
#include <functional>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "base/deadline.h"

namespace tensormount {

// Whether a forked child, which ends without exit functions, says that `body` was true: false, too,
// where it does not end in time.
inline bool InForkedChild(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  if (child < 0) return false;
  const Deadline deadline = Deadline::After(std::chrono::seconds(20));
  int status = -1;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (deadline.Passed()) kill(child, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_FORKED_H_
