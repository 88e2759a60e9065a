// SPDX-License-Identifier: Apache-2.0
// Operations that all implementations of FileSystem share, built only on its calls, so that an
// observer or a test sees each step: writing whole files durably (create, write, fsync, close),
// replacing them (write a new file, exchange or rename), creating directories, removing trees.
#include "base/file_system.h"

#include <algorithm>
#include <cerrno>
#include <thread>

#include "base/checked.h"

namespace tensormount {

Result<std::size_t> File::ReadVectorAt(std::uint64_t offset, std::span<const Buffer> pieces) {
  std::size_t done = 0;
  for (const Buffer& piece : pieces) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got,
                                 ReadAt(offset + done, piece.data, piece.size));
    done += got;
    if (got < piece.size) break;  // End of file.
  }
  return done;
}

namespace {

Status ShortFileError(const File& file, std::uint64_t offset, std::size_t size, std::size_t got) {
  return Status(Code::kDataLoss, file.path() + ": " + std::to_string(size) +
                                     " bytes expected at byte " + std::to_string(offset) +
                                     ", but the file ends at byte " + std::to_string(offset + got));
}

// Limits of one announcement and of one read call of ReadMany, because a cancelled ReadMany waits
// until its last request to storage has ended.
constexpr std::size_t kMostRunsTold = 512;
constexpr std::size_t kMostBytesAtOnce = std::size_t{8} << 20;

Status CheckLimits(const File& file, const ReadLimits& limits) {
  if (limits.cancel != nullptr && limits.cancel->load(std::memory_order_relaxed)) {
    return Status(Code::kCancelled, "read " + file.path() + ": cancelled");
  }
  if (limits.deadline && limits.deadline->Passed()) {
    return Status(Code::kDeadlineExceeded, "read " + file.path() + ": timed out");
  }
  return Status();
}

// Number of runs at the front of `runs` that are contiguous in the file.
std::size_t CountContiguousRuns(std::span<const ReadRun> runs) {
  std::size_t n = 1;
  while (n < runs.size() && runs[n].offset == runs[n - 1].offset + runs[n - 1].out.size()) ++n;
  return n;
}

Status ReadOneRun(File& file, const ReadRun& run, const ReadLimits& limits) {
  for (std::size_t done = 0; done < run.out.size();) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckLimits(file, limits));
    const std::size_t n = std::min(run.out.size() - done, kMostBytesAtOnce);
    TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(run.offset + done, run.out.data() + done, n));
    done += n;
  }
  return Status();
}

}  // namespace

// Announces the runs with StartReading, then reads them one after another. Measured for 1,000 runs
// of 4 KiB of an uncached file of 1 GiB on an SSD: 17 ms; without the announcements 193 ms; on 8
// threads instead 34 ms. With the file in the page cache: 2 ms, 2 ms and 9 ms.
Status File::ReadMany(std::span<const ReadRun> runs, const ReadLimits& limits) {
  std::vector<Buffer> pieces;
  while (!runs.empty()) {
    std::size_t told = 0;
    std::size_t bytes = 0;
    while (told < std::min(runs.size(), kMostRunsTold) &&
           (told == 0 || runs[told].out.size() <= kMostBytesAtOnce - bytes)) {
      bytes = std::min(bytes + runs[told++].out.size(), kMostBytesAtOnce);
    }
    std::span<const ReadRun> left = runs.subspan(0, told);
    runs = runs.subspan(told);
    for (std::size_t i = CountContiguousRuns(left); i < left.size();) {
      const std::size_t n = CountContiguousRuns(left.subspan(i));
      const ReadRun& last = left[i + n - 1];
      StartReading(left[i].offset, last.offset + last.out.size() - left[i].offset);
      i += n;
    }
    while (!left.empty()) {
      const std::size_t n = CountContiguousRuns(left);
      if (n == 1) {
        TENSORMOUNT_RETURN_IF_ERROR(ReadOneRun(*this, left[0], limits));
        left = left.subspan(1);
        continue;
      }
      TENSORMOUNT_RETURN_IF_ERROR(CheckLimits(*this, limits));
      pieces.clear();
      for (const ReadRun& run : left.subspan(0, n)) {
        pieces.push_back({run.out.data(), run.out.size()});
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(std::size_t got, ReadVectorAt(left[0].offset, pieces));
      for (const ReadRun& run : left.subspan(0, n)) {
        if (got < run.out.size()) return ShortFileError(*this, run.offset, run.out.size(), got);
        got -= run.out.size();
      }
      left = left.subspan(n);
    }
  }
  return Status();
}

Status File::ReadExactAt(std::uint64_t offset, void* out, std::size_t size) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got, ReadAt(offset, out, size));
  return got == size ? Status() : ShortFileError(*this, offset, size, got);
}

namespace {

std::string_view MissingAbilityText(Ability ability) {
  switch (ability) {
    case Ability::kWrite:
      return "is read-only";
    case Ability::kLocks:
      return "does not support file locks";
    case Ability::kKernelFiles:
      return "does not support mapping files into memory";
    case Ability::kHardLinks:
      return "does not support hard links";
    case Ability::kRenameNoReplace:
      return "does not support renaming without replacing";
    case Ability::kStamps:
      return "does not identify files and their changes";
  }
  return "does not support this operation";
}

}  // namespace

Status FileSystem::Need(Ability ability, std::string_view path) const {
  if (Can(ability)) return Status();
  std::string message(path);
  message.append(": ").append(name()).append(" ").append(MissingAbilityText(ability));
  return Status(ability == Ability::kWrite ? Code::kReadOnly : Code::kUnsupported,
                std::move(message));
}

Result<std::unique_ptr<File>> FileSystem::OpenReadBelow(const std::string& directory,
                                                        const std::string& name) {
  return OpenRead(JoinPath(directory, name));
}

std::int64_t FileSystem::NowSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void FileSystem::SleepFor(std::chrono::milliseconds time) { std::this_thread::sleep_for(time); }

namespace {

// Resolves `name` below `directory` to a path inside it. Does not protect against a directory that
// is replaced by a link before the caller uses the path.
Result<std::string> ResolveBeneath(FileSystem& fs, const std::string& directory,
                                   const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string root, fs.Resolve(directory));
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string path, fs.Resolve(JoinPath(directory, name)));
  if (path == root || root == "/" || path.starts_with(root + "/")) return path;
  return Status::FromErrno(EXDEV, "open", JoinPath(directory, name));
}

}  // namespace

Result<std::unique_ptr<File>> FileSystem::OpenReadBeneath(const std::string& directory,
                                                          const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, ResolveBeneath(*this, directory, name));
  return OpenRead(path);
}

Result<std::vector<DirectoryEntry>> FileSystem::ListBeneath(const std::string& directory,
                                                            const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, ResolveBeneath(*this, directory, name));
  return List(path);
}

Result<FileInfo> FileSystem::StatBeneath(const std::string& directory, const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, ResolveBeneath(*this, directory, name));
  return Stat(path);
}

Result<std::string> FileSystem::ReadFile(const std::string& path, std::uint64_t max_bytes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, OpenRead(path));
  // The size of the open file, because the path may be replaced meanwhile. If the file is truncated
  // after this, ReadExactAt returns kDataLoss.
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
  if (info.size > max_bytes) {
    return Status(Code::kDataLoss, path + ": " + std::to_string(info.size) + " bytes, at most " +
                                       std::to_string(max_bytes) + " are allowed");
  }
  std::string data(static_cast<std::size_t>(info.size), '\0');
  TENSORMOUNT_RETURN_IF_ERROR(file->ReadExactAt(0, data.data(), data.size()));
  return data;
}

Status FileSystem::WriteFileDurably(const std::string& path, std::string_view data) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, CreateExclusive(path));
  Status s = file->WriteAt(0, data.data(), data.size());
  if (s.ok()) s = file->Sync();
  const Status closed = file->Close();
  if (s.ok()) s = closed;
  // A partial file would block the next attempt under this name.
  if (!s.ok()) (void)RemoveFile(path);
  return s;
}

// Uses an exchange, because FileSystem has no rename that replaces. A crash may leave `path`.new,
// which the next call removes.
Status FileSystem::ReplaceFile(const std::string& path, std::string_view data) {
  const std::string fresh = path + ".new";
  if (Exists(fresh)) TENSORMOUNT_RETURN_IF_ERROR(RemoveFile(fresh));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, CreateExclusive(fresh));
  Status s = file->WriteAt(0, data.data(), data.size());
  const Status closed = file->Close();
  if (s.ok()) s = closed;
  if (s.ok() && !Exists(path)) return RenameNoReplace(fresh, path);  // There is no old file.
  if (s.ok()) s = Exchange(fresh, path);
  if (s.code() == Code::kUnsupported) {  // NFS: for a moment there is no file.
    s = RemoveFile(path);
    if (s.ok()) return RenameNoReplace(fresh, path);
  }
  // Removes the old file, or a partial new one.
  (void)RemoveFile(fresh);
  return s;
}

Status FileSystem::CreateDirectories(const std::string& path) {
  Status s = CreateDirectory(path);
  if (s.code() == Code::kNotFound) {
    // Creates parents recursively. The leaf is tried first, because its parent mostly exists.
    const std::size_t end = path.find_last_not_of('/');
    const std::size_t slash = end == std::string::npos ? end : path.rfind('/', end);
    if (slash == std::string::npos || slash == 0) return s;
    TENSORMOUNT_RETURN_IF_ERROR(CreateDirectories(path.substr(0, slash)));
    s = CreateDirectory(path);
  }
  if (s.ok()) return s;
  // The name is taken (perhaps just now), or the parent is read-only. An existing directory is ok.
  const Result<FileInfo> info = Stat(path);
  if (info.ok() && info.value().kind == FileKind::kDirectory) return Status();
  return s;
}

Status FileSystem::SyncMovedFolder(const std::string& moved, const std::string& to,
                                   const std::string& from) {
  if (!CanSyncOnlyMovedFolder(to)) {
    TENSORMOUNT_RETURN_IF_ERROR(SyncDirectory(to));
    return SyncDirectory(from);
  }
  const Status synced = SyncDirectory(moved);
  // `moved` was renamed meanwhile, or this user may not open it; then the whole file system is
  // synced instead.
  const bool unreached =
      synced.code() == Code::kNotFound || synced.code() == Code::kPermissionDenied;
  return unreached ? SyncFileSystem(to) : synced;
}

Result<std::shared_ptr<const std::string>> FileSystem::PinDirectory(const std::string& path) {
  return std::make_shared<const std::string>(path.ends_with("/.") ? path.substr(0, path.size() - 2)
                                                                  : path);
}

// Uses the interface, so that an observer sees each step. HostFileSystem has a stricter version.
Status FileSystem::RemoveTree(const std::string& path) {
  const Result<FileInfo> info = LinkStat(path);
  if (!info.ok()) {
    return info.status().code() == Code::kNotFound ? Status() : info.status();
  }
  Status s;
  if (info.value().kind == FileKind::kDirectory) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, List(path));
    for (const DirectoryEntry& entry : entries) {
      TENSORMOUNT_RETURN_IF_ERROR(RemoveTree(JoinPath(path, entry.name)));
    }
    s = RemoveDirectory(path);
  } else {
    s = RemoveFile(path);
  }
  return s.code() == Code::kNotFound ? Status() : s;
}

Result<std::string> FileSystem::AccessList(const std::string&) { return std::string(); }

bool FileSystem::Exists(const std::string& path) { return LinkStat(path).ok(); }

Status FileSystem::EnsureDirectory(const std::string& path) {
  const Status made = CreateDirectory(path);
  if (made.code() != Code::kAlreadyExists) return made;
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, LinkStat(path));
  if (info.kind == FileKind::kDirectory) return Status();
  return Status(Code::kAlreadyExists, path + ": not a directory");
}

// An empty directory is the current one: JoinPath("", "a") is "a", and not "/a".
std::string JoinPath(std::string_view directory, std::string_view name) {
  std::string out(directory);
  if (!out.empty() && out.back() != '/') out.push_back('/');
  while (!out.empty() && !name.empty() && name.front() == '/') name.remove_prefix(1);
  return out.append(name);
}

std::string WithoutTrailingSlashes(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return std::string(path);
}

}  // namespace tensormount
