// SPDX-License-Identifier: Apache-2.0
// What ranks find out about each other: on threads, with one and with several owners of keys.
#include "collective/layout/layout_exchange.h"

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "bench/counting_communicator.h"
#include "collective/layout/layout_gather.h"
#include "collective/layout/wire.h"
#include "tests/collective/layout_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

constexpr DType kF32 = DType::kF32;

class Owners {
 public:
  explicit Owners(std::uint32_t owners) { ForceOwners(owners); }
  ~Owners() { ForceOwners(0); }
};

using FillState = std::function<void(int rank, StateDict& state)>;
using DescribeCall = std::function<void(int rank, CallDescription& call)>;

std::vector<Result<JobLayout>> Exchange(int ranks, const FillState& fill,
                                        const DescribeCall& describe = {}) {
  std::vector<Result<JobLayout>> results(static_cast<std::size_t>(ranks),
                                         Status(Code::kInternal, "did not run"));
  EXPECT_OK(RunOnThreads(ranks, [&](Communicator& comm) -> Status {
    StateDict state;
    fill(comm.rank(), state);
    CallDescription call;
    if (describe) describe(comm.rank(), call);
    Collective collective(comm, {});
    results[static_cast<std::size_t>(comm.rank())] = ExchangeLayouts(collective, state, call);
    return Status();
  }));
  return results;
}

// The failure that all return.
Status OneFailure(const std::vector<Result<JobLayout>>& results) {
  for (const Result<JobLayout>& result : results) {
    EXPECT_EQ(result.status().ToString(), results[0].status().ToString());
  }
  return results[0].status();
}

void Row(StateDict& state, const std::string& key, int rank, int ranks,
         Replica replica = Replica::kUnlabelled) {
  EXPECT_OK(
      state.AddTensor(key, MetadataOnly(kF32, {2 * ranks, 3}, B({2 * rank, 0}, {2, 3}), replica)));
}

// Twelve tensors by rows, one on rank 0 alone, and objects.
void FillModel(int rank, int ranks, StateDict& state) {
  for (int t = 0; t < 12; ++t) Row(state, "layers." + std::to_string(t), rank, ranks);
  if (rank == 0) {
    EXPECT_OK(state.AddTensor("alone", MetadataOnly(kF32, {4}, Box::Whole({4}))));
  }
  EXPECT_OK(state.AddTensor("same", MetadataOnly(kF32, {4}, Box::Whole({4}))));
  EXPECT_OK(state.AddObject("rng", "state of " + std::to_string(rank),
                            {.index = {rank}, .grid = {ranks}}));
  EXPECT_OK(state.AddObject("args", "the same"));
}

TEST(ExchangeLayouts, OwnersTogetherCoverTheWholeJob) {
  for (const int ranks : {1, 2, 3, 8}) {
    LayoutRanks all(ranks);
    for (int r = 0; r < ranks; ++r) FillModel(r, ranks, all.at(r));
    const GlobalLayout whole = all.Layout();
    for (int owners = 1; owners <= ranks; ++owners) {
      const Owners wanted(owners);
      const auto results =
          Exchange(ranks, [&](int rank, StateDict& state) { FillModel(rank, ranks, state); });
      std::map<std::string, std::size_t> seen;
      std::size_t objects = 0;
      for (int r = 0; r < ranks; ++r) {
        ASSERT_OK(results[static_cast<std::size_t>(r)]);
        const JobLayout& job = results[static_cast<std::size_t>(r)].value();
        EXPECT_EQ(job.owners, static_cast<std::uint32_t>(owners));
        EXPECT_EQ(job.report.ToJson(), results[0].value().report.ToJson());
        EXPECT_EQ(job.fingerprint, results[0].value().fingerprint);
        for (const LayoutTensor& tensor : job.layout.tensors) {
          EXPECT_EQ(OwnerOf(tensor.meta.key(), static_cast<std::uint32_t>(owners)),
                    static_cast<std::uint32_t>(r));
          ++seen[tensor.meta.key()];
          const auto same = std::find_if(
              whole.tensors.begin(), whole.tensors.end(),
              [&](const LayoutTensor& t) { return t.meta.key() == tensor.meta.key(); });
          ASSERT_NE(same, whole.tensors.end());
          ASSERT_EQ(tensor.holdings.size(), same->holdings.size());
          EXPECT_EQ(tensor.first_rank, same->first_rank);
          for (std::size_t h = 0; h < tensor.holdings.size(); ++h) {
            EXPECT_EQ(tensor.holdings[h].region, same->holdings[h].region);
            EXPECT_EQ(tensor.holdings[h].holders, same->holdings[h].holders);
          }
        }
        objects += job.layout.objects.size();
        EXPECT_EQ(job.layout.world, ranks);
      }
      EXPECT_THAT(seen, SizeIs(whole.tensors.size()));
      EXPECT_EQ(objects, static_cast<std::size_t>(ranks) + 1);
      const LayoutReport& report = results[0].value().report;
      EXPECT_TRUE(report.ok()) << report.ToText();
      EXPECT_EQ(report.tensors, 14u);
      EXPECT_EQ(report.boxes, static_cast<std::uint64_t>(13 * ranks + 1));
      EXPECT_EQ(report.objects, static_cast<std::uint64_t>(ranks) + 1);
      EXPECT_EQ(report.bytes, whole.tensor_bytes);
      EXPECT_EQ(report.replica_bytes, whole.replica_bytes);
    }
  }
}

TEST(ExchangeLayouts, EveryRankReceivesFindingsOfAllOwners) {
  for (int owners = 1; owners <= 4; ++owners) {
    const Owners wanted(owners);
    const auto results = Exchange(4, [](int rank, StateDict& state) {
      for (int t = 0; t < 8; ++t) {
        // Of every second tensor, rank 2 has nothing.
        if (t % 2 == 0 || rank != 2) Row(state, "t" + std::to_string(t), rank, 4);
      }
    });
    for (const auto& result : results) {
      ASSERT_OK(result);
      const LayoutReport& report = result.value().report;
      EXPECT_EQ(report.finding_count, 4u);
      ASSERT_THAT(report.findings, SizeIs(4));
      EXPECT_EQ(report.findings[0].message,
                "tensor t1: [4:6, 0:3] is held by no rank; parts are held by ranks 0, 1, 3");
      EXPECT_EQ(report.findings[0].cause,
                "rank 2 holds nothing of this tensor: missing rank or missing state?");
      EXPECT_EQ(report.findings[3].key, "t7");
      EXPECT_THAT(result.value().layout.tensors, IsEmpty());
    }
  }
}

TEST(ExchangeLayouts, AllRanksNameTheFailedRank) {
  const auto results = Exchange(4, [](int rank, StateDict& state) {
    Row(state, "w", rank, 4);
    if (rank == 2) {
      EXPECT_FALSE(state.AddObject("", "x").ok());
    }
    if (rank == 3) (void)state.Fail(Status(Code::kResourceExhausted, "no memory left"));
  });
  const Status status = OneFailure(results);
  EXPECT_THAT(status, HasMessage("rank 2: object "));
  EXPECT_THAT(status, HasMessage("(1 other rank failed too)"));
}

TEST(ExchangeLayouts, OptionsMustBeEqual) {
  const auto options = [](int rank, CallDescription& call) {
    call.options = {{"path", "store/a"}, {"placement", rank == 3 ? "rank-shard" : "auto"}};
  };
  const auto fill = [](int rank, StateDict& state) { Row(state, "w", rank, 4); };
  const Status status = OneFailure(Exchange(4, fill, options));
  EXPECT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_EQ(status.message(), "option placement is auto on rank 0 and rank-shard on rank 3");
  const Status other = OneFailure(
      Exchange(2, fill, [](int rank, CallDescription& call) { call.limit = rank == 0 ? 5u : 6u; }));
  EXPECT_EQ(other.message(), "option limit is 5 on rank 0 and 6 on rank 1");
}

TEST(ExchangeLayouts, CommonValuesAreMergedOnRankZero) {
  const auto results = Exchange(4, [](int rank, StateDict& state) {
    ASSERT_OK(state.SetCommon("same", 7));
    if (rank == 2) {
      ASSERT_OK(state.SetCommon("of two", "x"));
    }
    if (rank >= 2) {
      ASSERT_OK(state.SetCommon("of two and three", 2.5));
    }
  });
  for (int r = 0; r < 4; ++r) {
    ASSERT_OK(results[static_cast<std::size_t>(r)]);
    const JobLayout& job = results[static_cast<std::size_t>(r)].value();
    EXPECT_TRUE(job.report.ok());
    EXPECT_THAT(job.common, SizeIs(r == 0 ? 3 : 0));
  }
  EXPECT_EQ(results[0].value().common.at("of two"), CommonValue("x"));
}

TEST(ExchangeLayouts, DifferingCommonValuesAreAFindingOrAWarning) {
  const auto fill = [](int rank, StateDict& state) {
    Row(state, "w", rank, 3);
    CommonDict args;
    args.items.emplace("lr", rank == 2 ? 0.2 : 0.1);
    args.items.emplace("rank", rank);
    ASSERT_OK(state.SetCommon("args", std::move(args)));
  };
  const auto rules = [](CommonCheck check, std::vector<std::string> exempt) {
    return [=](int, CallDescription& call) {
      call.common = check;
      call.common_exempt = exempt;
    };
  };
  for (const auto& result : Exchange(3, fill, rules(CommonCheck::kError, {"args.rank"}))) {
    ASSERT_OK(result);
    const LayoutReport& report = result.value().report;
    ASSERT_EQ(report.finding_count, 1u);
    EXPECT_EQ(report.findings[0].kind, FindingKind::kCommon);
    EXPECT_EQ(report.findings[0].message, "common value args.lr: 0.1 on rank 0 and 0.2 on rank 2");
    EXPECT_THAT(report.findings[0].ranks, ElementsAre(0, 2));
    EXPECT_EQ(report.tensors, 1u);
  }
  for (const auto& result : Exchange(3, fill, rules(CommonCheck::kWarn, {"args.rank"}))) {
    ASSERT_OK(result);
    EXPECT_TRUE(result.value().report.ok());
    EXPECT_THAT(result.value().warnings,
                ElementsAre("common value args.lr: 0.1 on rank 0 and 0.2 on rank 2"));
  }
  for (const auto& result : Exchange(3, fill, rules(CommonCheck::kOff, {}))) {
    ASSERT_OK(result);
    EXPECT_TRUE(result.value().report.ok());
    EXPECT_THAT(result.value().warnings, IsEmpty());
  }
  const auto exempt = Exchange(3, fill, rules(CommonCheck::kError, {"args*"}));
  EXPECT_TRUE(exempt[0].value().report.ok());
  EXPECT_THAT(exempt[0].value().common, SizeIs(1));
}

TEST(ExchangeLayouts, LayerNamesOfOneRankApplyOnAllRanks) {
  for (const int owners : {1, 3}) {
    const Owners wanted(owners);
    const auto results = Exchange(3, [](int rank, StateDict& state) {
      if (rank == 1) {
        ASSERT_OK(state.AddTensor("layers.w", MetadataOnly(kF32, {4, 2}, Box::Whole({4, 2}))));
        ASSERT_OK(state.NameLayers("layers.w", "layers.{}.w"));
      }
      if (rank == 2) {
        ASSERT_OK(state.AddTensor("layers.3.w", MetadataOnly(kF32, {2}, Box::Whole({2}))));
      }
    });
    for (const auto& result : results) {
      ASSERT_OK(result);
      ASSERT_EQ(result.value().report.finding_count, 1u);
      EXPECT_EQ(result.value().report.findings[0].message,
                "tensor layers.3.w: this is also the name of layer 3 of tensor layers.w");
      EXPECT_THAT(result.value().layer_names, SizeIs(1));
    }
    EXPECT_EQ(results[0].value().common.at("$layers.layers.w"), CommonValue("layers.{}.w"));
  }
}

TEST(ExchangeLayouts, LayoutWithGapsIsPlannedWithoutValidation) {
  const auto results = Exchange(
      2,
      [](int rank, StateDict& state) {
        if (rank == 0) Row(state, "w", 0, 2);
      },
      [](int, CallDescription& call) { call.validate = false; });
  ASSERT_OK(results[0]);
  EXPECT_TRUE(results[0].value().report.ok());
  EXPECT_THAT(results[0].value().layout.tensors, SizeIs(1));
  EXPECT_EQ(results[0].value().report.tensors, 1u);
}

// The second one's bytes would be stored nowhere and compared with nothing.
TEST(ExchangeLayouts, DuplicateRegionOnOneRankIsRefusedUnvalidated) {
  const auto results = Exchange(
      2,
      [](int rank, StateDict& state) {
        Row(state, "w", rank, 2);
        if (rank == 1) Row(state, "w", 1, 2);
      },
      [](int, CallDescription& call) { call.validate = false; });
  for (const auto& result : results) {
    EXPECT_THAT(result, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(result.status(), HasMessage("was added twice by rank 1"));
  }
}

// Two calls over one group; what the second one sent, more than a call of no bytes.
struct Second {
  std::vector<Result<JobLayout>> jobs;
  std::vector<std::uint64_t> bytes;
};
Second CallTwice(int ranks, const std::function<void(int rank, int call, StateDict& state)>& fill,
                 const std::function<bool(int rank)>& keeps = {}, bool validate = true) {
  Second second;
  second.jobs.assign(static_cast<std::size_t>(ranks), Status(Code::kInternal, "did not run"));
  second.bytes.assign(static_cast<std::size_t>(ranks), 0);
  EXPECT_OK(RunOnThreads(ranks, [&](Communicator& inner) -> Status {
    const int rank = inner.rank();
    CountingCommunicator comm(inner);
    CallDescription call;
    call.validate = validate;
    StateDict before;
    fill(rank, 0, before);
    {
      Collective collective(comm, {});
      TENSORMOUNT_ASSIGN_OR_RETURN(const JobLayout job, ExchangeLayouts(collective, before, call));
      if (!keeps || keeps(rank)) call.kept_plan_job = job.fingerprint;
    }
    std::uint64_t begin = comm.sent();
    {
      Collective collective(comm, {});
      TENSORMOUNT_RETURN_IF_ERROR(
          collective.Decide("", "validate", [](auto&) { return std::string(); }).status());
    }
    const std::uint64_t none = comm.sent() - begin;
    begin = comm.sent();
    StateDict after;
    fill(rank, 1, after);
    Collective collective(comm, {});
    second.jobs[static_cast<std::size_t>(rank)] = ExchangeLayouts(collective, after, call);
    second.bytes[static_cast<std::size_t>(rank)] = comm.sent() - begin - none;
    return Status();
  }));
  return second;
}

TEST(ExchangeLayouts, UnchangedJobCosts64BytesPerRank) {
  const Second second = CallTwice(4, [](int rank, int call, StateDict& state) {
    for (int t = 0; t < 12; ++t) Row(state, "layers." + std::to_string(t), rank, 4);
    // The same on all ranks that have it, and new in each save.
    EXPECT_OK(state.AddObject("args", "at step " + std::to_string(call)));
    EXPECT_OK(state.SetCommon("iteration", call));
  });
  for (int r = 0; r < 4; ++r) {
    ASSERT_OK(second.jobs[static_cast<std::size_t>(r)]);
    const JobLayout& job = second.jobs[static_cast<std::size_t>(r)].value();
    EXPECT_TRUE(job.unchanged);
    EXPECT_TRUE(job.report.ok());
    EXPECT_EQ(job.report.boxes, 48u);
    if (r > 0) {
      EXPECT_LE(second.bytes[static_cast<std::size_t>(r)], 64u) << "rank " << r;
    }
  }
  EXPECT_EQ(second.jobs[0].value().common.at("iteration"), CommonValue(1));
  // The first call of the same job takes more.
  const Second first = CallTwice(
      4, [](int rank, int, StateDict& state) { Row(state, "w", rank, 4); },
      [](int) { return false; });
  EXPECT_GT(first.bytes[3], 64u + kShortShardBytes);
}

TEST(ExchangeLayouts, ChangedRankOrLostPlanIsDetected) {
  const Second changed = CallTwice(3, [](int rank, int call, StateDict& state) {
    Row(state, "w", rank, 3);
    if (call == 1 && rank == 2) {
      EXPECT_OK(state.AddTensor("more", MetadataOnly(kF32, {1}, Box::Whole({1}))));
    }
  });
  const Second gone = CallTwice(
      3, [](int rank, int, StateDict& state) { Row(state, "w", rank, 3); },
      [](int rank) { return rank != 1; });
  for (const Second& second : {changed, gone}) {
    for (const auto& job : second.jobs) {
      ASSERT_OK(job);
      EXPECT_FALSE(job.value().unchanged);
    }
    EXPECT_FALSE(second.jobs[0].value().layout.tensors.empty());
  }
}

TEST(ExchangeLayouts, ObjectReplicasAreComparedInEverySave) {
  const Second second = CallTwice(3, [](int rank, int call, StateDict& state) {
    EXPECT_OK(state.AddObject("args", call == 1 && rank == 2 ? "other" : "same"));
  });
  for (const auto& job : second.jobs) {
    ASSERT_OK(job);
    EXPECT_TRUE(job.value().unchanged);
    ASSERT_EQ(job.value().report.finding_count, 1u);
    EXPECT_EQ(job.value().report.findings[0].message,
              "object args: contents differ between rank 0 and rank 2");
  }
}

TEST(ExchangeLayouts, ObjectReplicasAreComparedWithoutValidation) {
  const Second second = CallTwice(
      3,
      [](int rank, int call, StateDict& state) {
        EXPECT_OK(state.AddObject("args", call == 1 && rank == 2 ? "other" : "same"));
      },
      {}, /*validate=*/false);
  for (const auto& job : second.jobs) {
    EXPECT_THAT(job, HasCode(Code::kInvalidArgument));
    EXPECT_THAT(job, HasMessage("contents differ between"));
  }
}

TEST(ExchangeLayouts, DifferingLayerNamesAreRefused) {
  for (const CommonCheck check : {CommonCheck::kOff, CommonCheck::kWarn}) {
    ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) -> Status {
      StateDict state;
      Row(state, "w", comm.rank(), 2);
      EXPECT_OK(state.NameLayers("w", comm.rank() == 0 ? "a.{}.w" : "b.{}.w"));
      CallDescription call;
      call.common = check;
      call.common_exempt = {"*"};
      Collective collective(comm, {});
      TENSORMOUNT_ASSIGN_OR_RETURN(const JobLayout job, ExchangeLayouts(collective, state, call));
      EXPECT_EQ(job.report.finding_count, 1u);
      return Status();
    }));
  }
}

TEST(Validate, ReportsOnEveryRank) {
  ASSERT_OK(RunOnThreads(4, [](Communicator& comm) -> Status {
    StateDict state;
    Row(state, "w", comm.rank() == 3 ? 2 : comm.rank(), 4);
    TENSORMOUNT_ASSIGN_OR_RETURN(const LayoutReport report, Validate(state, comm));
    EXPECT_EQ(report.ToText(),
              "1 tensor of 96 bytes and 0 objects on 4 ranks: 4 shards in 3 different layouts, 24 "
              "bytes of replicas\n"
              "1 finding\n"
              "missing: tensor w: [6:8, 0:3] is held by no rank; parts are held by ranks 0-3\n"
              "    rank 3 reports the box of rank 2: wrong tensor-parallel rank?\n");
    EXPECT_NE(report.ToJson().find("\"kind\": \"missing\""), std::string::npos);
    EXPECT_NE(report.ToJson().find("\"cause\": \"rank 3 reports"), std::string::npos);
    return Status();
  }));
}

TEST(GatherLayouts, EqualLayoutsAreSentOnce) {
  ASSERT_OK(RunOnThreads(5, [](Communicator& comm) -> Status {
    StateDict state;
    if (comm.rank() < 4) Row(state, "w", comm.rank() % 2, 2);
    Collective collective(comm, {});
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<GatheredLayout> layouts,
                                 GatherLayouts(collective, state));
    if (comm.rank() != 0) {
      EXPECT_THAT(layouts, IsEmpty());
      return Status();
    }
    EXPECT_THAT(layouts, SizeIs(3));
    EXPECT_THAT(layouts[0].ranks, ElementsAre(0, 2));
    EXPECT_THAT(layouts[1].ranks, ElementsAre(1, 3));
    EXPECT_THAT(layouts[2].ranks, ElementsAre(4));
    TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedLayout one, DecodeLayout(layouts[1].encoded, "l"));
    EXPECT_EQ(one.shards.at(0).region, Region(B({2, 0}, {2, 3})));
    return Status();
  }));
}

}  // namespace
}  // namespace tensormount
