// SPDX-License-Identifier: Apache-2.0
// Processes and pending signals of callers, from /proc/THREAD/status.
#include "fs/mount/callers.h"

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace tensormount::fs {
namespace {

constexpr std::uint64_t BitOf(int signal) { return std::uint64_t{1} << (signal - 1); }

// Signals whose default action ignores, stops or continues the process instead of ending it
// (signal(7)).
constexpr std::uint64_t kEndsNothing = BitOf(SIGCHLD) | BitOf(SIGCONT) | BitOf(SIGURG) |
                                       BitOf(SIGWINCH) | BitOf(SIGSTOP) | BitOf(SIGTSTP) |
                                       BitOf(SIGTTIN) | BitOf(SIGTTOU);

struct ThreadStatus {
  bool gone = false;  // The thread does not exist.
  char state = 0;     // State letter as in ps(1); 0 if unreadable.
  pid_t process = 0;
  // Signals pending for the thread or its process; bit N - 1 is signal N.
  std::uint64_t pending = 0;
  std::uint64_t ignored = 0;
  std::uint64_t caught = 0;
  std::uint64_t blocked = 0;
};

ThreadStatus StatusOf(pid_t thread) {
  ThreadStatus status;
  const std::string path = "/proc/" + std::to_string(thread) + "/status";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             std::fclose);
  if (!file) {
    status.gone = errno == ENOENT;
    return status;
  }
  char line[256];
  while (std::fgets(line, sizeof line, file.get()) != nullptr) {
    unsigned long long mask = 0;
    int number = 0;
    char letter = 0;
    if (std::sscanf(line, "Tgid: %d", &number) == 1) status.process = number;
    if (std::sscanf(line, "State: %c", &letter) == 1) status.state = letter;
    if (std::sscanf(line, "SigPnd: %llx", &mask) == 1) status.pending |= mask;
    if (std::sscanf(line, "ShdPnd: %llx", &mask) == 1) status.pending |= mask;
    if (std::sscanf(line, "SigBlk: %llx", &mask) == 1) status.blocked = mask;
    if (std::sscanf(line, "SigIgn: %llx", &mask) == 1) status.ignored = mask;
    if (std::sscanf(line, "SigCgt: %llx", &mask) == 1) status.caught = mask;
  }
  // The read fails with ESRCH, after any line, if the thread ends meanwhile.
  if (std::ferror(file.get()) != 0) status.gone = true;
  return status;
}

}  // namespace

pid_t ProcessOf(pid_t thread) { return thread <= 0 ? 0 : StatusOf(thread).process; }

// The kernel turns every signal that ends a process without a core dump into SIGKILL for all its
// threads, so SIGKILL is pending even if the sender used SIGTERM. Signals with a core dump
// (SIGQUIT) keep their number until a thread takes them.
bool IsBeingKilled(pid_t thread) {
  if (thread <= 0) return false;
  const ThreadStatus status = StatusOf(thread);
  if (status.gone || status.state == 'Z' || status.state == 'X') return true;
  if ((status.pending & BitOf(SIGKILL)) != 0) return true;
  return (status.pending & ~status.blocked & ~status.ignored & ~status.caught & ~kEndsNothing) != 0;
}

}  // namespace tensormount::fs
