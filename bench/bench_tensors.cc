// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_tensors.h"

#include <algorithm>
#include <cstring>

namespace tensormount::bench {
namespace {

// One tensor, where there is enough of them.
constexpr std::uint64_t kTensorBytes = 64u << 20;

std::uint64_t Mix(std::uint64_t v) {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
  return v ^ (v >> 27);
}

}  // namespace

RankTensors::RankTensors(const Options& options, Cut cut) : cut_(cut), ranks_(options.ranks) {
  const auto total = static_cast<std::uint64_t>(options.gib * 1024 * 1024 * 1024);
  const std::uint64_t one = std::min(total, kTensorBytes);
  tensors_ = static_cast<std::size_t>(std::max<std::uint64_t>(1, total / kTensorBytes));
  // Both cuts are even, so that all ranks do the same work; rows are whole words of Fill.
  const std::int64_t columns =
      std::max<std::int64_t>(1, options.row_bytes / (8 * ranks_)) * 2 * ranks_;
  const std::int64_t rows =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(one) / (columns * 4) / ranks_) * ranks_;
  shape_ = Dims{rows, columns};
  total_bytes_ = static_cast<std::uint64_t>(rows * columns) * 4 * tensors_;
  for (int r = 0; r < ranks_; ++r) {
    memory_.emplace_back(static_cast<std::size_t>(total_bytes_) / static_cast<std::size_t>(ranks_));
  }
}

template <typename Fn>
void RankTensors::ForEachRow(Fn fn) const {
  const std::int64_t rows = cut_ == Cut::kRows ? shape_[0] / ranks_ : shape_[0];
  const std::int64_t columns = cut_ == Cut::kColumns ? shape_[1] / ranks_ : shape_[1];
  const auto words = static_cast<std::size_t>(columns / 2);
  for (int r = 0; r < ranks_; ++r) {
    for (std::size_t t = 0; t < tensors_; ++t) {
      for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t global_row = cut_ == Cut::kRows ? r * rows + row : row;
        const std::int64_t column = cut_ == Cut::kColumns ? r * columns : 0;
        const std::uint64_t seed = t * 0x9E3779B97F4A7C15u +
                                   static_cast<std::uint64_t>(global_row * shape_[1] + column) / 2;
        const std::size_t at =
            (t * static_cast<std::size_t>(rows) + static_cast<std::size_t>(row)) * words * 8;
        fn(static_cast<std::size_t>(r), at, seed, words);
      }
    }
  }
}

void RankTensors::Fill() {
  ForEachRow([&](std::size_t rank, std::size_t at, std::uint64_t seed, std::size_t words) {
    for (std::size_t i = 0; i < words; ++i) {
      const std::uint64_t v = Mix(seed + i);
      std::memcpy(memory_[rank].data() + at + 8 * i, &v, 8);
    }
  });
}

bool RankTensors::IsFilled() const {
  bool right = true;
  ForEachRow([&](std::size_t rank, std::size_t at, std::uint64_t seed, std::size_t words) {
    for (std::size_t i = 0; i < words; ++i) {
      std::uint64_t v = 0;
      std::memcpy(&v, memory_[rank].data() + at + 8 * i, 8);
      right = right && v == Mix(seed + i);
    }
  });
  return right;
}

StateDict RankTensors::State(int rank) {
  StateDict state;
  Dims begin = Dims::Filled(2, 0);
  Dims extent = shape_;
  const int axis = cut_ == Cut::kRows ? 0 : 1;
  extent[axis] = shape_[axis] / ranks_;
  begin[axis] = extent[axis] * rank;
  const Region region = Box::Make(begin, extent).value();
  const auto part = static_cast<std::size_t>(tensor_bytes()) / static_cast<std::size_t>(ranks_);
  for (std::size_t t = 0; t < tensors_; ++t) {
    void* data = memory(rank).data() + t * part;
    // A failure stays in the state and fails the save or load.
    (void)state.AddTensor("layers." + std::to_string(t) + ".weight",
                          {shape_, region, BufferView::Host(DType::kF32, data, extent)});
  }
  return state;
}

}  // namespace tensormount::bench
