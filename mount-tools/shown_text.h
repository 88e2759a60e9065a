// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_SHOWN_TEXT_H_
#define TENSORMOUNT_MOUNT_TOOLS_SHOWN_TEXT_H_

#include <string>
#include <string_view>

namespace tensormount::tools {

// Text of which parts came from outside (keys, names of files, what others wrote into metadata), so
// that it does nothing but show: control characters (C1 too), marks that turn the direction of
// text, invisible ones and line separators become \n, \u001b, \u202e and so on, bytes that are no
// UTF-8 \x9b. What JSON allows stays the same JSON. `keep`: control characters that stay, as "\n".
std::string ShownText(std::string_view text, std::string_view keep = {});

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_SHOWN_TEXT_H_
