// SPDX-License-Identifier: Apache-2.0
// Random sequences of saves, in the background and not, that overlap, fail, are cancelled and
// dropped, with layouts that change or do not. Two rules: all ranks end alike, and what was
// committed is what the caller had at the call.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/async_save.h"
#include "tensormount/checkpoint.h"

#include "base/hash.h"
#include "collective/layout/layout_exchange.h"
#include "tests/collective/save_testing.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using std::chrono::microseconds;

// What goes wrong with a save, if anything.
enum class Trouble {
  kNone,
  kFails,          // A rank says so.
  kNoData,         // A rank's shard has no bytes.
  kHole,           // A rank leaves its shards of one tensor out.
  kTensorReplica,  // A rank's replica differs.
  kObjectReplica,  // Likewise of an object.
  kTooLarge,       // A rank's shards do not fit into its staging memory.
  kCancelled,      // Asked for by a rank, soon.
  kDropped,        // The handle of a rank that cancels then.
};

// A layout of a job: tensors and who holds what, labels included.
struct Layout {
  std::vector<RandomTensor> tensors;  // Without bytes.
  std::vector<Partition> pieces;      // By tensor, rank.
  std::vector<std::vector<std::vector<Replica>>> labels;
  std::vector<bool> has_object;  // By rank.
};

struct Step {
  std::size_t layout = 0;
  bool async = true;
  std::size_t saver = 0;
  std::string name;
  std::string path;
  SaveOptions options;
  std::uint64_t version = 0;
  Trouble trouble = Trouble::kNone;
  int rank = 0;  // With the trouble.
  std::int64_t delay = 0;
  bool throws = false;
};

std::string VersionBytes(const RandomTensor& tensor, std::uint64_t version) {
  const std::size_t size =
      static_cast<std::size_t>(CheckedProduct(tensor.shape).value()) * tensor.element_bytes();
  return Random(Xxh3Low64(tensor.key) + version).Bytes(size);
}
std::string ObjectOf(const std::string& key, std::uint64_t version) {
  Random random(Xxh3Low64(key) * 31 + version);
  return random.Bytes(static_cast<std::size_t>(random.Int(0, 3000)));
}

Layout MakeRandomLayout(Random& random, int ranks) {
  Layout layout;
  const auto count = static_cast<std::size_t>(random.Int(1, 4));
  for (std::size_t t = 0; t < count; ++t) {
    RandomTensor tensor = MakeRandomTensor(random, "t" + std::to_string(t), 20'000);
    const Partition pieces = RandomPartition(random, tensor.shape, ranks);
    std::vector<std::vector<Replica>> labels(pieces.size());
    const bool labelled = random.OneIn(3);
    for (std::size_t r = 0; r < pieces.size(); ++r) {
      for (const Region& region : pieces[r]) {
        // The last holder is the main one.
        bool later = false;
        for (std::size_t other = r + 1; other < pieces.size(); ++other) {
          later |=
              std::find(pieces[other].begin(), pieces[other].end(), region) != pieces[other].end();
        }
        labels[r].push_back(!labelled ? Replica::kUnlabelled
                            : later   ? Replica::kCopy
                                      : Replica::kMain);
      }
    }
    layout.tensors.push_back(std::move(tensor));
    layout.pieces.push_back(pieces);
    layout.labels.push_back(std::move(labels));
  }
  for (int r = 0; r < ranks; ++r) layout.has_object.push_back(random.OneIn(2));
  return layout;
}

// Ranks that hold the first cells that `rank` holds of some tensor, another one among them.
std::optional<std::pair<std::size_t, std::size_t>> Replicated(const Layout& layout, int rank) {
  const auto r = static_cast<std::size_t>(rank);
  for (std::size_t t = 0; t < layout.pieces.size(); ++t) {
    const Partition& pieces = layout.pieces[t];
    for (std::size_t i = 0; i < pieces[r].size(); ++i) {
      if (pieces[r][i].empty()) continue;
      for (std::size_t other = 0; other < pieces.size(); ++other) {
        const auto& theirs = pieces[other];
        if (other != r && std::find(theirs.begin(), theirs.end(), pieces[r][i]) != theirs.end()) {
          return std::pair(t, i);
        }
      }
    }
  }
  return std::nullopt;
}
bool HoldsAlone(const Layout& layout, int rank, std::size_t tensor) {
  const Partition& pieces = layout.pieces[tensor];
  const auto r = static_cast<std::size_t>(rank);
  bool named = false;  // By another rank: else nobody knows of the tensor without this one.
  for (std::size_t other = 0; other < pieces.size(); ++other) {
    named |= other != r && !pieces[other].empty();
  }
  if (!named) return false;
  for (const Region& region : pieces[r]) {
    if (region.empty()) continue;
    bool others = false;
    for (std::size_t other = 0; other < pieces.size(); ++other) {
      others |= other != r && std::find(pieces[other].begin(), pieces[other].end(), region) !=
                                  pieces[other].end();
    }
    if (!others) return true;
  }
  return false;
}

class StressJob {
 public:
  StressJob(std::uint64_t seed, const std::string& store) : random_(seed), store_(store) {
    ranks_ = static_cast<int>(random_.Int(1, 5));
    ForceOwners(static_cast<std::uint32_t>(random_.Int(0, 3)));
    const auto layouts = random_.Int(1, 3);
    for (std::int64_t i = 0; i < layouts; ++i)
      layouts_.push_back(MakeRandomLayout(random_, ranks_));
    savers_ = static_cast<std::size_t>(random_.Int(1, 2));
    async_.resize(savers_);
    for (AsyncOptions& options : async_) {
      options.stage_in_background = random_.OneIn(2);
      // Of a size that holds any one save, but not two.
      if (random_.OneIn(2)) options.staging_bytes = 2u << 20;
    }
    const auto steps = random_.Int(4, 9);
    for (std::int64_t s = 0; s < steps; ++s) steps_.push_back(MakeStep(static_cast<int>(s)));
  }

  void Run() {
    verdicts_.assign(steps_.size(), std::vector<std::string>(static_cast<std::size_t>(ranks_)));
    reports_.assign(steps_.size(), std::nullopt);
    std::vector<std::uint64_t> seeds;
    for (int r = 0; r < ranks_; ++r) seeds.push_back(random_.Next());
    EXPECT_OK(RunOnThreads(ranks_, [&](Communicator& comm) {
      RunRank(comm, Random(seeds[static_cast<std::size_t>(comm.rank())]));
      return Status();
    }));
  }

  void Check() {
    std::map<std::string, std::size_t> last;  // Of each name, the last step that committed.
    std::vector<std::uint64_t> generation(savers_, 0);
    for (std::size_t s = 0; s < steps_.size(); ++s) {
      SCOPED_TRACE("step " + std::to_string(s) + " trouble " +
                   std::to_string(static_cast<int>(steps_[s].trouble)) + " rank " +
                   std::to_string(steps_[s].rank) + ": " + verdicts_[s][0]);
      const Step& step = steps_[s];
      for (const std::string& verdict : verdicts_[s]) EXPECT_EQ(verdict, verdicts_[s][0]);
      const bool committed = verdicts_[s][0] == Status().ToString();
      const bool may_end = step.trouble == Trouble::kCancelled || step.trouble == Trouble::kDropped;
      if (!may_end) {
        EXPECT_EQ(committed, step.trouble == Trouble::kNone);
      }
      if (!committed) continue;
      ++committed_;
      ASSERT_TRUE(reports_[s]);
      reused_ += reports_[s]->plan_reused ? 1 : 0;
      if (step.async) {
        EXPECT_GT(reports_[s]->generation, generation[step.saver]);
        generation[step.saver] = reports_[s]->generation;
      }
      last[step.path] = s;
    }
    for (const auto& [path, s] : last) {
      SCOPED_TRACE("step " + std::to_string(s) + " at " + path);
      CheckContents(steps_[s]);
    }
  }

  int committed() const { return committed_; }
  int reused() const { return reused_; }
  std::size_t steps() const { return steps_.size(); }

 private:
  Step MakeStep(int number) {
    Step step;
    step.layout =
        static_cast<std::size_t>(random_.Int(0, static_cast<std::int64_t>(layouts_.size()) - 1));
    const Layout& layout = layouts_[step.layout];
    step.async = !random_.OneIn(4);
    step.saver = static_cast<std::size_t>(random_.Int(0, static_cast<std::int64_t>(savers_) - 1));
    step.version = random_.Next() / 2;
    // Saves of one saver may replace each other; others would race for the name.
    const bool replaces = step.async && random_.OneIn(3);
    step.path = store_ + (replaces ? "/latest-" + std::to_string(step.saver)
                                   : "/step-" + std::to_string(number));
    SaveOptions& o = step.options;
    if (replaces) o.if_exists = IfExists::kReplace;
    o.placement = random_.Pick(std::vector<PlacementRule>{
        PlacementRule::kAuto, PlacementRule::kAuto, PlacementRule::kRankShard});
    o.replicas = random_.OneIn(3) ? ReplicaCheck::kRotating : ReplicaCheck::kFull;
    o.strategy = random_.OneIn(3) ? SaveStrategy::kMain : SaveStrategy::kParallel;
    o.validate = !random_.OneIn(3);
    o.reuse_plan = !random_.OneIn(6);
    o.timeouts.arrival = std::chrono::seconds(60);
    step.throws = random_.OneIn(20);
    step.rank = static_cast<int>(random_.Int(0, ranks_ - 1));
    step.delay = random_.OneIn(3) ? 0 : random_.Int(0, 20'000);
    if (!random_.OneIn(2)) return step;
    step.trouble = static_cast<Trouble>(random_.Int(1, 8));
    switch (step.trouble) {
      case Trouble::kHole:
        if (!HoldsAlone(layout, step.rank, 0)) step.trouble = Trouble::kNone;
        break;
      case Trouble::kTensorReplica:
        if (!Replicated(layout, step.rank)) step.trouble = Trouble::kNone;
        o.replicas = ReplicaCheck::kFull;
        break;
      case Trouble::kObjectReplica:
        if (std::count(layout.has_object.begin(), layout.has_object.end(), true) < 2 ||
            !layout.has_object[static_cast<std::size_t>(step.rank)]) {
          step.trouble = Trouble::kNone;
        }
        break;
      case Trouble::kTooLarge:
        if (!step.async || async_[step.saver].staging_bytes == 0) step.trouble = Trouble::kFails;
        break;
      case Trouble::kCancelled:
      case Trouble::kDropped:
        if (!step.async) step.trouble = Trouble::kNone;
        break;
      default:
        break;
    }
    return step;
  }

  void Fill(const Step& step, int rank, RankState& state) const {
    const Layout& layout = layouts_[step.layout];
    const auto r = static_cast<std::size_t>(rank);
    const bool troubled = step.rank == rank;
    Random strides(step.version + r);
    const auto replicated = Replicated(layout, rank);
    for (std::size_t t = 0; t < layout.tensors.size(); ++t) {
      if (t == 0 && troubled && step.trouble == Trouble::kHole) continue;
      RandomTensor tensor = layout.tensors[t];
      tensor.bytes = VersionBytes(tensor, step.version);
      RandomTensor other = tensor;
      for (char& c : other.bytes) c = static_cast<char>(c + 1);
      for (std::size_t i = 0; i < layout.pieces[t][r].size(); ++i) {
        const bool differs =
            troubled && step.trouble == Trouble::kTensorReplica && replicated == std::pair(t, i);
        const Region& region = layout.pieces[t][r][i];
        state.memory.push_back(MakeShardMemory(strides, differs ? other : tensor, region, true));
        EXPECT_OK(state.dict.AddTensor(tensor.key, {.global_shape = tensor.shape,
                                                    .region = region,
                                                    .data = state.memory.back().view,
                                                    .replica = layout.labels[t][r][i]}));
      }
    }
    if (layout.has_object[r]) {
      std::string object = ObjectOf("same", step.version);
      if (troubled && step.trouble == Trouble::kObjectReplica) object += "!";
      EXPECT_OK(state.dict.AddObject("same", object));
    }
    EXPECT_OK(state.dict.AddObject("grid", ObjectOf("grid" + std::to_string(rank), step.version),
                                   {.index = {rank}, .grid = {ranks_}}));
    EXPECT_OK(
        state.dict.SetCommon("version", CommonValue(static_cast<std::int64_t>(step.version))));
    EXPECT_OK(state.dict.SetRankCommon("rank", CommonValue(rank)));
    if (!troubled) return;
    if (step.trouble == Trouble::kFails) {
      EXPECT_FALSE(state.dict.Fail(Status(Code::kUnavailable, "no optimizer")).ok());
    } else if (step.trouble == Trouble::kNoData) {
      EXPECT_OK(state.dict.AddTensor("nothing", MetadataOnly(DType::kF32, {8}, Box::Whole({8}))));
    } else if (step.trouble == Trouble::kTooLarge) {
      static std::vector<std::byte> large(3u << 20);
      EXPECT_OK(state.dict.AddTensor(
          "large", {.global_shape = {3 << 20},
                    .region = Box::Whole({3 << 20}),
                    .data = BufferView::Host(DType::kU8, large.data(), {3 << 20})}));
    }
  }

  struct UnderWay {
    std::size_t step = 0;
    std::optional<SaveHandle> handle;
  };

  void Note(std::size_t s, int rank, const Result<SaveReport>& result) {
    verdicts_[s][static_cast<std::size_t>(rank)] = result.status().ToString();
    if (rank == 0 && result.ok()) reports_[s] = result.value();
  }

  // With `random` each rank waits at times of its own.
  void RunRank(Communicator& comm, Random random) {
    std::vector<std::unique_ptr<AsyncSaver>> savers;
    for (const AsyncOptions& options : async_) {
      auto saver = AsyncSaver::Make(comm, options);
      ASSERT_OK(saver);
      savers.push_back(std::move(saver).value());
    }
    std::vector<UnderWay> saves;
    const auto finish = [&](UnderWay& save) {
      Note(save.step, comm.rank(), save.handle->WaitCommitted());
    };
    for (std::size_t s = 0; s < steps_.size(); ++s) {
      const Step& step = steps_[s];
      const bool troubled = step.rank == comm.rank();
      RankState state;
      Fill(step, comm.rank(), state);
      SaveOptions options = step.options;
      if (step.throws && troubled) {
        options.events = [](const Event& event) {
          if (event.phase == "stage") throw std::runtime_error("of the hook");
        };
        options.on_commit = [](const SaveReport&) { throw 7; };
      }
      if (!step.async) {
        Note(s, comm.rank(), Save(state.dict, step.path, comm, options));
        continue;
      }
      auto handle = savers[step.saver]->Save(state.dict, step.path, options);
      ASSERT_OK(handle);
      state.dict = StateDict();
      (void)handle.value().WaitStaged();
      for (ShardMemory& shard : state.memory) {
        std::fill(shard.memory.begin(), shard.memory.end(), std::byte{0x5A});
      }
      if (troubled && (step.trouble == Trouble::kCancelled || step.trouble == Trouble::kDropped)) {
        std::this_thread::sleep_for(microseconds(step.delay));
        handle.value().Cancel();
      }
      saves.push_back({s, std::move(handle).value()});
      if (random.OneIn(4)) {
        std::this_thread::sleep_for(microseconds(random.Int(0, 3000)));
      } else if (random.OneIn(3)) {
        random.Shuffle(saves);
        finish(saves.back());
        saves.pop_back();
      }
    }
    // Dropped in any order, some after their savers.
    random.Shuffle(saves);
    if (random.OneIn(2)) savers.clear();
    for (UnderWay& save : saves) finish(save);
  }

  void CheckContents(const Step& step) {
    const Layout& layout = layouts_[step.layout];
    ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(step.path));
    const std::map<std::string, std::string> all = ReadAll(step.path);
    EXPECT_EQ(all.size(), layout.tensors.size());
    for (const RandomTensor& tensor : layout.tensors) {
      const auto at = all.find(tensor.key);
      ASSERT_TRUE(at != all.end()) << tensor.key;
      EXPECT_TRUE(at->second == VersionBytes(tensor, step.version)) << tensor.key;
    }
    if (std::count(layout.has_object.begin(), layout.has_object.end(), true) > 0) {
      EXPECT_EQ(checkpoint.object("same").value(), ObjectOf("same", step.version));
    }
    for (int r = 0; r < ranks_; ++r) {
      EXPECT_EQ(checkpoint.object("grid", {r}).value(),
                ObjectOf("grid" + std::to_string(r), step.version));
    }
    EXPECT_EQ(checkpoint.common("version").value(),
              CommonValue(static_cast<std::int64_t>(step.version)));
  }

  Random random_;
  const std::string store_;
  int ranks_ = 1;
  std::vector<Layout> layouts_;
  std::size_t savers_ = 1;
  std::vector<AsyncOptions> async_;
  std::vector<Step> steps_;
  std::vector<std::vector<std::string>> verdicts_;  // By step, rank.
  std::vector<std::optional<SaveReport>> reports_;  // Of rank 0.
  int committed_ = 0;
  int reused_ = 0;
};

TEST(AsyncStressTest, RanksAgreeAndCommittedBytesAreExact) {
  Random seeds(TestSeed());
  int committed = 0;
  int reused = 0;
  std::size_t steps = 0;
  const int cases = TestScale(12);
  for (int i = 0; i < cases && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    TempDir dir;
    StressJob job(seeds.Next(), dir.Join("store"));
    job.Run();
    job.Check();
    committed += job.committed();
    reused += job.reused();
    steps += job.steps();
  }
  EXPECT_GT(committed, 0);
  RecordProperty("committed", committed);
  RecordProperty("reused", reused);
  RecordProperty("steps", static_cast<int>(steps));
}

}  // namespace
}  // namespace tensormount
