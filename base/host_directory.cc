// SPDX-License-Identifier: Apache-2.0
#include "base/host_directory.h"

#include <algorithm>
#include <cerrno>
#include <dirent.h>
#include <fcntl.h>
#include <memory>
#include <sys/stat.h>
#include <unistd.h>

namespace tensormount {
namespace {

struct DirCloser {
  void operator()(DIR* d) const { closedir(d); }
};
using DirHandle = std::unique_ptr<DIR, DirCloser>;

// Sets errno and returns null on failure. `name` relative to the folder `at`.
DirHandle OpenDir(int at, const char* name) {
  int fd;
  do {
    fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  } while (fd < 0 && errno == EINTR);
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
    errno = 0;
    const dirent* entry = readdir(dir);
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    out.push_back({std::string(name), KindOf(dir, *entry)});
  }
  if (errno != 0) return Status::FromErrno(errno, "list", path);
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

// Removes `name` below the folder `at`; `path` is for messages.
Status RemoveAt(int at, const std::string& name, const std::string& path) {
  if (unlinkat(at, name.c_str(), 0) == 0 || errno == ENOENT) return Status();
  if (errno != EISDIR && errno != EPERM) return Status::FromErrno(errno, "unlink", path);
  const int unlink_errno = errno;
  {
    const DirHandle dir = OpenForRemoval(at, name.c_str());
    if (!dir) {
      if (errno == ENOENT) return Status();
      // Not a folder: then the refusal of unlink is what there is to say.
      const bool is_folder = errno != ENOTDIR && errno != ELOOP;
      return Status::FromErrno(is_folder ? errno : unlink_errno, "remove", path);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                                 ReadAll(dir.get(), path));
    for (const DirectoryEntry& entry : entries) {
      TENSORMOUNT_RETURN_IF_ERROR(
          RemoveAt(dirfd(dir.get()), entry.name, JoinPath(path, entry.name)));
    }
  }
  if (unlinkat(at, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) {
    return Status::FromErrno(errno, "rmdir", path);
  }
  return Status();
}

}  // namespace

Result<std::vector<DirectoryEntry>> ListHostDirectory(const std::string& path) {
  const DirHandle dir = OpenDir(AT_FDCWD, path.c_str());
  if (!dir) return Status::FromErrno(errno, "list", path);
  return ReadAll(dir.get(), path);
}

Status SyncHostDirectory(const std::string& path) {
  const DirHandle dir = OpenDir(AT_FDCWD, path.c_str());
  if (!dir) return Status::FromErrno(errno, "open", path);
  while (fsync(dirfd(dir.get())) != 0) {
    if (errno != EINTR) return Status::FromErrno(errno, "fsync", path);
  }
  return Status();
}

Status RemoveHostTree(const std::string& path) {
  std::string name = path;
  while (name.size() > 1 && name.back() == '/') name.pop_back();  // "link/" would be followed.
  return RemoveAt(AT_FDCWD, name, name);
}

}  // namespace tensormount
