// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_CHECKPOINT_H_
#define TENSORMOUNT_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/common_value.h"
#include "tensormount/dtype.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Bytes of a tensor where they are stored. Lives by `keep`, which also keeps the checkpoint open.
struct MappedBytes {
  const std::byte* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<const void> keep;
};

// One tensor of an opened checkpoint. A cheap handle that keeps the checkpoint open; thread-safe.
class TENSORMOUNT_EXPORT Tensor {
 public:
  const std::string& key() const;
  DType dtype() const;
  const Dims& shape() const;
  std::uint64_t bytes() const;
  // CRC-64/NVME of the row-major bytes; nothing for files that other programs wrote.
  std::optional<std::uint64_t> digest() const;

  // Fills `out` with a box (or flat range) of the tensor, whatever the cuts it was saved with.
  // `out` may be strided; its dtype must be the tensor's and its shape the region's extents.
  //   kInvalidArgument  region, dtype or shape do not fit
  //   kDataLoss         stored bytes are missing or damaged: names tensor, box, file and byte
  // On failure the contents of `out` are undefined. Every byte is checked before it is returned,
  // where the checkpoint has checksums.
  Status Read(const Region& region, const BufferView& out) const;
  // Bytes [offset, offset + size) of the row-major byte string. Same errors.
  Status ReadBytes(std::uint64_t offset, void* out, std::size_t size) const;

  // The same bytes without a copy, where they are one run of one file. They are not compared with
  // the checkpoint's hashes. A file that somebody cuts short while it is mapped raises SIGBUS where
  // a program touches the bytes; one that another program rewrites in place changes under it.
  //   kInvalidArgument  the range reaches past the end
  //   kUnsupported      they are not one run of one file, or it cannot be mapped: read them
  Result<MappedBytes> Map(std::uint64_t offset, std::size_t size) const;

 private:
  friend class Checkpoint;
  struct Impl;
  explicit Tensor(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

// How a checkpoint is opened.
struct OpenOptions {
  // Folders that may be trusted: below them data of adopted checkpoints may lie, whoever published
  // these, and links of checkpoints in foreign formats may lead to other places in them.
  std::vector<std::string> roots = {};
  // Of a folder in a foreign format that holds several sets of weights: the file or index to read.
  // The same as `path`/file. Empty: the format decides.
  std::string file = {};
  // A read of a tensor is shared between threads, one for each 4 MiB of it, or 1,024 short runs, at
  // most so many; the caller's is one of them, and none is left when the read returns. 0: as many
  // as cores, at most 8. 1: the caller's alone.
  int threads = 0;
};

// A published checkpoint, or one in a foreign format, opened for reading without any ranks. A
// cheap handle; thread-safe. Runs no code from the checkpoint and writes nothing.
//
// Example:
//
//   const auto checkpoint = Checkpoint::Open("STORE/latest");
//   const auto tensor = checkpoint.value().tensor("w");
//   std::vector<float> rows(2 * 4096);
//   const Status status = tensor.value().Read(
//       Box::Make({0, 0}, {2, 4096}).value(), BufferView::Host(DType::kF32, rows.data(), {2,
//       4096}));
//
// It stays the checkpoint that was opened, also where another is saved under its name or it is
// removed meanwhile.
class TENSORMOUNT_EXPORT Checkpoint {
 public:
  // `path`: a checkpoint ("STORE/step-1000"), "STORE/latest", or a folder or file in a format of
  // docs/formats-adopted.md. Of a store, or of a training directory in a foreign format, the
  // latest: warnings() names it.
  //   kNotFound          nothing there
  //   kDataLoss          what describes it is damaged beyond repair
  //   kUnsupported       written in a newer format, or in one that is not read
  //   kPermissionDenied  it leads to places outside of it that no root covers
  static Result<Checkpoint> Open(const std::string& path);
  static Result<Checkpoint> Open(const std::string& path, const OpenOptions& options);

  const std::string& path() const;
  // 32 hex digits that no other checkpoint has, not even one that is saved under its name later;
  // empty for formats of other programs.
  std::string uuid() const;
  // What was out of order but could be mended.
  std::vector<std::string> warnings() const;

  // In byte order.
  Result<std::vector<std::string>> keys() const;
  Result<Tensor> tensor(std::string_view key) const;  // kNotFound

  // Keys of objects, in byte order.
  Result<std::vector<std::string>> objects() const;
  // The grid that an object was saved on; no axes where it is one piece. kNotFound.
  Result<Dims> object_grid(std::string_view key) const;
  // The bytes of an object, or of one part of it on its grid. kNotFound.
  Result<std::string> object(std::string_view key, const Dims& index = {}) const;

  Result<std::map<std::string, CommonValue>> common() const;
  Result<CommonValue> common(std::string_view name) const;  // kNotFound
  // What each rank of the save set for itself; ranks that set nothing are not in the map.
  Result<std::map<int, std::map<std::string, CommonValue>>> rank_common() const;
  Result<CommonValue> rank_common(int rank, std::string_view name) const;  // kNotFound
  // What the application says about the checkpoint as a whole; empty where it says nothing.
  Result<CommonDict> content_metadata() const;

 private:
  friend struct CheckpointInside;  // index/public_checkpoint.h
  struct Impl;
  explicit Checkpoint(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_CHECKPOINT_H_
