// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BENCH_BENCH_TENSORS_H_
#define TENSORMOUNT_BENCH_BENCH_TENSORS_H_

#include <string>
#include <vector>

#include "tensormount/load.h"
#include "tensormount/save.h"

#include "bench/ckptbench.h"

namespace tensormount::bench {

enum class Cut { kRows, kColumns };

// A model of equal f32 matrices, each rank's part of it under one cut, in page-aligned buffers.
class RankTensors {
 public:
  RankTensors(const Options& options, Cut cut);

  std::uint64_t bytes() const { return total_bytes_; }
  std::size_t tensors() const { return tensors_; }
  std::uint64_t tensor_bytes() const { return total_bytes_ / tensors_; }
  const Dims& shape() const { return shape_; }
  // One rank's whole memory; parts of its tensors follow each other.
  PageBuffer& memory(int rank) { return memory_[static_cast<std::size_t>(rank)]; }
  // Bytes that depend on their place in the tensor, the same under both cuts.
  void Fill();
  // Whether every buffer holds what Fill writes.
  bool IsFilled() const;
  StateDict State(int rank);

 private:
  template <typename Fn>
  void ForEachRow(Fn fn) const;

  Cut cut_;
  int ranks_;
  Dims shape_;
  std::size_t tensors_ = 1;
  std::uint64_t total_bytes_ = 0;
  std::vector<PageBuffer> memory_;
};

}  // namespace tensormount::bench

#endif  // TENSORMOUNT_BENCH_BENCH_TENSORS_H_
