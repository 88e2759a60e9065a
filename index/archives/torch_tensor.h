// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_TORCH_TENSOR_H_
#define TENSORMOUNT_INDEX_ARCHIVES_TORCH_TENSOR_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>

#include "index/archives/torch_archive.h"

// The description of a tensor in a pickle, before its storage is looked up in the archive.

namespace tensormount {

// A tensor as a view of a storage. Several tensors may be views of one storage with different
// offsets and strides: slices, and tied parameters.
struct TorchTensor {
  std::string storage;              // Key of the storage: "0".
  std::uint64_t storage_bytes = 0;  // Size of the storage according to the pickle.
  StoredTensor view;                // Offsets of the view count from the start of the storage.

  // The view as a StoredTensor, for a storage that begins at `offset` of a file.
  StoredTensor In(std::uint64_t offset) const {
    StoredTensor out = view;
    out.offset += offset;
    return out;
  }
};

// Keys of storages that a pickle declares with different types or sizes. torch uses the first
// declaration in the stream for all tensors of the storage.
std::set<std::string, std::less<>> ConflictingStorages(const pickle::Document& document);

// Whether the value is made by a function that makes tensors. The arguments are not checked;
// TorchTensorOf checks them.
bool IsTorchTensor(const pickle::Value& value);

// The tensor that `value` describes. kDataLoss if the value is not a tensor, if its call is
// malformed, if the view exceeds its storage, or if numbers overflow. kUnsupported as for
// TorchArchive::TensorOf.
//
// torch's float4_e2m1fn_x2 is a pair of elements. It becomes f4 with the last axis doubled, as in
// safetensors.
Result<TorchTensor> TorchTensorOf(const pickle::Value& value);

// The element type for torch's name, such as "float8_e4m3fn". f4 for "float4_e2m1fn_x2".
// kUnsupported, with the name, for other types (quantised, bit types, complex32).
Result<DType> TorchDType(std::string_view name);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_ARCHIVES_TORCH_TENSOR_H_
