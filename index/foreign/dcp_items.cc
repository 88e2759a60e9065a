// SPDX-License-Identifier: Apache-2.0
// Locates the bytes of items of .distcp files when a chunk is first needed. An item is a torch
// archive of one tensor.
//
// The metadata and the item come from the same save, but either may be damaged or hostile, so
// dtype, shape (without axes of extent 1) and length are compared here. The chunk record then gets
// offset, length and strides of the tensor's bytes in the .distcp file, so later reads do not need
// the archive.
#include "index/foreign/dcp_items.h"

#include <utility>
#include <vector>

#include "index/archives/torch_archive.h"

namespace tensormount {
namespace {

// The axes whose extent is not 1. Shapes that are equal without axes of extent 1 have the same
// elements in the same order; Megatron-Core prepends such axes, and torch.save may drop them.
std::vector<int> NonUnitAxes(const Dims& shape) {
  std::vector<int> out;
  for (int a = 0; a < shape.rank(); ++a) {
    if (shape[a] != 1) out.push_back(a);
  }
  return out;
}

// The file and the item's position for messages; the caller adds the names of tensor and region.
std::string ChunkLocation(const File& file, const ChunkRecord& chunk) {
  return file.path() + ": item at byte " + std::to_string(chunk.offset);
}

Status ResolveDcpItem(const std::unordered_set<std::string>& flattened, const TensorMeta& meta,
                      File& file, ChunkRecord& chunk) {
  Result<StoredTensor> read = ReadTorchItem(file, chunk.offset, chunk.length);
  if (!read.ok()) return read.status().WithContext(ChunkLocation(file, chunk));
  const StoredTensor& stored = read.value();
  const auto bad = [&](std::string what) {
    return Status(Code::kDataLoss, ChunkLocation(file, chunk) + ": " + std::move(what));
  };
  if (stored.dtype != meta.dtype()) {
    return bad("the item has dtype " + std::string(InfoOf(stored.dtype).name) +
               ", the tensor has dtype " + std::string(InfoOf(meta.dtype()).name));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                               RegionBytes(meta.dtype(), meta.shape(), chunk.region));
  const std::vector<int> stored_axes = NonUnitAxes(stored.shape);
  Dims strides;
  // An item of flattened state has one axis, and its chunk is a run of elements in row-major order.
  // A strided item is refused, because the run is not a box, so the record cannot have strides.
  if (chunk.region.is_flat() || flattened.contains(meta.key())) {
    if (stored_axes.size() > 1 || CheckedProduct(stored.shape) != chunk.region.volume()) {
      return bad("the item has shape " + stored.shape.ToString() + ", the chunk has " +
                 std::to_string(chunk.region.volume()) + " elements");
    }
    if (!stored.packed) {
      return Status(Code::kUnsupported,
                    ChunkLocation(file, chunk) +
                        ": flattened chunks with non-contiguous elements are not supported");
    }
  } else {
    const Dims& extent = chunk.region.box().extent();
    const std::vector<int> axes = NonUnitAxes(extent);
    bool same = axes.size() == stored_axes.size();
    for (std::size_t i = 0; same && i < axes.size(); ++i) {
      same = extent[axes[i]] == stored.shape[stored_axes[i]];
    }
    if (!same) {
      return bad("the item has shape " + stored.shape.ToString() + ", the chunk has shape " +
                 extent.ToString());
    }
    if (!stored.packed) {
      // The tensor was saved with strides that are not row-major (a transposed view). Strides of
      // axes with extent 1 are never used and may have any value.
      strides = Dims::Filled(extent.rank(), InfoOf(stored.dtype).bits / 8);
      for (std::size_t i = 0; i < axes.size(); ++i) {
        strides[axes[i]] = stored.strides[stored_axes[i]];
      }
    }
  }
  if (stored.packed && stored.length != bytes) {
    return bad("the item has " + std::to_string(stored.length) + " bytes, the chunk needs " +
               std::to_string(bytes));
  }
  // The record pointed to the item; now it points to the tensor's bytes in the item.
  chunk.offset = stored.offset;
  chunk.length = stored.length;
  chunk.strides = strides;
  chunk.pending = false;
  return Status();
}

}  // namespace

ItemResolver MakeDcpItemResolver(std::unordered_set<std::string> flattened) {
  return
      [flattened = std::move(flattened)](const TensorMeta& meta, File& file, ChunkRecord& chunk) {
        return ResolveDcpItem(flattened, meta, file, chunk);
      };
}

}  // namespace tensormount
