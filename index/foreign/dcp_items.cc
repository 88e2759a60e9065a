// SPDX-License-Identifier: Apache-2.0
// Items of a .distcp file that are torch archives of one tensor: what is pending until somebody
// wants its bytes, and how a window of the archive becomes chunks of the tensor.
//
// The metadata and the item are written by the same save, but one may be damaged or hostile, so
// they are compared here and nowhere else: dtype, shape (axes of extent 1 apart), bytes. After that
// the chunk record holds the offset, length and strides of the payload in the .distcp file, and
// reads need the archive no more.
#include "index/foreign/dcp_items.h"

#include <utility>
#include <vector>

#include "index/archives/torch_archive.h"

namespace tensormount {
namespace {

// Axes that are not of extent 1, which Megatron-Core prepends and torch.save may drop.
// Two shapes hold the same elements in the same order when they are equal without such axes.
std::vector<int> RealAxes(const Dims& shape) {
  std::vector<int> out;
  for (int a = 0; a < shape.rank(); ++a) {
    if (shape[a] != 1) out.push_back(a);
  }
  return out;
}

// Tensor and region are the caller's to name.
std::string Where(const File& file, const ChunkRecord& chunk) {
  return file.path() + ": item at byte " + std::to_string(chunk.offset);
}

Status ResolveDcpItem(const std::unordered_set<std::string>& flattened, const TensorMeta& meta,
                      File& file, ChunkRecord& chunk) {
  Result<StoredTensor> read = ReadTorchItem(file, chunk.offset, chunk.length);
  if (!read.ok()) return read.status().WithContext(Where(file, chunk));
  const StoredTensor& stored = read.value();
  const auto bad = [&](std::string what) {
    return Status(Code::kDataLoss, Where(file, chunk) + ": " + std::move(what));
  };
  if (stored.dtype != meta.dtype()) {
    return bad("the item is of dtype " + std::string(InfoOf(stored.dtype).name) +
               ", the tensor of " + std::string(InfoOf(meta.dtype()).name));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                               RegionBytes(meta.dtype(), meta.shape(), chunk.region));
  const std::vector<int> stored_axes = RealAxes(stored.shape);
  Dims strides;
  // Flattened state: the item is one axis of elements, and the chunk a run of the row-major order
  // within its fragment. A strided item would need a stride that the region, which is no box, has
  // no axis for.
  if (chunk.region.is_flat() || flattened.contains(meta.key())) {
    if (stored_axes.size() > 1 || CheckedProduct(stored.shape) != chunk.region.volume()) {
      return bad("the item has shape " + stored.shape.ToString() + ", the chunk " +
                 std::to_string(chunk.region.volume()) + " elements");
    }
    if (!stored.packed) {
      return Status(Code::kUnsupported, Where(file, chunk) +
                                            ": a flattened chunk whose elements are not stored "
                                            "one after the other");
    }
  } else {
    const Dims& extent = chunk.region.box().extent();
    const std::vector<int> axes = RealAxes(extent);
    bool same = axes.size() == stored_axes.size();
    for (std::size_t i = 0; same && i < axes.size(); ++i) {
      same = extent[axes[i]] == stored.shape[stored_axes[i]];
    }
    if (!same) {
      return bad("the item has shape " + stored.shape.ToString() + ", the chunk " +
                 extent.ToString());
    }
    if (!stored.packed) {
      // Torch kept the strides of a tensor that is not dense in rows (a transposed view). Axes of
      // extent 1 are never stepped along, so any stride will do for them.
      strides = Dims::Filled(extent.rank(), InfoOf(stored.dtype).bits / 8);
      for (std::size_t i = 0; i < axes.size(); ++i) {
        strides[axes[i]] = stored.strides[stored_axes[i]];
      }
    }
  }
  if (stored.packed && stored.length != bytes) {
    return bad("the item has " + std::to_string(stored.length) + " bytes, the chunk " +
               std::to_string(bytes));
  }
  // From here on the record says where the bytes are, not where the item is.
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
