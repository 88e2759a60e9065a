// SPDX-License-Identifier: Apache-2.0
// FileSystem by system calls of the host: HostFileSystem() of base/file_system.h. It has no header
// of its own, so that code above uses only the interface, and tests can substitute faults, power
// cuts and foreign filesystems.
//
// EINTR and short transfers are handled here. If a filesystem lacks a flag of rename, another call
// with the same guarantee is used, or the call fails. The one weaker case: a rename may replace an
// empty directory (base/host_rename.h).
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <limits>
#include <linux/magic.h>
#include <mutex>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/fetch_pages.h"
#include "base/file_system.h"
#include "base/host_directory.h"
#include "base/host_pins.h"
#include "base/host_rename.h"
#include "base/spare_descriptors.h"

namespace tensormount {
namespace {

// Linux transfers at most 2 GiB minus a page per call. 1 GiB keeps the next offset aligned.
constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;
constexpr std::size_t kMaxVector = 1024;  // IOV_MAX
constexpr std::uint64_t kMaxOffset =
    static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

// The error for an offset beyond off_t. It would become negative, and pread would return EINVAL,
// which looks like a wrong flag.
Status PositionError(std::string_view action, const std::string& path) {
  return HostError(EOVERFLOW, action, path);
}

FileInfo InfoOf(const struct stat& st) {
  FileInfo info;
  info.kind = S_ISREG(st.st_mode)   ? FileKind::kFile
              : S_ISDIR(st.st_mode) ? FileKind::kDirectory
              : S_ISLNK(st.st_mode) ? FileKind::kSymlink
                                    : FileKind::kOther;
  info.size = static_cast<std::uint64_t>(st.st_size);
  info.device = st.st_dev;
  info.inode = st.st_ino;
  info.links = st.st_nlink;
  info.mode = st.st_mode & 07777;
  info.uid = st.st_uid;
  info.gid = st.st_gid;
  info.mtime_seconds = st.st_mtim.tv_sec;
  info.mtime_nanoseconds = st.st_mtim.tv_nsec;
  info.ctime_seconds = st.st_ctim.tv_sec;
  info.ctime_nanoseconds = st.st_ctim.tv_nsec;
  return info;
}

// One descriptor. Reads and writes take no lock, because pread and pwrite carry their own offsets.
// Close is locked, so that two closing threads do not close a reused descriptor; readers must make
// sure that no thread closes meanwhile.
class HostFile final : public File {
 public:
  HostFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  ~HostFile() override { (void)HostFile::Close(); }
  HostFile(const HostFile&) = delete;
  HostFile& operator=(const HostFile&) = delete;

  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    if (!RangeWithin(offset, size, kMaxOffset)) return PositionError("read", path_);
    std::size_t done = 0;
    while (done < size) {
      const ssize_t n = pread(fd_, static_cast<char*>(out) + done,
                              std::min(size - done, kMaxTransfer), ToOffset(offset + done));
      if (n > 0) {
        done += static_cast<std::size_t>(n);
      } else if (n == 0) {
        break;
      } else if (errno != EINTR) {
        return HostError(errno, ReadingFrom(offset + done), path_);
      }
    }
    return done;
  }

  // Reads up to 1,024 buffers and kMaxTransfer bytes per call. A call may end in the middle of a
  // buffer; its rest is read separately, so that the remaining buffers are whole again.
  Result<std::size_t> ReadVectorAt(std::uint64_t offset, std::span<const Buffer> pieces) override {
    std::array<iovec, kMaxVector> vector;
    std::size_t done = 0;
    while (!pieces.empty()) {
      std::size_t count = 0;
      std::size_t wanted = 0;
      while (count < std::min(pieces.size(), vector.size()) &&
             pieces[count].size <= kMaxTransfer - wanted) {
        vector[count] = {pieces[count].data, pieces[count].size};
        wanted += pieces[count++].size;
      }
      if (count == 0) {  // One buffer larger than the limit of a call.
        TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got,
                                     ReadAt(offset + done, pieces[0].data, pieces[0].size));
        done += got;
        if (got < pieces[0].size) return done;
        pieces = pieces.subspan(1);
        continue;
      }
      if (!RangeWithin(offset, done + wanted, kMaxOffset)) return PositionError("read", path_);
      const ssize_t n =
          preadv(fd_, vector.data(), static_cast<int>(count), ToOffset(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return HostError(errno, ReadingFrom(offset + done), path_);
      auto left = static_cast<std::size_t>(n);
      if (left == 0 && wanted > 0) return done;
      done += left;
      while (!pieces.empty() && left >= pieces[0].size) {
        left -= pieces[0].size;
        pieces = pieces.subspan(1);
        if (left == 0) break;
      }
      if (left == 0) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const std::size_t got,
          ReadAt(offset + done, static_cast<char*>(pieces[0].data) + left, pieces[0].size - left));
      done += got;
      if (got < pieces[0].size - left) return done;
      pieces = pieces.subspan(1);
    }
    return done;
  }
  std::optional<std::size_t> ReadCached(std::uint64_t offset, void* out,
                                        std::size_t size) override {
    if (!knows_cached_.load(std::memory_order_relaxed)) return std::nullopt;
    if (!RangeWithin(offset, size, kMaxOffset)) return std::nullopt;
    const iovec piece{out, std::min(size, kMaxTransfer)};
    const ssize_t n = preadv2(fd_, &piece, 1, ToOffset(offset), RWF_NOWAIT);
    if (n >= 0) return static_cast<std::size_t>(n);
    if (errno == EAGAIN) return 0;
    // The filesystem or kernel does not support RWF_NOWAIT. Other errors are left to ReadAt.
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) knows_cached_ = false;
    return std::nullopt;
  }
  Status WriteAt(std::uint64_t offset, const void* data, std::size_t size) override {
    if (!RangeWithin(offset, size, kMaxOffset)) return PositionError("write", path_);
    std::size_t done = 0;
    while (done < size) {
      const ssize_t n = pwrite(fd_, static_cast<const char*>(data) + done,
                               std::min(size - done, kMaxTransfer), ToOffset(offset + done));
      if (n > 0) {
        done += static_cast<std::size_t>(n);
      } else if (n == 0) {
        // POSIX allows a device to return 0; retrying might never end.
        return HostError(EIO, "write", path_);
      } else if (errno != EINTR) {
        return HostError(errno, "write", path_);
      }
    }
    return Status();
  }

  Status Truncate(std::uint64_t size) override {
    if (size > kMaxOffset) return PositionError("truncate", path_);
    return Call("truncate", [&] { return ftruncate(fd_, ToOffset(size)); });
  }

  void StartWriteback(std::uint64_t offset, std::uint64_t size) override {
    // Errors are ignored here, because fsync reports them again.
    (void)sync_file_range(fd_, static_cast<off64_t>(offset), static_cast<off64_t>(size),
                          SYNC_FILE_RANGE_WRITE);
  }
  void StartReading(std::uint64_t offset, std::uint64_t size) override {
    (void)posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(size),
                        POSIX_FADV_WILLNEED);
  }
  std::optional<bool> IsCached(std::uint64_t offset) override {
    if (!RangeWithin(offset, 1, kMaxOffset) || !IsOwn()) return std::nullopt;
    return IsPageCached(fd_, offset);
  }
  bool Fetch(std::uint64_t offset, std::uint64_t size) override {
    return RangeWithin(offset, size, kMaxOffset) && FetchPages(fd_, offset, size);
  }
  Status Sync() override {
    return Call("fsync", [&] { return fsync(fd_); });
  }

  // Only removes permission bits, so that it never grants any that the umask denied.
  Status Seal() override {
    struct stat st;
    if (fstat(fd_, &st) != 0) return HostError(errno, "stat", path_);
    return Call("make read-only", [&] { return fchmod(fd_, st.st_mode & 0444); });
  }

  Result<FileInfo> Stat() override {
    struct stat st;
    if (fstat(fd_, &st) != 0) return HostError(errno, "stat", path_);
    return InfoOf(st);
  }

  Status TryLockShared() override { return Lock(LOCK_SH); }
  Status TryLockExclusive() override { return Lock(LOCK_EX); }

  Status Close() override {
    const std::lock_guard lock(close_mutex_);
    if (fd_ < 0) return Status();
    const int fd = std::exchange(fd_, -1);
    // Linux frees the descriptor whatever close returns, so EINTR is not a failure.
    if (close(fd) != 0 && errno != EINTR) return HostError(errno, "close", path_);
    return Status();
  }

  int descriptor() const override { return fd_; }
  const std::string& path() const override { return path_; }

 private:
  static off_t ToOffset(std::uint64_t v) { return static_cast<off_t>(v); }

  // For other users every page looks cached.
  bool IsOwn() {
    Ownership known = ownership_.load(std::memory_order_relaxed);
    if (known == Ownership::kUnknown) {
      struct stat st;
      known = fstat(fd_, &st) == 0 && st.st_uid == geteuid() ? Ownership::kOwn : Ownership::kOther;
      ownership_.store(known, std::memory_order_relaxed);
    }
    return known == Ownership::kOwn;
  }

  // Names the position of the failure. The kernel first returns the bytes before an unreadable
  // page, so `byte` is the begin of that page.
  static std::string ReadingFrom(std::uint64_t byte) {
    return "read from byte " + std::to_string(byte) + " of";
  }

  template <typename F>
  Status Call(std::string_view action, F f) {
    while (f() != 0) {
      if (errno != EINTR) return HostError(errno, action, path_);
    }
    return Status();
  }

  Status Lock(int how) {
    while (flock(fd_, how | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK)
        return Status(Code::kBusy, "lock " + path_ + ": already locked by another process");
      if (errno != EINTR) return HostError(errno, "lock", path_);
    }
    return Status();
  }

  std::mutex close_mutex_;
  int fd_;
  std::atomic<bool> knows_cached_{true};
  enum class Ownership { kUnknown, kOwn, kOther };
  std::atomic<Ownership> ownership_{Ownership::kUnknown};
  const std::string path_;
};

// Stateless; each call is one system call if the kernel has one for it. Paths go to the kernel
// unchanged.
class HostFs final : public FileSystem {
 public:
  std::string_view name() const override { return "this host"; }
  Result<std::unique_ptr<File>> OpenRead(const std::string& path) override {
    return Open(path, O_RDONLY, "open");
  }
  Result<std::unique_ptr<File>> OpenReadBelow(const std::string& directory,
                                              const std::string& name) override {
    const int fd = OpenHostBeneath(directory, name, O_RDONLY | kAlways, HostLinks::kNone);
    return Opened(fd, JoinPath(directory, name), "open");
  }

  Result<std::unique_ptr<File>> OpenReadBeneath(const std::string& directory,
                                                const std::string& name) override {
    const int fd = OpenHostBeneath(directory, name, O_RDONLY | (kAlways & ~O_NOFOLLOW));
    return Opened(fd, JoinPath(directory, name), "open");
  }
  Result<std::vector<DirectoryEntry>> ListBeneath(const std::string& directory,
                                                  const std::string& name) override {
    return ListHostBeneath(directory, name);
  }
  Result<FileInfo> StatBeneath(const std::string& directory, const std::string& name) override {
    const std::string path = JoinPath(directory, name);
    const int fd = OpenHostBeneath(directory, name, O_PATH);
    if (fd < 0) return HostError(errno, "stat", path);
    struct stat st;
    const int result = fstat(fd, &st);
    const int error = errno;  // close may change errno.
    close(fd);
    if (result != 0) return HostError(error, "stat", path);
    return InfoOf(st);
  }

  Result<std::unique_ptr<File>> CreateExclusive(const std::string& path) override {
    return Open(path, O_RDWR | O_CREAT | O_EXCL, "create");
  }
  Result<std::unique_ptr<File>> OpenShared(const std::string& path) override {
    return Open(path, O_RDWR | O_CREAT, "open");
  }

  Status CreateDirectory(const std::string& path) override {
    if (mkdir(path.c_str(), 0777) != 0) return HostError(errno, "mkdir", path);
    return Status();
  }

  Result<std::vector<DirectoryEntry>> List(const std::string& path) override {
    return ListHostDirectory(path);
  }

  Result<FileInfo> Stat(const std::string& path) override {
    struct stat st;
    if (stat(path.c_str(), &st) != 0) return HostError(errno, "stat", path);
    return InfoOf(st);
  }

  Result<FileInfo> LinkStat(const std::string& path) override {
    struct stat st;
    if (lstat(path.c_str(), &st) != 0) return HostError(errno, "stat", path);
    return InfoOf(st);
  }

  Status Link(const std::string& from, const std::string& to) override {
    if (linkat(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), 0) != 0) {
      return HostError(errno, "link " + from + " to", to);
    }
    return Status();
  }

  Status RenameNoReplace(const std::string& from, const std::string& to) override {
    if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) {
      return Status();
    }
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) {
      return RenameNoReplaceWithoutFlag(from, to);
    }
    return HostError(errno, "rename " + from + " to", to);
  }

  Status Exchange(const std::string& a, const std::string& b) override {
    if (renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return Status();
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) {
      return Status(
          Code::kUnsupported,
          "exchange " + a + " and " + b + ": the filesystem cannot exchange two names atomically");
    }
    return HostError(errno, "exchange " + a + " and", b);
  }

  Status RemoveFile(const std::string& path) override {
    if (unlinkat(AT_FDCWD, path.c_str(), 0) != 0) return HostError(errno, "unlink", path);
    return Status();
  }

  Status RemoveDirectory(const std::string& path) override {
    if (unlinkat(AT_FDCWD, path.c_str(), AT_REMOVEDIR) != 0) {
      return HostError(errno, "rmdir", path);
    }
    return Status();
  }

  Status SyncDirectory(const std::string& path) override { return SyncHostDirectory(path); }

  Status SyncFileSystem(const std::string& path) override {
    const int fd =
        OpenDescriptor([&] { return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    if (fd < 0) return Status::FromErrno(errno, "open", path);
    const int err = syncfs(fd) == 0 ? 0 : errno;
    close(fd);
    return err == 0 ? Status() : Status::FromErrno(err, "sync the filesystem of", path);
  }

  bool CanSyncOnlyMovedFolder(const std::string& folder) override {
    struct statfs info;
    // Detected, not configured: a store may be moved to another filesystem.
    return statfs(folder.c_str(), &info) == 0 &&
           static_cast<unsigned long>(info.f_type) == BTRFS_SUPER_MAGIC;
  }

  Result<std::string> AccessList(const std::string& path) override {
    // The largest size of an attribute (xattr(7)).
    std::string list(65536, '\0');
    const ssize_t n = getxattr(path.c_str(), "system.posix_acl_access", list.data(), list.size());
    if (n < 0) {
      if (errno == ENODATA || errno == ENOTSUP) return std::string();
      return Status::FromErrno(errno, "read the access list of", path);
    }
    list.resize(static_cast<std::size_t>(n));
    return list;
  }

  Result<std::string> Resolve(const std::string& path) override {
    char* resolved = realpath(path.c_str(), nullptr);
    if (resolved == nullptr) return HostError(errno, "resolve", path);
    std::string out = resolved;
    std::free(resolved);
    return out;
  }

  Status RemoveTree(const std::string& path) override { return RemoveHostTree(path); }

  Result<std::shared_ptr<const std::string>> PinDirectory(const std::string& path) override {
    return PinHostDirectory(path);
  }

 private:
  // O_NONBLOCK: opening a FIFO in a store must not block; regular files ignore it.
  static constexpr int kAlways = O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK;

  static Result<std::unique_ptr<File>> Open(const std::string& path, int flags,
                                            std::string_view action) {
    const int fd = OpenDescriptor([&] { return open(path.c_str(), flags | kAlways, 0666); });
    return Opened(fd, path, action);
  }

  // Wraps `fd`; if it is -1, returns the error in errno.
  static Result<std::unique_ptr<File>> Opened(int fd, const std::string& path,
                                              std::string_view action) {
    if (fd < 0) return HostError(errno, action, path);
    // From here on HostFile closes the descriptor. open(2) accepts a directory for reading and,
    // with O_NONBLOCK, a FIFO; both are refused here.
    auto file = std::make_unique<HostFile>(fd, path);
    TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
    if (info.kind == FileKind::kDirectory) return HostError(EISDIR, action, path);
    if (info.kind != FileKind::kFile) {
      return Status(Code::kInvalidArgument,
                    std::string(action) + " " + path + ": not a regular file");
    }
    return std::unique_ptr<File>(std::move(file));
  }
};

}  // namespace

Status RenameNoReplaceWithoutFlag(const std::string& from, const std::string& to) {
  const std::string action = "rename " + from + " to";
  struct stat st;
  if (lstat(from.c_str(), &st) != 0) return HostError(errno, "rename", from);
  if (!S_ISDIR(st.st_mode)) {
    if (linkat(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), 0) != 0) {
      return HostError(errno, action, to);
    }
    // The file has both names now. The new one stays if removing the old one fails, so nothing is
    // lost.
    if (unlinkat(AT_FDCWD, from.c_str(), 0) != 0) return HostError(errno, "unlink", from);
    return Status();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, ListHostDirectory(from));
  if (entries.empty()) {
    return Status(
        Code::kUnsupported,
        action + " " + to +
            ": the filesystem does not support RENAME_NOREPLACE, without which an empty directory "
            "could replace another one");
  }
  // lstat is only for the message; rename itself decides: it replaces neither a directory with
  // entries, nor a file by a directory.
  struct stat target;
  if (lstat(to.c_str(), &target) == 0) return HostError(EEXIST, action, to);
  if (errno != ENOENT) return HostError(errno, action, to);
  if (rename(from.c_str(), to.c_str()) == 0) return Status();
  // ENOTDIR means that the name was taken by a file after the lstat.
  return HostError(errno == ENOTDIR ? EEXIST : errno, action, to);
}

FileSystem& HostFileSystem() {
  static auto* fs = new HostFs;  // Never destroyed: threads may use it during exit.
  return *fs;
}

}  // namespace tensormount
