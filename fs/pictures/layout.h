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

// Which rank's chunk holds which box of a tensor: what `layout` draws as text, SVG and HTML. All
// of it depends on the checkpoint alone, so that pictures can be compared.
// Two steps: DescribeLayout reads the index and makes a picture without a form (layout_model.cc);
// LayoutText, LayoutSvg, LayoutHtml and LayoutJson give it one (layout_text.cc, layout_svg.cc,
// layout_json.cc). Of a terminal only the width of text and its colours depend.

namespace tensormount::fs {

// Who wrote chunks, as far as the names of files tell.
// kRank: a rank of ours, told by the name of the file or of the manifest that lists the chunk, or
// by names that DCP, OLMo-core and others give files of ranks. kPart: a numbered part of a model,
// as Hugging Face writes it. kMount: a save through a mount. kFile: anything else.
struct LayoutHolder {
  enum class Kind { kRank, kPart, kMount, kFile };
  Kind kind = Kind::kFile;
  std::uint64_t number = 0;  // Of kRank and kPart.
  std::string name;          // "rank 3", "part 2", "mount 1f2e", or the file's name.
  std::uint64_t chunks = 0;
  std::uint64_t bytes = 0;
  // As short as can be, for small boxes: "3"; "#4", the number in the legend, of files.
  std::string Short(std::size_t in_legend) const;
};

// One chunk of the tensor as it is stored, for tables and tips; its position in the picture is in
// LayoutRect.
struct LayoutChunk {
  // As the index says it, of a layer as boxes of the layer.
  std::string region;      // "[0:4, 0:8]", or "[0:4, 0:8] flat 5:17".
  std::vector<Box> boxes;  // That it consists of, in the tensor (or layer) that is shown.
  std::size_t holder = 0;
  // For tables; offset and length are of the chunk in it.
  std::string file;  // Below the checkpoint, or below a foreign checkpoint's folder.
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  Dims strides;      // Bytes; empty: packed.
  std::string hash;  // Hex; empty: none.
};

// A rectangle of the picture: [row_begin, row_end) x [column_begin, column_end).
// In elements of the two axes that are drawn, not in characters or pixels.
struct LayoutRect {
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t column_begin = 0;
  std::int64_t column_end = 0;
  std::size_t chunk = 0;   // The first of
  std::size_t chunks = 1;  // so many that were drawn as one. All are of one holder.
  std::size_t group = 0;   // No line between rectangles of one group.
};

// One picture of two axes. A tensor that is cut along a third axis has a panel for each part of
// that.
struct LayoutPanel {
  std::string title;  // "axis 0: 0:4"; empty where there is one panel.
  std::vector<LayoutRect> rects;
};

// What all panels have in common. `rows` and `columns` are the extents that are drawn, 1 where
// there is no such axis.
struct LayoutPicture {
  std::string row_label;  // "axis 0", "axes 0 to 1"; empty: a strip.
  std::string column_label;
  std::int64_t rows = 1;
  std::int64_t columns = 1;
  std::vector<LayoutPanel> panels;
  // Of all there are; more than a dozen pictures help nobody.
  std::uint64_t panels_left_out = 0;
  std::vector<std::string> notes;  // About axes that are not drawn.
};

// All that any of the forms needs; made once for all of them.
struct Layout {
  std::string source;  // Name of the checkpoint.
  std::string key;
  std::string dtype;
  Dims shape;
  std::uint64_t bytes = 0;
  std::string layer_note;  // "layer 3 of w: ..."; empty: a tensor of its own.
  std::uint64_t files = 0;
  // Of the tensor or layer.
  std::uint64_t elements = 0;
  // Less than `elements` is told in all forms, since the picture alone might be overlooked.
  std::uint64_t covered = 0;  // Of the elements, by chunks; less where a foreign one has holes.
  std::vector<LayoutHolder> holders;  // Ranks by number, then the others.
  std::vector<LayoutChunk> chunks;
  // Empty where the tensor has no elements.
  LayoutPicture picture;
};

// `key` of a tensor, or a layer's name. kNotFound.
// Of a layer the boxes are cut out of those of its stack, and offsets and lengths stay those of the
// stack's chunks, which is said in layer_note. O(chunks log chunks).
Result<Layout> DescribeLayout(const OpenedCheckpoint& checkpoint, const std::string& key);

// Who holds a chunk of this file; `manifest`: the name of the manifest that lists it, or empty.
LayoutHolder HolderOf(const FileRecord& file, std::string_view manifest);

// The picture and what it shows; without a line break at the end.
// `columns`: of the terminal; `colours`: whether to use them; `table_rows`: of chunks, at most.
std::string LayoutText(const Layout& layout, int columns, bool colours, std::size_t table_rows);
// A whole file, readable on its own.
// No script, no reference to anything outside, and all names are escaped: it may be opened by
// anybody, wherever the checkpoint came from.
std::string LayoutSvg(const Layout& layout);
std::string LayoutHtml(const Layout& layout);
// For programs: every chunk with its file, offset, length and boxes (docs/cli.md). Include
// <nlohmann/json.hpp> where it is used.
nlohmann::ordered_json LayoutJson(const Layout& layout);

// The picture in cells, each of which is one of the panel's rectangles (or -1): `rows` and
// `columns` are where the edges of rectangles lie, as cell numbers.
// What is outside of the raster is -2, so that a border is drawn around it.
struct LayoutRaster {
  int height = 0;
  int width = 0;
  std::vector<int> cells;  // Row by row.
  int At(int y, int x) const {
    if (y < 0 || x < 0 || y >= height || x >= width) return -2;
    return cells[static_cast<std::size_t>(y) * static_cast<std::size_t>(width) +
                 static_cast<std::size_t>(x)];
  }
};
// Maps edges to a line of `cells` cells, where the part between two edges gets at least `least`
// cells if there is room for that.
// Small parts would vanish if cells were given by size alone: a bias shard of one row beside a
// thousand. `least` cells go to each part first, the rest by size.
class LayoutScale {
 public:
  LayoutScale(std::vector<std::int64_t> edges, std::int64_t extent, int cells, int least);
  int At(std::int64_t edge) const;  // One of the edges.
  const std::vector<std::int64_t>& edges() const { return edges_; }

 private:
  // cells_[i] is where edges_[i] is drawn.
  std::vector<std::int64_t> edges_;  // Sorted; 0 and the extent are among them.
  std::vector<int> cells_;
};
// Edges of the rectangles along an axis, sorted, with both ends.
// What the scale of an axis is made from: lines can only be drawn there.
std::vector<std::int64_t> RowEdges(const LayoutPicture& picture, const LayoutPanel& panel);
std::vector<std::int64_t> ColumnEdges(const LayoutPicture& picture, const LayoutPanel& panel);
// Later rectangles cover earlier ones where both fall on a cell; boxes of a tensor never overlap.
LayoutRaster Rasterize(const LayoutPanel& panel, const LayoutScale& rows,
                       const LayoutScale& columns, int height, int width);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_PICTURES_LAYOUT_H_
