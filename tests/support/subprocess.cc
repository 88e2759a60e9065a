// SPDX-License-Identifier: Apache-2.0
#include "tests/support/subprocess.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

extern "C" char** environ;

namespace tensormount {
namespace {

using Clock = std::chrono::steady_clock;

int MemoryFile(const char* name, const std::string& bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || (!bytes.empty() &&
                 write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))) {
    std::perror("memfd");
    std::abort();
  }
  (void)lseek(fd, 0, SEEK_SET);  // Cannot fail on a regular file.
  return fd;
}

std::string Contents(int fd) {
  std::string bytes;
  char buffer[1 << 14];
  for (;;) {
    const ssize_t n = pread(fd, buffer, sizeof(buffer), static_cast<off_t>(bytes.size()));
    if (n <= 0) return bytes;
    bytes.append(buffer, static_cast<std::size_t>(n));
  }
}

std::vector<std::string> Environment(
    const std::vector<std::pair<std::string, std::string>>& changes) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    bool replaced = false;
    for (const auto& [name, value] : changes) {
      replaced = replaced || std::strncmp(*entry, (name + "=").c_str(), name.size() + 1) == 0;
    }
    if (!replaced) result.emplace_back(*entry);
  }
  for (const auto& [name, value] : changes) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

std::ostream& operator<<(std::ostream& os, const ProcessOutcome& outcome) {
  if (outcome.timed_out)
    os << "killed at its deadline";
  else if (outcome.signal != 0)
    os << "ended by signal " << outcome.signal;
  else
    os << "exit status " << outcome.exit_code;
  return os << "\n--- stdout\n" << outcome.out << "--- stderr\n" << outcome.err << "---\n";
}

Subprocess::Subprocess(const std::vector<std::string>& command, ProcessOptions options)
    : deadline_(Clock::now() + options.deadline) {
  // Everything that allocates happens before the fork: other threads may hold the heap's lock.
  std::vector<std::string> arguments = command;
  std::vector<std::string> environment = Environment(options.environment);
  const std::vector<char*> argv = Pointers(arguments);
  const std::vector<char*> envp = Pointers(environment);
  const int in_fd = MemoryFile("stdin", options.stdin_bytes);
  out_fd_ = MemoryFile("stdout", "");
  err_fd_ = MemoryFile("stderr", "");
  // Appending, so that parents and children that share the file never overwrite each other.
  (void)fcntl(out_fd_, F_SETFL, O_APPEND);  // Checked by every test that reads output.
  (void)fcntl(err_fd_, F_SETFL, O_APPEND);
  pid_ = fork();
  if (pid_ < 0) {
    std::perror("fork");
    std::abort();
  }
  if (pid_ == 0) {
    setpgid(0, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    dup2(in_fd, 0);
    dup2(out_fd_, 1);
    dup2(err_fd_, 2);
    if (options.working_folder.empty() || chdir(options.working_folder.c_str()) == 0) {
      execvpe(argv[0], argv.data(), envp.data());
    }
    const char* reason = strerrordesc_np(errno);
    for (const char* text : {static_cast<const char*>(argv[0]), ": cannot start: ", reason, "\n"}) {
      (void)!write(2, text, std::strlen(text));  // Nobody is left to tell.
    }
    _exit(127);
  }
  setpgid(pid_, pid_);
  close(in_fd);
}

Subprocess::~Subprocess() {
  if (!outcome_) {
    SignalGroup(SIGKILL);
    int wait_status = 0;
    while (waitpid(pid_, &wait_status, 0) < 0 && errno == EINTR) {
    }
  }
  close(out_fd_);
  close(err_fd_);
}

void Subprocess::Signal(int signal) const {
  if (!outcome_) (void)kill(pid_, signal);  // A zombie at worst: its pid is not reused.
}

void Subprocess::SignalGroup(int signal) const {
  if (!outcome_) (void)kill(-pid_, signal);  // Likewise.
}

ProcessOutcome Subprocess::Reap(int wait_status, bool timed_out) {
  // Whatever the process left behind in its group ends with it.
  (void)kill(-pid_, SIGKILL);  // ESRCH is the good case.
  ProcessOutcome outcome;
  if (WIFEXITED(wait_status)) outcome.exit_code = WEXITSTATUS(wait_status);
  if (WIFSIGNALED(wait_status)) outcome.signal = WTERMSIG(wait_status);
  outcome.timed_out = timed_out;
  outcome.out = out();
  outcome.err = err();
  outcome_ = outcome;
  return outcome;
}

std::optional<ProcessOutcome> Subprocess::WaitFor(std::chrono::milliseconds patience) {
  if (outcome_) return outcome_;
  const Clock::time_point end = Clock::now() + patience;
  auto pause = std::chrono::microseconds(200);
  for (;;) {
    int wait_status = 0;
    if (waitpid(pid_, &wait_status, WNOHANG) == pid_) return Reap(wait_status, false);
    if (Clock::now() >= end) return std::nullopt;
    std::this_thread::sleep_for(pause);
    if (pause < std::chrono::milliseconds(10)) pause *= 2;
  }
}

ProcessOutcome Subprocess::Wait() {
  const auto left = deadline_ - Clock::now();
  if (auto outcome = WaitFor(std::chrono::duration_cast<std::chrono::milliseconds>(left))) {
    return *outcome;
  }
  SignalGroup(SIGKILL);
  int wait_status = 0;
  while (waitpid(pid_, &wait_status, 0) < 0 && errno == EINTR) {
  }
  return Reap(wait_status, true);
}

std::string Subprocess::out() const { return Contents(out_fd_); }
std::string Subprocess::err() const { return Contents(err_fd_); }

ProcessOutcome RunProcess(const std::vector<std::string>& command, ProcessOptions options) {
  Subprocess process(command, std::move(options));
  return process.Wait();
}

std::string BuiltProgram(const std::string& name) { return TENSORMOUNT_BUILD_BIN "/" + name; }

std::string SourcePath(const std::string& relative) { return TENSORMOUNT_SOURCE "/" + relative; }

}  // namespace tensormount
