// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGING_TREE_IMPL_H_
#define TENSORMOUNT_FS_SAVE_STAGING_TREE_IMPL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fs/save/staged_checkpoint.h"
#include "fs/save/staged_handles.h"
#include "fs/save/staged_nodes.h"
#include "fs/save/staging_tree.h"

namespace tensormount::fs {

// Names and attributes are in staging_tree.cc, what changes something in staged_changes.cc.
class StagingTreeImpl : public StagingTree {
 public:
  StagingTreeImpl(FileSystem& fs, Store store, const FileInfo& folder, std::string incarnation,
                  MountStats& stats);

  Result<Node> Lookup(std::uint64_t folder, std::string_view name) override;
  void Forget(std::uint64_t item, std::uint64_t references) override;
  Result<Node> Stat(std::uint64_t item) override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) override;

  Result<Node> MakeDirectory(std::uint64_t folder, std::string_view name) override;
  Result<std::shared_ptr<WriteHandle>> Open(std::uint64_t file, int flags) override;
  Result<Opened> Create(std::uint64_t folder, std::string_view name, int flags) override;
  Status Truncate(std::uint64_t file, std::uint64_t size) override;
  Result<Node> SetAttributes(std::uint64_t item) override;
  Status Unlink(std::uint64_t folder, std::string_view name) override;
  Status RemoveDirectory(std::uint64_t folder, std::string_view name) override;
  Status Publish(std::string_view name, std::string_view as) override;
  Status RenameWithin(std::uint64_t folder, std::string_view name, std::uint64_t to_folder,
                      std::string_view to_name) override;

  Status SyncAll() override;
  std::string StatusFields() override;

 private:
  using NodePtr = std::shared_ptr<const StagedNode>;
  using StagedPtr = std::shared_ptr<StagedCheckpoint>;
  // One object part, or a folder that objects or somebody made.
  struct ObjectName {
    std::string key;
    Dims index;
  };

  // The node, where its staging still stands.
  Result<NodePtr> Live(std::uint64_t item);
  // The staging with this name, known already or not. kNotFound.
  Result<StagedPtr> Join(std::string_view name);
  // It has left its name.
  void Drop(const StagedPtr& staged);
  // Those that other mounts published or removed, and that nobody asks this one for any more: they
  // have files open.
  void DropGone();

  // What `name` is in `parent`, not counted yet. kNotFound; ENOTDIR.
  Result<StagedNode> Child(const StagedNode& parent, std::string_view name);
  Result<StagedNode> ChildOfStaging(const StagedNode& parent, std::string_view name);
  Result<StagedNode> TensorChild(const StagedNode& parent, std::string_view name,
                                 const SchemaView& view);
  Result<StagedNode> SliceChild(const StagedNode& parent, std::string_view name,
                                const SchemaView& view);
  Result<StagedNode> ObjectChild(const StagedNode& parent, std::string_view name);
  // Which object part lies, or would lie, at a path. kNotFound says why none can.
  static Result<ObjectName> ObjectAt(const SchemaView& view, std::string_view path);
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
  Status ListPaths(const StagedNode& folder, const ObjectPaths& paths, std::uint64_t cookie,
                   const Visit& fn);

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
  std::mutex mutex_;
  std::map<std::string, StagedPtr, std::less<>> staged_;  // By name.
};

std::string JoinedPath(std::string_view folder, std::string_view name);
// "3" as 3; nothing for what is not how a rank is written.
bool ParseRank(std::string_view name, std::uint32_t* rank);
Status NotHere(std::string_view name);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGING_TREE_IMPL_H_
