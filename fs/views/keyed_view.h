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
// in it: with keys "a.b.w" (number 4) and "a.b.x" (5), folder a/b/ is key 4 with d = 2.
//
// A subclass says what the file of one key is made of; see TensorFilesView below, which already
// says most of it for tensors.
class KeyedView : public View {
 public:
  static constexpr std::uint32_t kMaxKeys = 1u << 27;
  static constexpr std::uint32_t kMaxDepth = (1u << 12) - 1;

  std::string_view name() const override { return name_; }
  Result<ViewNode> Stat(std::uint64_t item) const override;
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;
  Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const override;

 protected:
  struct Keys {
    const KeySource& keys;
    const KeyTree& tree;
  };
  // `suffix` is of files. `hidden`: more keys, which are opened by name and never listed; those
  // that `keys` has too are not looked at. `empty_mtime`: of the folder where there is no key.
  KeyedView(std::string_view name, std::string_view suffix, Keys keys, std::optional<Keys> hidden,
            std::int64_t empty_mtime)
      : name_(name), suffix_(suffix), keys_(keys), hidden_(hidden), empty_mtime_(empty_mtime) {}

  // Which key. Its number is below the keys' count.
  struct KeyNumber {
    bool hidden = false;
    std::uint32_t number = 0;
  };
  struct FileFacts {
    std::uint64_t size = 0;
    std::int64_t mtime = 0;
  };
  // kNotFound: this view has no file of that key. `entry`: what the listing had at hand, or null.
  virtual Result<FileFacts> FactsOf(const KeyNumber& key, const TensorEntry* entry) const = 0;
  // A folder is as old as its first key: it does not change where that does not, which is what
  // rsync wants to see.
  virtual Result<std::int64_t> MtimeOf(const KeyNumber& key) const = 0;
  virtual Result<FileSegments> SegmentsAt(const KeyNumber& key) const = 0;
  virtual Result<std::map<std::string, std::string>> AttributesAt(const KeyNumber& key) const = 0;

 private:
  // An item taken apart; depth 0: the key's file.
  struct KeyedItem {
    KeyNumber key;
    std::uint32_t depth = 0;
    TreeFolder folder() const { return {.first = key.number, .depth = depth - 1}; }
  };
  static std::uint64_t ItemOf(const KeyedItem& place);
  Result<KeyedItem> KeyedItemOf(std::uint64_t item) const;
  const Keys& KeysOf(const KeyedItem& place) const { return place.key.hidden ? *hidden_ : keys_; }
  Result<ViewNode> StatAt(const KeyedItem& place) const;
  Result<ViewNode> FileNode(const KeyedItem& place, std::string_view key,
                            const TensorEntry* entry) const;
  // A file or folder of hidden keys only, below a folder of the others.
  Result<ViewChild> LookupHidden(const KeyedItem& folder, std::string_view name,
                                 std::string_view stem) const;
  Result<ViewChild> ChildOf(const KeyedItem& folder, const TreeChild& found, std::string_view name,
                            std::string_view stem) const;

  const std::string_view name_;
  const std::string_view suffix_;
  const Keys keys_;
  const std::optional<Keys> hidden_;
  const std::int64_t empty_mtime_;
};

// A tensor as a mount shows it: one of its own, or a layer of a stacked one.
struct ShownTensor {
  TensorEntry shown;        // As it looks from outside.
  TensorEntry source;       // Whose bytes it has,
  std::uint64_t skip = 0;   // from here on.
  std::int64_t layer = -1;  // Of a stack; then:
  std::string stacked_key;
};

// A keyed view of the tensors. What a subclass must say is what the file of a tensor is made of;
// all the rest may stay.
class TensorFilesView : public KeyedView {
 protected:
  enum class Layers : std::uint8_t { kNo, kHidden };
  // `shown` must outlive this.
  TensorFilesView(const ShownCheckpoint& shown, std::string_view name, std::string_view suffix,
                  Layers layers);

  // kNotFound where the view has no file of such a tensor.
  virtual Result<FileSegments> SegmentsOf(const ShownTensor& tensor) const = 0;
  // The size of that file where the tensor's own says it: a listing then makes no segments.
  virtual std::optional<std::uint64_t> KnownSize(const TensorMeta& shown) const {
    (void)shown;
    return std::nullopt;
  }
  virtual std::int64_t MtimeOfFile(const TensorEntry& entry) const { return entry.mtime; }
  const ShownCheckpoint& shown() const { return shown_; }

 private:
  Result<FileFacts> FactsOf(const KeyNumber& key, const TensorEntry* entry) const override;
  Result<std::int64_t> MtimeOf(const KeyNumber& key) const override;
  Result<FileSegments> SegmentsAt(const KeyNumber& key) const override;
  Result<std::map<std::string, std::string>> AttributesAt(const KeyNumber& key) const override;
  Result<ShownTensor> TensorAt(const KeyNumber& key) const;

  const ShownCheckpoint& shown_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_KEYED_VIEW_H_
