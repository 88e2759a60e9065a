// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_POWER_CUT_H_
#define TENSORMOUNT_TESTS_SUPPORT_POWER_CUT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_system.h"
#include "tests/support/random.h"

namespace tensormount {

// A FileSystem over a real folder that remembers every change, and can build in another folder one
// of the states that a power cut after operation k may leave behind.
//
//   PowerCutFileSystem fs(dir.Join("live"));             // Exists; its content counts as durable.
//   ... work on fs below fs.root() ...
//   const std::size_t acknowledged = fs.op_count();
//   for (std::size_t k = 0; k <= fs.op_count(); ++k) {
//     ASSERT_OK(fs.Materialise(k, random, dir.Join("after")));
//     ... open dir.Join("after") with HostFileSystem(); from k >= acknowledged on, all is there ...
//     ASSERT_OK(HostFileSystem().RemoveTree(dir.Join("after")));
//   }
//
// The model is harsher than ext4 and XFS, so that our promises rest on POSIX calls alone:
//   file data   What was written before the last Sync of the file (through any handle) is there.
//               Later writes and truncations are, per file: lost, kept, kept in length but zeros
//               where the file had nothing, or any mixture of these by sectors of 512 bytes with a
//               length in between. Seal is lost or kept until a Sync.
//   entries     A create, mkdir, link, unlink or rmdir is there once its parent folder has had a
//               SyncDirectory; a Sync of the file does nothing for its name. Before, each is kept
//               or lost independently of others, in the same folder too, except that the history of
//               one name is never reordered, that an rmdir comes after what emptied the folder, and
//               that whatever stands below a lost folder is lost with it.
//   rename      Old name or new name, never neither: it implies the folders that the new name
//               stands in. Durable once the *new* parent has had its SyncDirectory; one of the old
//               parent alone proves nothing. A file moved between folders may be under both names
//               until the old parent has had one, too. An exchange is whole, and durable once both
//               parents were synced.
// A folder cannot be under two names at once here, as it may be on a filesystem without a journal.
//
// Nothing is really synced, so that it is quick. Changes made behind its back are errors where they
// are noticed (Sync, Link, rename of what it does not know; CompareWithDisk). One process only: a
// fork has a journal of its own. Thread-safe; changes are serialised.
class PowerCutFileSystem : public FileSystem {
 public:
  // Aborts where `root` cannot be read.
  explicit PowerCutFileSystem(const std::string& root);
  ~PowerCutFileSystem() override;

  const std::string& root() const { return root_; }
  // Changes and syncs so far.
  std::size_t op_count() const;
  // "rename .staging/a b" of operation number `op`, 0 <= op < op_count(), for messages of tests.
  std::string Describe(std::size_t op) const;
  // Builds in `into`, which must not exist, a state after the first `after_op` operations.
  Status Materialise(std::size_t after_op, Random& random, const std::string& into) const;
  // Whether the folder holds what the journal adds up to.
  Status CompareWithDisk() const;

  Result<std::unique_ptr<File>> OpenRead(const std::string& path) override;
  Result<std::unique_ptr<File>> OpenReadBelow(const std::string& directory,
                                              const std::string& name) override;
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

 private:
  friend class PowerCutFile;
  using NodeId = std::uint64_t;  // 0: none. The root is 1.

  // Under the lock.
  Result<std::unique_ptr<File>> Opened(Result<std::unique_ptr<File>> opened,
                                       const std::string& path);

  struct Op {
    enum class Kind {
      kPlace,
      kRemove,
      kRename,
      kExchange,
      kSyncFolder,
      kWrite,
      kTruncate,
      kSync,
      kSeal
    };
    Kind kind;
    NodeId node = 0;   // What is placed, removed, moved, written or synced.
    NodeId node2 = 0;  // The other one of an exchange.
    NodeId folder = 0;
    NodeId folder2 = 0;
    std::string name;
    std::string name2;
    std::uint64_t offset = 0;  // Of a write; the size of a truncation.
    std::string data;
    std::string text;
  };
  // A name in a folder, and what is there now (0: nothing).
  struct Place {
    NodeId folder = 0;
    std::string name;
    NodeId node = 0;
  };
  struct Node {
    bool is_folder = false;
    std::map<std::string, NodeId> entries;
  };
  class Replay;

  void Snapshot(const std::string& path, NodeId folder);
  NodeId AddNode(bool is_folder);
  // kInvalidArgument outside of the root, kInternal where a parent folder is not known.
  Result<Place> Find(const std::string& path) const;
  Result<Place> FindKnown(const std::string& path) const;
  void Record(Op op);
  Result<std::unique_ptr<File>> OpenForWriting(const std::string& path, bool exclusive);
  Status Compare(const std::string& path, NodeId folder,
                 const std::map<NodeId, std::string>& contents) const;

  FileSystem& base_;
  const std::string root_;
  std::string real_root_;
  mutable std::mutex mutex_;
  std::map<NodeId, Node> nodes_;  // As they are now.
  std::vector<Op> journal_;
  std::size_t first_op_ = 0;  // Before it: the snapshot.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_POWER_CUT_H_
