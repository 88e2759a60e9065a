// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_FILE_SYSTEM_H_
#define TENSORMOUNT_BASE_FILE_SYSTEM_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/deadline.h"

// The interface for all file operations on a store, so that tests can inject faults and crashes,
// and other storage back ends are possible. FileSystemFor (base/file_system_for.h) chooses the
// implementation for a path.
//
// Implementations: the host's (host_file_system.cc); in tests/support/, among others, an observer
// around any other (ObservedFileSystem), and one that simulates power cuts: it loses what was not
// synced (PowerCutFileSystem). So that it can, every durability step is an explicit call.

namespace tensormount {

class ObjectWriter;  // base/object_writer.h

// Type of a directory entry; sockets, devices and FIFOs are kOther.
enum class FileKind { kFile, kDirectory, kSymlink, kOther };

// Optional features of a file system. Code that needs one asks first (FileSystem::Can) and takes
// another way, or fails with the error of FileSystem::Need. The host file system reports all of
// them; whether the mounted file system below a path supports one is known only from the call
// itself.
enum class Ability {
  kWrite,            // All changes of files or directories.
  kLocks,            // File locks: File::TryLockShared, TryLockExclusive.
  kKernelFiles,      // Kernel paths and descriptors: mmap, statfs, access.
  kHardLinks,        // Hard links: FileSystem::Link.
  kRenameNoReplace,  // Renaming without replacing: FileSystem::RenameNoReplace.
  kStamps,           // FileInfo has device, inode, links and change time.
};

// The result of stat. Equal device and inode mean the same file. While size, inode and both times
// are unchanged, the contents count as unchanged (FileStamp of index/read). If inode is 0, it is
// not known (Ability::kStamps), and only size and mtime detect changes.
struct FileInfo {
  FileKind kind = FileKind::kOther;
  std::uint64_t size = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t links = 0;
  std::uint32_t mode = 0;  // Permission bits.
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  std::int64_t mtime_seconds = 0;
  std::int64_t mtime_nanoseconds = 0;
  std::int64_t ctime_seconds = 0;
  std::int64_t ctime_nanoseconds = 0;

  // Whether the file has no write permission for anyone (File::Seal).
  bool sealed() const { return (mode & 0222) == 0; }
};

// A directory entry. `kind` does not follow links: a symlink is always kSymlink.
struct DirectoryEntry {
  std::string name;
  FileKind kind = FileKind::kOther;
};

// A range of a file to read (File::ReadMany), and its destination.
struct ReadRun {
  std::uint64_t offset = 0;
  std::span<std::byte> out;
};

// When a read of many runs gives up.
struct ReadLimits {
  std::optional<Deadline> deadline = std::nullopt;
  const std::atomic<bool>* cancel = nullptr;  // Set by another thread; null: never.
};

// An open file with positional I/O only, so calls do not depend on each other. Thread-safe for
// reads and for writes of disjoint ranges. The destructor closes and drops errors: writers call
// Close().
class File {
 public:
  virtual ~File() = default;

  // Reads `size` bytes, or up to the end of the file; returns the number read. Retries EINTR and
  // short reads.
  virtual Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) = 0;
  // Like ReadAt, for a caller that goes on to read what follows, up to `end` at most: a remote file
  // may ask for it ahead. The default calls ReadAt.
  virtual Result<std::size_t> ReadAtWithin(std::uint64_t offset, void* out, std::size_t size,
                                           std::uint64_t end) {
    (void)end;
    return ReadAt(offset, out, size);
  }
  // Reads consecutive bytes into several buffers, in order (preadv). The default calls ReadAt for
  // each buffer.
  struct Buffer {
    void* data = nullptr;
    std::size_t size = 0;
  };
  virtual Result<std::size_t> ReadVectorAt(std::uint64_t offset, std::span<const Buffer> pieces);
  // Reads all runs completely. Use it whenever more than one run is needed and nothing is mapped: a
  // remote file system can fetch them in one round trip. Pass runs sorted by offset; adjacent runs
  // are read together. ReadAt and ReadMany retry transient errors themselves, so their result is
  // final for this call; a new call may succeed after kUnavailable and kDeadlineExceeded. Errors:
  // kDataLoss, as in ReadExactAt, for the first run past the end of the file; kCancelled and
  // kDeadlineExceeded from `limits`, which are checked between storage calls. After an error the
  // contents of all runs are undefined. The default calls StartReading for the runs, then reads
  // them one after another.
  virtual Status ReadMany(std::span<const ReadRun> runs, const ReadLimits& limits = {});
  // Reads the first bytes of the range, as far as they are in the page cache, and returns their
  // number; nullopt if the file system cannot tell. Never fails: ReadAt reports errors.
  virtual std::optional<std::size_t> ReadCached(std::uint64_t offset, void* out, std::size_t size) {
    (void)offset;
    (void)out;
    (void)size;
    return std::nullopt;
  }
  // Writes all bytes or fails (kResourceExhausted for ENOSPC, EDQUOT, EFBIG).
  virtual Status WriteAt(std::uint64_t offset, const void* data, std::size_t size) = 0;
  // Extends the file with zeros (a hole where supported), or truncates it.
  virtual Status Truncate(std::uint64_t size) = 0;
  // Hint: this range is complete and will be synced, so writeback may start now. Never fails.
  virtual void StartWriteback(std::uint64_t offset, std::uint64_t size) {
    (void)offset;  // The default does nothing.
    (void)size;
  }
  // Hint: this range will be read soon, so read-ahead may start now. Never fails.
  virtual void StartReading(std::uint64_t offset, std::uint64_t size) {
    (void)offset;
    (void)size;
  }
  // Whether the page of this byte is in the page cache; nullopt if that is not known, as for the
  // host's files that belong to another user. Reads nothing.
  virtual std::optional<bool> IsCached(std::uint64_t offset) {
    (void)offset;
    return std::nullopt;
  }
  // Brings a unit of the file (base/fetch_pages.h), or several, into the page cache and waits for
  // it. False if that is not possible.
  virtual bool Fetch(std::uint64_t offset, std::uint64_t size) {
    (void)offset;
    (void)size;
    return false;
  }
  // fsync. After a failure never sync the file again: Linux marks pages that it could not write as
  // clean, so a second fsync succeeds without having written them.
  virtual Status Sync() = 0;
  // Makes the file read-only: removes all permissions except those to read (fchmod).
  virtual Status Seal() = 0;
  virtual Result<FileInfo> Stat() = 0;
  // flock without waiting: kBusy if another open file has a conflicting lock. Closing releases the
  // lock.
  virtual Status TryLockShared() = 0;
  virtual Status TryLockExclusive() = 0;
  // Closes the file; a second Close does nothing.
  virtual Status Close() = 0;
  // The host's descriptor for kernel-only operations (passthrough, mmap); -1 if there is none. The
  // file owns the descriptor.
  virtual int descriptor() const { return -1; }
  virtual const std::string& path() const = 0;

  // Reads exactly `size` bytes, or fails with kDataLoss "<path>: N bytes expected at byte OFFSET,
  // but the file ends at byte ...".
  Status ReadExactAt(std::uint64_t offset, void* out, std::size_t size);
};

// If the last component of a path is a symlink, OpenRead, OpenShared, List and SyncDirectory refuse
// it (ELOOP); LinkStat, Link, renames and removals act on the symlink itself; Stat, Resolve and
// AccessList follow it. Codes follow errno: kNotFound, kAlreadyExists, … Implementations are
// thread-safe.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // How error messages name this file system.
  virtual std::string_view name() const { return "this file system"; }
  virtual bool Can(Ability) const { return true; }
  // How files are written if this is a bucket of objects, which has no ability to write otherwise;
  // null: it is none.
  virtual ObjectWriter* object_writer() { return nullptr; }
  // Ok if the ability exists; otherwise kUnsupported (kReadOnly for kWrite): "PATH: NAME does not
  // support file locks".
  Status Need(Ability ability, std::string_view path) const;

  virtual Result<std::unique_ptr<File>> OpenRead(const std::string& path) = 0;
  // Opens `name` ("data/x") below `directory`. `directory` itself may be reached through symlinks;
  // below it no symlink is followed, and nothing outside it is opened (ELOOP, EXDEV). The default
  // calls OpenRead.
  virtual Result<std::unique_ptr<File>> OpenReadBelow(const std::string& directory,
                                                      const std::string& name);
  // Operations on `name` below `directory`, which may itself be reached through symlinks; "" is the
  // directory. Symlinks below it are followed if they stay inside; a path that leaves it, by a
  // link, by ".." or as an absolute path, fails with EXDEV. If the kernel cannot enforce that
  // (before Linux 5.6, in some containers), links are refused (ELOOP). Only regular files open;
  // FIFOs and devices do not block. The default uses the operations above, after Resolve() of the
  // whole path.
  virtual Result<std::unique_ptr<File>> OpenReadBeneath(const std::string& directory,
                                                        const std::string& name);
  virtual Result<std::vector<DirectoryEntry>> ListBeneath(const std::string& directory,
                                                          const std::string& name);
  virtual Result<FileInfo> StatBeneath(const std::string& directory, const std::string& name);
  // Creates a file that must not exist, for reading and writing (O_CREAT | O_EXCL, mode 0666 minus
  // umask).
  virtual Result<std::unique_ptr<File>> CreateExclusive(const std::string& path) = 0;
  // Opens or creates a file that several writers share, each at its own offsets (O_RDWR | O_CREAT).
  virtual Result<std::unique_ptr<File>> OpenShared(const std::string& path) = 0;
  // mkdir 0777 minus umask; kAlreadyExists if the name is taken.
  virtual Status CreateDirectory(const std::string& path) = 0;
  // Entries sorted by name, without . and .., so that the order is the same on every machine.
  virtual Result<std::vector<DirectoryEntry>> List(const std::string& path) = 0;
  virtual Result<FileInfo> Stat(const std::string& path) = 0;      // Follows symlinks.
  virtual Result<FileInfo> LinkStat(const std::string& path) = 0;  // Does not follow symlinks.
  virtual Status Link(const std::string& from, const std::string& to) = 0;
  // renameat2(RENAME_NOREPLACE). If the filesystem refuses the flag, a directory that is not empty
  // is renamed plainly, and a file is linked to the new name and unlinked from the old one
  // (docs/format.md, "No-replace").
  virtual Status RenameNoReplace(const std::string& from, const std::string& to) = 0;
  // Exchanges two names (RENAME_EXCHANGE); kUnsupported if the filesystem refuses it.
  virtual Status Exchange(const std::string& a, const std::string& b) = 0;
  virtual Status RemoveFile(const std::string& path) = 0;
  virtual Status RemoveDirectory(const std::string& path) = 0;
  virtual Status SyncDirectory(const std::string& path) = 0;
  // syncfs of the whole filesystem that contains `path`, deletions included; may take long. The
  // default calls SyncDirectory.
  virtual Status SyncFileSystem(const std::string& path) { return SyncDirectory(path); }
  // Makes the rename (or exchange) of the directory `moved` from directory `from` to directory `to`
  // durable: syncs `to`, then `from`. If CanSyncOnlyMovedFolder, it syncs only `moved`, or the
  // whole filesystem if `moved` cannot be opened.
  Status SyncMovedFolder(const std::string& moved, const std::string& to, const std::string& from);
  // Whether SyncDirectory of a directory that was renamed into `folder` makes its new name durable,
  // so that syncing its old parent is unnecessary (btrfs: docs/format.md, "Renamed folders").
  virtual bool CanSyncOnlyMovedFolder(const std::string& folder) {
    (void)folder;  // POSIX gives no such guarantee.
    return false;
  }
  // The absolute path without symlinks (realpath).
  virtual Result<std::string> Resolve(const std::string& path) = 0;
  // Current time in seconds since 1970, for comparison with file timestamps.
  virtual std::int64_t NowSeconds();
  // Sleeps while waiting for another program's changes to the store. Virtual, so that tests control
  // the time.
  virtual void SleepFor(std::chrono::milliseconds time);
  // The POSIX access list as the kernel encodes it (system.posix_acl_access); empty if there is
  // none, or if it is not supported. Follows symlinks.
  virtual Result<std::string> AccessList(const std::string& path);
  // A path that leads to this directory as long as the result lives, even if the directory is
  // renamed. The default returns `path` itself.
  virtual Result<std::shared_ptr<const std::string>> PinDirectory(const std::string& path);

  // Helpers built on the operations above. ReadFile reads the whole file; kDataLoss if it is larger
  // than `max_bytes`.
  Result<std::string> ReadFile(const std::string& path, std::uint64_t max_bytes);
  // Creates, writes, syncs and closes the file; does not sync the directory.
  Status WriteFileDurably(const std::string& path, std::string_view data);
  // Replaces `path` by a file with `data`: readers see the old or the new contents, or, on a file
  // system without Exchange, for a moment no file. Not durable. If several writers replace one path
  // at once, the file may have parts of both. For files that may be lost in a crash (progress,
  // reports).
  Status ReplaceFile(const std::string& path, std::string_view data);
  // mkdir -p; existing components may be symlinks.
  Status CreateDirectories(const std::string& path);
  // rm -r: never follows symlinks; a missing path is ok. The default uses the operations above. The
  // host's version walks by descriptor, and gives the owner missing permissions of directories.
  virtual Status RemoveTree(const std::string& path);
  bool Exists(const std::string& path);
  // Creates the directory if it is missing; kAlreadyExists if the name belongs to something else.
  Status EnsureDirectory(const std::string& path);
};

// The host's file system: one stateless object per process. Product code gets it from FileSystemFor
// (base/file_system_for.h), which a layering test checks.
FileSystem& HostFileSystem();

// "a/b" from "a" and "b", without doubled slashes.
std::string JoinPath(std::string_view directory, std::string_view name);
// `path` without trailing slashes; "/" stays.
std::string WithoutTrailingSlashes(std::string_view path);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_FILE_SYSTEM_H_
