// SPDX-License-Identifier: Apache-2.0
// `tensormount watch` (commands.h). CommitWatch finds the checkpoints on a thread of its own, also
// while a command runs. Commands run one at a time, without a shell.
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "index/store/commit_watch.h"
#include "mount-tools/commands.h"
#include "mount-tools/interrupt.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How soon a signal is noticed.
constexpr milliseconds kSignalSlice{250};
// Pauses between two looks at a running command: the first one, doubled up to the longest.
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{50};
// How long a command may run on after this program was told to end: until it is told to end, and
// until it is left alone.
constexpr std::chrono::seconds kTellChild{1};
constexpr std::chrono::seconds kLeaveChild{5};

// `text` with each "{}" replaced by `path`.
std::string WithPath(const std::string& text, const std::string& path) {
  std::string out;
  std::size_t at = 0;
  for (std::size_t next = 0; (next = text.find("{}", at)) != std::string::npos; at = next + 2) {
    out += text.substr(at, next - at) + path;
  }
  return out + text.substr(at);
}

// Starts a program, which PATH is searched for. Standard input is empty. With `output_to_errors`
// its standard output is our standard error.
Result<pid_t> StartProgram(const std::vector<std::string>& words, bool output_to_errors) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  if (const int failed = posix_spawn_file_actions_init(&actions); failed != 0) {
    return Status::FromErrno(failed, "run", words.front());
  }
  int failed = posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  if (failed == 0 && output_to_errors) {
    failed = posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  }
  pid_t child = -1;
  if (failed == 0) {
    failed = posix_spawnp(&child, argv.front(), &actions, nullptr, argv.data(), environ);
  }
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) return Status::FromErrno(failed, "run", words.front());
  return child;
}

class CommitReporter {
 public:
  CommitReporter(const WatchArgs& args, Terminal& terminal) : args_(args), terminal_(terminal) {}

  int Run() {
    // A parent may have left it ignored, and the status of a command would then be lost.
    if (!args_.exec.empty()) (void)std::signal(SIGCHLD, SIG_DFL);
    CommitWatch::Options options;
    options.since = args_.since;
    if (args_.since_generation >= 0) {
      options.existing = true;
      options.above = static_cast<std::uint64_t>(args_.since_generation);
    }
    std::string path = args_.store;
    // A mount of a store stands for the store.
    const auto store = OpenStoreArgument(path, terminal_);
    if (store.ok()) path = store.value().path();
    const auto watch = CommitWatch::Start(path, options);
    if (!watch.ok()) return terminal_.Fail(watch.status());
    if (store.ok()) {
      terminal_.Note("watching " + path);
    } else {
      terminal_.Warn(path + ": there is no store yet; waiting for it");
    }
    Clock::time_point last = Clock::now();
    while (true) {
      if (const Status asked = interrupt_.Check(); !asked.ok()) {
        return interrupt_.ExitStatus(asked, kFailed);
      }
      milliseconds patience = kSignalSlice;
      const auto limit = std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(args_.timeout_seconds));
      if (args_.timeout_seconds > 0) {
        const Clock::duration left = last + limit - Clock::now();
        patience = std::clamp(std::chrono::ceil<milliseconds>(left), milliseconds(0), patience);
      }
      const auto next = watch.value()->Next(patience);
      for (const std::string& warning : watch.value()->TakeWarnings()) terminal_.Warn(warning);
      if (!next.ok()) return terminal_.Fail(next.status());
      if (!next.value()) {
        if (args_.timeout_seconds > 0 && Clock::now() >= last + limit) {
          return terminal_.Fail(
              Status(Code::kDeadlineExceeded,
                     fmt::format("{}: no checkpoint was published for {:g} s (--timeout)",
                                 args_.store, args_.timeout_seconds)));
        }
        continue;
      }
      if (const int printed = Print(*next.value()); printed != kDone) return printed;
      if (!args_.exec.empty()) {
        if (const Status status = RunCommand(*next.value()); !status.ok()) {
          return status.code() == Code::kCancelled ? interrupt_.ExitStatus(status, kFailed)
                                                   : terminal_.Fail(status);
        }
      }
      if (args_.once) return failed_ > 0 ? kCheckFailed : kDone;
      last = Clock::now();
    }
  }

 private:
  // A line for each commit, which is flushed, so that a program that reads the pipe sees it.
  int Print(const Commit& commit) {
    if (terminal_.json) {
      terminal_.Json(CommitJson(commit));
    } else {
      std::string line =
          fmt::format("{}\tgeneration {}\t{}", commit.name.empty() ? "(unknown name)" : commit.name,
                      commit.generation == 0 ? "unknown" : std::to_string(commit.generation),
                      commit.uuid.ToString());
      if (commit.derived) line += "\tderived";
      if (commit.removed) line += "\tremoved since";
      if (commit.nonfinite.value_or(0) > 0) {
        line += fmt::format("\tnonfinite={}", *commit.nonfinite);
      }
      terminal_.Line(line);
    }
    return terminal_.Flush();
  }

  // Why there is nothing to run the command for. Empty: the checkpoint stands at its name.
  static std::string ReasonGone(const Commit& commit) {
    if (commit.removed) return "was removed";
    const auto store = Store::Open(commit.store);
    if (!store.ok()) return {};  // The command will tell.
    const CheckpointListing now = store.value().FindListing(commit.name);
    if (now.problem.code() == Code::kNotFound) return "was removed or renamed";
    return now.problem.ok() && now.uuid != commit.uuid ? "was replaced" : std::string();
  }

  // Runs the command for a commit and reports how it ended. kCancelled: a signal told us to end.
  Status RunCommand(const Commit& commit) {
    if (const std::string gone = ReasonGone(commit); !gone.empty()) {
      Report(commit, {{"problem", gone}},
             fmt::format("{} {} before its command could run", commit.name, gone));
      return Status();
    }
    std::vector<std::string> words;
    for (const std::string& word : args_.exec) words.push_back(WithPath(word, commit.path()));
    const Result<pid_t> child = StartProgram(words, terminal_.json);
    if (!child.ok()) {
      Report(commit, {{"problem", child.status().message()}},
             fmt::format("{}: {}", commit.name, child.status().message()));
      return Status();
    }
    int status = 0;
    TENSORMOUNT_RETURN_IF_ERROR(WaitFor(child.value(), &status));
    const bool killed = WIFSIGNALED(status);
    const int number = killed ? WTERMSIG(status) : WEXITSTATUS(status);
    nlohmann::ordered_json json = {{killed ? "signal" : "status", number}};
    Report(commit, std::move(json),
           status == 0 ? std::string()
           : killed    ? fmt::format("{}: the command was killed by signal {}", commit.name, number)
                       : fmt::format("{}: the command ended with status {}", commit.name, number));
    return Status();
  }

  // `problem`: empty if the command succeeded.
  void Report(const Commit& commit, nlohmann::ordered_json result, const std::string& problem) {
    failed_ += problem.empty() ? 0 : 1;
    if (terminal_.json) {
      nlohmann::ordered_json json = {
          {"event", "command"}, {"checkpoint", commit.name}, {"uuid", commit.uuid.ToString()}};
      json.update(result);
      terminal_.Json(json);
      (void)terminal_.Flush();  // The next line reports a failure.
    } else if (!problem.empty()) {
      terminal_.Warn(problem);
    }
  }

  // Waits for a program to end. After a signal it is told to end, too.
  Status WaitFor(pid_t child, int* status) const {
    std::optional<Clock::time_point> asked;
    bool told = false;
    for (milliseconds pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
      const pid_t got = waitpid(child, status, WNOHANG);
      if (got == child) return interrupt_.Check();
      if (got < 0 && errno != EINTR) return Status::FromErrno(errno, "wait for", "the command");
      const Clock::time_point now = Clock::now();
      if (!asked && !interrupt_.Check().ok()) asked = now;
      // Ctrl-C was sent to the program, too, and other signals to this one only.
      const bool ctrl_c = interrupt_.ExitStatus(interrupt_.Check(), 0) == 128 + SIGINT;
      if (asked && !told && now - *asked >= (ctrl_c ? kTellChild : std::chrono::seconds(0))) {
        told = true;
        (void)kill(child, SIGTERM);
      }
      if (asked && now - *asked >= kLeaveChild) {
        terminal_.Warn(
            fmt::format("the command did not end after SIGTERM: process {} still runs", child));
        return interrupt_.Check();
      }
      std::this_thread::sleep_for(pause);
    }
  }

  const WatchArgs& args_;
  Terminal& terminal_;
  const Interrupt interrupt_;
  std::size_t failed_ = 0;
};

}  // namespace

int RunWatch(const WatchArgs& args, Terminal& terminal) {
  if (!args.since.empty() && args.since_generation >= 0) {
    return terminal.Fail(
        Status(Code::kInvalidArgument, "--since and --since-generation cannot be together"));
  }
  return CommitReporter(args, terminal).Run();
}

}  // namespace tensormount::tools
