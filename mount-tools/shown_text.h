// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_SHOWN_TEXT_H_
#define TENSORMOUNT_MOUNT_TOOLS_SHOWN_TEXT_H_

#include <string>
#include <string_view>

namespace tensormount::tools {

// Escapes text from outside (keys, file names, foreign metadata), so that it is safe to print.
// Control characters (also C1), direction marks, invisible characters and line separators become
// \n, \u001b, \u202e and so on; bytes that are not UTF-8 become \x9b and so on. JSON text keeps its
// value, because \n and \uXXXX are also escapes of JSON. `keep`: characters that are not escaped,
// such as "\n".
std::string ShownText(std::string_view text, std::string_view keep = {});

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_SHOWN_TEXT_H_
