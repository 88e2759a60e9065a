// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_PICTURES_LAYOUT_H_
#define TENSORMOUNT_FS_PICTURES_LAYOUT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/box.h"
#include "tensormount/status.h"

#include "index/read/checkpoint.h"

// Pictures of which rank stored which part of a tensor, which `layout` shows as text, SVG and HTML.
// They depend on the checkpoint alone, so that pictures can be compared.
// DescribeChunkMap reads the index and makes an abstract picture (layout_model.cc); ChunkMapText,
// ChunkMapSvg, ChunkMapHtml and ChunkMapJson render it (layout_text.cc, layout_svg.cc,
// layout_json.cc). Only the text form depends on the terminal: its width and colours.

namespace tensormount::fs {

// The holder of chunks: who wrote them, judged by file names.
// kRank: a rank, by the name of the file or of the manifest that lists the chunk, or by the file
// names of DCP, OLMo-core and others. kPart: a numbered part of a Hugging Face model. kMount: a
// save through a mount. kFile: anything else.
struct ChunkMapHolder {
  enum class Kind { kRank, kPart, kMount, kFile };
  Kind kind = Kind::kFile;
  std::uint64_t number = 0;  // The number in `name`, for kRank and kPart.
  std::string name;          // "rank 3", "part 2", "mount 1f2e", or the file's name.
  std::uint64_t chunks = 0;
  std::uint64_t bytes = 0;
  // The shortest label, for small boxes: "3" for rank 3, and "#4" for the file with position
  // `in_legend` == 3 of the legend.
  std::string ShortLabel(std::size_t in_legend) const;
};

// One stored chunk of the tensor, for tables and tooltips. A ChunkMapRect is its rectangle in the
// picture.
struct ChunkMapEntry {
  // The region as in the index: "[0:4, 0:8]" or "[0:4, 0:8] flat 5:17". For a layer: its box within
  // the layer, or the first and last of its boxes.
  std::string region;
  std::vector<Box> boxes;  // The chunk's boxes in the shown tensor (or layer).
  std::size_t holder = 0;
  // Path below the checkpoint, or below a foreign checkpoint's directory. `offset` and `length` are
  // in this file.
  std::string file;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  Dims strides;      // Strides in bytes; empty: packed.
  std::string hash;  // Hash in hex; empty if the chunk has no hash.
};

// A rectangle of the picture: [row_begin, row_end) x [column_begin, column_end), in elements of the
// two drawn axes.
struct ChunkMapRect {
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t column_begin = 0;
  std::int64_t column_end = 0;
  std::size_t chunk = 0;   // The first of the chunks that it draws.
  std::size_t chunks = 1;  // Number of chunks that it draws, all of one holder.
  std::size_t group = 0;   // The text form draws no line between rectangles of one group.
};

// One picture of two axes. A tensor that is cut along a third axis has a panel for each part of
// that axis.
struct ChunkMapPanel {
  std::string title;  // "axis 0: 0:4"; empty if there is one panel.
  std::vector<ChunkMapRect> rects;
};

// The panels and what they share. `rows` and `columns` are the extents of the drawn axes, or 1 if
// fewer axes are drawn.
struct ChunkMapPicture {
  // Label of the rows, such as "axis 0" or "axes 0 to 1"; empty if no axis is drawn as rows.
  std::string row_label;
  std::string column_label;
  std::int64_t rows = 1;
  std::int64_t columns = 1;
  std::vector<ChunkMapPanel> panels;
  // Number of panels beyond the limit, which are not drawn.
  std::uint64_t panels_left_out = 0;
  std::vector<std::string> notes;  // Sentences about axes that are not drawn.
};

// Which chunks a tensor or layer consists of, and their picture, for all output forms.
struct ChunkMap {
  std::string source;  // Name of the checkpoint.
  std::string key;
  std::string dtype;
  Dims shape;
  std::uint64_t bytes = 0;
  std::string layer_note;  // A text like "layer 3 of w: ..."; empty for a tensor.
  std::uint64_t files = 0;
  // Number of elements of the tensor or layer.
  std::uint64_t elements = 0;
  // Number of elements in chunks; fewer than `elements` if a foreign checkpoint lacks data, which
  // all output forms mention.
  std::uint64_t covered = 0;
  std::vector<ChunkMapHolder> holders;  // Ranks by number, then parts, mounts and files.
  std::vector<ChunkMapEntry> chunks;
  // Not drawn if the tensor has no elements.
  ChunkMapPicture picture;
};

// Describes the tensor or layer named `key`, in O(chunks log chunks). kNotFound: the checkpoint has
// neither.
// For a layer of a stacked tensor, boxes are the parts of the chunks in this layer, but offsets and
// lengths are those of the whole chunks; layer_note says so.
Result<ChunkMap> DescribeChunkMap(const OpenedCheckpoint& checkpoint, const std::string& key);

// The holder of a chunk in `file`. `manifest`: the name of the manifest that lists the chunk; empty
// if unknown.
ChunkMapHolder HolderOf(const FileRecord& file, std::string_view manifest);

// The picture and a table as text, without a final line break. `columns`: width of the terminal;
// `colours`: whether it has colours; `table_rows`: largest number of chunks in the table.
std::string ChunkMapText(const ChunkMap& layout, int columns, bool colours, std::size_t table_rows);
// A complete SVG or HTML file. It has no scripts or external references, and all names are escaped,
// so it is safe to open even if the checkpoint is hostile.
std::string ChunkMapSvg(const ChunkMap& layout);
std::string ChunkMapHtml(const ChunkMap& layout);
// Every chunk with its file, offset, length and boxes, as JSON (docs/cli.md). Callers include
// <nlohmann/json.hpp>.
nlohmann::ordered_json ChunkMapJson(const ChunkMap& layout);

// A panel as cells. Each cell has the index of the rectangle that covers it, or -1. Cells outside
// of the raster count as -2, so that a border is drawn around the picture.
struct ChunkMapRaster {
  int height = 0;
  int width = 0;
  std::vector<int> cells;  // Row by row.
  int At(int y, int x) const {
    if (y < 0 || x < 0 || y >= height || x >= width) return -2;
    return cells[static_cast<std::size_t>(y) * static_cast<std::size_t>(width) +
                 static_cast<std::size_t>(x)];
  }
};
// Maps edges of rectangles to positions on a line of `cells` cells. Each part between two edges
// first gets `least` cells (or 2, or none, if the cells do not suffice for all parts), and the
// others are distributed by size. So a part of one row beside a part of a thousand rows does not
// vanish.
class ChunkMapScale {
 public:
  ChunkMapScale(std::vector<std::int64_t> edges, std::int64_t extent, int cells, int least);
  int At(std::int64_t edge) const;  // `edge` must be one of the edges.
  const std::vector<std::int64_t>& edges() const { return edges_; }

 private:
  // Sorted; the first is 0, the last the extent. cells_[i] is the position of edges_[i].
  std::vector<std::int64_t> edges_;
  std::vector<int> cells_;
};
// Edges of the panel's rectangles along the rows or columns for ChunkMapScale: sorted, with 0 and
// the extent.
std::vector<std::int64_t> RowEdges(const ChunkMapPicture& picture, const ChunkMapPanel& panel);
std::vector<std::int64_t> ColumnEdges(const ChunkMapPicture& picture, const ChunkMapPanel& panel);
// Draws the rectangles of a panel into cells. If two rectangles fall on one cell, the cell gets the
// later rectangle.
ChunkMapRaster Rasterize(const ChunkMapPanel& panel, const ChunkMapScale& rows,
                         const ChunkMapScale& columns, int height, int width);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_PICTURES_LAYOUT_H_
