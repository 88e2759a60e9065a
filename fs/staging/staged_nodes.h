// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_STAGING_STAGED_NODES_H_
#define TENSORMOUNT_FS_STAGING_STAGED_NODES_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/staging/staged_checkpoint.h"

namespace tensormount::fs {

// Kinds of nodes below .staging/. A role's value is part of a node's identity and of inode numbers,
// so new roles are added at the end.
enum class NodeRole : std::uint8_t {
  kRoot,     // .staging
  kStaging,  // .staging/NAME
  kSchema,
  kCommon,
  kReportJson,
  kReportText,
  kDone,     // done/
  kMark,     // done/<rank>
  kTensors,  // tensors/ and the directories below it
  kTensor,   // tensors/KEY
  kSlices,   // slices/ and the directories below it
  kSlice,    // slices/KEY[...]
  kObjects,  // objects/ and the directories below it
  kObject,   // objects/KEY, objects/KEY/0.1
};

// A node below .staging/. Immutable: a rename stores a new StagedNode under the same item number,
// and holders of the old one keep the old one.
struct StagedNode {
  std::uint64_t item = 0;
  NodeRole role = NodeRole::kRoot;
  std::shared_ptr<StagedCheckpoint> staged;  // Null: .staging itself.
  std::string path;                          // Path below tensors/, slices/, objects/ or done/.
  std::string key;                           // For a tensor, slice or object.
  Box box;                                   // For a tensor or slice.
  Dims index;                                // For an object part.
  std::uint32_t rank = 0;                    // For a mark.

  bool folder() const;
  // Path below the mount: ".staging/step-3/tensors/w".
  std::string Label() const;
  // Inode number: a hash of the staging's UUID, the role and the path, so that it is the same in
  // every mount while the staging exists.
  std::uint64_t Inode() const;
};

// The path of a name in a directory below tensors/, objects/, ...; `folder` may be empty.
inline std::string JoinedPath(std::string_view folder, std::string_view name) {
  return folder.empty() ? std::string(name) : std::string(folder) + '/' + std::string(name);
}

// All referenced nodes with their reference counts. The kernel counts a reference for each answered
// lookup, and returns references in FORGET requests, late and in batches. A node lives while it has
// references, and its number is never reused, so that a program that uses a node of a staging that
// is gone gets ESTALE instead of another file. Thread-safe.
class StagedNodes {
 public:
  static constexpr std::uint64_t kRoot = 1;
  StagedNodes();

  // Returns the node of this role and path, with its item number, and counts one more reference.
  std::shared_ptr<const StagedNode> Reference(StagedNode node);
  // kStale for unknown items.
  Result<std::shared_ptr<const StagedNode>> Find(std::uint64_t item) const;
  void Forget(std::uint64_t item, std::uint64_t references);
  // Renames `from`, if it is referenced, to `to`. A node that had the name `to` can no longer be
  // found by name, but its holders keep it.
  void Move(const StagedNode& from, StagedNode to);
  std::size_t size() const;

 private:
  // `name` is the key in items_, by which a second lookup finds the same node.
  struct Counted {
    std::shared_ptr<const StagedNode> node;
    std::string name;
    std::uint64_t references = 0;
  };
  mutable std::mutex mutex_;
  std::uint64_t next_ = kRoot + 1;
  std::shared_ptr<const StagedNode> root_;
  std::unordered_map<std::uint64_t, Counted> nodes_;
  std::unordered_map<std::string, std::uint64_t> items_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_STAGING_STAGED_NODES_H_
