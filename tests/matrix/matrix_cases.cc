// SPDX-License-Identifier: Apache-2.0
#include "tests/matrix/matrix_cases.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "tensormount/state_dict.h"

#include "tests/support/cells.h"

namespace tensormount {
namespace {

struct MatrixTensor {
  const char* key;
  DType dtype;
  Dims shape;
};

const std::vector<MatrixTensor>& Tensors() {
  static const std::vector<MatrixTensor> tensors = {
      {"model/wide", DType::kBF16, {9, 14}},       {"model/deep", DType::kF32, {8, 5, 12}},
      {"model/ids", DType::kI64, {13, 3}},         {"model/mask", DType::kBool, {16, 6}},
      {"model/bias", DType::kF32, {11}},           {"model/scale", DType::kF32, {}},
      {"model/nothing", DType::kBF16, {0, 7}},     {"model/empty.columns", DType::kI64, {4, 0}},
      {"model/large", DType::kBF16, {64, 24, 40}},
  };
  return tensors;
}

constexpr std::byte kUntouched{0xA5};

std::size_t ElementBytes(DType dtype) { return InfoOf(dtype).bits / 8; }

// What stands at row-major index `g` of a tensor.
std::array<std::byte, 8> CellAt(const MatrixTensor& tensor, std::uint64_t g) {
  std::uint64_t x = (g + 1) * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(tensor.key[6]);
  if (tensor.dtype == DType::kBool) x = (g * 7 + g / 5) % 2;
  if (tensor.dtype == DType::kF32) {
    const float value = static_cast<float>(g) * 0.25f - 3.0f;
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    x = bits;
  }
  std::array<std::byte, 8> cell;
  std::memcpy(cell.data(), &x, sizeof(x));
  return cell;
}

// Cuts `extent` into `parts` pieces of the size that torch.chunk takes.
std::pair<std::int64_t, std::int64_t> Chunk(std::int64_t extent, int part, int parts) {
  const std::int64_t size = (extent + parts - 1) / parts;
  const std::int64_t begin = std::min(extent, part * size);
  return {begin, std::min(extent, begin + size) - begin};
}

// Cuts `extent` at places that are anything but even; some pieces are empty.
std::pair<std::int64_t, std::int64_t> Jittered(std::int64_t extent, int part, int parts) {
  const auto edge = [&](int p) -> std::int64_t {
    if (p <= 0) return 0;
    if (p >= parts) return extent;
    const std::int64_t even = extent * p / parts;
    return std::clamp<std::int64_t>(even + (p * 7919 % 5 - 2), 0, extent);
  };
  // Edges may cross by the jitter: sorted by taking the running maximum.
  std::int64_t begin = 0;
  for (int p = 1; p <= part; ++p) begin = std::max(begin, edge(p));
  return {begin, std::max(begin, edge(part + 1)) - begin};
}

Region Rows(const Dims& shape, int axis, std::pair<std::int64_t, std::int64_t> piece) {
  Dims begin = Dims::Filled(shape.rank(), 0);
  Dims extent = shape;
  begin[axis] = piece.first;
  extent[axis] = piece.second;
  return Box::Make(begin, extent).value();
}

// One rank's shards and their memory.
struct RankPart {
  StateDict state;
  struct Piece {
    const MatrixTensor* tensor;
    Region region;
    std::vector<std::byte> memory;
  };
  std::vector<std::unique_ptr<Piece>> pieces;
};

Status Build(Communicator& comm, Cut cut, bool filled, RankPart& part) {
  for (const MatrixTensor& tensor : Tensors()) {
    const std::size_t size = ElementBytes(tensor.dtype);
    for (const Region& region : RegionsOf(cut, tensor.shape, comm.rank(), comm.size())) {
      auto piece = std::make_unique<RankPart::Piece>();
      piece->tensor = &tensor;
      piece->region = region;
      piece->memory.assign(static_cast<std::size_t>(region.volume()) * size, kUntouched);
      if (filled) {
        ForEachCell(tensor.shape, region, [&](std::uint64_t i, std::uint64_t g) {
          const std::array<std::byte, 8> cell = CellAt(tensor, g);
          std::memcpy(piece->memory.data() + i * size, cell.data(), size);
        });
      }
      Dims extent = region.is_flat() ? Dims{region.volume()} : region.box().extent();
      if (cut == Cut::kLayers && extent.rank() > 1 && extent[0] == 1) {
        extent = Dims(extent.span().subspan(1));
      }
      Shard shard;
      shard.global_shape = tensor.shape;
      shard.region = region;
      shard.data = BufferView::Host(tensor.dtype, piece->memory.data(), extent);
      TENSORMOUNT_RETURN_IF_ERROR(part.state.AddTensor(tensor.key, shard));
      part.pieces.push_back(std::move(piece));
    }
  }
  return {};
}

Status CheckCells(const RankPart& part) {
  for (const auto& piece : part.pieces) {
    const MatrixTensor& tensor = *piece->tensor;
    const std::size_t size = ElementBytes(tensor.dtype);
    Status wrong;
    ForEachCell(tensor.shape, piece->region, [&](std::uint64_t i, std::uint64_t g) {
      const std::array<std::byte, 8> cell = CellAt(tensor, g);
      if (wrong.ok() && std::memcmp(piece->memory.data() + i * size, cell.data(), size) != 0) {
        wrong = Status(Code::kDataLoss, std::string("tensor ") + tensor.key + ": element " +
                                            std::to_string(g) + " is wrong in " +
                                            piece->region.ToString());
      }
    });
    TENSORMOUNT_RETURN_IF_ERROR(wrong);
  }
  return {};
}

}  // namespace

std::span<const Cut> AllCuts() {
  static constexpr std::array<Cut, 8> kCuts = {Cut::kRows,       Cut::kColumns,   Cut::kGrid,
                                               Cut::kFlatJitter, Cut::kUneven,    Cut::kEmpties,
                                               Cut::kLayers,     Cut::kReplicated};
  return kCuts;
}

std::string_view CutName(Cut cut) {
  switch (cut) {
    case Cut::kRows:
      return "rows";
    case Cut::kColumns:
      return "columns";
    case Cut::kGrid:
      return "grid";
    case Cut::kFlatJitter:
      return "flat";
    case Cut::kUneven:
      return "uneven";
    case Cut::kEmpties:
      return "empties";
    case Cut::kLayers:
      return "layers";
    case Cut::kReplicated:
      return "replicated";
  }
  return "";
}

std::vector<Region> RegionsOf(Cut cut, const Dims& shape, int rank, int world) {
  if (shape.rank() == 0) return {Region()};  // A scalar: on every rank.
  switch (cut) {
    case Cut::kRows:
      return {Rows(shape, 0, Chunk(shape[0], rank, world))};
    case Cut::kColumns:
      return {Rows(shape, shape.rank() - 1, Chunk(shape[shape.rank() - 1], rank, world))};
    case Cut::kGrid: {
      if (shape.rank() < 2) return {Rows(shape, 0, Chunk(shape[0], rank, world))};
      int a = 1;
      for (int d = 1; d * d <= world; ++d) {
        if (world % d == 0) a = d;
      }
      const int b = world / a;
      const auto rows = Chunk(shape[0], rank / b, a);
      const auto columns = Chunk(shape[1], rank % b, b);
      Dims begin = Dims::Filled(shape.rank(), 0);
      Dims extent = shape;
      begin[0] = rows.first;
      extent[0] = rows.second;
      begin[1] = columns.first;
      extent[1] = columns.second;
      return {Box::Make(begin, extent).value()};
    }
    case Cut::kFlatJitter: {
      const auto piece = Jittered(Box::Whole(shape).volume(), rank, world);
      return {Region::Flat(Box::Whole(shape), piece.first, piece.second).value()};
    }
    case Cut::kUneven:
      return {Rows(shape, 0, Jittered(shape[0], rank, world))};
    case Cut::kEmpties: {
      const std::int64_t last = world > 1 ? std::max<std::int64_t>(0, shape[0] - 1) : shape[0];
      if (rank == 0) return {Rows(shape, 0, {0, last})};
      if (rank == world - 1) return {Rows(shape, 0, {last, shape[0] - last})};
      return {Rows(shape, 0, {last, 0})};
    }
    case Cut::kLayers: {
      std::vector<Region> layers;
      for (std::int64_t i = rank; i < shape[0]; i += world) {
        layers.push_back(Rows(shape, 0, {i, 1}));
      }
      // A tensor without any must still be named by somebody.
      if (shape[0] == 0) layers.push_back(Rows(shape, 0, {0, 0}));
      return layers;
    }
    case Cut::kReplicated: {
      const int halves = std::min(world, 2);
      return {Rows(shape, 0, Chunk(shape[0], rank % halves, halves))};
    }
  }
  return {};
}

Status SaveCut(Communicator& comm, const std::string& path, Cut cut, const SaveOptions& options) {
  RankPart part;
  if (const Status built = Build(comm, cut, /*filled=*/true, part); !built.ok()) {
    part.state.Fail(built);
  }
  return Save(part.state, path, comm, options).status();
}

Status LoadCut(Communicator& comm, const std::string& path, Cut cut, const LoadOptions& options) {
  RankPart part;
  if (const Status built = Build(comm, cut, /*filled=*/false, part); !built.ok()) {
    part.state.Fail(built);
  }
  TENSORMOUNT_RETURN_IF_ERROR(Load(part.state, path, comm, options).status());
  return CheckCells(part);
}

}  // namespace tensormount
