// SPDX-License-Identifier: Apache-2.0
// The order of tensors in a safetensors file: by falling element size, so that no tensor needs
// padding, which the format does not allow.
#include "index/records/safetensors_order.h"

#include <algorithm>

#include "shard/safetensors.h"

namespace tensormount {

bool CanStoreInSafetensors(DType dtype, std::string_view key) {
  // The format reserves "__metadata__".
  return !InfoOf(dtype).safetensors.empty() && key != "__metadata__";
}

bool CanStoreInSafetensors(const TensorMeta& tensor) {
  return CanStoreInSafetensors(tensor.dtype(), tensor.key());
}

Result<SafetensorsOrder> LayOutSafetensors(std::span<const TensorMeta* const> tensors,
                                           std::map<std::string, std::string> metadata) {
  SafetensorsOrder layout;
  layout.offsets.assign(tensors.size(), 0);
  layout.held.assign(tensors.size(), false);
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (CanStoreInSafetensors(tensors[i]->dtype(), tensors[i]->key())) order.push_back(i);
  }
  // Large elements come first: the format allows no gaps, and readers want aligned elements.
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return tensors[a]->bits() > tensors[b]->bits();
  });
  // Hugging Face readers refuse a file without the "format" entry.
  metadata["format"] = "pt";
  const auto write = [&]() -> Result<std::string> {
    SafetensorsHeaderWriter writer(order.size());
    TENSORMOUNT_RETURN_IF_ERROR(writer.AddMetadata(metadata));
    for (const std::size_t i : order) {
      const TensorMeta& tensor = *tensors[i];
      TENSORMOUNT_ASSIGN_OR_RETURN(layout.offsets[i],
                                   writer.Add(tensor.key(), tensor.dtype(), tensor.shape()));
    }
    return writer.Finish();
  };
  Result<std::string> header = write();
  if (!header.ok()) {
    if (header.status().code() != Code::kInvalidArgument) return header.status();
    layout.offsets.assign(tensors.size(), 0);  // The header exceeds the format's limit.
    return layout;
  }
  layout.header = std::move(header).value();
  for (const std::size_t i : order) {
    layout.offsets[i] += layout.header.size();
    layout.held[i] = true;
  }
  return layout;
}

}  // namespace tensormount
