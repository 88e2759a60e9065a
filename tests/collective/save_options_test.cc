// SPDX-License-Identifier: Apache-2.0
// What SaveOptions and SaveReport promise: who writes, what is told, plans used again, cancelling.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "base/log.h"
#include "collective/layout/layout_exchange.h"
#include "index/read/checkpoint.h"
#include "index/records/manifest.h"
#include "tests/collective/save_testing.h"
#include "tests/shard/boxes.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class SaveOptionsTest : public testing::Test {
 protected:
  std::string Store() const { return dir_.Join("store"); }
  std::string Path(const std::string& name) const { return dir_.Join("store/" + name); }

  TempDir dir_;
  const RandomTensor w_ = MakeTensor("w", DType::kF32, {64, 300});
  const RandomTensor big_ = MakeTensor("big", DType::kF32, {1100, 1024});
};

TEST_F(SaveOptionsTest, MainReplicaWritesAlone) {
  SaveOptions options;
  options.strategy = SaveStrategy::kMain;
  const auto results = SaveOnThreads(
      Path("a"), 3,
      [&](int rank, RankState& state) {
        state.Add(big_, Box::Whole(big_.shape));
        ASSERT_OK(state.dict.AddObject("o", "bytes"));
        state.memory.push_back(state.memory.back());
        ShardMemory& memory = state.memory.back();
        memory.view.data = memory.memory.data();
        ASSERT_OK(state.dict.AddTensor("labelled", {big_.shape, Box::Whole(big_.shape), memory.view,
                                                    rank == 2 ? Replica::kMain : Replica::kCopy}));
      },
      options);
  ASSERT_OK(OneVerdict(results));
  EXPECT_EQ(results[0].value().bytes_written_here, big_.bytes.size() + 5) << "lowest of unlabelled";
  EXPECT_EQ(results[1].value().bytes_written_here, 0u);
  EXPECT_EQ(results[2].value().bytes_written_here, big_.bytes.size());
  EXPECT_THAT(results[1].value().files, IsEmpty());
  EXPECT_EQ(ReadAll(Path("a")).at("labelled"), big_.bytes);
}

TEST_F(SaveOptionsTest, ImpossiblePlacementIsRefusedOnAllRanks) {
  const RandomTensor short_runs = MakeTensor("short runs", DType::kU8, {10'000, 4});
  SaveOptions options;
  options.placement = PlacementRule::kTensorFile;
  for (int owners = 0; owners < 3; ++owners) {  // SaveOnThreads takes another number each time.
    const Status status = OneVerdict(SaveOnThreads(
        Path("a"), 4,
        [&](int rank, RankState& state) {
          state.Add(short_runs, B({0, rank}, {10'000, 1}));
          for (int t = 0; t < 9; ++t) {
            state.Add(MakeTensor("t" + std::to_string(t), DType::kF32, {8}), B({2 * rank}, {2}));
          }
        },
        options));
    EXPECT_THAT(status, HasCode(Code::kUnsupported));
    EXPECT_TRUE(status.message().starts_with("placement tensor-file: tensor short runs: shard "))
        << status.message();
    EXPECT_FALSE(HostFileSystem().Exists(Store()));
  }
}

TEST_F(SaveOptionsTest, ReportNamesFilesAndTheirBytes) {
  const auto results = SaveOnThreads(Path("a"), 2, [&](int rank, RankState& state) {
    state.Add(big_, B({550 * rank, 0}, {550, 1024}));
    state.Add(w_, B({32 * rank, 0}, {32, 300}));
    ASSERT_OK(state.dict.AddObject("o" + std::to_string(rank), "bytes"));
  });
  ASSERT_OK(OneVerdict(results));
  std::map<std::string, std::uint64_t> sum;
  for (const auto& r : results) {
    std::uint64_t here = 0;
    for (const SaveReport::File& f : r.value().files) {
      EXPECT_THAT(f.name, testing::StartsWith("data/"));
      here += f.bytes;
      sum[f.name] += f.bytes;
    }
    EXPECT_EQ(here, r.value().bytes_written_here);
    EXPECT_EQ(r.value().files.size(), 3u) << "tensor file, rank shard, pack";
    EXPECT_GT(r.value().write_seconds, 0);
    EXPECT_GT(r.value().publish_seconds, 0);
  }
  for (const auto& [name, bytes] : sum) {
    ASSERT_OK_AND_ASSIGN(const FileInfo info, HostFileSystem().Stat(Path("a") + "/" + name));
    EXPECT_GE(info.size, bytes) << name;
    EXPECT_LE(info.size, bytes + 4096) << name << ": padding of a header at most";
  }
}

// All events of all ranks, by rank.
class Events {
 public:
  EventHook Hook() {
    return [this](const Event& e) {
      const std::lock_guard lock(mutex_);
      const char* kinds[] = {"start", "end", "error"};
      std::string text = std::string(e.phase) + " " + kinds[static_cast<int>(e.kind)];
      if (e.kind == Event::Kind::kError) text += ": " + e.status.message();
      if (e.phase == "write" && e.kind == Event::Kind::kEnd) written_ += e.bytes;
      EXPECT_EQ(e.job, "save");
      EXPECT_THAT(std::string(e.path), testing::EndsWith("/a"));
      of_rank_[e.rank].push_back(text);
    };
  }
  const std::vector<std::string>& of(int rank) { return of_rank_[rank]; }
  std::uint64_t written() const { return written_; }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<std::string>> of_rank_;
  std::uint64_t written_ = 0;
};

TEST_F(SaveOptionsTest, EventsReportStartAndEndOfEachPhase) {
  Events events;
  SaveOptions options;
  options.events = events.Hook();
  const auto results = SaveOnThreads(
      Path("a"), 2, [&](int, RankState& state) { state.Add(w_, Box::Whole(w_.shape)); }, options);
  ASSERT_OK(OneVerdict(results));
  for (const int rank : {0, 1}) {
    EXPECT_THAT(events.of(rank),
                ElementsAre("validate start", "validate end", "plan start", "plan end",
                            "stage start", "stage end", "write start", "write end", "compare start",
                            "compare end", "publish start", "publish end"));
  }
  EXPECT_EQ(events.written(), results[0].value().bytes_written);
}

TEST_F(SaveOptionsTest, EventsEndWithTheErrorOfTheFailedPhase) {
  Events events;
  SaveOptions options;
  options.events = events.Hook();
  const Status status = OneVerdict(SaveOnThreads(
      Path("a"), 2,
      [&](int rank, RankState& state) {
        if (rank == 1) (void)state.dict.Fail(Status(Code::kUnavailable, "no data today"));
      },
      options));
  EXPECT_THAT(status, HasMessage("rank 1: no data today"));
  for (const int rank : {0, 1}) {
    ASSERT_EQ(events.of(rank).size(), 2u);
    EXPECT_THAT(events.of(rank)[1], HasSubstr("validate error: rank 1: no data today"));
  }
}

TEST_F(SaveOptionsTest, ExceptionsInHooksAreLoggedAndIgnored) {
  std::mutex mutex;
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines.emplace_back(line);
  });
  std::atomic<int> everywhere{0};
  std::atomic<int> once{0};
  SaveOptions options;
  options.events = [](const Event& e) {
    if (e.phase == "write") throw std::runtime_error("from the hook");
  };
  options.on_commit = [&](const SaveReport& report) {
    EXPECT_FALSE(report.uuid.empty());
    EXPECT_GT(report.publish_seconds, 0);
    ++everywhere;
    throw 7;  // NOLINT: not even an exception.
  };
  options.on_commit_once = [&](const SaveReport&) { ++once; };
  const auto save = [&] {
    return OneVerdict(SaveOnThreads(
        Path("a"), 3, [&](int, RankState& state) { state.Add(w_, Box::Whole(w_.shape)); },
        options));
  };
  EXPECT_OK(save());
  EXPECT_EQ(everywhere, 3);
  EXPECT_EQ(once, 1);
  EXPECT_THAT(save(), HasCode(Code::kAlreadyExists));
  EXPECT_EQ(everywhere, 3) << "only after a commit";
  SetLogSink({});
  const auto said = [&](const std::string& text) {
    return std::count_if(lines.begin(), lines.end(), [&](const std::string& line) {
      return line.find(text) != std::string::npos;
    });
  };
  EXPECT_GE(said("from the hook"), 3);
  EXPECT_EQ(said("on_commit"), 3);
}

TEST_F(SaveOptionsTest, LayoutReportIsGivenForRefusedAndGoodSaves) {
  std::vector<LayoutReport> layouts(2);
  const auto save = [&](int rows) {
    std::vector<RankState> states(2);
    for (int r = 0; r < 2; ++r) {
      states[static_cast<std::size_t>(r)].Add(w_, B({32 * r, 0}, {r == 1 ? rows : 32, 300}));
    }
    return RunOnThreads(2, [&](Communicator& comm) {
      const auto r = static_cast<std::size_t>(comm.rank());
      SaveOptions options;
      options.layout = &layouts[r];
      return Save(states[r].dict, Path("a"), comm, options).status();
    });
  };
  EXPECT_THAT(save(31), HasCode(Code::kInvalidArgument));
  for (const LayoutReport& layout : layouts) {
    ASSERT_EQ(layout.findings.size(), 1u);
    EXPECT_EQ(layout.findings[0].kind, FindingKind::kMissing);
    EXPECT_EQ(layout.findings[0].box, B({63, 0}, {1, 300}));
  }
  EXPECT_OK(save(32));
  for (const LayoutReport& layout : layouts) {
    EXPECT_TRUE(layout.ok());
    EXPECT_EQ(layout.tensors, 1u);
  }
}

TEST_F(SaveOptionsTest, PublishRefusesIncompleteSaveWithoutValidation) {
  SaveOptions options;
  options.validate = false;
  const auto save = [&](int rows) {
    return OneVerdict(SaveOnThreads(
        Path("a"), 2,
        [&](int rank, RankState& state) {
          state.Add(w_, B({32 * rank, 0}, {rank == 1 ? rows : 32, 300}));
        },
        options));
  };
  const Status status = save(30);
  EXPECT_THAT(status, HasCode(Code::kDataLoss));
  EXPECT_THAT(status, HasMessage("[62:64, 0:300]"));
  EXPECT_THAT(Inside(Store()), IsEmpty());
  EXPECT_OK(save(32));
  EXPECT_EQ(ReadAll(Path("a")).at("w"), w_.bytes);
}

TEST_F(SaveOptionsTest, DifferingCommonValuesWarnOrFailAsConfigured) {
  SaveOptions options;
  const auto save = [&] {
    return SaveOnThreads(
        Path("a"), 2,
        [&](int rank, RankState& state) {
          ASSERT_OK(state.dict.SetCommon("lr", 0.5 + rank));
          ASSERT_OK(state.dict.SetRankCommon("seed", 100 + rank));
          CommonDict content;
          content.items["kind"] = "test";
          ASSERT_OK(state.dict.SetContentMetadata(content));
        },
        options);
  };
  const Status status = OneVerdict(save());
  EXPECT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(status, HasMessage("lr"));
  options.common = CommonCheck::kWarn;
  const auto results = save();
  ASSERT_OK(OneVerdict(results));
  ASSERT_EQ(results[0].value().warnings.size(), 1u);
  EXPECT_THAT(results[0].value().warnings[0], HasSubstr("lr"));
  LoadReport report;
  ASSERT_OK(RunOnThreads(1, [&](Communicator& comm) {
    TENSORMOUNT_ASSIGN_OR_RETURN(report, Load(StateDict(), Path("a"), comm));
    return Status();
  }));
  EXPECT_THAT(report.common("lr"), IsOkAndHolds(CommonValue(0.5)));
  EXPECT_THAT(report.rank_common(1, "seed"), IsOkAndHolds(CommonValue(101)));
  EXPECT_EQ(*report.content_metadata.Find("kind"), CommonValue("test"));
}

TEST_F(SaveOptionsTest, ShardsWithoutDataCannotBeSaved) {
  const Status status = OneVerdict(SaveOnThreads(Path("a"), 2, [&](int rank, RankState& state) {
    const Region rows = B({32 * rank, 0}, {32, 300});
    if (rank == 0) return state.Add(w_, rows);
    ASSERT_OK(state.dict.AddTensor("w", MetadataOnly(DType::kF32, w_.shape, rows)));
  }));
  EXPECT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(status, HasMessage("rank 1: tensor w"));
  EXPECT_FALSE(HostFileSystem().Exists(Store()));
}

// ---- Plans used again -----------------------------------------------------------------------

// Saves one after the other over one communicator. `fill(step, rank, state)`.
std::vector<std::vector<Result<SaveReport>>> SaveSteps(
    const std::string& store, int ranks, int steps,
    const std::function<void(int step, int rank, RankState&)>& fill,
    const std::function<SaveOptions(int step)>& options_of = {}) {
  std::vector<std::vector<Result<SaveReport>>> results(
      static_cast<std::size_t>(steps),
      std::vector<Result<SaveReport>>(static_cast<std::size_t>(ranks),
                                      Status(Code::kInternal, "did not run")));
  static int calls = 0;
  ForceOwners(static_cast<std::uint32_t>(calls++ % 3));
  EXPECT_OK(RunOnThreads(ranks, [&](Communicator& comm) {
    for (int step = 0; step < steps; ++step) {
      RankState state;
      fill(step, comm.rank(), state);
      const SaveOptions options = options_of ? options_of(step) : SaveOptions{};
      results[static_cast<std::size_t>(step)][static_cast<std::size_t>(comm.rank())] =
          Save(state.dict, store + "/step-" + std::to_string(step), comm, options);
    }
    return Status();
  }));
  return results;
}

std::string ReusedOf(const std::vector<std::vector<Result<SaveReport>>>& steps) {
  std::string text;
  for (const auto& results : steps) {
    EXPECT_OK(OneVerdict(results));
    if (!results[0].ok()) return "failed";
    for (const auto& r : results) {
      EXPECT_EQ(r.value().plan_reused, results[0].value().plan_reused);
    }
    text += results[0].value().plan_reused ? 'r' : 'n';
  }
  return text;
}

TEST_F(SaveOptionsTest, PlanIsReusedWhileTheLayoutIsUnchanged) {
  std::vector<RandomTensor> tensors;
  for (int step = 0; step < 4; ++step) {
    tensors.push_back(w_);
    Random random(static_cast<std::uint64_t>(step));
    tensors.back().bytes = random.Bytes(w_.bytes.size());
  }
  const auto steps = SaveSteps(Store(), 3, 4, [&](int step, int rank, RankState& state) {
    const RandomTensor& w = tensors[static_cast<std::size_t>(step)];
    state.Add(w, Box::Whole(w.shape));
    state.Add(big_, B({367 * rank, 0}, {rank == 2 ? 366 : 367, 1024}));
    ASSERT_OK(state.dict.AddObject("rng", std::string(static_cast<std::size_t>(step), 'x'),
                                   {.index = {rank}, .grid = {3}}));
    ASSERT_OK(state.dict.SetCommon("iteration", step));
  });
  EXPECT_EQ(ReusedOf(steps), "nrrr");
  for (int step = 0; step < 4; ++step) {
    const std::string path = Path("step-" + std::to_string(step));
    EXPECT_EQ(ReadAll(path).at("w"), tensors[static_cast<std::size_t>(step)].bytes);
    EXPECT_EQ(ReadAll(path).at("big"), big_.bytes);
    ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(HostFileSystem(), path, {}));
    ASSERT_OK_AND_ASSIGN(const auto parts, opened->index().ObjectParts("rng"));
    EXPECT_EQ(parts[1].length, static_cast<std::uint64_t>(step));
    const auto s = static_cast<std::size_t>(step);
    EXPECT_EQ(steps[s][0].value().tensors, 2u);
    EXPECT_EQ(steps[s][0].value().bytes, w_.bytes.size() + big_.bytes.size());
    EXPECT_EQ(steps[s][0].value().replica_bytes, 2 * w_.bytes.size());
    EXPECT_GT(steps[s][0].value().replica_bytes_compared, 0u);
  }
}

TEST_F(SaveOptionsTest, PlanIsNotReusedForAnotherLayoutOrOption) {
  // 0: a; 1: a again; 2: one rank's cut moves; 3: back; 4: items in another order; 5: other dtype;
  // 6: as 5 with another placement; 7: as 6; 8: as 6 with reuse off.
  const RandomTensor ints = MakeTensor("w", DType::kI32, w_.shape);
  const auto steps = SaveSteps(
      Store(), 2, 9,
      [&](int step, int rank, RankState& state) {
        const std::int64_t cut = step == 2 ? 40 : 32;
        const Region rows = rank == 0 ? B({0, 0}, {cut, 300}) : B({cut, 0}, {64 - cut, 300});
        if (step == 4) state.Add(big_, Box::Whole(big_.shape));
        state.Add(step >= 5 ? ints : w_, rows);
        if (step != 4) state.Add(big_, Box::Whole(big_.shape));
      },
      [](int step) {
        SaveOptions options;
        if (step >= 6) options.placement = PlacementRule::kRankShard;
        options.reuse_plan = step != 8;
        return options;
      });
  EXPECT_EQ(ReusedOf(steps), "nrnrnnnrn") << "step 3 finds the plan of two jobs ago";
  for (int step = 0; step < 9; ++step) {
    const auto read = ReadAll(Path("step-" + std::to_string(step)));
    EXPECT_EQ(read.at("w"), step >= 5 ? ints.bytes : w_.bytes) << step;
    EXPECT_EQ(read.at("big"), big_.bytes) << step;
  }
}

TEST_F(SaveOptionsTest, UnvalidatedPlanIsNotReusedForAValidatedSave) {
  const auto steps = SaveSteps(
      Store(), 2, 4, [&](int, int, RankState& state) { state.Add(w_, Box::Whole(w_.shape)); },
      [](int step) {
        SaveOptions options;
        options.validate = step >= 2;
        return options;
      });
  EXPECT_EQ(ReusedOf(steps), "nrnr");
}

TEST_F(SaveOptionsTest, ReusedPlanStillComparesReplicas) {
  RandomTensor other = w_;
  other.bytes[100] ^= 1;
  const auto steps = SaveSteps(
      Store(), 3, 3,
      [&](int step, int rank, RankState& state) {
        state.Add(step == 1 && rank == 1 ? other : w_, Box::Whole(w_.shape));
      },
      [](int) {
        SaveOptions options;
        options.replicas = ReplicaCheck::kFull;
        return options;
      });
  EXPECT_OK(OneVerdict(steps[0]));
  EXPECT_THAT(OneVerdict(steps[1]), HasMessage("tensor w: "));
  EXPECT_THAT(OneVerdict(steps[1]), HasMessage("rank 0 and rank 1"));
  ASSERT_OK(OneVerdict(steps[2]));
  EXPECT_TRUE(steps[2][0].value().plan_reused) << "what failed later was not the plan";
}

// ---- Cancelling -----------------------------------------------------------------------------

// Saves where `rank` is asked to end it at a moment of its own save: before "begin" (at once), or
// at the given phase's start.
Status SaveAndCancel(const std::string& path, int ranks, int canceller, const std::string& phase,
                     const RandomTensor& tensor, std::atomic<int>* begun,
                     std::atomic<int>* ending) {
  std::vector<RankState> states(static_cast<std::size_t>(ranks));
  std::vector<Result<SaveReport>> results(static_cast<std::size_t>(ranks),
                                          Status(Code::kInternal, "did not run"));
  for (RankState& state : states) state.Add(tensor, Box::Whole(tensor.shape));
  std::atomic<bool> cancel{phase == "at once"};
  EXPECT_OK(RunOnThreads(ranks, [&](Communicator& comm) {
    const auto r = static_cast<std::size_t>(comm.rank());
    SaveOptions options;
    SaveControl control;
    control.on_staging_made = [&](FileSystem&, const Staging& staging) {
      EXPECT_TRUE(HostFileSystem().Exists(staging.directory));
      ++*begun;
    };
    control.on_staging_end = [&](const Staging& staging) {
      EXPECT_EQ(comm.rank(), 0);
      EXPECT_TRUE(HostFileSystem().Exists(staging.directory)) << "before it is moved";
      ++*ending;
    };
    if (comm.rank() == canceller) {
      control.cancel = &cancel;
      options.events = [&](const Event& e) {
        if (e.kind == Event::Kind::kStart && e.phase == phase) cancel = true;
      };
      options.on_commit = [&](const SaveReport&) { cancel = true; };  // Too late.
    }
    results[r] = SaveOn(HostFileSystem(), states[r].dict, path, comm, options, control);
    return Status();
  }));
  return OneVerdict(results);
}

TEST_F(SaveOptionsTest, CancelBeforePublishEndsAllRanksAndNamesTheRank) {
  for (const int who : {0, 2}) {
    for (const char* phase : {"at once", "plan", "write", "compare", "publish"}) {
      SCOPED_TRACE(std::string(phase) + " on rank " + std::to_string(who));
      std::atomic<int> begun{0};
      std::atomic<int> ending{0};
      const Status status = SaveAndCancel(Path("a"), 3, who, phase, big_, &begun, &ending);
      EXPECT_THAT(status, HasCode(Code::kCancelled));
      EXPECT_THAT(status, HasMessage("rank " + std::to_string(who)));
      EXPECT_THAT(Inside(Store()), IsEmpty());
      const bool early = std::string(phase) == "at once" || std::string(phase) == "plan";
      EXPECT_EQ(begun, early ? 0 : 3);
      EXPECT_EQ(ending, early ? 0 : 1);
    }
  }
  std::atomic<int> begun{0};
  std::atomic<int> ending{0};
  EXPECT_OK(SaveAndCancel(Path("a"), 3, 1, "never", big_, &begun, &ending));
  EXPECT_EQ(begun, 3);
  EXPECT_EQ(ending, 1);
  EXPECT_EQ(ReadAll(Path("a")).at("big"), big_.bytes);
}

TEST_F(SaveOptionsTest, FailureTakesPrecedenceOverACancel) {
  RankState states[2];
  states[0].Add(w_, Box::Whole(w_.shape));
  RandomTensor other = w_;
  other.bytes[0] ^= 1;
  states[1].Add(other, Box::Whole(w_.shape));
  std::vector<Result<SaveReport>> results(2, Status(Code::kInternal, "did not run"));
  std::atomic<bool> cancel{false};
  ObservedFileSystem full(HostFileSystem(), [](const FileEvent& e) {
    return e.op == FileOp::kWrite && e.path.find("manifest/r1") != std::string::npos
               ? Status(Code::kResourceExhausted, "full")
               : Status();
  });
  ASSERT_OK(RunOnThreads(2, [&](Communicator& comm) {
    const auto r = static_cast<std::size_t>(comm.rank());
    SaveControl control;
    SaveOptions options;
    if (r == 0) {
      control.cancel = &cancel;
      options.events = [&](const Event& e) { cancel = cancel || e.phase == "write"; };
    }
    results[r] = SaveOn(full, states[r].dict, Path("a"), comm, options, control);
    return Status();
  }));
  EXPECT_THAT(OneVerdict(results), HasCode(Code::kResourceExhausted));
}

// ---- Shards without memory ---------------------------------------------------------------------

TEST_F(SaveOptionsTest, ShardsWithoutMemoryAreReadInBlocks) {
  const int columns = static_cast<int>(big_.shape[1]);
  const std::int64_t rows = big_.shape[0];
  // Rank 0 has the left columns, rank 1 the right ones, both a replica of w.
  const auto save = [&](const std::string& path, int fails, bool differs) {
    std::vector<Result<SaveReport>> results(2, Status(Code::kInternal, "did not run"));
    EXPECT_OK(RunOnThreads(2, [&](Communicator& comm) {
      const int r = comm.rank();
      const int begin = r == 0 ? 0 : columns / 3;
      const int end = r == 0 ? columns / 3 : columns;
      const Region region = Box::Make({0, begin}, {rows, end - begin}).value();
      std::string bytes[2] = {OracleBytes(big_, region), w_.bytes};
      if (differs && r == 1) bytes[1][5] ^= 1;
      StateDict state;
      TENSORMOUNT_RETURN_IF_ERROR(
          state.AddTensor("big", MetadataOnly(big_.dtype, big_.shape, region)));
      TENSORMOUNT_RETURN_IF_ERROR(
          state.AddTensor("w", MetadataOnly(w_.dtype, w_.shape, Box::Whole(w_.shape))));
      SaveOptions options;
      options.replicas = ReplicaCheck::kFull;
      SaveControl control;
      control.read = [&](std::uint32_t item, std::uint64_t offset, std::span<std::byte> out) {
        EXPECT_LE(out.size(), std::size_t{1} << 20);
        if (r == fails) return Status(Code::kDataLoss, "the source is damaged");
        std::memcpy(out.data(), bytes[item].data() + offset, out.size());
        return Status();
      };
      results[static_cast<std::size_t>(r)] =
          SaveOn(HostFileSystem(), state, path, comm, options, control);
      return Status();
    }));
    return OneVerdict(results);
  };
  ASSERT_OK(save(Path("a"), -1, false));
  EXPECT_EQ(ReadAll(Path("a")).at("big"), big_.bytes);
  EXPECT_EQ(ReadAll(Path("a")).at("w"), w_.bytes);
  for (const int who : {0, 1}) {
    const Status status = save(Path("b"), who, false);
    EXPECT_THAT(status, HasCode(Code::kDataLoss));
    EXPECT_THAT(status, HasMessage("rank " + std::to_string(who) + ": "));
    EXPECT_THAT(status, HasMessage("the source is damaged"));
  }
  EXPECT_THAT(save(Path("b"), -1, true), HasMessage("differs between the replicas on rank 0 and"));
  EXPECT_THAT(Inside(Store()), ElementsAre("a"));
}

// Without the option manifests are what they were; with it one row is proved by its own pages.
TEST_F(SaveOptionsTest, PageHashesVerifyARowByItsPages) {
  const RandomTensor flat = MakeTensor("flat", DType::kF32, {50'000});
  const auto save = [&](const std::string& name, bool page_hashes) {
    SaveOptions options;
    options.page_hashes = page_hashes;
    options.reuse = Reuse::kOff;
    return OneVerdict(SaveOnThreads(
        Path(name), 2,
        [&](int rank, RankState& state) {
          state.Add(big_, Box::Make({550 * rank, 0}, {550, 1024}).value());
          state.Add(flat, Box::Make({25'000 * rank}, {25'000}).value());
        },
        options));
  };
  ASSERT_OK(save("without", false));
  ASSERT_OK(save("with", true));
  for (const std::string name : {"without", "with"}) {
    EXPECT_EQ(ReadAll(Path(name)).at("big"), big_.bytes);
    ASSERT_OK_AND_ASSIGN(const auto opened,
                         OpenedCheckpoint::Open(HostFileSystem(), Path(name), {}));
    ASSERT_OK_AND_ASSIGN(const TensorEntry big, opened->index().Find("big"));
    ASSERT_OK_AND_ASSIGN(const TensorEntry vector, opened->index().Find("flat"));
    for (const std::uint64_t row : {0, 7, 549, 550, 1099}) {
      std::string got(4096, '?');
      ReadStats stats;
      ASSERT_OK(opened->ReadBytes(big, row * 4096, got.data(), got.size(),
                                  ReadVerify::kExtendLeaves, &stats));
      EXPECT_EQ(got, big_.bytes.substr(row * 4096, 4096));
      EXPECT_EQ(stats.bytes_by_leaf, 4096u);
      // 550 rows are no whole leaves: the last of each rank is 6 rows.
      const std::uint64_t leaf = row == 549 || row == 1099 ? 6 * 4096 : 65'536;
      EXPECT_EQ(stats.bytes_read, name == "with" ? 4096 : leaf) << name << row;
      stats = {};
      ASSERT_OK(opened->ReadBytes(vector, 8, got.data(), 8, ReadVerify::kExtendLeaves, &stats));
      EXPECT_EQ(stats.bytes_read, 65'536u) << "one axis";
    }
    ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                         VerifyCheckpoint(HostFileSystem(), Path(name), {}));
    EXPECT_THAT(report.damages, IsEmpty());
    ASSERT_OK_AND_ASSIGN(const std::string manifest,
                         HostFileSystem().ReadFile(Path(name) + "/manifest/r1.tmm", 1 << 20));
    ASSERT_OK_AND_ASSIGN(const Manifest decoded, DecodeManifest(manifest, "r1.tmm"));
    EXPECT_EQ(decoded.extras.pages, name == "with");
    // Chunks of 35 and 2 leaves, and the header of the file. Random bits have NaNs, so that a row
    // of counts takes 3 hashes.
    EXPECT_EQ(decoded.leaves.size(), 36u + 2 + 2 * 3 + (name == "with" ? 1 + 550 + 35 : 0));
  }
}

// ---- Eight identical replicas ------------------------------------------------------------------

TEST_F(SaveOptionsTest, EightReplicasAreWrittenOnceAndEvenly) {
  std::vector<RandomTensor> tensors;
  std::uint64_t total = 0;
  for (int t = 0; t < 60; ++t) {
    tensors.push_back(
        MakeTensor("layers." + std::to_string(t), DType::kBF16, {t < 3 ? 2100 : 24, 1024}));
    total += tensors.back().bytes.size();
  }
  const auto results = SaveOnThreads(Path("a"), 8, [&](int, RankState& state) {
    for (const RandomTensor& t : tensors) state.Add(t, Box::Whole(t.shape));
  });
  ASSERT_OK(OneVerdict(results));
  const SaveReport& report = results[0].value();
  EXPECT_LE(static_cast<double>(report.bytes_written), 1.01 * static_cast<double>(total));
  EXPECT_GE(report.bytes_written, total);
  for (const auto& r : results) {
    EXPECT_NEAR(static_cast<double>(r.value().bytes_written_here), static_cast<double>(total) / 8,
                0.05 * static_cast<double>(total) / 8);
  }
  EXPECT_EQ(ReadAll(Path("a")).size(), tensors.size());
}

}  // namespace
}  // namespace tensormount
