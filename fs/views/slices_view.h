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

// A directory or file below slices/, described by numbers of the checkpoint's tensors, which are
// the same in every view of the checkpoint. SliceItems assigns the item number. Immutable.
struct SliceItem {
  // Path below slices/, with the slice in canonical form.
  std::string path;
  std::uint64_t size = 0;
  std::int64_t mtime = 0;
  // Key of the sliced tensor; for a directory "%+NAME" the key NAME, if it exists.
  std::optional<KeyNumber> key;
  // Whether the item is a directory. If it is, `tensors` is the same directory in the tree of
  // tensors/, and `layers` in the tree of layers; a tree may lack it.
  bool folder = false;
  std::optional<TreeFolder> tensors;
  std::optional<TreeFolder> layers;
  // For a file: position in `path` of the slice's text, after the bracket.
  std::uint32_t slice_begin = 0;
  std::uint32_t slice_size = 0;
  bool npy = false;
};

// The items of one checkpoint's slices/ that the kernel knows. They outlive the view: an unused
// view is closed, while a working directory or an open file below slices/ keeps its item number.
// Thread-safe; the lock is held for a few lookups.
class SliceItems {
 public:
  // kStale: the kernel has forgotten the item.
  Result<std::shared_ptr<const SliceItem>> Find(std::uint64_t number) const;
  // Adds a reference to the item with this path, and returns its number. Stores `item` if the path
  // is new.
  std::uint64_t Remember(const std::shared_ptr<const SliceItem>& item);
  void Forget(std::uint64_t number, std::uint64_t references);
  // Number of items, with which tests detect leaked references.
  std::size_t size() const;

 private:
  struct Remembered {
    std::shared_ptr<const SliceItem> item;
    std::uint64_t references = 0;  // References of the kernel: one for each answered Lookup.
  };

  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, Remembered> items_;
  // Item numbers by path; the keys are views into the items' paths. Directories and files never
  // share a path.
  std::unordered_map<std::string_view, std::uint64_t> numbers_;
};

// slices/KEY[0:4096,:,7], slices/KEY@0:4096,:,7 and both with ".npy": any box of any tensor (or
// layer of a stack) as a packed file (docs/mounting.md, "Slices"). Nothing is listed. All spellings
// of one file are one item.
//
// This is the only view with items created on demand, since a tensor has more boxes than 40 bits
// can count. Lookup creates an item and counts a reference for the kernel, Forget releases
// references, and an item without references is dropped. The item keeps the slice as text in its
// path, which is parsed again at open.
// The index is never read while SliceItems is locked.
class SlicesView : public View {
 public:
  // `shown` must outlive this object. `items`: the items that the kernel knows, maybe from an
  // earlier view of this checkpoint.
  SlicesView(const ShownCheckpoint& shown, std::shared_ptr<SliceItems> items)
      : shown_(shown), items_(std::move(items)) {}

  std::string_view name() const override { return "slices"; }
  Result<ViewNode> Stat(std::uint64_t item) const override;
  // Finds or makes an item. kNotFound: no tensor has the name, the slice is invalid or out of
  // range, or .npy does not support the dtype; kInvalidArgument if a box of a type under a byte
  // begins or ends inside a byte.
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;
  Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const override;

 private:
  // A node is identified by its canonical path, so equal boxes have equal inode numbers in every
  // mount.
  static ViewNode NodeOf(std::uint64_t number, const SliceItem& item);
  Result<std::shared_ptr<const SliceItem>> Find(std::uint64_t number) const;
  // Stores the item and counts a reference, also if the item is known: the kernel counts each
  // answered LOOKUP.
  ViewChild Remember(std::string_view name, SliceItem item) const;
  Result<KeyNumber> FindKey(const SliceItem& folder, std::string_view name) const;
  // The directory `name` of `in`. kNotFound if neither tree has it, and it does not stand for a
  // key.
  Result<SliceItem> FolderItem(const SliceItem& in, std::string_view name) const;
  Result<SliceItem> FileItem(const KeyNumber& key, const SliceName& name) const;

  const ShownCheckpoint& shown_;
  const std::shared_ptr<SliceItems> items_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SLICES_VIEW_H_
