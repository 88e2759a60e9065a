// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_OBSERVED_FILE_SYSTEM_H_
#define TENSORMOUNT_TESTS_SUPPORT_OBSERVED_FILE_SYSTEM_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_system.h"

namespace tensormount {

// What a FileSystem or File was asked to do, as an observer sees it. Calls that a hook would treat
// alike are one: both ways to lock, both to stat, and syncfs is kSyncDirectory.
enum class FileOp {
  kOpenRead,
  kCreate,
  kOpenShared,
  kRead,
  kWrite,
  kTruncate,
  kSync,
  kSeal,
  kClose,
  kCreateDirectory,
  kList,
  kStat,
  kLink,
  kRename,
  kExchange,
  kRemoveFile,
  kRemoveDirectory,
  kSyncDirectory,
  kLock,
};
std::string_view FileOpName(FileOp op);

// A call, before or after it is done. `data` lives during the hook only.
struct FileEvent {
  FileOp op;
  std::string path;
  std::string path2;         // Target of link, rename, exchange.
  std::uint64_t offset = 0;  // Of reads and writes.
  std::uint64_t size = 0;
  const void* data = nullptr;  // Of writes.
};

// Passes everything on to `base`, asking `before` first and telling `after` on success.
// A Status from `before` is returned instead of doing the thing; a hook may also block, throw
// nothing, or end the process (crash tests). Either hook may be empty. Hooks are called from the
// calling thread, concurrently. `base` must outlive this, and this must outlive its files.
class ObservedFileSystem : public FileSystem {
 public:
  using Before = std::function<Status(const FileEvent&)>;
  using After = std::function<void(const FileEvent&)>;
  ObservedFileSystem(FileSystem& base, Before before, After after = {});
  ~ObservedFileSystem() override;

  std::string_view name() const override { return base_.name(); }
  bool Can(Ability ability) const override { return base_.Can(ability); }
  Result<std::unique_ptr<File>> OpenRead(const std::string& path) override;
  Result<std::unique_ptr<File>> OpenReadBelow(const std::string& directory,
                                              const std::string& name) override;
  Result<std::unique_ptr<File>> OpenReadBeneath(const std::string& directory,
                                                const std::string& name) override;
  Result<std::vector<DirectoryEntry>> ListBeneath(const std::string& directory,
                                                  const std::string& name) override;
  Result<FileInfo> StatBeneath(const std::string& directory, const std::string& name) override;
  Result<std::unique_ptr<File>> CreateExclusive(const std::string& path) override;
  Result<std::unique_ptr<File>> OpenShared(const std::string& path) override;
  Status CreateDirectory(const std::string& path) override;
  Result<std::vector<DirectoryEntry>> List(const std::string& path) override;
  Result<FileInfo> Stat(const std::string& path) override;
  Result<FileInfo> LinkStat(const std::string& path) override;
  Status Link(const std::string& from, const std::string& to) override;
  Status RenameNoReplace(const std::string& from, const std::string& to) override;
  Status Exchange(const std::string& a, const std::string& b) override;
  Status RemoveFile(const std::string& path) override;
  Status RemoveDirectory(const std::string& path) override;
  Status SyncDirectory(const std::string& path) override;
  Status SyncFileSystem(const std::string& path) override;
  bool CanSyncOnlyMovedFolder(const std::string& folder) override;
  Result<std::string> Resolve(const std::string& path) override;
  std::int64_t NowSeconds() override;
  void SleepFor(std::chrono::milliseconds time) override;
  Result<std::string> AccessList(const std::string& path) override;

 private:
  FileSystem& base_;
  Before before_;
  After after_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_OBSERVED_FILE_SYSTEM_H_
