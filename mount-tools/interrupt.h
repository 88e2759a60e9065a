// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_INTERRUPT_H_
#define TENSORMOUNT_MOUNT_TOOLS_INTERRUPT_H_

#include <atomic>
#include <csignal>

#include "tensormount/status.h"

namespace tensormount::tools {

// Ctrl-C for a command that writes. While one lives the first SIGINT, SIGTERM or SIGHUP only sets a
// flag, which the work looks at after each block, so that it can take away what it wrote; a second
// one ends the process at once, as without this. What the caller's shell ignores (nohup) stays
// ignored. System calls are restarted: storage that hangs holds up the clean end, not the second
// signal.
//
// Signals belong to the process: one at a time, on the main thread, made before there are ranks.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // What a long work takes as `cancel`. Lives as long as the program.
  const std::atomic<bool>* flag() const;
  // kCancelled once it is set: for a Watch.
  Status Check() const;
  // The exit status of a command that ended with `failure`: 128 + the signal, as of a process that
  // it killed, where a signal is why (kCancelled); otherwise `status`.
  int ExitStatus(const Status& failure, int status) const;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
  struct sigaction before_[3];
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_INTERRUPT_H_
