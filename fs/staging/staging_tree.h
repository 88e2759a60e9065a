// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_STAGING_STAGING_TREE_H_
#define TENSORMOUNT_FS_STAGING_STAGING_TREE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/attributes.h"
#include "fs/handle.h"
#include "fs/mount_stats.h"
#include "fs/staging/staged_checkpoint.h"
#include "fs/staging/staged_handles.h"
#include "fs/staging/staged_nodes.h"
#include "index/store/store.h"

namespace tensormount::fs {

// .staging/ of a mount of a store and everything below it: names, attributes, what may be made,
// written, removed and renamed (interface of the mount; docs/semantics.md, "Saving through the
// mount"). Nodes are made when somebody looks them up and count references; nothing is cached, and
// no node outlives its staging: it answers ESTALE. Thread-safe.
// What is below .staging/NAME, and where it comes from:
//   schema.json, common.json   the merged edits of all mounts; writing adds an edit
//   tensors/KEY, slices/KEY[..]  names follow from the schema; bytes are those of this mount only
//   objects/KEY                objects that this mount wrote, and folders
//   done/<rank>                marks of all mounts
//   report.json, report.txt    of the last publish that failed
// Other mounts' bytes are not shown: they are in their journals, which only a publish reads.
class StagingTree {
 public:
  static constexpr std::uint64_t kRoot = 1;  // .staging itself.

  // What a lookup gives the bridge: the number by which the kernel will name it, and what stat
  // says.
  struct Node {
    std::uint64_t item = 0;  // Never used again.
    Attributes attributes;
  };
  // `fs` must outlive it. Opens nothing and touches nothing before it is asked.
  static Result<std::unique_ptr<StagingTree>> Make(FileSystem& fs, const std::string& store,
                                                   MountStats& stats);

  // Lookup counts a reference of the node, as do MakeDirectory and Create; Forget gives back.
  Result<Node> Lookup(std::uint64_t folder, std::string_view name);
  void Forget(std::uint64_t item, std::uint64_t references);
  Result<Node> Stat(std::uint64_t item);
  // What is known without a look at storage of a staging (LookupKnown counts a reference of its
  // node), of its folder or of .staging itself; nothing for other nodes.
  std::optional<Node> LookupKnown(std::string_view name);
  std::optional<Node> StatKnown(std::uint64_t item);
  // Of `attributes` only kind and inode are set: names that are listed are not looked up.
  using Visit =
      std::function<bool(std::string_view name, const Attributes& attributes, std::uint64_t next)>;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn);

  // EEXIST for a staging that is there: it is joined by looking it up.
  Result<Node> MakeDirectory(std::uint64_t folder, std::string_view name);
  // With a reference of the node counted, as by Lookup.
  struct Opened {
    Node node;
    std::shared_ptr<WriteHandle> handle;
  };
  // open(2) of what is there, for reading or writing (O_TRUNC included).
  Result<std::shared_ptr<WriteHandle>> Open(std::uint64_t file, int flags);
  // open(2) with O_CREAT of what is not there (marks, objects, schema.json, common.json).
  Result<Opened> Create(std::uint64_t folder, std::string_view name, int flags);
  Status Truncate(std::uint64_t file, std::uint64_t size);
  // chmod, chown, utimens: accepted and without effect on what is published; EPERM for the rest.
  Result<Node> SetAttributes(std::uint64_t item);
  Status Unlink(std::uint64_t folder, std::string_view name);
  Status RemoveDirectory(std::uint64_t folder, std::string_view name);
  // Publishes .staging/`name` as `as` in the root. Everything else is refused with an errno that
  // `mv` does not take for a reason to copy (never EXDEV, never EINVAL).
  Status Publish(std::string_view name, std::string_view as);
  Status RenameWithin(std::uint64_t folder, std::string_view name, std::uint64_t to_folder,
                      std::string_view to_name);

  // Before the daemon ends: everything durable.
  Status SyncAll();
  struct Counts {
    std::size_t stagings = 0;
    int open_writers = 0;
    std::uint64_t bytes = 0;
    std::uint64_t files = 0;
    std::uint64_t syncs = 0;
  };
  // Of the stagings that are known now.
  Counts counts();
  // As the inside of a JSON object, for .tensormount/status.
  std::string StatusFields();

 private:
  using NodePtr = std::shared_ptr<const StagedNode>;
  using StagedPtr = std::shared_ptr<StagedCheckpoint>;

  StagingTree(FileSystem& fs, Store store, const FileInfo& folder, std::string incarnation,
              MountStats& stats);
  // The node, where its staging still stands.
  // Every operation begins with it, so none works on a staging that has left its name for longer
  // than StagedCheckpoint::kMaxAge.
  Result<NodePtr> Live(std::uint64_t item);
  // The staging with this name, known already or not. kNotFound.
  Result<StagedPtr> Join(std::string_view name);
  // It has left its name.
  void Drop(const StagedPtr& staged);
  // Those that other mounts published or removed, and that nobody asks this one for any more: they
  // have files open.
  // Each keeps descriptors and what it knows of targets in memory.
  void DropGone();

  // What `name` is in `parent`, not counted yet. kNotFound; ENOTDIR.
  Result<StagedNode> Child(const StagedNode& parent, std::string_view name);
  Result<StagedNode> ChildOfStaging(const StagedNode& parent, std::string_view name);
  Result<StagedNode> TensorChild(const StagedNode& parent, std::string_view name,
                                 const SchemaView& view);
  Result<StagedNode> SliceChild(const StagedNode& parent, std::string_view name,
                                const SchemaView& view);
  Result<StagedNode> ObjectChild(const StagedNode& parent, std::string_view name);
  // Which object part lies, or would lie, at a path; its size is not filled in. kNotFound says why
  // none can.
  static Result<StagingWriter::ObjectName> ObjectAt(const SchemaView& view, std::string_view path);
  // Paths of all objects that this mount wrote, and of folders that the schema or mkdir made.
  struct ObjectPaths {
    std::vector<std::string> files;
    std::vector<std::string> folders;
  };
  static Result<ObjectPaths> PathsOfObjects(StagedCheckpoint& of);

  Result<Attributes> Describe(const StagedNode& node);
  Result<Node> Known(NodePtr node);
  Status ListStaging(const StagedNode& folder, std::uint64_t cookie, const Visit& fn);
  Status ListTree(const StagedNode& folder, std::uint64_t cookie, const Visit& fn);
  struct ListedName {
    std::uint64_t cookie;  // Of the name alone.
    std::string name;
    bool folder;
  };
  using ListedNames = std::vector<ListedName>;  // By cookie.
  static ListedNames NamesIn(const StagedNode& folder, const ObjectPaths& paths);
  Status ListPaths(const StagedNode& folder, std::uint64_t cookie, const Visit& fn);

  Result<std::shared_ptr<WriteHandle>> OpenNode(const NodePtr& node, int flags);
  HandleContext ContextOf(const NodePtr& node, bool writable);
  Status MakeObject(const StagedNode& node);
  Status RemoveStagingAt(std::string_view name);
  Status CheckEmpty(const StagedNode& folder);
  // A refusal that is worth a line in .tensormount/errors.
  Status Told(std::string_view operation, std::string_view object, Status status);

  FileSystem& fs_;
  const Store store_;
  const std::string incarnation_;
  MountStats& stats_;
  const FileInfo folder_;  // The store's, for owner and modes.
  StagedNodes nodes_;
  // Of staged_. Held for look-ups in the map only, never over storage.
  std::mutex mutex_;
  std::map<std::string, StagedPtr, std::less<>> staged_;  // By name.
  std::mutex listings_mutex_;  // Of listings_; taken after no other, and held over nothing.
  std::map<std::uint64_t, std::shared_ptr<const ListedNames>> listings_;  // By the folder's item.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_STAGING_STAGING_TREE_H_
