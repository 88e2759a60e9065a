// SPDX-License-Identifier: Apache-2.0
// Directories of the host, by descriptors instead of paths: each step opens the next name relative
// to the directory that is already open, so that concurrent renames or links cannot lead a walk or
// a removal out of the directory. Symlinks are not followed, except by OpenHostBeneath, where the
// kernel follows those that stay inside.
#include "base/host_directory.h"

#include <algorithm>
#include <cerrno>
#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <memory>
#include <string_view>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

#include "base/host_pins.h"
#include "base/spare_descriptors.h"

namespace tensormount {
namespace {

using DirHandle = std::unique_ptr<DIR, decltype([](DIR* d) { closedir(d); })>;

// Opens `name` relative to the directory `at`. On failure sets errno and returns null.
DirHandle OpenDir(int at, const char* name) {
  const int fd = OpenDescriptor([&] {
    return openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  });
  if (fd < 0) {
    struct stat st;
    // With O_DIRECTORY Linux returns ENOTDIR for a symlink; the interface promises ELOOP.
    if (errno == ENOTDIR && fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
      errno = S_ISLNK(st.st_mode) ? ELOOP : ENOTDIR;
    }
    return nullptr;
  }
  DirHandle dir(fdopendir(fd));
  if (!dir) {
    const int err = errno;
    close(fd);
    errno = err;
  }
  return dir;
}

// Type of an entry. Most filesystems return it with the name; others need a stat.
FileKind KindOf(DIR* dir, const dirent& entry) {
  switch (entry.d_type) {
    case DT_REG:
      return FileKind::kFile;
    case DT_DIR:
      return FileKind::kDirectory;
    case DT_LNK:
      return FileKind::kSymlink;
    case DT_UNKNOWN: {
      struct stat st;
      if (fstatat(dirfd(dir), entry.d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) return FileKind::kOther;
      return S_ISREG(st.st_mode)   ? FileKind::kFile
             : S_ISDIR(st.st_mode) ? FileKind::kDirectory
             : S_ISLNK(st.st_mode) ? FileKind::kSymlink
                                   : FileKind::kOther;
    }
    default:
      return FileKind::kOther;
  }
}

Result<std::vector<DirectoryEntry>> ReadAll(DIR* dir, const std::string& path) {
  std::vector<DirectoryEntry> out;
  for (;;) {
    errno = 0;  // readdir returns null at the end and on failure; errno tells which.
    const dirent* entry = readdir(dir);
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    out.push_back({std::string(name), KindOf(dir, *entry)});
  }
  if (errno != 0) return HostError(errno, "list", path);
  std::sort(out.begin(), out.end(),
            [](const DirectoryEntry& a, const DirectoryEntry& b) { return a.name < b.name; });
  return out;
}

// Opens a directory for removal, and gives its owner missing permissions. The chmod goes through a
// descriptor, so that it cannot follow a symlink.
DirHandle OpenForRemoval(int at, const char* name) {
  DirHandle dir = OpenDir(at, name);
  if (!dir && errno == EACCES) {
    const int fd = openat(at, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return nullptr;
    // fchmod refuses an O_PATH descriptor, so use its name under /proc.
    const std::string self = "/proc/self/fd/" + std::to_string(fd);
    const bool granted = chmod(self.c_str(), 0700) == 0;
    close(fd);
    if (!granted) {
      errno = EACCES;
      return nullptr;
    }
    return OpenDir(at, name);
  }
  struct stat st;
  if (dir && fstat(dirfd(dir.get()), &st) == 0 && (st.st_mode & 0700) != 0700) {
    // If the directory belongs to another user, unlink reports the error.
    (void)fchmod(dirfd(dir.get()), (st.st_mode & 07777) | 0700);
  }
  return dir;
}

// Removes `name` below the directory `at`; `path` is for messages. Tries unlink first, without
// stat: most names are files, and the type could change after a stat. For a directory Linux returns
// EISDIR and POSIX allows EPERM, which also means "not permitted"; opening the name as a directory
// distinguishes these. The recursion is as deep as the tree, with one open descriptor per level.
Status RemoveAt(int at, const std::string& name, const std::string& path) {
  if (unlinkat(at, name.c_str(), 0) == 0 || errno == ENOENT) return Status();
  if (errno != EISDIR && errno != EPERM) return HostError(errno, "unlink", path);
  const int unlink_errno = errno;
  {
    const DirHandle dir = OpenForRemoval(at, name.c_str());
    if (!dir) {
      if (errno == ENOENT) return Status();
      // Not a directory: report the error of unlink.
      const bool is_folder = errno != ENOTDIR && errno != ELOOP;
      return HostError(is_folder ? errno : unlink_errno, "remove", path);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                                 ReadAll(dir.get(), path));
    for (const DirectoryEntry& entry : entries) {
      TENSORMOUNT_RETURN_IF_ERROR(
          RemoveAt(dirfd(dir.get()), entry.name, JoinPath(path, entry.name)));
    }
  }
  if (unlinkat(at, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) {
    return HostError(errno, "rmdir", path);
  }
  return Status();
}

}  // namespace

Result<std::vector<DirectoryEntry>> ListHostDirectory(const std::string& path) {
  const DirHandle dir = OpenDir(AT_FDCWD, path.c_str());
  if (!dir) return HostError(errno, "list", path);
  return ReadAll(dir.get(), path);
}

namespace {

int OpenAt(int at, const std::string& name, int flags) {
  return OpenDescriptor([&] { return openat(at, name.c_str(), flags); });
}

void CloseKeepingErrno(int fd) {
  const int error = errno;
  close(fd);
  errno = error;
}

// Opens `name` below `folder`, which stays open, component by component and without following
// links; for kernels without openat2. A directory may be exchanged for a link between stat and
// open, which O_NOFOLLOW refuses, so the stat only determines the errno.
int WalkBeneath(int folder, std::string_view name, int flags) {
  folder = OpenDescriptor([&] { return fcntl(folder, F_DUPFD_CLOEXEC, 0); });
  if (folder < 0) return -1;
  for (;;) {
    const std::size_t slash = name.find('/');
    const std::string part(name.substr(0, slash));
    const bool last = slash == std::string_view::npos;
    if (part == "..") {
      close(folder);
      errno = EXDEV;
      return -1;
    }
    struct stat st;
    int fd = -1;
    if (part.empty() && !last) {
      name.remove_prefix(1);  // Skips the second of two slashes.
      continue;
    }
    const std::string step = part.empty() ? "." : part;
    if (fstatat(folder, step.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(st.st_mode)) {
      errno = ELOOP;
    } else {
      fd = OpenAt(folder, step, O_NOFOLLOW | O_CLOEXEC | (last ? flags : O_PATH | O_DIRECTORY));
    }
    CloseKeepingErrno(folder);
    if (fd < 0 || last) return fd;
    folder = fd;
    name.remove_prefix(slash + 1);
  }
}

// OpenHostBeneath for an open directory, which stays open.
int OpenBelowFolder(int folder, const std::string& name, int flags, HostLinks links, bool walk) {
  if (name.starts_with('/')) {
    errno = EXDEV;
    return -1;
  }
  if (!walk) {
    // The kernel keeps the path inside, despite concurrent renames. Magic links (in /proc) lead
    // anywhere and never occur in a store.
    open_how how{};
    how.flags = static_cast<std::uint64_t>(flags | O_CLOEXEC);
    how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
    if (links == HostLinks::kNone) how.resolve |= RESOLVE_NO_SYMLINKS;
    // Continuous renames can make the kernel return EAGAIN each time.
    constexpr int kTries = 128;
    int fd = -1;
    for (int i = 0; i < kTries; ++i) {
      fd = OpenDescriptor([&] {
        return syscall(SYS_openat2, folder, name.empty() ? "." : name.c_str(), &how, sizeof how);
      });
      if (fd >= 0 || errno != EAGAIN) break;
    }
    // openat2 is missing before Linux 5.6 and in some containers; the walk follows no link at all.
    if (fd >= 0 || (errno != ENOSYS && errno != EPERM)) return fd;
  }
  return WalkBeneath(folder, name, flags);
}

}  // namespace

int OpenHostBeneath(const std::string& directory, const std::string& name, int flags,
                    HostLinks links, bool walk) {
  const int pinned = PinnedDescriptor(directory);  // A pinned directory is already open.
  const int folder =
      pinned >= 0 ? pinned : OpenAt(AT_FDCWD, directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return -1;
  const int fd = OpenBelowFolder(folder, name, flags, links, walk);
  if (folder != pinned) CloseKeepingErrno(folder);
  return fd;
}

Result<std::vector<DirectoryEntry>> ListHostBeneath(const std::string& directory,
                                                    const std::string& name) {
  const std::string path = name.empty() ? directory : JoinPath(directory, name);
  const int fd = OpenHostBeneath(directory, name, O_RDONLY | O_DIRECTORY | O_NONBLOCK);
  if (fd < 0) return HostError(errno, "list", path);
  const DirHandle dir(fdopendir(fd));
  if (!dir) {
    CloseKeepingErrno(fd);
    return HostError(errno, "list", path);
  }
  return ReadAll(dir.get(), path);
}

Status SyncHostDirectory(const std::string& path) {
  const DirHandle dir = OpenDir(AT_FDCWD, path.c_str());
  if (!dir) return HostError(errno, "open", path);
  // Syncing the directory, not the files in it, makes their names durable.
  while (fsync(dirfd(dir.get())) != 0) {
    if (errno != EINTR) return HostError(errno, "fsync", path);
  }
  return Status();
}

Status RemoveHostTree(const std::string& path) {
  const std::string name = WithoutTrailingSlashes(path);  // "link/" would be followed.
  return RemoveAt(AT_FDCWD, name, name);
}

}  // namespace tensormount
