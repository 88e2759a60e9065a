// SPDX-License-Identifier: Apache-2.0
// Parses names of slices: "w[0:16,:]".
#include "fs/views/slice_name.h"

namespace tensormount::fs {

std::optional<SliceName> ParseSliceName(std::string_view name) {
  SliceName parsed;
  constexpr std::string_view kNpy = ".npy";
  if (name.ends_with(kNpy)) {
    name.remove_suffix(kNpy.size());
    parsed.npy = true;
  }
  // The last bracket opens the slice, so keys may contain brackets ("a[0]b[1:2]" is a slice of
  // "a[0]b").
  if (name.ends_with(']')) {
    const std::size_t open = name.rfind('[');
    if (open == std::string_view::npos) return std::nullopt;
    parsed.stem = name.substr(0, open);
    parsed.slice = name.substr(open + 1, name.size() - open - 2);
    return parsed;
  }
  // An '@' of a key is escaped, so the only '@' begins the slice.
  const std::size_t at = name.find('@');
  if (at == std::string_view::npos) return std::nullopt;
  parsed.stem = name.substr(0, at);
  parsed.slice = name.substr(at + 1);
  return parsed;
}

std::string SliceText(const Box& box) {
  std::string text = "[";
  for (int a = 0; a < box.rank(); ++a) {
    if (a > 0) text += ',';
    text += std::to_string(box.begin(a)) + ':' + std::to_string(box.end(a));
  }
  return text + ']';
}

}  // namespace tensormount::fs
