// SPDX-License-Identifier: Apache-2.0
// Checks that a tensor's chunks cover it. Undecoded table rows go into a RegionSet, and IsPartition
// (shard/coverage.h) decides. A row is decoded only if its packed bytes do not show that it is
// valid.
#include "index/records/completeness.h"

#include <array>
#include <optional>

#include "base/checked.h"
#include "base/errors.h"
#include "index/records/extent_row.h"

namespace tensormount {
namespace {

// Whether a table row has the length of `count` elements. False means "not sure", and CheckDecoded
// then decides. Like AddRow, this takes a few loads for each row and no allocation, because a
// million rows are checked here.
bool HasItsLength(const ExtentTable& table, const char* row, const TensorMeta& meta,
                  std::uint64_t count) {
  const std::uint32_t flags = extent_row::Flags(row);
  if (meta.bits() % 8 != 0) return false;  // CheckDecoded also checks the byte alignment.
  // A pending row has the length of an item of the file, not of its region.
  if ((flags & extent_row::kPending) != 0) return true;
  const auto length = LoadLittle<std::uint64_t>(row + extent_row::kLength);
  if ((flags & extent_row::kStrided) == 0) return length == count * meta.bits() / 8;
  if (!table.wide()) return false;
  Dims extents;
  Dims strides;
  for (int a = 0; a < table.rank(); ++a) {
    extents.push_back(extent_row::Extent(row, table.rank(), a));
    strides.push_back(extent_row::Stride(row, table.rank(), a));
  }
  const Result<std::uint64_t> span = StridedSpan(meta.dtype(), extents, strides);
  return span.ok() && span.value() == length;
}

// Checks the file, the position, the flags and the manifest number of a table row, but not its
// length.
Status CheckPlace(const Inventory& inventory, const ExtentTable& table, const char* row) {
  const auto file = LoadLittle<std::uint32_t>(row + extent_row::kFile);
  if (file >= inventory.files.size())
    return DataLoss("a chunk refers to a file that is not in the file table");
  const FileRecord& record = inventory.files[file];
  if (!RangeWithin(LoadLittle<std::uint64_t>(row + extent_row::kOffset),
                   LoadLittle<std::uint64_t>(row + extent_row::kLength), record.length)) {
    return DataLoss(record.name + ": a chunk reaches past the end of the file");
  }
  const std::uint32_t flags = extent_row::Flags(row);
  const std::uint32_t known =
      extent_row::kKnownFlags | (table.pending() ? extent_row::kPending : 0u);
  if ((flags & ~known) != 0) return DataLoss(record.name + ": a chunk has unknown flags");
  const bool foreign = record.placement == Placement::kForeign;
  if (!foreign && (flags & (extent_row::kStrided | extent_row::kPending)) != 0) {
    return DataLoss(record.name +
                    ": a chunk is strided, which only chunks of foreign files may be");
  }
  if ((flags & extent_row::kHasHash) == 0) {
    return foreign ? Status() : DataLoss(record.name + ": a chunk has no hash");
  }
  if (LoadLittle<std::uint32_t>(row + extent_row::kManifest) >= inventory.manifests.size()) {
    return DataLoss(record.name +
                    ": a chunk refers to a manifest that is not in the manifest table");
  }
  return Status();
}

// Adds the region of table row `row` to the set, and sets the number of its elements. False means
// "not sure", and CheckDecoded then decides.
bool AddRow(const ExtentTable& table, std::size_t row, RegionSet& regions, std::uint64_t* count) {
  const char* bytes = table.Row(row).data();
  const int rank = table.rank();
  std::array<std::int64_t, kMaxRank> begin;
  std::array<std::int64_t, kMaxRank> extent;
  for (int a = 0; a < rank; ++a) {
    begin[static_cast<std::size_t>(a)] = extent_row::Begin(bytes, a);
    extent[static_cast<std::size_t>(a)] = extent_row::Extent(bytes, rank, a);
  }
  const auto owner = static_cast<std::uint32_t>(row);
  const auto first = LoadLittle<std::int64_t>(bytes + extent_row::kFlatFirst);
  const auto elements = LoadLittle<std::int64_t>(bytes + extent_row::kFlatCount);
  const std::size_t before = regions.size();
  const bool flat = (extent_row::Flags(bytes) & extent_row::kFlat) != 0;
  if (flat ? !regions.AddFlat(begin.data(), extent.data(), first, elements, owner)
           : first != 0 || elements != 0 || !regions.AddBox(begin.data(), extent.data(), owner)) {
    return false;
  }
  const bool added = regions.size() > before;  // Empty regions are not added.
  *count = added ? static_cast<std::uint64_t>(regions.volume(before)) : 0;
  // A region has one encoding. A flat range that equals a box must be stored as a box; else equal
  // contents would have different content roots.
  return flat == (added && regions.is_flat(before));
}

// Whether a decoded chunk has the length of its region.
Status CheckChunkLength(const Inventory& inventory, const TensorMeta& meta,
                        const ChunkRecord& chunk) {
  if (!chunk.region.Within(meta.shape())) {
    return DataLoss("region " + chunk.region.ToString() + " is not within shape " +
                    meta.shape().ToString());
  }
  Result<std::uint64_t> bytes = ChunkBytes(meta.dtype(), meta.shape(), chunk.region, chunk.strides);
  if (!bytes.ok()) return DataLoss(chunk.region.ToString() + ": " + bytes.status().message());
  if (chunk.pending || bytes.value() == chunk.length) return Status();
  return DataLoss(chunk.region.ToString() + ": " + inventory.files[chunk.file].name + ": " +
                  std::to_string(chunk.length) + " bytes are stored, " +
                  std::to_string(bytes.value()) + " are needed");
}

// Checks a table row after decoding it, with a message for each fault.
Status CheckDecoded(const Inventory& inventory, const TensorRecord& tensor, std::size_t row) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ChunkRecord chunk, tensor.extents.At(row));
  TENSORMOUNT_RETURN_IF_ERROR(
      CheckPlace(inventory, tensor.extents, tensor.extents.Row(row).data()));
  return CheckChunkLength(inventory, tensor.meta, chunk);
}

}  // namespace

TensorCheck CompletenessCheck::Check(const Inventory& inventory, const TensorRecord& tensor) {
  const ExtentTable& table = tensor.extents;
  const auto bad = [](const Status& status) {
    return TensorCheck{Completeness::kBad, status.message(), {}};
  };
  if (table.size() > 0 && table.rank() != tensor.meta.shape().rank()) {
    return bad(DataLoss("the chunks have " + std::to_string(table.rank()) + " axes" +
                        ", which does not fit shape " + tensor.meta.shape().ToString()));
  }
  regions_.Reset(tensor.meta.shape());
  regions_.Reserve(table.size());
  for (std::size_t i = 0; i < table.size(); ++i) {
    const char* row = table.Row(i).data();
    std::uint64_t count = 0;
    Status status;
    if (!AddRow(table, i, regions_, &count) || !HasItsLength(table, row, tensor.meta, count)) {
      status = CheckDecoded(inventory, tensor, i);
    } else {
      status = CheckPlace(inventory, table, row);
    }
    if (!status.ok()) return bad(status);
  }
  // Complete tensors return here. The code below lists at most four missing or doubled boxes, which
  // is enough for messages.
  if (IsPartition(regions_)) return {};
  CoverageReport report = CheckCoverage(regions_, 4);
  const auto file = [&](std::uint32_t row) -> const std::string& {
    return inventory.files[LoadLittle<std::uint32_t>(table.Row(row).data() + extent_row::kFile)]
        .name;
  };
  if (!report.overlaps.empty()) {
    const Overlap& overlap = report.overlaps.front();
    std::string message = overlap.box.ToString() + " is stored twice: in " + file(overlap.first) +
                          " and " + file(overlap.second);
    return {Completeness::kOverlap, std::move(message), std::move(report)};
  }
  // The message names the first hole. The number of all missing elements helps to tell a lost
  // rank from a wrong layout.
  std::string message = report.missing.front().ToString() + " is stored in no chunk";
  if (report.missing.size() > 1 || report.truncated) {
    message += " (" + std::to_string(report.missing_elements) + " elements are missing in total)";
  }
  return {Completeness::kHole, std::move(message), std::move(report)};
}

// Objects are sorted by key and index. A grid is complete if it has as many parts as cells, because
// decoding checked the indices and the merger refuses duplicates.
Status CheckObjects(const Inventory& inventory) {
  for (std::size_t i = 0; i < inventory.objects.size();) {
    const ObjectRecord& first = inventory.objects[i];
    std::size_t end = i;
    for (; end < inventory.objects.size() && inventory.objects[end].key == first.key; ++end) {
      const ObjectRecord& part = inventory.objects[end];
      if (!(part.grid == first.grid)) {
        return DataLoss("object " + first.key + ": its parts have different grids, " +
                        first.grid.ToString() + " and " + part.grid.ToString());
      }
      const bool in_tables =
          part.file < inventory.files.size() &&
          (part.has_hash() ? part.manifest < inventory.manifests.size()
                           : inventory.files[part.file].placement == Placement::kForeign);
      if (!in_tables || !RangeWithin(part.offset, part.length, inventory.files[part.file].length)) {
        return DataLoss("object " + first.key + ": part " + part.index.ToString() +
                        " is not within a file of the file table");
      }
    }
    const std::optional<std::int64_t> parts = CheckedProduct(first.grid);
    if (!parts || static_cast<std::uint64_t>(*parts) != end - i) {
      // Parts are distinct and sorted, so the first part that does not have the expected index
      // shows which part is missing.
      Dims want = Dims::Filled(first.grid.rank(), 0);
      for (std::size_t p = i; p < end && inventory.objects[p].index == want; ++p) {
        for (int a = want.rank() - 1; a >= 0; --a) {
          if (++want[a] < first.grid[a]) break;
          want[a] = 0;
        }
      }
      return DataLoss("object " + first.key + ": part " + want.ToString() + " of its grid " +
                      first.grid.ToString() + " is missing");
    }
    i = end;
  }
  return Status();
}

Status CheckTensor(CompletenessCheck& check, const Inventory& inventory,
                   const TensorRecord& tensor) {
  const TensorCheck found = check.Check(inventory, tensor);
  if (found.verdict == Completeness::kWhole) return Status();
  return DataLoss("tensor " + tensor.meta.key() + ": " + found.why);
}

Status CheckComplete(const Inventory& inventory) {
  CompletenessCheck check;
  for (const TensorRecord& tensor : inventory.tensors) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckTensor(check, inventory, tensor));
  }
  return CheckObjects(inventory);
}

}  // namespace tensormount
