// SPDX-License-Identifier: Apache-2.0
// Loads of shapes, element types and grids other than the stored ones, as rules allow.
#include <bit>
#include <cstring>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "tests/collective/load_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Grow = LoadRule::Grow;
using Grid = LoadRule::Grid;

LoadOptions WithRule(const LoadRule& rule, const std::string& keys = "*") {
  LoadOptions options;
  options.rules = {{keys, rule}};
  options.not_requested = Strict::kIgnore;
  return options;
}

// What a buffer of a region of `asked` must hold, element by element, and that the report names
// exactly the cells that are not stored. Empty where all is right.
std::string WhatIsWrongWith(const GlobalTensor& stored, const GlobalTensor& asked, Grow grow,
                            const std::vector<std::vector<Wish>>& wishes,
                            const std::vector<LoadedRank>& loaded) {
  for (std::size_t r = 0; r < loaded.size(); ++r) {
    const std::string rank = "rank " + std::to_string(r) + ": ";
    if (!loaded[r].status.ok()) return rank + loaded[r].status.ToString();
    std::map<std::string, int> missing;
    std::uint64_t wanted = 0;
    for (std::size_t i = 0; i < wishes[r].size(); ++i) {
      std::string expected;
      ForEachElement(wishes[r][i].region, [&](const Dims& at) {
        bool inside = true;
        for (int a = 0; a < at.rank(); ++a) inside = inside && at[a] < stored.shape[a];
        const std::size_t size = InfoOf(stored.dtype).bits / 8;
        if (inside) {
          expected += ElementOf(stored, at);
          wanted += size;
        } else {
          expected.append(size, grow == Grow::kZero ? '\0' : '\xEE');
          ++missing[at.ToString()];
        }
      });
      if (expected != loaded[r].buffers[i]) {
        return rank + wishes[r][i].region.ToString() + " of " + asked.shape.ToString() + " differs";
      }
    }
    const LoadReport& report = loaded[r].report;
    for (const LoadReport::Uncovered& u : report.uncovered) {
      if (u.key != asked.key || u.zeroed != (grow == Grow::kZero)) return rank + "key or zeroed";
      ForEachElement(u.box, [&](const Dims& at) { --missing[at.ToString()]; });
    }
    for (const auto& [at, count] : missing) {
      if (count != 0)
        return rank + at + " is reported " + std::to_string(-count) + " times too much";
    }
    if (report.bytes_wanted != wanted ||
        report.bytes_by_leaf + report.bytes_by_digest + report.bytes_unverified != wanted ||
        report.bytes_unverified != 0) {
      return rank + "bytes do not add up, or are not verified";
    }
  }
  return {};
}

// Megatron-Core's case: 32 columns are stored.
class ShapeMismatch : public testing::Test {
 protected:
  void SetUp() override { ASSERT_OK(SaveByRule(path_, {stored_}, "grid:2x2", 4)); }

  TempDir dir_;
  const std::string path_ = dir_.Join("store/step");
  const GlobalTensor stored_ = MakeGlobal("w", DType::kF32, {16, 32});
};

TEST_F(ShapeMismatch, ShapeMismatchWithoutARuleFailsAndWritesNothing) {
  for (const std::int64_t columns : {28, 36}) {
    const std::vector<GlobalTensor> asked = {{"w", DType::kF32, {16, columns}, {}}, stored_};
    // Rank 0 asks for what is stored: its buffer is left alone as well.
    const auto loaded =
        LoadWishes(path_, asked, {{{1, B({0, 0}, {16, 32})}}, {{0, B({0, 0}, {16, columns})}}});
    for (const LoadedRank& rank : loaded) {
      EXPECT_THAT(rank.status, HasCode(Code::kInvalidArgument));
      EXPECT_THAT(rank.status,
                  HasMessage("rank 1: tensor w: asked for as f32 [16, " + std::to_string(columns) +
                             "], stored as f32 [16, 32]; no load rule allows axis 1 to " +
                             (columns == 28 ? "shrink" : "grow")));
      EXPECT_EQ(rank.buffers[0].find_first_not_of('\xEE'), std::string::npos);
    }
  }
}

TEST_F(ShapeMismatch, RulesCropAndGrowUnderEverySharding) {
  int turn = 0;
  for (const std::int64_t columns : {28, 36}) {
    const GlobalTensor asked = {"w", DType::kF32, {16, columns}, {}};
    for (const std::string rule : {"rows", "cols", "flat", "grid:2x2", "replicate"}) {
      for (const Grow grow : {Grow::kZero, Grow::kKeep}) {
        LoadOptions options = WithRule({.allow_shrink = true, .grow = grow});
        options.path = ++turn % 2 == 0 ? LoadPath::kDirect : LoadPath::kExchange;
        if (turn % 3 == 0) options.verify = LoadVerify::kLeaves;
        const auto wishes = WishesByRule({asked}, rule, 4);
        const auto loaded = LoadWishes(path_, {asked}, wishes, options);
        EXPECT_EQ(WhatIsWrongWith(stored_, asked, grow, wishes, loaded), "")
            << columns << " columns, " << rule;
      }
    }
  }
  // All stored cells are wanted: the digest proves them although the tensor has grown.
  const GlobalTensor asked = {"w", DType::kF32, {16, 36}, {}};
  const auto loaded =
      LoadWishes(path_, {asked}, WishesByRule({asked}, "cols", 2), WithRule({.grow = Grow::kZero}));
  EXPECT_GT(loaded[0].report.bytes_by_digest + loaded[0].report.bytes_by_leaf, 0u);
  EXPECT_EQ(loaded[0].report.bytes_unverified, 0u);
}

TEST_F(ShapeMismatch, ShrinkingAndGrowingAreAllowedSeparately) {
  const GlobalTensor mixed = {"w", DType::kF32, {12, 40}, {}};
  const auto wishes = WishesByRule({mixed}, "rows", 2);
  EXPECT_THAT(LoadWishes(path_, {mixed}, wishes, WithRule({.allow_shrink = true}))[0].status,
              HasMessage("no load rule allows axis 1 to grow"));
  EXPECT_THAT(LoadWishes(path_, {mixed}, wishes, WithRule({.grow = Grow::kZero}))[1].status,
              HasMessage("no load rule allows axis 0 to shrink"));
  const auto loaded =
      LoadWishes(path_, {mixed}, wishes, WithRule({.allow_shrink = true, .grow = Grow::kZero}));
  EXPECT_EQ(WhatIsWrongWith(stored_, mixed, Grow::kZero, wishes, loaded), "");
  const GlobalTensor other_rank = {"w", DType::kF32, {16, 32, 1}, {}};
  EXPECT_THAT(LoadWishes(path_, {other_rank}, WishesByRule({other_rank}, "rows", 1),
                         WithRule({.allow_shrink = true, .grow = Grow::kZero}))[0]
                  .status,
              HasCode(Code::kInvalidArgument));
}

TEST_F(ShapeMismatch, FirstMatchingRuleApplies) {
  const GlobalTensor asked = {"w", DType::kF32, {16, 28}, {}};
  const auto wishes = WishesByRule({asked}, "rows", 1);
  LoadOptions options;
  options.rules = {{"x*", {.allow_shrink = true}}, {"w*", {}}, {"*", {.allow_shrink = true}}};
  EXPECT_FALSE(LoadWishes(path_, {asked}, wishes, options)[0].status.ok());
  options.rules.erase(options.rules.begin() + 1);
  EXPECT_OK(LoadWishes(path_, {asked}, wishes, options)[0].status);
}

TEST_F(ShapeMismatch, SubByteTensorsCannotBeCropped) {
  const std::string path = dir_.Join("store/nibbles");
  StateDict state;
  const std::string bytes(8, '\x12');
  ASSERT_OK(state.AddTensor(
      "w", {{4, 4}, Box::Whole({4, 4}), BufferView::Host(DType::kF4, bytes.data(), {4, 4})}));
  const auto comm = MakeSelfCommunicator();
  ASSERT_OK(Save(state, path, *comm));
  StateDict request;
  std::string memory(4, '\0');
  ASSERT_OK(request.AddTensor(
      "w", {{2, 4},
            Box::Whole({2, 4}),
            BufferView::Host(DType::kF4, static_cast<void*>(memory.data()), {2, 4})}));
  const auto result = Load(request, path, *comm, WithRule({.allow_shrink = true}));
  EXPECT_THAT(result.status(), HasCode(Code::kUnsupported));
}

TEST(LoadRules, RandomShapesAndRegionsLoadExactly) {
  TempDir dir;
  Random random(TestSeed());
  for (int i = 0; i < TestScale(12); ++i) {
    const int axes = static_cast<int>(random.Int(1, 3));
    GlobalTensor asked = {"w", DType::kU16, {}, {}};
    Dims stored_shape;
    for (int a = 0; a < axes; ++a) {
      stored_shape.push_back(random.Int(1, 9));
      asked.shape.push_back(random.Int(1, 9));
    }
    const GlobalTensor stored = MakeGlobal("w", DType::kU16, stored_shape);
    const std::string path = dir.Join("store/step-" + std::to_string(i));
    ASSERT_OK(SaveByRule(path, {stored}, random.OneIn(2) ? "rows" : "flat", 2));
    std::vector<std::vector<Wish>> wishes(static_cast<std::size_t>(random.Int(1, 3)));
    for (std::vector<Wish>& of_rank : wishes) {
      for (std::int64_t n = random.Int(0, 2); n > 0; --n) {
        Dims begin;
        Dims extent;
        for (const std::int64_t size : asked.shape) {
          begin.push_back(random.Int(0, size));
          extent.push_back(random.Int(0, size - begin[begin.rank() - 1]));
        }
        const Box box = B(begin, extent);
        Region region = box;
        if (random.OneIn(2)) {
          const std::int64_t first = random.Int(0, box.volume());
          region = Region::Flat(box, first, random.Int(0, box.volume() - first)).value();
        }
        of_rank.push_back({0, region});
      }
    }
    const Grow grow = random.OneIn(2) ? Grow::kZero : Grow::kKeep;
    LoadOptions options = WithRule({.allow_shrink = true, .grow = grow});
    options.path = random.OneIn(2) ? LoadPath::kDirect : LoadPath::kExchange;
    const auto loaded = LoadWishes(path, {asked}, wishes, options);
    ASSERT_EQ(WhatIsWrongWith(stored, asked, grow, wishes, loaded), "")
        << "case " << i << ": " << stored.shape.ToString();
  }
}

// ---- Conversion ----

// A tensor of consecutive numbers.
template <typename T>
GlobalTensor Numbers(const std::string& key, DType dtype, const Dims& shape, T first, T step) {
  GlobalTensor tensor{key, dtype, shape, {}};
  T value = first;
  for (std::int64_t i = 0; i < CheckedProduct(shape).value(); ++i, value = value + step) {
    tensor.bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  return tensor;
}

TEST(LoadConvert, EveryShardingGetsRoundedValues) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  // 4.5 MB as stored: more than one block.
  const GlobalTensor stored = Numbers<double>("w", DType::kF64, {1100, 512}, -1000.0, 0.37);
  ASSERT_OK(SaveByRule(path, {stored}, "rows", 2));
  GlobalTensor asked = {"w", DType::kBF16, {1100, 512}, {}};
  for (std::size_t i = 0; i < stored.bytes.size(); i += 8) {
    double value;
    std::memcpy(&value, stored.bytes.data() + i, 8);
    // Rounded by arithmetic: 8 significant bits.
    int exponent = 0;
    const double mantissa = std::frexp(value, &exponent);
    const auto rounded =
        static_cast<float>(std::ldexp(std::nearbyint(mantissa * 256), exponent - 8));
    const auto bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(rounded) >> 16);
    asked.bytes.append(reinterpret_cast<const char*>(&bits), 2);
  }
  for (const auto& [rule, ranks] : std::vector<std::pair<std::string, int>>{
           {"rows", 1}, {"cols", 3}, {"flat", 4}, {"replicate", 2}}) {
    LoadOptions options = WithRule({.convert_dtype = true});
    options.path = rule == "cols" ? LoadPath::kExchange : LoadPath::kAuto;
    const auto wishes = WishesByRule({asked}, rule, ranks);
    const auto loaded = LoadWishes(path, {asked}, wishes, options);
    for (std::size_t r = 0; r < loaded.size(); ++r) {
      ASSERT_OK(loaded[r].status);
      EXPECT_TRUE(loaded[r].buffers[0] == BytesOf(asked, wishes[r][0].region)) << rule;
      const LoadReport& report = loaded[r].report;
      EXPECT_THAT(report.converted, ElementsAre("w"));
      const auto bytes = static_cast<std::uint64_t>(wishes[r][0].region.volume()) * 8;
      EXPECT_EQ(report.bytes_wanted, bytes);
      EXPECT_EQ(report.bytes_by_leaf, bytes);
      EXPECT_LE(report.peak_buffer_bytes, 8u << 20);
    }
  }
}

TEST(LoadConvert, TensorLoadsPlainAndConvertedInOneCall) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const GlobalTensor stored = Numbers<std::int32_t>("w", DType::kI32, {40, 50}, 0, 1);
  ASSERT_OK(SaveByRule(path, {stored}, "cols", 2));
  const GlobalTensor wide = Numbers<std::int64_t>("w", DType::kI64, {40, 50}, 0, 1);
  const Region left = B({0, 0}, {40, 25});
  const Region right = B({0, 25}, {40, 25});
  for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
    LoadOptions options = WithRule({.convert_dtype = true});
    options.path = way;
    const auto loaded =
        LoadWishes(path, {stored, wide}, {{{0, left}}, {{1, right}}, {{0, right}}}, options);
    for (const LoadedRank& rank : loaded) ASSERT_OK(rank.status);
    EXPECT_EQ(loaded[0].buffers[0], BytesOf(stored, left));
    EXPECT_EQ(loaded[1].buffers[0], BytesOf(wide, right));
    EXPECT_EQ(loaded[2].buffers[0], BytesOf(stored, right));
    EXPECT_THAT(loaded[0].report.converted, IsEmpty());
    EXPECT_EQ(loaded[0].report.bytes_unverified, 0u);
  }
}

TEST(LoadConvert, ErrorNamesTheValueThatDoesNotFit) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  ASSERT_OK(
      SaveByRule(path, {Numbers<std::int32_t>("w", DType::kI32, {20, 10}, -5, 1)}, "rows", 1));
  const GlobalTensor asked = {"w", DType::kI8, {20, 10}, {}};
  const auto loaded = LoadWishes(path, {asked}, WishesByRule({asked}, "cols", 2),
                                 WithRule({.convert_dtype = true}));
  for (const LoadedRank& rank : loaded) {
    EXPECT_THAT(rank.status, HasCode(Code::kInvalidArgument));
    // -5 + 13 * 10 + 3.
    EXPECT_THAT(rank.status,
                HasMessage("rank 0: tensor w [13, 3]: 128 cannot be represented in i8"));
  }
}

TEST(LoadConvert, UnsupportedConversionFailsAndWritesNothing) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const GlobalTensor stored = MakeGlobal("w", DType::kF32, {6, 5});
  ASSERT_OK(SaveByRule(path, {stored}, "rows", 1));
  const GlobalTensor ints = {"w", DType::kI32, {6, 5}, {}};
  const GlobalTensor half = {"w", DType::kF16, {6, 5}, {}};
  auto loaded =
      LoadWishes(path, {ints}, WishesByRule({ints}, "rows", 2), WithRule({.convert_dtype = true}));
  EXPECT_THAT(loaded[1].status, HasCode(Code::kUnsupported));
  EXPECT_THAT(loaded[1].status, HasMessage("tensor w: asked for as i32 [6, 5], stored as f32 "
                                           "[6, 5]; f32 cannot be converted to i32"));
  loaded = LoadWishes(path, {half}, WishesByRule({half}, "rows", 2), WithRule({}));
  EXPECT_THAT(loaded[0].status, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(loaded[0].status, HasMessage("no load rule allows converting the dtype"));
  EXPECT_EQ(loaded[0].buffers[0].find_first_not_of('\xEE'), std::string::npos);
}

// An expanded tensor has one row for all: of what is loaded into it three quarters would be lost.
TEST(LoadRequest, OverlappingDestinationsAreRefused) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, {MakeGlobal("w", DType::kF32, {4, 8})}, "rows", 2));
  const std::vector<std::pair<Dims, bool>> strides = {
      {{0, 1}, false}, {{8, 0}, false}, {{7, 1}, false}, {{8, 1}, true},  {{-8, 1}, true},
      {{1, 4}, true},  {{1, 3}, false}, {{1, -4}, true}, {{16, 2}, true}, {{-7, -1}, false}};
  for (const auto& [steps, good] : strides) {
    std::vector<float> memory(256);
    StateDict request;
    ASSERT_OK(request.AddTensor(
        "w", {{4, 8},
              Box::Whole({4, 8}),
              BufferView::HostStrided(DType::kF32, memory.data() + 128, {4, 8}, steps)}));
    const auto comm = MakeSelfCommunicator();
    const Status loaded = Load(request, path, *comm, {}).status();
    if (good) {
      EXPECT_OK(loaded) << steps.ToString();
    } else {
      EXPECT_THAT(loaded, HasCode(Code::kInvalidArgument)) << steps.ToString();
      EXPECT_THAT(loaded, HasMessage("share memory"));
    }
  }
}

TEST(LoadConvert, ConvertsIntoStridesWithCropAndGrow) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, {Numbers<std::int16_t>("w", DType::kI16, {6, 5}, 0, 1)}, "cols", 2));
  // Four rows of seven columns, transposed, backwards along the rows.
  std::vector<double> memory(7 * 4, -1.0);
  StateDict request;
  ASSERT_OK(request.AddTensor(
      "w", {{4, 7},
            Box::Whole({4, 7}),
            BufferView::HostStrided(DType::kF64, memory.data() + 3, {4, 7}, {-1, 4})}));
  const auto comm = MakeSelfCommunicator();
  const auto result =
      Load(request, path, *comm,
           WithRule({.allow_shrink = true, .grow = Grow::kZero, .convert_dtype = true}));
  ASSERT_OK(result);
  for (std::int64_t row = 0; row < 4; ++row) {
    for (std::int64_t column = 0; column < 7; ++column) {
      const double expected = column < 5 ? static_cast<double>(row * 5 + column) : 0.0;
      EXPECT_EQ(memory[static_cast<std::size_t>(3 - row + 4 * column)], expected);
    }
  }
  ASSERT_EQ(result.value().uncovered.size(), 1u);
  EXPECT_EQ(result.value().uncovered[0].box.ToString(), "[0:4, 5:7]");
}

TEST(LoadConvert, DamageIsDetectedBeforeConversion) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  SaveOptions save;
  save.placement = PlacementRule::kTensorFile;
  ASSERT_OK(
      SaveByRule(path, {Numbers<float>("w", DType::kF32, {100, 100}, 0, 1)}, "rows", 1, save));
  for (const std::string& file : DataFiles(path)) FlipByte(file, 123);
  const GlobalTensor asked = {"w", DType::kBF16, {100, 100}, {}};
  for (const LoadedRank& rank : LoadWishes(path, {asked}, WishesByRule({asked}, "cols", 2),
                                           WithRule({.convert_dtype = true}))) {
    EXPECT_THAT(rank.status, HasCode(Code::kDataLoss));
    EXPECT_THAT(rank.status, HasMessage("tensor w ["));
  }
}

// ---- Objects on another grid ----

class ObjectGrid : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(RunOnThreads(4, [&](Communicator& comm) -> Status {
      StateDict state;
      const std::int64_t rank = comm.rank();
      TENSORMOUNT_RETURN_IF_ERROR(
          state.AddObject("rng", "state " + std::to_string(rank), {.index = {rank}, .grid = {4}}));
      return Save(state, path_, comm).status();
    }));
  }
  // Both of two ranks ask for their part of a grid of `parts`.
  std::vector<LoadedRank> Ask(std::int64_t parts, std::int64_t first, const LoadRule& rule,
                              Strict not_stored = Strict::kRaise) {
    LoadOptions options = WithRule(rule, "r?g");
    options.not_stored = not_stored;
    return LoadWishes(path_, {}, {{}, {}}, options, [=](int rank, StateDict& request) {
      (void)request.WantObject("rng", {.index = {first + rank}, .grid = {parts}});
    });
  }

  TempDir dir_;
  const std::string path_ = dir_.Join("store/step");
};

TEST_F(ObjectGrid, GridMismatchErrorNamesBothGrids) {
  for (const LoadedRank& rank : Ask(2, 0, {})) {
    EXPECT_THAT(rank.status, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(
        rank.status,
        HasMessage("rank 0: object rng: asked for on a grid of [2], stored on a grid of [4]"));
  }
  const auto whole = LoadWishes(path_, {}, {{}}, {},
                                [](int, StateDict& request) { (void)request.WantObject("rng"); });
  EXPECT_THAT(whole[0].status, HasMessage("stored on a grid of [4]"));
}

TEST_F(ObjectGrid, GridRulesLoadByIndexFirstOrNone) {
  auto loaded = Ask(2, 0, {.grid = Grid::kByIndex});
  EXPECT_THAT(loaded[1].report.object("rng", {1}), IsOkAndHolds("state 1"));
  // A larger grid: parts 3 and 4 of 8, of which one is stored.
  loaded = Ask(8, 3, {.grid = Grid::kByIndex});
  EXPECT_THAT(loaded[0].status, HasCode(Code::kNotFound));
  EXPECT_THAT(loaded[0].status, HasMessage("rng[4]"));
  loaded = Ask(8, 3, {.grid = Grid::kByIndex}, Strict::kReturn);
  EXPECT_THAT(loaded[0].report.object("rng", {3}), IsOkAndHolds("state 3"));
  EXPECT_THAT(loaded[0].report.not_stored, ElementsAre("rng[4]"));
  EXPECT_THAT(loaded[0].report.skipped, IsEmpty());
  EXPECT_THAT(loaded[1].report.skipped, ElementsAre("rng"));
  loaded = Ask(2, 0, {.grid = Grid::kFirst});
  EXPECT_THAT(loaded[0].report.object("rng", {0}), IsOkAndHolds("state 0"));
  EXPECT_THAT(loaded[1].report.object("rng", {1}), IsOkAndHolds("state 0"));
  loaded = Ask(2, 0, {.grid = Grid::kSkip});
  ASSERT_OK(loaded[1].status);
  EXPECT_THAT(loaded[1].report.skipped, ElementsAre("rng"));
  EXPECT_THAT(loaded[1].report.object("rng", {1}), HasCode(Code::kNotFound));
  EXPECT_THAT(loaded[1].report.not_stored, IsEmpty());
}

}  // namespace
}  // namespace tensormount
