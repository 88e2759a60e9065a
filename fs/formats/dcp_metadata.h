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

// What describes a folder of torch.distributed.checkpoint, as its FileSystemWriter of torch 2.13
// writes it: how tensors are cut into chunks, and the pickle .metadata.

namespace tensormount::fs {

// "__0_0.distcp"
std::string DcpFileName(std::uint32_t file);

// A chunk as DCP names it, in torch's elements, and as bytes of the tensor.
struct DcpChunk {
  Dims offsets;
  Dims sizes;
  std::uint64_t skip = 0;
  std::uint64_t bytes = 0;
};

// Row-major runs that a tensor is cut into along its first axis of more than one index, each of
// about `chunk_bytes` at most.
// DCP describes chunks as boxes (offsets, sizes). Cutting along the first axis that can be cut
// makes each box one run of the tensor, which is read without strides.
class DcpCut {
 public:
  // `meta` must outlive this, and be of a tensor that torch holds (TorchHolds).
  DcpCut(const TensorMeta& meta, std::uint64_t chunk_bytes);
  std::uint64_t chunks() const { return chunks_; }
  DcpChunk At(std::uint64_t n) const;

 private:
  const TensorMeta& meta_;
  int axis_ = 0;
  std::int64_t rows_ = 0;  // Of a chunk, at most.
  std::uint64_t row_bytes_ = 0;
  std::uint64_t chunks_ = 1;
};

// Where an item stands.
struct DcpItem {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// Writes .metadata, a pickle of class Metadata, as pickle.dump does it. Its three parts are written
// one after the other. `fqn` (fully qualified name) is what DCP calls a key.
class DcpMetadataWriter {
 public:
  DcpMetadataWriter();

  // What there is (state_dict_metadata): a tensor, or a value that is none.
  void AddTensor(std::string_view fqn, const TensorMeta& meta, const DcpCut& cut);
  void AddBytes(std::string_view fqn);

  // Where it stood in nested dicts and lists (planner_data).
  void BeginPaths();
  void AddPath(std::string_view fqn, const std::vector<CommonKey>& path);

  // Where its bytes are (storage_data): of a value, and of chunk number `n` of a tensor.
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
