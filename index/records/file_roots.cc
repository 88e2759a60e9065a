// SPDX-License-Identifier: Apache-2.0
// Roots of data files. The functions also check that ranges do not overlap or exceed the file,
// because a root over overlapping ranges would prove nothing.
#include "index/records/file_roots.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "base/checked.h"
#include "base/coding.h"
#include "base/errors.h"
#include "index/records/extent_row.h"

namespace tensormount {
namespace {

constexpr std::string_view kFileDomain{"tensormount file v1", 20};  // With the terminating NUL.

Status BadRange(const FileRecord& file, const RangeHash& range, std::string_view why) {
  return DataLoss(file.name, "the range of " + std::to_string(range.length) + " bytes at byte " +
                                 std::to_string(range.offset) + " " + std::string(why));
}

// Calls fn(file, range, has_hash) for the chunk of every table row.
template <typename Fn>
Status ForEachRow(const ExtentTable& table, Fn fn) {
  const std::string_view rows = table.packed();
  const std::size_t row_bytes = table.row_bytes();
  for (std::size_t at = 0; at < rows.size(); at += row_bytes) {
    const char* row = rows.data() + at;
    const Hash128 hash{LoadLittle<std::uint64_t>(row + extent_row::kHash),
                       LoadLittle<std::uint64_t>(row + extent_row::kHash + 8)};
    TENSORMOUNT_RETURN_IF_ERROR(
        fn(LoadLittle<std::uint32_t>(row + extent_row::kFile),
           RangeHash{LoadLittle<std::uint64_t>(row + extent_row::kOffset),
                     LoadLittle<std::uint64_t>(row + extent_row::kLength), hash},
           (extent_row::Flags(row) & extent_row::kHasHash) != 0));
  }
  return Status();
}

// Calls fn for every stored range in inventory order: chunks, object parts, extra ranges. Skips
// objects without a file (kNoFile), which only the coordinator's manifest has.
template <typename Fn>
Status ForEachStoredRange(const Inventory& inventory, Fn fn) {
  for (const TensorRecord& tensor : inventory.tensors) {
    TENSORMOUNT_RETURN_IF_ERROR(ForEachRow(tensor.extents, fn));
  }
  for (const ObjectRecord& object : inventory.objects) {
    if (object.file == kNoFile) continue;
    TENSORMOUNT_RETURN_IF_ERROR(
        fn(object.file, RangeHash{object.offset, object.length, object.hash}, object.has_hash()));
  }
  for (const ExtraRange& extra : inventory.extras) {
    TENSORMOUNT_RETURN_IF_ERROR(
        fn(extra.file, RangeHash{extra.offset, extra.length, extra.hash}, true));
  }
  return Status();
}

// The root of a file. Sorts `ranges`, which are all ranges of the file, and checks that they do not
// overlap. Callers have checked that the ranges are within the file.
Result<Hash128> RootOf(const FileRecord& file, std::span<RangeHash> ranges) {
  const auto less = [](const RangeHash& a, const RangeHash& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.length < b.length;
  };
  if (!std::is_sorted(ranges.begin(), ranges.end(), less)) {
    std::sort(ranges.begin(), ranges.end(), less);
  }
  const auto end = std::remove_if(ranges.begin(), ranges.end(),
                                  [](const RangeHash& r) { return r.length == 0; });
  for (auto it = ranges.begin(); it != end && it + 1 != end; ++it) {
    if (it->offset + it->length > (it + 1)->offset) {
      return BadRange(file, *(it + 1), "overlaps the range before it");
    }
  }
  const auto count = static_cast<std::size_t>(end - ranges.begin());
  ByteWriter head;
  head.Raw(kFileDomain.data(), kFileDomain.size());
  head.U64(file.length);
  head.U64(count);
  Xxh3Stream stream;
  stream.Update(head.bytes().data(), head.size());
  if (count != 0) stream.Update(ranges.data(), count * sizeof(RangeHash));
  return stream.Value();
}

}  // namespace

// A counting sort by file, then a sort by offset in each file: two passes over the extents with 32
// bytes for each range. A map by file would allocate for each range. O(n), plus the sorting of
// files whose ranges are not in order.
Result<std::vector<FileRoot>> FileRootsOf(const Inventory& inventory) {
  const std::size_t files = inventory.files.size();
  std::vector<FileRoot> roots(files);
  TENSORMOUNT_RETURN_IF_ERROR(
      ForEachStoredRange(inventory, [&](std::uint32_t file, const RangeHash& range, bool has_hash) {
        if (file >= files) {
          return DataLoss("file number " + std::to_string(file) + " is out of range");
        }
        const FileRecord& record = inventory.files[file];
        if (!RangeWithin(range.offset, range.length, record.length)) {
          return BadRange(
              record, range,
              "reaches past the end of the file at byte " + std::to_string(record.length));
        }
        if (!has_hash && record.placement != Placement::kForeign) {
          return BadRange(record, range, "has no hash");
        }
        ++roots[file].ranges;
        return Status();
      }));
  std::vector<std::size_t> begin(files + 1, 0);  // Start of each file's ranges in `ranges`.
  for (std::size_t f = 0; f < files; ++f) begin[f + 1] = begin[f] + roots[f].ranges;
  std::vector<RangeHash> ranges(begin[files]);
  std::vector<std::size_t> next(begin.begin(), begin.end() - 1);
  TENSORMOUNT_RETURN_IF_ERROR(ForEachStoredRange(
      inventory, [&](std::uint32_t file, const RangeHash& range, bool) -> Status {
        ranges[next[file]++] = range;
        return Status();
      }));
  for (std::size_t f = 0; f < files; ++f) {
    // Ranges of a foreign file may overlap (tensors that share a storage).
    if (inventory.files[f].placement == Placement::kForeign) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        roots[f].root,
        RootOf(inventory.files[f], std::span(ranges).subspan(begin[f], roots[f].ranges)));
  }
  return roots;
}

void SharedFileRoots::Expect(std::uint32_t file, std::uint64_t ranges) {
  if (files_.size() <= file) files_.resize(std::size_t{file} + 1);
  files_[file].expected = ranges;
}

Status SharedFileRoots::Add(std::vector<FileRecord>& files, const ExtentTable& rows) {
  if (files_.empty()) return Status();
  return ForEachRow(rows, [&](std::uint32_t file, const RangeHash& range, bool) {
    return Add(files, file, range);
  });
}

// FileRootsOf checked for each manifest that the range is in its file and has a hash.
Status SharedFileRoots::Add(std::vector<FileRecord>& files, std::uint32_t file,
                            const RangeHash& range) {
  if (file >= files_.size() || files_[file].expected == 0) return Status();
  Collected& collected = files_[file];
  collected.ranges.push_back(range);
  if (collected.ranges.size() < collected.expected) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(files[file].root, RootOf(files[file], collected.ranges));
  collected.expected = 0;
  std::vector<RangeHash>().swap(collected.ranges);
  return Status();
}

Status SharedFileRoots::Finish(const std::vector<FileRecord>& files) const {
  for (std::size_t f = 0; f < files_.size(); ++f) {
    if (files_[f].expected == 0) continue;
    return Status(Code::kInternal, files[f].name + ": internal error: only " +
                                       std::to_string(files_[f].ranges.size()) + " of " +
                                       std::to_string(files_[f].expected) + " ranges were added");
  }
  return Status();
}

}  // namespace tensormount
