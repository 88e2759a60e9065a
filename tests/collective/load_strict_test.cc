// SPDX-License-Identifier: Apache-2.0
// Keys on one side only, layers of stacks, what else a load needs to know, and plans that are kept.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "base/log.h"
#include "bench/counting_communicator.h"
#include "tests/collective/load_testing.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Stored: tensors one and two, objects rng (4 parts) and args.
class StrictLoad : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(RunOnThreads(4, [&](Communicator& comm) -> Status {
      StateDict state;
      for (const std::size_t i : {0, 1}) {
        const GlobalTensor& t = stored_[i];
        TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(
            t.key,
            {t.shape, Box::Whole(t.shape), BufferView::Host(t.dtype, t.bytes.data(), t.shape)}));
      }
      TENSORMOUNT_RETURN_IF_ERROR(
          state.AddObject("rng", "r", {.index = {comm.rank()}, .grid = {4}}));
      TENSORMOUNT_RETURN_IF_ERROR(state.AddObject("args", "a"));
      return Save(state, path_, comm).status();
    }));
    SetLogSink([this](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  void TearDown() override { SetLogSink({}); }

  // Rank 0 asks for one, rank 1 for one and gone, and for the objects args and lost; nobody for two
  // and rng.
  std::vector<LoadedRank> Ask(const LoadOptions& options) {
    const Region whole = Box::Whole({4});
    return LoadWishes(path_, stored_, {{{0, whole}}, {{0, whole}, {2, whole}}}, options,
                      [](int rank, StateDict& request) {
                        if (rank != 1) return;
                        (void)request.WantObject("args");
                        (void)request.WantObject("lost");
                      });
  }

  TempDir dir_;
  const std::string path_ = dir_.Join("store/step");
  const std::vector<GlobalTensor> stored_ = {MakeGlobal("one", DType::kU8, {4}),
                                             MakeGlobal("two", DType::kU8, {4}),
                                             MakeGlobal("gone", DType::kU8, {4})};
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST_F(StrictLoad, EightMegatronPoliciesBehaveAsInMegatron) {
  struct Row {
    const char* name;
    Strict not_stored;
    Strict not_requested;
  };
  const Row rows[] = {{"assume_ok_unexpected", Strict::kRaise, Strict::kIgnore},
                      {"LOG_UNEXPECTED", Strict::kLog, Strict::kIgnore},
                      {"log_all", Strict::kLog, Strict::kLog},
                      {"raise_unexpected", Strict::kRaise, Strict::kIgnore},
                      {"raise_all", Strict::kRaise, Strict::kRaise},
                      {"return_unexpected", Strict::kReturn, Strict::kIgnore},
                      {"return_all", Strict::kReturn, Strict::kReturn},
                      {"Ignore_All", Strict::kIgnore, Strict::kIgnore}};
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    lines_.clear();
    ASSERT_OK_AND_ASSIGN(const StrictPolicy policy, StrictFromMegatron(row.name));
    EXPECT_EQ(policy.not_stored, row.not_stored);
    EXPECT_EQ(policy.not_requested, row.not_requested);
    LoadOptions options;
    options.not_stored = policy.not_stored;
    options.not_requested = policy.not_requested;
    const auto loaded = Ask(options);
    for (const LoadedRank& rank : loaded) {
      if (row.not_stored == Strict::kRaise) {
        EXPECT_THAT(rank.status, HasCode(Code::kNotFound));
        EXPECT_THAT(rank.status, HasMessage("requested, but not stored: gone, lost"));
        // Nothing was written, neither of what is stored.
        EXPECT_EQ(rank.buffers[0].find_first_not_of('\xEE'), std::string::npos);
        continue;
      }
      ASSERT_OK(rank.status);
      EXPECT_EQ(rank.buffers[0], stored_[0].bytes);
      const bool both = row.not_stored == Strict::kReturn;
      if (both) {
        EXPECT_THAT(rank.report.not_stored, ElementsAre("gone", "lost"));
      } else {
        EXPECT_THAT(rank.report.not_stored, IsEmpty());
      }
      if (row.not_requested == Strict::kReturn) {
        EXPECT_THAT(rank.report.not_requested, ElementsAre("rng", "two"));
      } else {
        EXPECT_THAT(rank.report.not_requested, IsEmpty());
      }
    }
    if (loaded[0].status.ok()) {
      // Never partly written, and listed whatever the policy.
      EXPECT_EQ(loaded[1].buffers[1], "\xEE\xEE\xEE\xEE");
      EXPECT_THAT(loaded[1].report.skipped, ElementsAre("gone", "lost"));
      EXPECT_THAT(loaded[0].report.skipped, IsEmpty());
    }
    const std::size_t logged =
        (row.not_stored == Strict::kLog ? 1 : 0) + (row.not_requested == Strict::kLog ? 1 : 0);
    EXPECT_EQ(lines_.size(), logged);
  }
  EXPECT_THAT(StrictFromMegatron("strict").status(), HasMessage("return_all"));
  EXPECT_THAT(StrictFromMegatron("").status(), HasCode(Code::kInvalidArgument));
}

TEST_F(StrictLoad, ExactRequestsPassEveryPolicy) {
  const Region whole = Box::Whole({4});
  LoadOptions options;
  options.not_stored = Strict::kRaise;
  options.not_requested = Strict::kRaise;
  const auto loaded = LoadWishes(
      path_, stored_, {{{0, whole}}, {{1, whole}}}, options, [](int rank, StateDict& request) {
        (void)request.WantObject(rank == 0 ? "rng" : "args",
                                 rank == 0 ? GridPosition{{1}, {4}} : GridPosition{});
      });
  for (const LoadedRank& rank : loaded) EXPECT_OK(rank.status);
  EXPECT_THAT(loaded[0].report.object("rng", {1}), IsOkAndHolds("r"));
}

TEST_F(StrictLoad, AllRanksNameKeysNotRequested) {
  LoadOptions options;
  options.not_stored = Strict::kIgnore;
  options.not_requested = Strict::kRaise;
  for (const LoadedRank& rank : Ask(options)) {
    EXPECT_THAT(rank.status, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(rank.status, HasMessage("stored, but requested by no rank: rng, two"));
  }
}

TEST_F(StrictLoad, ExemptKeysAreInNeitherSet) {
  LoadOptions options;
  options.not_requested = Strict::kRaise;
  options.strict_exempt = {"go*", "l?st", "rng", "two"};
  const auto loaded = Ask(options);
  for (const LoadedRank& rank : loaded) ASSERT_OK(rank.status);
  EXPECT_THAT(loaded[1].report.skipped, ElementsAre("gone", "lost"));
  options.strict_exempt.pop_back();
  EXPECT_THAT(Ask(options)[0].status, HasMessage("requested by no rank: two"));
}

// ---- Layers ----

class LayerLoad : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
      StateDict state;
      const Region region =
          CutByRule(stack_.shape, "rows", 2)[static_cast<std::size_t>(comm.rank())];
      const std::string bytes = BytesOf(stack_, region);
      TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(
          "layers.w", {stack_.shape, region,
                       BufferView::Host(DType::kF32, bytes.data(), region.box().extent())}));
      TENSORMOUNT_RETURN_IF_ERROR(state.NameLayers("layers.w", "layers.{}.w"));
      return Save(state, path_, comm).status();
    }));
  }
  GlobalTensor Layer(std::int64_t n) const {
    GlobalTensor layer{"layers." + std::to_string(n) + ".w", DType::kF32, {30, 20}, {}};
    layer.bytes = stack_.bytes.substr(static_cast<std::size_t>(n) * 2400, 2400);
    return layer;
  }

  TempDir dir_;
  const std::string path_ = dir_.Join("store/step");
  const GlobalTensor stack_ = MakeGlobal("layers.w", DType::kF32, {4, 30, 20});
};

TEST_F(LayerLoad, LayersLoadAsSeparateTensors) {
  const std::vector<GlobalTensor> layers = {Layer(0), Layer(1), Layer(2), Layer(3)};
  for (const std::string rule : {"rows", "cols", "flat", "grid:2x2"}) {
    for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
      LoadOptions options;
      options.path = way;
      options.not_requested = Strict::kRaise;  // The stack counts as asked for.
      const auto wishes = WishesByRule(layers, rule, 4);
      const auto loaded = LoadWishes(path_, layers, wishes, options);
      EXPECT_EQ(WhatIsWrong(layers, wishes, loaded), "") << rule;
      EXPECT_EQ(loaded[0].report.bytes_unverified, 0u);
    }
  }
}

TEST_F(LayerLoad, LayerAndItsStackLoadTogether) {
  const std::vector<GlobalTensor> tensors = {Layer(2), stack_};
  const std::vector<std::vector<Wish>> wishes = {{{0, Box::Whole({30, 20})}},
                                                 {{1, Box::Whole({4, 30, 20})}}};
  EXPECT_EQ(WhatIsWrong(tensors, wishes, LoadWishes(path_, tensors, wishes)), "");
}

TEST_F(LayerLoad, MissingLayerIsNotFound) {
  const GlobalTensor fifth = {"layers.4.w", DType::kF32, {30, 20}, {}};
  const auto loaded = LoadWishes(path_, {fifth}, {{{0, Box::Whole({30, 20})}}});
  EXPECT_THAT(loaded[0].status, HasCode(Code::kNotFound));
  EXPECT_THAT(loaded[0].status, HasMessage("layers.4.w"));
}

TEST_F(LayerLoad, LayerCanBeCropped) {
  const GlobalTensor cropped = {"layers.1.w", DType::kF32, {25, 20}, {}};
  LoadOptions options;
  options.rules = {{"layers.*", {.allow_shrink = true}}};
  const auto loaded = LoadWishes(path_, {cropped}, {{{0, Box::Whole({25, 20})}}}, options);
  ASSERT_OK(loaded[0].status);
  EXPECT_EQ(loaded[0].buffers[0], Layer(1).bytes.substr(0, 2000));
}

// ---- Memory, common values, events ----

TEST(LoadRequest, ShardsWithoutMemoryAreRefusedUntilTheyHaveSome) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const GlobalTensor w = MakeGlobal("w", DType::kF32, {6, 4});
  ASSERT_OK(SaveByRule(path, {w}, "rows", 2));
  for (const bool allocate : {false, true}) {
    ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
      StateDict request;
      const Region rows = CutByRule(w.shape, "rows", 2)[static_cast<std::size_t>(comm.rank())];
      TENSORMOUNT_RETURN_IF_ERROR(request.AddTensor("w", MetadataOnly(w.dtype, w.shape, rows)));
      if (allocate || comm.rank() == 0) TENSORMOUNT_RETURN_IF_ERROR(request.AllocateData());
      const Result<LoadReport> result = Load(request, path, comm);
      if (!allocate) {
        EXPECT_THAT(result.status(), HasCode(Code::kInvalidArgument));
        EXPECT_THAT(result.status(), HasMessage("rank 1: tensor w [3:6, 0:4]: the shard has no "
                                                "memory"));
        return {};
      }
      EXPECT_OK(result);
      const void* data = request.tensors()[0].shard.data.data;
      EXPECT_EQ(std::string(static_cast<const char*>(data), 48), BytesOf(w, rows));
      return {};
    }));
  }
}

TEST(LoadRequest, EveryKindOfCommonStateRoundTrips) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    StateDict state;
    CommonDict content;
    content.items[CommonKey("format")] = "fsdp";
    TENSORMOUNT_RETURN_IF_ERROR(state.SetCommon("iteration", 7));
    TENSORMOUNT_RETURN_IF_ERROR(state.SetRankCommon("seed", comm.rank() + 40));
    TENSORMOUNT_RETURN_IF_ERROR(state.SetContentMetadata(content));
    TENSORMOUNT_RETURN_IF_ERROR(state.SetLocal("group", "saved"));
    return Save(state, path, comm).status();
  }));
  const auto loaded = LoadWishes(path, {}, {{}, {}, {}}, {}, [](int rank, StateDict& request) {
    (void)request.SetLocal("group", rank);
  });
  for (std::size_t r = 0; r < loaded.size(); ++r) {
    const LoadReport& report = loaded[r].report;
    EXPECT_THAT(report.common("iteration"), IsOkAndHolds(CommonValue(7)));
    EXPECT_THAT(report.rank_common(1, "seed"), IsOkAndHolds(CommonValue(41)));
    EXPECT_THAT(report.rank_common(2, "seed"), HasCode(Code::kNotFound));
    EXPECT_THAT(report.rank_common(0, "step"), HasCode(Code::kNotFound));
    ASSERT_NE(report.content_metadata.Find("format"), nullptr);
    EXPECT_EQ(*report.content_metadata.Find("format"), CommonValue("fsdp"));
    EXPECT_THAT(report.local("group"), IsOkAndHolds(CommonValue(static_cast<int>(r))));
    EXPECT_THAT(report.local("other"), HasCode(Code::kNotFound));
  }
}

TEST(LoadEvents, ReportPhasesOfEachRankAndTheError) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  const GlobalTensor w = MakeGlobal("w", DType::kF32, {64, 64});
  ASSERT_OK(SaveByRule(path, {w}, "rows", 2));
  std::mutex mutex;
  std::map<int, std::vector<std::string>> told;
  std::map<std::string, std::uint64_t> bytes;
  LoadSetup setup;
  setup.options = [&](int) {
    LoadOptions options;
    options.path = LoadPath::kExchange;
    options.events = [&](const Event& event) {
      const std::lock_guard lock(mutex);
      EXPECT_EQ(event.job, "load");
      EXPECT_EQ(event.path, path);
      const char* kinds[] = {"start ", "end ", "error "};
      told[event.rank].push_back(kinds[static_cast<int>(event.kind)] + std::string(event.phase));
      if (event.kind == Event::Kind::kError) told[event.rank].push_back(event.status.message());
      bytes[std::string(event.phase)] += event.bytes;
      if (event.phase == "plan") throw std::runtime_error("ignored");
    };
    return options;
  };
  const auto wishes = WishesByRule({w}, "cols", 2);
  EXPECT_EQ(WhatIsWrong({w}, wishes, LoadWishesWith(path, {w}, wishes, setup)), "");
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(told[rank], ElementsAre("start open", "end open", "start plan", "end plan",
                                        "start read", "end read", "start exchange", "end exchange",
                                        "start prove", "end prove"));
  }
  EXPECT_EQ(bytes["prove"], w.bytes.size());
  EXPECT_GE(bytes["exchange"], w.bytes.size());
  told.clear();
  const GlobalTensor other = {"w", DType::kF32, {64, 65}, {}};
  (void)LoadWishesWith(path, {other}, WishesByRule({other}, "rows", 2), setup);
  EXPECT_THAT(told[1], ElementsAre("start open", "end open", "start plan", "error plan",
                                   HasSubstr("rank 0: tensor w: asked for as")));
}

// ---- Kept plans ----

TEST(LoadPlans, RepeatedLoadReusesItsPlan) {
  TempDir dir;
  const GlobalTensor w = MakeGlobal("w", DType::kF32, {96, 100});
  const std::string paths[] = {dir.Join("store/step-1"), dir.Join("store/step-2")};
  for (const std::string& path : paths) ASSERT_OK(SaveByRule(path, {w}, "rows", 2));
  for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
    ASSERT_OK(RunOnThreads(3, [&](Communicator& comm) -> Status {
      const auto rank = static_cast<std::size_t>(comm.rank());
      const auto load = [&](const std::string& path, const std::string& rule, bool reuse) {
        const Region region = CutByRule(w.shape, rule, 3)[rank];
        std::string memory(static_cast<std::size_t>(region.volume()) * 4, '\0');
        StateDict request;
        EXPECT_OK(request.AddTensor(
            "w",
            {w.shape, region,
             BufferView::Host(w.dtype, static_cast<void*>(memory.data()),
                              region.is_flat() ? Dims{region.volume()} : region.box().extent())}));
        EXPECT_OK(request.WantObject("nothing"));
        LoadOptions options;
        options.path = way;
        options.not_stored = Strict::kReturn;
        options.reuse_plan = reuse;
        const Result<LoadReport> report = Load(request, path, comm, options);
        EXPECT_OK(report);
        EXPECT_EQ(memory, BytesOf(w, region));
        EXPECT_EQ(report.value().bytes_unverified, 0u);
        EXPECT_THAT(report.value().not_stored, ElementsAre("nothing"));
        EXPECT_THAT(report.value().skipped, ElementsAre("nothing"));
        return report.value().plan_reused;
      };
      EXPECT_FALSE(load(paths[0], "cols", true));
      EXPECT_TRUE(load(paths[0], "cols", true));
      EXPECT_FALSE(load(paths[0], "rows", true));
      EXPECT_FALSE(load(paths[1], "cols", true));
      EXPECT_FALSE(load(paths[0], "cols", false));
      EXPECT_TRUE(load(paths[0], "cols", true));
      EXPECT_TRUE(load(paths[0], "rows", true));
      // One rank asks for something else: the others' plans are of another job.
      EXPECT_FALSE(load(paths[0], rank == 2 ? "cols" : "rows", true));
      EXPECT_TRUE(load(paths[0], rank == 2 ? "cols" : "rows", true));
      return {};
    }));
  }
}

TEST(LoadPlans, ReplacedCheckpointIsPlannedAgain) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
    for (const std::int64_t columns : {50, 60}) {
      const GlobalTensor w = MakeGlobal("w" + std::to_string(columns), DType::kF32, {40, 60});
      StateDict state;
      TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(
          "w", {w.shape, Box::Whole(w.shape), BufferView::Host(w.dtype, w.bytes.data(), w.shape)}));
      SaveOptions options;
      options.if_exists = IfExists::kReplace;
      TENSORMOUNT_RETURN_IF_ERROR(Save(state, path, comm, options).status());
      std::string memory(w.bytes.size(), '\0');
      StateDict request;
      TENSORMOUNT_RETURN_IF_ERROR(request.AddTensor(
          "w", {w.shape, Box::Whole(w.shape),
                BufferView::Host(w.dtype, static_cast<void*>(memory.data()), w.shape)}));
      TENSORMOUNT_ASSIGN_OR_RETURN(const LoadReport report, Load(request, path, comm));
      EXPECT_FALSE(report.plan_reused);
      EXPECT_EQ(memory, w.bytes);
    }
    return {};
  }));
}

// ---- What travels ----

TEST(LoadTraffic, RequestsAreSentOnceAndOnlyWhereNeeded) {
  TempDir dir;
  const std::string path = dir.Join("store/step");
  std::vector<GlobalTensor> tensors;
  for (int i = 0; i < 200; ++i) {
    tensors.push_back(MakeGlobal(std::string(100, 'k') + std::to_string(i), DType::kU8, {8, 2048}));
  }
  ASSERT_OK(SaveByRule(path, tensors, "rows", 1));
  std::uint64_t sent[3][3];  // By load, by rank.
  ASSERT_OK(RunOnThreads(3, [&](Communicator& base) -> Status {
    CountingCommunicator comm(base);
    const auto rank = static_cast<std::size_t>(comm.rank());
    // Columns: the left half on rank 0, the right half on the two others.
    const Region half = Box::Make({0, rank == 0 ? 0 : 1024}, {8, 1024}).value();
    std::vector<std::string> buffers(tensors.size(), std::string(8192, '\0'));
    StateDict request;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      TENSORMOUNT_RETURN_IF_ERROR(request.AddTensor(
          tensors[t].key,
          {tensors[t].shape, half,
           BufferView::Host(DType::kU8, static_cast<void*>(buffers[t].data()), {8, 1024})}));
    }
    LoadOptions options;
    options.path = LoadPath::kDirect;
    for (std::size_t load = 0; load < 3; ++load) {
      // Leaves need nobody else; a digest needs all, the first time.
      options.verify = load == 0 ? LoadVerify::kLeaves : LoadVerify::kAuto;
      (void)comm.TakeSent();
      TENSORMOUNT_ASSIGN_OR_RETURN(const LoadReport report, Load(request, path, comm, options));
      sent[load][rank] = comm.TakeSent();
      EXPECT_EQ(report.bytes_unverified, 0u);
      EXPECT_EQ(report.bytes_by_digest != 0, load > 0);
      EXPECT_EQ(report.plan_reused, load == 2);
      EXPECT_EQ(buffers[7], BytesOf(tensors[7], half));
    }
    return {};
  }));
  constexpr std::uint64_t kRequest = 200 * 100;  // More than its keys.
  constexpr std::uint64_t kLittle = 8000;        // Frames, bits, digests.
  for (const std::size_t rank : {1, 2}) {
    EXPECT_LT(sent[0][rank], kLittle) << rank;
    EXPECT_LT(sent[2][rank], kLittle) << rank;
  }
  EXPECT_GT(sent[1][1], kRequest);
  EXPECT_LT(sent[1][2], kLittle);  // Rank 1 spoke for it.
}

}  // namespace
}  // namespace tensormount
