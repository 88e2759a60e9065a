// SPDX-License-Identifier: Apache-2.0
// A view that is one file.
#include "fs/views/file_view.h"

#include <cerrno>

namespace tensormount::fs {
namespace {

// kStale unless the item is the root, the only node of this view: the kernel may send any number.
Status CheckItem(std::uint64_t item) {
  if (item == View::kRoot) return {};
  return Status(Code::kStale, "stale inode number: the checkpoint has no such entry");
}

}  // namespace

Result<std::uint64_t> FileView::Size() const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileSegments segments, Segments());
  return segments.size();
}

Result<ViewNode> FileView::Stat(std::uint64_t item) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckItem(item));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t size, Size());
  return ViewNode{
      .item = kRoot, .folder = false, .size = size, .mtime = mtime_, .identity = std::string()};
}

Result<ViewChild> FileView::Lookup(std::uint64_t folder, std::string_view name) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckItem(folder));
  return Status::FromErrno(ENOTDIR, "look up", name);
}

Status FileView::List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const {
  (void)cookie;
  (void)fn;
  TENSORMOUNT_RETURN_IF_ERROR(CheckItem(folder));
  return Status::FromErrno(ENOTDIR, "list", name_);
}

Result<FileSegments> FileView::Open(std::uint64_t file) const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckItem(file));
  return Segments();
}

std::string FileView::PathOf(std::uint64_t item) const {
  return item == kRoot ? std::string(name_) : "?";
}

}  // namespace tensormount::fs
