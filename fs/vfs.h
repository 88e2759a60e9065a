// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VFS_H_
#define TENSORMOUNT_FS_VFS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/name_map.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/handle.h"
#include "fs/mount_stats.h"
#include "fs/node.h"
#include "fs/staging/staging_tree.h"
#include "fs/store_watch.h"
#include "fs/views/checkpoint_view.h"
#include "fs/views/virtual_file.h"

namespace tensormount::fs {

// Options that determine what a mount shows. MountOptions says how it is served (threads,
// passthrough).
struct VfsOptions {
  // A store, a checkpoint, STORE/latest (resolved once), a checkpoint in a foreign format, or a
  // training directory with such checkpoints.
  std::string source;
  bool list_views = false;
  ServeVerify verify = ServeVerify::kFirst;
  NameMap map = {};   // Empty: tensors are as stored.
  HfOptions hf = {};  // How hf/ is split, and which tensors it has.
  // Show .staging/ if the source is a store that this process may write.
  bool writable = false;
  // Directories in which data of adopted and foreign checkpoints may lie.
  std::vector<std::string> roots = {};
  // Users other than the mounting one may enter. Modes are then combined over all files and
  // directories behind a node (fs/reach.h). Those of the root are checked again before each answer.
  bool other_users = false;
};

// Lookup, stat, list, open and read of a mount, independent of the kernel: takes node ids, and
// returns results or a Status whose errno the caller gets. Most nodes are computed from their ids;
// the others count references. Thread-safe; no lock is held while data are read.
// Tests of a mount use this class, without a kernel and without FUSE; the bridge adds threads,
// replies and caching.
class Vfs {
 public:
  // Seconds that the kernel may cache answers. kSealedSeconds: below a published checkpoint, which
  // never changes and whose node ids become invalid when it is removed, so an hour is practically
  // for ever. kRootSeconds: for names that come and go (the root, checkpoints, latest), and for
  // missing names below a checkpoint.
  static constexpr double kSealedSeconds = 3600;
  static constexpr double kRootSeconds = 0.4;

  // kNotFound: no such source; kUnsupported: unknown format; kInvalidArgument: the key map does not
  // fit the checkpoint (for a store: its latest).
  static Result<std::unique_ptr<Vfs>> Open(FileSystem& fs, const VfsOptions& options);

  // A node with its attributes. `seconds` says how long the kernel may cache name and attributes:
  // an hour below a published checkpoint, a fraction of a second in the root, 0 (not at all) for
  // .tensormount/ and for everything below .staging/.
  struct Entry {
    NodeId id = 0;
    Attributes attributes;
    double seconds = 0;
  };
  // kNotFound: no such name now; kStale: the directory is gone. Counts a reference of the node,
  // which Forget releases.
  Result<Entry> Lookup(NodeId folder, std::string_view name);
  void Forget(NodeId node, std::uint64_t references);
  Result<Entry> Stat(NodeId node);
  // Whether the checkpoint of a node existed at the last check of the store.
  bool CheckpointExists(NodeId node);
  Result<std::string> ReadLink(NodeId node);

  struct Listed {
    std::string name;
    Entry entry;
    std::uint64_t next = 0;  // Continues the listing after this entry; never 0.
  };
  // Lists entries from `cookie` on (0, or a `next`), "." and ".." first, until fn returns false
  // (that entry was not taken).
  Status List(NodeId folder, std::uint64_t cookie, const std::function<bool(const Listed&)>& fn);
  Result<std::shared_ptr<const VirtualFile>> OpenFile(NodeId node);
  // Whether an answer for this node may wait long for storage: its checkpoint is not open yet, the
  // node is below .staging/, or it is the root of a store, during the first check or with
  // `other_users`. The bridge queues such requests and answers the others on the receiving thread,
  // so that `ls` and status files work while storage hangs. Other answers for the root and `latest`
  // may wait StoreWatch::kPatience for a listing.
  bool MayBlock(NodeId node);

  // The value of an extended attribute. kUnsupported (EOPNOTSUPP) for names outside of "user.",
  // after which `ls -l` stops asking.
  Result<std::string> GetXattr(NodeId node, std::string_view name);
  Result<std::vector<std::string>> ListXattrs(NodeId node);

  // ---- Saving: calls that change something. Below .staging/ of a writable mount they go to
  // StagingTree. Elsewhere they fail with EROFS, or with EPERM for new names in the root of a
  // writable mount and for attributes of that root. Every call may block.
  bool writable() const { return staging_ != nullptr; }
  // Why a mount of a store is not writable although it was requested; empty otherwise.
  const std::string& not_writable_because() const { return not_writable_because_; }
  static constexpr std::string_view kStagingName = ".staging";
  // Lookup and Stat from memory, without storage: the first for a staging by its name in .staging/
  // (counts a reference like Lookup), the second for the node of a staging's directory or of
  // .staging/ itself. nullopt for all other nodes, and for stagings that this mount has not seen.
  std::optional<Entry> KnownStaging(NodeId folder, std::string_view name);
  std::optional<Entry> KnownStaging(NodeId node);
  static bool IsStaged(NodeId node) {
    const Node n = NodeOf(node);
    return n.slot == 0 && n.view == kStagingView;
  }
  static bool IsStagingRoot(NodeId node) {
    return IsStaged(node) && NodeOf(node).item == StagingTree::kRoot;
  }
  // open(2) of a file below .staging/, or of any other file for writing, which is refused.
  Result<std::shared_ptr<WriteHandle>> OpenStaged(NodeId node, int flags);
  struct Created {
    Entry entry;  // One reference of the node is counted.
    std::shared_ptr<WriteHandle> handle;
  };
  Result<Created> Create(NodeId folder, std::string_view name, int flags);
  Result<Entry> MakeDirectory(NodeId folder, std::string_view name);
  Status Truncate(NodeId node, std::uint64_t size);
  Result<Entry> SetAttributes(NodeId node);
  Status Unlink(NodeId folder, std::string_view name);
  Status RemoveDirectory(NodeId folder, std::string_view name);
  // `flags` as for renameat2. A rename of a staging into the root publishes it.
  Status Rename(NodeId folder, std::string_view name, NodeId to_folder, std::string_view to_name,
                unsigned flags);
  // Refuses links and special files, which no directory supports: EPERM or EROFS.
  Status RefuseMaking(NodeId folder, std::string_view name);
  // The error for changing a node outside of .staging/, or the extended attributes of any node.
  Status RefuseChanging(NodeId node);
  // Makes all bytes durable that were written through this mount.
  Status Drain();

  MountStats& stats() { return stats_; }
  StoreWatch& watch() { return *watch_; }
  FileSystem& fs() const { return *fs_; }
  const std::string& source() const { return source_; }
  SourceKind kind() const { return kind_; }
  const VfsOptions& options() const { return options_; }
  // Sets the function that makes the text of .tensormount/status, so that the session can add its
  // own fields. Without it the text has StatusFields() only.
  void SetStatus(std::function<std::string()> status) { status_ = std::move(status); }
  // Sets a function that adds the session's own families to .tensormount/metrics.
  void SetMetrics(std::function<void(MetricsText&)> metrics) { metrics_ = std::move(metrics); }
  // The fields of the source for .tensormount/status, as the inside of a JSON object.
  std::string StatusFields();

 private:
  Vfs() = default;
  // A node and the opened checkpoint that it belongs to. The root of a mount of one checkpoint
  // belongs to that checkpoint.
  struct Located {
    Node node;
    std::shared_ptr<const CheckpointView> view;  // Null: a node of the mount itself.
  };
  Result<Located> Locate(NodeId id);
  // Like Locate, but also finds files of a removed checkpoint while any file of that checkpoint is
  // open.
  Result<Located> LocateFile(NodeId id);
  Result<Entry> ControlEntry(Fixed fixed);
  Result<Entry> RootEntry();
  Result<Entry> LatestEntry(const StoreWatch::Listing& now);
  Entry SlotEntry(const Slot& slot) const;
  Entry EntryOf(const Child& child) const;
  std::string ControlText(Fixed fixed);
  Result<Entry> LookupInRoot(std::string_view name);
  Status ListStore(std::uint64_t cookie, const std::function<bool(const Listed&)>& fn);
  Status ListControl(std::uint64_t cookie, const std::function<bool(const Listed&)>& fn);
  // Operations below .staging/ and refusals elsewhere.
  void OpenStaging();
  Entry StagedEntry(const StagingTree::Node& node) const;
  Result<Entry> LookupStaged(NodeId folder, std::string_view name);
  Result<Entry> StatStaged(NodeId node);
  Status ListStaged(NodeId folder, std::uint64_t cookie,
                    const std::function<bool(const Listed&)>& fn);
  std::string StagingFields();
  std::string Metrics();
  Result<StagingTree*> StagingOf(NodeId node, std::string_view operation, std::string_view name);

  VfsOptions options_;
  SourceKind kind_ = SourceKind::kStore;
  FileSystem* fs_ = nullptr;  // The filesystem of the source.
  std::string source_;        // Path of the source, resolved.
  std::unique_ptr<StoreWatch> watch_;
  std::function<std::string()> status_;
  std::function<void(MetricsText&)> metrics_;
  MountStats stats_;
  std::unique_ptr<StagingTree> staging_;  // Null: the mount is not writable.
  std::string not_writable_because_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VFS_H_
