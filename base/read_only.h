// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_READ_ONLY_H_
#define TENSORMOUNT_BASE_READ_ONLY_H_

#include <memory>
#include <string>
#include <string_view>

#include "base/file_system.h"

// Base classes for read-only files and file systems: bytes in memory, a server.

namespace tensormount {

// Base of read-only files. Subclasses implement ReadAt, Stat and path.
class ReadOnlyFile : public File {
 public:
  Status WriteAt(std::uint64_t, const void*, std::size_t) override { return Refused("write"); }
  Status Truncate(std::uint64_t) override { return Refused("truncate"); }
  Status Sync() override { return Refused("sync"); }
  Status Seal() override { return Refused("seal"); }
  Status TryLockShared() override { return Refused("lock"); }
  Status TryLockExclusive() override { return Refused("lock"); }
  Status Close() override { return Status(); }

 protected:
  virtual Status Refused(std::string_view action) {
    return Status(Code::kUnsupported,
                  std::string(action) + " " + path() + ": the file is read-only");
  }
};

// Base of read-only file systems. Subclasses implement name, OpenRead, List, Stat, LinkStat and
// Resolve, and override Can if they have any ability.
class ReadOnlyFileSystem : public FileSystem {
 public:
  bool Can(Ability) const override { return false; }

  Result<std::unique_ptr<File>> CreateExclusive(const std::string& path) override {
    return Refused(path);
  }
  Result<std::unique_ptr<File>> OpenShared(const std::string& path) override {
    return Refused(path);
  }
  Status CreateDirectory(const std::string& path) override { return Refused(path); }
  Status Link(const std::string&, const std::string& to) override { return Refused(to); }
  Status RenameNoReplace(const std::string&, const std::string& to) override { return Refused(to); }
  Status Exchange(const std::string&, const std::string& b) override { return Refused(b); }
  Status RemoveFile(const std::string& path) override { return Refused(path); }
  Status RemoveDirectory(const std::string& path) override { return Refused(path); }
  Status SyncDirectory(const std::string& path) override { return Refused(path); }

 protected:
  virtual Status Refused(const std::string& path) { return Need(Ability::kWrite, path); }
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_READ_ONLY_H_
