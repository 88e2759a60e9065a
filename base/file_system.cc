// SPDX-License-Identifier: Apache-2.0
// What every implementation of FileSystem shares, made of its calls alone, so that an observer or a
// test sees each step: whole files written durably (create, write, fsync, close, sync the folder),
// replaced (write beside, exchange or rename), folders made, trees removed.
#include "base/file_system.h"

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
    if (got < piece.size) break;  // The file ends here: nothing of the next one exists.
  }
  return done;
}

Status File::ReadExactAt(std::uint64_t offset, void* out, std::size_t size) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got, ReadAt(offset, out, size));
  if (got == size) return Status();
  return Status(Code::kDataLoss, path() + ": " + std::to_string(size) + " bytes at " +
                                     std::to_string(offset) + " wanted, file ends at " +
                                     std::to_string(offset + got));
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

// Where `name` below `directory` leads, which is inside of it. Somebody may exchange a folder for a
// link before it is used.
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
  // The size of the open file, not of the path: somebody may replace that in between. A file that
  // is cut short after this is kDataLoss of ReadExactAt.
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
  if (info.size > max_bytes) {
    return Status(Code::kDataLoss, path + ": " + std::to_string(info.size) + " bytes, at most " +
                                       std::to_string(max_bytes) + " expected");
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
  // A part of the file would block the next try under this name.
  if (!s.ok()) (void)RemoveFile(path);
  return s;
}

// Exchange, and not rename over the old file, because FileSystem has no rename that replaces: a
// name that is taken is an error everywhere else. A crash in between leaves `path`.new behind,
// which the next call removes.
Status FileSystem::ReplaceFile(const std::string& path, std::string_view data) {
  const std::string fresh = path + ".new";
  if (Exists(fresh)) TENSORMOUNT_RETURN_IF_ERROR(RemoveFile(fresh));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, CreateExclusive(fresh));
  Status s = file->WriteAt(0, data.data(), data.size());
  const Status closed = file->Close();
  if (s.ok()) s = closed;
  if (s.ok() && !Exists(path)) return RenameNoReplace(fresh, path);  // The first time.
  if (s.ok()) s = Exchange(fresh, path);
  // What was exchanged, or a part of what was to be written.
  (void)RemoveFile(fresh);
  return s;
}

Status FileSystem::CreateDirectories(const std::string& path) {
  Status s = CreateDirectory(path);
  if (s.code() == Code::kNotFound) {
    // The parent first, and so on up. The leaf is tried first because it mostly has a parent.
    const std::size_t end = path.find_last_not_of('/');
    const std::size_t slash = end == std::string::npos ? end : path.rfind('/', end);
    if (slash == std::string::npos || slash == 0) return s;
    TENSORMOUNT_RETURN_IF_ERROR(CreateDirectories(path.substr(0, slash)));
    s = CreateDirectory(path);
  }
  if (s.ok()) return s;
  // Taken, by somebody else at this moment or before; or a read-only parent, where what is there
  // already serves as well.
  const Result<FileInfo> info = Stat(path);
  if (info.ok() && info.value().kind == FileKind::kDirectory) return Status();
  return s;
}

Status FileSystem::SyncMovedFolder(const std::string& moved, const std::string& to,
                                   const std::string& from) {
  if (!MovedFoldersSyncThemselves(to)) {
    TENSORMOUNT_RETURN_IF_ERROR(SyncDirectory(to));
    return SyncDirectory(from);
  }
  const Status synced = SyncDirectory(moved);
  // Somebody has moved it on meanwhile, or we may not open it.
  const bool unreached =
      synced.code() == Code::kNotFound || synced.code() == Code::kPermissionDenied;
  return unreached ? SyncFileSystem(to) : synced;
}

Result<std::shared_ptr<const std::string>> FileSystem::PinDirectory(const std::string& path) {
  return std::make_shared<const std::string>(path.ends_with("/.") ? path.substr(0, path.size() - 2)
                                                                  : path);
}

// Through the interface, so that an observer sees each step. HostFileSystem has a stricter form.
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
  return Status(Code::kAlreadyExists, path + ": not a folder");
}

// An empty directory is the current one: JoinPath("", "a") is "a", and not "/a".
std::string JoinPath(std::string_view directory, std::string_view name) {
  std::string out(directory);
  if (!out.empty() && out.back() != '/') out.push_back('/');
  while (!out.empty() && !name.empty() && name.front() == '/') name.remove_prefix(1);
  return out.append(name);
}

namespace {

// As scp and rsync name a path on another machine: "user@host:x", "host:/x".
bool IsRemotePath(std::string_view text) {
  const std::string_view head = text.substr(0, text.find('/'));
  const std::size_t colon = head.find(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::size_t at = head.substr(0, colon).find('@');
  const std::string_view rest = text.substr(colon + 1);
  return (at != std::string_view::npos && at > 0 && at + 1 < colon) || rest.empty() ||
         rest.starts_with('/');
}

}  // namespace

Status CheckIsPath(std::string_view text) {
  if (IsRemotePath(text) && text.find("://") == std::string_view::npos) {
    return {Code::kUnsupported,
            std::string(text) +
                ": a path on another machine: only folders of this host are read and written; "
                "mount it here (sshfs, NFS), or use rsync. A folder of this name is ./" +
                std::string(text)};
  }
  if (text == "~" || text.starts_with("~/")) {
    return {Code::kUnsupported, std::string(text) +
                                    ": only a shell replaces ~ by your home directory: give the "
                                    "whole path. A folder called ~ is ./~"};
  }
  const std::size_t colon = text.find("://");
  if (colon == std::string_view::npos || colon == 0) return Status();
  for (std::size_t i = 0; i < colon; ++i) {
    const char c = text[i];
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool other = (c >= '0' && c <= '9') || c == '+' || c == '-' || c == '.';
    if (!letter && (i == 0 || !other)) return Status();
  }
  const std::string name(text);
  if (text.starts_with("file:///")) {
    return {Code::kUnsupported, name + ": a URL: give the path itself, " + name.substr(7)};
  }
  return {Code::kUnsupported, name +
                                  ": a URL: only folders of this host are read and written; mount "
                                  "what it names as one, or copy it here first"};
}

std::string WithoutTrailingSlashes(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return std::string(path);
}

}  // namespace tensormount
