// SPDX-License-Identifier: Apache-2.0
// `tensormount layout` (commands.h): options, and the choice between text, SVG and HTML, which
// fs/pictures draws.
// --svg and --html may be given together, and with --json; without any of them it is text.
#include "fs/pictures/layout.h"

#include <limits>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "mount-tools/commands.h"
#include "mount-tools/nearest.h"
#include "mount-tools/shown_text.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

using fs::Layout;
using fs::LayoutChunk;
using fs::LayoutHolder;

// Of the table below the picture; -v shows all.
constexpr std::size_t kTableRows = 40;

// The same as text: what came from outside does no more than show.
// SVG and HTML escape by themselves; JSON has all exactly.
Layout ShownLayout(Layout layout) {
  for (std::string* field : {&layout.source, &layout.key, &layout.layer_note}) {
    *field = ShownText(*field);
  }
  for (LayoutHolder& holder : layout.holders) holder.name = ShownText(holder.name);
  for (LayoutChunk& chunk : layout.chunks) chunk.file = ShownText(chunk.file);
  return layout;
}

}  // namespace

int RunLayout(const LayoutArgs& args, Terminal& terminal) {
  FileSystem& host = HostFileSystem();
  const auto opened = OpenSource(host, args.source, terminal);
  if (!opened.ok()) return terminal.Fail(opened.status());
  const auto layout = fs::DescribeLayout(*opened.value(), args.key);
  if (!layout.ok()) {
    return terminal.Fail(layout.status(), layout.status().code() == Code::kNotFound
                                              ? KeyHint(*opened.value(), args.source, args.key)
                                              : std::string());
  }
  // Also "-", which is standard output: then nothing else is printed there.
  const bool to_files = !args.svg.empty() || !args.html.empty();
  for (const bool svg : {true, false}) {
    const std::string& path = svg ? args.svg : args.html;
    if (path.empty()) continue;
    const std::string text = svg ? fs::LayoutSvg(layout.value()) : fs::LayoutHtml(layout.value());
    const Status written =
        path == "-" ? terminal.Write(text.data(), text.size()) : host.ReplaceFile(path, text);
    if (!written.ok()) return terminal.Fail(written);
    if (path != "-" && !terminal.json && !terminal.quiet) {
      terminal.Line(fmt::format("{}: {} of {}, {}", path,
                                Counted(layout.value().chunks.size(), "chunk"), args.key,
                                HumanBytes(text.size())));
    }
  }
  if (terminal.json) {
    terminal.Json(fs::LayoutJson(layout.value()));
  } else if (!to_files) {
    terminal.Text(
        fs::LayoutText(ShownLayout(layout.value()), Terminal::Columns(), terminal.colours(),
                   terminal.verbose ? std::numeric_limits<std::size_t>::max() : kTableRows));
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
