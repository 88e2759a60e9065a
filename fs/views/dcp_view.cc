// SPDX-License-Identifier: Apache-2.0
// dcp/: the files of dcp_files.h as a directory, made at the first access.
#include "fs/views/dcp_view.h"

#include <cerrno>
#include <utility>

#include "fs/answers.h"
#include "fs/formats/torch_text.h"

namespace tensormount::fs {

Result<std::shared_ptr<const DcpFiles>> DcpView::Files() const {
  TENSORMOUNT_RETURN_IF_ERROR(CheckHolds());
  const std::lock_guard lock(mutex_);
  if (!files_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(DcpFiles made,
                                 MakeDcpFiles(shown_, {.chunk_bytes = kChunkBytes,
                                                       .files = 1,
                                                       .megatron = IsMegatronCheckpoint(shown_)}));
    files_ = std::make_shared<const DcpFiles>(std::move(made));
  }
  return files_;
}

ViewNode DcpView::NodeOf(const DcpFiles& files, std::size_t n) const {
  return {.item = kFirstFile + n,
          .folder = false,
          .size = files.files[n].segments.size(),
          .mtime = shown_.opened.index().info().json_mtime,
          .identity = files.files[n].name};
}

Status DcpView::CheckHolds() const {
  const std::lock_guard lock(mutex_);
  if (!holds_) {
    TENSORMOUNT_RETURN_IF_ERROR(shown_.tensors.ForEachEntry(
        0, shown_.tensors.count(), [&](std::uint32_t, const TensorEntry& tensor) -> Status {
          if (!TorchHolds(tensor.meta) && !holds_) holds_ = false;
          return {};
        }));
    if (!holds_) holds_ = true;
  }
  if (*holds_) return {};
  return Status(Code::kNotFound,
                "the checkpoint has no dcp/: torch has no dtype for one of its tensors");
}

Result<ViewNode> DcpView::Stat(std::uint64_t item) const {
  if (item == kRoot) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckHolds());
    return ViewNode{.item = kRoot,
                    .folder = true,
                    .size = 0,
                    .mtime = shown_.opened.index().info().json_mtime,
                    .identity = {}};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto files, Files());
  if (item < kFirstFile || item - kFirstFile >= files->files.size()) return StaleNodeError("dcp/");
  return NodeOf(*files, item - kFirstFile);
}

Result<ViewChild> DcpView::Lookup(std::uint64_t folder, std::string_view name) const {
  if (folder != kRoot) return Status::FromErrno(ENOTDIR, "look up", name);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto files, Files());
  for (std::size_t n = 0; n < files->files.size(); ++n) {
    if (files->files[n].name == name) {
      return ViewChild{.name = std::string(name), .node = NodeOf(*files, n)};
    }
  }
  return Status(Code::kNotFound, "no file " + std::string(name) + " in dcp/");
}

Status DcpView::List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const {
  if (folder != kRoot) return Status::FromErrno(ENOTDIR, "list", PathOf(folder));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto files, Files());
  for (std::size_t n = cookie; n < files->files.size(); ++n) {
    if (!fn({.name = files->files[n].name, .node = NodeOf(*files, n)}, n + 1)) break;
  }
  return {};
}

Result<FileSegments> DcpView::Open(std::uint64_t file) const {
  if (file == kRoot) return Status::FromErrno(EISDIR, "open", "dcp");
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto files, Files());
  if (file < kFirstFile || file - kFirstFile >= files->files.size()) return StaleNodeError("dcp/");
  return files->files[file - kFirstFile].segments;
}

std::string DcpView::PathOf(std::uint64_t item) const {
  const std::lock_guard lock(mutex_);
  if (item < kFirstFile || !files_ || item - kFirstFile >= files_->files.size()) return "dcp";
  return "dcp/" + files_->files[item - kFirstFile].name;
}

}  // namespace tensormount::fs
