// SPDX-License-Identifier: Apache-2.0
// Folders of the host, by descriptors instead of paths: each step of a walk opens the next name
// relative to the folder that is open already and follows no symlink, so that nobody who renames or
// links things meanwhile can lead a walk, or a removal, out of the folder that it began in.
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

// Sets errno and returns null on failure. `name` relative to the folder `at`.
DirHandle OpenDir(int at, const char* name) {
  const int fd = OpenDescriptor([&] {
    return openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  });
  if (fd < 0) {
    struct stat st;
    // With O_DIRECTORY Linux answers ENOTDIR for a symlink; callers are promised ELOOP.
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

// Most filesystems tell the kind with the name; some (and some network ones always) leave it to
// stat.
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
    errno = 0;  // Null is both the end and a failure; only errno tells which.
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

// Opens for removal, granting ourselves what the mode lacks. The chmod goes through a descriptor
// that follows no symlink.
DirHandle OpenForRemoval(int at, const char* name) {
  DirHandle dir = OpenDir(at, name);
  if (!dir && errno == EACCES) {
    const int fd = openat(at, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return nullptr;
    // fchmod refuses an O_PATH descriptor; its name under /proc leads to the same inode.
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
    (void)fchmod(dirfd(dir.get()), (st.st_mode & 07777) | 0700);  // Not ours: unlink will tell.
  }
  return dir;
}

// Removes `name` below the folder `at`; `path` is for messages. unlink first and without a look:
// most names are files, and a look would be out of date by then. Linux answers EISDIR for a folder,
// POSIX allows EPERM, which is also the answer for what must not be removed; opening it as a folder
// tells these apart. Recursion is as deep as the tree, with one open descriptor a level.
Status RemoveAt(int at, const std::string& name, const std::string& path) {
  if (unlinkat(at, name.c_str(), 0) == 0 || errno == ENOENT) return Status();
  if (errno != EISDIR && errno != EPERM) return HostError(errno, "unlink", path);
  const int unlink_errno = errno;
  {
    const DirHandle dir = OpenForRemoval(at, name.c_str());
    if (!dir) {
      if (errno == ENOENT) return Status();
      // Not a folder: then the refusal of unlink is what there is to say.
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

// Component by component, following no link; `folder` stays the caller's. What openat2 does in one
// step in the kernel; here a folder may be exchanged for a link between the look and the open,
// which O_NOFOLLOW then refuses, so the look decides nothing but the errno.
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
      name.remove_prefix(1);  // Doubled slashes.
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

// OpenHostBeneath, of a folder that is open; `folder` stays the caller's.
int OpenBelowFolder(int folder, const std::string& name, int flags, HostLinks links, bool walk) {
  if (name.starts_with('/')) {
    errno = EXDEV;
    return -1;
  }
  if (!walk) {
    // The kernel itself keeps the path inside, whatever is renamed meanwhile. Magic links (those of
    // /proc) lead anywhere and are none of a store's.
    open_how how{};
    how.flags = static_cast<std::uint64_t>(flags | O_CLOEXEC);
    how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
    if (links == HostLinks::kNone) how.resolve |= RESOLVE_NO_SYMLINKS;
    // Somebody who keeps renaming folders can make the kernel give up each time.
    constexpr int kTries = 128;
    int fd = -1;
    for (int i = 0; i < kTries; ++i) {
      fd = OpenDescriptor([&] {
        return syscall(SYS_openat2, folder, name.empty() ? "." : name.c_str(), &how, sizeof how);
      });
      if (fd >= 0 || errno != EAGAIN) break;
    }
    // Not before Linux 5.6, nor in containers that do not know the call: then no link is followed.
    if (fd >= 0 || (errno != ENOSYS && errno != EPERM)) return fd;
  }
  return WalkBeneath(folder, name, flags);
}

}  // namespace

int OpenHostBeneath(const std::string& directory, const std::string& name, int flags,
                    HostLinks links, bool walk) {
  const int pinned = PinnedDescriptor(directory);  // Open already.
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
  // Names in a folder are durable when the folder was synced; the files' own fsync promises none.
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
