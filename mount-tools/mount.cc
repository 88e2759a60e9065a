// SPDX-License-Identifier: Apache-2.0
// `tensormount mount` and `unmount`: options to MountOptions, the fork into the background, and its
// first words; see commands.h.
//
//   parent                                   child (the daemon)
//   resolve paths, check options
//   fork before any thread exists            setsid, chdir /, standard streams to /dev/null
//   wait on a pipe, 60 s at most             start the session, write the outcome into the pipe
//   print it, exit                           serve until unmounted or a signal
//
// In the foreground there is one process and no pipe; everything else is the same.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <malloc.h>
#include <map>
#include <optional>
#include <poll.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "fs/mount/mount_session.h"
#include "mount-tools/commands.h"
#include "mount-tools/daemon_log.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

// How long the parent waits for its daemon to say that the mount answers.
constexpr int kStartSeconds = 60;

template <typename T>
// The value of an option that is one of some words; the error names them all.
Result<T> Choose(const std::map<std::string, T>& choices, const std::string& option,
                 const std::string& text) {
  const auto it = choices.find(text);
  if (it != choices.end()) return it->second;
  std::string names;
  for (const auto& [name, value] : choices) names += (names.empty() ? "" : ", ") + name;
  return Status(Code::kInvalidArgument, fmt::format("{} {}: one of {}", option, text, names));
}

Result<fs::MountOptions> MakeMountOptions(const MountArgs& args, const Terminal& terminal) {
  using Tier = fs::MountOptions::Tier;
  using Verify = fs::ServeVerify;
  fs::MountOptions options;
  FileSystem& host = HostFileSystem();
  // Taken before the daemon leaves this folder, and "latest" once.
  for (const std::string& root : terminal.roots) {
    Result<std::string> resolved = host.Resolve(root);
    if (!resolved.ok()) return resolved.status().WithContext("--root");
    options.roots.push_back(std::move(resolved).value());
  }
  Terminal quiet;  // What a daemon has to say goes to its log.
  quiet.roots = options.roots;
  quiet.file = terminal.file;
  const Result<FoundSource> found = FindNamed(host, args.source, quiet);
  if (found.status().code() == Code::kUnsupported) {
    const auto entries = host.List(args.source);
    if (entries.ok() && entries.value().empty()) {
      return found.status().WithContext(
          fmt::format("`tensormount init {}` makes it a store, which can be mounted and saved into",
                      args.source));
    }
  }
  if (!found.ok()) return found.status();
  const FoundSource& source = found.value();
  options.source = source.path;
  for (const std::string& warning : source.warnings) Log(LogLevel::kWarning, warning);
  // A daemon that was killed leaves a mount point that answers ENOTCONN to everything: mounting
  // again must work without an unmount.
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool dead, fs::ClearDeadMount(args.mount_point));
  if (dead) Log(LogLevel::kWarning, args.mount_point + ": took away a mount whose daemon is gone");
  TENSORMOUNT_RETURN_IF_ERROR(CheckIsPath(args.mount_point));
  auto mount_point = host.Resolve(args.mount_point);
  if (!mount_point.ok()) {
    return Status(mount_point.status().code(),
                  fmt::format("mount point {}: no such folder", args.mount_point));
  }
  options.mount_point = mount_point.value();
  TENSORMOUNT_ASSIGN_OR_RETURN(options.map, ReadKeyMap(host, args.map));
  TENSORMOUNT_ASSIGN_OR_RETURN(options.hf.rules, ReadKeyMap(host, args.hf_rules));
  TENSORMOUNT_ASSIGN_OR_RETURN(options.hf.part_bytes, fs::ParsePartSize(args.hf_part_size));
  options.list_views = args.views;
  options.allow_other = args.allow_other;
  options.read_only = args.read_only;
  TENSORMOUNT_ASSIGN_OR_RETURN(options.tier, Choose<Tier>({{"auto", Tier::kAuto},
                                                           {"passthrough", Tier::kPassthrough},
                                                           {"daemon", Tier::kDaemon}},
                                                          "--tier", args.tier));
  TENSORMOUNT_ASSIGN_OR_RETURN(options.verify, Choose<Verify>({{"off", Verify::kOff},
                                                               {"first", Verify::kFirst},
                                                               {"always", Verify::kAlways}},
                                                              "--verify", args.verify));
  return options;
}

// Mounts and serves until unmounted. `started` is told once, with the outcome of the start.
Status Serve(const fs::MountOptions& options, const std::function<void(const Status&)>& started) {
  // Signals are taken by a thread of their own: a handler could do nothing useful. Blocked before
  // the session's threads start, so that they inherit it.
  // SIGHUP as well: who closes a terminal with a foreground mount wants it gone.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  auto session = fs::MountSession::Start(HostFileSystem(), options);
  started(session.status());
  if (!session.ok()) return session.status();
  std::atomic<bool> done{false};
  // Stop() ends the session, and with it Wait below.
  std::thread watcher([&] {
    // Once whoever waited for the mount has read from it, what opening took and gave back is the
    // kernel's again, and so is what is freed later (tm_main.cc).
    const timespec soon{.tv_sec = 0, .tv_nsec = 300'000'000};
    int signal = sigtimedwait(&signals, nullptr, &soon);
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 20);
    malloc_trim(0);
    while (signal < 0) {
      signal = sigwaitinfo(&signals, nullptr);
      // A process that is stopped and continued (a debugger, a frozen container) hears EINTR.
      if (signal < 0 && errno != EINTR) break;
    }
    if (done || signal < 0) return;
    Log(LogLevel::kInfo, fmt::format("signal {}: unmounting {}", signal, options.mount_point));
    session.value()->Stop();
  });
  const Status status = session.value()->Wait();
  // The signal that wakes the watcher is then not taken for one from outside.
  done = true;
  pthread_kill(watcher.native_handle(), SIGTERM);  // Where it still waits for one.
  watcher.join();
  return status;
}

// A parent that is gone is nobody's problem: SIGPIPE is ignored, and the mount serves on.
void WriteAll(int fd, const std::string& text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const ssize_t n = write(fd, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    at += static_cast<std::size_t>(n);
  }
}

// What the daemon reports through the pipe: code, errno, message.
// In text; the message comes last, since it may hold anything.
std::string EncodeOutcome(const Status& status) {
  return fmt::format("{} {} {}", static_cast<int>(status.code()), status.ToErrno(),
                     status.ok() ? "" : status.message());
}

// An empty text is a daemon that died before it could say anything.
Status DecodeOutcome(const std::string& text) {
  int code = 0;
  int err = 0;
  int at = 0;
  if (std::sscanf(text.c_str(), "%d %d %n", &code, &err, &at) < 2 || code < 0 ||
      code > static_cast<int>(Code::kInternal)) {
    return Status(Code::kInternal, "the mount daemon ended before the mount answered");
  }
  if (code == 0) return {};
  return Status::FromParts(static_cast<Code>(code), err, text.substr(static_cast<std::size_t>(at)));
}

// Ends by _exit: destructors and atexit handlers are the parent's, and its buffered output would be
// written twice.
[[noreturn]] void RunDaemon(const fs::MountOptions& options, const MountArgs& args,
                            bool log_level_given, int pipe_fd) {
  setsid();
  (void)!chdir("/");
  const int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (null_fd >= 0) {
    dup2(null_fd, STDIN_FILENO);
    dup2(null_fd, STDOUT_FILENO);
    dup2(null_fd, STDERR_FILENO);
  }
  // A log file was opened by the parent already, and is inherited.
  if (args.log_file.empty()) LogToSyslog();
  if (!log_level_given) SetLogLevel(LogLevel::kInfo);
  const Status status = Serve(options, [&](const Status& started) {
    WriteAll(pipe_fd, EncodeOutcome(started));
    close(pipe_fd);
    if (started.ok()) {
      Log(LogLevel::kInfo, fmt::format("mounted {} at {}", options.source, options.mount_point));
    }
  });
  if (!status.ok()) Log(LogLevel::kError, status.ToString());
  _exit(status.ok() ? kDone : kFailed);
}

void PrintMounted(const fs::MountOptions& options, pid_t pid, Terminal& terminal) {
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{
        {"mounted", options.mount_point}, {"source", options.source}, {"pid", pid}});
  } else if (!terminal.quiet) {
    terminal.Line(fmt::format("mounted {} at {}", options.source, options.mount_point));
  }
}

}  // namespace

int RunMount(const MountArgs& given, Terminal& terminal) {
  MountArgs args = given;
  if (!args.log_file.empty()) {
    // Opened here, where somebody can be told; the daemon leaves this folder.
    std::error_code failed;
    args.log_file = std::filesystem::absolute(args.log_file, failed).string();
    const Status opened = LogToFile(args.log_file);
    if (!opened.ok()) return terminal.Fail(opened);
  }
  auto made = MakeMountOptions(args, terminal);
  if (!made.ok()) return terminal.Fail(made.status());
  const fs::MountOptions options = made.value();

  if (args.foreground) {
    const Status status = Serve(options, [&](const Status& started) {
      if (!started.ok()) return;
      PrintMounted(options, getpid(), terminal);
      terminal.Flush();
    });
    return status.ok() ? kDone : terminal.Fail(status);
  }

  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return terminal.Fail(Status::FromErrno(errno, "make", "a pipe"));
  // Before the first thread starts: threads do not survive a fork.
  const pid_t pid = fork();
  if (pid < 0) return terminal.Fail(Status::FromErrno(errno, "start", "the mount daemon"));
  if (pid == 0) {
    close(ends[0]);
    RunDaemon(options, args, terminal.log_level.has_value(), ends[1]);
  }
  close(ends[1]);
  std::string text;
  char block[512];
  for (;;) {
    pollfd wait{.fd = ends[0], .events = POLLIN, .revents = 0};
    const int ready = poll(&wait, 1, kStartSeconds * 1000);
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) {
      // It hangs, in storage or in the kernel; what it has mounted by then, if anything, is a dead
      // mount, which the next `mount` takes away.
      kill(pid, SIGKILL);
      return terminal.Fail(
          Status(Code::kDeadlineExceeded, fmt::format("the mount at {} did not answer in {} s",
                                                      options.mount_point, kStartSeconds)));
    }
    const ssize_t n = read(ends[0], block, sizeof block);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    text.append(block, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  const Status status = DecodeOutcome(text);
  if (!status.ok()) {
    (void)waitpid(pid, nullptr, 0);  // It reports and ends; nothing to learn from its code.
    return terminal.Fail(status);
  }
  PrintMounted(options, pid, terminal);
  return terminal.Flush();
}

int RunUnmount(const UnmountArgs& args, Terminal& terminal) {
  if (!fs::IsMountPoint(args.mount_point)) {
    return terminal.Fail(Status(Code::kInvalidArgument,
                                fmt::format("{}: nothing is mounted here", args.mount_point)));
  }
  const Status status = fs::Unmount(args.mount_point, args.lazy, std::chrono::milliseconds(10'000));
  if (!status.ok()) {
    return terminal.Fail(status, status.code() == Code::kBusy ? "close what uses it, or pass --lazy"
                                                              : std::string_view());
  }
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{{"unmounted", args.mount_point}});
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
