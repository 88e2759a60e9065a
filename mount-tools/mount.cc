// SPDX-License-Identifier: Apache-2.0
// `tensormount mount` and `unmount` (commands.h): convert options to MountOptions, fork the daemon,
// and report whether the mount started.
//
//   parent                                   child (the daemon)
//   resolve paths, check options
//   fork before any thread exists            setsid, chdir /, standard streams to /dev/null
//   wait on a pipe, 60 s at most             start the session, write the outcome into the pipe
//   print it, exit                           serve until unmounted or a signal
//
// With --foreground there is only one process, and no pipe.
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
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/file_system_for.h"
#include "base/log.h"
#include "base/thread.h"
#include "fs/mount/mount_session.h"
#include "mount-tools/commands.h"
#include "mount-tools/daemon_log.h"
#include "mount-tools/source.h"
#include "remote/disk_cache.h"

namespace tensormount::tools {
namespace {

// How many seconds the parent waits for the daemon's report that the mount answers.
constexpr int kStartSeconds = 60;

template <typename T>
// Converts the value of an option that is one of several words; the error lists the words.
Result<T> Choose(const std::map<std::string, T>& choices, const std::string& option,
                 const std::string& text) {
  const auto it = choices.find(text);
  if (it != choices.end()) return it->second;
  std::string names;
  for (const auto& [name, value] : choices) names += (names.empty() ? "" : ", ") + name;
  return Status(Code::kInvalidArgument,
                fmt::format("{} {}: must be one of {}", option, text, names));
}

Result<std::string> ResolvePathArgument(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(path));
  return fs->Resolve(path);
}

Result<fs::MountOptions> MakeMountOptions(const MountArgs& args, const Terminal& terminal) {
  using Tier = fs::MountOptions::Tier;
  using Verify = fs::ServeVerify;
  fs::MountOptions options;
  // Relative paths and "latest" are resolved before the daemon changes its working directory.
  for (const std::string& root : terminal.roots) {
    Result<std::string> resolved = ResolvePathArgument(root);
    if (!resolved.ok()) return resolved.status().WithContext("--root");
    options.roots.push_back(std::move(resolved).value());
  }
  Terminal quiet;  // Has no --verbose, so that FindSourceArgument prints no notes.
  quiet.roots = options.roots;
  quiet.file = terminal.file;
  const Result<FoundSource> found = FindSourceArgument(args.source, quiet);
  if (found.status().code() == Code::kUnsupported) {
    const auto fs = FileSystemFor(args.source);
    const auto entries = fs.ok() ? fs.value()->List(args.source) : fs.status();
    if (entries.ok() && entries.value().empty()) {
      return found.status().WithMessage(
          fmt::format("{}; `tensormount init {}` makes this directory a store",
                      found.status().message(), args.source));
    }
  }
  if (!found.ok()) return found.status();
  const FoundSource& source = found.value();
  options.source = source.path;
  for (const std::string& warning : source.warnings) Log(LogLevel::kWarning, warning);
  // A daemon that was killed leaves a dead mount, which returns ENOTCONN for everything. It is
  // removed, so that the user need not unmount it.
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool dead, fs::ClearDeadMount(args.mount_point));
  if (dead)
    Log(LogLevel::kWarning, args.mount_point + ": unmounted a dead mount, whose daemon has exited");
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const host, FileSystemFor(args.mount_point));
  auto mount_point = host->Resolve(args.mount_point);
  if (!mount_point.ok()) {
    return Status(mount_point.status().code(),
                  fmt::format("mount point {}: no such directory", args.mount_point));
  }
  options.mount_point = mount_point.value();
  TENSORMOUNT_ASSIGN_OR_RETURN(options.map, ReadNameMap(args.map));
  TENSORMOUNT_ASSIGN_OR_RETURN(options.hf.beside, ReadFilesBeside(args.map));
  TENSORMOUNT_ASSIGN_OR_RETURN(options.hf.rules, ReadKeyMap(args.hf_rules));
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

// Mounts and serves until unmounted. `started` is called once, with the result of the start.
Status Serve(const fs::MountOptions& options, const std::function<void(const Status&)>& started) {
  // A thread waits for signals, because a signal handler could not end the session. The signals are
  // blocked before the session's threads start, so that those threads inherit the mask. SIGHUP is
  // included, because closing the terminal should end a foreground mount.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  auto session = fs::MountSession::Start(options);
  started(session.status());
  if (!session.ok()) return session.status();
  std::atomic<bool> done{false};
  // After a signal the watcher calls Stop(), which ends the session, so that Wait() below returns.
  Thread watcher([&] {
    // 0.3 s after the start, memory that was used for opening is returned to the kernel. From then
    // on, freed memory is returned sooner than with the settings of tm_main.cc.
    const timespec soon{.tv_sec = 0, .tv_nsec = 300'000'000};
    int signal = sigtimedwait(&signals, nullptr, &soon);
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 20);
    malloc_trim(0);
    while (signal < 0) {
      signal = sigwaitinfo(&signals, nullptr);
      // sigwaitinfo returns EINTR if the process was stopped and continued (debugger, frozen
      // container).
      if (signal < 0 && errno != EINTR) break;
    }
    if (done || signal < 0) return;
    Log(LogLevel::kInfo, fmt::format("signal {}: unmounting {}", signal, options.mount_point));
    session.value()->Stop();
  });
  const Status status = session.value()->Wait();
  // `done` tells the watcher that the SIGTERM below only wakes it.
  done = true;
  pthread_kill(watcher.native_handle(), SIGTERM);
  watcher.join();
  return status;
}

// Writes the text to a pipe. Errors are ignored: if the parent process has ended, the mount
// continues.
void WriteAll(int fd, const std::string& text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const ssize_t n = write(fd, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    at += static_cast<std::size_t>(n);
  }
}

// The text that the daemon sends through the pipe: code, errno and message. The message is last,
// because it may contain any characters.
std::string EncodeOutcome(const Status& status) {
  return fmt::format("{} {} {}", static_cast<int>(status.code()), status.ToErrno(),
                     status.ok() ? "" : status.message());
}

// Decodes the daemon's text. If it is empty, the daemon died before it sent a text.
Status DecodeOutcome(const std::string& text) {
  int code = 0;
  int err = 0;
  int at = 0;
  if (std::sscanf(text.c_str(), "%d %d %n", &code, &err, &at) < 2 || code < 0 ||
      code > static_cast<int>(Code::kInternal)) {
    return Status(Code::kInternal,
                  "the mount daemon exited before the mount answered; see its log (--log, or the "
                  "system log)");
  }
  if (code == 0) return {};
  return Status::FromParts(static_cast<Code>(code), err, text.substr(static_cast<std::size_t>(at)));
}

// Runs the daemon after the fork. Ends with _exit, because destructors, atexit handlers and
// buffered output belong to the parent.
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
  // With --log the parent has opened the log file, and the daemon inherits it.
  if (args.log_file.empty()) LogToSyslog();
  if (!log_level_given) SetLogLevel(LogLevel::kInfo);
  const Status status = Serve(options, [&](const Status& started) {
    WriteAll(pipe_fd, EncodeOutcome(started));
    close(pipe_fd);
    if (started.ok()) {
      Log(LogLevel::kInfo,
          fmt::format("mounted {} at {}", WithoutQuery(options.source), options.mount_point));
    }
  });
  if (!status.ok()) Log(LogLevel::kError, status.ToString());
  FinishDiskCaches();
  _exit(status.ok() ? kDone : kFailed);
}

void PrintMounted(const fs::MountOptions& options, pid_t pid, Terminal& terminal) {
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{
        {"mounted", options.mount_point}, {"source", options.source}, {"pid", pid}});
  } else if (!terminal.quiet) {
    terminal.Line(
        fmt::format("mounted {} at {}", WithoutQuery(options.source), options.mount_point));
  }
}

}  // namespace

int RunMount(const MountArgs& given, Terminal& terminal) {
  MountArgs args = given;
  if (!args.log_file.empty()) {
    // The log file is opened before the fork, so that an error is reported here. The path is made
    // absolute, because the daemon changes its working directory.
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
  // The fork comes before any thread starts, because a child has only the thread that called fork.
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
      // The daemon hangs in a call of storage or of the kernel and is killed. If it has already
      // mounted, a dead mount remains, which the next `mount` removes.
      kill(pid, SIGKILL);
      return terminal.Fail(
          Status(Code::kDeadlineExceeded, fmt::format("the mount at {} did not answer within {} s",
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
    // The daemon's error came through the pipe, so its exit status is not needed.
    (void)waitpid(pid, nullptr, 0);
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
    return terminal.Fail(status, status.code() == Code::kBusy
                                     ? "close the programs that use the mount, or pass --lazy"
                                     : std::string_view());
  }
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{{"unmounted", args.mount_point}});
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
