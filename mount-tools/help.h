// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_HELP_H_
#define TENSORMOUNT_MOUNT_TOOLS_HELP_H_

#include <memory>
#include <string>
#include <string_view>

namespace CLI {
class FormatterBase;
}

namespace tensormount::tools {

// The width of the help, in columns.
inline constexpr std::size_t kColumns = 80;

// Breaks `text` between words into lines of at most kColumns columns, each ended by '\n'. The first
// line begins at column `at`, after text that is already printed; the others are indented by
// `indent` spaces. A word that is longer than a line is not broken. Line breaks in `text` are kept;
// the line after one is not indented. The text must be ASCII.
std::string Wrapped(std::string_view text, std::size_t at, std::size_t indent);

// Breaks a shell command between words, with a backslash at the end of each line except the last.
std::string WrappedCommand(std::string_view command, std::size_t indent);

// Formats the help of the command and its subcommands within kColumns.
std::shared_ptr<CLI::FormatterBase> MakeHelpFormatter();

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_HELP_H_
