// SPDX-License-Identifier: Apache-2.0
// The picture of layout_model.cc in characters of a terminal (layout.h).
#include <algorithm>

#include <fmt/core.h>

#include "base/counted.h"
#include "fs/pictures/layout.h"

namespace tensormount::fs {
namespace {

// Wider or higher pictures show no more and scroll away.
constexpr int kMostWidth = 72;  // Cells of a picture.
constexpr int kMostHeight = 24;
constexpr std::size_t kMostTextLegend = 32;
constexpr std::size_t kMostTextPanels = 4;

// Which lines meet in a character: left, right, up, down.
// The index is the sum of 1, 2, 4 and 8 for these.
constexpr const char* kLines[16] = {" ", "╴", "╶", "─", "╵", "┘", "└", "┴",
                                    "╷", "┐", "┌", "┬", "│", "┤", "├", "┼"};
// Of 256 terminal colours, light ones, on which black can be read.
constexpr int kPalette[] = {117, 215, 157, 218, 229, 183, 123, 180, 152, 211, 194, 189};

// A panel as lines of text. The picture is a raster of cells; a character stands at each corner of
// four cells, so that lines between them can be drawn with box-drawing characters, and inside of a
// rectangle corners are spaces that a name is written into. Worked out once, in the constructor:
// the size, from the shape and the width of the terminal.
class PanelText {
 public:
  PanelText(const Layout& layout, const LayoutPanel& panel, int width, bool colours)
      : layout_(layout),
        panel_(panel),
        colours_(colours),
        row_edges_(RowEdges(layout.picture, panel)),
        column_edges_(ColumnEdges(layout.picture, panel)) {
    const LayoutPicture& picture = layout.picture;
    for (const std::int64_t edge : row_edges_) {
      margin_ = std::max(margin_, static_cast<int>(std::to_string(edge).size()));
    }
    if (picture.row_label.empty()) margin_ = 0;
    // Characters are twice as high as wide.
    width_ = std::clamp(width - margin_ - 2, 16, kMostWidth);
    const double shape = static_cast<double>(picture.rows) / static_cast<double>(picture.columns);
    if (picture.row_label.empty()) {
      height_ = 2;
    } else {
      if (shape > 4) width_ = std::min(width_, 40);
      // Two lines a part at least, so that a name fits between its lines.
      const auto parts = static_cast<double>(row_edges_.size() - 1);
      height_ = static_cast<int>(std::clamp(std::max(width_ * shape / 2, 2 * parts), 4.0,
                                            static_cast<double>(kMostHeight)));
    }
  }

  // Columns get 6 cells a part where there is room: a line and "rank 3".
  std::string Draw() {
    const LayoutScale rows(row_edges_, layout_.picture.rows, height_, 2);
    const LayoutScale columns(column_edges_, layout_.picture.columns, width_, 6);
    raster_ = Rasterize(panel_, rows, columns, height_, width_);
    Letter(rows, columns);
    std::string text;
    if (!panel_.title.empty()) text += panel_.title + "\n";
    text += std::string(Margin(), ' ') + Ruler(columns) + "\n";
    for (int y = 0; y <= height_; ++y) {
      text += RowLabel(rows, y);
      for (int x = 0; x <= width_; ++x) text += Character(y, x);
      while (text.back() == ' ') text.pop_back();
      text += "\n";
    }
    const std::size_t hidden = Hidden();
    if (hidden > 0) {
      text += fmt::format("{} of {} boxes are too small to be seen\n", hidden, panel_.rects.size());
    }
    return text;
  }

 private:
  std::size_t Margin() const { return static_cast<std::size_t>(margin_ == 0 ? 0 : margin_ + 1); }

  // Rectangles that no cell shows, told below the picture rather than passed over.
  std::size_t Hidden() const {
    std::vector<bool> seen(panel_.rects.size());
    for (const int rect : raster_.cells) {
      if (rect >= 0) seen[static_cast<std::size_t>(rect)] = true;
    }
    return static_cast<std::size_t>(std::count(seen.begin(), seen.end(), false));
  }

  // Numbers of column edges, those that would touch the one before left out.
  std::string Ruler(const LayoutScale& columns) const {
    std::string line;
    for (const std::int64_t edge : columns.edges()) {
      const auto at = static_cast<std::size_t>(columns.At(edge));
      const std::string number = std::to_string(edge);
      if (!line.empty() && at < line.size() + 1) continue;
      line.resize(at, ' ');
      line += number;
    }
    return line;
  }

  std::string RowLabel(const LayoutScale& rows, int y) const {
    if (margin_ == 0) return "";
    if (y == height_) return fmt::format("{:>{}} ", rows.edges().back(), margin_);
    for (const std::int64_t edge : rows.edges()) {
      if (rows.At(edge) == y) return fmt::format("{:>{}} ", edge, margin_);
    }
    return std::string(Margin(), ' ');
  }

  // What a cell belongs to; negative for what is no rectangle (LayoutRaster::At).
  int Group(int y, int x) const {
    const int rect = raster_.At(y, x);
    return rect < 0 ? rect : static_cast<int>(panel_.rects[static_cast<std::size_t>(rect)].group);
  }

  // The character at a corner of four cells: lines between cells of two groups, or a letter.
  std::string Character(int y, int x) const {
    // A line is drawn between cells of two groups; what is outside of the picture, or held by
    // nobody, is a group of its own.
    const int up_left = Group(y - 1, x - 1);
    const int up_right = Group(y - 1, x);
    const int down_left = Group(y, x - 1);
    const int down_right = Group(y, x);
    const unsigned lines = (up_left != down_left ? 1U : 0U) | (up_right != down_right ? 2U : 0U) |
                           (up_left != up_right ? 4U : 0U) | (down_left != down_right ? 8U : 0U);
    if (lines != 0) return kLines[lines];
    const int rect = raster_.At(y, x);
    // Elements in no chunk, of foreign checkpoints with holes.
    if (rect < 0) return "░";
    const char letter = letters_[static_cast<std::size_t>(y * (width_ + 1) + x)];
    if (!colours_) return std::string(1, letter);
    const std::size_t holder =
        layout_.chunks[panel_.rects[static_cast<std::size_t>(rect)].chunk].holder;
    return fmt::format("\033[30;48;5;{}m{}\033[0m", kPalette[holder % std::size(kPalette)], letter);
  }

  // A name in the middle of every rectangle that has room for one.
  void Letter(const LayoutScale& rows, const LayoutScale& columns) {
    letters_.assign(static_cast<std::size_t>((height_ + 1) * (width_ + 1)), ' ');
    std::size_t last_group = panel_.rects.size() + layout_.chunks.size();
    for (const LayoutRect& rect : panel_.rects) {
      if (rect.group == last_group) continue;  // The boxes of a run: its first one has it.
      const int top = rows.At(rect.row_begin) + 1;
      const int bottom = rows.At(rect.row_end) - 1;
      const int left = columns.At(rect.column_begin) + 1;
      const int right = columns.At(rect.column_end) - 1;
      const std::size_t number = layout_.chunks[rect.chunk].holder;
      const LayoutHolder& holder = layout_.holders[number];
      std::string name = holder.kind == LayoutHolder::Kind::kFile ? "" : holder.name;
      const auto room = static_cast<std::size_t>(std::max(0, right - left + 1));
      if (name.empty() || name.size() > room) name = holder.Short(number);
      if (top > bottom || name.size() > room) continue;
      last_group = rect.group;
      const std::size_t start =
          static_cast<std::size_t>((top + bottom) / 2) * static_cast<std::size_t>(width_ + 1) +
          static_cast<std::size_t>(left) + (room - name.size()) / 2;
      letters_.replace(start, name.size(), name);
    }
  }

  const Layout& layout_;
  const LayoutPanel& panel_;
  const bool colours_;
  const std::vector<std::int64_t> row_edges_;
  const std::vector<std::int64_t> column_edges_;
  int margin_ = 0;
  int width_ = 0;
  int height_ = 0;
  LayoutRaster raster_;
  std::string letters_;
};

// Pointers to members, so that rows and columns share it.
std::vector<std::int64_t> Edges(const LayoutPanel& panel, std::int64_t extent,
                                std::int64_t LayoutRect::*begin, std::int64_t LayoutRect::*end) {
  std::vector<std::int64_t> edges = {0, extent};
  for (const LayoutRect& rect : panel.rects) {
    edges.push_back(rect.*begin);
    edges.push_back(rect.*end);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  return edges;
}

// Columns as wide as their longest entry among the rows that are shown.
std::string TableText(const Layout& layout, std::size_t most, std::size_t columns) {
  std::size_t region = 3;
  std::size_t holder = 4;
  std::size_t file = 4;
  std::size_t offset = 6;
  std::size_t bytes = 5;
  const std::size_t rows = std::min(most, layout.chunks.size());
  for (std::size_t i = 0; i < rows; ++i) {
    const LayoutChunk& chunk = layout.chunks[i];
    region = std::max(region, chunk.region.size());
    if (layout.holders[chunk.holder].kind != LayoutHolder::Kind::kFile) {
      holder = std::max(holder, layout.holders[chunk.holder].name.size());
    }
    file = std::max(file, chunk.file.size());
    offset = std::max(offset, std::to_string(chunk.offset).size());
    bytes = std::max(bytes, std::to_string(chunk.length).size());
  }
  // Two lines a chunk, the second indented, where one would be broken by the terminal.
  const bool wide = region + holder + file + offset + bytes + 8 <= columns;
  const auto row = [&](const std::string& box, const std::string& from, const std::string& in,
                       const std::string& at, const std::string& length, const std::string& more) {
    std::string line = fmt::format("{:<{}}  {:<{}}", box, region, from, holder);
    while (!wide && line.ends_with(' ')) line.pop_back();
    line += wide ? "  " : "\n    ";
    return line +
           fmt::format("{:<{}}  {:>{}}  {:>{}}{}\n", in, file, at, offset, length, bytes, more);
  };
  std::string text = row("box", "from", "file", "offset", "bytes", "");
  for (std::size_t i = 0; i < rows; ++i) {
    const LayoutChunk& chunk = layout.chunks[i];
    const LayoutHolder& from = layout.holders[chunk.holder];
    const std::string who =
        from.kind == LayoutHolder::Kind::kFile ? from.Short(chunk.holder) : from.name;
    std::string more;
    if (chunk.strides.rank() > 0) more += "  strided " + chunk.strides.ToString();
    if (chunk.hash.empty()) more += "  no hash";
    text += row(chunk.region, who, chunk.file, std::to_string(chunk.offset),
                std::to_string(chunk.length), more);
  }
  if (rows < layout.chunks.size()) {
    text += fmt::format("... and {} chunks more (-v, --json and --html have all)\n",
                        layout.chunks.size() - rows);
  }
  return text;
}

}  // namespace

LayoutScale::LayoutScale(std::vector<std::int64_t> edges, std::int64_t extent, int cells, int least)
    : edges_(std::move(edges)) {
  const auto parts = static_cast<int>(edges_.size()) - 1;
  // Where even two cells a part do not fit, sizes alone count, and small parts vanish.
  const int reserved = parts * least <= cells ? least : (parts * 2 <= cells ? 2 : 0);
  const int rest = cells - parts * reserved;
  for (std::size_t i = 0; i < edges_.size(); ++i) {
    const double part =
        extent == 0 ? 0 : static_cast<double>(edges_[i]) / static_cast<double>(extent);
    cells_.push_back(static_cast<int>(i) * reserved + static_cast<int>(part * rest + 0.5));
  }
}

int LayoutScale::At(std::int64_t edge) const {
  const auto at = std::lower_bound(edges_.begin(), edges_.end(), edge);
  return at == edges_.end() ? cells_.back() : cells_[static_cast<std::size_t>(at - edges_.begin())];
}

std::vector<std::int64_t> RowEdges(const LayoutPicture& picture, const LayoutPanel& panel) {
  return Edges(panel, picture.rows, &LayoutRect::row_begin, &LayoutRect::row_end);
}

std::vector<std::int64_t> ColumnEdges(const LayoutPicture& picture, const LayoutPanel& panel) {
  return Edges(panel, picture.columns, &LayoutRect::column_begin, &LayoutRect::column_end);
}

LayoutRaster Rasterize(const LayoutPanel& panel, const LayoutScale& rows,
                       const LayoutScale& columns, int height, int width) {
  LayoutRaster raster{.height = height, .width = width, .cells = {}};
  raster.cells.assign(static_cast<std::size_t>(height) * static_cast<std::size_t>(width), -1);
  for (std::size_t i = 0; i < panel.rects.size(); ++i) {
    const LayoutRect& rect = panel.rects[i];
    for (int y = rows.At(rect.row_begin); y < std::min(height, rows.At(rect.row_end)); ++y) {
      for (int x = columns.At(rect.column_begin); x < std::min(width, columns.At(rect.column_end));
           ++x) {
        raster.cells[static_cast<std::size_t>(y) * static_cast<std::size_t>(width) +
                     static_cast<std::size_t>(x)] = static_cast<int>(i);
      }
    }
  }
  return raster;
}

std::string LayoutText(const Layout& layout, int columns, bool colours, std::size_t table_rows) {
  const LayoutPicture& picture = layout.picture;
  std::string text = fmt::format("{}  {} {}  {}\n{} in {} of {}", layout.key, layout.dtype,
                                 layout.shape.ToString(), HumanBytes(layout.bytes),
                                 Counted(layout.chunks.size(), "chunk"),
                                 Counted(layout.files, "file"), layout.source);
  if (layout.covered < layout.elements) {
    text += fmt::format("; {} of {} elements are in no chunk", layout.elements - layout.covered,
                        layout.elements);
  }
  text += "\n";
  if (!layout.layer_note.empty()) text += layout.layer_note + "\n";
  if (!picture.row_label.empty()) {
    text += fmt::format("down: {}, across: {}\n", picture.row_label, picture.column_label);
  }
  for (const std::string& note : picture.notes) text += note + "\n";
  if (layout.elements > 0) {
    text += "\n";
    const std::size_t panels = std::min(kMostTextPanels, picture.panels.size());
    for (std::size_t i = 0; i < panels; ++i) {
      text += PanelText(layout, picture.panels[i], columns, colours).Draw();
    }
    const std::uint64_t left = picture.panels_left_out + picture.panels.size() - panels;
    if (left > 0) text += fmt::format("... and {} pictures more\n", left);
  }
  text += "\n";
  for (std::size_t i = 0; i < std::min(kMostTextLegend, layout.holders.size()); ++i) {
    const LayoutHolder& h = layout.holders[i];
    const std::string mark = h.kind == LayoutHolder::Kind::kFile ? h.Short(i) + " " : "";
    text += fmt::format("{}{}: {} {}, {}\n", mark, h.name, h.chunks,
                        h.chunks == 1 ? "chunk" : "chunks", HumanBytes(h.bytes));
  }
  if (layout.holders.size() > kMostTextLegend) {
    text += fmt::format("... and {} more\n", layout.holders.size() - kMostTextLegend);
  }
  if (!layout.chunks.empty())
    text += "\n" + TableText(layout, table_rows, static_cast<std::size_t>(std::max(columns, 1)));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

}  // namespace tensormount::fs
