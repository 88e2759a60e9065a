// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_SLICE_NAME_H_
#define TENSORMOUNT_FS_VIEWS_SLICE_NAME_H_

#include <optional>
#include <string>
#include <string_view>

#include "tensormount/box.h"

namespace tensormount::fs {

// The last name of a path below slices/: KEY[0:4,8], KEY@0:4,8, and both with ".npy" behind.
// The views point into the name.
struct SliceName {
  // The name that the key's file has below tensors/ (key_path.h), still escaped. Empty in a folder
  // "%+NAME", which stands for the key that NAME alone would name: "%+NAME/[0:4]" is "NAME[0:4]",
  // for names that would pass 255 bytes.
  std::string_view stem;
  std::string_view slice;  // Between the brackets or behind the '@': for ParseSlice. May be empty.
  bool npy = false;
};

// Nothing where the name has no slice. The stem and the slice are not looked at: escaped names of
// keys have neither '@' nor a bracket or ".npy" at their end, so there is one way to read a name.
std::optional<SliceName> ParseSliceName(std::string_view name);

// The one spelling that stands for all of a box: "[0:4,8:9]"; "[]" of a scalar. ParseSlice gives
// the box again.
std::string SliceText(const Box& box);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SLICE_NAME_H_
