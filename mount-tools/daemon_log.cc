// SPDX-License-Identifier: Apache-2.0
// The log of a mount (daemon_log.h): a file, or the system's log.
#include "mount-tools/daemon_log.h"

#include <cerrno>
#include <ctime>
#include <fcntl.h>
#include <memory>
#include <sys/stat.h>
#include <syslog.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/log.h"

namespace tensormount::tools {
namespace {

int PriorityOf(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return LOG_DEBUG;
    case LogLevel::kInfo:
      return LOG_INFO;
    case LogLevel::kWarning:
      return LOG_WARNING;
    case LogLevel::kError:
      return LOG_ERR;
  }
  return LOG_ERR;
}

// The current time in UTC with milliseconds, so that logs of several machines can be compared.
std::string TimeStamp() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  std::tm utc{};
  gmtime_r(&now.tv_sec, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900,
                     utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                     now.tv_nsec / 1'000'000);
}

// The log file of a mount. Write needs no lock of its own, because Log() calls it under a lock.
class LogFile {
 public:
  explicit LogFile(std::string path) : path_(std::move(path)) {}
  ~LogFile() {
    if (fd_ >= 0) close(fd_);
  }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  // Opens the file, unless the open file is still the one at the path.
  Status Open() {
    struct stat there {};
    struct stat ours {};
    // logrotate renames the log file and makes a new one; the next line goes to the new one.
    const bool same = fd_ >= 0 && stat(path_.c_str(), &there) == 0 && fstat(fd_, &ours) == 0 &&
                      there.st_dev == ours.st_dev && there.st_ino == ours.st_ino;
    if (same) return {};
    // O_NONBLOCK: a FIFO without a reader must not hang the daemon. O_NOCTTY: a terminal must not
    // become the daemon's controlling terminal.
    const int fd = open(path_.c_str(),
                        O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0644);
    if (fd < 0) return Status::FromErrno(errno, "open log file", path_);
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
    return {};
  }
  void Write(std::string_view line) {
    (void)Open();  // If this fails, the line goes to the old file.
    // One write for each line, so that lines of several mounts do not mix.
    [[maybe_unused]] const ssize_t n = write(fd_, line.data(), line.size());
  }

 private:
  const std::string path_;
  int fd_ = -1;
};

}  // namespace

void LogToSyslog() {
  openlog("tensormount", LOG_PID, LOG_DAEMON);
  SetLogSink([](LogLevel level, std::string_view message) {
    syslog(PriorityOf(level), "%s: %s", LogLevelName(level).data(), OneLine(message).c_str());
  });
}

Status LogToFile(const std::string& path) {
  auto file = std::make_shared<LogFile>(path);
  TENSORMOUNT_RETURN_IF_ERROR(file->Open());
  SetLogSink([file](LogLevel level, std::string_view message) {
    file->Write(fmt::format("{} tensormount[{}] {}: {}\n", TimeStamp(), getpid(),
                            LogLevelName(level), OneLine(message)));
  });
  return {};
}

}  // namespace tensormount::tools
