// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_FILE_SYSTEM_H_
#define TENSORMOUNT_BASE_FILE_SYSTEM_H_

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

// The one way to the bytes of a store. Everything that touches a store goes through this
// interface, so that tests can inject faults and crashes and other backings can come behind it.
//
// Three implementations: the host's (host_file_system.cc), an observer around any other
// (ObservedFileSystem), and the file system of tests that forgets what was not synced
// (tests/support/power_cut.h). The last is why every durable step has a call of its own here: what
// the code above does not sync by name is gone after a power cut in those tests.

namespace tensormount {

// What a name is, as far as anybody here cares; sockets, devices and FIFOs are kOther.
enum class FileKind { kFile, kDirectory, kSymlink, kOther };

// What stat tells. Device and inode say whether two names are one file; size, inode and both times
// together are taken for the state of a file: while they stay, so do its bytes (FileStamp of
// index/read).
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

  // Nobody may write to it (File::Seal).
  bool sealed() const { return (mode & 0222) == 0; }
};

// One name in a folder. `kind` is of the name itself: a symlink is kSymlink wherever it leads.
struct DirectoryEntry {
  std::string name;
  FileKind kind = FileKind::kOther;
};

// An open file; positional I/O only: no call depends on another one's, and threads share a file
// without a lock around it. Thread-safe for reads and for writes of disjoint ranges.
// The destructor closes and drops errors: writers call Close().
class File {
 public:
  virtual ~File() = default;

  // Reads until `size` bytes are there or the file ends; returns how many. Retries EINTR and
  // short reads.
  virtual Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) = 0;
  // The same for consecutive bytes that go to several places, in order: where a run of a file is
  // cut up, no copy is needed. By ReadAt a piece where the implementation has nothing better.
  struct Buffer {
    void* data = nullptr;
    std::size_t size = 0;
  };
  virtual Result<std::size_t> ReadVectorAt(std::uint64_t offset, std::span<const Buffer> pieces);
  // What of these bytes can be had without waiting for storage, from the first one on: how many.
  // None where nobody knows. Never fails: what it does not give, ReadAt gives, or says why.
  virtual std::optional<std::size_t> ReadCached(std::uint64_t offset, void* out, std::size_t size) {
    (void)offset;
    (void)out;
    (void)size;
    return std::nullopt;
  }
  // All or an error (kResourceExhausted for ENOSPC, EDQUOT, EFBIG).
  virtual Status WriteAt(std::uint64_t offset, const void* data, std::size_t size) = 0;
  // Longer: zeros, without blocks where the filesystem has holes. Shorter: the rest is gone.
  virtual Status Truncate(std::uint64_t size) = 0;
  // A hint: these bytes are complete and will be synced, so the device may begin with them now.
  // Promises nothing and never fails.
  virtual void StartWriteback(std::uint64_t offset, std::uint64_t size) {
    (void)offset;  // Where there is no such thing.
    (void)size;
  }
  // A hint: these bytes will be read soon, so storage may begin with them now. Likewise.
  virtual void StartReading(std::uint64_t offset, std::uint64_t size) {
    (void)offset;
    (void)size;
  }
  // fsync. A failure condemns the file: never sync it again as if nothing had happened. Linux marks
  // the pages that it could not write as clean, so a second fsync succeeds and means nothing.
  virtual Status Sync() = 0;
  // fchmod to 0444 less the umask of the creator: no more writes by honest programs.
  virtual Status Seal() = 0;
  virtual Result<FileInfo> Stat() = 0;
  // flock, without waiting: kBusy where somebody else holds it. Released by closing.
  virtual Status TryLockShared() = 0;
  virtual Status TryLockExclusive() = 0;
  // Idempotent.
  virtual Status Close() = 0;
  // The host's descriptor for what only the kernel can do (passthrough, mmap); -1 where there is
  // none. Owned by the file.
  virtual int descriptor() const { return -1; }
  virtual const std::string& path() const = 0;

  // Exactly `size` bytes, or kDataLoss "<path>: N bytes at OFFSET wanted, file ends at ...".
  Status ReadExactAt(std::uint64_t offset, void* out, std::size_t size);
};

// All paths are the caller's; none is followed when its last component is a symlink (ELOOP),
// except in Stat and Resolve. kNotFound, kAlreadyExists, … as errno says.
// Implementations are thread-safe.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  virtual Result<std::unique_ptr<File>> OpenRead(const std::string& path) = 0;
  // `name` ("data/x") below `directory`, which may itself be reached through symlinks: none is
  // followed below it, and nothing outside of it is opened (ELOOP, EXDEV). Where there is no such
  // thing: OpenRead.
  virtual Result<std::unique_ptr<File>> OpenReadBelow(const std::string& directory,
                                                      const std::string& name);
  // `name` below `directory`, which may itself be reached through symlinks; "" is the directory.
  // Symlinks below it are followed where they stay inside of it; what leads out, by a link, by ".."
  // or absolutely, fails with EXDEV. Where the kernel cannot promise that (before Linux 5.6, in
  // some containers), links are refused (ELOOP). Only regular files open; FIFOs and devices do not
  // block. Where there is no such thing: by the operations above, after Resolve() of the whole.
  virtual Result<std::unique_ptr<File>> OpenReadBeneath(const std::string& directory,
                                                        const std::string& name);
  virtual Result<std::vector<DirectoryEntry>> ListBeneath(const std::string& directory,
                                                          const std::string& name);
  virtual Result<FileInfo> StatBeneath(const std::string& directory, const std::string& name);
  // O_RDWR | O_CREAT | O_EXCL, mode 0666 less umask.
  virtual Result<std::unique_ptr<File>> CreateExclusive(const std::string& path) = 0;
  // O_RDWR | O_CREAT: several writers share one file, each at its own offsets.
  virtual Result<std::unique_ptr<File>> OpenShared(const std::string& path) = 0;
  // mkdir 0777 less umask; kAlreadyExists where the name is taken.
  virtual Status CreateDirectory(const std::string& path) = 0;
  // Sorted by name, without . and .., so that whoever walks folders does so in the same order on
  // every machine.
  virtual Result<std::vector<DirectoryEntry>> List(const std::string& path) = 0;
  virtual Result<FileInfo> Stat(const std::string& path) = 0;      // Follows symlinks.
  virtual Result<FileInfo> LinkStat(const std::string& path) = 0;  // Does not.
  virtual Status Link(const std::string& from, const std::string& to) = 0;
  // renameat2(RENAME_NOREPLACE); where the filesystem refuses the flag, plain rename of a folder
  // that is never empty onto a name that must not exist (docs/format.md, "No-replace").
  virtual Status RenameNoReplace(const std::string& from, const std::string& to) = 0;
  // RENAME_EXCHANGE; kUnsupported where it is refused.
  virtual Status Exchange(const std::string& a, const std::string& b) = 0;
  virtual Status RemoveFile(const std::string& path) = 0;
  virtual Status RemoveDirectory(const std::string& path) = 0;
  virtual Status SyncDirectory(const std::string& path) = 0;
  // syncfs: all of the filesystem that `path` lies in, what was deleted too. May take long. Where
  // there is no such thing: SyncDirectory.
  virtual Status SyncFileSystem(const std::string& path) { return SyncDirectory(path); }
  // Makes durable that the folder `moved` was renamed (or exchanged) from the folder `from` into
  // the folder `to`: syncs `to`, then `from`; where MovedFoldersSyncThemselves only `moved`, and
  // neither of them.
  Status SyncMovedFolder(const std::string& moved, const std::string& to, const std::string& from);
  // Whether the SyncDirectory of a folder that was renamed into `folder` makes its new name
  // durable, and one of its old parent is to be avoided (btrfs: docs/format.md, "Renamed folders").
  virtual bool MovedFoldersSyncThemselves(const std::string& folder) {
    (void)folder;  // POSIX promises nothing of the kind.
    return false;
  }
  // realpath.
  virtual Result<std::string> Resolve(const std::string& path) = 0;
  // The time, for what is compared with time stamps of files: seconds since 1970.
  virtual std::int64_t NowSeconds();
  // For whoever waits for what another program does to the store. Here with the clock, so that a
  // test which decides who is next decides how long that takes, too.
  virtual void SleepFor(std::chrono::milliseconds time);
  // The POSIX access list as the kernel encodes it (system.posix_acl_access); empty where there is
  // none, or no such thing. Follows symlinks.
  virtual Result<std::string> AccessList(const std::string& path);
  // A path that leads to this folder while the result is kept, also when somebody renames the
  // folder meanwhile. Where there is no such thing: `path` itself.
  virtual Result<std::shared_ptr<const std::string>> PinDirectory(const std::string& path);

  // Conveniences on the above.
  // The whole file; kDataLoss where it is larger than `max_bytes`.
  Result<std::string> ReadFile(const std::string& path, std::uint64_t max_bytes);
  // Create, write, sync, close; not the directory.
  Status WriteFileDurably(const std::string& path, std::string_view data);
  // Puts `data` at `path` in one step, replacing what is there: readers see the old bytes or the
  // new ones. Not durable; one writer a path. For what only tells about progress.
  Status ReplaceFile(const std::string& path, std::string_view data);
  // mkdir -p for the parts that do not exist (the existing ones may be symlinks).
  Status CreateDirectories(const std::string& path);
  // rm -r: never follows symlinks; a missing path is fine. This form goes through the operations
  // above; the host's goes from descriptor to descriptor and opens folders without write
  // permission.
  virtual Status RemoveTree(const std::string& path);
  bool Exists(const std::string& path);
  // CreateDirectory where it is missing; kAlreadyExists where something else has the name.
  Status EnsureDirectory(const std::string& path);
};

// The machine's own. One for the process, stateless.
FileSystem& HostFileSystem();

// "a/b" from "a" and "b", without doubled slashes.
std::string JoinPath(std::string_view directory, std::string_view name);
// kUnsupported where somebody gave a URL ("s3://bucket/x"), or a path as scp takes it
// ("user@host:x", "host:/x"): as a path it would be a folder "s3:" of this host, which is found by
// nobody who looks in the bucket; and of "~/x", which no shell has replaced. "./s3:/bucket" is a
// path.
Status CheckIsPath(std::string_view text);
// One name for all ways to write a path: "/" stays.
std::string WithoutTrailingSlashes(std::string_view path);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_FILE_SYSTEM_H_
