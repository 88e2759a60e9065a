// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_STAGING_TREE_H_
#define TENSORMOUNT_FS_SAVE_STAGING_TREE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/attributes.h"
#include "fs/handle.h"
#include "fs/mount_stats.h"

namespace tensormount::fs {

// .staging/ of a mount of a store and everything below it: names, attributes, what may be made,
// written, removed and renamed (interface of the mount; docs/semantics.md, "Saving through the
// mount"). Nodes are made when somebody looks them up and count references; nothing is cached, and
// no node outlives its staging: it answers ESTALE. Thread-safe.
class StagingTree {
 public:
  static constexpr std::uint64_t kRoot = 1;  // .staging itself.

  struct Node {
    std::uint64_t item = 0;  // Never used again.
    Attributes attributes;
  };
  // `fs` must outlive it. Opens nothing and touches nothing before it is asked.
  static Result<std::unique_ptr<StagingTree>> Make(FileSystem& fs, const std::string& store,
                                                   MountStats& stats);
  virtual ~StagingTree() = default;

  // Lookup counts a reference of the node, as do MakeDirectory and Create; Forget gives back.
  virtual Result<Node> Lookup(std::uint64_t folder, std::string_view name) = 0;
  virtual void Forget(std::uint64_t item, std::uint64_t references) = 0;
  virtual Result<Node> Stat(std::uint64_t item) = 0;
  // Of `attributes` only kind and inode are set: names that are listed are not looked up.
  using Visit =
      std::function<bool(std::string_view name, const Attributes& attributes, std::uint64_t next)>;
  virtual Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) = 0;

  // EEXIST for a staging that is there: it is joined by looking it up.
  virtual Result<Node> MakeDirectory(std::uint64_t folder, std::string_view name) = 0;
  struct Opened {
    Node node;
    std::shared_ptr<WriteHandle> handle;
  };
  // open(2) of what is there, for reading or writing (O_TRUNC included).
  virtual Result<std::shared_ptr<WriteHandle>> Open(std::uint64_t file, int flags) = 0;
  // open(2) with O_CREAT of what is not there (marks, objects, schema.json, common.json).
  virtual Result<Opened> Create(std::uint64_t folder, std::string_view name, int flags) = 0;
  virtual Status Truncate(std::uint64_t file, std::uint64_t size) = 0;
  // chmod, chown, utimens: accepted and without effect on what is published; EPERM for the rest.
  virtual Result<Node> SetAttributes(std::uint64_t item) = 0;
  virtual Status Unlink(std::uint64_t folder, std::string_view name) = 0;
  virtual Status RemoveDirectory(std::uint64_t folder, std::string_view name) = 0;
  // Publishes .staging/`name` as `as` in the root. Everything else is refused with an errno that
  // `mv` does not take for a reason to copy (never EXDEV, never EINVAL).
  virtual Status Publish(std::string_view name, std::string_view as) = 0;
  virtual Status RenameWithin(std::uint64_t folder, std::string_view name, std::uint64_t to_folder,
                              std::string_view to_name) = 0;

  // Before the daemon ends: everything durable.
  virtual Status SyncAll() = 0;
  // As the inside of a JSON object, for .tensormount/status.
  virtual std::string StatusFields() = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_STAGING_TREE_H_
