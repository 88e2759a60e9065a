// SPDX-License-Identifier: Apache-2.0
// `tensormount layout`: options, and the choice between text, SVG and HTML. The picture is made in
// layout_model.cc and drawn in the two others.
// --svg and --html may be given together, and with --json; without any of them it is text.
#include "mount-tools/layout.h"

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

using Json = nlohmann::ordered_json;

// Of the table below the picture; -v shows all.
constexpr std::size_t kTableRows = 40;

std::vector<std::int64_t> List(const Dims& dims) { return {dims.begin(), dims.end()}; }

Json LayoutJson(const Layout& layout) {
  // In the order of LayoutHolder::Kind.
  static constexpr const char* kKinds[] = {"rank", "part", "mount", "file"};
  Json json = {{"key", layout.key},           {"dtype", layout.dtype},
               {"shape", List(layout.shape)}, {"bytes", layout.bytes},
               {"checkpoint", layout.source}, {"files", layout.files},
               {"elements", layout.elements}, {"elements_in_chunks", layout.covered},
               {"holders", Json::array()},    {"chunks", Json::array()}};
  if (!layout.layer_note.empty()) json["layer"] = layout.layer_note;
  for (const LayoutHolder& holder : layout.holders) {
    Json item = {{"kind", kKinds[static_cast<std::size_t>(holder.kind)]},
                 {"name", holder.name},
                 {"chunks", holder.chunks},
                 {"bytes", holder.bytes}};
    const bool numbered =
        holder.kind == LayoutHolder::Kind::kRank || holder.kind == LayoutHolder::Kind::kPart;
    if (numbered) item["number"] = holder.number;
    json["holders"].push_back(std::move(item));
  }
  for (const LayoutChunk& chunk : layout.chunks) {
    Json item = {{"region", chunk.region}};
    for (const Box& box : chunk.boxes) {
      item["boxes"].push_back({{"begin", List(box.begin())}, {"extent", List(box.extent())}});
    }
    item["holder"] = chunk.holder;
    item["file"] = chunk.file;
    item["offset"] = chunk.offset;
    item["length"] = chunk.length;
    item["strided"] = chunk.strides.rank() > 0;
    if (chunk.strides.rank() > 0) item["strides"] = List(chunk.strides);
    if (!chunk.hash.empty()) item["hash"] = chunk.hash;
    json["chunks"].push_back(std::move(item));
  }
  return json;
}

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
  FileSystem& fs = HostFileSystem();
  const auto opened = OpenSource(fs, args.source, terminal);
  if (!opened.ok()) return terminal.Fail(opened.status());
  const auto layout = DescribeLayout(*opened.value(), args.key);
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
    const std::string text = svg ? LayoutSvg(layout.value()) : LayoutHtml(layout.value());
    const Status written =
        path == "-" ? terminal.Write(text.data(), text.size()) : fs.ReplaceFile(path, text);
    if (!written.ok()) return terminal.Fail(written);
    if (path != "-" && !terminal.json && !terminal.quiet) {
      terminal.Line(fmt::format("{}: {} of {}, {}", path,
                                Counted(layout.value().chunks.size(), "chunk"), args.key,
                                HumanBytes(text.size())));
    }
  }
  if (terminal.json) {
    terminal.Json(LayoutJson(layout.value()));
  } else if (!to_files) {
    terminal.Text(
        LayoutText(ShownLayout(layout.value()), Terminal::Columns(), terminal.colours(),
                   terminal.verbose ? std::numeric_limits<std::size_t>::max() : kTableRows));
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
