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

// A name below a checkpoint, as the kernel is told of it.
// ViewChild is what a view says of it; this is the same with the node id and the owner.
struct Child {
  std::string name;
  Node node;
  Attributes attributes;
};

// The tree of one opened checkpoint: a folder whose children are its views. Knows slots, inode
// numbers, modes and owners, which the views do not. Immutable in all that it shows; thread-safe.
//
// What a request goes through: Vfs finds the slot of the node id and with it this object; here the
// 4 bits of the view choose the View; that one resolves the 40 bits of the item and answers with a
// ViewNode; here it becomes Attributes (inode, owner, mode, times).
// Ownership: shared, and every open VirtualFile holds a reference. So a checkpoint that was removed
// or replaced under its name is read to the end by whoever has a file of it open, and its memory
// goes with the last of them.
// Members are made in the order in which they are declared, each of the ones before it: the index,
// what is shown of it, then the views, which keep references to both.
class CheckpointView : public std::enable_shared_from_this<CheckpointView> {
 public:
  // The number of slices/ among the views: its items alone are counted (SliceItems).
  static constexpr std::uint32_t kSlicesView = 6;

  struct Options {
    std::uint32_t slot = 0;  // Goes into the node ids.
    std::string name;        // Of the folder that it is shown as; goes into inode numbers.
    bool list_views = false;
    ServeVerify verify = ServeVerify::kFirst;
    // Other names for keys; null: none. kInvalidArgument where two keys would share one.
    std::shared_ptr<const KeyMap> map;
    HfOptions hf;                          // kInvalidArgument where its rules do not fit.
    std::vector<std::string> roots;        // OpenedCheckpoint::Options::roots.
    std::shared_ptr<ProvenRanges> proven;  // Likewise.
    // What the kernel knows of slices/ from an earlier view; null: nothing.
    std::shared_ptr<SliceItems> slices;
    // VfsOptions::others: the modes of all of its files count, not only those of its commit record.
    bool others = false;
  };
  // A checkpoint folder. kStale where its uuid is not `expected` (unless that is zero).
  // The folder is pinned before anything of it is read, so that all files come from one checkpoint
  // even where another one takes its name meanwhile.
  static Result<std::shared_ptr<const CheckpointView>> Open(FileSystem& fs,
                                                            const std::string& directory,
                                                            const Uuid& expected,
                                                            const Ownership& ownership,
                                                            const Options& options);
  // A folder or a file in a foreign format, as resolved.
  // It has no uuid and no commit record; views that need one of these leave it out.
  static Result<std::shared_ptr<const CheckpointView>> OpenForeign(FileSystem& fs,
                                                                   const std::string& path,
                                                                   const Ownership& ownership,
                                                                   const Options& options);

  // One that is open already.
  // For exports, which open the source themselves before ranks agree on it.
  static Result<std::shared_ptr<const CheckpointView>> Of(FileSystem& fs,
                                                          std::shared_ptr<OpenedCheckpoint> opened,
                                                          const Ownership& ownership,
                                                          const Options& options);

  const OpenedCheckpoint& opened() const { return *opened_; }
  const ServedData& data() const { return *data_; }
  const ShownCheckpoint& shown() const { return *shown_; }

  // All below take nodes of this slot. Numbers that are out of range answer kStale.
  // Node ids are kept by the kernel and may come from before a remount, so each number is checked
  // on its way down: the view here, the item by its view.
  Result<Child> Lookup(const Node& folder, std::string_view name) const;
  Result<Attributes> Stat(const Node& node) const;
  // Children from `cookie` on (0: all) without "." and "..", until fn returns false. The second
  // argument is the cookie of what follows.
  using Visit = std::function<bool(const Child& child, std::uint64_t next)>;
  Status List(const Node& folder, std::uint64_t cookie, const Visit& fn) const;
  // Each call makes a new file. Segments of a slice or a tensor are few; those of a file of many
  // tensors are shared by all that have it open.
  Result<std::shared_ptr<const VirtualFile>> OpenFile(const Node& file) const;
  // Segments that a view made, as an open file of this checkpoint. `path` goes into messages.
  std::shared_ptr<const VirtualFile> Serve(FileSegments segments, const std::string& path,
                                           const Node& node) const;
  // Names and values of the user.tensormount.* attributes.
  Result<std::map<std::string, std::string>> Xattrs(const Node& node) const;
  // Path below the checkpoint, for messages.
  std::string PathOf(const Node& node) const;

  // For VirtualFile: the file of storage that is this node's (FindBackingFile). Found once.
  // As FindBackingFile. The answer is remembered for files of many tensors, where finding it takes
  // a walk over all of them and every open would ask again.
  Result<std::uint32_t> BackingFileOf(const Node& node, const FileSegments& segments) const;

 private:
  CheckpointView(FileSystem& fs, std::shared_ptr<OpenedCheckpoint> opened)
      : fs_(fs), opened_(std::move(opened)) {}
  Status Prepare(const Ownership& ownership, const Options& options);
  // Takes from ownership_ what the files of the checkpoint do not give.
  Status RestrictToFiles();
  // kInternal where there would be more views than node ids have bits for.
  Status MakeViews();

  // kStale where there is none. Views are numbered from 1.
  // Node ids come from the kernel, which may have kept them over a remount of another version: any
  // number can come.
  Result<const View*> ViewOf(const Node& node) const;
  static bool IsTop(const Node& node);
  // A hash of the checkpoint's name and of what the node is called within its view: the same in
  // every mount of it and after every restart, which is what tools like tar and rsync go by.
  // 64 bits: with 10 million nodes the chance of two equal ones is one in 370,000.
  std::uint64_t InodeOf(std::string_view view, bool folder, std::string_view identity) const;
  Attributes AttributesOf(std::string_view view, const ViewNode& node) const;
  Child ChildOf(std::uint8_t number, std::string name, const ViewNode& node) const;
  Result<Child> LookupTop(std::string_view name) const;
  Status ListTop(std::uint64_t cookie, const Visit& fn) const;

  // Immutable after Prepare, so read without a lock. Only what is below mutex_ changes.
  FileSystem& fs_;
  std::shared_ptr<OpenedCheckpoint> opened_;
  Ownership ownership_;  // Of all files and folders: that of the checkpoint on disk.
  Options options_;
  // What InodeOf mixes in: the name and uuid of this checkpoint.
  std::uint64_t inode_seed_ = 0;
  std::unique_ptr<const ShownTensors> tensors_;
  std::unique_ptr<const KeyTree> tensor_tree_;
  std::unique_ptr<const LayerFiles> layers_;
  std::unique_ptr<const ShownObjects> objects_;
  std::optional<const ShownCheckpoint> shown_;
  std::optional<ServedData> data_;
  std::vector<std::unique_ptr<const View>> views_;

  mutable std::mutex mutex_;
  // Of files of several tensors; empty: there is none.
  mutable std::map<NodeId, std::optional<std::uint32_t>> backing_files_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEW_H_
