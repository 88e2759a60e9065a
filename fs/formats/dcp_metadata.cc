// SPDX-License-Identifier: Apache-2.0
// Cuts tensors into the chunks of torch.distributed.checkpoint (DCP) and writes its pickle
// .metadata.
#include "fs/formats/dcp_metadata.h"

#include <algorithm>
#include <variant>

#include <fmt/core.h>

#include "fs/formats/torch_text.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";

// Writes a new object of a dataclass as Python's pickler does: NEWOBJ without arguments. The caller
// sets its fields, if it has any, with Build, from a dict or, for TensorProperties, from the tuple
// that its __getstate__ returns.
void NewDataclass(PickleWriter& pickle, std::string_view module, std::string_view name) {
  pickle.Global(module, name);
  pickle.EmptyTuple();
  pickle.NewObject();
}

void PickleSize(PickleWriter& pickle, const Dims& size) {
  pickle.Global("torch", "Size");
  pickle.Tuple(size);
  pickle.Tuple1();
  pickle.Reduce();
}

}  // namespace

std::string DcpFileName(std::uint32_t file) { return fmt::format("__{}_0.distcp", file); }

DcpCut::DcpCut(const TensorMeta& meta, std::uint64_t chunk_bytes) : meta_(meta) {
  if (meta.bytes() <= chunk_bytes) return;
  const Dims shape = TorchDims(meta.dtype(), meta.shape());
  // Shape [1, 8, 64] is cut along axis 1. An element is not cut, even if it exceeds chunk_bytes.
  while (axis_ < shape.rank() && shape[axis_] == 1) ++axis_;
  if (axis_ == shape.rank()) {
    axis_ = 0;
    return;
  }
  const std::int64_t extent = shape[axis_];
  row_bytes_ = meta.bytes() / static_cast<std::uint64_t>(extent);
  rows_ = static_cast<std::int64_t>(std::max<std::uint64_t>(chunk_bytes / row_bytes_, 1));
  chunks_ = static_cast<std::uint64_t>((extent + rows_ - 1) / rows_);
}

DcpChunk DcpCut::At(std::uint64_t n) const {
  DcpChunk chunk{.offsets = Dims::Filled(meta_.shape().rank(), 0),
                 .sizes = TorchDims(meta_.dtype(), meta_.shape()),
                 .skip = 0,
                 .bytes = meta_.bytes()};
  if (chunks_ == 1) return chunk;
  const std::int64_t first = static_cast<std::int64_t>(n) * rows_;
  chunk.offsets[axis_] = first;
  chunk.sizes[axis_] = std::min(rows_, chunk.sizes[axis_] - first);
  chunk.skip = static_cast<std::uint64_t>(first) * row_bytes_;
  chunk.bytes = static_cast<std::uint64_t>(chunk.sizes[axis_]) * row_bytes_;
  return chunk;
}

// The fields are written in the order in which torch's dataclass Metadata declares them.
DcpMetadataWriter::DcpMetadataWriter() {
  NewDataclass(pickle_, kModule, "Metadata");
  pickle_.EmptyDict();
  pickle_.Mark();
  pickle_.String("state_dict_metadata");
  pickle_.EmptyDict();
  pickle_.Mark();
}

void DcpMetadataWriter::PickleProperties(DType dtype) {
  NewDataclass(pickle_, kModule, "TensorProperties");
  pickle_.Mark();
  PickleDType(pickle_, dtype);
  pickle_.Global("torch.serialization", "_get_layout");
  pickle_.String("torch.strided");
  pickle_.Tuple1();
  pickle_.Reduce();
  pickle_.Bool(false);  // requires_grad
  // Field memory_format, an enumeration.
  pickle_.Global(kModule, "_MEM_FORMAT_ENCODING");
  pickle_.Int(0);  // TORCH_CONTIGUOUS_FORMAT
  pickle_.Tuple1();
  pickle_.Reduce();
  pickle_.Bool(false);  // pin_memory
  pickle_.TupleFromMark();
  pickle_.Build();
}

void DcpMetadataWriter::AddTensor(std::string_view fqn, const TensorMeta& meta, const DcpCut& cut) {
  pickle_.String(fqn);
  NewDataclass(pickle_, kModule, "TensorStorageMetadata");
  pickle_.EmptyDict();
  pickle_.Mark();
  pickle_.String("properties");
  PickleProperties(meta.dtype());
  pickle_.String("size");
  PickleSize(pickle_, TorchDims(meta.dtype(), meta.shape()));
  pickle_.String("chunks");
  pickle_.EmptyList();
  pickle_.Mark();
  for (std::uint64_t n = 0; n < cut.chunks(); ++n) {
    const DcpChunk chunk = cut.At(n);
    NewDataclass(pickle_, kModule, "ChunkStorageMetadata");
    pickle_.EmptyDict();
    pickle_.Mark();
    pickle_.String("offsets");
    PickleSize(pickle_, chunk.offsets);
    pickle_.String("sizes");
    PickleSize(pickle_, chunk.sizes);
    pickle_.SetItems();
    pickle_.Build();
  }
  pickle_.Appends();
  pickle_.SetItems();
  pickle_.Build();
}

void DcpMetadataWriter::AddBytes(std::string_view fqn) {
  pickle_.String(fqn);
  NewDataclass(pickle_, kModule, "BytesStorageMetadata");
}

void DcpMetadataWriter::BeginPaths() {
  pickle_.SetItems();
  pickle_.String("planner_data");
  pickle_.EmptyDict();
  pickle_.Mark();
}

void DcpMetadataWriter::AddPath(std::string_view fqn, const std::vector<CommonKey>& path) {
  pickle_.String(fqn);
  pickle_.Mark();
  for (const CommonKey& part : path) {
    if (const auto* index = std::get_if<std::int64_t>(&part)) {
      pickle_.Int(*index);
    } else {
      pickle_.String(std::get<std::string>(part));
    }
  }
  pickle_.TupleFromMark();
}

void DcpMetadataWriter::BeginItems() {
  pickle_.SetItems();
  pickle_.String("storage_data");
  pickle_.EmptyDict();
  pickle_.Mark();
}

// Writes a MetadataIndex, which is the key of an item in storage_data. Chunks of tensors have an
// index and an offset. For other values `offsets` is null: the index is None, the offset is
// omitted.
void DcpMetadataWriter::PickleIndex(std::string_view fqn, const Dims* offsets, std::uint64_t n) {
  NewDataclass(pickle_, kModule, "MetadataIndex");
  pickle_.EmptyDict();
  pickle_.Mark();
  pickle_.String("fqn");
  pickle_.String(fqn);
  pickle_.String("index");
  if (offsets == nullptr) {
    pickle_.None();
  } else {
    pickle_.Unsigned(n);
    pickle_.String("offset");
    PickleSize(pickle_, *offsets);
  }
  pickle_.SetItems();
  pickle_.Build();
}

void DcpMetadataWriter::PickleWhere(const DcpItem& item) {
  NewDataclass(pickle_, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
  pickle_.EmptyDict();
  pickle_.Mark();
  pickle_.String("relative_path");
  pickle_.String(DcpFileName(item.file));
  pickle_.String("offset");
  pickle_.Unsigned(item.offset);
  pickle_.String("length");
  pickle_.Unsigned(item.length);
  pickle_.SetItems();
  pickle_.Build();
}

void DcpMetadataWriter::AddItem(std::string_view fqn, const DcpItem& item) {
  PickleIndex(fqn, nullptr, 0);
  PickleWhere(item);
}

void DcpMetadataWriter::AddItem(std::string_view fqn, const DcpItem& item, const Dims& offsets,
                                std::uint64_t n) {
  PickleIndex(fqn, &offsets, n);
  PickleWhere(item);
}

std::string DcpMetadataWriter::Finish() {
  pickle_.SetItems();
  // storage_meta (since torch 2.3) describes the save. None is enough: no release needs it to load.
  pickle_.String("storage_meta");
  pickle_.None();
  pickle_.String("version");
  pickle_.String("1.0.0");
  pickle_.SetItems();
  pickle_.Build();
  return pickle_.Finish();
}

}  // namespace tensormount::fs
