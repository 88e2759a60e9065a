// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_REMOTE_FILE_SYSTEM_H_
#define TENSORMOUNT_REMOTE_REMOTE_FILE_SYSTEM_H_

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/per_process.h"
#include "base/read_only.h"
#include "remote/block_cache.h"

namespace tensormount {

// Base of the file systems of servers: opens objects, and keeps for a few seconds what it was told,
// so that looking for a file, opening it and reading its begin is one request. Subclasses say how
// an object is asked for, and what a directory has, if their servers tell.
class RemoteFileSystem : public ReadOnlyFileSystem {
 public:
  std::string_view name() const override { return "storage behind a URL"; }
  Result<std::unique_ptr<File>> OpenRead(const std::string& path) override;
  Result<std::unique_ptr<File>> OpenReadBelow(const std::string& directory,
                                              const std::string& name) override {
    return OpenReadBeneath(directory, name);
  }
  Result<std::unique_ptr<File>> OpenReadBeneath(const std::string& directory,
                                                const std::string& name) override;
  Result<std::vector<DirectoryEntry>> ListBeneath(const std::string& directory,
                                                  const std::string& name) override;
  Result<FileInfo> StatBeneath(const std::string& directory, const std::string& name) override;
  Result<std::vector<DirectoryEntry>> List(const std::string& path) override;
  Result<FileInfo> Stat(const std::string& path) override;
  Result<FileInfo> LinkStat(const std::string& path) override { return Stat(path); }
  Result<std::string> Resolve(const std::string& path) override;

 protected:
  // How an object is asked for: url, headers, sign.
  virtual Result<RemoteObject> ObjectAt(const std::string& path) = 0;
  // The entries of a directory; empty: there is no such directory. nullopt: the server cannot tell.
  using Entries = std::map<std::string, FileKind, std::less<>>;
  virtual Result<std::optional<Entries>> EntriesOf(const std::string& path) = 0;
  // The error for an answer other than the object: adds hints.
  virtual Status FailureOf(const std::string& path, const HttpResponse& response);
  // Whether to ask once more, because the answer says how (a bucket in another region).
  virtual bool AsksAgain(const std::string& path, const RemoteObject& asked,
                         const HttpResponse& response) {
    (void)path;
    (void)asked;
    (void)response;
    return false;
  }
  // A name from inside a checkpoint, as it is in a path of this file system.
  virtual std::string NameInPath(const std::string& name) const { return name; }
  // What follows "SCHEME://", which has no directories above.
  virtual std::string RootOf(const std::string& path) const = 0;

  // What is known of a path for a few seconds.
  struct Known {
    std::shared_ptr<const RemoteObject> object;  // Null: no such file.
    Status failure;                              // If `object` is null.
    std::chrono::steady_clock::time_point when;
  };
  // Asks for the begin of several files at once.
  Result<std::vector<Known>> LookUp(const std::vector<std::string>& paths);

 private:
  struct KnownEntries {
    std::optional<Entries> entries;
    std::chrono::steady_clock::time_point when;
  };
  Result<Known> LookUp(const std::string& path);
  std::optional<Result<FileInfo>> KnownInfo(const std::string& path);
  Result<std::optional<Entries>> KnownEntriesOf(const std::string& path);
  Result<std::optional<Entries>> ProbedEntriesOf(const std::string& path);
  Known Answered(const std::string& path, const RemoteObject& asked, const HttpCall& call);

  Result<std::string> Below(const std::string& directory, const std::string& name);

  // Of each process: another thread may hold the mutex when the process forks.
  struct Memory {
    std::mutex mutex;
    std::map<std::string, Known> files;
    std::map<std::string, KnownEntries> directories;
    std::set<std::string> typed;  // Paths that users gave: they are encoded already.
  };
  PerProcessMember<Memory> memory_;
};

// http:// and https://. Servers of these list nothing, so a directory is known by files that
// checkpoints have.
class HttpFileSystem : public RemoteFileSystem {
 public:
  Result<std::vector<DirectoryEntry>> List(const std::string& path) override;

 protected:
  Result<RemoteObject> ObjectAt(const std::string& path) override;
  Result<std::optional<Entries>> EntriesOf(const std::string& path) override;
  std::string NameInPath(const std::string& name) const override;
  std::string RootOf(const std::string& path) const override;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_REMOTE_FILE_SYSTEM_H_
