// SPDX-License-Identifier: Apache-2.0
#include "tensormount/load.h"

#include <atomic>
#include <cstring>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/log.h"
#include "collective/load/load_plan.h"
#include "tests/collective/load_testing.h"
#include "tests/support/device_mode.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Wide enough that a column cut has runs shorter than a leaf and the tensor has several leaves.
std::vector<GlobalTensor> SomeTensors() {
  return {MakeGlobal("big", DType::kF32, {96, 700}),
          MakeGlobal("layer.0/w", DType::kBF16, {7, 5}),
          MakeGlobal("bias", DType::kF64, {13}),
          MakeGlobal("scalar", DType::kI64, {}),
          MakeGlobal("none", DType::kF32, {0, 4}),
          MakeGlobal("cube", DType::kU8, {3, 4, 5}),
          MakeGlobal("pairs", DType::kC128, {6, 9}),
          MakeGlobal("bytes", DType::kI8, {1000}),
          MakeGlobal("deep", DType::kI16, {2, 2, 3, 2, 5})};
}

TEST(Load, LoadsAnyShardingFromAnyOther) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = SomeTensors();
  const std::vector<std::pair<std::string, int>> saves = {
      {"rows", 4}, {"cols", 4}, {"grid:2x2", 4}, {"flat", 3}, {"replicate", 2}};
  const std::vector<std::pair<std::string, int>> loads = {{"rows", 1}, {"rows", 3},     {"cols", 2},
                                                          {"cols", 3}, {"grid:2x2", 4}, {"flat", 2},
                                                          {"flat", 8}, {"replicate", 2}};
  const LoadVerify verifies[] = {LoadVerify::kAuto, LoadVerify::kLeaves, LoadVerify::kEnd,
                                 LoadVerify::kOff};
  const LoadPath paths[] = {LoadPath::kDirect, LoadPath::kExchange, LoadPath::kAuto};
  std::size_t turn = 0;
  for (const auto& [save_rule, save_ranks] : saves) {
    const std::string path = dir.Join("store/from-" + save_rule.substr(0, 4));
    ASSERT_OK(SaveByRule(path, tensors, save_rule, save_ranks));
    for (const auto& [rule, ranks] : loads) {
      for (int i = 0; i < 3; ++i, ++turn) {
        LoadOptions options;
        options.path = paths[i];
        options.verify = verifies[turn % 3];
        const auto wishes = WishesByRule(tensors, rule, ranks);
        const auto loaded = LoadWishes(path, tensors, wishes, options);
        EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "")
            << save_rule << " -> " << rule << " on " << ranks << ", path " << i << ", verify "
            << turn % 3;
      }
      ++turn;  // Another verification for each path of the next pair.
    }
  }
}

TEST(Load, LoadsRandomBoxesAndFlatRanges) {
  TempDir dir;
  Random random(TestSeed());
  const std::vector<GlobalTensor> tensors = {MakeGlobal("a", DType::kU16, {40, 30}),
                                             MakeGlobal("b", DType::kF32, {9, 8, 7})};
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "grid:2x2", 4));
  for (int i = 0; i < TestScale(25); ++i) {
    std::vector<std::vector<Wish>> wishes(static_cast<std::size_t>(random.Int(1, 4)));
    for (std::vector<Wish>& of_rank : wishes) {
      for (std::int64_t n = random.Int(0, 3); n > 0; --n) {
        const auto t = static_cast<std::size_t>(random.Int(0, 1));
        Dims begin;
        Dims extent;
        for (std::int64_t size : tensors[t].shape) {
          begin.push_back(random.Int(0, size));
          extent.push_back(random.Int(0, size - begin[begin.rank() - 1]));
        }
        const Box box = Box::Make(begin, extent).value();
        Region region = box;
        if (random.OneIn(2)) {
          const std::int64_t first = random.Int(0, box.volume());
          region = Region::Flat(box, first, random.Int(0, box.volume() - first)).value();
        }
        of_rank.push_back({t, region});
      }
    }
    // Overlaps on one rank are two buffers of one request.
    LoadOptions options;
    options.not_requested = Strict::kIgnore;
    options.path = random.OneIn(2) ? LoadPath::kDirect : LoadPath::kExchange;
    const auto loaded = LoadWishes(path, tensors, wishes, options);
    ASSERT_EQ(WhatIsWrong(tensors, wishes, loaded), "") << "case " << i;
    for (const LoadedRank& rank : loaded) EXPECT_EQ(rank.report.bytes_unverified, 0u);
  }
}

TEST(Load, StridedBuffersAreFilledWithoutWritingGaps) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kU16, {6, 5})};
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
    // Columns 1..4 of the tensor, transposed, in every other element, from the last row up.
    std::vector<std::vector<std::uint16_t>> memory(2, std::vector<std::uint16_t>(64, 0xEEEE));
    ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
      std::vector<std::uint16_t>& mine = memory[static_cast<std::size_t>(comm.rank())];
      StateDict request;
      const Region region = Box::Make({3 * comm.rank(), 1}, {3, 3}).value();
      TENSORMOUNT_RETURN_IF_ERROR(request.AddTensor(
          "w", {{6, 5},
                region,
                BufferView::HostStrided(DType::kU16, mine.data() + 4, {3, 3}, {-2, 6})}));
      LoadOptions options;
      options.path = way;
      return Load(request, path, comm, options).status();
    }));
    for (std::size_t r = 0; r < 2; ++r) {
      std::vector<std::uint16_t> expected(64, 0xEEEE);
      for (std::size_t i = 0; i < 3; ++i) {
        for (std::size_t j = 0; j < 3; ++j) {
          const std::size_t at = (3 * r + i) * 5 + 1 + j;
          std::memcpy(&expected[4 - 2 * i + 6 * j], tensors[0].bytes.data() + 2 * at, 2);
        }
      }
      EXPECT_EQ(memory[r], expected) << "rank " << r;
    }
  }
}

// What lies in one page is proved where it is read: biases and norms need nobody else.
TEST(Load, SmallTensorsAreVerifiedByLeafOnEachRank) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("bias", DType::kF32, {32, 32}),
                                             MakeGlobal("larger", DType::kF32, {64, 64})};
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  for (const LoadedRank& rank : LoadWishes(path, tensors, WishesByRule(tensors, "cols", 4))) {
    ASSERT_OK(rank.status);
    EXPECT_EQ(rank.report.bytes_by_leaf + rank.report.bytes_by_digest, 32u * 32 + 64u * 64);
    // On devices a digest that is taken anyway proves more, and costs nothing.
    if (!DeviceMode()) {
      EXPECT_EQ(rank.report.bytes_by_leaf, 32u * 32);
    }
  }
}

TEST(Load, WholeLeavesVerifyByLeafAndColumnsByDigest) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {512, 512})};
  const std::string path = dir.Join("store/step");
  SaveOptions save;
  save.placement = PlacementRule::kTensorFile;
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2, save));
  const std::uint64_t half = 512 * 512 * 4 / 2;

  for (const LoadedRank& rank : LoadWishes(path, tensors, WishesByRule(tensors, "rows", 2))) {
    ASSERT_OK(rank.status);
    EXPECT_EQ(rank.report.bytes_by_leaf, half);
    EXPECT_EQ(rank.report.bytes_read, half);  // The same layout: not a byte more.
  }
  LoadOptions direct;
  direct.path = LoadPath::kDirect;
  for (const LoadedRank& rank :
       LoadWishes(path, tensors, WishesByRule(tensors, "cols", 2), direct)) {
    ASSERT_OK(rank.status);
    EXPECT_EQ(rank.report.bytes_by_digest, half);
    EXPECT_EQ(rank.report.bytes_received, 0u);
  }
  LoadOptions exchange;
  exchange.path = LoadPath::kExchange;
  std::uint64_t read = 0;
  for (const LoadedRank& rank :
       LoadWishes(path, tensors, WishesByRule(tensors, "cols", 2), exchange)) {
    ASSERT_OK(rank.status);
    EXPECT_EQ(rank.report.bytes_by_digest, half);
    EXPECT_GT(rank.report.bytes_received, 0u);
    read += rank.report.bytes_read;
  }
  EXPECT_EQ(read, 2 * half);  // Every byte of the tensor once, by whomever.
  LoadOptions leaves;
  leaves.verify = LoadVerify::kLeaves;
  for (const LoadedRank& rank :
       LoadWishes(path, tensors, WishesByRule(tensors, "cols", 2), leaves)) {
    ASSERT_OK(rank.status);
    EXPECT_EQ(rank.report.bytes_by_leaf, half);
  }
  LoadOptions off;
  off.verify = LoadVerify::kOff;
  for (const LoadedRank& rank : LoadWishes(path, tensors, WishesByRule(tensors, "cols", 2), off)) {
    ASSERT_OK(rank.status);
    EXPECT_EQ(rank.report.bytes_unverified, half);
  }
}

TEST(Load, ProgressCountsBytesReadOnBothPaths) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = SomeTensors();
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
    std::atomic<std::uint64_t> counted{0};
    LoadOptions options;
    options.path = way;
    options.progress = &counted;
    std::uint64_t read = 0;
    for (const LoadedRank& rank :
         LoadWishes(path, tensors, WishesByRule(tensors, "cols", 2), options)) {
      ASSERT_OK(rank.status);
      read += rank.report.bytes_read;
    }
    EXPECT_GT(read, 0u);
    EXPECT_EQ(counted, read);
  }
}

TEST(Load, UnrequestedCellsAreReadToCompleteTheDigest) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {300, 400})};
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  LoadOptions options;
  options.path = LoadPath::kDirect;
  // Columns 0..350 of 400, cut in two: short runs, so that only the digest can prove them.
  const std::vector<std::vector<Wish>> wishes = {{{0, Box::Make({0, 0}, {300, 200}).value()}},
                                                 {{0, Box::Make({0, 200}, {300, 150}).value()}}};
  const auto loaded = LoadWishes(path, tensors, wishes, options);
  EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
  EXPECT_EQ(loaded[0].report.bytes_by_digest, 300u * 200 * 4);
  // A small part of it alone is proved by reading whole leaves instead.
  const std::vector<std::vector<Wish>> corner = {{{0, Box::Make({0, 0}, {300, 10}).value()}}};
  const auto alone = LoadWishes(path, tensors, corner, options);
  EXPECT_EQ(WhatIsWrong(tensors, corner, alone), "");
  EXPECT_EQ(alone[0].report.bytes_by_leaf, 300u * 10 * 4);
}

TEST(Load, PartlyOverlappingRequestsAreVerifiedByLeaf) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {300, 400})};
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 2));
  // A halo of columns: cells of it counted twice would cancel in a digest.
  const std::vector<std::vector<Wish>> wishes = {{{0, Box::Make({0, 0}, {300, 220}).value()}},
                                                 {{0, Box::Make({0, 180}, {300, 220}).value()}}};
  for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
    LoadOptions options;
    options.path = way;
    const auto loaded = LoadWishes(path, tensors, wishes, options);
    EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
    EXPECT_EQ(loaded[1].report.bytes_by_leaf, 300u * 220 * 4);
  }
}

TEST(Load, ObjectsAndCommonValuesRoundTrip) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
    StateDict state;
    const std::int64_t rank = comm.rank();
    TENSORMOUNT_RETURN_IF_ERROR(
        state.AddObject("rng", "state of " + std::to_string(rank), {.index = {rank}, .grid = {3}}));
    TENSORMOUNT_RETURN_IF_ERROR(state.AddObject("args", std::string("a\0b", 3)));
    TENSORMOUNT_RETURN_IF_ERROR(state.SetCommon("iteration", 1000));
    return Save(state, path, comm).status();
  }));
  const auto loaded = LoadWishes(path, {}, {{}, {}}, {}, [](int rank, StateDict& request) {
    (void)request.WantObject("rng", {.index = {2 - rank}, .grid = {}});
    (void)request.WantObject("args");
  });
  for (int r = 0; r < 2; ++r) {
    const LoadedRank& rank = loaded[static_cast<std::size_t>(r)];
    ASSERT_OK(rank.status);
    EXPECT_THAT(rank.report.object("rng", {2 - r}),
                IsOkAndHolds("state of " + std::to_string(2 - r)));
    EXPECT_THAT(rank.report.object("args"), IsOkAndHolds(std::string("a\0b", 3)));
    EXPECT_THAT(rank.report.object("rng", {r == 0 ? 0 : 2}), HasCode(Code::kNotFound));
    EXPECT_THAT(rank.report.common("iteration"), IsOkAndHolds(CommonValue(std::int64_t{1000})));
    EXPECT_THAT(rank.report.common("epoch"), HasCode(Code::kNotFound));
    EXPECT_FALSE(rank.report.uuid.empty());
  }
  EXPECT_EQ(loaded[0].report.uuid, loaded[1].report.uuid);
}

class Strictness : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(SaveByRule(path_, {stored_[0], stored_[1]}, "rows", 1));
    SetLogSink([this](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  void TearDown() override { SetLogSink({}); }

  // Both ranks ask for "one", rank 1 for "gone" too; nobody for "two".
  std::vector<LoadedRank> Ask(Strict not_stored, Strict not_requested) {
    LoadOptions options;
    options.not_stored = not_stored;
    options.not_requested = not_requested;
    const Region whole = Box::Whole({4});
    return LoadWishes(path_, stored_, {{{0, whole}}, {{0, whole}, {2, whole}}}, options);
  }

  TempDir dir_;
  const std::string path_ = dir_.Join("store/step");
  const std::vector<GlobalTensor> stored_ = {MakeGlobal("one", DType::kU8, {4}),
                                             MakeGlobal("two", DType::kU8, {4}),
                                             MakeGlobal("gone", DType::kU8, {4})};
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST_F(Strictness, RaiseFailsEveryRank) {
  for (const LoadedRank& rank : Ask(Strict::kRaise, Strict::kIgnore)) {
    EXPECT_THAT(rank.status, HasCode(Code::kNotFound));
    EXPECT_THAT(rank.status, HasMessage("gone"));
  }
  for (const LoadedRank& rank : Ask(Strict::kIgnore, Strict::kRaise)) {
    EXPECT_THAT(rank.status, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(rank.status, HasMessage("two"));
  }
  EXPECT_THAT(lines_, ElementsAre());
}

TEST_F(Strictness, LogWritesEachKeyOnce) {
  for (const LoadedRank& rank : Ask(Strict::kLog, Strict::kLog)) {
    ASSERT_OK(rank.status);
    EXPECT_EQ(rank.buffers[0], stored_[0].bytes);
    EXPECT_THAT(rank.report.not_stored, ElementsAre());
  }
  EXPECT_THAT(lines_, ElementsAre(HasSubstr("gone"), HasSubstr("two")));
}

TEST_F(Strictness, ReturnGivesAllRanksTheSameLists) {
  for (const LoadedRank& rank : Ask(Strict::kReturn, Strict::kReturn)) {
    ASSERT_OK(rank.status);
    EXPECT_THAT(rank.report.not_stored, ElementsAre("gone"));
    EXPECT_THAT(rank.report.not_requested, ElementsAre("two"));
  }
  EXPECT_THAT(lines_, ElementsAre());
}

TEST(Load, ShapeMismatchErrorNamesKeyRankAndBothShapes) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, {MakeGlobal("w", DType::kF32, {4, 6})}, "rows", 2));
  const std::vector<GlobalTensor> asked = {MakeGlobal("w", DType::kF32, {4, 6}),
                                           MakeGlobal("w", DType::kF32, {4, 7}),
                                           MakeGlobal("w", DType::kBF16, {4, 6})};
  const Region rows = Box::Make({0, 0}, {2, 6}).value();
  for (const LoadedRank& rank : LoadWishes(path, asked, {{{0, rows}}, {{1, rows}}})) {
    EXPECT_THAT(rank.status, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(rank.status,
                HasMessage("rank 1: tensor w: asked for as f32 [4, 7], stored as f32 [4, 6]"));
    EXPECT_EQ(rank.buffers.at(0)[0], '\xEE');  // Nothing was read.
  }
  for (const LoadedRank& rank : LoadWishes(path, asked, {{{2, rows}}, {{0, rows}}})) {
    EXPECT_THAT(rank.status, HasMessage("rank 0: tensor w: asked for as bf16 [4, 6]"));
  }
}

TEST(Load, InvalidRequestOnOneRankFailsAllRanks) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {4})};
  const std::string path = dir.Join("store/step");
  ASSERT_OK(SaveByRule(path, tensors, "rows", 1));
  const auto loaded = LoadWishes(path, tensors, WishesByRule(tensors, "rows", 2), {},
                                 [](int rank, StateDict& request) {
                                   if (rank == 1) (void)request.WantObject("");
                                 });
  for (const LoadedRank& rank : loaded) {
    EXPECT_THAT(rank.status, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(rank.status, HasMessage("rank 1"));
  }
}

TEST(Load, RanksMustAgreeOnPathAndOptions) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {4})};
  ASSERT_OK(SaveByRule(dir.Join("store/step"), tensors, "rows", 1));
  std::vector<Status> verdicts(2);
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    LoadOptions options;
    if (comm.rank() == 1) options.verify = LoadVerify::kOff;
    verdicts[static_cast<std::size_t>(comm.rank())] =
        Load(StateDict(), dir.Join("store/step"), comm, options).status();
    return {};
  }));
  for (const Status& verdict : verdicts) {
    EXPECT_THAT(verdict, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(verdict, HasMessage("rank 1: load was called with another path or other options"));
    EXPECT_THAT(verdict, HasMessage("verify is auto on rank 0 and off on rank 1"));
  }
}

TEST(LoadPlan, ExchangesShortRunsBetweenMachinesOnly) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {2048, 1024})};
  SaveOptions save;
  save.placement = PlacementRule::kTensorFile;
  ASSERT_OK(SaveByRule(path, tensors, "rows", 1, save));
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, OpenedCheckpoint::Open(HostFileSystem(), path, {}));
  const auto exchanged = [&](const std::string& rule, ExchangeScope scope,
                             std::vector<int> groups = {0, 0}) {
    std::vector<ResolvedRequest> resolved(2);
    const std::vector<Region> regions = CutByRule(tensors[0].shape, rule, 2);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      const Region& region = regions[rank];
      StateDict request;
      std::string memory(static_cast<std::size_t>(region.volume()) * 4, '\0');
      (void)request.AddTensor("w", {tensors[0].shape, region,
                                    BufferView::Host(DType::kF32, static_cast<void*>(memory.data()),
                                                     region.box().extent())});
      const std::string bytes = EncodeRequest(request).value();
      resolved[rank] =
          ResolveRequest(checkpoint->index(), DecodeRequest(bytes).value(), {}, true).value();
    }
    LoadPlanner planner(checkpoint->index());
    planner.Add(0, resolved[0]);
    planner.Add(1, resolved[1]);
    Result<LoadPlan> plan = planner.Finish(2, /*all_known=*/true, std::move(groups), scope, {});
    EXPECT_OK(plan);
    return plan.value().tensors.at(0).exchange;
  };
  EXPECT_TRUE(exchanged("cols", ExchangeScope::kJob));
  EXPECT_FALSE(exchanged("cols", ExchangeScope::kNone));
  EXPECT_FALSE(exchanged("rows", ExchangeScope::kJob));
  // Behind a server.
  EXPECT_TRUE(exchanged("cols", ExchangeScope::kMachine));
  EXPECT_FALSE(exchanged("cols", ExchangeScope::kMachine, {0, 1}));
  EXPECT_FALSE(exchanged("rows", ExchangeScope::kMachine));
  EXPECT_TRUE(exchanged("replicate", ExchangeScope::kMachine));
  EXPECT_FALSE(exchanged("replicate", ExchangeScope::kMachine, {0, 1}));
  EXPECT_FALSE(exchanged("replicate", ExchangeScope::kJob));
}

TEST(Load, MissingCheckpointIsNotFoundOnAllRanks) {
  TempDir dir;
  for (const LoadedRank& rank : LoadWishes(dir.Join("store/none"), {}, {{}, {}})) {
    EXPECT_THAT(rank.status, HasCode(Code::kNotFound));
  }
}

TEST(Load, LatestIsResolvedByTheStore) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {4})};
  ASSERT_OK(SaveByRule(dir.Join("store/z-first"), tensors, "rows", 1));
  const std::vector<GlobalTensor> second = {{"w", DType::kF32, {4}, std::string(16, 'b')}};
  ASSERT_OK(SaveByRule(dir.Join("store/a-second"), second, "rows", 1));
  const auto wishes = WishesByRule(second, "rows", 2);
  EXPECT_EQ(WhatIsWrong(second, wishes, LoadWishes(dir.Join("store/latest"), second, wishes)), "");
}

TEST(Load, LoadsFromASafetensorsFile) {
  TempDir dir;
  const std::vector<GlobalTensor> tensors = {MakeGlobal("w", DType::kF32, {6, 4})};
  std::string header = R"({"w":{"dtype":"F32","shape":[6,4],"data_offsets":[0,96]}})";
  header.resize(64, ' ');
  std::string file("\x40\0\0\0\0\0\0\0", 8);
  file += header + tensors[0].bytes;
  WriteWholeFile(dir.Join("model.safetensors"), file);
  for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
    LoadOptions options;
    options.path = way;
    const auto wishes = WishesByRule(tensors, "cols", 2);
    const auto loaded = LoadWishes(dir.Join("model.safetensors"), tensors, wishes, options);
    EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
    // Nothing was ever hashed, and the report does not pretend.
    EXPECT_EQ(loaded[0].report.bytes_unverified, 48u);
  }
}

}  // namespace
}  // namespace tensormount
