// SPDX-License-Identifier: Apache-2.0
#include "index/records/layer_names.h"

#include <chrono>

#include "tensormount/checkpoint.h"

#include "index/read/checkpoint.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

TEST(LayerNamesTest, PatternsNeedOneSlotWithoutAdjacentDigits) {
  EXPECT_OK(CheckLayerPattern("layers.{}.w"));
  EXPECT_OK(CheckLayerPattern("{}"));
  for (const char* bad : {"layers.w", "a.{}.{}", "layer0{}.w", "a.{}1", ""}) {
    EXPECT_THAT(CheckLayerPattern(bad), HasCode(Code::kInvalidArgument)) << bad;
  }
  EXPECT_EQ(LayerKey("layers.{}.w", 12), "layers.12.w");
}

TEST(LayerNamesTest, FindInvertsLayerKey) {
  const LayerNames names(
      {{"w", "layers.{}.w"}, {"e", "experts.{}"}, {"w2", "layers.{}.w"}, {"v2", "v2.{}/x9"}});
  for (const auto& [key, pattern] : names.patterns()) {
    for (const std::int64_t layer : {0, 3, 10, 123456}) {
      const auto found = names.Find(LayerKey(pattern, layer));
      ASSERT_TRUE(found) << key << layer;
      EXPECT_EQ(found->stacked_key, key == "w2" ? "w" : key);
      EXPECT_EQ(found->layer, layer);
    }
  }
  for (const char* key : {"layers.03.w", "layers..w", "layers.-1.w", "layers.3.v", "layers.3.w.w",
                          "layers.99999999999999999999.w", "w", "", "3"}) {
    EXPECT_FALSE(names.Find(key)) << key;
  }
}

// A stack, a stack of fp4 rows of half a byte, and a tensor that hides one layer's name.
BuildSpec StackSpec(Random& random) {
  BuildSpec spec;
  RandomTensor stack{.key = "w", .dtype = DType::kF32, .shape = {5, 6, 4}, .bytes = {}};
  for (int i = 0; i < 480; ++i) stack.bytes += static_cast<char>(random.Int(0, 255));
  RandomTensor own{.key = "layers.4.w", .dtype = DType::kU8, .shape = {3}, .bytes = "abc"};
  spec.tensors = {own, stack};
  for (const RandomTensor& tensor : spec.tensors) {
    spec.partitions.push_back(RandomPartition(random, tensor.shape, spec.writers));
  }
  spec.common.emplace("$layers.w", "layers.{}.w");
  spec.common.emplace("$layers.gone", "gone.{}");
  return spec;
}

TEST(LayerNamesTest, IndexResolvesLayerNames) {
  Random random(TestSeed());
  TempDir dir;
  ASSERT_OK_AND_ASSIGN(const BuiltCheckpoint built,
                       BuildCheckpoint(HostFileSystem(), dir.Join("c"), StackSpec(random)));
  ASSERT_OK_AND_ASSIGN(auto opened, OpenedCheckpoint::Open(HostFileSystem(), built.directory, {}));
  ASSERT_OK_AND_ASSIGN(const auto layer, opened->index().ResolveLayer("layers.3.w"));
  ASSERT_TRUE(layer);
  EXPECT_EQ(layer->stacked.meta.key(), "w");
  EXPECT_EQ(layer->layer, 3);
  EXPECT_EQ(layer->meta.key(), "layers.3.w");
  EXPECT_EQ(layer->meta.shape(), (Dims{6, 4}));
  EXPECT_EQ(layer->offset, 3u * 96);
  for (const char* key : {"layers.5.w", "layers.x.w", "gone.0", "w"}) {
    ASSERT_OK_AND_ASSIGN(const auto none, opened->index().ResolveLayer(key));
    EXPECT_FALSE(none) << key;
  }
  EXPECT_THAT(layer->InStack(Region(Box::Make({0, 0}, {7, 4}).value())),
              HasCode(Code::kInvalidArgument));
}

TEST(LayerNamesTest, LayerReadsAsASeparateTensor) {
  const std::uint64_t seed = TestSeed();
  Random random(seed);
  TempDir dir;
  const BuildSpec spec = StackSpec(random);
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec).status());
  ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(dir.Join("c")));
  for (int n = 0; n < 4; ++n) {
    const RandomTensor want{
        .key = LayerKey("layers.{}.w", n),
        .dtype = DType::kF32,
        .shape = {6, 4},
        .bytes = spec.tensors[1].bytes.substr(static_cast<std::size_t>(n) * 96, 96)};
    ASSERT_OK_AND_ASSIGN(const Tensor tensor, checkpoint.tensor(want.key));
    EXPECT_EQ(tensor.key(), want.key);
    EXPECT_EQ(tensor.dtype(), DType::kF32);
    EXPECT_EQ(tensor.shape(), want.shape);
    EXPECT_EQ(tensor.bytes(), 96u);
    EXPECT_FALSE(tensor.digest());
    std::string bytes(50, '?');
    ASSERT_OK(tensor.ReadBytes(46, bytes.data(), 50));
    EXPECT_EQ(bytes, want.bytes.substr(46));
    EXPECT_THAT(tensor.ReadBytes(47, bytes.data(), 50), HasCode(Code::kInvalidArgument));
    EXPECT_THAT(tensor.ReadBytes(~std::uint64_t{0}, bytes.data(), 50),
                HasCode(Code::kInvalidArgument));
    for (int i = 0; i < 20; ++i) {
      for (const auto& mine : RandomRequest(random, want.shape, 2, true)) {
        for (const Region& region : mine) {
          ShardMemory out = MakeShardMemory(random, want, region, false);
          ASSERT_OK(tensor.Read(region, out.view)) << region.ToString() << " seed " << seed;
          ASSERT_EQ(CellsOf(want, out), OracleBytes(want, region)) << region.ToString();
        }
      }
    }
  }
  // A tensor of that very name goes before.
  ASSERT_OK_AND_ASSIGN(const Tensor own, checkpoint.tensor("layers.4.w"));
  EXPECT_EQ(own.bytes(), 3u);
  EXPECT_THAT(checkpoint.tensor("layers.5.w"), HasCode(Code::kNotFound));
  ASSERT_OK_AND_ASSIGN(const auto keys, checkpoint.keys());
  EXPECT_THAT(keys, ::testing::ElementsAre("layers.4.w", "w"));
}

TEST(LayerNamesTest, SubByteLayersMustBeWholeBytes) {
  BuildSpec spec;
  Inventory inventory;
  inventory.info.uuid = {1, 2};
  inventory.tensors.push_back(
      TensorRecord(TensorMeta::Make("half", DType::kF4, {2, 3, 1}).value()));
  inventory.tensors.push_back(TensorRecord(TensorMeta::Make("whole", DType::kF4, {2, 4}).value()));
  inventory.common.emplace("$layers.half", "half.{}");
  inventory.common.emplace("$layers.whole", "whole.{}");
  ASSERT_OK_AND_ASSIGN(const auto index, CheckpointIndex::FromInventory(inventory));
  ASSERT_OK_AND_ASSIGN(const auto half, index->ResolveLayer("half.1"));
  EXPECT_FALSE(half);
  ASSERT_OK_AND_ASSIGN(const auto whole, index->ResolveLayer("whole.1"));
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->offset, 2u);
}

TEST(LayerNamesTest, DamagedRecordsAreDataLoss) {
  Inventory inventory;
  inventory.info.uuid = {1, 2};
  inventory.common.emplace("$layers.w", 3);
  ASSERT_OK_AND_ASSIGN(const auto index, CheckpointIndex::FromInventory(inventory));
  EXPECT_THAT(index->ResolveLayer("layers.1.w"), HasCode(Code::kDataLoss));
}

}  // namespace
}  // namespace tensormount
