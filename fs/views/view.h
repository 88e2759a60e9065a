// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_VIEW_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "fs/formats/file_segments.h"

namespace tensormount::fs {

// What a node of a view is.
struct ViewNode {
  std::uint64_t item =
      0;  // Below kMaxItems; the view's own number for it, the same while it lives.
  bool folder = false;
  std::uint64_t size = 0;  // Of a file.
  std::int64_t mtime = 0;
  // What it is called within the view, for its inode number: the same in every mount, another for
  // every other node of the same kind (file or folder) of this view.
  std::string identity;
};

struct ViewChild {
  std::string name;
  ViewNode node;
};

// One name in a checkpoint's folder and what is below it: tensors/, zarr/, model.safetensors.
// Computed from the index; knows nothing of slots, inodes, owners or the kernel. Thread-safe.
//
// To add one: derive from FileView (a single file), TensorFilesView (a file for each tensor),
// KeyedView (a file for each of other keys) or, with a tree of its own, from View itself; then a
// line in CheckpointView::MakeViews. Calls may come for items that were never handed out (the
// kernel keeps node ids, and people guess), so every item is checked.
class View {
 public:
  // The item of the view's own folder, or of its only file.
  static constexpr std::uint64_t kRoot = 1;
  static constexpr std::uint64_t kMaxItems = std::uint64_t{1} << 40;

  virtual ~View() = default;

  // "npy". Its number in the list of views is part of node ids, not the name.
  virtual std::string_view name() const = 0;
  // Whether it is listed without --views: tensors/, objects/ and the two .json files only, so that
  // programs that copy trees meet each byte once.
  virtual bool listed_by_default() const { return false; }

  // All below take items; kStale for those that are out of range. kRoot may be kNotFound: then the
  // checkpoint has no such view.
  virtual Result<ViewNode> Stat(std::uint64_t item) const = 0;
  // kNotFound where there is no such name; ENOTDIR below a file.
  virtual Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const = 0;
  // Children from `cookie` on (0: all) without "." and "..", until fn returns false (that one was
  // not taken). `next` is the cookie of what follows, never 0.
  using Visit = std::function<bool(const ViewChild& child, std::uint64_t next)>;
  virtual Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const = 0;
  virtual Result<FileSegments> Open(std::uint64_t file) const = 0;
  // Below the checkpoint, for messages: "npy/layers/0/w.npy".
  virtual std::string PathOf(std::uint64_t item) const = 0;
  // Values of user.tensormount.NAME by NAME.
  virtual Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const {
    (void)item;
    return std::map<std::string, std::string>();
  }
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_VIEW_H_
