// SPDX-License-Identifier: Apache-2.0
// Mounts by mount(2) as root, and by fusermount3 for other users, with the common options of
// Tensormount mounts.
#include "fs/mount/mount_call.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file_system_for.h"
#include "base/log.h"

namespace tensormount::fs {
namespace {

constexpr const char* kDevice = "/dev/fuse";
constexpr const char* kSubtype = "tensormount";

// Commas separate options and must be escaped.
std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == ',' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

// default_permissions: the kernel checks modes, owner and caller.
std::string CommonOptions(const MountCall& call) {
  return std::string("default_permissions,max_read=") + std::to_string(kMaxRequestBytes) +
         (call.allow_other ? ",allow_other" : "");
}

// The options are those of the kernel, not of libfuse: fd, rootmode, user_id and group_id are
// required.
Result<int> MountAsRoot(const MountCall& call) {
  const int fd = open(kDevice, O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return Status(errno == EACCES || errno == EPERM ? Code::kPermissionDenied : Code::kUnavailable,
                  std::string("open ") + kDevice + ": " + std::strerror(errno));
  }
  const std::string options = "fd=" + std::to_string(fd) +
                              ",rootmode=40000,user_id=" + std::to_string(geteuid()) +
                              ",group_id=" + std::to_string(getegid()) + "," + CommonOptions(call);
  const std::string type = std::string("fuse.") + kSubtype;
  constexpr unsigned long kFlags = MS_NOSUID | MS_NODEV;
  if (mount(call.source.c_str(), call.mount_point.c_str(), type.c_str(), kFlags, options.c_str()) !=
      0) {
    const Status status = Status::FromErrno(errno, "mount", call.mount_point);
    close(fd);
    return status;
  }
  // Read-only is set for the mount, not for the filesystem, like a bind mount: a user then gets
  // EACCES where modes forbid a change anyway, and EROFS otherwise. The daemon refuses writes that
  // arrive before this call.
  if (call.read_only && mount(nullptr, call.mount_point.c_str(), nullptr,
                              MS_REMOUNT | MS_BIND | MS_RDONLY | kFlags, nullptr) != 0) {
    const Status status = Status::FromErrno(errno, "remount read-only", call.mount_point);
    (void)umount2(call.mount_point.c_str(), MNT_DETACH);  // A failure is ignored.
    close(fd);
    return status;
  }
  return fd;
}

// The descriptor that fusermount3 sends over the socket; -1 if it ends without sending one.
int ReceiveDescriptor(int socket) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t n;
  do {
    n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n <= 0) return -1;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
    return -1;
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return fd;
}

// The bytes waiting in a pipe, at most 1 KiB, as one line for a message.
std::string ReadPipeLine(int pipe) {
  char bytes[1024];
  const ssize_t n = read(pipe, bytes, sizeof bytes);
  std::string text = n > 0 ? OneLine(std::string_view(bytes, static_cast<std::size_t>(n))) : "";
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

// fusermount3 is setuid: it mounts for an ordinary user and sends back the open /dev/fuse over a
// socket pair.
Result<int> MountByHelper(const MountCall& call) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) {
    return Status::FromErrno(errno, "make", "a socket for fusermount3");
  }
  fcntl(ends[0], F_SETFD, FD_CLOEXEC);
  // fusermount3 gives its reason on standard error, which is captured for the error message.
  int said[2];
  if (pipe2(said, O_CLOEXEC | O_NONBLOCK) != 0) {
    const Status status = Status::FromErrno(errno, "make", "a pipe for fusermount3");
    close(ends[0]);
    close(ends[1]);
    return status;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, said[1], STDERR_FILENO);
  std::string options = CommonOptions(call) + ",nosuid,nodev,subtype=" + kSubtype +
                        ",fsname=" + Escaped(WithoutQuery(call.source)) +
                        (call.read_only ? ",ro" : ",rw");
  std::string target = call.mount_point;
  std::string program = "fusermount3";
  std::string option = "-o";
  std::string end = "--";
  char* argv[] = {program.data(), option.data(), options.data(),
                  end.data(),     target.data(), nullptr};
  std::string channel = "_FUSE_COMMFD=" + std::to_string(ends[1]);
  std::string path = "PATH=/usr/local/bin:/usr/bin:/bin";
  char* environment[] = {channel.data(), path.data(), nullptr};
  pid_t pid = 0;
  const int spawned = posix_spawnp(&pid, program.c_str(), &actions, nullptr, argv, environment);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  close(said[1]);
  if (spawned != 0) {
    close(ends[0]);
    close(said[0]);
    return Status(Code::kUnavailable, std::string("start fusermount3: ") + std::strerror(spawned));
  }
  const int fd = ReceiveDescriptor(ends[0]);
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  close(ends[0]);
  const std::string words = ReadPipeLine(said[0]);
  close(said[0]);
  if (fd < 0) {
    return Status(
        Code::kPermissionDenied,
        "mount " + call.mount_point + ": " +
            (words.empty() ? std::string("fusermount3 failed without a message") : words));
  }
  if (!words.empty()) Log(LogLevel::kWarning, "mount " + call.mount_point + ": " + words);
  return fd;
}

}  // namespace

Result<int> MountFuse(const MountCall& call) {
  return geteuid() == 0 ? MountAsRoot(call) : MountByHelper(call);
}

}  // namespace tensormount::fs
