// SPDX-License-Identifier: Apache-2.0
#include "examples/models/optimizer.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tensormount/checkpoint.h"
#include "tensormount/load.h"
#include "tensormount/save.h"

#include "tests/shard/boxes.h"
#include "tests/state/cells.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::examples {
namespace {

OptimizerGroup Adam(std::vector<std::string> parameters, std::vector<std::string> frozen = {}) {
  OptimizerGroup group;
  group.hyperparameters.items["lr"] = 0.001;
  group.hyperparameters.items["betas"] = CommonTuple{{0.9, 0.999}};
  group.parameters = std::move(parameters);
  group.slots = {"exp_avg", "exp_avg_sq"};
  group.scalars = {"step"};
  group.frozen = std::move(frozen);
  return group;
}

// A parameter of two rows with all that Adam keeps of it.
struct AdamMemory {
  std::int32_t exp_avg[6] = {1, 2, 3, 4, 5, 6};
  std::int32_t exp_avg_sq[6] = {7, 8, 9, 10, 11, 12};
  float step = 3;
};
Shard Rows(std::int64_t rank, std::int64_t ranks) {
  return MetadataOnly(DType::kBF16, {2 * ranks, 3}, B({2 * rank, 0}, {2, 3}));
}

TEST(OptimizerTest, AddsSlotsAndGroups) {
  AdamMemory m;
  OptimizerState optimizer;
  ASSERT_OK(optimizer.AddParameter("layers.w", Rows(1, 4)));
  ASSERT_OK(optimizer.AddParameter("embedding", Rows(0, 2)));
  ASSERT_OK(optimizer.AddSlot("layers.w", "exp_avg", Ints(m.exp_avg, {2, 3})));
  ASSERT_OK(optimizer.AddSlot("layers.w", "exp_avg_sq", Ints(m.exp_avg_sq, {2, 3})));
  ASSERT_OK(optimizer.AddScalar("layers.w", "step",
                                BufferView::Host(DType::kF32, static_cast<void*>(&m.step), {1})));
  // A parameter of another rank is in the group, too.
  ASSERT_OK(optimizer.AddGroup(Adam({"layers.w", "embedding", "elsewhere"}, {"embedding"})));
  StateDict state;
  ASSERT_OK(optimizer.AddTo(state));
  std::map<std::string, Shard> tensors;
  for (const StateDict::TensorItem& item : state.tensors()) tensors.emplace(item.key, item.shard);
  ASSERT_EQ(tensors.size(), 3u);
  const Shard& slot = tensors.at("optimizer.state.exp_avg.layers.w");
  EXPECT_EQ(slot.global_shape, (Dims{8, 3}));
  EXPECT_EQ(slot.region, Region(B({2, 0}, {2, 3})));
  EXPECT_EQ(slot.data.dtype, DType::kI32);
  EXPECT_EQ(slot.data.data, m.exp_avg);
  EXPECT_EQ(tensors.at("optimizer.state.step.layers.w").global_shape, Dims());
  EXPECT_TRUE(tensors.contains("optimizer.state.exp_avg_sq.layers.w"));

  const auto groups = OptimizerGroupsFromCommon(state.common().at(OptimizerGroupsName()));
  ASSERT_OK(groups);
  ASSERT_EQ(groups.value().size(), 1u);
  EXPECT_EQ(CommonValue(groups.value()[0].hyperparameters).At("betas(1)").value(),
            CommonValue(0.999));
  EXPECT_THAT(groups.value()[0].scalars, testing::ElementsAre("step"));
  EXPECT_THAT(groups.value()[0].frozen, testing::ElementsAre("embedding"));
  EXPECT_THAT(ParameterById(groups.value(), 2), IsOkAndHolds(std::string("elsewhere")));
  EXPECT_THAT(ParameterById(groups.value(), 3), HasCode(Code::kNotFound));
  EXPECT_THAT(ParameterById(groups.value(), -1), HasCode(Code::kNotFound));

  StateDict request;
  ASSERT_OK(optimizer.AddToLoad(request));
  EXPECT_EQ(request.tensors().size(), 3u);
  EXPECT_TRUE(request.common().empty());
}

TEST(OptimizerTest, ErrorNamesMissingSlotsAndParameters) {
  AdamMemory m;
  const BufferView avg = Ints(m.exp_avg, {2, 3});
  const BufferView step = BufferView::Host(DType::kF32, static_cast<void*>(&m.step), {});
  const auto refused = [&](const std::function<void(OptimizerState&)>& fill, const char* why) {
    OptimizerState optimizer("opt");
    ASSERT_OK(optimizer.AddParameter("w", Rows(0, 1)));
    fill(optimizer);
    StateDict state;
    EXPECT_THAT(optimizer.AddTo(state), HasMessage(why));
    EXPECT_THAT(state.status(), HasMessage(why));
  };
  const auto all_but = [&](OptimizerState& optimizer, std::string_view without) {
    for (const char* slot : {"exp_avg", "exp_avg_sq"}) {
      EXPECT_THAT(without == slot ? Status() : optimizer.AddSlot("w", slot, avg), IsOk());
    }
    EXPECT_THAT(without == "step" ? Status() : optimizer.AddScalar("w", "step", step), IsOk());
  };
  refused([](OptimizerState&) {}, "opt: parameter w is in no group");
  for (const std::string slot : {"exp_avg", "exp_avg_sq", "step"}) {
    refused(
        [&](OptimizerState& optimizer) {
          all_but(optimizer, slot);
          EXPECT_OK(optimizer.AddGroup(Adam({"w"})));
        },
        ("slot " + slot + " of parameter w is missing").c_str());
  }
  refused(
      [&](OptimizerState& optimizer) {
        all_but(optimizer, "");
        EXPECT_OK(optimizer.AddSlot("w", "momentum", avg));
        EXPECT_OK(optimizer.AddGroup(Adam({"w"})));
      },
      "slot momentum of parameter w is not one of its group");
  refused(
      [&](OptimizerState& optimizer) {
        all_but(optimizer, "exp_avg");
        EXPECT_OK(optimizer.AddGroup(Adam({"w"}, {"w"})));
      },
      "though it is frozen");
  refused(
      [&](OptimizerState& optimizer) {
        all_but(optimizer, "");
        EXPECT_OK(optimizer.AddGroup(Adam({"w"})));
        EXPECT_OK(optimizer.AddGroup(Adam({"w"})));
      },
      "parameter w is in two groups");

  OptimizerState optimizer;
  ASSERT_OK(optimizer.AddParameter("w", Rows(0, 1)));
  EXPECT_THAT(optimizer.AddParameter("w", Rows(0, 1)), HasMessage("added twice"));
  EXPECT_THAT(optimizer.AddSlot("v", "exp_avg", avg), HasMessage("no such parameter"));
  EXPECT_THAT(optimizer.AddSlot("w", "exp.avg", avg), HasMessage("without dots"));
  EXPECT_THAT(
      optimizer.AddSlot("w", "exp_avg", Ints(m.exp_avg, {3, 2})),
      HasMessage("slot exp_avg of parameter w: shape [3, 2], but the parameter's is [2, 3]"));
  EXPECT_OK(optimizer.AddSlot("w", "exp_avg", avg));
  EXPECT_THAT(optimizer.AddSlot("w", "exp_avg", avg), HasMessage("added twice"));
  OptimizerGroup group = Adam({"w", "w"});
  EXPECT_THAT(optimizer.AddGroup(group), HasMessage("lists a parameter twice"));
  group = Adam({"w"}, {"x"});
  EXPECT_THAT(optimizer.AddGroup(group), HasMessage("frozen parameter x"));
  group = Adam({"w"});
  group.scalars = {"exp_avg"};
  EXPECT_THAT(optimizer.AddGroup(group), HasMessage("exp_avg twice"));
}

// The same views serve the parameter and its slots.
TEST(OptimizerTest, SlotsUseTheViewsOfTheirParameter) {
  const ShardView halves = [](const BufferView& local) -> Result<std::vector<KeyedShard>> {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const Shard whole,
        ShardFromOffsets(local, std::vector<AxisFragment>{{.axis = 1, .index = 1, .count = 2}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Shard> parts,
                                 Split(whole, 0, std::vector<std::int64_t>{1, 1}));
    return std::vector<KeyedShard>{{"gate", parts[0]}, {"up", parts[1]}};
  };
  AdamMemory m;
  OptimizerState optimizer;
  ASSERT_OK(optimizer.AddParameters("fc1", Ints(nullptr, {2, 3}), halves));
  OptimizerGroup group = Adam({"gate", "up"});
  group.scalars = {};
  ASSERT_OK(optimizer.AddGroup(group));
  ASSERT_OK(optimizer.AddSlot("fc1", "exp_avg", Ints(m.exp_avg, {2, 3})));
  ASSERT_OK(optimizer.AddSlot("fc1", "exp_avg_sq", Ints(m.exp_avg_sq, {2, 3})));
  StateDict state;
  ASSERT_OK(optimizer.AddTo(state));
  ASSERT_EQ(state.tensors().size(), 4u);
  for (const StateDict::TensorItem& item : state.tensors()) {
    EXPECT_EQ(item.shard.region, Region(B({0, 3}, {1, 3}))) << item.key;
    if (item.key == "optimizer.state.exp_avg_sq.up") {
      EXPECT_EQ(item.shard.data.data, m.exp_avg_sq + 3);
    }
  }
  // A view that depends on more than the memory.
  int calls = 0;
  ASSERT_OK(optimizer.AddParameters(
      "odd", Ints(nullptr, {2}), [&calls](const BufferView& b) -> Result<std::vector<KeyedShard>> {
        return std::vector<KeyedShard>{
            {"odd", {.global_shape = {8}, .region = B({2 * calls++}, {2}), .data = b}}};
      }));
  EXPECT_THAT(optimizer.AddSlot("odd", "exp_avg", Ints(m.exp_avg, {2})),
              HasMessage("is [2:4] of odd, which the parameter is not"));
}

TEST(OptimizerTest, ChecksStoredGroupsAndSlots) {
  const std::vector<OptimizerGroup> groups = {Adam({"w", "f"}, {"f"}), Adam({"v"})};
  std::map<std::string, Dims, std::less<>> stored = {
      {"w", {4, 3}},
      {"optimizer.state.exp_avg.w", {4, 3}},
      {"optimizer.state.exp_avg_sq.w", {4, 3}},
      {"optimizer.state.step.w", {}},
      // Of v only the slots.
      {"optimizer.state.exp_avg.v", {7}},
      {"optimizer.state.exp_avg_sq.v", {7}},
      {"optimizer.state.step.v", {}},
  };
  const ShapeOf shape_of = [&stored](std::string_view key) -> Result<Dims> {
    const auto found = stored.find(key);
    if (found == stored.end()) return Status(Code::kNotFound, "");
    return found->second;
  };
  EXPECT_OK(CheckOptimizer(groups, shape_of));
  const auto with = [&](const std::string& key, std::optional<Dims> shape, const char* why) {
    const auto before = stored;
    stored.erase(key);
    if (shape) stored[key] = *shape;
    EXPECT_THAT(CheckOptimizer(groups, shape_of), HasMessage(why));
    EXPECT_THAT(CheckOptimizer(groups, shape_of), HasCode(Code::kDataLoss));
    stored = before;
  };
  with("optimizer.state.exp_avg_sq.w", std::nullopt,
       "optimizer: slot exp_avg_sq of parameter w is not stored");
  with("optimizer.state.exp_avg.w", Dims{3, 4}, "is stored with shape [3, 4], not [4, 3]");
  with("optimizer.state.exp_avg_sq.v", Dims{8}, "parameter v is stored with shape [8], not [7]");
  with("optimizer.state.step.v", Dims{1}, "slot step of parameter v is stored with shape [1]");
  stored.clear();
  EXPECT_THAT(CheckOptimizer(groups, shape_of), HasMessage("and 5 more"));
  EXPECT_THAT(CheckOptimizer(groups,
                             [](std::string_view) -> Result<Dims> {
                               return Status(Code::kUnavailable, "away");
                             }),
              HasMessage("away"));
  CommonValue bad = OptimizerGroupsToCommon(groups);
  bad.get_if<CommonList>()->items[1].get_if<CommonDict>()->items["slots"] = CommonValue("x");
  EXPECT_THAT(OptimizerGroupsFromCommon(bad), HasMessage("group 1 lacks a field"));
  EXPECT_THAT(OptimizerGroupsFromCommon(CommonValue(1)), HasCode(Code::kDataLoss));
}

TEST(BucketTest, BucketShardsMapToParameterRegions) {
  std::vector<std::int32_t> bucket(40);
  for (std::size_t i = 0; i < bucket.size(); ++i) bucket[i] = static_cast<std::int32_t>(i);
  const std::vector<BucketEntry> entries = {
      {"b", 20, {6, 4}, B({2, 1}, {4, 3})},           // 12 elements, to 32.
      {"a", 2, {4, 4}, F(B({0, 0}, {4, 4}), 1, 15)},  // To 17; then padding.
      {"none", 5, {0}, B({0}, {0})},
  };
  const auto parts = BucketShards(Ints(bucket.data() + 10, {15}), 10, entries);
  ASSERT_OK(parts);
  ASSERT_EQ(parts.value().size(), 2u);
  EXPECT_EQ(parts.value()[0].key, "a");
  EXPECT_EQ(parts.value()[0].shard.region, F(B({0, 0}, {4, 4}), 9, 7));
  EXPECT_EQ(parts.value()[0].shard.data.data, bucket.data() + 10);
  EXPECT_EQ(parts.value()[1].key, "b");
  EXPECT_EQ(parts.value()[1].shard.region, F(B({2, 1}, {4, 3}), 0, 5));
  EXPECT_EQ(parts.value()[1].shard.data.data, bucket.data() + 20);
  EXPECT_THAT(BucketShards(Ints(bucket.data(), {3, 5}), 0, entries), HasMessage("no part of"));
  EXPECT_THAT(BucketShards(Ints(bucket.data(), {3}), INT64_MAX - 1, entries),
              HasCode(Code::kInvalidArgument));
  const std::vector<BucketEntry> overlapping = {{"a", 0, {4}, B({0}, {4})},
                                                {"b", 3, {4}, B({0}, {4})}};
  EXPECT_THAT(BucketShards(Ints(bucket.data(), {9}), 0, overlapping),
              HasMessage("parameters a and b overlap"));
  const std::vector<BucketEntry> far = {{"a", INT64_MAX, {4}, B({0}, {4})}};
  EXPECT_THAT(BucketShards(Ints(bucket.data(), {9}), 0, far), HasCode(Code::kInvalidArgument));
}

// Megatron's fully reshardable state of a distributed optimizer: saved from buckets of two
// tensor-parallel ranks times two data-parallel ones, loaded by three ranks as rows, and into
// buckets of another number of ranks.
TEST(BucketTest, OptimizerStateIsResharded) {
  const TempDir dir;
  const std::string path = dir.path() + "/store/step-1";
  const std::map<std::string, Array> truth = {{"w", Array::Counting({6, 8}, 100)},
                                              {"b", Array::Counting({5}, 1000)}};
  // The bucket of tensor-parallel rank t of `tensor_ranks`: w cut by columns, b whole.
  const auto entries_of = [](std::int64_t t, std::int64_t tensor_ranks) {
    const std::int64_t columns = 8 / tensor_ranks;
    return std::vector<BucketEntry>{{"b", 3, {5}, B({0}, {5})},
                                    {"w", 11, {6, 8}, B({0, t * columns}, {6, columns})}};
  };
  struct Rank {
    std::vector<std::int32_t> memory;
    std::int64_t first = 0;
    std::int32_t step = 0;
  };
  // Adds the optimizer of one rank; `memory` is its part of the bucket, cut into odd pieces.
  const auto build = [&](OptimizerState& optimizer, int rank, std::int64_t tensor_ranks,
                         int data_ranks, Rank& mine) -> Status {
    const std::int64_t t = rank / data_ranks;
    const std::int64_t d = rank % data_ranks;
    const std::vector<BucketEntry> entries = entries_of(t, tensor_ranks);
    const std::int64_t length = 11 + 48 / tensor_ranks + 2;
    mine.first = d * length / data_ranks;
    const std::int64_t extent = (d + 1) * length / data_ranks - mine.first;
    mine.memory.assign(static_cast<std::size_t>(extent), -1);
    const ShardView view = [entries, first = mine.first](const BufferView& b) {
      return BucketShards(b, first, entries);
    };
    const BufferView data = Ints(mine.memory.data(), {extent});
    TENSORMOUNT_RETURN_IF_ERROR(optimizer.AddParameters("bucket 0", data, view));
    TENSORMOUNT_RETURN_IF_ERROR(optimizer.AddSlot("bucket 0", "exp_avg", data));
    for (const KeyedShard& part : view(data).value()) {
      TENSORMOUNT_RETURN_IF_ERROR(optimizer.AddScalar(part.key, "step", Ints(&mine.step, {})));
    }
    OptimizerGroup group = Adam({"w", "b"});
    group.slots = {"exp_avg"};
    return optimizer.AddGroup(group);
  };
  ASSERT_OK(RunOnThreads(4, [&](Communicator& comm) -> Status {
    Rank mine;
    OptimizerState optimizer;
    TENSORMOUNT_RETURN_IF_ERROR(build(optimizer, comm.rank(), 2, 2, mine));
    mine.step = 17;
    StateDict state;
    TENSORMOUNT_RETURN_IF_ERROR(optimizer.AddTo(state));
    for (const StateDict::TensorItem& item : state.tensors()) {
      if (item.shard.global_shape.rank() == 0) continue;
      const Array& array = truth.at(item.key.substr(item.key.rfind('.') + 1));
      for (const auto& [position, value] : CellsOf(item.shard)) {
        *value = array.values[static_cast<std::size_t>(position)];
      }
    }
    return Save(state, path, comm).status();
  }));

  const auto checkpoint = Checkpoint::Open(path);
  ASSERT_OK(checkpoint);
  const auto stored = checkpoint.value().common(OptimizerGroupsName());
  ASSERT_OK(stored);
  const auto groups = OptimizerGroupsFromCommon(stored.value());
  ASSERT_OK(groups);
  EXPECT_OK(CheckOptimizer(groups.value(), ShapesOf(checkpoint.value())));
  std::vector<OptimizerGroup> more = groups.value();
  more[0].slots.push_back("exp_avg_sq");
  EXPECT_THAT(CheckOptimizer(more, ShapesOf(checkpoint.value())),
              HasMessage("slot exp_avg_sq of parameter w is not stored, and 1 more"));
  for (const auto& [key, array] : truth) {
    const auto tensor = checkpoint.value().tensor(OptimizerSlotKey("exp_avg", key));
    ASSERT_OK(tensor);
    std::vector<std::int32_t> values(array.values.size());
    ASSERT_OK(tensor.value().Read(Box::Whole(array.shape), Ints(values.data(), array.shape)));
    EXPECT_EQ(values, array.values) << key;
  }

  for (const auto& [tensor_ranks, data_ranks] :
       std::vector<std::pair<std::int64_t, int>>{{1, 3}, {4, 1}, {2, 3}}) {
    const int ranks = static_cast<int>(tensor_ranks) * data_ranks;
    EXPECT_OK(RunOnThreads(ranks, [&, t = tensor_ranks, d = data_ranks](Communicator& comm) {
      const auto load = [&]() -> Status {
        Rank mine;
        OptimizerState optimizer;
        TENSORMOUNT_RETURN_IF_ERROR(build(optimizer, comm.rank(), t, d, mine));
        StateDict request;
        TENSORMOUNT_RETURN_IF_ERROR(optimizer.AddToLoad(request));
        TENSORMOUNT_RETURN_IF_ERROR(Load(request, path, comm).status());
        for (const StateDict::TensorItem& item : request.tensors()) {
          if (item.shard.global_shape.rank() == 0) {
            EXPECT_EQ(mine.step, 17);
          } else {
            EXPECT_TRUE(Holds(item.shard, truth.at(item.key.substr(item.key.rfind('.') + 1))));
          }
        }
        return Status();
      };
      return load();
    }));
  }
}

}  // namespace
}  // namespace tensormount::examples
