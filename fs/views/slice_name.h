// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_SLICE_NAME_H_
#define TENSORMOUNT_FS_VIEWS_SLICE_NAME_H_

#include <optional>
#include <string>
#include <string_view>

#include "tensormount/box.h"

namespace tensormount::fs {

// The parts of a file name below slices/: KEY[0:4,8] or KEY@0:4,8, maybe with ".npy". The
// string_views refer to the parsed name.
struct SliceName {
  // Name of the key's file below tensors/ (key_path.h), still escaped. It may be empty in a
  // directory "%+NAME", which stands for the key NAME: "%+NAME/[0:4]" means "NAME[0:4]", a name
  // that would exceed 255 bytes.
  std::string_view stem;
  // The text between the brackets or after the '@', which ParseSlice reads. It may be empty.
  std::string_view slice;
  bool npy = false;
};

// Splits a name; nullopt if it has no slice. The split is unambiguous, because escaped names of
// keys contain no '@' and do not end in a bracket or ".npy". The stem and the slice are not
// checked.
std::optional<SliceName> ParseSliceName(std::string_view name);

// The canonical text of a box, such as "[0:4,8:9]", or "[]" for a scalar. ParseSlice reads the text
// between the brackets.
std::string SliceText(const Box& box);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_SLICE_NAME_H_
