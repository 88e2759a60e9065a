// SPDX-License-Identifier: Apache-2.0
// `tensormount doctor` (commands.h): what this machine supports, and how to get what is missing.
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sstream>
#include <sys/statfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/file_system_for.h"
#include "base/hash.h"
#include "device/device_module.h"
#include "device/devices.h"
#include "fs/mount/fuse_backing.h"
#include "mount-tools/commands.h"
#include "mount-tools/mpi_module.h"
#include "mount-tools/source.h"
#include "remote/remote.h"

namespace tensormount::tools {
namespace {

// One line of the report. Except for "filesystem" and "url", the command succeeds even if `good` is
// false, because most missing features have a substitute.
struct Diagnosis {
  std::string name;
  bool good = false;
  std::string detail;
  std::string remedy;  // How to get the missing feature; empty: unknown or not needed.
};

// Whether the kernel's release number is at least major.minor. Distributions may have added or
// removed features, which the number does not show.
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

// The path of the command on PATH; empty if it is not found.
std::string FindProgram(const std::string& command) {
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

// Tries to open /dev/fuse, because access depends on its mode and on device cgroups.
Diagnosis Fuse() {
  const int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  if (fd >= 0) {
    close(fd);
    return {"fuse", true, "/dev/fuse opens", ""};
  }
  const bool there = access("/dev/fuse", F_OK) == 0;
  return {"fuse", false, there ? "/dev/fuse exists but cannot be opened" : "/dev/fuse is missing",
          there ? "run as root, or ask for access to /dev/fuse"
                : "load the module with `modprobe fuse`; in a container pass --device /dev/fuse"};
}

// Whether this user may mount with --allow-other.
Diagnosis AllowOther() {
  if (geteuid() == 0) return {"allow_other", true, "root may always use mount --allow-other", ""};
  const Result<std::string> text = ReadNamedFile("/etc/fuse.conf", 1 << 20);
  bool allowed = false;
  std::istringstream lines(text.ok() ? text.value() : std::string());
  for (std::string line; std::getline(lines, line);) {
    const std::size_t begin = line.find_first_not_of(" \t");
    const std::size_t end = line.find_last_not_of(" \t\r");
    allowed = allowed || (begin != std::string::npos &&
                          line.substr(begin, end - begin + 1) == "user_allow_other");
  }
  if (allowed) return {"allow_other", true, "/etc/fuse.conf has user_allow_other", ""};
  return {"allow_other", false, "only root can use mount --allow-other",
          "add the line user_allow_other to /etc/fuse.conf"};
}

// Whether fusermount3 exists, which mounts for users other than root.
Diagnosis Fusermount() {
  const std::string path = FindProgram("fusermount3");
  if (!path.empty()) return {"fusermount3", true, path, ""};
  return {"fusermount3", geteuid() == 0,
          geteuid() == 0 ? "missing; root does not need it" : "missing",
          "install the package fuse3"};
}

// Whether the kernel may support passthrough. It may be built without passthrough, so only a mount
// shows this with certainty.
Diagnosis Passthrough() {
  if (!KernelAtLeast(6, 9)) {
    return {"passthrough", false, "this needs Linux 6.9 or later",
            "mounts work without it: the daemon serves the reads, at about half the speed"};
  }
  const std::string obstacle = fs::PassthroughObstacle();
  if (!obstacle.empty()) {
    return {
        "passthrough", false, obstacle,
        "mount as root to use it; without it the daemon serves the reads, at about half the speed"};
  }
  return {"passthrough", true,
          "Linux 6.9 or later, with CAP_SYS_ADMIN; MNT/.tensormount/status shows whether a mount "
          "uses it",
          ""};
}

// Tries the operations that a store needs, in a temporary directory.
void FileSystemFeatures(const std::string& directory, std::vector<Diagnosis>& out) {
  const Result<FileSystem*> found = FileSystemFor(directory);
  if (!found.ok()) {
    out.push_back(
        {"filesystem", false, found.status().ToString(), "choose a directory with --dir"});
    return;
  }
  FileSystem& fs = *found.value();
  // The name has the process id, because several doctors may run in one shared directory.
  const std::string probe =
      JoinPath(directory, fmt::format(".tensormount-doctor-{}", static_cast<int>(getpid())));
  const Status made = fs.CreateDirectory(probe);
  if (!made.ok()) {
    out.push_back({"filesystem", false, made.ToString(), "choose a writable directory with --dir"});
    return;
  }
  // The magic number of the filesystem, which is only for bug reports.
  struct statfs info {};
  const std::string kind =
      statfs(directory.c_str(), &info) == 0
          ? fmt::format("filesystem type 0x{:x}", static_cast<unsigned long>(info.f_type))
          : std::string("filesystem type unknown");
  const auto add = [&](const std::string& name, const Status& status, const std::string& remedy) {
    out.push_back({name, status.ok(), status.ok() ? "works, " + kind : status.ToString(), remedy});
  };
  const std::string a = JoinPath(probe, "a");
  const std::string b = JoinPath(probe, "b");
  Status status = fs.CreateDirectory(a);
  if (status.ok()) status = fs.CreateDirectory(b);
  if (status.ok()) status = fs.WriteFileDurably(JoinPath(a, "f"), "x");
  if (status.ok()) status = fs.WriteFileDurably(JoinPath(b, "f"), "y");
  // SyncDirectory is the call with which a publish makes directories durable.
  if (status.ok()) status = fs.SyncDirectory(probe);
  add("fsync", status, "");
  // Directory b exists and is not empty, so the rename must fail.
  const Status refused = fs.RenameNoReplace(a, b);
  add("rename without replacing",
      refused.code() == Code::kAlreadyExists
          ? Status()
          : (refused.ok() ? Status(Code::kInternal, "an existing directory was replaced")
                          : refused),
      "put the store on another filesystem: here one save could replace another of the same name");
  add("exchange (import --if-exists replace)", fs.Exchange(a, b),
      "a checkpoint cannot be replaced on this filesystem");
  add("hard links", fs.Link(JoinPath(a, "f"), JoinPath(a, "g")), "");
  // Takes a reader's shared lock and then tries gc's exclusive lock, which must fail, because some
  // filesystems grant every lock.
  auto lock = fs.OpenRead(JoinPath(a, "f"));
  Status locks = lock.ok() ? lock.value()->TryLockShared() : lock.status();
  if (locks.ok()) {
    const auto other = fs.OpenShared(JoinPath(a, "f"));
    const Status alone = other.ok() ? other.value()->TryLockExclusive() : other.status();
    if (alone.ok()) {
      locks = Status(Code::kUnsupported,
                     "an exclusive lock was granted while another process had a shared lock");
    } else if (alone.code() != Code::kBusy) {
      locks = alone;
    }
  }
  add("file locks", locks,
      "reads work without locks, but gc cannot detect readers: it frees removed checkpoints only "
      "if you pass --grace, which must be longer than the longest read");
  lock = Status(Code::kCancelled, "closed");
  // The lock's file is closed before the removal, because NFS would keep an open file under another
  // name. An error of the removal is ignored.
  (void)fs.RemoveTree(probe);
}

// Whether NCCL can exchange data between the devices of ranks; tried with the first device.
Diagnosis Nccl(const Result<int>& devices) {
  Result<std::unique_ptr<DeviceLink>> link = Status(Code::kUnavailable, "no CUDA device was found");
  if (devices.ok() && devices.value() > 0) link = OpenDeviceLink({DeviceKind::kCuda, 0});
  return {"nccl", link.ok(), link.ok() ? link.value()->version() : link.status().message(),
          link.ok() ? "" : "ranks exchange data through host memory"};
}

}  // namespace

int RunDoctor(const std::string& directory, Terminal& terminal) {
  std::vector<Diagnosis> findings;
  findings.push_back({"kernel", true, KernelRelease(), ""});
  findings.push_back(Fuse());
  findings.push_back(Fusermount());
  findings.push_back(AllowOther());
  findings.push_back(
      {"mmap of direct files", KernelAtLeast(6, 6),
       KernelAtLeast(6, 6) ? "supported by this kernel" : "this needs Linux 6.6 or later",
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
  const Result<std::string> curl = UrlLibraryVersion();
  findings.push_back(
      {"urls", curl.ok(), curl.ok() ? "by " + curl.value() : curl.status().message(), ""});
  if (directory.find("://") != std::string::npos) {
    for (UrlFinding& found : ExamineUrl(directory)) {
      findings.push_back(
          {std::move(found.name), found.good, std::move(found.detail), std::move(found.remedy)});
    }
  } else {
    FileSystemFeatures(directory, findings);
  }

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
    // The finding "filesystem" exists only if no test directory could be made.
    if (finding.name == "filesystem" || (finding.name == "url" && !finding.good)) usable = false;
  }
  const int flushed = terminal.Flush();
  return flushed != kDone ? flushed : (usable ? kDone : kFailed);
}

}  // namespace tensormount::tools
