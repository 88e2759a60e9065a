// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEW_H_

#include <atomic>
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
#include "fs/views/key_tree.h"
#include "fs/views/shown_tensors.h"
#include "fs/views/virtual_file.h"
#include "index/checkpoint.h"

namespace tensormount::fs {

enum class ServeVerify { kOff, kFirst, kAlways };

// What the items of a checkpoint's nodes mean: for now all are of one table.
enum class ViewKind : std::uint8_t {
  kFixed = 0,
  kTensors = 1,
  kNpy = 2,
  kExtents = 3,
  kObjects = 4,
  kLayers = 5,  // Files below tensors/ and npy/ that are opened by name and not listed: layers of
  kNpyLayers = 6,  // stacked tensors. `ordinal` counts their names.
};
inline constexpr std::uint8_t kViewKinds = 7;
enum class FixedFile : std::uint32_t {
  kRoot = 0,
  kCheckpointJson = 1,
  kCommonJson = 2,
  kSafetensors = 3,
};
struct KeyNode {
  std::uint32_t slot = 0;
  ViewKind view = ViewKind::kFixed;
  std::uint32_t ordinal = 0;
  std::uint32_t depth = 0;  // 0: a file; d + 1: the folder of the first d names of the key's path.
  bool is_folder() const { return depth > 0; }
};
inline constexpr std::uint32_t kMaxOrdinals = 1u << 28;
inline constexpr std::uint32_t kMaxDepth = (1u << 12) - 1;

struct Child {
  std::string name;
  Node node;
  Attributes attributes;
};

// The tree of one opened checkpoint: folders and files computed from its index. Immutable in all
// that it shows; thread-safe.
class CheckpointView : public std::enable_shared_from_this<CheckpointView> {
 public:
  struct Options {
    std::uint32_t slot = 0;  // Goes into the node ids.
    std::string name;        // Of the folder that it is shown as; goes into inode numbers.
    bool list_views = false;
    ServeVerify verify = ServeVerify::kOff;
    // Other names for keys; null: none. kInvalidArgument where two keys would share one.
    std::shared_ptr<const KeyMap> map;
  };
  // A checkpoint folder. kStale where its uuid is not `expected` (unless that is zero).
  static Result<std::shared_ptr<const CheckpointView>> Open(FileSystem& fs,
                                                            const std::string& directory,
                                                            const Uuid& expected,
                                                            const Ownership& ownership,
                                                            const Options& options);
  static Result<std::shared_ptr<const CheckpointView>> OpenSafetensors(FileSystem& fs,
                                                                       const std::string& path,
                                                                       const Ownership& ownership,
                                                                       const Options& options);

  const OpenedCheckpoint& opened() const { return *opened_; }

  // All below take nodes of this slot. Numbers that are out of range answer kStale.
  Result<Child> Lookup(const Node& folder, std::string_view name) const;
  // A reference that Lookup counted, of nodes that are made for it.
  void Forget(const Node& node, std::uint64_t references) const;
  Result<Attributes> Stat(const Node& node) const;
  // Children from `cookie` on (0: all) without "." and "..", until fn returns false. The second
  // argument is the cookie of what follows.
  using Visit = std::function<bool(const Child& child, std::uint64_t next)>;
  Status List(const Node& folder, std::uint64_t cookie, const Visit& fn) const;
  Result<std::shared_ptr<const VirtualFile>> OpenFile(const Node& file) const;
  // Names and values of the user.tensormount.* attributes.
  Result<std::map<std::string, std::string>> Xattrs(const Node& node) const;
  // Path below the checkpoint, for messages.
  std::string PathOf(const Node& node) const;

  // For VirtualFile. Ranges must lie within.
  // The stored bytes themselves; empty where they must be read instead, also where this mount
  // verifies what it serves.
  std::vector<OpenedCheckpoint::MappedPiece> MapTensor(const TensorEntry& tensor,
                                                       std::uint64_t offset,
                                                       std::size_t size) const;
  Status ReadTensor(const TensorEntry& tensor, std::uint64_t offset, char* out, std::size_t size,
                    ReadStats* stats) const;
  Status ReadObject(std::uint32_t part, std::uint64_t offset, char* out, std::size_t size) const;

 private:
  // The parts of the objects in the order of their paths.
  struct Objects {
    explicit Objects(std::vector<std::string> paths) : keys(std::move(paths)), tree(keys) {}
    ListedKeys keys;
    KeyTree tree;
    std::vector<ObjectContent> parts;      // With the keys that are shown.
    std::vector<std::string> stored_keys;  // Of each part; empty without a map of keys.
  };
  // What a file of one tensor is made of.
  struct Served {
    TensorEntry shown;        // As it looks from outside.
    TensorEntry source;       // Whose bytes it has...
    std::uint64_t skip = 0;   // ... from here on.
    std::int64_t layer = -1;  // Of a stack; then:
    std::string stacked_key;
  };
  // model.safetensors.
  struct Safetensors {
    std::vector<Segment> segments;
    // Held only where keys are mapped; otherwise it is read from the index.
    std::shared_ptr<const std::string> header;
  };
  // Which 64 KiB blocks of a tensor were read and found good.
  struct GoodBlocks {
    explicit GoodBlocks(std::uint64_t blocks) : words((blocks + 63) / 64) {}
    std::vector<std::atomic<std::uint64_t>> words;
  };

  explicit CheckpointView(std::shared_ptr<OpenedCheckpoint> opened);
  Status Prepare(const Ownership& ownership, const Options& options);
  static Result<std::unique_ptr<Objects>> MakeObjects(const CheckpointIndex& index,
                                                      const KeyRenames* renames);

  static std::optional<KeyNode> KeyNodeOf(const Node& node);
  Node NodeOfKey(const KeyNode& node) const;
  Result<Child> LookupKey(const KeyNode& folder, std::string_view name) const;
  Result<Attributes> StatKey(const KeyNode& node) const;
  std::string PathOfKey(const KeyNode& node) const;

  std::uint64_t InodeOf(const KeyNode& node, std::string_view path) const;
  KeyNode FixedNode(FixedFile fixed) const;
  KeyNode ViewRoot(ViewKind view) const;
  const KeyTree& TreeOf(ViewKind view) const;
  const KeySource& KeysOf(ViewKind view) const;
  // Of a node of one key that is no object's; kStale for numbers that are out of range.
  Result<Served> ServedBy(const KeyNode& node) const;
  // A layer's file, or a folder of nothing else, below a folder of tensors/ or npy/.
  Result<Child> LookupLayer(const KeyNode& folder, std::string_view name,
                            std::string_view stem) const;
  Attributes FolderAttributes(const KeyNode& node, std::string_view path, std::int64_t mtime) const;
  Attributes FileAttributes(const KeyNode& node, std::string_view path, std::uint64_t size,
                            std::int64_t mtime) const;
  // Size of a key's file in a view; kNotFound where the view has none of this type.
  Result<std::uint64_t> SizeIn(ViewKind view, const TensorEntry& tensor) const;
  Result<Attributes> FileStat(const KeyNode& node, std::string_view path,
                              const TensorEntry* entry) const;
  Result<Attributes> FixedStat(FixedFile fixed) const;
  Result<Child> FixedChild(FixedFile fixed, std::string_view name) const;
  Result<Child> ViewChild(ViewKind view) const;
  Result<Child> LookupTop(std::string_view name) const;
  Status ListTop(std::uint64_t cookie, const Visit& fn) const;
  Result<std::shared_ptr<const GeneratedText>> Json() const;
  Result<std::shared_ptr<const GeneratedText>> Extents(const TensorEntry& tensor) const;
  Result<std::shared_ptr<const Safetensors>> SafetensorsFile() const;
  Result<Safetensors> LayOutOwn() const;
  Result<Safetensors> LayOutRenamed() const;
  std::shared_ptr<GoodBlocks> GoodBlocksOf(const TensorEntry& tensor) const;

  std::shared_ptr<OpenedCheckpoint> opened_;
  std::shared_ptr<const std::string> pinned_;  // Keeps the folder reachable under any name.
  Ownership ownership_;
  Options options_;
  std::uint64_t inode_seed_ = 0;
  std::unique_ptr<const ShownTensors> tensor_keys_;
  std::unique_ptr<const KeyTree> tensors_;
  std::unique_ptr<const LayerFiles> layers_;
  std::unique_ptr<Objects> objects_;
  std::string common_json_;

  mutable std::mutex mutex_;
  mutable std::shared_ptr<const GeneratedText> json_;
  mutable std::shared_ptr<const Safetensors> safetensors_;
  mutable std::map<std::uint32_t, std::shared_ptr<GoodBlocks>> good_blocks_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_VIEW_H_
