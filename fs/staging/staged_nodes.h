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

// What a node below .staging/ stands for.
// The letter of a role is part of the name by which nodes are found and of inode numbers: new roles
// go to the end.
enum class NodeRole : std::uint8_t {
  kRoot,     // .staging
  kStaging,  // .staging/NAME
  kSchema,
  kCommon,
  kReportJson,
  kReportText,
  kDone,     // done/
  kMark,     // done/<rank>
  kTensors,  // tensors/ and the folders below it
  kTensor,   // tensors/KEY
  kSlices,   // slices/ and the folders below it
  kSlice,    // slices/KEY[...]
  kObjects,  // objects/ and the folders below it
  kObject,   // objects/KEY, objects/KEY/0.1
};

// Immutable once taken; a rename replaces the node under the same item number, and those who hold
// the old one keep it.
struct StagedNode {
  std::uint64_t item = 0;
  NodeRole role = NodeRole::kRoot;
  std::shared_ptr<StagedCheckpoint> of;  // Null: .staging itself.
  std::string path;                      // Below tensors/, slices/, objects/, done/.
  std::string key;                       // Of a tensor, slice or object.
  Box box;                               // Of a tensor or slice.
  Dims index;                            // Of an object part.
  std::uint32_t rank = 0;                // Of a mark.

  bool folder() const;
  // Below the mount: ".staging/step-3/tensors/w".
  std::string Label() const;
  // The same in every mount while the staging stands.
  // A hash of the staging's UUID, the role and the path, so that tools which compare inodes over
  // time or between machines agree.
  std::uint64_t Inode() const;
};

// A path below tensors/, objects/, ... of a name in a folder, whose own path may be empty.
inline std::string JoinedPath(std::string_view folder, std::string_view name) {
  return folder.empty() ? std::string(name) : std::string(folder) + '/' + std::string(name);
}

// The kernel counts one reference for each lookup that it was answered and gives them back in
// FORGET requests, late and in bunches. A node lives as long as it has references, and its number
// is never given to another: what a program still holds of a staging that is gone answers ESTALE
// instead of meaning something else.
// The nodes that somebody knows, with how often. Items are never used again. Thread-safe.
class StagedNodes {
 public:
  static constexpr std::uint64_t kRoot = 1;
  StagedNodes();

  // The node of this role and path, with one reference more. `node.item` is set here.
  std::shared_ptr<const StagedNode> Take(StagedNode node);
  // kStale for what nobody knows any more.
  Result<std::shared_ptr<const StagedNode>> Find(std::uint64_t item) const;
  void Forget(std::uint64_t item, std::uint64_t references);
  // The node of this role and path, if somebody knows it, is `to` from now on; who knows what was
  // there keeps that.
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
