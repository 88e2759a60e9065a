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

// .staging/ of a mount of a store and everything below it: names, attributes, and what may be
// created, written, removed and renamed (docs/mounting.md, "Saving through the mount"). Nodes are
// created at lookup and count references. Nodes of a staging that is gone return ESTALE.
// Thread-safe.
// Content of .staging/NAME:
//   schema.json, common.json     the merged edits of all mounts; writing adds an edit
//   tensors/KEY, slices/KEY[..]  names from the schema, bytes of this mount only
//   objects/KEY                  objects that this mount wrote, and directories
//   done/<rank>                  marks of all mounts
//   report.json, report.txt      of the last failed publish
// Bytes of other mounts are not shown: they are in those mounts' journals, which only a publish
// reads.
class StagingTree {
 public:
  static constexpr std::uint64_t kRoot = 1;  // The item of .staging itself.

  // Result of a lookup: the number by which the kernel refers to the node, and its attributes.
  struct Node {
    std::uint64_t item = 0;  // Never reused.
    Attributes attributes;
  };
  // `fs` and `stats` must outlive this object.
  static Result<std::unique_ptr<StagingTree>> Make(FileSystem& fs, const std::string& store,
                                                   MountStats& stats);

  // Lookup, MakeDirectory and Create count a reference of the node; Forget releases references.
  Result<Node> Lookup(std::uint64_t folder, std::string_view name);
  void Forget(std::uint64_t item, std::uint64_t references);
  Result<Node> Stat(std::uint64_t item);
  // Lookup and Stat from memory, without storage. LookupKnown finds the staging of this name in
  // .staging/, if this mount has seen it, and counts a reference. StatKnown finds the node of a
  // staging's directory or of .staging/ itself. nullopt for all others.
  std::optional<Node> LookupKnown(std::string_view name);
  std::optional<Node> StatKnown(std::uint64_t item);
  // Called for each listed name. Only kind and inode of `attributes` are set, because listed names
  // are not looked up. `next` is the cookie that continues the listing after this name. Returning
  // false ends the listing.
  using Visit =
      std::function<bool(std::string_view name, const Attributes& attributes, std::uint64_t next)>;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn);

  // EEXIST if the staging exists; Lookup then gives access to it.
  Result<Node> MakeDirectory(std::uint64_t folder, std::string_view name);
  // A created file. One reference of the node is counted, as by Lookup.
  struct Opened {
    Node node;
    std::shared_ptr<WriteHandle> handle;
  };
  // open(2) of an existing file, for reading or writing (O_TRUNC included).
  Result<std::shared_ptr<WriteHandle>> Open(std::uint64_t file, int flags);
  // open(2) with O_CREAT. New names: done marks, objects, schema.json, common.json.
  Result<Opened> Create(std::uint64_t folder, std::string_view name, int flags);
  Status Truncate(std::uint64_t file, std::uint64_t size);
  // chmod, chown, utimens: accepted and ignored.
  Result<Node> SetAttributes(std::uint64_t item);
  Status Unlink(std::uint64_t folder, std::string_view name);
  Status RemoveDirectory(std::uint64_t folder, std::string_view name);
  // Publishes .staging/`name` as `as` in the root. Errors are never EXDEV, after which `mv` would
  // copy the files, or EINVAL, which `mv` misunderstands.
  Status Publish(std::string_view name, std::string_view as);
  Status RenameWithin(std::uint64_t folder, std::string_view name, std::uint64_t to_folder,
                      std::string_view to_name);

  // Makes all bytes durable that were written through this mount. Called before the daemon ends.
  Status SyncAll();
  struct Counts {
    std::size_t stagings = 0;
    int open_writers = 0;
    std::uint64_t bytes = 0;
    std::uint64_t files = 0;
    std::uint64_t syncs = 0;
  };
  // Totals over the known stagings.
  Counts counts();
  // For .tensormount/status, as the inside of a JSON object.
  std::string StatusFields();

 private:
  using NodePtr = std::shared_ptr<const StagedNode>;
  using StagedPtr = std::shared_ptr<StagedCheckpoint>;

  StagingTree(FileSystem& fs, Store store, const FileInfo& folder, std::string incarnation,
              MountStats& stats);
  // The node, if its staging still exists. Operations on a node begin with this call, so none uses
  // a staging for longer than StagedCheckpoint::kMaxAge after it was published or removed.
  Result<NodePtr> FindLive(std::uint64_t item);
  // The staging with this name, also if another mount made it and this one does not know it yet.
  // kNotFound if there is none.
  Result<StagedPtr> Join(std::string_view name);
  // Forgets a staging that was published or removed.
  void Drop(const StagedPtr& staged);
  // Forgets stagings that other mounts published or removed, because each keeps descriptors and
  // memory.
  void DropGone();

  // The node `name` in `parent`; counts no reference. kNotFound; ENOTDIR: `parent` is a file.
  Result<StagedNode> Child(const StagedNode& parent, std::string_view name);
  Result<StagedNode> ChildOfStaging(const StagedNode& parent, std::string_view name);
  Result<StagedNode> TensorChild(const StagedNode& parent, std::string_view name,
                                 const SchemaView& view);
  Result<StagedNode> SliceChild(const StagedNode& parent, std::string_view name,
                                const SchemaView& view);
  Result<StagedNode> ObjectChild(const StagedNode& parent, std::string_view name);
  // Key and index of the object part at a path below objects/, whether it exists or not. An error
  // says why there can be no object at this path.
  static Result<StagingWriter::ObjectName> ObjectAt(const SchemaView& view, std::string_view path);
  // Paths of all objects that this mount wrote, and of directories that the schema or mkdir made.
  struct ObjectPaths {
    std::vector<std::string> files;
    std::vector<std::string> folders;
  };
  static Result<ObjectPaths> PathsOfObjects(StagedCheckpoint& of);

  Result<Attributes> Describe(const StagedNode& node);
  Result<Node> NodeWithAttributes(NodePtr node);
  Status ListStaging(const StagedNode& folder, std::uint64_t cookie, const Visit& fn);
  Status ListTree(const StagedNode& folder, std::uint64_t cookie, const Visit& fn);
  struct ListedName {
    std::uint64_t cookie;  // Depends on the name only.
    std::string name;
    bool folder;
  };
  using ListedNames = std::vector<ListedName>;  // Sorted by cookie.
  static ListedNames NamesIn(const StagedNode& folder, const ObjectPaths& paths);
  Status ListPaths(const StagedNode& folder, std::uint64_t cookie, const Visit& fn);

  Result<std::shared_ptr<WriteHandle>> OpenNode(const NodePtr& node, int flags);
  HandleContext ContextOf(const NodePtr& node, bool writable);
  Status MakeObject(const StagedNode& node);
  Status RemoveStagingAt(std::string_view name);
  Status CheckEmpty(const StagedNode& folder);
  // Reports `status`, unless it is ok, in .tensormount/errors, and returns it.
  Status LogFailure(std::string_view operation, std::string_view object, Status status);

  FileSystem& fs_;
  const Store store_;
  const std::string incarnation_;
  MountStats& stats_;
  const FileInfo folder_;  // Owner and modes of the store's directory.
  StagedNodes nodes_;
  // Guards staged_; never held during storage calls.
  std::mutex mutex_;
  std::map<std::string, StagedPtr, std::less<>> staged_;  // By name.
  std::mutex listings_mutex_;  // Guards listings_; never held together with another lock.
  // Listings that programs may continue, by the item number of their directory.
  std::map<std::uint64_t, std::shared_ptr<const ListedNames>> listings_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_STAGING_STAGING_TREE_H_
