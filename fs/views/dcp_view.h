// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_DCP_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_DCP_VIEW_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "fs/views/dcp_files.h"
#include "fs/views/view.h"

namespace tensormount::fs {

// dcp/: the checkpoint as a directory of torch.distributed.checkpoint, for programs that load such
// directories and know no tensormount. For a checkpoint of Megatron-Core the directory also has
// that program's files.
//
// Items: 1 the directory, then the files of DcpFiles in their order.
// The files are made at the first access and kept while the checkpoint is open, because that takes
// time and memory for each tensor. CRCs of data stay zero: they would need a read of the whole
// checkpoint, and torch does not check them. Python's zipfile does, so the files are for torch
// only.
class DcpView : public View {
 public:
  explicit DcpView(const ShownCheckpoint& shown) : shown_(shown) {}

  std::string_view name() const override { return "dcp"; }
  // Stat(kRoot) returns kNotFound if torch has no type for some tensor.
  Result<ViewNode> Stat(std::uint64_t item) const override;
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;

 private:
  static constexpr std::uint64_t kFirstFile = 2;
  // DcpOptions::chunk_bytes. Readers load whole items, so an item should not be much larger than
  // the part of the tensor that they need.
  static constexpr std::uint64_t kChunkBytes = std::uint64_t{64} << 20;

  // kNotFound if torch has no type for some tensor. The first call looks at all tensors.
  Status CheckHolds() const;
  // Returns the files. A failure is not cached: the next call tries again.
  Result<std::shared_ptr<const DcpFiles>> Files() const;
  ViewNode NodeOf(const DcpFiles& files, std::size_t n) const;

  ShownCheckpoint shown_;
  // Guards the members below. Held while the files are made, so that concurrent opens make them
  // once.
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const DcpFiles> files_;
  mutable std::optional<bool> holds_;  // Whether torch has a type for each tensor.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_DCP_VIEW_H_
