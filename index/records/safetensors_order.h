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

// Whether the format can hold a tensor of this type under this key.
bool SafetensorsHolds(DType dtype, std::string_view key);

// Whether the format can hold the tensor: its dtype, and its key.
bool SafetensorsHolds(const TensorMeta& tensor);

// How tensors stand in model.safetensors: by falling element size, then in the order given, so that
// each is aligned.
// Example: an f32 "b", a bf16 "a" and an f64 "c" stand as c, b, a: 8, 4 and 2 bytes an element.
// Since sizes of elements are powers of two and larger ones come first, each is aligned for its
// own.
struct SafetensorsOrder {
  std::string header;                  // Bytes before the data. Empty: over the format's limit.
  std::vector<std::uint64_t> offsets;  // In the file, by position in `tensors`.
  std::vector<bool> held;              // False: a dtype or key that the format lacks.
};
// Shared by the index, which stores the header, and by views and exports that must show the same
// file. O(n log n) in the number of tensors.
// `metadata`: entries of the header's metadata besides "format".
Result<SafetensorsOrder> LayOutSafetensors(std::span<const TensorMeta* const> tensors,
                                           std::map<std::string, std::string> metadata = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_SAFETENSORS_ORDER_H_
