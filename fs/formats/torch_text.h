// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_FORMATS_TORCH_TEXT_H_
#define TENSORMOUNT_FS_FORMATS_TORCH_TEXT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "fs/formats/pickle_writer.h"
#include "fs/formats/zip_writer.h"
#include "shard/tensor_meta.h"

// What the two formats of torch share: how tensors and plain values are described in a pickle, and
// the small entries of an archive.

namespace tensormount::fs {

// torch has no type of one f4 element: its float4_e2m1fn_x2 is two of them in a byte, along the
// last axis. Whether torch has a type for the tensor.
bool TorchHolds(const TensorMeta& meta);
// A shape, offsets or sizes, in torch's elements; `dtype` and dims are of a tensor that it holds.
Dims TorchDims(DType dtype, const Dims& dims);
std::uint64_t TorchElementBytes(DType dtype);

// A CPU tensor of packed rows over the storage of that name: what torch.save writes of one.
// `shape`: in torch's elements (TorchDims).
// torch rebuilds it as _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks),
// where storage is a persistent id ("storage", type, name, "cpu", elements) and the bytes are the
// archive's entry data/NAME. Types without a storage class of their own use the untyped storage and
// _rebuild_tensor_v3.
void PickleTensor(PickleWriter& pickle, DType dtype, const Dims& shape, std::string_view storage);
// "torch", "bfloat16".
void PickleDType(PickleWriter& pickle, DType dtype);

// A value in the form that the Python package stores (docs/python.md, "Encoded values"), as Python
// had it. NumPy's numbers become Python's. False, and nothing is written, for what a torch.load
// with weights_only has no name for.
bool PickleEncoded(PickleWriter& pickle, const CommonValue& value);
// The same, and writes nothing.
bool CanPickleEncoded(const CommonValue& value);

// What stands in an archive between data.pkl and the storages, and behind them.
// torch.load wants byteorder and version; the others are what torch 2.13 writes.
void AddEntriesBeforeData(ZipWriter& zip, std::string& out);
void AddEntriesAfterData(ZipWriter& zip, std::string& out);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_TORCH_TEXT_H_
