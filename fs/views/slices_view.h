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

// A folder or file below slices/, in numbers of the checkpoint's tensors alone: it means the same
// to every view of the checkpoint. What number it has is the key of SliceItems. Immutable.
struct SliceItem {
  // Path below slices/, a slice in the spelling that stands for all.
  std::string path;
  std::uint64_t size = 0;
  std::int64_t mtime = 0;
  // Of a file what it is cut from. Of a folder "%+NAME" what NAME alone would be, if it is a key.
  std::optional<KeyNumber> key;
  // Of a folder, which is one of tensors/ and of the layers in one: where it is in the two trees.
  // It may be in one of them only.
  bool folder = false;
  std::optional<TreeFolder> tensors;
  std::optional<TreeFolder> layers;
  // Of a file.
  std::uint32_t slice_begin = 0;  // The slice in `path`, between the brackets.
  std::uint32_t slice_size = 0;
  bool npy = false;
};

// The items that the kernel knows of one checkpoint. They live longer than the view, which is
// closed where nobody asks for a while: a working folder or an open file below slices/ has its
// number still. Thread-safe; the lock is held for a few look-ups.
class SliceItems {
 public:
  // kStale for what the kernel has forgotten.
  Result<std::shared_ptr<const SliceItem>> Find(std::uint64_t number) const;
  // The number of what has this path, with a reference more; `item` is kept where it is new.
  std::uint64_t Remember(const std::shared_ptr<const SliceItem>& item);
  void Forget(std::uint64_t number, std::uint64_t references);
  // Only the count can show that none is leaked.
  std::size_t size() const;

 private:
  struct Remembered {
    std::shared_ptr<const SliceItem> item;
    std::uint64_t references = 0;  // That the kernel holds: one each time Lookup gave it.
  };

  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, Remembered> items_;
  // By path; the keys are in the items. Folders and files never share one.
  std::unordered_map<std::string_view, std::uint64_t> numbers_;
};

// slices/KEY[0:4096,:,7], slices/KEY@0:4096,:,7 and both with ".npy": any box of any tensor (or
// layer of a stack) as a packed file (docs/semantics.md, "Slices"). Nothing is listed. Folders and
// files are numbered when they are looked up and forgotten when the kernel forgets them; however a
// box is spelled, it is one item.
//
// The one view whose items are made on demand: a tensor has more boxes than 40 bits can count. So
// Lookup makes an item and counts a reference for the kernel, Forget gives it back, and an item
// without references is dropped. The text of the slice is kept and not the box: it is needed for
// the path, and parsing it again at open is cheap.
// Reads of the index are done before SliceItems is asked.
class SlicesView : public View {
 public:
  // `shown` must outlive this. `items`: what the kernel knows of the view of this checkpoint that
  // was there before.
  SlicesView(const ShownCheckpoint& shown, std::shared_ptr<SliceItems> items)
      : shown_(shown), items_(std::move(items)) {}

  std::string_view name() const override { return "slices"; }
  Result<ViewNode> Stat(std::uint64_t item) const override;
  // kNotFound also for what is no slice, or out of range; kInvalidArgument where a box of a type
  // under a byte would begin or end inside a byte.
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;
  Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const override;

 private:
  // A node is told by its path, in the one spelling, so equal boxes have equal inode numbers in
  // every mount.
  static ViewNode NodeOf(std::uint64_t number, const SliceItem& item);
  Result<std::shared_ptr<const SliceItem>> Find(std::uint64_t number) const;
  // Counts a reference in all cases, also where the item is there already: the kernel counts each
  // answer of LOOKUP.
  ViewChild Remember(std::string_view name, SliceItem item) const;
  Result<KeyNumber> FindKey(const SliceItem& folder, std::string_view name) const;
  // kNotFound where neither tree has such a folder.
  Result<SliceItem> FolderItem(const SliceItem& in, std::string_view name) const;
  Result<SliceItem> FileItem(const KeyNumber& key, const SliceName& name) const;

  const ShownCheckpoint& shown_;
  const std::shared_ptr<SliceItems> items_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SLICES_VIEW_H_
