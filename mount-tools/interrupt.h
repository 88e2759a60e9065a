// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_INTERRUPT_H_
#define TENSORMOUNT_MOUNT_TOOLS_INTERRUPT_H_

#include <atomic>
#include <csignal>

#include "tensormount/status.h"

namespace tensormount::tools {

// Ctrl-C for a command that writes. While an object exists, the first SIGINT, SIGTERM or SIGHUP
// only sets a flag, which the command checks after each block so that it can end cleanly; the same
// signal a second time ends the process at once. Signals that were ignored before (nohup) stay
// ignored. System calls are restarted, so storage that hangs delays the clean end, but the second
// signal still ends the process.
//
// Signal handlers belong to the process, so only one object may exist at a time. Make it on the
// main thread, before ranks start.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // The flag, for the option `cancel` of long operations. Valid as long as the program runs.
  const std::atomic<bool>* flag() const;
  // kCancelled if the flag is set. Progress callbacks (`watch`) return it to end an operation.
  Status Check() const;
  // The exit status of a command that ended with `failure`: 128 + the signal if a signal caused the
  // failure (kCancelled), else `status`.
  int ExitStatus(const Status& failure, int status) const;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
  struct sigaction before_[3];
};

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_INTERRUPT_H_
