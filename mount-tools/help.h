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

// Columns of a terminal that help and tables fit into.
inline constexpr std::size_t kColumns = 80;

// `text` broken between words into lines of at most kColumns columns, ended by '\n'. The first
// begins at column `at` (what stands before it is printed already), the others are indented by
// `indent` blanks. A word that is longer than a line is not broken. Line ends of `text` stay.
// ASCII.
std::string Wrapped(std::string_view text, std::size_t at, std::size_t indent);

// `command` broken between words where it is longer than a line, so that a shell reads it as one.
std::string WrappedCommand(std::string_view command, std::size_t indent);

// Help of the command and its subcommands, no line longer than kColumns.
std::shared_ptr<CLI::FormatterBase> MakeHelpFormatter();

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_HELP_H_
