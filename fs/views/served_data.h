// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_SERVED_DATA_H_
#define TENSORMOUNT_FS_VIEWS_SERVED_DATA_H_

#include <cstdint>
#include <vector>

#include "tensormount/status.h"

#include "fs/formats/file_segments.h"
#include "fs/views/shown_checkpoint.h"
#include "index/read/checkpoint.h"

namespace tensormount::fs {

// What a mount verifies of the bytes that it serves: nothing; every leaf the first time that it is
// read, and again when its file has changed since; every read.
// mount --verify. kOff: hashes are not looked at. kFirst: each leaf is compared with its hash when
// bytes of it are read for the first time, and not again while the file is unchanged
// (ProvenRanges). kAlways: at every read, over whole leaves.
enum class ServeVerify { kOff, kFirst, kAlways };

// The bytes of a checkpoint's tensors and objects, verified as the mount was told. What fails a
// check is never remembered as good. Ranges must lie within what they are of. Thread-safe.
// One for each opened checkpoint. It adds two things to OpenedCheckpoint: how the mount verifies,
// so that no view can read otherwise by mistake, and boxes with zeros around them.
class ServedData {
 public:
  using Mapped = OpenedCheckpoint::MappedRange;

  // What is given must outlive this.
  ServedData(const OpenedCheckpoint& opened, const ShownObjects& objects, ServeVerify verify);

  Status ReadTensor(const TensorEntry& tensor, std::uint64_t offset, char* out, std::size_t size,
                    ReadStats* stats) const;
  // Bytes of the box's container.
  // [offset, offset + size) of its row-major order; what lies outside of the box is zero.
  Status ReadBox(const FileSegments::BoxSource& box, std::uint64_t offset, char* out,
                 std::size_t size, ReadStats* stats) const;
  Status ReadObject(std::uint32_t part, std::uint64_t offset, char* out, std::size_t size) const;

  // The same bytes where they are stored (OpenedCheckpoint::MapPlaced), appended to `out`. False
  // where they must be read: not in memory now, zeros around a box, too many ranges, or not
  // verified as they must be.
  // Appends nothing, or all of the range. Not in memory: the pages would have to be read while the
  // kernel takes them, and an error there could only be EFAULT; so the read answers, and says what
  // is wrong.
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
