// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_CHECKPOINT_FILES_H_
#define TENSORMOUNT_FS_VIEWS_CHECKPOINT_FILES_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/name_map.h"
#include "tensormount/status.h"

#include "fs/views/checkpoint_view.h"

namespace tensormount::fs {

// The files that a mount shows of a checkpoint, by path and without a mount: "npy/w.npy", "hf/...".
// "" is the directory of the checkpoint. All views are listed. Thread-safe.
class CheckpointFiles {
 public:
  struct Options {
    NameMap map;  // Empty: tensors are shown as stored.
    HfOptions hf;
  };
  static Result<std::unique_ptr<const CheckpointFiles>> Make(
      std::shared_ptr<const OpenedCheckpoint> opened, const Options& options);

  // All three return kNotFound, with the path, if the path does not exist.
  Result<Attributes> Stat(std::string_view path) const;
  // kInvalidArgument for a file.
  Result<std::vector<std::string>> List(std::string_view path) const;
  // The file keeps the checkpoint open. EISDIR for a directory.
  Result<std::shared_ptr<const VirtualFile>> Open(std::string_view path) const;

 private:
  explicit CheckpointFiles(std::shared_ptr<SliceItems> slices) : slices_(std::move(slices)) {}
  // Calls `use` with the node at a path. References that the lookups took to items of slices/ are
  // released when `use` returns.
  template <typename Use>
  auto At(std::string_view path, const Use& use) const -> decltype(use(Child{}));

  const std::shared_ptr<SliceItems> slices_;
  std::shared_ptr<const CheckpointView> view_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_FILES_H_
