// SPDX-License-Identifier: Apache-2.0
// The format of --help (help.h): the sections of CLI11, wrapped to kColumns.
#include "mount-tools/help.h"

#include <vector>

#include <CLI/CLI.hpp>

namespace tensormount::tools {
namespace {

// The column at which descriptions begin. A name that ends less than two columns before it is on a
// line of its own.
constexpr std::size_t kDescriptions = 26;

class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_description(const CLI::App* app) const override {
    return Wrapped(app->get_description(), 0, 0);
  }

  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string usage = CLI::Formatter::make_usage(app, name);
    usage.erase(usage.find_last_not_of('\n') + 1);
    return Wrapped(usage, 0, 4);
  }

  std::string make_subcommand(const CLI::App* sub) const override {
    return Item(sub->get_name(), sub->get_description());
  }

  // The text of an option: name and type ("--ranks INT"), the description, then the range.
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    std::string type = option->get_option_text();
    std::string what = option->get_description();
    if (type.empty() && option->get_type_size() != 0) {
      // CLI11 puts a check after the type: "INT:INT in [1 - 4096]".
      type = option->get_type_name();
      const std::size_t check = type.find(':');
      const std::size_t range = type.find('[');
      if (check != std::string::npos && range != std::string::npos) {
        // The range is written without spaces, as in "[1..4096]", so that no line break falls
        // inside it.
        std::string limits = type.substr(range);
        const std::size_t dash = limits.find(" - ");
        if (dash != std::string::npos) limits.replace(dash, 3, "..");
        what += (what.empty() ? "" : " ") + limits;
      }
      type = type.substr(0, check);
      if (!option->get_default_str().empty()) type += "=" + option->get_default_str();
      // A positional argument gets no "(required)", because the usage line shows whether it is
      // required.
      if (option->get_required() && !is_positional) what += " (required)";
      if (is_positional && type == "TEXT") type.clear();
    }
    const std::string name =
        is_positional ? option->get_name(true, false) : option->get_name(false, true);
    return Item(type.empty() ? name : name + " " + type, what);
  }

  std::string make_footer(const CLI::App* app) const override {
    // The footer is "Example:", then a command on the next line.
    const std::string footer = app->get_footer();
    const std::size_t line = footer.find('\n');
    if (line == std::string::npos) return footer.empty() ? "" : Wrapped(footer, 0, 0);
    const std::size_t begin = footer.find_first_not_of(' ', line + 1);
    return footer.substr(0, line + 1) +
           WrappedCommand(begin == std::string::npos ? "" : std::string_view(footer).substr(begin),
                          2);
  }

 private:
  static std::string Item(const std::string& name, const std::string& what) {
    std::string line = "  " + name;
    if (what.empty()) return line + "\n";
    if (line.size() + 2 > kDescriptions) {
      line += "\n" + std::string(kDescriptions, ' ');
    } else {
      line.append(kDescriptions - line.size(), ' ');
    }
    return line + Wrapped(what, kDescriptions, kDescriptions);
  }
};

// Splits `text` at spaces, except within single quotes.
std::vector<std::string_view> ShellWords(std::string_view text) {
  std::vector<std::string_view> words;
  std::size_t begin = 0;
  bool quoted = false;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && text[i] == '\'') quoted = !quoted;
    if (i < text.size() && (quoted || text[i] != ' ')) continue;
    if (i > begin) words.push_back(text.substr(begin, i - begin));
    begin = i + 1;
  }
  return words;
}

}  // namespace

std::string Wrapped(std::string_view text, std::size_t at, std::size_t indent) {
  std::string out;
  bool empty = true;  // Whether the current line has no word yet.
  std::size_t i = 0;
  while (i < text.size()) {
    if (text[i] == '\n') {
      out += '\n';
      i += 1;
      at = 0;
      empty = true;
      continue;
    }
    if (text[i] == ' ') {
      i += 1;
      continue;
    }
    const std::string_view word = text.substr(i, text.find_first_of(" \n", i) - i);
    i += word.size();
    if (!empty && at + 1 + word.size() > kColumns) {
      out += '\n';
      out.append(indent, ' ');
      at = indent;
      empty = true;
    } else if (!empty) {
      out += ' ';
      at += 1;
    }
    out += word;
    at += word.size();
    empty = false;
  }
  return out + '\n';
}

std::string WrappedCommand(std::string_view command, std::size_t indent) {
  std::string out(indent, ' ');
  std::size_t at = indent;
  bool empty = true;
  for (const std::string_view word : ShellWords(command)) {
    // Each line but the last needs room for a space and a backslash at its end.
    if (!empty && at + 1 + word.size() + 2 > kColumns) {
      out += " \\\n";
      out.append(indent + 4, ' ');
      at = indent + 4;
    } else if (!empty) {
      out += ' ';
      at += 1;
    }
    out += word;
    at += word.size();
    empty = false;
  }
  return out + '\n';
}

std::shared_ptr<CLI::FormatterBase> MakeHelpFormatter() {
  return std::make_shared<HelpFormatter>();
}

}  // namespace tensormount::tools
