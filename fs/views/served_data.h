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

// Values of mount --verify, which says which bytes are compared with their hashes. kOff: none.
// kFirst: each leaf when its bytes are first read, and again after its file changed (ProvenRanges).
// kAlways: every leaf that a read touches, at every read.
enum class ServeVerify { kOff, kFirst, kAlways };

// Reads the bytes of a checkpoint's tensors and objects with the mount's verification. Bytes that
// do not match their hash are never remembered as verified. Ranges must lie within the tensor, box
// or object. Thread-safe. Each CheckpointView has one. It adds two things to OpenedCheckpoint: the
// mount's verification, which no view can then bypass by mistake, and boxes with zeros around them.
class ServedData {
 public:
  using Mapped = OpenedCheckpoint::MappedRange;

  // The arguments must outlive this object.
  ServedData(const OpenedCheckpoint& opened, const ShownObjects& objects, ServeVerify verify);

  Status ReadTensor(const TensorEntry& tensor, std::uint64_t offset, char* out, std::size_t size,
                    ReadStats* stats) const;
  // Reads bytes [offset, offset + size) of the box's container in row-major order; bytes outside of
  // the box are zero.
  Status ReadBox(const FileSegments::BoxSource& box, std::uint64_t offset, char* out,
                 std::size_t size, ReadStats* stats) const;
  Status ReadObject(std::uint32_t part, std::uint64_t offset, char* out, std::size_t size) const;

  // MapTensor and MapBox append bytes [offset, offset + size) of the tensor or container to `out`
  // as mapped memory (OpenedCheckpoint::MapPlaced). They return false and append nothing if the
  // bytes must be read instead: bytes are not in memory now, unverified or in a foreign file, every
  // read must be verified (kAlways), a box has zeros around it, or the ranges are too many. Pages
  // that are not in memory are not mapped, because the kernel could report an I/O error on them
  // only as EFAULT; a read reports the cause.
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
