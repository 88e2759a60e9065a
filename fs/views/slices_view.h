// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_SLICES_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_SLICES_VIEW_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "fs/views/shown_checkpoint.h"
#include "fs/views/slice_name.h"
#include "fs/views/view.h"

namespace tensormount::fs {

// slices/KEY[0:4096,:,7], slices/KEY@0:4096,:,7 and both with ".npy": any box of any tensor (or
// layer of a stack) as a packed file (docs/semantics.md, "Slices"). Nothing is listed. Folders and
// files are numbered when they are looked up and forgotten when the kernel forgets them; however a
// box is spelled, it is one item.
class SlicesView : public View {
 public:
  // `shown` must outlive this.
  explicit SlicesView(const ShownCheckpoint& shown) : shown_(shown) {}

  std::string_view name() const override { return "slices"; }
  Result<ViewNode> Stat(std::uint64_t item) const override;
  // kNotFound also for what is no slice, or out of range; kInvalidArgument where a box of a type
  // under a byte would begin or end inside a byte.
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;
  Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const override;
  void Forget(std::uint64_t item, std::uint64_t references) const override;

  // Items that are remembered: for tests and status.
  std::size_t remembered() const;

 private:
  // A tensor, or a layer of one.
  struct Key {
    bool layer = false;
    std::uint32_t number = 0;  // In ShownTensors, or in LayerFiles.
  };
  // Folders of slices/ are those of tensors/ and of the layers, in one.
  struct Folder {
    // Where it is in the two trees; it may be in one of them only.
    std::optional<TreeFolder> tensors;
    std::optional<TreeFolder> layers;
    std::optional<Key> key;  // Of a folder "%+NAME".
  };
  // Immutable.
  struct Item {
    // Path below slices/, a slice in the spelling that stands for all.
    std::string path;
    std::uint64_t size = 0;
    std::int64_t mtime = 0;
    std::unique_ptr<const Folder> folder;  // Null: a file. Then:
    Key key;
    std::uint32_t slice_begin = 0;  // The slice in `path`, between the brackets.
    std::uint32_t slice_size = 0;
    bool npy = false;
  };
  struct Remembered {
    std::shared_ptr<const Item> item;
    std::uint64_t references = 0;  // That the kernel holds: one each time Lookup gave it.
  };
  // What a slice of a key is cut from.
  struct Source {
    TensorEntry shown;                  // As it looks from outside.
    TensorEntry stored;                 // Whose bytes it has,
    std::optional<std::int64_t> layer;  // of a stack: at this place of its first axis.
    std::string stacked_key;
  };

  static ViewNode NodeOf(std::uint64_t number, const Item& item);
  Result<std::shared_ptr<const Item>> Find(std::uint64_t number) const;
  ViewChild Remember(std::string_view name, Item item) const;
  Result<Source> SourceOf(const Key& key) const;
  Result<std::string> PathOfKey(const Key& key) const;
  Result<Key> FindKey(const Folder& folder, std::string_view name) const;
  Result<Item> FolderItem(const Item& in, std::string_view name) const;
  Result<Item> FileItem(const Key& key, const SliceName& name) const;

  const ShownCheckpoint& shown_;
  mutable std::mutex mutex_;
  mutable std::unordered_map<std::uint64_t, Remembered> items_;
  // By path; the keys are in the items. Folders and files never share one.
  mutable std::unordered_map<std::string_view, std::uint64_t> numbers_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SLICES_VIEW_H_
