// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_FILE_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_FILE_VIEW_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "fs/views/view.h"

namespace tensormount::fs {

// A view that is a single file, such as common.json.
//
// Its root item is the file; all other items are stale, and a lookup below it returns ENOTDIR.
// A subclass supplies the segments, which determine the size. Override Size if segments are
// costlier than the size (model.safetensors reads a stored header only at open), because a listing
// of the checkpoint asks for the size of each file.
class FileView : public View {
 public:
  std::string_view name() const override { return name_; }
  Result<ViewNode> Stat(std::uint64_t item) const override;
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  // The path is the name, since the file is at the top of the checkpoint.
  std::string PathOf(std::uint64_t item) const override;

 protected:
  // `name` must be a literal or outlive this object.
  FileView(std::string_view name, std::int64_t mtime) : name_(name), mtime_(mtime) {}
  // The content of the file. kNotFound: the checkpoint does not have the file. Called at each open
  // and by Size, maybe by several threads.
  virtual Result<FileSegments> Segments() const = 0;
  // Size of Segments(); override if the size is cheaper to get.
  virtual Result<std::uint64_t> Size() const;

 private:
  const std::string_view name_;
  const std::int64_t mtime_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_FILE_VIEW_H_
