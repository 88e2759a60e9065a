// SPDX-License-Identifier: Apache-2.0
#include "tensormount/shard.h"

#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/shard/boxes.h"
#include "tests/state/cells.h"
#include "tests/support/status_matchers.h"

// Cases that bear Megatron-Core's names are the cases of its unit tests of shards, said in our
// terms.

namespace tensormount {
namespace {

constexpr std::int64_t kBig = std::int64_t{1} << 62;

using Fragments = std::vector<AxisFragment>;
using Sizes = std::vector<std::int64_t>;

TEST(MegatronMapping, TestFromRankOffsetsConstructor) {
  std::vector<std::int32_t> memory(1 * 3 * 7 * 9);
  const auto shard = ShardFromOffsets(
      Ints(memory.data(), {1, 3, 7, 9}),
      Fragments{{.axis = 0, .index = 0, .count = 10}, {.axis = 2, .index = 3, .count = 6}});
  ASSERT_OK(shard);
  EXPECT_EQ(shard.value().global_shape, (Dims{10, 3, 42, 9}));
  EXPECT_EQ(shard.value().region, Region(B({0, 0, 21, 0}, {1, 3, 7, 9})));
  EXPECT_EQ(shard.value().data.data, memory.data());
  EXPECT_EQ(shard.value().replica, Replica::kUnlabelled);

  // The same cells of a buffer that lacks the axis of ten.
  const auto stacked = ShardFromOffsets(
      Ints(memory.data(), {3, 7, 9}),
      Fragments{{.axis = 2, .index = 3, .count = 6}, {.axis = 0, .index = 0, .count = 10}}, 1,
      Replica::kMain);
  ASSERT_OK(stacked);
  EXPECT_EQ(stacked.value().global_shape, (Dims{10, 3, 42, 9}));
  EXPECT_EQ(stacked.value().region, shard.value().region);
  EXPECT_EQ(stacked.value().replica, Replica::kMain);
}

TEST(MegatronMapping, TestFromRankOffsetsDuplicateAxis) {
  std::int32_t memory[6];
  const BufferView local = Ints(memory, {2, 3});
  const auto refused = [&](const Fragments& fragments, int prepended, const char* why) {
    EXPECT_THAT(ShardFromOffsets(local, fragments, prepended), HasMessage(why));
    EXPECT_THAT(ShardFromOffsets(local, fragments, prepended), HasCode(Code::kInvalidArgument));
  };
  refused({{.axis = 1, .index = 0, .count = 2}, {.axis = 1, .index = 1, .count = 2}}, 0, "twice");
  refused({{.axis = 2, .index = 0, .count = 2}}, 0, "2 axes");
  refused({{.axis = -1, .index = 0, .count = 2}}, 0, "axis -1");
  refused({{.axis = 0, .index = 2, .count = 2}}, 0, "2 of 2");
  refused({{.axis = 0, .index = -1, .count = 2}}, 0, "-1 of 2");
  refused({{.axis = 0, .index = 0, .count = 0}}, 0, "0 of 0");
  refused({{.axis = 0, .index = 0, .count = kBig}}, 0, "2^63");
  refused({{.axis = 1, .index = 0, .count = 2}}, 1, "must be given");
  refused({}, -1, "-1 prepended");
  refused({}, 15, "at most 16");
}

TEST(MegatronMapping, TestFromRankOffsetsFlatConstructor) {
  std::vector<std::int32_t> memory(5);
  const Fragments fragments{{.axis = 1, .index = 0, .count = 2},
                            {.axis = 2, .index = 3, .count = 5}};
  const auto shard = FlatShardFromOffsets({1, 4, 7}, fragments, 4, Ints(memory.data(), {5}));
  ASSERT_OK(shard);
  EXPECT_EQ(shard.value().global_shape, (Dims{1, 8, 35}));
  EXPECT_EQ(shard.value().region, F(B({0, 0, 21}, {1, 4, 7}), 4, 5));
  EXPECT_THAT(FlatShardFromOffsets({1, 4, 7}, fragments, 24, Ints(memory.data(), {5})),
              HasMessage("does not lie within the 28"));
  EXPECT_THAT(FlatShardFromOffsets({1, 4, 7}, fragments, 4, Ints(memory.data(), {1, 5})),
              HasMessage("one axis"));
  // Layer 3 of 10, in which it is a flat range.
  const auto layer = FlatShardFromOffsets({4, 7}, Fragments{{.axis = 0, .index = 3, .count = 10}},
                                          4, Ints(memory.data(), {5}), 1);
  ASSERT_OK(layer);
  EXPECT_EQ(layer.value().global_shape, (Dims{10, 4, 7}));
  EXPECT_EQ(layer.value().region, F(B({3, 0, 0}, {1, 4, 7}), 4, 5));
}

TEST(MegatronMapping, TestMetadataIntegrityViolation) {
  std::int32_t memory[24];
  const Shard good{
      .global_shape = {4, 12}, .region = B({0, 6}, {4, 6}), .data = Ints(memory, {4, 6})};
  const Sizes halves = {6, 6};
  EXPECT_OK(Split(good, 1, halves));
  Shard bad = good;
  bad.data.shape = {4, 5};
  EXPECT_THAT(Split(bad, 1, halves), HasMessage("[4, 5]"));
  bad = good;
  bad.region = B({0, 7}, {4, 6});
  EXPECT_THAT(Split(bad, 1, halves), HasMessage("lies outside"));
  bad = good;
  bad.global_shape = {4, 12, 1};
  EXPECT_THAT(Split(bad, 1, halves), HasMessage("another number of axes"));
  bad = good;
  bad.global_shape = {4, -12};
  EXPECT_THAT(Split(bad, 1, halves), HasMessage("negative"));
  bad = good;
  bad.data.strides = {kBig, 1};
  EXPECT_THAT(Split(bad, 1, halves), HasCode(Code::kInvalidArgument));
  bad = good;
  bad.data.strides = {6};
  EXPECT_THAT(Split(bad, 1, halves), HasMessage("strides"));
}

// torch.narrow of every rank's part: shape and beginning scale.
TEST(MegatronMapping, TestNarrowing) {
  std::vector<std::int32_t> memory(1 * 3 * 7 * 9);
  std::iota(memory.begin(), memory.end(), 0);
  const Shard whole = ShardFromOffsets(Ints(memory.data(), {1, 3, 7, 9}),
                                       Fragments{{.axis = 0, .index = 0, .count = 10},
                                                 {.axis = 2, .index = 3, .count = 6}})
                          .value();
  const auto narrow = NarrowedOnGrid(whole, 1, 3, 1, 2);
  ASSERT_OK(narrow);
  EXPECT_EQ(narrow.value().global_shape, (Dims{10, 2, 42, 9}));
  EXPECT_EQ(narrow.value().region, Region(B({0, 0, 21, 0}, {1, 2, 7, 9})));
  EXPECT_EQ(*static_cast<std::int32_t*>(narrow.value().data.data), 63);
  const auto on_cut_axis = NarrowedOnGrid(whole, 2, 7, 3, 2);
  ASSERT_OK(on_cut_axis);
  EXPECT_EQ(on_cut_axis.value().global_shape, (Dims{10, 3, 12, 9}));
  EXPECT_EQ(on_cut_axis.value().region, Region(B({0, 0, 6, 0}, {1, 3, 2, 9})));
  EXPECT_EQ(*static_cast<std::int32_t*>(on_cut_axis.value().data.data), 27);

  EXPECT_THAT(NarrowedOnGrid(whole, 2, 5, 0, 1), HasMessage("cannot be divided into pieces of 5"));
  EXPECT_THAT(NarrowedOnGrid(whole, 2, 7, 6, 2), HasMessage("do not lie within the 7"));
  EXPECT_THAT(NarrowedOnGrid(whole, 2, 6, 0, 1), HasMessage("more than one piece"));
  EXPECT_THAT(NarrowedOnGrid(whole, 2, 0, 0, 0), HasCode(Code::kInvalidArgument));

  // Less of the shard, and still the same tensor.
  const auto less = Narrowed(whole, 2, 3, 2);
  ASSERT_OK(less);
  EXPECT_EQ(less.value().global_shape, whole.global_shape);
  EXPECT_EQ(less.value().region, Region(B({0, 0, 24, 0}, {1, 3, 2, 9})));
  EXPECT_THAT(Narrowed(whole, 2, -1, 2), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Narrowed(whole, 2, 0, std::numeric_limits<std::int64_t>::max()),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Narrowed(whole, 4, 0, 1), HasMessage("no axis 4"));
}

TEST(MegatronMapping, TestFlatNarrow) {
  // Local [4, 7], columns 21 to 28 of [8, 35]; this rank has elements 4 to 16 of it: the end of row
  // 0, row 1, two of row 2.
  const Array whole = Array::Counting({8, 35});
  const Piece piece = MakePiece(whole, F(B({0, 21}, {4, 7}), 4, 12));
  const auto first = NarrowedOnGrid(piece.shard, 0, 4, 0, 2);
  ASSERT_OK(first);
  EXPECT_EQ(first.value().global_shape, (Dims{4, 35}));
  EXPECT_EQ(first.value().region, F(B({0, 21}, {2, 7}), 4, 10));
  EXPECT_EQ(first.value().data.shape, (Dims{10}));
  const auto second = NarrowedOnGrid(piece.shard, 0, 4, 2, 2);
  ASSERT_OK(second);
  EXPECT_EQ(second.value().region, Region(B({0, 21}, {1, 2})));
  EXPECT_EQ(*static_cast<std::int32_t*>(second.value().data.data), whole.At({2, 21}));
  // Nothing of it is a shard, too.
  const auto nothing = NarrowedOnGrid(piece.shard, 0, 4, 3, 1);
  ASSERT_OK(nothing);
  EXPECT_TRUE(nothing.value().region.empty());
  EXPECT_EQ(nothing.value().global_shape, (Dims{2, 35}));
  EXPECT_THAT(NarrowedOnGrid(piece.shard, 1, 7, 0, 3), HasCode(Code::kUnsupported));
  EXPECT_THAT(Narrowed(piece.shard, 0, 0, 1), HasCode(Code::kUnsupported));
}

TEST(MegatronMapping, TestIsMainReplica) {
  using Id = std::vector<std::int64_t>;
  EXPECT_EQ(ReplicaFromId(0), Replica::kMain);
  EXPECT_EQ(ReplicaFromId(Id{0}), Replica::kMain);
  EXPECT_EQ(ReplicaFromId(Id{0, 0}), Replica::kMain);
  EXPECT_EQ(ReplicaFromId(Id{}), Replica::kMain);
  EXPECT_EQ(ReplicaFromId(1), Replica::kCopy);
  EXPECT_EQ(ReplicaFromId(Id{0, 1}), Replica::kCopy);
  EXPECT_EQ(ReplicaFromId(Id{-1, 0}), Replica::kCopy);
}

// A factory that splits a tensor in two keys and puts it together again on load: two views of one
// buffer, which serve both ways.
TEST(MegatronMapping, TestBuildAndMerge) {
  const Array whole = Array::Counting({6, 4});
  const Piece piece = MakePiece(whole, Region(Box::Whole({6, 4})));
  const auto parts = Split(piece.shard, 0, Sizes{2, 4});
  ASSERT_OK(parts);
  ASSERT_EQ(parts.value().size(), 2u);
  EXPECT_TRUE(Holds(parts.value()[0], Array::Counting({2, 4})));
  EXPECT_TRUE(Holds(parts.value()[1], Array::Counting({4, 4}, 8)));
  // What a load writes through the parts is in the tensor.
  for (const Shard& part : parts.value()) {
    for (const auto& [position, value] : CellsOf(part)) *value = -*value;
  }
  EXPECT_EQ(piece.memory[23], -23);
  EXPECT_EQ(piece.memory[5], -5);
}

// A gated layer on 8 ranks: each has [gate rows; up rows] of its share, one tensor as a whole.
TEST(ShardViews, GatedLayerOfEightRanksMapsToOneTensor) {
  const Array truth = Array::Counting({64, 3});  // Gate: 32 rows, up: 32 rows.
  std::vector<int> seen(truth.values.size(), 0);
  for (std::int64_t rank = 0; rank < 8; ++rank) {
    std::vector<std::int32_t> local;
    for (std::int64_t half = 0; half < 2; ++half) {
      for (std::int64_t row = 0; row < 4; ++row) {
        for (std::int64_t c = 0; c < 3; ++c)
          local.push_back(truth.At({half * 32 + rank * 4 + row, c}));
      }
    }
    const Shard naive = ShardFromOffsets(Ints(local.data(), {8, 3}),
                                         Fragments{{.axis = 0, .index = rank, .count = 8}})
                            .value();
    const auto moves = FusedMoves(Sizes{32, 32}, rank, 8);
    ASSERT_OK(moves);
    const auto parts = Interleaved(naive, 0, moves.value());
    ASSERT_OK(parts);
    ASSERT_EQ(parts.value().size(), 2u);
    for (const Shard& part : parts.value()) {
      EXPECT_TRUE(Holds(part, truth)) << rank;
      for (const auto& [position, value] : CellsOf(part))
        ++seen[static_cast<std::size_t>(position)];
    }
    // The same of a flat range of the local buffer, as ZeRO cuts it.
    const Region flat = F(naive.region.box(), 5, 14);
    const Shard slice{
        .global_shape = naive.global_shape, .region = flat, .data = Ints(local.data() + 5, {14})};
    const auto flat_parts = Interleaved(slice, 0, moves.value());
    ASSERT_OK(flat_parts);
    ASSERT_EQ(flat_parts.value().size(), 2u);
    EXPECT_EQ(flat_parts.value()[0].region.volume(), 7);
    EXPECT_EQ(flat_parts.value()[1].region.volume(), 7);
    for (const Shard& part : flat_parts.value()) EXPECT_TRUE(Holds(part, truth)) << rank;
  }
  EXPECT_EQ(seen, std::vector<int>(truth.values.size(), 1));
}

TEST(ShardViews, InterleavedRefusesInvalidArguments) {
  std::int32_t memory[8];
  const Shard shard{.global_shape = {16}, .region = B({0}, {8}), .data = Ints(memory, {8})};
  const auto refused = [&](const std::vector<AxisMove>& moves, const char* why) {
    EXPECT_THAT(Interleaved(shard, 0, moves), HasMessage(why));
    EXPECT_THAT(Interleaved(shard, 0, moves), HasCode(Code::kInvalidArgument));
  };
  refused({{0, 4, 0}}, "do not cover");
  refused({{0, 4, 0}, {4, 4, 2}}, "overlap");
  refused({{0, 8, 0}, {4, 4, 12}}, "overlap");
  refused({{0, 8, 9}}, "do not lie within the 16");
  refused({{0, -1, 0}}, "do not lie within");
  refused({{std::numeric_limits<std::int64_t>::max(), 2, 0}}, "do not lie within");
  EXPECT_THAT(FusedMoves(Sizes{6, 5}, 0, 2), HasMessage("5 elements cannot be cut"));
  EXPECT_THAT(FusedMoves(Sizes{6}, 2, 2), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(FusedMoves(Sizes{kBig, kBig}, 0, 1), HasMessage("2^63"));
}

TEST(ShardViews, StackedAndConcatenatedShardsMapExactly) {
  const Array layer = Array::Counting({3, 4}, 100);
  for (const Region& region : {Region(B({1, 0}, {2, 3})), F(B({0, 0}, {3, 4}), 2, 9)}) {
    const Piece piece = MakePiece(layer, region);
    for (int axis = 0; axis <= 2; ++axis) {
      const auto stacked = Stacked(piece.shard, axis, 4, 6);
      ASSERT_OK(stacked);
      Dims shape;
      for (int a = 0; a <= 2; ++a)
        shape.push_back(a == axis ? 6 : layer.shape[a > axis ? a - 1 : a]);
      const Array expected = Array::Of(shape, [&](const Dims& index) {
        Dims inner;
        for (int a = 0; a <= 2; ++a) {
          if (a != axis) inner.push_back(index[a]);
        }
        return index[axis] == 4 ? layer.At(inner) : -1;
      });
      EXPECT_TRUE(Holds(stacked.value(), expected)) << axis;
      EXPECT_EQ(stacked.value().region.volume(), region.volume());
    }
    for (int axis = 0; axis < 2; ++axis) {
      const auto longer = Concatenated(piece.shard, axis, 2, 9);
      ASSERT_OK(longer);
      Dims shape = layer.shape;
      shape[axis] = 9;
      const Array expected = Array::Of(shape, [&](Dims index) {
        index[axis] -= 2;
        return index[axis] >= 0 && index[axis] < layer.shape[axis] ? layer.At(index) : -1;
      });
      EXPECT_TRUE(Holds(longer.value(), expected)) << axis;
    }
  }
  const Piece piece = MakePiece(layer, Region(Box::Whole(layer.shape)));
  EXPECT_THAT(Stacked(piece.shard, 3, 0, 1), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Stacked(piece.shard, 0, 6, 6), HasMessage("layer index 6 is out of range for 6 layers"));
  EXPECT_THAT(Stacked(piece.shard, 0, 0, kBig), HasMessage("2^63"));
  EXPECT_THAT(Concatenated(piece.shard, 0, 1, 3), HasMessage("do not lie within the 3"));
  EXPECT_THAT(Concatenated(piece.shard, 0, kBig, std::numeric_limits<std::int64_t>::max()),
              HasMessage("2^63"));
  // A scalar becomes an element of a vector.
  const Piece scalar = MakePiece(Array::Counting({}, 7), Region(Box()));
  const auto element = Stacked(scalar.shard, 0, 2, 5);
  ASSERT_OK(element);
  EXPECT_EQ(element.value().region, Region(B({2}, {1})));
}

TEST(ShardViews, TransposedSplitAndSlicedShardsMapExactly) {
  const Array whole = Array::Counting({4, 5, 6});
  const Piece piece = MakePiece(whole, Region(B({1, 2, 0}, {2, 3, 6})));
  const std::vector<int> axes = {2, 0, 1};
  const auto transposed = Transposed(piece.shard, axes);
  ASSERT_OK(transposed);
  const Array expected = Array::Of({6, 4, 5}, [&](const Dims& i) {
    return whole.At({i[1], i[2], i[0]});
  });
  EXPECT_TRUE(Holds(transposed.value(), expected));
  EXPECT_EQ(transposed.value().data.strides, (Dims{1, 18, 6}));

  const auto parts = Split(transposed.value(), 2, Sizes{1, 0, 3, 1});
  ASSERT_OK(parts);
  EXPECT_TRUE(parts.value()[0].region.empty());
  EXPECT_EQ(parts.value()[1].global_shape, (Dims{6, 4, 0}));
  EXPECT_EQ(parts.value()[2].region, Region(B({0, 1, 1}, {6, 2, 2})));
  EXPECT_TRUE(Holds(parts.value()[2], Array::Of({6, 4, 3}, [&](const Dims& i) {
                      return expected.At({i[0], i[1], i[2] + 1});
                    })));
  const auto sliced = Sliced(transposed.value(), B({2, 2, 0}, {3, 2, 4}));
  ASSERT_OK(sliced);
  EXPECT_EQ(sliced.value().region, Region(B({0, 0, 2}, {3, 1, 2})));
  EXPECT_TRUE(Holds(sliced.value(), Array::Of({3, 2, 4}, [&](const Dims& i) {
                      return expected.At({i[0] + 2, i[1] + 2, i[2]});
                    })));

  EXPECT_THAT(Transposed(piece.shard, std::vector<int>{0, 0, 1}), HasMessage("(0, 0, 1)"));
  EXPECT_THAT(Transposed(piece.shard, std::vector<int>{0, 1}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Transposed(piece.shard, std::vector<int>{0, 1, 3}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Split(piece.shard, 0, Sizes{1, 2}), HasMessage("do not add up to the 4"));
  EXPECT_THAT(Split(piece.shard, 0, Sizes{1, 4}), HasMessage("do not add up"));
  EXPECT_THAT(Split(piece.shard, 0, Sizes{5, -1}), HasMessage("do not add up"));
  EXPECT_THAT(Sliced(piece.shard, B({0, 0, 0}, {5, 5, 6})), HasMessage("does not lie within"));
  const Piece flat = MakePiece(whole, F(B({0, 0, 0}, {4, 5, 6}), 7, 60));
  EXPECT_THAT(Transposed(flat.shard, axes), HasCode(Code::kUnsupported));
  EXPECT_THAT(Split(flat.shard, 1, Sizes{2, 3}), HasMessage("would not be one flat range"));
  EXPECT_OK(Split(flat.shard, 0, Sizes{1, 3}));
  // One cut may leave a box of a flat range, which further ones can cut.
  const auto column = Sliced(flat.shard, B({1, 0, 2}, {1, 5, 3}));
  ASSERT_OK(column);
  EXPECT_EQ(column.value().region, Region(B({0, 0, 0}, {1, 5, 3})));
  EXPECT_TRUE(Holds(column.value(), Part(whole, B({1, 0, 2}, {1, 5, 3}))));
}

// Negative strides, buffers of one axis for boxes, buffers without leading axes: all are views'
// beginnings.
TEST(ShardViews, ViewsAcceptAnyBufferThatFits) {
  const Array whole = Array::Counting({1, 4, 3});
  std::vector<std::int32_t> backwards(whole.values.rbegin(), whole.values.rend());
  const Region all = Box::Whole(whole.shape);
  std::int32_t* last = backwards.data() + 11;
  for (const BufferView& data : {BufferView::HostStrided(DType::kI32, last, {1, 4, 3}, {0, -3, -1}),
                                 BufferView::HostStrided(DType::kI32, last, {4, 3}, {-3, -1}),
                                 BufferView::HostStrided(DType::kI32, last, {12}, {-1})}) {
    const Shard shard{.global_shape = whole.shape, .region = all, .data = data};
    ASSERT_TRUE(Holds(shard, whole));
    const auto cut = Sliced(shard, B({0, 1, 1}, {1, 3, 2}));
    ASSERT_OK(cut);
    EXPECT_TRUE(Holds(cut.value(), Array::Of({1, 3, 2}, [&](const Dims& i) {
                        return whole.At({i[0], i[1] + 1, i[2] + 1});
                      })));
    const auto turned = Transposed(shard, std::vector<int>{2, 1, 0});
    ASSERT_OK(turned);
    EXPECT_TRUE(Holds(turned.value(), Array::Of({3, 4, 1}, [&](const Dims& i) {
                        return whole.At({i[2], i[1], i[0]});
                      })));
  }
}

TEST(ShardViews, EmptyAndMetadataOnlyShardsHaveViews) {
  const Shard none = MetadataOnly(DType::kBF16, {8, 4}, B({2, 0}, {3, 4}), Replica::kCopy);
  EXPECT_TRUE(none.metadata_only);
  EXPECT_EQ(none.data.shape, (Dims{3, 4}));
  const auto parts = Split(none, 0, Sizes{3, 5});
  ASSERT_OK(parts);
  EXPECT_EQ(parts.value()[1].region, Region(B({0, 0}, {2, 4})));
  EXPECT_EQ(parts.value()[1].data.shape, (Dims{2, 4}));
  EXPECT_EQ(parts.value()[1].data.data, nullptr);
  EXPECT_TRUE(parts.value()[1].metadata_only);
  EXPECT_EQ(parts.value()[1].replica, Replica::kCopy);
  const auto turned = Transposed(none, std::vector<int>{1, 0});
  ASSERT_OK(turned);
  EXPECT_EQ(turned.value().data.shape, (Dims{4, 3}));

  const Shard empty{
      .global_shape = {8, 4}, .region = F(B({8, 0}, {0, 4}), 0, 0), .data = Ints(nullptr, {0})};
  const auto stacked = Stacked(empty, 1, 0, 2);
  ASSERT_OK(stacked);
  EXPECT_TRUE(stacked.value().region.empty());
  const auto cut = Split(empty, 0, Sizes{4, 4});
  ASSERT_OK(cut);
  EXPECT_EQ(cut.value()[0].data.shape, cut.value()[0].region.box().extent());
  EXPECT_OK(Transposed(empty, std::vector<int>{1, 0}));
  EXPECT_OK(NarrowedOnGrid(empty, 0, 2, 0, 1));
  const Shard no_extent{
      .global_shape = {0, 4}, .region = B({0, 0}, {0, 4}), .data = Ints(nullptr, {0, 4})};
  EXPECT_OK(NarrowedOnGrid(no_extent, 0, 2, 0, 1));
}

TEST(BufferViews, BuffersSliceTransposeAndUnsqueeze) {
  std::int32_t memory[24];
  const BufferView buffer = Ints(memory, {4, 6});
  const auto slice = SliceView(buffer, B({1, 2}, {2, 3}));
  ASSERT_OK(slice);
  EXPECT_EQ(slice.value().data, memory + 8);
  EXPECT_EQ(slice.value().shape, (Dims{2, 3}));
  EXPECT_EQ(slice.value().strides, (Dims{6, 1}));
  EXPECT_THAT(SliceView(buffer, B({1, 2}, {2, 5})), HasMessage("does not lie within"));
  EXPECT_OK(SliceView(buffer, B({4, 0}, {0, 6})));
  const auto turned = TransposeView(buffer, std::vector<int>{1, 0});
  ASSERT_OK(turned);
  EXPECT_EQ(turned.value().shape, (Dims{6, 4}));
  EXPECT_EQ(turned.value().strides, (Dims{1, 6}));
  const auto longer = UnsqueezeView(buffer, 1);
  ASSERT_OK(longer);
  EXPECT_EQ(longer.value().shape, (Dims{4, 1, 6}));
  EXPECT_THAT(UnsqueezeView(buffer, 3), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(SliceView(BufferView::HostStrided(DType::kI32, memory, {4}, {kBig}), B({3}, {1})),
              HasMessage("2^63"));
  EXPECT_THAT(SliceView(BufferView::HostStrided(DType::kI32, memory, {4}, {}), B({3}, {1})),
              HasMessage("strides"));
}

TEST(BufferViews, SubByteElementsStayPacked) {
  std::uint8_t memory[12];
  const BufferView buffer = BufferView::Host(DType::kF4, static_cast<void*>(memory), {4, 6});
  const auto rows = SliceView(buffer, B({1, 0}, {2, 6}));
  ASSERT_OK(rows);
  EXPECT_EQ(rows.value().data, memory + 3);
  EXPECT_OK(SliceView(buffer, B({1, 2}, {1, 4})));
  EXPECT_THAT(SliceView(buffer, B({1, 2}, {2, 4})), HasMessage("would not be packed"));
  EXPECT_THAT(SliceView(buffer, B({1, 1}, {1, 2})), HasMessage("does not begin on a byte"));
  EXPECT_THAT(TransposeView(buffer, std::vector<int>{1, 0}), HasCode(Code::kUnsupported));
  EXPECT_OK(UnsqueezeView(buffer, 1));
  const Shard shard{.global_shape = {4, 6}, .region = Box::Whole({4, 6}), .data = buffer};
  EXPECT_OK(Split(shard, 0, Sizes{1, 3}));
  EXPECT_THAT(Split(shard, 1, Sizes{2, 4}), HasCode(Code::kUnsupported));
  // Without data nothing needs to be packed, but the tensor must fill whole bytes.
  const Shard described = MetadataOnly(DType::kF4, {4, 6}, Box::Whole({4, 6}));
  EXPECT_OK(Split(described, 1, Sizes{2, 4}));
  EXPECT_OK(Transposed(described, std::vector<int>{1, 0}));
  EXPECT_THAT(Sliced(described, B({0, 0}, {1, 3})), HasMessage("whole bytes"));
}

}  // namespace
}  // namespace tensormount
