// SPDX-License-Identifier: Apache-2.0
#include "tests/support/observed_file_system.h"

#include <utility>

namespace tensormount {

std::string_view FileOpName(FileOp op) {
  switch (op) {
    case FileOp::kOpenRead:
      return "open";
    case FileOp::kCreate:
      return "create";
    case FileOp::kOpenShared:
      return "open-shared";
    case FileOp::kRead:
      return "read";
    case FileOp::kWrite:
      return "write";
    case FileOp::kTruncate:
      return "truncate";
    case FileOp::kSync:
      return "sync";
    case FileOp::kSeal:
      return "seal";
    case FileOp::kClose:
      return "close";
    case FileOp::kCreateDirectory:
      return "mkdir";
    case FileOp::kList:
      return "list";
    case FileOp::kStat:
      return "stat";
    case FileOp::kLink:
      return "link";
    case FileOp::kRename:
      return "rename";
    case FileOp::kExchange:
      return "exchange";
    case FileOp::kRemoveFile:
      return "unlink";
    case FileOp::kRemoveDirectory:
      return "rmdir";
    case FileOp::kSyncDirectory:
      return "sync-directory";
    case FileOp::kLock:
      return "lock";
  }
  return "?";
}

namespace {

using Before = ObservedFileSystem::Before;
using After = ObservedFileSystem::After;

// The two hooks by reference: files keep this, which is why the file system must outlive them.
struct Hooks {
  const Before& before;
  const After& after;

  // Asks, does, tells. `f` returns a Status or a Result.
  template <typename F>
  auto Run(const FileEvent& event, F f) const -> decltype(f()) {
    if (before) TENSORMOUNT_RETURN_IF_ERROR(before(event));
    auto r = f();
    if (r.ok() && after) after(event);
    return r;
  }
};

// Made for every call, whether or not there is a hook: tests can afford it.
FileEvent EventOf(FileOp op, const std::string& path) {
  FileEvent event;
  event.op = op;
  event.path = path;
  return event;
}

FileEvent EventOf(FileOp op, const std::string& path, const std::string& path2) {
  FileEvent event = EventOf(op, path);
  event.path2 = path2;
  return event;
}

class ObservedFile final : public File {
 public:
  ObservedFile(std::unique_ptr<File> base, Hooks hooks) : base_(std::move(base)), hooks_(hooks) {}

  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    FileEvent event = EventOf(FileOp::kRead, path());
    event.offset = offset;
    event.size = size;
    return hooks_.Run(event, [&] { return base_->ReadAt(offset, out, size); });
  }
  Status WriteAt(std::uint64_t offset, const void* data, std::size_t size) override {
    FileEvent event = EventOf(FileOp::kWrite, path());
    event.offset = offset;
    event.size = size;
    event.data = data;
    return hooks_.Run(event, [&] { return base_->WriteAt(offset, data, size); });
  }
  Status Truncate(std::uint64_t size) override {
    FileEvent event = EventOf(FileOp::kTruncate, path());
    event.size = size;
    return hooks_.Run(event, [&] { return base_->Truncate(size); });
  }
  // No event: a hint cannot fail, and crash tests would count states that do not differ.
  void StartReading(std::uint64_t offset, std::uint64_t size) override {
    base_->StartReading(offset, size);
  }
  void StartWriteback(std::uint64_t offset, std::uint64_t size) override {
    base_->StartWriteback(offset, size);
  }
  Status Sync() override {
    return hooks_.Run(EventOf(FileOp::kSync, path()), [&] { return base_->Sync(); });
  }
  Status Seal() override {
    return hooks_.Run(EventOf(FileOp::kSeal, path()), [&] { return base_->Seal(); });
  }
  Result<FileInfo> Stat() override {
    return hooks_.Run(EventOf(FileOp::kStat, path()), [&] { return base_->Stat(); });
  }
  Status TryLockShared() override {
    return hooks_.Run(EventOf(FileOp::kLock, path()), [&] { return base_->TryLockShared(); });
  }
  Status TryLockExclusive() override {
    return hooks_.Run(EventOf(FileOp::kLock, path()), [&] { return base_->TryLockExclusive(); });
  }
  Status Close() override {
    return hooks_.Run(EventOf(FileOp::kClose, path()), [&] { return base_->Close(); });
  }
  int descriptor() const override { return base_->descriptor(); }
  const std::string& path() const override { return base_->path(); }

 private:
  std::unique_ptr<File> base_;
  Hooks hooks_;
};

Result<std::unique_ptr<File>> Wrap(Result<std::unique_ptr<File>> file, Hooks hooks) {
  if (!file.ok()) return file;
  return std::unique_ptr<File>(std::make_unique<ObservedFile>(std::move(file).value(), hooks));
}

}  // namespace

ObservedFileSystem::ObservedFileSystem(FileSystem& base, Before before, After after)
    : base_(base), before_(std::move(before)), after_(std::move(after)) {}

ObservedFileSystem::~ObservedFileSystem() = default;

Result<std::unique_ptr<File>> ObservedFileSystem::OpenRead(const std::string& path) {
  const Hooks hooks{before_, after_};
  return Wrap(hooks.Run(EventOf(FileOp::kOpenRead, path), [&] { return base_.OpenRead(path); }),
              hooks);
}

// The forms below a folder are the same events as the plain ones, with the whole path: a rule "fail
// the third open of index.sst" holds whichever way the code above opens it.
Result<std::unique_ptr<File>> ObservedFileSystem::OpenReadBelow(const std::string& directory,
                                                                const std::string& name) {
  const Hooks hooks{before_, after_};
  return Wrap(hooks.Run(EventOf(FileOp::kOpenRead, JoinPath(directory, name)),
                        [&] { return base_.OpenReadBelow(directory, name); }),
              hooks);
}

Result<std::unique_ptr<File>> ObservedFileSystem::OpenReadBeneath(const std::string& directory,
                                                                  const std::string& name) {
  const Hooks hooks{before_, after_};
  return Wrap(hooks.Run(EventOf(FileOp::kOpenRead, JoinPath(directory, name)),
                        [&] { return base_.OpenReadBeneath(directory, name); }),
              hooks);
}

Result<std::vector<DirectoryEntry>> ObservedFileSystem::ListBeneath(const std::string& directory,
                                                                    const std::string& name) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kList, JoinPath(directory, name)),
                                    [&] { return base_.ListBeneath(directory, name); });
}

Result<FileInfo> ObservedFileSystem::StatBeneath(const std::string& directory,
                                                 const std::string& name) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kStat, JoinPath(directory, name)),
                                    [&] { return base_.StatBeneath(directory, name); });
}

Result<std::unique_ptr<File>> ObservedFileSystem::CreateExclusive(const std::string& path) {
  const Hooks hooks{before_, after_};
  return Wrap(
      hooks.Run(EventOf(FileOp::kCreate, path), [&] { return base_.CreateExclusive(path); }),
      hooks);
}

Result<std::unique_ptr<File>> ObservedFileSystem::OpenShared(const std::string& path) {
  const Hooks hooks{before_, after_};
  return Wrap(hooks.Run(EventOf(FileOp::kOpenShared, path), [&] { return base_.OpenShared(path); }),
              hooks);
}

Status ObservedFileSystem::CreateDirectory(const std::string& path) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kCreateDirectory, path),
                                    [&] { return base_.CreateDirectory(path); });
}

Result<std::vector<DirectoryEntry>> ObservedFileSystem::List(const std::string& path) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kList, path), [&] { return base_.List(path); });
}

Result<FileInfo> ObservedFileSystem::Stat(const std::string& path) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kStat, path), [&] { return base_.Stat(path); });
}

Result<FileInfo> ObservedFileSystem::LinkStat(const std::string& path) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kStat, path),
                                    [&] { return base_.LinkStat(path); });
}

Status ObservedFileSystem::Link(const std::string& from, const std::string& to) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kLink, from, to),
                                    [&] { return base_.Link(from, to); });
}

Status ObservedFileSystem::RenameNoReplace(const std::string& from, const std::string& to) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kRename, from, to),
                                    [&] { return base_.RenameNoReplace(from, to); });
}

Status ObservedFileSystem::Exchange(const std::string& a, const std::string& b) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kExchange, a, b),
                                    [&] { return base_.Exchange(a, b); });
}

Status ObservedFileSystem::RemoveFile(const std::string& path) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kRemoveFile, path),
                                    [&] { return base_.RemoveFile(path); });
}

Status ObservedFileSystem::RemoveDirectory(const std::string& path) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kRemoveDirectory, path),
                                    [&] { return base_.RemoveDirectory(path); });
}

Status ObservedFileSystem::SyncDirectory(const std::string& path) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kSyncDirectory, path),
                                    [&] { return base_.SyncDirectory(path); });
}

Status ObservedFileSystem::SyncFileSystem(const std::string& path) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kSyncDirectory, path),
                                    [&] { return base_.SyncFileSystem(path); });
}

bool ObservedFileSystem::CanSyncOnlyMovedFolder(const std::string& folder) {
  return base_.CanSyncOnlyMovedFolder(folder);
}

Result<std::string> ObservedFileSystem::AccessList(const std::string& path) {
  return base_.AccessList(path);
}

Result<std::string> ObservedFileSystem::Resolve(const std::string& path) {
  return Hooks{before_, after_}.Run(EventOf(FileOp::kStat, path),
                                    [&] { return base_.Resolve(path); });
}

std::int64_t ObservedFileSystem::NowSeconds() { return base_.NowSeconds(); }

void ObservedFileSystem::SleepFor(std::chrono::milliseconds time) { base_.SleepFor(time); }

}  // namespace tensormount
