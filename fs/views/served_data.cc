// SPDX-License-Identifier: Apache-2.0
// Reads bytes of tensors, boxes and objects for files of a mount, verified as --verify says.
#include "fs/views/served_data.h"

#include <algorithm>
#include <cstring>

#include "base/byte_range.h"
#include "base/mapping.h"
#include "shard/box_access.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {
namespace {

// Converts the mount's option to that of OpenedCheckpoint's reads.
ReadVerify ReadVerifyOf(ServeVerify verify) {
  switch (verify) {
    case ServeVerify::kOff:
      return ReadVerify::kOff;
    case ServeVerify::kFirst:
      return ReadVerify::kOnce;
    case ServeVerify::kAlways:
      return ReadVerify::kExtendLeaves;
  }
  return ReadVerify::kExtendLeaves;
}

// The content of bytes [offset, offset + size) of a box's container: boxes of the tensor, and
// zeros.
struct ServedRange {
  std::vector<PlacedBox> want;
  // Ranges of the answer that are cleared first; `want` may overwrite parts of them.
  std::vector<ByteRange> zeros;
};

// A byte range of the container is a few boxes in its row-major order (Region::Boxes). Each of them
// is intersected with the cells that the tensor's box fills. The intersection is read with strides
// to its position in the answer, and the rest is zero.
// Example: a container of 4 rows of 8 bytes with a box of 3 x 5 in it, bytes [6, 20): 2 bytes of
// row 0 (zeros), all of row 1 (5 bytes of the box, 3 zeros), and 4 bytes of row 2.
Result<ServedRange> PlaceRange(const FileSegments::BoxSource& source, std::uint64_t offset,
                               std::size_t size) {
  ServedRange placed;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region range, Region::Flat(Box::Whole(source.byte_container),
                                                                static_cast<std::int64_t>(offset),
                                                                static_cast<std::int64_t>(size)));
  const Box filled = Box::Whole(source.byte_box.extent());
  std::int64_t at = 0;
  for (const Box& part : range.Boxes()) {
    const Box held = Intersect(part, filled);
    // The whole part is marked as zeros; ReadBox then writes the data over some of it.
    if (held != part) {
      placed.zeros.push_back(
          {static_cast<std::uint64_t>(at), static_cast<std::uint64_t>(at + part.volume())});
    }
    if (!held.empty()) {
      Dims begin;
      for (int a = 0; a < held.rank(); ++a) {
        begin.push_back(source.byte_box.begin(a) + held.begin(a));
      }
      // `filled` begins at 0, so `part` and `held` begin at the same cell. The strides follow the
      // part's shape, not the container's, because the answer is packed.
      placed.want.push_back(
          {BoxAccess::Make(begin, held.extent()), at, PackedStrides(part.extent())});
    }
    at += part.volume();
  }
  return placed;
}

// Appends the ranges if all their pages are in memory and one reply to the kernel can have that
// many ranges. If not, returns false and leaves `out` unchanged.
bool AppendIfInMemory(Result<std::vector<ServedData::Mapped>> mapped,
                      std::vector<ServedData::Mapped>& out) {
  // On false the caller reads the bytes, and that read reports the cause of a failure.
  if (!mapped.ok() || mapped.value().empty() ||
      mapped.value().size() > OpenedCheckpoint::kMaxMapped - out.size()) {
    return false;
  }
  for (const auto& range : mapped.value()) {
    if (!InMemory(range.data, range.size)) return false;
  }
  for (auto& range : std::move(mapped).value()) out.push_back(std::move(range));
  return true;
}

}  // namespace

ServedData::ServedData(const OpenedCheckpoint& opened, const ShownObjects& objects,
                       ServeVerify verify)
    : opened_(opened), objects_(objects), verify_(ReadVerifyOf(verify)) {}

Status ServedData::ReadTensor(const TensorEntry& tensor, std::uint64_t offset, char* out,
                              std::size_t size, ReadStats* stats) const {
  return opened_.ReadBytes(tensor, offset, out, size, verify_, stats);
}

Status ServedData::ReadBox(const FileSegments::BoxSource& box, std::uint64_t offset, char* out,
                           std::size_t size, ReadStats* stats) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ServedRange placed, PlaceRange(box, offset, size));
  for (const ByteRange& zeros : placed.zeros) std::memset(out + zeros.begin, 0, zeros.size());
  // ReadPlaced needs a ReadStats even if the caller passes none.
  ReadStats local;
  const Status status = opened_.ReadPlaced(
      box.tensor, placed.want, reinterpret_cast<std::byte*>(out), verify_, local, nullptr);
  if (stats != nullptr) stats->Add(local);
  return status;
}

Status ServedData::ReadObject(std::uint32_t number, std::uint64_t offset, char* out,
                              std::size_t size) const {
  return opened_.ReadObject(objects_.parts()[number], offset, out, size, verify_);
}

bool ServedData::MapTensor(const TensorEntry& tensor, std::uint64_t offset, std::size_t size,
                           std::vector<Mapped>& out) const {
  return AppendIfInMemory(opened_.MapBytes(tensor, offset, size, verify_), out);
}

bool ServedData::MapBox(const FileSegments::BoxSource& box, std::uint64_t offset, std::size_t size,
                        std::vector<Mapped>& out) const {
  const Result<ServedRange> placed = PlaceRange(box, offset, size);
  if (!placed.ok() || !placed.value().zeros.empty()) return false;
  return AppendIfInMemory(opened_.MapPlaced(box.tensor, placed.value().want, verify_), out);
}

}  // namespace tensormount::fs
