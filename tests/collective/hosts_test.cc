// SPDX-License-Identifier: Apache-2.0
// Jobs on filesystems that are not here, played by tests/support/adverse_fs.cc: a disk that does
// not give a block, storage on which one rank hangs.
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <sys/mount.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/async_save.h"

#include "base/mapping.h"
#include "bench/counting_communicator.h"
#include "collective/save_load.h"
#include "tests/collective/load_testing.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

constexpr std::int64_t kHostPage = 4096;
constexpr int kHostRanks = 2;
constexpr int kMostHostRanks = 3;

bool ComesTrue(const std::function<bool()>& condition, milliseconds limit = seconds(20)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

std::vector<GlobalTensor> HostTensors() {
  return {MakeGlobal("big", DType::kU8, {512, 4096}), MakeGlobal("other", DType::kU8, {100})};
}

// What a rank holds of them, by rows.
class HostRows {
 public:
  explicit HostRows(int rank, int ranks = kHostRanks)
      : wishes_(WishesByRule(tensors_, "rows", ranks)) {
    for (const Wish& wish : wishes_[static_cast<std::size_t>(rank)]) {
      const GlobalTensor& tensor = tensors_[wish.tensor];
      memory_.push_back(BytesOf(tensor, wish.region));
      const Box box = wish.region.box();
      EXPECT_OK(state_.AddTensor(
          tensor.key, {tensor.shape, box,
                       BufferView::Host(tensor.dtype, memory_.back().data(), box.extent())}));
    }
  }
  const StateDict& State() const { return state_; }

 private:
  const std::vector<GlobalTensor> tensors_ = HostTensors();
  const std::vector<std::vector<Wish>> wishes_;
  std::deque<std::string> memory_;
  StateDict state_;
};

class HostsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (::access("/dev/fuse", R_OK | W_OK) != 0) GTEST_SKIP() << "/dev/fuse cannot be opened";
    for (const char* name : {"backing", "at"}) {
      ASSERT_EQ(::mkdir(dir_.Join(name).c_str(), 0755), 0);
    }
    struct stat before {};
    ASSERT_EQ(::stat(dir_.Join("at").c_str(), &before), 0);
    host_.emplace(std::vector<std::string>{BuiltProgram("tests/adverse_fs"), dir_.Join("backing"),
                                           dir_.Join("at"), dir_.Join("rules")},
                  ProcessOptions{.deadline = seconds(120)});
    ASSERT_TRUE(ComesTrue([&] {
      struct stat now {};
      return ::stat(dir_.Join("at").c_str(), &now) == 0 && now.st_dev != before.st_dev;
    })) << host_->err();
  }
  void TearDown() override {
    host_.reset();
    (void)::umount2(dir_.Join("at").c_str(), MNT_DETACH);
  }

  std::string Path(const std::string& name) const { return dir_.Join("at/store/" + name); }
  void Rules(const std::string& text) {
    WriteWholeFile(dir_.Join("rules.new"), text);
    ASSERT_EQ(::rename(dir_.Join("rules.new").c_str(), dir_.Join("rules").c_str()), 0);
  }
  // Since the rules of the last Hang were made.
  bool Met(const std::string& what) const {
    return host_->out().find(what, met_before_) != std::string::npos;
  }

  // One thread a rank, of which one hangs until the rules end: `body` is called on each, and says
  // how it ended; one that throws RankIsGone leaves the group. What the others said by then, and
  // all in the end.
  struct RankIsGone {};
  struct Outcome {
    std::array<std::optional<Status>, kMostHostRanks> in_time;
    std::array<Status, kMostHostRanks> at_last;
  };
  Outcome Hang(const std::string& rule, const std::function<Status(Communicator&)>& body,
               int ranks = kHostRanks) {
    met_before_ = host_->out().size();
    Rules("hang " + rule + "\n");
    auto group = MakeThreadGroup(ranks);
    std::array<std::atomic<bool>, kMostHostRanks> ended{};
    std::atomic<int> running = ranks;
    Outcome outcome;
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < group.size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          outcome.at_last[rank] = body(*group[rank]);
        } catch (const RankIsGone&) {
          outcome.at_last[rank] = Status(Code::kUnavailable, "it is gone");
          group[rank].reset();
        }
        ended[rank] = true;
        --running;
      });
    }
    EXPECT_TRUE(ComesTrue([&] { return running <= 1; }));
    // What was to hang, and did not, may be a moment behind the others.
    (void)ComesTrue([&] { return running == 0; }, milliseconds(50));
    for (std::size_t rank = 0; rank < group.size(); ++rank) {
      if (ended[rank]) outcome.in_time[rank] = outcome.at_last[rank];
    }
    Rules("");
    for (std::thread& thread : threads) thread.join();
    return outcome;
  }

  TempDir dir_;
  std::optional<Subprocess> host_;
  std::size_t met_before_ = 0;
  std::atomic<bool> in_data_{false};  // The rank that is to go writes.
};

// Less than this cannot be told from a busy machine: then it is tried again with more.
constexpr milliseconds kHostsArrival{70};

Timeouts Within(int attempt) {
  return {.liveness = seconds(30), .arrival = kHostsArrival * (1 << attempt)};
}

// Nothing here enables the guard of mappings: SIGBUS would end this process.
TEST_F(HostsTest, BadBlockIsAnErrorWithItsPlaceAndNotSigbus) {
  ASSERT_FALSE(MappingGuarded());
  const std::vector<GlobalTensor> tensors = HostTensors();
  ASSERT_OK(SaveByRule(Path("one"), tensors, "rows", kHostRanks,
                       {.placement = PlacementRule::kRankShard}));
  const std::int64_t bad = 100 * kHostPage;
  Rules("EIO read *one/data/*r1* " + std::to_string(bad) + " " + std::to_string(bad + kHostPage) +
        "\n");
  for (const char* rule : {"rows", "cols", "flat", "replicate"}) {
    for (const LoadPath path : {LoadPath::kDirect, LoadPath::kExchange}) {
      for (const LoadVerify verify : {LoadVerify::kAuto, LoadVerify::kOff}) {
        SCOPED_TRACE(std::string(rule) + (path == LoadPath::kDirect ? " direct" : " exchange"));
        const auto loaded =
            LoadWishes(Path("one"), tensors, WishesByRule(tensors, rule, kHostRanks),
                       {.verify = verify, .path = path});
        for (const LoadedRank& rank : loaded) {
          EXPECT_THAT(rank.status, HasCode(Code::kDataLoss));
          EXPECT_THAT(rank.status, HasMessage("r1"));
          EXPECT_THAT(rank.status, HasMessage("byte " + std::to_string(bad)));
          EXPECT_THAT(rank.status, HasMessage("Input/output error"));
          EXPECT_THAT(rank.status.message(), Not(HasSubstr("ends here")));
        }
      }
    }
  }
  // What does not need it.
  std::vector<std::vector<Wish>> wishes = {{{0, Region(Box::Make({0, 9}, {300, 70}).value())}},
                                           {{1, Region(Box::Make({0}, {100}).value())}}};
  LoadOptions some;
  some.validate = false;
  const auto loaded = LoadWishes(Path("one"), tensors, wishes, some);
  EXPECT_EQ(WhatIsWrong(tensors, wishes, loaded), "");
  Rules("");
  wishes = WishesByRule(tensors, "cols", kHostRanks);
  EXPECT_EQ(WhatIsWrong(tensors, wishes, LoadWishes(Path("one"), tensors, wishes)), "");
}

// A rank whose own read or fsync does not come back cannot return before it does. The others do,
// and name it.
TEST_F(HostsTest, OtherRanksNameARankThatHangsInRead) {
  const std::vector<GlobalTensor> tensors = HostTensors();
  ASSERT_OK(SaveByRule(Path("one"), tensors, "rows", kHostRanks,
                       {.placement = PlacementRule::kRankShard}));
  for (const int victim : {0, 1}) {
    for (const LoadPath path : {LoadPath::kDirect, LoadPath::kExchange}) {
      SCOPED_TRACE((path == LoadPath::kDirect ? "direct " : "exchange ") + std::to_string(victim));
      Outcome outcome;
      std::size_t other = 0;
      for (int attempt = 0; attempt < 6; ++attempt) {
        outcome = Hang("read *one/data/*r" + std::to_string(victim) + "*", [&](Communicator& comm) {
          HostRows rows(comm.rank());
          LoadOptions options;
          options.path = path;
          options.timeouts = Within(attempt);
          return Load(rows.State(), Path("one"), comm, options).status();
        });
        other = outcome.in_time[0].has_value() ? 0 : 1;
        if (Met("hang read") && outcome.in_time[0].has_value() != outcome.in_time[1].has_value()) {
          break;
        }
      }
      ASSERT_TRUE(outcome.in_time[other].has_value());
      EXPECT_FALSE(outcome.in_time[1 - other].has_value());
      EXPECT_THAT(*outcome.in_time[other], HasCode(Code::kDeadlineExceeded));
      EXPECT_THAT(*outcome.in_time[other], HasMessage("rank " + std::to_string(1 - other)));
      EXPECT_FALSE(outcome.at_last[1 - other].ok());
    }
  }
  const auto wishes = WishesByRule(tensors, "rows", kHostRanks);
  EXPECT_EQ(WhatIsWrong(tensors, wishes, LoadWishes(Path("one"), tensors, wishes)), "");
}

TEST_F(HostsTest, RankHangingInFsyncIsNamedAndNothingIsPublished) {
  for (const int victim : {0, 1}) {
    SCOPED_TRACE(victim);
    Outcome outcome;
    for (int attempt = 0; attempt < 6; ++attempt) {
      outcome =
          Hang("fsync *.staging/*data/*r" + std::to_string(victim) + "*",
               [&](Communicator& comm) -> Status {
                 HostRows rows(comm.rank());
                 return Save(rows.State(), Path("new"), comm,
                             {.placement = PlacementRule::kRankShard, .timeouts = Within(attempt)})
                     .status();
               });
      if (Met("hang fsync") && outcome.in_time[1 - victim].has_value() &&
          !outcome.in_time[victim].has_value()) {
        break;
      }
    }
    const auto& other = outcome.in_time[static_cast<std::size_t>(1 - victim)];
    ASSERT_TRUE(other.has_value());
    EXPECT_FALSE(outcome.in_time[static_cast<std::size_t>(victim)].has_value());
    EXPECT_THAT(*other, HasCode(Code::kDeadlineExceeded));
    EXPECT_THAT(*other, HasMessage("rank " + std::to_string(victim)));
    EXPECT_FALSE(outcome.at_last[static_cast<std::size_t>(victim)].ok());
    EXPECT_NE(::access(Path("new").c_str(), F_OK), 0);
  }
  ASSERT_OK(SaveByRule(Path("new"), HostTensors(), "rows", kHostRanks));
}

// Nobody deletes a file that another rank may hang on, whichever of its peers is known to be gone.
TEST_F(HostsTest, ThirdRankReturnsWhenOneHangsAndOneIsDead) {
  constexpr int kHangs = 1;
  constexpr int kGoes = 2;
  const auto body = [&](Communicator& comm) -> Status {
    // Gone with its first message after the other began to hang.
    CountingCommunicator through(comm, [&] {
      if (comm.rank() != kGoes || !in_data_) return;
      (void)ComesTrue([&] { return Met("hang fsync"); });
      throw RankIsGone();
    });
    ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
      if (comm.rank() == kGoes && event.path.find("/data/") != std::string::npos) in_data_ = true;
      return Status();
    });
    HostRows rows(comm.rank(), kMostHostRanks);
    return SaveOn(fs, rows.State(), Path("new"), through,
                  {.placement = PlacementRule::kRankShard, .timeouts = {.liveness = seconds(30)}})
        .status();
  };
  const Outcome outcome = Hang("fsync *.staging/*data/*r1*", body, kMostHostRanks);
  ASSERT_TRUE(outcome.in_time[0].has_value());
  EXPECT_THAT(*outcome.in_time[0], HasCode(Code::kUnavailable));
  EXPECT_THAT(*outcome.in_time[0], HasMessage("rank 2"));
  EXPECT_FALSE(outcome.in_time[kHangs].has_value());
  EXPECT_FALSE(outcome.at_last[kHangs].ok());
  EXPECT_NE(::access(Path("new").c_str(), F_OK), 0);
  ASSERT_OK(SaveByRule(Path("new"), HostTensors(), "rows", kHostRanks));
}

// Training goes on: the save that needs the lane of the one that hangs waits for `arrival` at most,
// and then says so.
TEST_F(HostsTest, HungAsyncSaveBlocksTrainingForArrivalAtMost) {
  using Clock = std::chrono::steady_clock;
  std::atomic<bool> said{false};
  Clock::duration longest{};
  std::atomic<int> called{0};
  const auto body = [&](Communicator& comm) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver, AsyncSaver::Make(comm));
    HostRows rows(comm.rank());
    SaveOptions options;
    options.placement = PlacementRule::kRankShard;
    options.timeouts = Within(2);
    std::vector<SaveHandle> handles;
    for (const char* name : {"step-1", "step-2", "step-3"}) {
      const Clock::time_point begin = Clock::now();
      TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                   saver->Save(rows.State(), Path(name), options));
      if (comm.rank() == 1) longest = std::max(longest, Clock::now() - begin);
      handles.push_back(std::move(handle));
    }
    if (comm.rank() == 1) said = handles[2].progress().state != SaveProgress::State::kStaging;
    ++called;
    // Rank 0 has its verdicts while rank 1 hangs.
    if (comm.rank() == 0) {
      EXPECT_THAT(handles[0].WaitCommitted(), HasCode(Code::kDeadlineExceeded));
      EXPECT_FALSE(handles[2].WaitCommitted().ok());
      return {};
    }
    const Status staged = handles[2].WaitStaged();
    EXPECT_THAT(staged, HasCode(Code::kDeadlineExceeded));
    EXPECT_THAT(staged, HasMessage("the save before the last one has not ended"));
    return handles[0].WaitCommitted().status();
  };
  const Outcome outcome = Hang("fsync *.staging/step-1*r1*", body);
  EXPECT_EQ(called, kHostRanks);
  EXPECT_TRUE(said);
  EXPECT_LT(longest, Within(2).arrival + seconds(5));
  EXPECT_OK(outcome.in_time[0].value_or(Status(Code::kInternal, "it waits")));
  EXPECT_FALSE(outcome.in_time[1].has_value());
  EXPECT_FALSE(outcome.at_last[1].ok());
  EXPECT_NE(::access(Path("step-1").c_str(), F_OK), 0);
}

}  // namespace
}  // namespace tensormount
