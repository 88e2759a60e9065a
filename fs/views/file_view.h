// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_FILE_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_FILE_VIEW_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "fs/views/view.h"

namespace tensormount::fs {

// A view that is a single file: common.json.
//
// Its root item is the file. All other items are stale, and it has no children: looking something
// up below it is ENOTDIR, as below any file.
// A subclass gives the segments; the size follows from them. Override Size where making segments
// reads more than the size needs, because a listing of the checkpoint asks for the size of each
// file in it (model.safetensors does: its header is read at open only).
class FileView : public View {
 public:
  std::string_view name() const override { return name_; }
  Result<ViewNode> Stat(std::uint64_t item) const override;
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  // The name itself: it stands at the top of the checkpoint.
  std::string PathOf(std::uint64_t item) const override;

 protected:
  // `name` must be a literal, or live as long.
  FileView(std::string_view name, std::int64_t mtime) : name_(name), mtime_(mtime) {}
  // kNotFound: the checkpoint has no such file.
  // Called at each open, and may be called by several threads.
  virtual Result<FileSegments> Segments() const = 0;
  // Of what Segments() gives; override where that costs more than knowing the size.
  virtual Result<std::uint64_t> Size() const;

 private:
  const std::string_view name_;
  const std::int64_t mtime_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_FILE_VIEW_H_
