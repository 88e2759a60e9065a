// SPDX-License-Identifier: Apache-2.0
// Items of a .distcp file that are torch archives of one tensor: what is pending until somebody
// wants its bytes, and how a window of the archive becomes chunks of the tensor.
#include "index/foreign/dcp_items.h"

#include <utility>
#include <vector>

#include "index/foreign/torch_archive.h"

namespace tensormount {
namespace {

// Axes that are not of extent 1, which Megatron-Core prepends and torch.save may drop.
std::vector<int> RealAxes(const Dims& shape) {
  std::vector<int> out;
  for (int a = 0; a < shape.rank(); ++a) {
    if (shape[a] != 1) out.push_back(a);
  }
  return out;
}

class Resolver : public ItemResolver {
 public:
  explicit Resolver(std::unordered_set<std::string> flattened) : flattened_(std::move(flattened)) {}

  Status Resolve(const TensorMeta& meta, File& file, ChunkRecord& chunk) const override {
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
    if (chunk.region.is_flat() || flattened_.contains(meta.key())) {
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
    chunk.offset = stored.offset;
    chunk.length = stored.length;
    chunk.strides = strides;
    chunk.pending = false;
    return Status();
  }

 private:
  // Tensor and region are the caller's to name.
  static std::string Where(const File& file, const ChunkRecord& chunk) {
    return file.path() + ": item at byte " + std::to_string(chunk.offset);
  }

  std::unordered_set<std::string> flattened_;
};

}  // namespace

std::shared_ptr<const ItemResolver> MakeDcpItemResolver(std::unordered_set<std::string> flattened) {
  return std::make_shared<const Resolver>(std::move(flattened));
}

}  // namespace tensormount
