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

// Text that torch.save files and DCP checkpoints share: descriptions of tensors and plain values in
// a pickle, and the small entries of a zip archive.

namespace tensormount::fs {

// Whether torch has a type for the tensor. Torch's only type for f4, float4_e2m1fn_x2, packs two
// elements in a byte along the last axis, so the extent of that axis must be even.
bool TorchHolds(const TensorMeta& meta);
// Converts a shape, offsets or sizes to torch's elements: two of f4 are one of torch. The tensor
// must satisfy TorchHolds.
Dims TorchDims(DType dtype, const Dims& dims);
std::uint64_t TorchElementBytes(DType dtype);

// Writes a contiguous CPU tensor over the storage named `storage`, as torch.save does. `shape`: in
// torch's elements (TorchDims).
// torch rebuilds it as _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks),
// where storage is a persistent id ("storage", type, name, "cpu", elements) and the bytes are the
// archive's entry data/NAME. Types without a storage class use the untyped storage, whose size is
// in bytes, and _rebuild_tensor_v3.
void PickleTensor(PickleWriter& pickle, DType dtype, const Dims& shape, std::string_view storage);
// Writes a dtype as a global, such as torch.bfloat16.
void PickleDType(PickleWriter& pickle, DType dtype);

// Writes an encoded value of the Python package (docs/state-dicts.md, "Encoded values") as the
// Python object that it encodes. NumPy numbers become Python numbers. Returns false and writes
// nothing if the value contains a dict that is no such encoding, an object that torch.load with
// weights_only would reject, or a NumPy number that is encoded as bytes (such as a NaN). Plain
// values are written as they are.
bool PickleEncoded(PickleWriter& pickle, const CommonValue& value);
// Whether PickleEncoded would succeed; writes nothing.
bool CanPickleEncoded(const CommonValue& value);

// Add the archive's small entries: the first function those between data.pkl and the storages, the
// second those after the storages.
// They are those that torch 2.13 writes; torch.load needs byteorder and version.
void AddEntriesBeforeData(ZipWriter& zip, std::string& out);
void AddEntriesAfterData(ZipWriter& zip, std::string& out);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_FORMATS_TORCH_TEXT_H_
