// SPDX-License-Identifier: Apache-2.0
// `tensormount layout` (commands.h): options, and the choice between text, SVG and HTML, which
// fs/pictures draws. --svg and --html may be combined with each other and with --json; without them
// the output is text.
#include "fs/pictures/layout.h"

#include <limits>
#include <string>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/file_system_for.h"
#include "index/records/inventory.h"
#include "mount-tools/commands.h"
#include "mount-tools/nearest.h"
#include "mount-tools/shown_text.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

using fs::ChunkMap;
using fs::ChunkMapEntry;
using fs::ChunkMapHolder;

// Largest number of chunks in the table below the picture; -v shows all.
constexpr std::size_t kTableRows = 40;

// The layout with control characters in names escaped, for a terminal. SVG and HTML escape names
// themselves, and JSON has exact names.
ChunkMap PrintableChunkMap(ChunkMap layout) {
  for (std::string* field : {&layout.source, &layout.key, &layout.layer_note}) {
    *field = ShownText(*field);
  }
  for (ChunkMapHolder& holder : layout.holders) holder.name = ShownText(holder.name);
  for (ChunkMapEntry& chunk : layout.chunks) chunk.file = ShownText(chunk.file);
  return layout;
}

// Writes a file that the user named. If it exists, it is replaced as a whole.
Status ReplaceNamedFile(const std::string& path, const std::string& text) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(path));
  const Result<FileInfo> old = fs->Stat(path);
  if (!old.ok() && old.status().code() != Code::kNotFound) return old.status();
  if (old.ok() && old.value().kind != FileKind::kFile) {
    // If root named /dev/null, a rename would replace the device by a file.
    return {Code::kInvalidArgument, path + ": not a regular file, so it is not replaced"};
  }
  std::string to = path;
  if (old.ok()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(to, fs->Resolve(path));  // The file that a symlink names.
  }
  const std::string fresh = to + "." + Uuid::Random().Short();
  TENSORMOUNT_RETURN_IF_ERROR(fs->WriteFileDurably(fresh, text));
  const Status moved = old.ok() ? fs->Exchange(fresh, to) : fs->RenameNoReplace(fresh, to);
  if (old.ok() || !moved.ok()) (void)fs->RemoveFile(fresh);  // The old file, or the new one.
  return moved;
}

// Fails if two of --svg -, --html - and --json would mix on standard output.
Status CheckOneOutput(const LayoutArgs& args, const Terminal& terminal) {
  std::vector<std::string> outputs;
  if (args.svg == "-") outputs.emplace_back("--svg -");
  if (args.html == "-") outputs.emplace_back("--html -");
  if (terminal.json) outputs.emplace_back("--json");
  if (outputs.size() < 2) return {};
  return {Code::kInvalidArgument,
          fmt::format("layout: {} and {} both write to standard output; give {} a file name",
                      outputs[0], outputs[1], args.svg == "-" ? "--svg" : "--html")};
}

}  // namespace

int RunLayout(const LayoutArgs& args, Terminal& terminal) {
  if (const Status clear = CheckOneOutput(args, terminal); !clear.ok()) return terminal.Fail(clear);
  const auto opened = OpenSource(args.source, terminal);
  if (!opened.ok()) return terminal.Fail(opened.status());
  const auto layout = fs::DescribeChunkMap(*opened.value(), args.key);
  if (!layout.ok()) {
    return terminal.Fail(layout.status(), layout.status().code() == Code::kNotFound
                                              ? KeyHint(*opened.value(), args.source, args.key)
                                              : std::string());
  }
  // The path "-" means standard output; no line about such a file is printed.
  const bool to_files = !args.svg.empty() || !args.html.empty();
  for (const bool svg : {true, false}) {
    const std::string& path = svg ? args.svg : args.html;
    if (path.empty()) continue;
    const std::string text =
        svg ? fs::ChunkMapSvg(layout.value()) : fs::ChunkMapHtml(layout.value());
    const Status written =
        path == "-" ? terminal.Write(text.data(), text.size()) : ReplaceNamedFile(path, text);
    if (!written.ok()) return terminal.Fail(written);
    if (path != "-" && !terminal.json && !terminal.quiet) {
      terminal.Line(fmt::format("{}: {} of {}, {}", path,
                                Counted(layout.value().chunks.size(), "chunk"), args.key,
                                HumanBytes(text.size())));
    }
  }
  if (terminal.json) {
    terminal.Json(fs::ChunkMapJson(layout.value()));
  } else if (!to_files) {
    terminal.Text(
        fs::ChunkMapText(PrintableChunkMap(layout.value()), Terminal::Columns(), terminal.colours(),
                         terminal.verbose ? std::numeric_limits<std::size_t>::max() : kTableRows));
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
