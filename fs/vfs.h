// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VFS_H_
#define TENSORMOUNT_FS_VFS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

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

// What decides what a mount shows. How it is served (threads, passthrough) is MountOptions.
struct VfsOptions {
  // A store, a checkpoint, STORE/latest (taken once), a checkpoint in a foreign format, a training
  // directory of such.
  std::string source;
  bool list_views = false;
  ServeVerify verify = ServeVerify::kFirst;
  std::shared_ptr<const KeyMap> map = nullptr;  // Other names for keys.
  HfOptions hf = {};                            // How hf/ is cut, and what it has.
  bool writable =
      false;  // Show .staging/, where the source is a store that this process may write.
  std::vector<std::string> roots = {};  // OpenedCheckpoint::Options::roots.
  // Users besides the one who mounts may enter. Then modes are those of all that a node stands on
  // (fs/reach.h), and are looked at again before they are given.
  bool others = false;
};

// What lookup, stat, list, open, read mean in a mount, without the kernel: node ids in, answers or
// the Status whose errno the caller shall see out. What can be computed from node ids
// is; other nodes count who knows them. Thread-safe; no call holds a lock while it reads data.
// Tests of a mount work on this class, without a kernel and without FUSE; the bridge adds threads
// and replies and decides nothing.
class Vfs {
 public:
  // Seconds that the kernel may keep what it was told: below a sealed checkpoint, and for names
  // that come and go (the root, latest, names that are not there).
  // A sealed checkpoint never changes, and its node ids die with its slot, so an hour is as good as
  // for ever.
  static constexpr double kSealedSeconds = 3600;
  static constexpr double kRootSeconds = 0.4;

  // kNotFound: no such source; kUnsupported: neither ours nor in a format that we read;
  // kInvalidArgument: the map of keys does not fit the checkpoint (of a store: its latest).
  static Result<std::unique_ptr<Vfs>> Open(FileSystem& fs, const VfsOptions& options);

  // `seconds` is how the kernel's caches are kept right without telling it anything: what can
  // change is given for a fraction of a second, what cannot for an hour.
  struct Entry {
    NodeId id = 0;
    Attributes attributes;
    double seconds = 0;  // That name and attributes may be kept.
  };
  // kNotFound where there is no such name now, kStale where the folder is gone. Counts a reference
  // of the node, which Forget gives back.
  Result<Entry> Lookup(NodeId folder, std::string_view name);
  void Forget(NodeId node, std::uint64_t references);
  Result<Entry> Stat(NodeId node);
  // Whether the checkpoint of a node was there when the store was looked at last.
  bool IsThere(NodeId node);
  Result<std::string> ReadLink(NodeId node);

  struct Listed {
    std::string name;
    Entry entry;
    std::uint64_t next = 0;  // Where to go on after this one; never 0.
  };
  // Entries from `cookie` on (0, or a `next`), "." and ".." first, until fn returns false (that
  // one was not taken).
  Status List(NodeId folder, std::uint64_t cookie, const std::function<bool(const Listed&)>& fn);
  Result<std::shared_ptr<const VirtualFile>> OpenFile(NodeId node);
  // Whether answering for this node may have to wait for more than the index in memory and the
  // control files: its checkpoint is not open yet.
  // The bridge answers those that may not on the thread that received the request, and queues the
  // others, so that `ls` and status files work while storage hangs.
  bool MayBlock(NodeId node);

  // Names outside of "user." are kUnsupported (EOPNOTSUPP): `ls -l` then stops asking.
  Result<std::string> GetXattr(NodeId node, std::string_view name);
  Result<std::vector<std::string>> ListXattrs(NodeId node);

  // ---- Saving: what changes something. Below .staging/ of a writable mount it is StagingTree's;
  // published checkpoints are kReadOnly, and so is all of a mount that is not writable. Every call
  // may block.
  bool writable() const { return staging_ != nullptr; }
  // Why a mount that was to be writable is not; empty where it is or was not to be.
  const std::string& not_writable_because() const { return not_writable_because_; }
  static constexpr std::string_view kStagingName = ".staging";
  // What this mount knows of a staging, without a look at storage: by its name in .staging/, with a
  // reference counted as by Lookup, or by the node of its folder, or of .staging/ itself. Nothing
  // for all other nodes.
  std::optional<Entry> KnownStaging(NodeId folder, std::string_view name);
  std::optional<Entry> KnownStaging(NodeId node);
  static bool IsStaged(NodeId node) {
    const Node n = NodeOf(node);
    return n.slot == 0 && n.view == kStagingView;
  }
  static bool IsStagingRoot(NodeId node) {
    return IsStaged(node) && NodeOf(node).item == StagingTree::kRoot;
  }
  // open(2) of a file below .staging/, and of any other for writing, which is refused.
  Result<std::shared_ptr<WriteHandle>> OpenStaged(NodeId node, int flags);
  struct Created {
    Entry entry;  // With a reference counted.
    std::shared_ptr<WriteHandle> handle;
  };
  Result<Created> Create(NodeId folder, std::string_view name, int flags);
  Result<Entry> MakeDirectory(NodeId folder, std::string_view name);
  Status Truncate(NodeId node, std::uint64_t size);
  Result<Entry> SetAttributes(NodeId node);
  Status Unlink(NodeId folder, std::string_view name);
  Status RemoveDirectory(NodeId folder, std::string_view name);
  // `flags` are renameat2's. Of a staging into the root: publishes.
  Status Rename(NodeId folder, std::string_view name, NodeId to_folder, std::string_view to_name,
                unsigned flags);
  // Links and special files, which no folder here has: EPERM or EROFS.
  Status RefuseMaking(NodeId folder, std::string_view name);
  // What a change of this node answers that is not below .staging/ (extended attributes: of any).
  Status RefuseChanging(NodeId node);
  // Everything written so far is durable.
  Status Drain();

  MountStats& stats() { return stats_; }
  StoreWatch& watch() { return *watch_; }
  const std::string& source() const { return source_; }
  SourceKind kind() const { return kind_; }
  const VfsOptions& options() const { return options_; }
  // What .tensormount/status shows; the session puts its own fields in. Without one: the source's.
  void SetStatus(std::function<std::string()> status) { status_ = std::move(status); }
  // What .tensormount/metrics has besides: the session's own families.
  void SetMetrics(std::function<void(MetricsText&)> metrics) { metrics_ = std::move(metrics); }
  // The fields that are the Vfs's to know, as the inside of a JSON object.
  std::string StatusFields();

 private:
  Vfs() = default;
  // The checkpoint that a node belongs to; the root of a mount of one checkpoint is its slot's.
  struct Located {
    Node node;
    std::shared_ptr<const CheckpointView> view;  // Null: a node of the mount itself.
  };
  Result<Located> Locate(NodeId id);
  // Of what the kernel asks about open files too: theirs is found as long as any file of their
  // checkpoint is open, also when that is gone.
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
  // Below .staging/, and what is refused elsewhere.
  void OpenStaging(FileSystem& fs);
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
  std::string source_;  // Resolved.
  std::unique_ptr<StoreWatch> watch_;
  std::function<std::string()> status_;
  std::function<void(MetricsText&)> metrics_;
  MountStats stats_;
  std::unique_ptr<StagingTree> staging_;  // Null: not writable.
  std::string not_writable_because_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VFS_H_
