// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_FORMATS_DCP_METADATA_H_
#define TENSORMOUNT_FS_FORMATS_DCP_METADATA_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/common_value.h"

#include "fs/formats/pickle_writer.h"
#include "shard/tensor_meta.h"

// Describes a directory of torch.distributed.checkpoint (DCP) as FileSystemWriter of torch 2.13
// does: how tensors are cut into chunks, and the pickle .metadata.

namespace tensormount::fs {

// Name of a data file: "__0_0.distcp" for file 0.
std::string DcpFileName(std::uint32_t file);

// A chunk as DCP describes it (a box, in torch's elements), and its byte range in the tensor.
struct DcpChunk {
  Dims offsets;
  Dims sizes;
  std::uint64_t skip = 0;
  std::uint64_t bytes = 0;
};

// Cuts a tensor along its first axis with an extent above 1 into chunks of at most `chunk_bytes`
// bytes, or of one index of that axis if its bytes are more.
// DCP describes chunks as boxes (offsets, sizes). Cutting along this axis makes each box one
// row-major run of bytes, which is read without strides.
class DcpCut {
 public:
  // `meta` must outlive this object, and TorchHolds(meta) must be true.
  DcpCut(const TensorMeta& meta, std::uint64_t chunk_bytes);
  std::uint64_t chunks() const { return chunks_; }
  DcpChunk At(std::uint64_t n) const;

 private:
  const TensorMeta& meta_;
  int axis_ = 0;
  std::int64_t rows_ = 0;  // Largest number of indices along axis_ in a chunk.
  std::uint64_t row_bytes_ = 0;
  std::uint64_t chunks_ = 1;
};

// Location of the bytes of an item: a chunk of a tensor, or another value.
struct DcpItem {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// Writes .metadata, a pickle of class Metadata, as pickle.dump does. Its three parts are written
// in the order of the functions below. `fqn` (fully qualified name) is DCP's term for a key.
class DcpMetadataWriter {
 public:
  DcpMetadataWriter();

  // Part state_dict_metadata: the tensors and other values.
  void AddTensor(std::string_view fqn, const TensorMeta& meta, const DcpCut& cut);
  void AddBytes(std::string_view fqn);

  // Part planner_data: for each fqn the path of its value in nested dicts and lists.
  void BeginPaths();
  void AddPath(std::string_view fqn, const std::vector<CommonKey>& path);

  // Part storage_data: where the bytes of a value, or of chunk number `n` of a tensor, are.
  void BeginItems();
  void AddItem(std::string_view fqn, const DcpItem& item);
  void AddItem(std::string_view fqn, const DcpItem& item, const Dims& offsets, std::uint64_t n);

  std::string Finish();

 private:
  void PickleProperties(DType dtype);
  void PickleIndex(std::string_view fqn, const Dims* offsets, std::uint64_t n);
  void PickleWhere(const DcpItem& item);

  PickleWriter pickle_{4};
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_DCP_METADATA_H_
