// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_SERVED_DATA_H_
#define TENSORMOUNT_FS_VIEWS_SERVED_DATA_H_

#include <cstdint>
#include <vector>

#include "tensormount/status.h"

#include "fs/views/file_segments.h"
#include "fs/views/shown_checkpoint.h"
#include "index/read/checkpoint.h"

namespace tensormount::fs {

// What a mount verifies of the bytes that it serves: nothing; every leaf the first time that it is
// read, and again when its file has changed since; every read.
enum class ServeVerify { kOff, kFirst, kAlways };

// The bytes of a checkpoint's tensors and objects, verified as the mount was told. What fails a
// check is never remembered as good. Ranges must lie within what they are of. Thread-safe.
class ServedData {
 public:
  using Mapped = OpenedCheckpoint::MappedRange;

  // What is given must outlive this.
  ServedData(const OpenedCheckpoint& opened, const ShownObjects& objects, ServeVerify verify);

  Status ReadTensor(const TensorEntry& tensor, std::uint64_t offset, char* out, std::size_t size,
                    ReadStats* stats) const;
  // Bytes of the box's container.
  Status ReadBox(const FileSegments::BoxSource& box, std::uint64_t offset, char* out,
                 std::size_t size, ReadStats* stats) const;
  Status ReadObject(std::uint32_t part, std::uint64_t offset, char* out, std::size_t size) const;

  // The same bytes where they are stored (OpenedCheckpoint::MapPlaced), appended to `out`. False
  // where they must be read: not in memory now, zeros around a box, too many pieces, or not
  // verified as they must be.
  bool MapTensor(const TensorEntry& tensor, std::uint64_t offset, std::size_t size,
                 std::vector<Mapped>& out) const;
  bool MapBox(const FileSegments::BoxSource& box, std::uint64_t offset, std::size_t size,
              std::vector<Mapped>& out) const;

 private:
  const OpenedCheckpoint& opened_;
  const ShownObjects& objects_;
  const ReadVerify verify_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SERVED_DATA_H_
