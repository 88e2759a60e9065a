// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEW_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/name_map.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/attributes.h"
#include "fs/node.h"
#include "fs/views/hf_options.h"
#include "fs/views/served_data.h"
#include "fs/views/shown_checkpoint.h"
#include "fs/views/slices_view.h"
#include "fs/views/view.h"
#include "fs/views/virtual_file.h"
#include "index/read/checkpoint.h"

namespace tensormount::fs {

// A file or directory in a checkpoint as reported to the kernel: the view's ViewChild with node id
// and owner.
struct Child {
  std::string name;
  Node node;
  Attributes attributes;
};

// The tree of one opened checkpoint: a directory whose children are its views. It adds slots, inode
// numbers, modes and owners to the nodes of the views. Its content is immutable; thread-safe.
//
// Path of a request: Vfs finds this object by the slot of the node id; the view number (4 bits)
// selects the View, which finds the item number (40 bits) and returns a ViewNode. This object makes
// Attributes (inode, owner, mode, times) from the ViewNode.
// Every open VirtualFile holds a reference, so open files of a removed or replaced checkpoint can
// be read to the end.
// The order of the members matters, because they keep references to members before them: the views
// refer to the shown checkpoint, which refers to the opened checkpoint.
class CheckpointView : public std::enable_shared_from_this<CheckpointView> {
 public:
  // View number of slices/, the only view whose items the kernel holds references to (SliceItems).
  static constexpr std::uint32_t kSlicesView = 6;

  struct Options {
    std::uint32_t slot = 0;  // Part of the node ids.
    std::string name;        // Directory name in the mount; part of inode numbers.
    bool list_views = false;
    ServeVerify verify = ServeVerify::kFirst;
    // Empty: tensors are shown as stored. Opening fails with the errors of
    // NameBinding::Bind.
    NameMap map;
    // Opening fails with kInvalidArgument if the rules are invalid for the shown keys.
    HfOptions hf;
    // Directories outside of the checkpoint in which its data may be.
    std::vector<std::string> roots;
    // For Open: ranges that an earlier view of the same checkpoint, or of its files, has verified.
    std::shared_ptr<ProvenRanges> proven;
    // Items of slices/ that the kernel knows from an earlier view; null: there are none.
    std::shared_ptr<SliceItems> slices;
    // Whether users other than the mounting one may enter (VfsOptions::other_users). Modes then
    // grant only what all files of the checkpoint grant.
    bool other_users = false;
  };
  // Opens a checkpoint directory. kStale: `expected` is not zero, and the checkpoint has another
  // UUID. The directory is pinned first, so that all files come from one checkpoint even if another
  // one takes its name meanwhile.
  static Result<std::shared_ptr<const CheckpointView>> Open(FileSystem& fs,
                                                            const std::string& directory,
                                                            const Uuid& expected,
                                                            const Ownership& ownership,
                                                            const Options& options);
  // Opens a resolved directory or file in a foreign format. It has no commit record, so
  // checkpoint.json has no content_root; its UUID is a hash of its path, files and records.
  static Result<std::shared_ptr<const CheckpointView>> OpenForeign(FileSystem& fs,
                                                                   const std::string& path,
                                                                   const Ownership& ownership,
                                                                   const Options& options);

  // Makes the view of a checkpoint that is already open, for example for exports, which open the
  // source before the ranks agree on it.
  static Result<std::shared_ptr<const CheckpointView>> FromOpened(
      std::shared_ptr<const OpenedCheckpoint> opened, const Ownership& ownership,
      const Options& options);

  const OpenedCheckpoint& opened() const { return *opened_; }
  const ServedData& data() const { return *data_; }
  const ShownCheckpoint& shown() const { return *shown_; }

  // All functions below take nodes of this slot. Lookup, Stat, List and OpenFile fail (mostly with
  // kStale) for unknown view and item numbers: the kernel may keep node ids from before a remount.
  Result<Child> Lookup(const Node& folder, std::string_view name) const;
  Result<Attributes> Stat(const Node& node) const;
  // Children from `cookie` on (0: all), without "." and "..", until fn returns false. The second
  // argument is the cookie of the next child.
  using Visit = std::function<bool(const Child& child, std::uint64_t next)>;
  Status List(const Node& folder, std::uint64_t cookie, const Visit& fn) const;
  // Each call makes a new file. A slice or a tensor has few segments; those of a file of many
  // tensors are shared by its open files, unless hf/ has dropped them from its cache meanwhile.
  Result<std::shared_ptr<const VirtualFile>> OpenFile(const Node& file) const;
  // Makes an open file of this checkpoint from segments. `path` is used in messages.
  std::shared_ptr<const VirtualFile> Serve(FileSegments segments, const std::string& path,
                                           const Node& node) const;
  // Names and values of the node's extended attributes user.tensormount.*.
  Result<std::map<std::string, std::string>> Xattrs(const Node& node) const;
  // Path below the checkpoint, for messages.
  std::string PathOf(const Node& node) const;

  // Number of the stored file that equals the file `node` (FindBackingFile). The result is cached
  // for files of many tensors, because a search walks over all of them.
  Result<std::uint32_t> BackingFileOf(const Node& node, const FileSegments& segments) const;

 private:
  explicit CheckpointView(std::shared_ptr<const OpenedCheckpoint> opened)
      : opened_(std::move(opened)) {}
  Status Prepare(const Ownership& ownership, const Options& options);
  // Removes permissions from ownership_ that the checkpoint's files do not grant.
  Status RestrictToFiles();
  // Makes views_. kInternal if there are more views than the view number in node ids has bits for.
  Status MakeViews();

  // The view of a node; views are numbered from 1. kStale for unknown numbers: the kernel may have
  // kept node ids from another version of the program.
  Result<const View*> ViewOf(const Node& node) const;
  static bool IsTop(const Node& node);
  // Hash of the checkpoint's name and UUID and of the node's identity in its view: the same in
  // every mount and after every restart, which tools like tar and rsync rely on. 64 bits: with 10
  // million nodes the chance of a collision is one in 370,000.
  std::uint64_t InodeOf(std::string_view view, bool folder, std::string_view identity) const;
  Attributes AttributesOf(std::string_view view, const ViewNode& node) const;
  Child ChildOf(std::uint8_t number, std::string name, const ViewNode& node) const;
  Result<Child> LookupTop(std::string_view name) const;
  Status ListTop(std::uint64_t cookie, const Visit& fn) const;

  // These members are immutable after Prepare, so they are read without a lock. mutex_ guards only
  // the members below it.
  std::shared_ptr<const OpenedCheckpoint> opened_;
  // Owner and modes of the checkpoint on disk (see RestrictToFiles), which all files and
  // directories get.
  Ownership ownership_;
  Options options_;
  // Seed of InodeOf: the name and UUID of this checkpoint.
  std::uint64_t inode_seed_ = 0;
  std::unique_ptr<const ShownTensors> tensors_;
  std::unique_ptr<const KeyTree> tensor_tree_;
  std::unique_ptr<const LayerFiles> layers_;
  std::unique_ptr<const ShownObjects> objects_;
  std::optional<const ShownCheckpoint> shown_;
  std::optional<ServedData> data_;
  std::vector<std::unique_ptr<const View>> views_;

  mutable std::mutex mutex_;
  // Results of BackingFileOf for files of several tensors; nullopt: no backing file.
  mutable std::map<NodeId, std::optional<std::uint32_t>> backing_files_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEW_H_
