// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_MEMORY_FILE_SYSTEM_H_
#define TENSORMOUNT_TESTS_SUPPORT_MEMORY_FILE_SYSTEM_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/file_system.h"

namespace tensormount {

// A FileSystem in memory: folders, files with several names, flock, and a clock that stands still
// until somebody sleeps or Advance is called. For tests that begin from one state thousands of
// times: Clone costs microseconds.
//
// Paths are absolute and without ".", ".." and symlinks. What is open or pinned (PinDirectory)
// stays whatever becomes of its names, as on the host. Everything is durable at once: what a power
// cut leaves is a question for PowerCutFileSystem. Thread-safe.
class MemoryFileSystem : public FileSystem {
 public:
  // Empty but for "/".
  explicit MemoryFileSystem(std::int64_t now_seconds);
  ~MemoryFileSystem() override;

  // All files, names and the time; nothing that is open, locked or pinned.
  std::unique_ptr<MemoryFileSystem> Clone() const;
  void Advance(std::chrono::milliseconds time);
  // For damage: the bytes of a file in place of what it holds.
  Status SetBytes(const std::string& path, std::string bytes);
  Status SetMtime(const std::string& path, std::int64_t seconds);
  // Whether `path` here and `other_path` in what this was cloned from, or the reverse, have the
  // same names below them and files that neither of the two has written to since.
  bool SameBelow(const std::string& path, const MemoryFileSystem& other,
                 const std::string& other_path) const;

  Result<std::unique_ptr<File>> OpenRead(const std::string& path) override;
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
  Result<std::string> Resolve(const std::string& path) override;
  Result<std::shared_ptr<const std::string>> PinDirectory(const std::string& path) override;
  std::int64_t NowSeconds() override;
  void SleepFor(std::chrono::milliseconds time) override;

 private:
  friend class InMemoryFile;
  struct Node;
  using NodePtr = std::shared_ptr<Node>;
  struct Place {
    NodePtr folder;
    std::string name;
    NodePtr node;  // Null: nothing has that name.
  };
  NodePtr NewNode(FileKind kind);
  // kNotFound where a folder on the way is missing; of "/" the folder is null.
  Result<Place> Find(const std::string& path) const;
  Result<NodePtr> FindNode(const std::string& path) const;
  Status Put(const std::string& path, const NodePtr& node);
  void Touch(Node& node) const;
  static FileInfo InfoOf(const Node& node);

  mutable std::mutex mutex_;
  NodePtr root_;
  // By inode number. As on ext4 the lowest one that nothing has any more is the next file's.
  std::vector<std::weak_ptr<Node>> nodes_{1};
  std::int64_t now_milliseconds_ = 0;
  std::map<std::uint64_t, std::weak_ptr<Node>> pinned_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_MEMORY_FILE_SYSTEM_H_
