// SPDX-License-Identifier: Apache-2.0
// The picture of layout_model.cc as SVG and HTML (layout.h).
#include <algorithm>

#include <fmt/core.h>

#include "base/counted.h"
#include "fs/pictures/layout.h"
#include "shard/utf8.h"

namespace tensormount::fs {
namespace {

constexpr int kPictureWidth = 720;
constexpr int kPictureHeight = 520;
constexpr int kLegendWidth = 300;
constexpr int kMargin = 24;
constexpr int kAxis = 56;  // Pixels for the numbers of an axis.
constexpr std::size_t kMostSvgLegend = 32;
// A panel with more rectangles is drawn as cells.
constexpr std::size_t kMostSvgRects = 4000;
constexpr std::size_t kMostTableRows = 20000;

// Escapes text for XML and HTML; invalid UTF-8 becomes U+FFFD.
std::string Escape(std::string_view text) {
  const bool utf8 = IsUtf8(text);
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const auto byte = static_cast<unsigned char>(c);
    // U+FFFE and U+FFFF are valid UTF-8 but not XML characters.
    if (const std::string_view three = text.substr(i, 3);
        three == "\xEF\xBF\xBE" || three == "\xEF\xBF\xBF") {
      out += "\xEF\xBF\xBD";
      i += 2;
      continue;
    }
    if (byte < 0x20 || byte == 0x7F || (!utf8 && byte >= 0x80)) {
      out += "\xEF\xBF\xBD";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

// Keeps the end of a long text, which distinguishes it from others.
std::string Shorten(const std::string& text, std::size_t most) {
  if (text.size() <= most || !IsUtf8(text)) return text;
  std::size_t begin = text.size() - most;
  while (begin < text.size() && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) ++begin;
  return "…" + text.substr(begin);
}

// The colour of a holder, light enough for black text. Multiples of the golden angle, 137 degrees,
// make holders with near numbers look different. The colour depends only on the number.
std::string Colour(std::size_t holder) {
  static constexpr int kLightness[] = {74, 66, 82};
  return fmt::format("hsl({},62%,{}%)", (holder * 137 + 205) % 360, kLightness[holder / 5 % 3]);
}

std::string HolderText(const ChunkMapHolder& holder) {
  return fmt::format("{}: {}, {}", holder.name, Counted(holder.chunks, "chunk"),
                     HumanBytes(holder.bytes));
}

// Draws a layout as SVG, from the top down: heading, panels, legend. The <svg> element is added
// last, when its height is known. Coordinates are pixels of the viewBox. All external text passes
// through Escape().
class Svg {
 public:
  explicit Svg(const ChunkMap& layout) : layout_(layout) {}

  std::string Draw() {
    const int top = Heading();
    int bottom = top;
    const std::size_t panels = layout_.elements == 0 ? 0 : layout_.picture.panels.size();
    // Number of panels side by side: at most three, so that each is readable.
    const int across = panels <= 1 ? 1 : (panels <= 4 ? 2 : 3);
    const int width = kPictureWidth / across - kAxis - (across > 1 ? 8 : 0);
    const int height = PanelHeight(width, across);
    for (std::size_t i = 0; i < panels; ++i) {
      const int column = static_cast<int>(i) % across;
      const int row = static_cast<int>(i) / across;
      const int x = kMargin + column * (kPictureWidth / across) + kAxis;
      const int y = top + row * (height + kAxis) + 36;
      Panel(layout_.picture.panels[i], x, y, width, height);
      bottom = std::max(bottom, y + height);
    }
    bottom = std::max(bottom, Legend(kMargin + kPictureWidth + 32, top + 20));
    const int total_width = kMargin + kPictureWidth + 32 + kLegendWidth;
    const int total_height = bottom + kMargin;
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
               "height=\"{1}\" font-family=\"system-ui,sans-serif\" font-size=\"13\" "
               "role=\"img\">\n<title>Layout of {2}</title>\n"
               "<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n",
               total_width, total_height, Escape(layout_.key)) +
           body_ + "</svg>\n";
  }

 private:
  // Appends a text. `more`: attributes, which are not escaped.
  void Text(double x, double y, std::string_view text, std::string_view more = "") {
    body_ +=
        fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, more, Escape(text));
  }

  // Draws the heading and returns its bottom, where the panels begin.
  int Heading() {
    int y = kMargin + 6;
    Text(kMargin, y, Shorten(layout_.key, 90), "font-size=\"18\" font-weight=\"600\"");
    y += 20;
    std::string facts =
        fmt::format("{} {}, {}; {} in {} of {}", layout_.dtype, layout_.shape.ToString(),
                    HumanBytes(layout_.bytes), Counted(layout_.chunks.size(), "chunk"),
                    Counted(layout_.files, "file"), layout_.source);
    if (layout_.covered < layout_.elements) {
      facts += fmt::format("; {} of {} elements are in no chunk",
                           layout_.elements - layout_.covered, layout_.elements);
    }
    Text(kMargin, y, facts);
    std::vector<std::string> notes = layout_.picture.notes;
    if (!layout_.layer_note.empty()) notes.insert(notes.begin(), layout_.layer_note);
    if (layout_.picture.panels_left_out > 0) {
      notes.push_back(
          fmt::format("{} more pictures are not drawn", layout_.picture.panels_left_out));
    }
    for (const std::string& note : notes) Text(kMargin, y += 17, note, "fill=\"#555\"");
    return y + 12;
  }

  // The height of a panel: in proportion to the rows and columns, within limits, because [1, 50000]
  // would be a line and [50000, 8] a tower. Without rows the height is fixed.
  int PanelHeight(int width, int across) const {
    if (layout_.picture.row_label.empty()) return 72;
    const double shape = static_cast<double>(layout_.picture.rows) /
                         static_cast<double>(std::max<std::int64_t>(1, layout_.picture.columns));
    return static_cast<int>(std::clamp(
        width * shape, width * 0.3, static_cast<double>(kPictureHeight) / (across > 1 ? 1.6 : 1)));
  }

  // Position of a panel; X and Y map elements to pixels.
  struct Frame {
    double x, y, width, height;
    double rows, columns;
    double X(std::int64_t column) const {
      return x + static_cast<double>(column) / columns * width;
    }
    double Y(std::int64_t row) const { return y + static_cast<double>(row) / rows * height; }
  };

  void Panel(const ChunkMapPanel& panel, int x, int y, int width, int height) {
    const ChunkMapPicture& picture = layout_.picture;
    const Frame frame{.x = static_cast<double>(x),
                      .y = static_cast<double>(y),
                      .width = static_cast<double>(width),
                      .height = static_cast<double>(height),
                      .rows = static_cast<double>(picture.rows),
                      .columns = static_cast<double>(picture.columns)};
    // The grey background is visible where elements are in no chunk.
    body_ += fmt::format(
        "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"#eee\" stroke=\"#333\"/>\n", x,
        y, width, height);
    if (panel.rects.size() > kMostSvgRects) {
      Cells(panel, frame);
    } else {
      for (const ChunkMapRect& rect : panel.rects) Rect(rect, frame);
    }
    Axes(panel, frame);
    if (!panel.title.empty()) Text(x, y - 24, panel.title, "font-weight=\"600\"");
  }

  // The tooltip of a rectangle, escaped.
  std::string Tip(const ChunkMapRect& rect) const {
    const ChunkMapEntry& chunk = layout_.chunks[rect.chunk];
    const std::string& holder = layout_.holders[chunk.holder].name;
    std::string tip;
    if (rect.chunks > 1) {
      tip = fmt::format("{}: {} chunks drawn as one, from {}", holder, rect.chunks, chunk.region);
    } else {
      tip = fmt::format("{} of {}\n{} at {}, {} bytes{}\n{}", chunk.region, holder, chunk.file,
                        chunk.offset, chunk.length, chunk.strides.rank() > 0 ? ", strided" : "",
                        chunk.hash.empty() ? "no hash" : "hash " + chunk.hash);
    }
    std::string out;  // Line breaks are kept; Escape would replace them.
    for (std::size_t at = 0; at <= tip.size();) {
      const std::size_t end = std::min(tip.find('\n', at), tip.size());
      out += (at > 0 ? "&#10;" : "") + Escape(std::string_view(tip).substr(at, end - at));
      at = end + 1;
    }
    return out;
  }

  void Rect(const ChunkMapRect& rect, const Frame& frame) {
    const double x = frame.X(rect.column_begin);
    const double y = frame.Y(rect.row_begin);
    const double width = frame.X(rect.column_end) - x;
    const double height = frame.Y(rect.row_end) - y;
    const std::size_t number = layout_.chunks[rect.chunk].holder;
    // A box of a pixel or two has no outline, which would hide it, and every box is drawn at least
    // half a pixel wide, so that it does not vanish.
    const bool outlined = width >= 4 && height >= 4;
    body_ += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"{}>"
        "<title>{}</title></rect>\n",
        x, y, std::max(width, 0.5), std::max(height, 0.5), Colour(number),
        outlined ? " stroke=\"#333\" stroke-width=\"0.7\"" : "", Tip(rect));
    const ChunkMapHolder& holder = layout_.holders[number];
    // File names are long, so their number in the legend replaces them. Text widths are estimated
    // at 7.5 pixels a character.
    std::string name =
        holder.kind == ChunkMapHolder::Kind::kFile ? holder.ShortLabel(number) : holder.name;
    if (static_cast<double>(name.size()) * 7.5 > width - 4) name = holder.ShortLabel(number);
    if (height < 15 || static_cast<double>(name.size()) * 7.5 > width - 4) return;
    const std::string& region = layout_.chunks[rect.chunk].region;
    const bool two_lines =
        rect.chunks == 1 && height >= 34 && static_cast<double>(region.size()) * 6.5 < width - 8;
    const char* middle = "text-anchor=\"middle\" pointer-events=\"none\"";
    Text(x + width / 2, y + height / 2 + (two_lines ? -2 : 4.5), name, middle);
    if (two_lines) {
      Text(x + width / 2, y + height / 2 + 14, region,
           std::string(middle) + " font-size=\"11\" fill=\"#333\"");
    }
  }

  // Draws a panel with too many boxes as small cells.
  void Cells(const ChunkMapPanel& panel, const Frame& frame) {
    const int width = static_cast<int>(frame.width) / 3;
    const int height = static_cast<int>(frame.height) / 3;
    const ChunkMapScale rows(RowEdges(layout_.picture, panel), layout_.picture.rows, height, 0);
    const ChunkMapScale columns(ColumnEdges(layout_.picture, panel), layout_.picture.columns, width,
                                0);
    const ChunkMapRaster raster = Rasterize(panel, rows, columns, height, width);
    const auto holder = [&](int y, int x) {
      const int rect = raster.At(y, x);
      return rect < 0 ? layout_.holders.size()
                      : layout_.chunks[panel.rects[static_cast<std::size_t>(rect)].chunk].holder;
    };
    const double step_x = frame.width / width;
    const double step_y = frame.height / height;
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width;) {
        // A run of cells of one holder in a row becomes one rectangle.
        const std::size_t number = holder(y, x);
        int end = x + 1;
        while (end < width && holder(y, end) == number) ++end;
        if (number < layout_.holders.size()) {
          body_ += fmt::format(
              "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\">"
              "<title>{}</title></rect>\n",
              frame.x + x * step_x, frame.y + y * step_y, (end - x) * step_x, step_y,
              Colour(number), Escape(layout_.holders[number].name));
        }
        x = end;
      }
    }
    Text(frame.x, frame.y + frame.height + 14,
         fmt::format("{} boxes: the picture is reduced to {} x {} cells", panel.rects.size(),
                     height, width),
         "font-size=\"11\" fill=\"#555\"");
  }

  // Draws the edge numbers along the top and the left side, and the names of the axes.
  void Axes(const ChunkMapPanel& panel, const Frame& frame) {
    const ChunkMapPicture& picture = layout_.picture;
    const char* small = "font-size=\"11\" fill=\"#333\"";
    double last = -1e9;
    const std::vector<std::int64_t> columns = ColumnEdges(picture, panel);
    for (const std::int64_t edge : columns) {
      const double at = frame.X(edge);
      const bool end = edge == columns.back();
      // Omits numbers that would overlap the one before, or the last.
      const double need = 8 + 7.0 * static_cast<double>(std::to_string(edge).size());
      if (at < last + need || (!end && frame.x + frame.width < at + need)) continue;
      last = at;
      Text(at, frame.y - 5, std::to_string(edge), std::string(small) + " text-anchor=\"middle\"");
    }
    Text(frame.x + frame.width, frame.y - 20, picture.column_label + " →",
         "font-size=\"11\" fill=\"#555\" text-anchor=\"end\"");
    if (picture.row_label.empty()) return;
    last = -1e9;
    const std::vector<std::int64_t> rows = RowEdges(picture, panel);
    for (const std::int64_t edge : rows) {
      const double at = frame.Y(edge);
      const bool end = edge == rows.back();
      if (at < last + 13 || (!end && frame.y + frame.height < at + 13)) continue;
      last = at;
      Text(frame.x - 5, at + 4, std::to_string(edge), std::string(small) + " text-anchor=\"end\"");
    }
    Text(frame.x - kAxis, frame.y - 20, picture.row_label + " ↓", "font-size=\"11\" fill=\"#555\"");
  }

  // Draws the legend to the right of the panels; returns its bottom.
  int Legend(int x, int y) {
    Text(x, y, "Held by", "font-weight=\"600\"");
    for (std::size_t i = 0; i < std::min(kMostSvgLegend, layout_.holders.size()); ++i) {
      y += 20;
      const ChunkMapHolder& holder = layout_.holders[i];
      const bool file = holder.kind == ChunkMapHolder::Kind::kFile;
      body_ += fmt::format(
          "<rect x=\"{}\" y=\"{}\" width=\"14\" height=\"14\" fill=\"{}\" stroke=\"#333\" "
          "stroke-width=\"0.7\"/>\n",
          x, y - 11, Colour(i));
      ChunkMapHolder shown = holder;
      shown.name = (file ? holder.ShortLabel(i) + " " : "") + Shorten(holder.name, 28);
      Text(x + 20, y, HolderText(shown));
    }
    if (layout_.holders.size() > kMostSvgLegend) {
      Text(x, y += 20, fmt::format("and {} more", layout_.holders.size() - kMostSvgLegend));
    }
    return y;
  }

  const ChunkMap& layout_;
  std::string body_;
};

// Appends a row of the table of facts.
void Row(std::string& html, std::string_view name, std::string_view value) {
  html += fmt::format("<tr><th>{}</th><td>{}</td></tr>\n", Escape(name), Escape(value));
}

}  // namespace

std::string ChunkMapSvg(const ChunkMap& layout) { return Svg(layout).Draw(); }

std::string ChunkMapHtml(const ChunkMap& layout) {
  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<title>Layout of {}</title>\n<style>\n"
      "body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1120px; "
      "padding: 0 1em; color: #222; background: #fff }}\n"
      "table {{ border-collapse: collapse; margin: 1em 0 }}\n"
      "th, td {{ text-align: left; padding: .2em 1em .2em 0; border-bottom: 1px solid #ddd; "
      "vertical-align: top }}\n"
      "td.n {{ text-align: right; font-variant-numeric: tabular-nums }}\n"
      ".mono {{ font-family: ui-monospace, monospace; font-size: 13px; word-break: break-all }}\n"
      "svg {{ max-width: 100%; height: auto }}\n</style>\n</head>\n<body>\n<h1>{}</h1>\n<table>\n",
      Escape(layout.key), Escape(layout.key));
  Row(html, "Checkpoint", layout.source);
  Row(html, "Type and shape", layout.dtype + " " + layout.shape.ToString());
  Row(html, "Size", fmt::format("{} ({} bytes)", HumanBytes(layout.bytes), layout.bytes));
  Row(html, "Stored as",
      Counted(layout.chunks.size(), "chunk") + " in " + Counted(layout.files, "file"));
  if (layout.covered < layout.elements) {
    Row(html, "In no chunk",
        fmt::format("{} of {} elements", layout.elements - layout.covered, layout.elements));
  }
  if (!layout.layer_note.empty()) Row(html, "Layer", layout.layer_note);
  html += "</table>\n" + ChunkMapSvg(layout) + "<h2>Held by</h2>\n<table>\n";
  for (const ChunkMapHolder& holder : layout.holders) {
    Row(html, holder.name, Counted(holder.chunks, "chunk") + ", " + HumanBytes(holder.bytes));
  }
  html +=
      "</table>\n<h2>Chunks</h2>\n<table>\n<tr><th>Box</th><th>From</th><th>File</th>"
      "<th>Offset</th><th>Bytes</th><th>Form</th><th>Hash</th></tr>\n";
  for (std::size_t i = 0; i < std::min(kMostTableRows, layout.chunks.size()); ++i) {
    const ChunkMapEntry& chunk = layout.chunks[i];
    html += fmt::format(
        "<tr><td>{}</td><td>{}</td><td class=\"mono\">{}</td><td class=\"n\">{}</td>"
        "<td class=\"n\">{}</td><td>{}</td><td class=\"mono\">{}</td></tr>\n",
        Escape(chunk.region), Escape(layout.holders[chunk.holder].name), Escape(chunk.file),
        chunk.offset, chunk.length,
        chunk.strides.rank() > 0 ? "strides " + chunk.strides.ToString() : "packed",
        chunk.hash.empty() ? "none" : chunk.hash);
  }
  html += "</table>\n";
  if (layout.chunks.size() > kMostTableRows) {
    html += fmt::format("<p>and {} more chunks</p>\n", layout.chunks.size() - kMostTableRows);
  }
  return html + "</body>\n</html>\n";
}

}  // namespace tensormount::fs
