// SPDX-License-Identifier: Apache-2.0
// Makes the abstract picture of a tensor's chunks (ChunkMapPicture of layout.h), from which text
// and SVG are drawn: which axes are drawn, and which rectangles. If some chunks are flat ranges
// (packed parameters of FSDP) and all are runs of the row-major order, rows and columns are groups
// of axes, and runs become rectangles (DrawRuns). Otherwise rows and columns are the two axes with
// the most cuts, and each part of a third axis is a panel (BoxDrawing).
#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include <fmt/core.h>

#include "fs/pictures/layout.h"
#include "index/records/layer_names.h"

namespace tensormount::fs {
namespace {

// Largest number of panels; more are not useful to a reader.
constexpr std::size_t kMostPanels = 12;
// If a panel has more rectangles, touching rectangles of one holder are drawn as one.
constexpr std::size_t kMostModelRects = 256;

std::optional<std::uint64_t> DecimalNumber(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The number that follows `before` in a text that begins with `before`. The number must end the
// text or be followed by "." or "_".
std::optional<std::uint64_t> NumberAfter(std::string_view text, std::string_view before) {
  if (!text.starts_with(before)) return std::nullopt;
  text.remove_prefix(before.size());
  std::size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  const bool ends = digits == text.size() || text[digits] == '.' || text[digits] == '_';
  return ends ? DecimalNumber(text.substr(0, digits)) : std::nullopt;
}

// A numbered holder such as "rank 3".
ChunkMapHolder Numbered(ChunkMapHolder::Kind kind, std::string_view word, std::uint64_t number) {
  ChunkMapHolder holder;
  holder.kind = kind;
  holder.number = number;
  holder.name = fmt::format("{} {}", word, number);
  return holder;
}

// Guesses the rank from file names of other programs: "__3_0.distcp" of DCP, "rank_3..." of
// OLMo-core. The rank is only used for labels.
std::optional<std::uint64_t> ForeignRank(std::string_view base) {
  // The prefixes of DCP, OLMo-core and others.
  for (const std::string_view before : {"__", "rank_", "rank"}) {
    if (const auto rank = NumberAfter(base, before)) return rank;
  }
  // torch's HuggingFaceStorageWriter counts from 1: "shard-00003-model-00001-of-00002.safetensors".
  constexpr std::string_view kShard = "shard-";
  if (!base.starts_with(kShard)) return std::nullopt;
  const std::string_view rest = base.substr(kShard.size());
  const auto shard = DecimalNumber(rest.substr(0, std::min(rest.find('-'), rest.size())));
  return shard && *shard > 0 ? std::optional(*shard - 1) : std::nullopt;
}

// The number of a part: 2 for "model-00002-of-00005.safetensors".
std::optional<std::uint64_t> PartNumber(std::string_view base) {
  const std::size_t of = base.rfind("-of-");
  if (of == std::string_view::npos) return std::nullopt;
  const std::string_view before = base.substr(0, of);
  const std::size_t dash = before.rfind('-');
  return dash == std::string_view::npos ? std::nullopt : DecimalNumber(before.substr(dash + 1));
}

// Number of indices on axes [begin, end) together. Cannot overflow, since a stored tensor has this
// shape.
std::int64_t Product(const Dims& shape, int begin, int end) {
  std::int64_t product = 1;
  for (int axis = begin; axis < end; ++axis) product *= shape[axis];
  return product;
}

std::string AxesText(int begin, int end) {
  if (end - begin == 1) return fmt::format("axis {}", begin);
  return fmt::format("axes {} to {}", begin, end - 1);
}

// The position of the first element of each region in the tensor's row-major order; nullopt if some
// region is not one run in that order.
std::optional<std::vector<std::int64_t>> AsRuns(const std::vector<Region>& regions,
                                                const Dims& shape) {
  std::vector<std::int64_t> firsts;
  for (const Region& region : regions) {
    const Box& box = region.box();  // For a flat range, the box whose elements the range counts.
    std::int64_t first = 0;
    // True once an axis of the box has several indices: later axes must then be whole.
    bool cut = false;
    for (int axis = 0; axis < shape.rank(); ++axis) {
      if (cut && box.extent(axis) != shape[axis]) return std::nullopt;
      cut = cut || box.extent(axis) != 1;
      first = first * shape[axis] + box.begin(axis);
    }
    firsts.push_back(first + region.flat_first());
  }
  return firsts;
}

ChunkMapRect RectOf(const Box& box, int row_axis, int column_axis, std::size_t chunk) {
  ChunkMapRect rect;
  rect.row_end = row_axis < 0 ? 1 : box.end(row_axis);
  rect.row_begin = row_axis < 0 ? 0 : box.begin(row_axis);
  rect.column_begin = column_axis < 0 ? 0 : box.begin(column_axis);
  rect.column_end = column_axis < 0 ? 1 : box.end(column_axis);
  rect.chunk = chunk;
  rect.group = chunk;
  return rect;
}

// Merges rectangles of one holder that touch along a whole edge, first along rows, then along
// columns. O(n log n). Makes each holder one group, so that the text form draws no lines between
// its rectangles.
void MergeTouching(std::vector<ChunkMapRect>& rects, const std::vector<ChunkMapEntry>& chunks) {
  const auto holder = [&](const ChunkMapRect& r) { return chunks[r.chunk].holder; };
  // In the order of `key`, rectangles that may touch are neighbours: they have the same holder and
  // the same range on the other axis.
  const auto merge = [&](auto key, auto end, auto begin) {
    std::sort(rects.begin(), rects.end(),
              [&](const ChunkMapRect& a, const ChunkMapRect& b) { return key(a) < key(b); });
    std::vector<ChunkMapRect> merged;
    for (const ChunkMapRect& rect : rects) {
      if (!merged.empty()) {
        ChunkMapRect& last = merged.back();
        const auto [h1, a1, b1, begin1] = key(last);
        const auto [h2, a2, b2, begin2] = key(rect);
        if (h1 == h2 && a1 == a2 && b1 == b2 && end(last) == begin(rect)) {
          end(last) = end(rect);
          last.chunks += rect.chunks;
          last.chunk = std::min(last.chunk, rect.chunk);
          continue;
        }
      }
      merged.push_back(rect);
    }
    rects = std::move(merged);
  };
  merge(
      [&](const ChunkMapRect& r) {
        return std::tuple(holder(r), r.row_begin, r.row_end, r.column_begin);
      },
      [](auto& r) -> auto& { return r.column_end; },
      [](auto& r) -> auto& { return r.column_begin; });
  merge(
      [&](const ChunkMapRect& r) {
        return std::tuple(holder(r), r.column_begin, r.column_end, r.row_begin);
      },
      [](auto& r) -> auto& { return r.row_end; }, [](auto& r) -> auto& { return r.row_begin; });
  for (ChunkMapRect& rect : rects) rect.group = holder(rect);
}

// Draws regions that are runs of the tensor's row-major order. The rows of the picture are the
// first axes of the tensor together, and the columns the other axes, divided so that the picture is
// as square as possible.
ChunkMapPicture DrawRuns(const std::vector<Region>& regions,
                         const std::vector<std::int64_t>& firsts, const Dims& shape) {
  ChunkMapPicture picture;
  int split = 0;
  for (int s = 1; s < shape.rank(); ++s) {
    const auto shorter = [&](int at) {
      return std::min(Product(shape, 0, at), Product(shape, at, shape.rank()));
    };
    if (shorter(s) >= shorter(split)) split = s;
  }
  picture.rows = Product(shape, 0, split);
  picture.columns = Product(shape, split, shape.rank());
  if (split > 0) picture.row_label = AxesText(0, split);
  picture.column_label = AxesText(split, shape.rank());
  const Box grid = Box::Whole({picture.rows, picture.columns});
  ChunkMapPanel& panel = picture.panels.emplace_back();
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const auto run = Region::Flat(grid, firsts[i], regions[i].volume());
    if (!run.ok()) continue;  // Cannot happen: the run is within the tensor.
    for (const Box& box : run.value().Boxes()) {
      panel.rects.push_back(RectOf(box, 0, 1, i));
    }
  }
  return picture;
}

// Draws boxes. The edges of an axis are the begins and ends of all boxes on that axis; they cut the
// axis into parts. Each part of an axis that is cut but not drawn is a panel.
class BoxDrawing {
 public:
  BoxDrawing(const std::vector<ChunkMapEntry>& chunks, const Dims& shape)
      : chunks_(chunks), shape_(shape) {
    edges_.resize(static_cast<std::size_t>(shape.rank()));
    for (int axis = 0; axis < shape.rank(); ++axis) {
      std::vector<std::int64_t>& edges = Edges(axis);
      edges = {0, shape[axis]};
      for (const ChunkMapEntry& chunk : chunks) {
        for (const Box& box : chunk.boxes) {
          edges.push_back(box.begin(axis));
          edges.push_back(box.end(axis));
        }
      }
      std::sort(edges.begin(), edges.end());
      edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    }
  }

  ChunkMapPicture Draw() {
    ChooseAxes();
    ChunkMapPicture picture;
    if (row_ >= 0) picture.row_label = AxesText(row_, row_ + 1);
    if (column_ >= 0) picture.column_label = AxesText(column_, column_ + 1);
    picture.rows = row_ < 0 ? 1 : shape_[row_];
    picture.columns = column_ < 0 ? 1 : shape_[column_];
    std::uint64_t cells = 1;
    // The axes that are cut but not drawn. Each combination of their parts is a panel; at most
    // kMostPanels are drawn.
    std::vector<int> others;
    for (int axis = 0; axis < shape_.rank(); ++axis) {
      if (axis == row_ || axis == column_) continue;
      if (!IsCut(axis)) {
        picture.notes.push_back(fmt::format("axis {} ({}) is not cut", axis, shape_[axis]));
        continue;
      }
      others.push_back(axis);
      const std::uint64_t parts = Edges(axis).size() - 1;
      picture.notes.push_back(fmt::format("axis {} ({}) is cut into {} parts, each with a picture",
                                          axis, shape_[axis], parts));
      // The product is limited to 2^40, because it could overflow; it only tells how many panels
      // are left out.
      cells = parts > (std::uint64_t{1} << 40) / cells ? std::uint64_t{1} << 40 : cells * parts;
    }
    for (std::uint64_t cell = 0; cell < std::min<std::uint64_t>(cells, kMostPanels); ++cell) {
      picture.panels.push_back(Panel(cell, others));
    }
    picture.panels_left_out = cells - picture.panels.size();
    return picture;
  }

 private:
  std::vector<std::int64_t>& Edges(int axis) { return edges_[static_cast<std::size_t>(axis)]; }
  // Whether the axis is cut: it has edges other than its two ends.
  bool IsCut(int axis) { return Edges(axis).size() > 2; }

  // Chooses the two axes with the most cuts. If fewer than two axes are cut, the last axes are
  // chosen, too.
  void ChooseAxes() {
    std::vector<int> axes(static_cast<std::size_t>(shape_.rank()));
    std::iota(axes.begin(), axes.end(), 0);
    std::stable_sort(axes.begin(), axes.end(), [&](int a, int b) {
      if (IsCut(a) || IsCut(b)) return Edges(a).size() > Edges(b).size();
      return a > b;
    });
    if (axes.empty()) return;
    column_ = axes[0];
    if (axes.size() == 1) return;
    row_ = std::min(axes[0], axes[1]);
    column_ = std::max(axes[0], axes[1]);
  }

  ChunkMapPanel Panel(std::uint64_t cell, const std::vector<int>& others) {
    ChunkMapPanel panel;
    // The panel's part of each axis in `others`: the axis, and the first index of the part.
    std::vector<std::pair<int, std::int64_t>> at;
    // Splits the panel number into a number for each axis; the last axis varies fastest.
    for (auto axis = others.rbegin(); axis != others.rend(); ++axis) {
      const std::vector<std::int64_t>& edges = Edges(*axis);
      const std::size_t part = cell % (edges.size() - 1);
      cell /= edges.size() - 1;
      at.emplace_back(*axis, edges[part]);
      panel.title = fmt::format("axis {}: {}:{}{}", *axis, edges[part], edges[part + 1],
                                panel.title.empty() ? "" : ", " + panel.title);
    }
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      for (const Box& box : chunks_[i].boxes) {
        const bool here = std::all_of(at.begin(), at.end(), [&](const auto& index) {
          return box.begin(index.first) <= index.second && index.second < box.end(index.first);
        });
        if (here) panel.rects.push_back(RectOf(box, row_, column_, i));
      }
    }
    return panel;
  }

  const std::vector<ChunkMapEntry>& chunks_;
  const Dims& shape_;
  std::vector<std::vector<std::int64_t>> edges_;
  int row_ = -1;
  int column_ = -1;
};

// Makes the picture. `regions`: one for each chunk; empty for a layer, which has only a part of
// each chunk.
ChunkMapPicture MakePicture(const std::vector<ChunkMapEntry>& chunks,
                            const std::vector<Region>& regions, const Dims& shape) {
  const bool flat = std::ranges::any_of(regions, &Region::is_flat);
  const auto runs = flat ? AsRuns(regions, shape) : std::nullopt;
  ChunkMapPicture picture =
      runs ? DrawRuns(regions, *runs, shape) : BoxDrawing(chunks, shape).Draw();
  for (ChunkMapPanel& panel : picture.panels) {
    if (panel.rects.size() > kMostModelRects) MergeTouching(panel.rects, chunks);
  }
  return picture;
}

// Fills layout.holders and the `holder` of each chunk. The order is ranks by number, then parts,
// mounts and files, so that colours and labels do not depend on the order of chunks.
void NumberHolders(std::vector<ChunkMapHolder>& of_chunk, ChunkMap& layout) {
  const auto order = [](const ChunkMapHolder& h) { return std::tie(h.kind, h.number, h.name); };
  std::map<std::tuple<ChunkMapHolder::Kind, std::uint64_t, std::string>, std::size_t> numbers;
  for (const ChunkMapHolder& holder : of_chunk) numbers.emplace(order(holder), 0);
  for (auto& [key, number] : numbers) {
    number = layout.holders.size();
    ChunkMapHolder& holder = layout.holders.emplace_back();
    std::tie(holder.kind, holder.number, holder.name) = key;
  }
  for (std::size_t i = 0; i < of_chunk.size(); ++i) {
    ChunkMapEntry& chunk = layout.chunks[i];
    chunk.holder = numbers.at(order(of_chunk[i]));
    ++layout.holders[chunk.holder].chunks;
    layout.holders[chunk.holder].bytes += chunk.length;
  }
}

// The part of a stacked tensor's region that is in one layer, as boxes without the first axis.
std::vector<Box> BoxesInLayer(const Region& of_stack, std::int64_t layer) {
  std::vector<Box> boxes;
  for (const Box& box : of_stack.Boxes()) {
    if (layer < box.begin(0) || layer >= box.end(0)) continue;
    const auto without =
        Box::Make(Dims(box.begin().span().subspan(1)), Dims(box.extent().span().subspan(1)));
    if (without.ok() && !without.value().empty()) boxes.push_back(without.value());
  }
  return boxes;
}

}  // namespace

std::string ChunkMapHolder::ShortLabel(std::size_t in_legend) const {
  const bool numbered = kind == Kind::kRank || kind == Kind::kPart;
  return numbered ? std::to_string(number) : fmt::format("#{}", in_legend + 1);
}

ChunkMapHolder HolderOf(const FileRecord& file, std::string_view manifest) {
  using Kind = ChunkMapHolder::Kind;
  const std::string_view name = file.name;
  const std::string_view base = name.substr(name.rfind('/') + 1);
  if (file.placement == Placement::kForeign) {
    if (const auto rank = ForeignRank(base)) return Numbered(Kind::kRank, "rank", *rank);
    if (const auto part = PartNumber(base)) return Numbered(Kind::kPart, "part", *part);
  } else {
    const std::string_view stem = base.substr(std::min(base.find('-'), base.size() - 1) + 1);
    for (const std::string_view before : {"r", "p"}) {
      if (const auto rank = NumberAfter(stem, before)) return Numbered(Kind::kRank, "rank", *rank);
    }
    // Several writers may have written to a file; the chunk's manifest then names the writer:
    // "rank-3.*" and "r3.*" are ranks, "mount-1f2e*" is a save through a mount.
    std::string_view writer = manifest.substr(manifest.rfind('/') + 1);
    for (const std::string_view before : {"rank-", "r"}) {
      if (const auto rank = NumberAfter(writer, before))
        return Numbered(Kind::kRank, "rank", *rank);
    }
    if (writer.starts_with("mount-")) {
      ChunkMapHolder holder;
      holder.kind = Kind::kMount;
      holder.name =
          "mount " + std::string(writer.substr(6, std::min<std::size_t>(8, writer.rfind('.') - 6)));
      return holder;
    }
  }
  ChunkMapHolder holder;
  holder.name = std::string(name);
  return holder;
}

Result<ChunkMap> DescribeChunkMap(const OpenedCheckpoint& checkpoint, const std::string& key) {
  const CheckpointIndex& index = checkpoint.index();
  auto found = index.Find(key);
  std::optional<LayerEntry> layer;
  if (found.status().code() == Code::kNotFound) {
    TENSORMOUNT_ASSIGN_OR_RETURN(layer, index.ResolveLayer(key));
  }
  if (!layer) TENSORMOUNT_RETURN_IF_ERROR(found.status());
  const TensorEntry& stored = layer ? layer->stacked : found.value();
  const TensorMeta& meta = layer ? layer->meta : stored.meta;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string own, checkpoint.StoredKeyOf(stored.ordinal));
  if (own.empty()) {
    return Status(Code::kUnsupported,
                  "tensor " + key +
                      ": a name map puts it together from other tensors, and the "
                      "layout is that of a stored one");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto extents, checkpoint.Extents(stored));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ChunkRecord> records, extents->All());

  ChunkMap layout;
  layout.source = checkpoint.name();
  layout.key = key;
  layout.dtype = InfoOf(meta.dtype()).name;
  layout.shape = meta.shape();
  layout.bytes = meta.bytes();
  layout.elements = meta.elements();
  if (layer) {
    layout.layer_note = fmt::format("layer {} of {}: offsets and bytes are those of whole chunks",
                                    layer->layer, layer->stacked.meta.key());
  }
  std::vector<ChunkMapHolder> holders;
  std::vector<Region> regions;
  std::set<std::uint32_t> files;
  for (const ChunkRecord& record : records) {
    if (record.file >= index.files().size()) {
      return Status(
          Code::kDataLoss,
          fmt::format("tensor {}: a chunk refers to file number {}, which is not in the file table",
                      key, record.file));
    }
    const FileRecord& file = index.files()[record.file];
    ChunkMapEntry chunk;
    chunk.boxes = layer ? BoxesInLayer(record.region, layer->layer) : record.region.Boxes();
    // Skips a chunk that has no part of this layer.
    if (layer && chunk.boxes.empty()) continue;
    chunk.region = record.region.ToString();
    if (layer) {
      chunk.region = chunk.boxes.front().ToString();
      if (chunk.boxes.size() > 1)
        chunk.region += fmt::format(" to {}", chunk.boxes.back().ToString());
    }
    for (const Box& box : chunk.boxes) {
      layout.covered += static_cast<std::uint64_t>(box.volume());
    }
    if (!layer) regions.push_back(record.region);
    chunk.file = file.name;
    chunk.offset = record.offset;
    chunk.length = record.length;
    chunk.strides = record.strides;
    if (record.has_hash) chunk.hash = record.hash.ToHex();
    // A chunk without a hash has no manifest number.
    const bool named = record.has_hash && record.manifest < index.manifests().size();
    holders.push_back(HolderOf(file, named ? index.manifests()[record.manifest] : ""));
    files.insert(record.file);
    layout.chunks.push_back(std::move(chunk));
  }
  layout.files = files.size();
  NumberHolders(holders, layout);
  layout.picture = MakePicture(layout.chunks, regions, meta.shape());
  return layout;
}

}  // namespace tensormount::fs
