// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_SHOWN_TEXT_H_
#define TENSORMOUNT_MOUNT_TOOLS_SHOWN_TEXT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "tensormount/common_value.h"

namespace tensormount::tools {

// Escapes text from outside (keys, file names, foreign metadata), so that it is safe to print.
// Control characters (also C1), direction marks, invisible characters and line separators become
// \n, \u001b, \u202e and so on; bytes that are not UTF-8 become \x9b and so on. JSON text keeps its
// value, because \n and \uXXXX are also escapes of JSON. `keep`: characters that are not escaped,
// such as "\n".
std::string ShownText(std::string_view text, std::string_view keep = {});

// A time in seconds since 1970 as "2026-11-22 21:15", in local time.
std::string DateText(std::int64_t seconds);
// The text of a common value in a list: as in common.json, cut between characters if it is long.
std::string ShortValue(const CommonValue& value);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_SHOWN_TEXT_H_
