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

// Attributes of a node of a view.
struct ViewNode {
  // Item number, below kMaxItems. A node keeps its number while the kernel knows it.
  std::uint64_t item = 0;
  bool folder = false;
  std::uint64_t size = 0;  // Number of bytes, for a file.
  std::int64_t mtime = 0;
  // Unique name among the nodes of the same kind (file or directory) of this view, the same in
  // every mount; input of the inode number.
  std::string identity;
};

struct ViewChild {
  std::string name;
  ViewNode node;
};

// One name in a checkpoint's directory and everything below it: tensors/, zarr/, model.safetensors.
// Computed from the index; independent of slots, inodes, owners and the kernel. Thread-safe.
//
// To add a view, derive from FileView (a single file), TensorFilesView (a file for each tensor),
// KeyedView (a file for each key of another kind, such as objects) or, with its own tree, from
// View; then add a line in CheckpointView::MakeViews. The kernel keeps node ids, maybe from an
// earlier mount, so calls may have items that this view never returned; every function checks the
// item.
class View {
 public:
  // The item of the view's directory, or of its only file.
  static constexpr std::uint64_t kRoot = 1;
  static constexpr std::uint64_t kMaxItems = std::uint64_t{1} << 40;

  virtual ~View() = default;

  // Name in the checkpoint's directory, such as "npy". Node ids contain the view's number in the
  // list of views, not the name.
  virtual std::string_view name() const = 0;
  // Whether the view is listed without --views: only tensors/, objects/ and the two .json files, so
  // that programs that copy trees read each byte once.
  virtual bool listed_by_default() const { return false; }

  // Stat, Lookup, List and Open fail for unknown items, mostly with kStale. Stat(kRoot) returns
  // kNotFound if the checkpoint does not have this view.
  virtual Result<ViewNode> Stat(std::uint64_t item) const = 0;
  // The child of a directory. kNotFound: no child has the name; ENOTDIR: `folder` is a file.
  virtual Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const = 0;
  // Lists children from `cookie` on (0: all), without "." and "..", until fn returns false, which
  // means that it did not take the child. `next` is the cookie of the following child, never 0.
  using Visit = std::function<bool(const ViewChild& child, std::uint64_t next)>;
  virtual Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const = 0;
  virtual Result<FileSegments> Open(std::uint64_t file) const = 0;
  // Path below the checkpoint, for messages: "npy/layers/0/w.npy".
  virtual std::string PathOf(std::uint64_t item) const = 0;
  // Values of the extended attributes user.tensormount.NAME, by NAME.
  virtual Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const {
    (void)item;
    return std::map<std::string, std::string>();
  }
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_VIEW_H_
