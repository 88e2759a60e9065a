// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_ELEMENT_TEXT_H_
#define TENSORMOUNT_MOUNT_TOOLS_ELEMENT_TEXT_H_

#include <cstddef>
#include <string>

#include "tensormount/dtype.h"

namespace tensormount::tools {

// One element as text: the shortest decimal that reads back to the same value for f32 and f64,
// exact values of the narrower floats, "1+2j" for complex numbers. Not for types under a byte.
std::string ElementText(DType dtype, const std::byte* element);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_ELEMENT_TEXT_H_
