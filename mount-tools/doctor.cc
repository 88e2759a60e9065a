// SPDX-License-Identifier: Apache-2.0
// `tensormount doctor`: what this machine offers, each with how to get what is missing; see
// commands.h.
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sstream>
#include <sys/statfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/file_system.h"
#include "base/hash.h"
#include "device/device_module.h"
#include "device/devices.h"
#include "fs/mount/fuse_backing.h"
#include "mount-tools/commands.h"
#include "mount-tools/mpi_module.h"

namespace tensormount::tools {
namespace {

// One line of the report. `good` false is no failure of the command: most of what is missing has a
// substitute.
struct Diagnosis {
  std::string name;
  bool good = false;
  std::string detail;
  std::string remedy;  // How to get what is missing; empty: nothing to do or nothing known.
};

// By the release, as distributions may have patched features in or out: a hint and no proof.
bool KernelAtLeast(int major, int minor) {
  utsname name{};
  if (uname(&name) != 0) return false;
  int a = 0;
  int b = 0;
  if (std::sscanf(name.release, "%d.%d", &a, &b) != 2) return false;
  return a > major || (a == major && b >= minor);
}

std::string KernelRelease() {
  utsname name{};
  return uname(&name) == 0 ? name.release : "unknown";
}

// Where the command lies on PATH, or nothing.
std::string Which(const std::string& command) {
  const char* path = std::getenv("PATH");
  std::string rest = path != nullptr ? path : "";
  while (!rest.empty()) {
    const std::size_t colon = rest.find(':');
    const std::string candidate = JoinPath(rest.substr(0, colon), command);
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
    rest = colon == std::string::npos ? "" : rest.substr(colon + 1);
  }
  return "";
}

// By opening it, because modes and device cgroups both decide.
Diagnosis Fuse() {
  const int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  if (fd >= 0) {
    close(fd);
    return {"fuse", true, "/dev/fuse opens", ""};
  }
  const bool there = access("/dev/fuse", F_OK) == 0;
  return {"fuse", false, there ? "/dev/fuse is there but cannot be opened" : "/dev/fuse is missing",
          there ? "run as root, or ask for access to /dev/fuse"
                : "load the module with `modprobe fuse`; in a container pass --device /dev/fuse"};
}

// Whether users who are not root may mount with --allow-other.
Diagnosis AllowOther() {
  if (geteuid() == 0) return {"allow_other", true, "root may always", ""};
  const Result<std::string> text = HostFileSystem().ReadFile("/etc/fuse.conf", 1 << 20);
  bool allowed = false;
  std::istringstream lines(text.ok() ? text.value() : std::string());
  for (std::string line; std::getline(lines, line);) {
    const std::size_t begin = line.find_first_not_of(" \t");
    const std::size_t end = line.find_last_not_of(" \t\r");
    allowed = allowed || (begin != std::string::npos &&
                          line.substr(begin, end - begin + 1) == "user_allow_other");
  }
  if (allowed) return {"allow_other", true, "user_allow_other stands in /etc/fuse.conf", ""};
  return {"allow_other", false, "mount --allow-other is root's alone",
          "put the line user_allow_other into /etc/fuse.conf"};
}

// The helper that mounts for users who are not root.
Diagnosis Fusermount() {
  const std::string path = Which("fusermount3");
  if (!path.empty()) return {"fusermount3", true, path, ""};
  return {"fusermount3", geteuid() == 0,
          geteuid() == 0 ? "missing; root mounts without it" : "missing",
          "install the package fuse3"};
}

// Whether the kernel can be asked to read files of a mount itself. Only a mount finds out for sure:
// the kernel may be built without it.
Diagnosis Passthrough() {
  if (!KernelAtLeast(6, 9)) {
    return {"passthrough", false, "needs Linux 6.9",
            "mounts work without it: the daemon reads for programs, at about half the speed"};
  }
  const std::string obstacle = fs::PassthroughObstacle();
  if (!obstacle.empty()) {
    return {
        "passthrough", false, obstacle,
        "mount as root for it; without it the daemon reads for programs, at about half the speed"};
  }
  return {"passthrough", true, "Linux 6.9 or later, and CAP_SYS_ADMIN; .tensormount/status tells",
          ""};
}

// Tries what the store asks of a filesystem, in a folder of its own that it removes.
void FileSystemFeatures(const std::string& directory, std::vector<Diagnosis>& out) {
  FileSystem& fs = HostFileSystem();
  const std::string probe =
      JoinPath(directory, fmt::format(".tensormount-doctor-{}", static_cast<int>(getpid())));
  // Named with the process id: several of these may run on one shared folder.
  const Status made = fs.CreateDirectory(probe);
  if (!made.ok()) {
    out.push_back(
        {"filesystem", false, made.ToString(), "name a folder that can be written with --dir"});
    return;
  }
  // The magic number of the filesystem, for bug reports; what it can do is tried, not looked up.
  struct statfs info {};
  const std::string kind = statfs(directory.c_str(), &info) == 0
                               ? fmt::format("type 0x{:x}", static_cast<unsigned long>(info.f_type))
                               : std::string("type unknown");
  const auto add = [&](const std::string& name, const Status& status, const std::string& remedy) {
    out.push_back({name, status.ok(), status.ok() ? "works, " + kind : status.ToString(), remedy});
  };
  const std::string a = JoinPath(probe, "a");
  const std::string b = JoinPath(probe, "b");
  Status status = fs.CreateDirectory(a);
  if (status.ok()) status = fs.CreateDirectory(b);
  if (status.ok()) status = fs.WriteFileDurably(JoinPath(a, "f"), "x");
  if (status.ok()) status = fs.WriteFileDurably(JoinPath(b, "f"), "y");
  // What a publish needs: files and folders that survive a power cut.
  if (status.ok()) status = fs.SyncDirectory(probe);
  add("fsync", status, "");
  // b exists and is not empty: exactly this must be refused.
  const Status refused = fs.RenameNoReplace(a, b);
  add("rename without replacing",
      refused.code() == Code::kAlreadyExists
          ? Status()
          : (refused.ok() ? Status(Code::kInternal, "an existing folder was replaced") : refused),
      "put the store on another filesystem: two saves of one name could not be told apart");
  add("exchange (import --if-exists replace)", fs.Exchange(a, b),
      "replacing a checkpoint under its name is refused on this filesystem");
  add("hard links", fs.Link(JoinPath(a, "f"), JoinPath(a, "g")), "");
  // As a reader does, then as gc does beside it: some filesystems grant whatever is asked for.
  auto lock = fs.OpenRead(JoinPath(a, "f"));
  Status locks = lock.ok() ? lock.value()->TryLockShared() : lock.status();
  if (locks.ok()) {
    const auto other = fs.OpenShared(JoinPath(a, "f"));
    const Status alone = other.ok() ? other.value()->TryLockExclusive() : other.status();
    if (alone.ok()) {
      locks = Status(Code::kUnsupported, "granted to two at once");
    } else if (alone.code() != Code::kBusy) {
      locks = alone;
    }
  }
  add("file locks", locks,
      "readers work without; gc cannot see them here and keeps what was removed unless it is given "
      "--grace with more seconds than the longest read takes");
  lock = Status(Code::kCancelled, "closed");
  // Closed before: on NFS an open file would stay behind under another name.
  (void)fs.RemoveTree(
      probe);  // A folder of ours in a place that the user named; nothing depends on it.
}

// The way between the devices of ranks, as the first device has it.
Diagnosis Nccl(const Result<int>& devices) {
  Result<std::unique_ptr<DeviceLink>> link = Status(Code::kUnavailable, "there is no device");
  if (devices.ok() && devices.value() > 0) link = OpenDeviceLink({DeviceKind::kCuda, 0});
  return {"nccl", link.ok(), link.ok() ? link.value()->version() : link.status().message(),
          link.ok() ? "" : "ranks pass bytes on through the host"};
}

}  // namespace

int RunDoctor(const std::string& directory, Terminal& terminal) {
  std::vector<Diagnosis> findings;
  findings.push_back({"kernel", true, KernelRelease(), ""});
  findings.push_back(Fuse());
  findings.push_back(Fusermount());
  findings.push_back(AllowOther());
  findings.push_back({"mmap of direct files", KernelAtLeast(6, 6),
                      KernelAtLeast(6, 6) ? "offered by this kernel" : "needs Linux 6.6",
                      KernelAtLeast(6, 6) ? "" : "files are then served through the page cache"});
  findings.push_back(Passthrough());
  const auto mpi = FindMpi();
  findings.push_back({"mpi", mpi.ok(), mpi.ok() ? mpi.value() : mpi.status().message(), ""});
  const Result<int> devices = CountDevices();
  findings.push_back(
      {"cuda", devices.ok() && devices.value() > 0,
       devices.ok() ? fmt::format("{} devices", devices.value()) : devices.status().message(), ""});
  findings.push_back(Nccl(devices));
  findings.push_back({"digest", true,
                      Crc64IsAccelerated() ? "by carry-less multiplication" : "by tables (slow)",
                      ""});
  FileSystemFeatures(directory, findings);

  bool usable = true;
  for (const Diagnosis& finding : findings) {
    if (terminal.json) {
      terminal.Json(nlohmann::ordered_json{{"name", finding.name},
                                           {"good", finding.good},
                                           {"detail", finding.detail},
                                           {"remedy", finding.remedy}});
    } else {
      terminal.Line(
          fmt::format("{} {}: {}", finding.good ? "yes" : "no ", finding.name, finding.detail));
      if (!finding.good && !finding.remedy.empty()) {
        terminal.Line(fmt::format("    {}", finding.remedy));
      }
    }
    // Only reported where the folder cannot be written at all.
    if (finding.name == "filesystem") usable = false;
  }
  const int flushed = terminal.Flush();
  return flushed != kDone ? flushed : (usable ? kDone : kFailed);
}

}  // namespace tensormount::tools
