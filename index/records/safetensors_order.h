// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_SAFETENSORS_ORDER_H_
#define TENSORMOUNT_INDEX_RECORDS_SAFETENSORS_ORDER_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "shard/tensor_meta.h"

namespace tensormount {

// Whether a safetensors file can hold a tensor of this dtype under this key.
bool CanStoreInSafetensors(DType dtype, std::string_view key);

bool CanStoreInSafetensors(const TensorMeta& tensor);

// Layout of model.safetensors: tensors by falling element size, and tensors of equal size in the
// given order. Element sizes are powers of two, so each tensor is aligned. Example: an f32 "b", a
// bf16 "a" and an f64 "c" are stored as c, b, a.
struct SafetensorsOrder {
  std::string header;  // Empty if the header would exceed the format's limit.
  // Offset of each tensor in the file, by position in `tensors`.
  std::vector<std::uint64_t> offsets;
  // Whether the file has the tensor, by position. False: the format lacks the dtype or reserves the
  // key, or there is no header.
  std::vector<bool> held;
};
// Lays out a safetensors file, for the index, which stores the header, and for views and exports.
// O(n log n) in the number of tensors. `metadata`: entries of the header's metadata besides
// "format".
Result<SafetensorsOrder> LayOutSafetensors(std::span<const TensorMeta* const> tensors,
                                           std::map<std::string, std::string> metadata = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_SAFETENSORS_ORDER_H_
