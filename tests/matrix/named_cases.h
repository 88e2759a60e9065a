// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_MATRIX_NAMED_CASES_H_
#define TENSORMOUNT_TESTS_MATRIX_NAMED_CASES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/communicator.h"
#include "tensormount/load.h"
#include "tensormount/save.h"
#include "tensormount/shard.h"
#include "tensormount/state_dict.h"

#include "tests/support/status_matchers.h"

// One rank's state in the cases of other systems: shards of f32 whose values are computed from the
// global index.

namespace tensormount {

class CaseState {
 public:
  using Value = std::function<float(const Dims& at)>;

  // Adds a shard with memory of its own; filled from `value` where that is set, with -1 otherwise.
  // `local`: the shape of the buffer where it is not the region's extents.
  void Add(const std::string& key, const Dims& global, const Region& region, const Value& value,
           Replica replica = Replica::kUnlabelled) {
    auto memory =
        std::make_unique<std::vector<float>>(static_cast<std::size_t>(region.volume()), -1.0f);
    if (value) {
      std::size_t i = 0;
      ForEach(region, [&](const Dims& at) { (*memory)[i++] = value(at); });
    }
    Shard shard;
    shard.global_shape = global;
    shard.region = region;
    shard.data = BufferView::Host(DType::kF32, memory->data(),
                                  region.is_flat() ? Dims{region.volume()} : region.box().extent());
    shard.replica = replica;
    EXPECT_OK(state.AddTensor(key, shard));
    pieces_.push_back({key, region, std::move(memory)});
  }

  // Whether all cells of `key` here have the value that belongs to their place.
  Status Check(const std::string& key, const Value& value) const {
    for (const Piece& piece : pieces_) {
      if (piece.key != key) continue;
      std::size_t i = 0;
      Status wrong;
      ForEach(piece.region, [&](const Dims& at) {
        const float found = (*piece.memory)[i++];
        if (wrong.ok() && found != value(at)) {
          wrong = Status(Code::kDataLoss, key + " " + at.ToString() + ": " + std::to_string(found) +
                                              " instead of " + std::to_string(value(at)));
        }
      });
      TENSORMOUNT_RETURN_IF_ERROR(wrong);
    }
    return {};
  }

  StateDict state;

 private:
  struct Piece {
    std::string key;
    Region region;
    std::unique_ptr<std::vector<float>> memory;
  };

  template <typename Fn>
  static void ForEach(const Region& region, Fn fn) {
    for (const Box& box : region.Boxes()) {
      const std::int64_t volume = box.volume();
      for (std::int64_t k = 0; k < volume; ++k) {
        std::int64_t rest = k;
        Dims at = box.begin();
        for (int a = box.rank() - 1; a >= 0; --a) {
          at[a] = box.begin(a) + rest % box.extent(a);
          rest /= box.extent(a);
        }
        fn(at);
      }
    }
  }

  std::vector<Piece> pieces_;
};

inline Region BoxAt(const Dims& begin, const Dims& extent) {
  return Box::Make(begin, extent).value();
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_MATRIX_NAMED_CASES_H_
