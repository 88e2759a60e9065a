// SPDX-License-Identifier: Apache-2.0
#include "tests/support/random_layout.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "tests/support/cells.h"

namespace tensormount {
namespace {

Box MakeBox(const Dims& begin, const Dims& extent) { return Box::Make(begin, extent).value(); }

// [0, length) in `parts` pieces, uneven, some of them empty.
std::vector<std::int64_t> RandomCuts(Random& random, std::int64_t length, int parts) {
  std::vector<std::int64_t> cuts = {0, length};
  for (int i = 1; i < parts; ++i) cuts.push_back(random.Int(0, length));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

Box WithAxis(const Box& box, int axis, std::int64_t begin, std::int64_t extent) {
  Dims b = box.begin();
  Dims e = box.extent();
  b[axis] = begin;
  e[axis] = extent;
  return MakeBox(b, e);
}

void CutAxis(Random& random, const Box& box, int axis, int parts, std::vector<Region>& out) {
  const std::vector<std::int64_t> cuts = RandomCuts(random, box.extent(axis), parts);
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    out.push_back(WithAxis(box, axis, box.begin(axis) + cuts[i], cuts[i + 1] - cuts[i]));
  }
}

void SplitFlat(Random& random, const Box& box, int parts, std::vector<Region>& out) {
  const std::vector<std::int64_t> cuts = RandomCuts(random, box.volume(), parts);
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    out.push_back(Region::Flat(box, cuts[i], cuts[i + 1] - cuts[i]).value());
  }
}

// Guillotine cuts; leaves are boxes or cut flat once more.
void CutRecursively(Random& random, const Box& box, int depth, std::vector<Region>& out) {
  std::vector<int> axes;
  for (int a = 0; a < box.rank(); ++a) {
    if (box.extent(a) > 1) axes.push_back(a);
  }
  if (depth == 0 || axes.empty()) {
    if (random.OneIn(4)) {
      SplitFlat(random, box, static_cast<int>(random.Int(1, 3)), out);
    } else {
      out.push_back(box);
    }
    return;
  }
  const int axis = random.Pick(axes);
  const std::int64_t at = random.Int(1, box.extent(axis) - 1);
  CutRecursively(random, WithAxis(box, axis, box.begin(axis), at), depth - 1, out);
  CutRecursively(random, WithAxis(box, axis, box.begin(axis) + at, box.extent(axis) - at),
                 depth - 1, out);
}

std::vector<Region> RandomPieces(Random& random, const Dims& shape, int ranks) {
  const Box whole = Box::Whole(shape);
  std::vector<Region> pieces;
  switch (random.Int(0, 5)) {
    case 0:
      pieces.push_back(whole);
      break;
    case 1:
      SplitFlat(random, whole, ranks, pieces);
      break;
    case 2:
      if (shape.rank() == 0) {
        pieces.push_back(whole);
      } else {
        CutAxis(random, whole, static_cast<int>(random.Int(0, shape.rank() - 1)), ranks, pieces);
      }
      break;
    case 3: {  // A grid: cuts along one axis are cut along another.
      if (shape.rank() < 2) {
        SplitFlat(random, whole, ranks + 1, pieces);
        break;
      }
      std::vector<Region> rows;
      CutAxis(random, whole, 0, 2, rows);
      for (const Region& row : rows) {
        CutAxis(random, row.box(), shape.rank() - 1, static_cast<int>(random.Int(1, 3)), pieces);
      }
      break;
    }
    default:
      CutRecursively(random, whole, static_cast<int>(random.Int(1, 4)), pieces);
      break;
  }
  return pieces;
}

// Byte offset of cell `position` (packed order) of a buffer.
std::int64_t CellOffset(const BufferView& view, std::int64_t position, std::int64_t element_bytes) {
  std::int64_t offset = 0;
  for (int a = view.shape.rank() - 1; a >= 0; --a) {
    offset += position % view.shape[a] * view.strides[a];
    position /= view.shape[a];
  }
  return offset * element_bytes;
}

}  // namespace

RandomTensor MakeRandomTensor(Random& random, const std::string& key, std::uint64_t max_bytes) {
  static const std::vector<DType> kTypes = {DType::kU8,  DType::kBF16, DType::kF32,
                                            DType::kF64, DType::kC128, DType::kBool,
                                            DType::kI16, DType::kI64,  DType::kF8E4M3};
  RandomTensor tensor;
  tensor.key = key;
  tensor.dtype = random.Pick(kTypes);
  const int rank = static_cast<int>(random.Int(0, 5));
  auto left = static_cast<std::int64_t>(max_bytes / tensor.element_bytes());
  for (int a = 0; a < rank; ++a) {
    const std::int64_t most = std::max<std::int64_t>(1, left);
    const std::int64_t extent =
        random.OneIn(20) ? 0
                         : random.Int(1, std::min<std::int64_t>(most, random.OneIn(3) ? 300 : 12));
    tensor.shape.push_back(extent);
    left /= std::max<std::int64_t>(1, extent);
  }
  const std::int64_t elements = CheckedProduct(tensor.shape).value();
  tensor.bytes = random.Bytes(static_cast<std::size_t>(elements) * tensor.element_bytes());
  return tensor;
}

Partition RandomPartition(Random& random, const Dims& shape, int ranks) {
  Partition partition(static_cast<std::size_t>(ranks));
  const bool replicated = random.OneIn(3);
  // Sometimes a few ranks hold nothing at all.
  const int holders = random.OneIn(4) ? static_cast<int>(random.Int(1, ranks)) : ranks;
  int next = 0;
  for (const Region& piece : RandomPieces(random, shape, ranks)) {
    const int copies = replicated ? static_cast<int>(random.Int(1, holders)) : 1;
    for (int c = 0; c < copies; ++c) {
      partition[static_cast<std::size_t>((next + c) % holders)].push_back(piece);
    }
    next = random.OneIn(3) ? static_cast<int>(random.Int(0, holders - 1)) : (next + 1) % holders;
  }
  return partition;
}

Partition RandomRequest(Random& random, const Dims& shape, int ranks, bool holes) {
  Partition request = RandomPartition(random, shape, ranks);
  const Box whole = Box::Whole(shape);
  for (std::vector<Region>& regions : request) {
    if (holes && !regions.empty() && random.OneIn(2)) regions.pop_back();
    if (random.OneIn(3) && !whole.empty()) {
      Box box = whole;
      for (int a = 0; a < shape.rank(); ++a) {
        const std::int64_t begin = random.Int(0, shape[a] - 1);
        box = WithAxis(box, a, begin, random.Int(1, shape[a] - begin));
      }
      regions.push_back(box);
    }
  }
  return request;
}

ShardMemory MakeShardMemory(Random& random, const RandomTensor& tensor, const Region& region,
                            bool filled) {
  ShardMemory shard;
  shard.region = region;
  const auto size = static_cast<std::int64_t>(tensor.element_bytes());
  const Dims shape = region.is_flat() ? Dims{region.volume()} : region.box().extent();
  Dims strides = Dims::Filled(shape.rank(), 1);
  std::int64_t step = 1;
  std::int64_t base = 0;  // Of the first cell, in elements.
  const bool strided = !region.empty() && random.OneIn(2);
  std::vector<int> order;
  for (int a = shape.rank() - 1; a >= 0; --a) order.push_back(a);
  if (strided) random.Shuffle(order);
  for (const int a : order) {
    if (strided && random.OneIn(3)) step += random.Int(0, 3);
    const bool backwards = strided && random.OneIn(4);
    strides[a] = backwards ? -step : step;
    if (backwards) base += step * (shape[a] - 1);
    step *= std::max<std::int64_t>(1, shape[a]);
  }
  shard.memory.assign(static_cast<std::size_t>(std::max<std::int64_t>(1, step) * size),
                      std::byte{0xA5});
  shard.view =
      BufferView::HostStrided(tensor.dtype, shard.memory.data() + base * size, shape, strides);
  if (filled) {
    const std::string bytes = OracleBytes(tensor, region);
    for (std::int64_t i = 0; i < region.volume(); ++i) {
      std::memcpy(static_cast<std::byte*>(shard.view.data) + CellOffset(shard.view, i, size),
                  bytes.data() + i * size, static_cast<std::size_t>(size));
    }
  }
  return shard;
}

namespace {

// Cells of bits, which fill bytes from their low end.
std::string OracleBits(const RandomTensor& tensor, const Region& region) {
  const std::size_t bits = InfoOf(tensor.dtype).bits;
  std::string bytes((static_cast<std::size_t>(region.volume()) * bits + 7) / 8, '\0');
  ForEachCell(tensor.shape, region, [&](std::int64_t position, std::int64_t element) {
    for (std::size_t i = 0; i < bits; ++i) {
      const std::size_t from = static_cast<std::size_t>(element) * bits + i;
      const std::size_t to = static_cast<std::size_t>(position) * bits + i;
      const int bit = (static_cast<unsigned char>(tensor.bytes[from / 8]) >> (from % 8)) & 1;
      bytes[to / 8] = static_cast<char>(bytes[to / 8] | (bit << (to % 8)));
    }
  });
  return bytes;
}

}  // namespace

std::string OracleBytes(const RandomTensor& tensor, const Region& region) {
  const std::size_t size = tensor.element_bytes();
  if (size == 0) return OracleBits(tensor, region);
  std::string bytes(static_cast<std::size_t>(region.volume()) * size, '\0');
  ForEachCellRow(tensor.shape, region, [&](auto position, auto element, auto length) {
    std::memcpy(bytes.data() + static_cast<std::size_t>(position) * size,
                tensor.bytes.data() + static_cast<std::size_t>(element) * size,
                static_cast<std::size_t>(length) * size);
  });
  return bytes;
}

std::string CellsOf(const RandomTensor& tensor, const ShardMemory& shard) {
  const auto size = static_cast<std::int64_t>(tensor.element_bytes());
  std::string bytes(static_cast<std::size_t>(shard.region.volume() * size), '\0');
  for (std::int64_t i = 0; i < shard.region.volume(); ++i) {
    std::memcpy(bytes.data() + i * size,
                static_cast<const std::byte*>(shard.view.data) + CellOffset(shard.view, i, size),
                static_cast<std::size_t>(size));
  }
  return bytes;
}

}  // namespace tensormount
