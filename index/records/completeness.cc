// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <optional>

#include "base/checked.h"
#include "base/errors.h"
#include "index/records/extent_row.h"
#include "index/records/inventory.h"
#include "shard/coverage.h"

namespace tensormount {
namespace {

// [first, first + count) of the row-major order of a whole tensor.
struct FlatRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// The row's region as one range of the tensor's row-major order, where it is one; nullopt also for
// anything odd, which the exact check then judges.
std::optional<FlatRange> AsRange(const char* row, const Dims& shape) {
  const int rank = shape.rank();
  std::int64_t first = 0;
  std::int64_t volume = 1;
  std::int64_t stride = 1;
  bool must_be_one = false;  // An inner axis was cut: all axes outside it are single rows.
  for (int a = rank - 1; a >= 0; --a) {
    const std::int64_t begin = extent_row::Begin(row, a);
    const std::int64_t extent = extent_row::Extent(row, rank, a);
    if (begin < 0 || extent < 1 || begin > shape[a] - extent) return std::nullopt;
    if (must_be_one && extent != 1) return std::nullopt;
    if (extent != shape[a]) must_be_one = true;
    first += begin * stride;  // Within the tensor, whose element count fits.
    volume *= extent;
    stride *= shape[a];
  }
  if ((LoadLittle<std::uint32_t>(row + extent_row::kFlags) & extent_row::kFlat) == 0) {
    return FlatRange{first, volume};
  }
  const auto flat_first = LoadLittle<std::int64_t>(row + extent_row::kFlatFirst);
  const auto flat_count = LoadLittle<std::int64_t>(row + extent_row::kFlatCount);
  if (flat_first < 0 || flat_count < 0 || flat_first > volume || flat_count > volume - flat_first) {
    return std::nullopt;
  }
  return FlatRange{first + flat_first, flat_count};
}

// Whether a row has the length of its `count` elements. False says nothing yet: CheckExactly does.
bool HasItsLength(const ExtentTable& table, const char* row, const TensorMeta& meta,
                  std::uint64_t count) {
  const std::uint32_t flags = extent_row::Flags(row);
  if ((flags & extent_row::kPending) != 0) return true;  // Of an item, which is not looked at yet.
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

// File, place and hash of a row; its length is the caller's to compare.
Status CheckPlace(const Inventory& inventory, const ExtentTable& table, const char* row) {
  const auto file = LoadLittle<std::uint32_t>(row + extent_row::kFile);
  if (file >= inventory.files.size()) return DataLoss("a chunk in a file that is not in the table");
  const FileRecord& record = inventory.files[file];
  if (!RangeWithin(LoadLittle<std::uint64_t>(row + extent_row::kOffset),
                   LoadLittle<std::uint64_t>(row + extent_row::kLength), record.length)) {
    return DataLoss(record.name + ": a chunk reaches past its end");
  }
  const std::uint32_t flags = extent_row::Flags(row);
  const std::uint32_t known =
      extent_row::kKnownFlags | (table.pending() ? extent_row::kPending : 0u);
  if ((flags & ~known) != 0) return DataLoss(record.name + ": a chunk of unknown kind");
  const bool foreign = record.placement == Placement::kForeign;
  if (!foreign && (flags & (extent_row::kStrided | extent_row::kPending)) != 0) {
    return DataLoss(record.name + ": a strided chunk");
  }
  if ((flags & extent_row::kHasHash) == 0) {
    return foreign ? Status() : DataLoss(record.name + ": a chunk without a hash");
  }
  if (LoadLittle<std::uint32_t>(row + extent_row::kManifest) >= inventory.manifests.size()) {
    return DataLoss(record.name + ": a chunk of a manifest that is not in the table");
  }
  return Status();
}

// True where the sorted chunks are ranges that follow each other from the first element to the
// last. False says nothing yet.
Result<bool> IsChainOfRanges(const Inventory& inventory, const TensorRecord& tensor) {
  const std::uint32_t bits = tensor.meta.bits();
  std::uint64_t next = 0;
  const std::string_view rows = tensor.extents.packed();
  const std::size_t row_bytes = tensor.extents.row_bytes();
  for (std::size_t at = 0; at < rows.size(); at += row_bytes) {
    const char* row = rows.data() + at;
    const std::optional<FlatRange> range = AsRange(row, tensor.meta.shape());
    if (!range || static_cast<std::uint64_t>(range->first) != next) return false;
    const auto count = static_cast<std::uint64_t>(range->count);
    if (bits % 8 != 0 && (next * bits % 8 != 0 || count * bits % 8 != 0)) return false;
    if (!HasItsLength(tensor.extents, row, tensor.meta, count)) return false;
    TENSORMOUNT_RETURN_IF_ERROR(CheckPlace(inventory, tensor.extents, row));
    next += count;
  }
  return next == tensor.meta.elements();
}

// True where the chunks, sorted by their first elements, are the cells of a grid in row-major
// order: columns, blocks, uneven ones too. False says nothing yet.
Result<bool> IsGrid(const Inventory& inventory, const TensorRecord& tensor,
                    std::vector<std::int64_t>& scratch) {
  const TensorMeta& meta = tensor.meta;
  const int rank = meta.shape().rank();
  const std::size_t n = tensor.extents.size();
  if (n == 0 || meta.elements() == 0 || meta.bits() % 8 != 0) return false;
  // Where the cells begin on each axis, one axis after the other, and its end behind them.
  scratch.clear();
  std::array<std::size_t, kMaxRank + 1> first{};
  std::uint64_t cells = 1;
  const std::string_view rows = tensor.extents.packed();
  const std::size_t row_bytes = tensor.extents.row_bytes();
  for (int a = 0; a < rank; ++a) {
    const auto u = static_cast<std::size_t>(a);
    std::int64_t last = -1;
    bool rising = true;
    for (std::size_t i = 0; i < n; ++i) {
      const std::int64_t at = extent_row::Begin(rows.data() + i * row_bytes, a);
      if (at == last) continue;
      // Begins of inner axes repeat with every step of an outer one.
      if (at < last) rising = false;
      last = at;
      scratch.push_back(at);
    }
    const auto from = scratch.begin() + static_cast<std::ptrdiff_t>(first[u]);
    if (!rising) {
      std::sort(from, scratch.end());
      scratch.erase(std::unique(from, scratch.end()), scratch.end());
    }
    if (scratch[first[u]] != 0) return false;
    cells *= scratch.size() - first[u];
    if (cells > n) return false;
    scratch.push_back(meta.shape()[a]);
    first[u + 1] = scratch.size();
  }
  if (cells != n) return false;
  std::array<std::size_t, kMaxRank> at{};
  for (std::size_t i = 0; i < n; ++i) {
    const char* row = rows.data() + i * row_bytes;
    if ((LoadLittle<std::uint32_t>(row + extent_row::kFlags) & extent_row::kFlat) != 0) {
      return false;
    }
    std::int64_t volume = 1;
    for (int a = 0; a < rank; ++a) {
      const auto u = static_cast<std::size_t>(a);
      const std::int64_t begin = scratch[first[u] + at[u]];
      const std::int64_t extent = scratch[first[u] + at[u] + 1] - begin;
      if (extent < 1 || extent_row::Begin(row, a) != begin ||
          extent_row::Extent(row, rank, a) != extent) {
        return false;
      }
      volume *= extent;  // Within the tensor, whose element count fits.
    }
    if (!HasItsLength(tensor.extents, row, meta, static_cast<std::uint64_t>(volume))) return false;
    TENSORMOUNT_RETURN_IF_ERROR(CheckPlace(inventory, tensor.extents, row));
    for (int a = rank - 1; a >= 0; --a) {
      const auto u = static_cast<std::size_t>(a);
      if (++at[u] + 1 < first[u + 1] - first[u]) break;
      at[u] = 0;
    }
  }
  return true;
}

// Whether a decoded chunk has the length of its region.
Status CheckChunkLength(const Inventory& inventory, const TensorMeta& meta,
                        const ChunkRecord& chunk) {
  if (!chunk.region.Within(meta.shape())) {
    return DataLoss(chunk.region.ToString() + " is not within " + meta.shape().ToString());
  }
  Result<std::uint64_t> bytes = ChunkBytes(meta.dtype(), meta.shape(), chunk.region, chunk.strides);
  if (!bytes.ok()) return DataLoss(chunk.region.ToString() + ": " + bytes.status().message());
  if (chunk.pending || bytes.value() == chunk.length) return Status();
  return DataLoss(chunk.region.ToString() + ": " + inventory.files[chunk.file].name + ": " +
                  std::to_string(chunk.length) + " bytes stored, " + std::to_string(bytes.value()) +
                  " needed");
}

TensorCheck CheckExactly(const Inventory& inventory, const TensorRecord& tensor) {
  const TensorMeta& meta = tensor.meta;
  std::vector<OwnedRegion> regions;
  regions.reserve(tensor.extents.size());
  std::vector<std::uint32_t> files;
  files.reserve(tensor.extents.size());
  for (std::size_t i = 0; i < tensor.extents.size(); ++i) {
    Result<ChunkRecord> chunk = tensor.extents.At(i);
    Status status = chunk.status();
    if (status.ok()) {
      status = CheckPlace(inventory, tensor.extents, tensor.extents.Row(i).data());
    }
    if (status.ok()) status = CheckChunkLength(inventory, meta, chunk.value());
    if (!status.ok()) return {Completeness::kBad, status.message(), {}};
    files.push_back(chunk.value().file);
    if (chunk.value().region.empty()) continue;
    regions.push_back({std::move(chunk.value().region), static_cast<std::uint32_t>(i)});
  }
  CoverageReport report = CheckCoverage(meta.shape(), regions, 4);
  if (!report.overlaps.empty()) {
    const Overlap& overlap = report.overlaps.front();
    std::string message = overlap.box.ToString() + " is stored twice: in " +
                          inventory.files[files[overlap.first]].name + " and " +
                          inventory.files[files[overlap.second]].name;
    return {Completeness::kOverlap, std::move(message), std::move(report)};
  }
  if (!report.missing.empty()) {
    std::string message = report.missing.front().ToString() + " is stored in no chunk";
    if (report.missing.size() > 1 || report.truncated) {
      message += " (" + std::to_string(report.missing_elements) + " elements are missing in all)";
    }
    return {Completeness::kHole, std::move(message), std::move(report)};
  }
  return {};
}

TensorCheck CheckOne(const Inventory& inventory, const TensorRecord& tensor,
                     std::vector<std::int64_t>& scratch) {
  Result<bool> complete = IsChainOfRanges(inventory, tensor);
  if (complete.ok() && !complete.value()) complete = IsGrid(inventory, tensor, scratch);
  if (!complete.ok()) return {Completeness::kBad, complete.status().message(), {}};
  return complete.value() ? TensorCheck() : CheckExactly(inventory, tensor);
}

Status CheckObjects(const Inventory& inventory) {
  for (std::size_t i = 0; i < inventory.objects.size();) {
    const ObjectRecord& first = inventory.objects[i];
    std::size_t end = i;
    for (; end < inventory.objects.size() && inventory.objects[end].key == first.key; ++end) {
      const ObjectRecord& part = inventory.objects[end];
      if (!(part.grid == first.grid)) {
        return DataLoss("object " + first.key + ": its parts are on grids " +
                        first.grid.ToString() + " and " + part.grid.ToString());
      }
      const bool in_tables =
          part.file < inventory.files.size() &&
          (part.has_hash() ? part.manifest < inventory.manifests.size()
                           : inventory.files[part.file].placement == Placement::kForeign);
      if (!in_tables || !RangeWithin(part.offset, part.length, inventory.files[part.file].length)) {
        return DataLoss("object " + first.key + ": part " + part.index.ToString() +
                        " is not within a file of the table");
      }
    }
    const std::optional<std::int64_t> parts = CheckedProduct(first.grid);
    if (!parts || static_cast<std::uint64_t>(*parts) != end - i) {
      // Parts are distinct and in order: the first one out of step is missing.
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

}  // namespace

Status CheckComplete(const Inventory& inventory) {
  std::vector<std::int64_t> scratch;
  for (const TensorRecord& tensor : inventory.tensors) {
    TensorCheck check = CheckOne(inventory, tensor, scratch);
    if (check.verdict != Completeness::kWhole) {
      return DataLoss("tensor " + tensor.meta.key() + ": " + check.why);
    }
  }
  return CheckObjects(inventory);
}

TensorCheck CheckTensor(const Inventory& inventory, const TensorRecord& tensor) {
  std::vector<std::int64_t> scratch;
  return CheckOne(inventory, tensor, scratch);
}

}  // namespace tensormount
