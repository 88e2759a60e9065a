// SPDX-License-Identifier: Apache-2.0
// Finds this program's mounts on this machine in mountinfo and unmounts them, also if the daemon is
// gone.
#include "fs/mount/mount_table.h"

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <spawn.h>
#include <sstream>
#include <sys/mount.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "base/deadline.h"
#include "fs/mount/mount_session.h"

namespace tensormount::fs {
namespace {

// Polling interval while waiting for an unmount or a child process.
constexpr std::chrono::milliseconds kPoll{5};
// How long a mount may stay busy after its last file was closed.
constexpr std::chrono::milliseconds kBusyPatience{300};

// The absolute path of a mount point. Resolves the parent, and the last part only if it is a
// symlink: a mount whose daemon is dead cannot be accessed.
std::string Absolute(const std::string& path) {
  std::string text = path;
  while (text.size() > 1 && text.ends_with('/')) text.pop_back();
  const std::size_t slash = text.rfind('/');
  const std::string parent = slash == std::string::npos ? "."
                             : slash == 0               ? "/"
                                                        : text.substr(0, slash);
  const std::string last = slash == std::string::npos ? text : text.substr(slash + 1);
  const auto real = [](const std::string& p) {
    char buffer[PATH_MAX];
    return realpath(p.c_str(), buffer) == nullptr ? std::string() : std::string(buffer);
  };
  if (last.empty() || last == "." || last == "..") return real(text);
  const std::string base = real(parent);
  if (base.empty()) return "";
  // readlink fails for anything but a symlink, also for a dead mount.
  char target[2];
  const std::string joined = (base == "/" ? "" : base) + "/" + last;
  if (readlink(joined.c_str(), target, sizeof target) >= 0) return real(joined);
  return joined;
}

// mountinfo writes blanks and backslashes in octal.
std::string Unescape(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      out += static_cast<char>(std::strtol(text.substr(i + 1, 3).c_str(), nullptr, 8));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

// Runs fusermount3 -u, for users other than root. Returns its exit status, or -1 if it could not be
// run.
int RunFusermount(const std::string& mount_point, bool lazy) {
  std::string program = "fusermount3";
  std::string unmount = "-u";
  std::string quiet = "-q";
  std::string detach = "-z";
  std::string end = "--";
  std::string target = mount_point;
  char* argv[] = {program.data(),
                  unmount.data(),
                  quiet.data(),
                  lazy ? detach.data() : end.data(),
                  lazy ? end.data() : target.data(),
                  lazy ? target.data() : nullptr,
                  nullptr};
  pid_t pid = 0;
  if (posix_spawnp(&pid, program.c_str(), nullptr, nullptr, argv, environ) != 0) return -1;
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

Status TryUnmount(const std::string& mount_point, bool lazy) {
  if (geteuid() == 0) {
    if (umount2(mount_point.c_str(), UMOUNT_NOFOLLOW | (lazy ? MNT_DETACH : 0)) == 0) return {};
    return Status::FromErrno(errno, "unmount", mount_point);
  }
  const int status = RunFusermount(mount_point, lazy);
  if (status == 0) return {};
  if (status < 0)
    return Status(
        Code::kUnavailable,
        "unmount " + mount_point + ": the program fusermount3 could not be run (package fuse3)");
  // fusermount3 gives no reason; if it refuses to unmount our mount, the mount is in use.
  return Status::FromErrno(EBUSY, "unmount", mount_point);
}

// Whether the daemon of this mount is gone. A child process asks, because a live daemon that does
// not answer would block the caller. It calls statfs(2), because the kernel may answer stat(2) from
// its cache for a while.
bool IsDaemonGone(const std::string& mount_point) {
  constexpr std::chrono::seconds kPatience{2};
  const pid_t child = fork();
  if (child < 0) return false;
  if (child == 0) {
    struct statfs info;
    _exit(statfs(mount_point.c_str(), &info) != 0 && errno == ENOTCONN ? 1 : 0);
  }
  const Deadline deadline = Deadline::After(kPatience);
  int status = 0;
  for (;;) {
    const pid_t ended = waitpid(child, &status, WNOHANG);
    if (ended == child) return WIFEXITED(status) && WEXITSTATUS(status) == 1;
    if (ended < 0 && errno != EINTR) return false;
    if (deadline.Passed()) break;
    std::this_thread::sleep_for(kPoll);
  }
  kill(child, SIGKILL);
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return false;
}

}  // namespace

std::optional<MountEntry> FindMount(const std::string& path) {
  const std::string wanted = Absolute(path);
  if (wanted.empty()) return std::nullopt;
  std::ifstream table("/proc/self/mountinfo");
  std::optional<MountEntry> found;
  std::string line;
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string id, parent, device, root, mount_point, word;
    if (!(fields >> id >> parent >> device >> root >> mount_point)) continue;
    if (Unescape(mount_point) != wanted) continue;
    while (fields >> word && word != "-") {
    }
    std::string type;
    fields >> type;
    found = MountEntry{.device = device, .type = type};  // Mounts of later lines lie on top.
  }
  return found;
}

bool IsMountPoint(const std::string& path) { return FindMount(path).has_value(); }

Result<bool> ClearDeadMount(const std::string& mount_point) {
  bool any = false;
  for (;;) {  // Dead mounts may be stacked.
    const std::optional<MountEntry> entry = FindMount(mount_point);
    if (!entry || entry->type != kMountType || !IsDaemonGone(Absolute(mount_point))) return any;
    TENSORMOUNT_RETURN_IF_ERROR(Unmount(mount_point, true, std::chrono::seconds(5)));
    any = true;
  }
}

Status Unmount(const std::string& mount_point, bool lazy, std::chrono::milliseconds timeout) {
  const std::string path = Absolute(mount_point);
  const std::optional<MountEntry> entry = FindMount(mount_point);
  if (!entry) return Status(Code::kNotFound, mount_point + ": nothing is mounted here");
  if (entry->type != kMountType) {
    return Status(Code::kInvalidArgument,
                  mount_point + ": not a tensormount mount, but of type " + entry->type);
  }
  const Deadline deadline = Deadline::After(timeout);
  const Deadline busy = Deadline::After(std::min(timeout, kBusyPatience));
  for (;;) {
    const Status status = TryUnmount(path, lazy);
    if (status.ok()) break;
    const std::optional<MountEntry> now = FindMount(mount_point);
    if (!now || now->device != entry->device) return {};  // Another process removed the mount.
    if (status.code() != Code::kBusy || busy.Passed()) return status;
    std::this_thread::sleep_for(kPoll);
  }
  for (;;) {
    const std::optional<MountEntry> now = FindMount(mount_point);
    if (!now || now->device != entry->device) return {};
    if (deadline.Passed()) {
      return Status(Code::kDeadlineExceeded,
                    mount_point + ": still mounted after the time limit for unmounting");
    }
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace tensormount::fs
