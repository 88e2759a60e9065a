// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_TORCH_TENSOR_H_
#define TENSORMOUNT_INDEX_ARCHIVES_TORCH_TENSOR_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>

#include "index/archives/torch_archive.h"

// What a pickle of torch says of a tensor, before anybody looks where its storage is.

namespace tensormount {

// Several tensors may name one storage, with other offsets and strides: views, and tied parameters.
struct TorchTensor {
  std::string storage;              // Its key: "0".
  std::uint64_t storage_bytes = 0;  // As the pickle has it.
  StoredTensor view;                // Offset counts from the storage's begin.

  // With the storage at `offset` of a file.
  StoredTensor In(std::uint64_t offset) const {
    StoredTensor out = view;
    out.offset += offset;
    return out;
  }
};

// Keys of storages that a pickle refers to with several types or sizes: torch takes the first one's
// for all, in the order of the stream.
std::set<std::string, std::less<>> StoragesOfTwoKinds(const pickle::Document& document);

// By what would be called, without looking at arguments: TorchTensorOf says whether they make
// sense.
bool IsTorchTensor(const pickle::Value& value);

// kDataLoss: it is no tensor, the view leaves its storage, numbers overflow. kUnsupported by name:
// as TorchArchive::TensorOf says.
//
// A float4_e2m1fn_x2 is two elements to torch's one: it becomes our f4 with the last axis doubled,
// as safetensors has it.
Result<TorchTensor> TorchTensorOf(const pickle::Value& value);

// The element type that torch calls so ("float8_e4m3fn"); of "float4_e2m1fn_x2" f4. kUnsupported by
// name: quantised and bit types, complex32.
Result<DType> TorchDType(std::string_view name);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_ARCHIVES_TORCH_TENSOR_H_
