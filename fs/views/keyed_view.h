// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_KEYED_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_KEYED_VIEW_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "fs/views/key_tree.h"
#include "fs/views/shown_checkpoint.h"
#include "fs/views/view.h"

namespace tensormount::fs {

// A view of a file for each of many keys: folders by the keys' paths, file names with a suffix.
// Nothing is stored: an item is 1 bit (hidden), 27 bits (the key's number), 12 bits (0: the key's
// file; d + 1: the folder of the first d names of its path). So a folder is named by the first key
// in it: with keys "a/b/w" (number 4) and "a/b/x" (5), folder a/b/ is key 4 with d = 2.
//
// A subclass says what the file of one key is made of; see TensorFilesView below, which already
// says most of it for tensors.
//
// Times and sizes are answered from the index alone. rsync and cp -u compare them to decide what to
// read, so a folder or file must have the same ones in every mount of the checkpoint and after
// every restart.
// Views with a suffix (npy/w.npy) cannot confuse a folder with a file: names of folders that end
// like the suffix are escaped (key_path.h), so a name has either the suffix, and is a file, or not,
// and is a folder.
class KeyedView : public View {
 public:
  static constexpr std::uint32_t kMaxKeys = 1u << 27;
  static constexpr std::uint32_t kMaxDepth = (1u << kFolderDepthBits) - 1;

  std::string_view name() const override { return name_; }
  Result<ViewNode> Stat(std::uint64_t item) const override;
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;
  Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const override;

 protected:
  // `suffix` is of files. `hidden`: more keys, which are opened by name and never listed; those
  // that `tree` has too are not looked at. Null: none. `empty_mtime`: of the folder where there is
  // no key.
  // References are kept, not copies: trees belong to what is shown of the checkpoint, which
  // outlives its views. `name` and `suffix` must be literals.
  KeyedView(std::string_view name, std::string_view suffix, const KeyTree& tree,
            const KeyTree* hidden, std::int64_t empty_mtime)
      : name_(name), suffix_(suffix), tree_(tree), hidden_(hidden), empty_mtime_(empty_mtime) {}

  // Fills in size and mtime of the key's file. kNotFound: this view has no file of that key.
  // `entry`: what the listing had at hand, or null.
  // Called for every child of a listing, so it should cost no read of data. Item, identity and kind
  // are set already.
  virtual Status StatFile(const KeyNumber& key, const TensorEntry* entry, ViewNode& file) const = 0;
  // A folder is as old as its first key: it does not change where that does not, which is what
  // rsync wants to see.
  virtual Result<std::int64_t> MtimeOf(const KeyNumber& key) const = 0;
  // The file of the key, when it is opened.
  virtual Result<FileSegments> SegmentsAt(const KeyNumber& key) const = 0;
  // Names without "user.tensormount."; they say what the path cannot: dtype, shape, the true key.
  virtual Result<std::map<std::string, std::string>> AttributesAt(const KeyNumber& key) const = 0;

 private:
  // An item taken apart; depth 0: the key's file.
  // The root of the view is number 0 with depth 1. Its item is then 1 (kRoot), whether there is a
  // key or not.
  struct KeyedItem {
    KeyNumber key;
    std::uint32_t depth = 0;
    TreeFolder folder() const { return {.first = key.number, .depth = depth - 1}; }
  };
  static std::uint64_t ItemOf(const KeyedItem& item);
  Result<KeyedItem> KeyedItemOf(std::uint64_t item) const;
  const KeyTree& TreeOf(const KeyNumber& key) const { return key.hidden ? *hidden_ : tree_; }
  Result<ViewNode> StatAt(const KeyedItem& item) const;
  Result<ViewNode> FileNode(const KeyedItem& item, std::string_view key,
                            const TensorEntry* entry) const;
  // A file or folder of hidden keys only, below a folder of the others.
  // Costs a walk through the names of the folder, since folder numbers of the two trees have
  // nothing to do with each other.
  Result<ViewChild> LookupHidden(const KeyedItem& folder, std::string_view name,
                                 std::string_view stem) const;
  Result<ViewChild> ChildOf(const KeyedItem& folder, const TreeChild& found, std::string_view name,
                            std::string_view stem) const;

  const std::string_view name_;
  const std::string_view suffix_;
  const KeyTree& tree_;
  const KeyTree* const hidden_;
  const std::int64_t empty_mtime_;
};

// A keyed view of the tensors. What a subclass must say is what the file of a tensor is made of;
// all the rest may stay.
// tensors/, npy/ and extents/ are this and a few lines each (tensor_views.cc); docs/architecture.md
// shows one of them as the example of how to write a view.
class TensorFilesView : public KeyedView {
 protected:
  // `shown` must outlive this. `hidden`: null, or the tree of its layers, for views that have files
  // of those too.
  TensorFilesView(const ShownCheckpoint& shown, std::string_view name, std::string_view suffix,
                  const KeyTree* hidden);

  // kNotFound where the view has no file of such a tensor.
  virtual Result<FileSegments> SegmentsOf(const ShownTensor& tensor) const = 0;
  // The size of that file where the tensor's own says it: a listing then makes no segments.
  // tensors/ knows it (the tensor's bytes), npy/ does not (the header's length depends on the
  // shape's digits).
  virtual std::optional<std::uint64_t> KnownSize(const TensorMeta& shown) const {
    (void)shown;
    return std::nullopt;
  }
  // When the tensor's bytes last changed, in seconds since 1970; a tensor that was saved again
  // unchanged keeps its time over checkpoints, so that rsync of a new step copies what is new.
  virtual std::int64_t MtimeOfFile(const TensorEntry& entry) const { return entry.mtime; }
  const ShownCheckpoint& shown() const { return shown_; }

 private:
  Status StatFile(const KeyNumber& key, const TensorEntry* entry, ViewNode& file) const override;
  Result<std::int64_t> MtimeOf(const KeyNumber& key) const override;
  Result<FileSegments> SegmentsAt(const KeyNumber& key) const override;
  Result<std::map<std::string, std::string>> AttributesAt(const KeyNumber& key) const override;

  const ShownCheckpoint& shown_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_KEYED_VIEW_H_
