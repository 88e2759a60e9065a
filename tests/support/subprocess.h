// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_SUBPROCESS_H_
#define TENSORMOUNT_TESTS_SUPPORT_SUBPROCESS_H_

#include <chrono>
#include <optional>
#include <ostream>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

namespace tensormount {

struct ProcessOutcome {
  int exit_code = -1;  // -1 where a signal ended it.
  int signal = 0;      // 0 where it exited by itself.
  bool timed_out = false;
  std::string out;  // What it wrote, whole.
  std::string err;
};

// The outcome with its output, for failure messages.
std::ostream& operator<<(std::ostream& os, const ProcessOutcome& outcome);

struct ProcessOptions {
  // At its end the whole process group is killed.
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  // Added to (or replacing in) the environment.
  std::vector<std::pair<std::string, std::string>> environment;
  std::string stdin_bytes;
  std::string working_folder;  // Empty: that of the caller.
};

// A child process in a process group of its own. Its output is collected by WaitFor/Wait (into
// unlinked temporary files, so that a full pipe never stops it). Destroying a running one kills its
// group. Thread-compatible.
class Subprocess {
 public:
  // `command[0]` is looked up in PATH. A command that cannot be started exits with 127 and says so
  // on its standard error.
  explicit Subprocess(const std::vector<std::string>& command, ProcessOptions options = {});
  ~Subprocess();
  Subprocess(const Subprocess&) = delete;
  Subprocess& operator=(const Subprocess&) = delete;

  pid_t pid() const { return pid_; }

  // Sends `signal` to the process alone, or to its whole group.
  void Signal(int signal) const;
  void SignalGroup(int signal) const;

  // Its outcome once it has ended; nothing where it still runs after `patience`.
  std::optional<ProcessOutcome> WaitFor(std::chrono::milliseconds patience);

  // Waits until the deadline of its options, counted from its start, and kills the group then.
  ProcessOutcome Wait();

  // What it has written so far.
  std::string out() const;
  std::string err() const;

 private:
  ProcessOutcome Reap(int wait_status, bool timed_out);

  pid_t pid_ = -1;
  std::chrono::steady_clock::time_point deadline_;
  int out_fd_ = -1;
  int err_fd_ = -1;
  std::optional<ProcessOutcome> outcome_;
};

// Runs a command to its end or to its deadline.
ProcessOutcome RunProcess(const std::vector<std::string>& command, ProcessOptions options = {});

// Of the build: the folder that holds the programs (build/<preset>/bin), with a "/" and `name`.
std::string BuiltProgram(const std::string& name);

// A path in the source tree.
std::string SourcePath(const std::string& relative);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_SUBPROCESS_H_
