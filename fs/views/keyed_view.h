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

// A view with a file for each of many keys: directories from the keys' paths, file names with a
// suffix. No table of items is stored, because an item number describes the item: 1 bit (whether
// the key is hidden), 27 bits (the key's number), 12 bits (0: the key's file; d + 1: the directory
// of the first d names of its path). A directory is thus identified by its first key: with keys
// "a/b/w" (number 4) and "a/b/x" (5), directory a/b/ is key 4 with d = 2.
//
// A subclass supplies the segments of one key's file; for tensors, TensorFilesView below does most
// of this.
//
// Times and sizes follow from the checkpoint alone, not from the mount. rsync and cp -u compare
// them, so a directory or file must have the same ones in every mount and after every restart.
// In a view with a suffix (npy/w.npy) directory names that end like the suffix are escaped
// (key_path.h), so a name with the suffix is a file and one without is a directory.
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
  // `suffix`: end of the files' names. `hidden`: further keys that are opened by name but not
  // listed; null: there are none. `empty_mtime`: time of the view's directory if there is no key.
  // Trees are kept by reference and must outlive the view; `name` and `suffix` must be literals.
  KeyedView(std::string_view name, std::string_view suffix, const KeyTree& tree,
            const KeyTree* hidden, std::int64_t empty_mtime)
      : name_(name), suffix_(suffix), tree_(tree), hidden_(hidden), empty_mtime_(empty_mtime) {}

  // Sets size and mtime of the key's file; the caller has set item, identity and kind. kNotFound:
  // this view has no file for the key. `entry`: the tensor's record if the listing has read it,
  // else null.
  // Called for every file of a listing, so it should read no data.
  virtual Status StatFile(const KeyNumber& key, const TensorEntry* entry, ViewNode& file) const = 0;
  // Mtime of a directory whose first key is `key`. It is the time of that key's tensor or object,
  // so it changes only together with that time.
  virtual Result<std::int64_t> MtimeOf(const KeyNumber& key) const = 0;
  // The content of the key's file. Called when the file is opened.
  virtual Result<FileSegments> SegmentsAt(const KeyNumber& key) const = 0;
  // Extended attributes of the key's file, by name without "user.tensormount.", for properties that
  // the path cannot show, such as dtype, shape and the exact key.
  virtual Result<std::map<std::string, std::string>> AttributesAt(const KeyNumber& key) const = 0;

 private:
  // A decoded item number. Depth 0 is the key's file. The root of the view is key number 0 with
  // depth 1, so its item number is 1 (kRoot), even without keys.
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
  // Finds a file or directory of hidden keys below a directory of listed keys. Looks up the names
  // of that directory in the tree of hidden keys, because the two trees number directories
  // independently.
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

// A keyed view of the tensors; a subclass supplies the segments of a tensor's file. tensors/, npy/
// and extents/ are built on it (tensor_views.cc); docs/architecture.md uses one of them as an
// example.
class TensorFilesView : public KeyedView {
 protected:
  // `shown` must outlive this object. `hidden`: the tree of layers if the view has files for layers
  // too, else null.
  TensorFilesView(const ShownCheckpoint& shown, std::string_view name, std::string_view suffix,
                  const KeyTree* hidden);

  // The content of the tensor's file. kNotFound if the view has no file for such a tensor.
  virtual Result<FileSegments> SegmentsOf(const ShownTensor& tensor) const = 0;
  // The file's size if it can be computed without making segments, so that a listing makes none: in
  // tensors/ it is the number of the tensor's bytes. Empty if it cannot (npy/, whose header has to
  // be made), or if the tensor has no file in this view.
  virtual std::optional<std::uint64_t> KnownSize(const TensorMeta& shown) const {
    (void)shown;
    return std::nullopt;
  }
  // Mtime of the tensor's file. By default the time when its bytes last changed, in seconds since
  // 1970. A tensor that was saved again unchanged keeps its time, so that rsync copies only new
  // data.
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
