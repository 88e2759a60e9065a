// SPDX-License-Identifier: Apache-2.0
// Renders the picture of layout_model.cc with terminal characters (layout.h).
#include <algorithm>

#include <fmt/core.h>

#include "base/counted.h"
#include "fs/pictures/layout.h"

namespace tensormount::fs {
namespace {

// Largest picture in cells; a larger one would not show more, and would scroll away.
constexpr int kMostWidth = 72;
constexpr int kMostHeight = 24;
constexpr std::size_t kMostTextLegend = 32;
constexpr std::size_t kMostTextPanels = 4;

// Box-drawing characters, by the lines that meet in the character. The index is the sum of 1
// (left), 2 (right), 4 (up) and 8 (down).
constexpr const char* kLines[16] = {" ", "╴", "╶", "─", "╵", "┘", "└", "┴",
                                    "╷", "┐", "┌", "┬", "│", "┤", "├", "┼"};
// Light colours of the 256-colour palette, readable under black text.
constexpr int kPalette[] = {117, 215, 157, 218, 229, 183, 123, 180, 152, 211, 194, 189};

// Draws a panel as lines of text, from a raster of cells. Each corner of four cells is a character:
// a box-drawing line if the cells are in different groups, else a space or a character of a name.
// The constructor chooses the size by the shape and the width of the terminal.
class PanelText {
 public:
  PanelText(const ChunkMap& layout, const ChunkMapPanel& panel, int width, bool colours)
      : layout_(layout),
        panel_(panel),
        colours_(colours),
        row_edges_(RowEdges(layout.picture, panel)),
        column_edges_(ColumnEdges(layout.picture, panel)) {
    const ChunkMapPicture& picture = layout.picture;
    for (const std::int64_t edge : row_edges_) {
      margin_ = std::max(margin_, static_cast<int>(std::to_string(edge).size()));
    }
    if (picture.row_label.empty()) margin_ = 0;
    // A character is twice as high as wide, so the height is half the width times the shape.
    width_ = std::clamp(width - margin_ - 2, 16, kMostWidth);
    const double shape = static_cast<double>(picture.rows) / static_cast<double>(picture.columns);
    if (picture.row_label.empty()) {
      height_ = 2;
    } else {
      if (shape > 4) width_ = std::min(width_, 40);
      // Each part between two edges gets at least two lines of cells, so that a name fits between
      // its borders.
      const auto parts = static_cast<double>(row_edges_.size() - 1);
      height_ = static_cast<int>(std::clamp(std::max(width_ * shape / 2, 2 * parts), 4.0,
                                            static_cast<double>(kMostHeight)));
    }
  }

  // Each part of the columns gets at least 6 cells, enough for "rank 3", if the width suffices for
  // all parts.
  std::string Draw() {
    const ChunkMapScale rows(row_edges_, layout_.picture.rows, height_, 2);
    const ChunkMapScale columns(column_edges_, layout_.picture.columns, width_, 6);
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

  // Number of rectangles that cover no cell; a line below the picture reports it.
  std::size_t Hidden() const {
    std::vector<bool> seen(panel_.rects.size());
    for (const int rect : raster_.cells) {
      if (rect >= 0) seen[static_cast<std::size_t>(rect)] = true;
    }
    return static_cast<std::size_t>(std::count(seen.begin(), seen.end(), false));
  }

  // A line with the numbers of the column edges; a number that would touch the one before is
  // omitted.
  std::string Ruler(const ChunkMapScale& columns) const {
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

  std::string RowLabel(const ChunkMapScale& rows, int y) const {
    if (margin_ == 0) return "";
    if (y == height_) return fmt::format("{:>{}} ", rows.edges().back(), margin_);
    for (const std::int64_t edge : rows.edges()) {
      if (rows.At(edge) == y) return fmt::format("{:>{}} ", edge, margin_);
    }
    return std::string(Margin(), ' ');
  }

  // The group of the rectangle in a cell; negative for cells without a rectangle
  // (ChunkMapRaster::At).
  int Group(int y, int x) const {
    const int rect = raster_.At(y, x);
    return rect < 0 ? rect : static_cast<int>(panel_.rects[static_cast<std::size_t>(rect)].group);
  }

  // The character at a corner of four cells: a line if they are in different groups, else a
  // character of letters_.
  std::string Character(int y, int x) const {
    // Cells outside of the picture, and cells without a rectangle, count as groups of their own.
    const int up_left = Group(y - 1, x - 1);
    const int up_right = Group(y - 1, x);
    const int down_left = Group(y, x - 1);
    const int down_right = Group(y, x);
    const unsigned lines = (up_left != down_left ? 1U : 0U) | (up_right != down_right ? 2U : 0U) |
                           (up_left != up_right ? 4U : 0U) | (down_left != down_right ? 8U : 0U);
    if (lines != 0) return kLines[lines];
    const int rect = raster_.At(y, x);
    // The elements are in no chunk: a foreign checkpoint lacks them.
    if (rect < 0) return "░";
    const char letter = letters_[static_cast<std::size_t>(y * (width_ + 1) + x)];
    if (!colours_) return std::string(1, letter);
    const std::size_t holder =
        layout_.chunks[panel_.rects[static_cast<std::size_t>(rect)].chunk].holder;
    return fmt::format("\033[30;48;5;{}m{}\033[0m", kPalette[holder % std::size(kPalette)], letter);
  }

  // Fills letters_ with the names of holders, in the middle of rectangles that are large enough.
  void Letter(const ChunkMapScale& rows, const ChunkMapScale& columns) {
    letters_.assign(static_cast<std::size_t>((height_ + 1) * (width_ + 1)), ' ');
    std::size_t last_group = panel_.rects.size() + layout_.chunks.size();
    for (const ChunkMapRect& rect : panel_.rects) {
      // Of consecutive rectangles of one group only the first that is large enough gets a name.
      if (rect.group == last_group) continue;
      const int top = rows.At(rect.row_begin) + 1;
      const int bottom = rows.At(rect.row_end) - 1;
      const int left = columns.At(rect.column_begin) + 1;
      const int right = columns.At(rect.column_end) - 1;
      const std::size_t number = layout_.chunks[rect.chunk].holder;
      const ChunkMapHolder& holder = layout_.holders[number];
      std::string name = holder.kind == ChunkMapHolder::Kind::kFile ? "" : holder.name;
      const auto room = static_cast<std::size_t>(std::max(0, right - left + 1));
      if (name.empty() || name.size() > room) name = holder.ShortLabel(number);
      if (top > bottom || name.size() > room) continue;
      last_group = rect.group;
      const std::size_t start =
          static_cast<std::size_t>((top + bottom) / 2) * static_cast<std::size_t>(width_ + 1) +
          static_cast<std::size_t>(left) + (room - name.size()) / 2;
      letters_.replace(start, name.size(), name);
    }
  }

  const ChunkMap& layout_;
  const ChunkMapPanel& panel_;
  const bool colours_;
  const std::vector<std::int64_t> row_edges_;
  const std::vector<std::int64_t> column_edges_;
  int margin_ = 0;
  int width_ = 0;
  int height_ = 0;
  ChunkMapRaster raster_;
  std::string letters_;
};

// The edges of all rectangles on one axis. `begin` and `end`: members of the axis.
std::vector<std::int64_t> Edges(const ChunkMapPanel& panel, std::int64_t extent,
                                std::int64_t ChunkMapRect::*begin,
                                std::int64_t ChunkMapRect::*end) {
  std::vector<std::int64_t> edges = {0, extent};
  for (const ChunkMapRect& rect : panel.rects) {
    edges.push_back(rect.*begin);
    edges.push_back(rect.*end);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  return edges;
}

// The table of chunks, at most `most`. Each column is as wide as its longest entry.
std::string TableText(const ChunkMap& layout, std::size_t most, std::size_t columns) {
  std::size_t region = 3;
  std::size_t holder = 4;
  std::size_t file = 4;
  std::size_t offset = 6;
  std::size_t bytes = 5;
  const std::size_t rows = std::min(most, layout.chunks.size());
  for (std::size_t i = 0; i < rows; ++i) {
    const ChunkMapEntry& chunk = layout.chunks[i];
    region = std::max(region, chunk.region.size());
    if (layout.holders[chunk.holder].kind != ChunkMapHolder::Kind::kFile) {
      holder = std::max(holder, layout.holders[chunk.holder].name.size());
    }
    file = std::max(file, chunk.file.size());
    offset = std::max(offset, std::to_string(chunk.offset).size());
    bytes = std::max(bytes, std::to_string(chunk.length).size());
  }
  // Whether an entry fits in one line of the terminal; if not, it gets two lines, the second
  // indented.
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
    const ChunkMapEntry& chunk = layout.chunks[i];
    const ChunkMapHolder& from = layout.holders[chunk.holder];
    const std::string who =
        from.kind == ChunkMapHolder::Kind::kFile ? from.ShortLabel(chunk.holder) : from.name;
    std::string more;
    if (chunk.strides.rank() > 0) more += "  strided " + chunk.strides.ToString();
    if (chunk.hash.empty()) more += "  no hash";
    text += row(chunk.region, who, chunk.file, std::to_string(chunk.offset),
                std::to_string(chunk.length), more);
  }
  if (rows < layout.chunks.size()) {
    text += fmt::format("... and {} more chunks (-v, --json and --html show all)\n",
                        layout.chunks.size() - rows);
  }
  return text;
}

}  // namespace

ChunkMapScale::ChunkMapScale(std::vector<std::int64_t> edges, std::int64_t extent, int cells,
                             int least)
    : edges_(std::move(edges)) {
  const auto parts = static_cast<int>(edges_.size()) - 1;
  // If the cells do not suffice for two per part, parts get cells only by size, and small parts
  // vanish.
  const int reserved = parts * least <= cells ? least : (parts * 2 <= cells ? 2 : 0);
  const int rest = cells - parts * reserved;
  for (std::size_t i = 0; i < edges_.size(); ++i) {
    const double part =
        extent == 0 ? 0 : static_cast<double>(edges_[i]) / static_cast<double>(extent);
    cells_.push_back(static_cast<int>(i) * reserved + static_cast<int>(part * rest + 0.5));
  }
}

int ChunkMapScale::At(std::int64_t edge) const {
  const auto at = std::lower_bound(edges_.begin(), edges_.end(), edge);
  return at == edges_.end() ? cells_.back() : cells_[static_cast<std::size_t>(at - edges_.begin())];
}

std::vector<std::int64_t> RowEdges(const ChunkMapPicture& picture, const ChunkMapPanel& panel) {
  return Edges(panel, picture.rows, &ChunkMapRect::row_begin, &ChunkMapRect::row_end);
}

std::vector<std::int64_t> ColumnEdges(const ChunkMapPicture& picture, const ChunkMapPanel& panel) {
  return Edges(panel, picture.columns, &ChunkMapRect::column_begin, &ChunkMapRect::column_end);
}

ChunkMapRaster Rasterize(const ChunkMapPanel& panel, const ChunkMapScale& rows,
                         const ChunkMapScale& columns, int height, int width) {
  ChunkMapRaster raster{.height = height, .width = width, .cells = {}};
  raster.cells.assign(static_cast<std::size_t>(height) * static_cast<std::size_t>(width), -1);
  for (std::size_t i = 0; i < panel.rects.size(); ++i) {
    const ChunkMapRect& rect = panel.rects[i];
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

std::string ChunkMapText(const ChunkMap& layout, int columns, bool colours,
                         std::size_t table_rows) {
  const ChunkMapPicture& picture = layout.picture;
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
    if (left > 0) text += fmt::format("... and {} more pictures\n", left);
  }
  text += "\n";
  for (std::size_t i = 0; i < std::min(kMostTextLegend, layout.holders.size()); ++i) {
    const ChunkMapHolder& h = layout.holders[i];
    const std::string mark = h.kind == ChunkMapHolder::Kind::kFile ? h.ShortLabel(i) + " " : "";
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
