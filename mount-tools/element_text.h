// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_ELEMENT_TEXT_H_
#define TENSORMOUNT_MOUNT_TOOLS_ELEMENT_TEXT_H_

#include <cstddef>
#include <string>

#include "tensormount/dtype.h"

// Apart from cat.cc, which knows boxes and files: here is all that depends on the type.
namespace tensormount::tools {

// One element as text: the shortest decimal that reads back to the same value for f32 and f64,
// exact values of the narrower floats, "1+2j" for complex numbers. Not for types under a byte.
// For `cat --as text`. `element` need not be aligned; bytes are little-endian, as they are stored.
// Text that reads back to the same bits, where there is such text, so that outputs can be compared.
std::string ElementText(DType dtype, const std::byte* element);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_ELEMENT_TEXT_H_
