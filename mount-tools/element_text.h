// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_ELEMENT_TEXT_H_
#define TENSORMOUNT_MOUNT_TOOLS_ELEMENT_TEXT_H_

#include <cstddef>
#include <string>

#include "tensormount/dtype.h"

// Converts elements to text; cat.cc handles boxes and files.
namespace tensormount::tools {

// One element as text for `cat --as text`. For f32 and f64 it is the shortest decimal that reads
// back to the same value; narrower floats are written as f32, complex numbers as "1+2j". Types
// under a byte are not supported. `element` is little-endian and need not be aligned.
std::string ElementText(DType dtype, const std::byte* element);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_ELEMENT_TEXT_H_
