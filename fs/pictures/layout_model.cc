// SPDX-License-Identifier: Apache-2.0
// The picture of a tensor's chunks, without a form: which two axes are drawn, what is scaled, which
// colours (LayoutPicture of layout.h). Text and SVG are drawn from it, so that they cannot
// disagree.
// Which picture: where chunks are flat ranges of the row-major order (packed parameters of FSDP),
// rows and columns are groups of axes, and runs become rectangles (DrawRuns). Else rows and columns
// are the two axes with the most cuts, and each part of a third axis is a panel (BoxDrawing).
#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include <fmt/core.h>

#include "index/records/layer_names.h"
#include "fs/pictures/layout.h"

namespace tensormount::fs {
namespace {

// More pictures than this are not looked at by anybody.
constexpr std::size_t kMostPanels = 12;
// Of a panel; where there are more, those of one holder that touch are drawn as one.
constexpr std::size_t kMostModelRects = 256;

std::optional<std::uint64_t> DecimalNumber(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The digits that follow `before`, which begins `text` or stands behind a "-" or "_" in it.
std::optional<std::uint64_t> NumberAfter(std::string_view text, std::string_view before) {
  if (!text.starts_with(before)) return std::nullopt;
  text.remove_prefix(before.size());
  std::size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  const bool ends = digits == text.size() || text[digits] == '.' || text[digits] == '_';
  return ends ? DecimalNumber(text.substr(0, digits)) : std::nullopt;
}

// A holder that has a number, as "rank 3".
LayoutHolder Numbered(LayoutHolder::Kind kind, std::string_view word, std::uint64_t number) {
  LayoutHolder holder;
  holder.kind = kind;
  holder.number = number;
  holder.name = fmt::format("{} {}", word, number);
  return holder;
}

// By the names that programs give to files of ranks: "__3_0.distcp" of DCP, "rank_3..." of
// OLMo-core. A guess, so it is only used to label a picture.
std::optional<std::uint64_t> ForeignRank(std::string_view base) {
  for (const std::string_view before : {"__", "rank_", "rank"}) {  // DCP; OLMo-core; others.
    if (const auto rank = NumberAfter(base, before)) return rank;
  }
  // torch's HuggingFaceStorageWriter counts from 1: "shard-00003-model-00001-of-00002.safetensors".
  constexpr std::string_view kShard = "shard-";
  if (!base.starts_with(kShard)) return std::nullopt;
  const std::string_view rest = base.substr(kShard.size());
  const auto shard = DecimalNumber(rest.substr(0, std::min(rest.find('-'), rest.size())));
  return shard && *shard > 0 ? std::optional(*shard - 1) : std::nullopt;
}

// "model-00002-of-00005.safetensors".
std::optional<std::uint64_t> PartNumber(std::string_view base) {
  const std::size_t of = base.rfind("-of-");
  if (of == std::string_view::npos) return std::nullopt;
  const std::string_view before = base.substr(0, of);
  const std::size_t dash = before.rfind('-');
  return dash == std::string_view::npos ? std::nullopt : DecimalNumber(before.substr(dash + 1));
}

// Of a tensor that exists, so it fits.
std::int64_t Product(const Dims& shape, int begin, int end) {
  std::int64_t product = 1;
  for (int axis = begin; axis < end; ++axis) product *= shape[axis];
  return product;
}

std::string AxesText(int begin, int end) {
  if (end - begin == 1) return fmt::format("axis {}", begin);
  return fmt::format("axes {} to {}", begin, end - 1);
}

// Where all regions are runs of the row-major order: their first elements. Empty where one is none.
std::optional<std::vector<std::int64_t>> AsRuns(const std::vector<Region>& regions,
                                                const Dims& shape) {
  std::vector<std::int64_t> firsts;
  for (const Region& region : regions) {
    const Box& box = region.box();  // Of a flat range: what it counts in.
    std::int64_t first = 0;
    bool cut = false;  // Axes behind one that has more than one index must be whole.
    for (int axis = 0; axis < shape.rank(); ++axis) {
      if (cut && box.extent(axis) != shape[axis]) return std::nullopt;
      cut = cut || box.extent(axis) != 1;
      first = first * shape[axis] + box.begin(axis);
    }
    firsts.push_back(first + region.flat_first());
  }
  return firsts;
}

LayoutRect RectOf(const Box& box, int row_axis, int column_axis, std::size_t chunk) {
  LayoutRect rect;
  rect.row_end = row_axis < 0 ? 1 : box.end(row_axis);
  rect.row_begin = row_axis < 0 ? 0 : box.begin(row_axis);
  rect.column_begin = column_axis < 0 ? 0 : box.begin(column_axis);
  rect.column_end = column_axis < 0 ? 1 : box.end(column_axis);
  rect.chunk = chunk;
  rect.group = chunk;
  return rect;
}

// Rectangles of one holder that touch along a whole edge become one.
// First along rows, then along columns: O(n log n), and enough for blocks of shards. Lines within
// one holder are then dropped (`group`), since chunks of it cannot be told apart any more.
void MergeTouching(std::vector<LayoutRect>& rects, const std::vector<LayoutChunk>& chunks) {
  const auto holder = [&](const LayoutRect& r) { return chunks[r.chunk].holder; };
  // `key` sorts those that can touch side by side: same holder, same extent across.
  const auto merge = [&](auto key, auto end, auto begin) {
    std::sort(rects.begin(), rects.end(),
              [&](const LayoutRect& a, const LayoutRect& b) { return key(a) < key(b); });
    std::vector<LayoutRect> merged;
    for (const LayoutRect& rect : rects) {
      if (!merged.empty()) {
        LayoutRect& last = merged.back();
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
      [&](const LayoutRect& r) {
        return std::tuple(holder(r), r.row_begin, r.row_end, r.column_begin);
      },
      [](auto& r) -> auto& { return r.column_end; },
      [](auto& r) -> auto& { return r.column_begin; });
  merge(
      [&](const LayoutRect& r) {
        return std::tuple(holder(r), r.column_begin, r.column_end, r.row_begin);
      },
      [](auto& r) -> auto& { return r.row_end; }, [](auto& r) -> auto& { return r.row_begin; });
  for (LayoutRect& rect : rects) rect.group = holder(rect);
}

// Runs of the whole tensor, on two axes that are made of its own: the split that is nearest to a
// square, so that there is something to see.
LayoutPicture DrawRuns(const std::vector<Region>& regions, const std::vector<std::int64_t>& firsts,
                       const Dims& shape) {
  LayoutPicture picture;
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
  LayoutPanel& panel = picture.panels.emplace_back();
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const auto run = Region::Flat(grid, firsts[i], regions[i].volume());
    if (!run.ok()) continue;  // Cannot be: it lies within the tensor.
    for (const Box& box : run.value().Boxes()) {
      panel.rects.push_back(RectOf(box, 0, 1, i));
    }
  }
  return picture;
}

// Edges of an axis are all begins and ends of boxes on it: between two of them nothing changes, so
// the parts of a third axis between its edges are what differs from panel to panel.
class BoxDrawing {
 public:
  BoxDrawing(const std::vector<LayoutChunk>& chunks, const Dims& shape)
      : chunks_(chunks), shape_(shape) {
    edges_.resize(static_cast<std::size_t>(shape.rank()));
    for (int axis = 0; axis < shape.rank(); ++axis) {
      std::vector<std::int64_t>& edges = Edges(axis);
      edges = {0, shape[axis]};
      for (const LayoutChunk& chunk : chunks) {
        for (const Box& box : chunk.boxes) {
          edges.push_back(box.begin(axis));
          edges.push_back(box.end(axis));
        }
      }
      std::sort(edges.begin(), edges.end());
      edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    }
  }

  LayoutPicture Draw() {
    ChooseAxes();
    LayoutPicture picture;
    if (row_ >= 0) picture.row_label = AxesText(row_, row_ + 1);
    if (column_ >= 0) picture.column_label = AxesText(column_, column_ + 1);
    picture.rows = row_ < 0 ? 1 : shape_[row_];
    picture.columns = column_ < 0 ? 1 : shape_[column_];
    std::uint64_t cells = 1;
    // Axes that are cut and not drawn: a panel for each combination of their parts, at most
    // kMostPanels.
    std::vector<int> others;
    for (int axis = 0; axis < shape_.rank(); ++axis) {
      if (axis == row_ || axis == column_) continue;
      if (!IsCut(axis)) {
        picture.notes.push_back(fmt::format("axis {} ({}) is not cut", axis, shape_[axis]));
        continue;
      }
      others.push_back(axis);
      const std::uint64_t parts = Edges(axis).size() - 1;
      picture.notes.push_back(fmt::format("axis {} ({}) is cut into {} pieces, a picture each",
                                          axis, shape_[axis], parts));
      // Bounded, or the product of several axes could overflow; only told as a number of pictures
      // left out.
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
  // Two edges are its ends.
  bool IsCut(int axis) { return Edges(axis).size() > 2; }

  // The two axes with the most cuts; where fewer are cut, the last ones go with them.
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

  LayoutPanel Panel(std::uint64_t cell, const std::vector<int>& others) {
    LayoutPanel panel;
    std::vector<std::pair<int, std::int64_t>> at;  // Axis, and an index on it.
    // The number of the panel in the mixed base of the parts, the last axis fastest.
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

  const std::vector<LayoutChunk>& chunks_;
  const Dims& shape_;
  std::vector<std::vector<std::int64_t>> edges_;
  int row_ = -1;
  int column_ = -1;
};

// `regions`: of each chunk; empty for a layer, which has only a part of each.
LayoutPicture MakePicture(const std::vector<LayoutChunk>& chunks,
                          const std::vector<Region>& regions, const Dims& shape) {
  const bool flat = std::ranges::any_of(regions, &Region::is_flat);
  const auto runs = flat ? AsRuns(regions, shape) : std::nullopt;
  LayoutPicture picture = runs ? DrawRuns(regions, *runs, shape) : BoxDrawing(chunks, shape).Draw();
  for (LayoutPanel& panel : picture.panels) {
    if (panel.rects.size() > kMostModelRects) MergeTouching(panel.rects, chunks);
  }
  return picture;
}

// Numbers the holders: ranks by number, then parts, mounts and files.
// So colours and labels do not depend on the order of chunks in the index.
void NumberHolders(std::vector<LayoutHolder>& of_chunk, Layout& layout) {
  const auto order = [](const LayoutHolder& h) { return std::tie(h.kind, h.number, h.name); };
  std::map<std::tuple<LayoutHolder::Kind, std::uint64_t, std::string>, std::size_t> numbers;
  for (const LayoutHolder& holder : of_chunk) numbers.emplace(order(holder), 0);
  for (auto& [key, number] : numbers) {
    number = layout.holders.size();
    LayoutHolder& holder = layout.holders.emplace_back();
    std::tie(holder.kind, holder.number, holder.name) = key;
  }
  for (std::size_t i = 0; i < of_chunk.size(); ++i) {
    LayoutChunk& chunk = layout.chunks[i];
    chunk.holder = numbers.at(order(of_chunk[i]));
    ++layout.holders[chunk.holder].chunks;
    layout.holders[chunk.holder].bytes += chunk.length;
  }
}

// What of a stack's chunk lies in one layer, as boxes of that.
// The first axis is cut off: the layer's boxes have one axis less.
std::vector<Box> InLayer(const Region& of_stack, std::int64_t layer) {
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

std::string LayoutHolder::Short(std::size_t in_legend) const {
  const bool numbered = kind == Kind::kRank || kind == Kind::kPart;
  return numbered ? std::to_string(number) : fmt::format("#{}", in_legend + 1);
}

LayoutHolder HolderOf(const FileRecord& file, std::string_view manifest) {
  using Kind = LayoutHolder::Kind;
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
    // A file of several writers: the manifest is the writer's. "rank-3.*" and "r3.*" are those of a
    // save by ranks, "mount-1f2e*" those of a save through mounts.
    std::string_view writer = manifest.substr(manifest.rfind('/') + 1);
    for (const std::string_view before : {"rank-", "r"}) {
      if (const auto rank = NumberAfter(writer, before))
        return Numbered(Kind::kRank, "rank", *rank);
    }
    if (writer.starts_with("mount-")) {
      LayoutHolder holder;
      holder.kind = Kind::kMount;
      holder.name =
          "mount " + std::string(writer.substr(6, std::min<std::size_t>(8, writer.rfind('.') - 6)));
      return holder;
    }
  }
  LayoutHolder holder;
  holder.name = std::string(name);
  return holder;
}

Result<Layout> DescribeLayout(const OpenedCheckpoint& checkpoint, const std::string& key) {
  const CheckpointIndex& index = checkpoint.index();
  auto found = index.Find(key);
  std::optional<LayerEntry> layer;
  if (found.status().code() == Code::kNotFound) {
    TENSORMOUNT_ASSIGN_OR_RETURN(layer, index.ResolveLayer(key));
  }
  if (!layer) TENSORMOUNT_RETURN_IF_ERROR(found.status());
  const TensorEntry& stored = layer ? layer->stacked : found.value();
  const TensorMeta& meta = layer ? layer->meta : stored.meta;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto extents, checkpoint.Extents(stored));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ChunkRecord> records, extents->All());

  Layout layout;
  layout.source = checkpoint.name();
  layout.key = key;
  layout.dtype = InfoOf(meta.dtype()).name;
  layout.shape = meta.shape();
  layout.bytes = meta.bytes();
  layout.elements = meta.elements();
  if (layer) {
    layout.layer_note = fmt::format("layer {} of {}: offset and bytes are those of its chunks",
                                    layer->layer, layer->stacked.meta.key());
  }
  std::vector<LayoutHolder> holders;
  std::vector<Region> regions;
  std::set<std::uint32_t> files;
  for (const ChunkRecord& record : records) {
    if (record.file >= index.files().size()) {
      return Status(Code::kDataLoss,
                    fmt::format("tensor {}: file number {} of a chunk is none", key, record.file));
    }
    const FileRecord& file = index.files()[record.file];
    LayoutChunk chunk;
    chunk.boxes = layer ? InLayer(record.region, layer->layer) : record.region.Boxes();
    // A chunk of the stack that has nothing of this layer.
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
    // Without a hash the number of the manifest means nothing.
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
