// SPDX-License-Identifier: Apache-2.0
// A rank that cannot read, at any stage: all ranks return, with one verdict that names it.
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "tests/collective/load_testing.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

constexpr int kFaultRanks = 3;

// The host's file system, on which the file operations of one rank fail from a given number on.
class FailingFs {
 public:
  FailingFs()
      : fs_(HostFileSystem(), [this](const FileEvent& event) -> Status {
          const int number = count_.fetch_add(1);
          if (event.path.find("/data/") != std::string::npos) {
            int none = -1;
            first_data_.compare_exchange_strong(none, number);
          }
          if (number < fail_from_.load()) return {};
          failed_.store(true);
          return Status::FromErrno(EIO, "read", event.path);
        }) {}
  FileSystem& fs() { return fs_; }
  // For one load.
  void Reset(int fail_from) {
    count_ = 0;
    first_data_ = -1;
    failed_ = false;
    fail_from_ = fail_from;
  }
  int count() const { return count_; }
  int first_data() const { return first_data_; }  // The first operation on a data file.
  bool failed() const { return failed_; }

  static constexpr int kNever = 1 << 30;

 private:
  std::atomic<int> count_{0};
  std::atomic<int> first_data_{-1};
  std::atomic<int> fail_from_{kNever};
  std::atomic<bool> failed_{false};
  ObservedFileSystem fs_;
};

class LoadFaults : public testing::Test {
 protected:
  void SetUp() override { ASSERT_OK(SaveByRule(path_, tensors_, "rows", 2)); }

  std::vector<LoadedRank> LoadWith(LoadPath way, LoadVerify verify) {
    LoadSetup setup;
    setup.fs = [this](int rank) -> FileSystem& { return fs_[static_cast<std::size_t>(rank)].fs(); };
    setup.options = [=](int) {
      LoadOptions options;
      options.path = way;
      options.verify = verify;
      options.reuse_plan = false;
      return options;
    };
    return LoadWishesWith(path_, tensors_, wishes_, setup);
  }

  TempDir dir_;
  const std::string path_ = dir_.Join("store/step");
  const std::vector<GlobalTensor> tensors_ = {MakeGlobal("w", DType::kF32, {200, 300}),
                                              MakeGlobal("b", DType::kI64, {40})};
  const std::vector<std::vector<Wish>> wishes_ = WishesByRule(tensors_, "cols", kFaultRanks);
  FailingFs fs_[kFaultRanks];
};

TEST_F(LoadFaults, FaultOnAnyRankAtAnyStageFailsAllRanks) {
  std::set<std::string> stages;
  for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
    for (FailingFs& fs : fs_) fs.Reset(FailingFs::kNever);
    ASSERT_EQ(WhatIsWrong(tensors_, wishes_, LoadWith(way, LoadVerify::kAuto)), "");
    for (int victim = 0; victim < kFaultRanks; ++victim) {
      FailingFs& fs = fs_[victim];
      for (FailingFs& other : fs_) other.Reset(FailingFs::kNever);
      (void)LoadWith(way, LoadVerify::kAuto);
      const int count = fs.count();
      ASSERT_GT(count, 3);
      // A sample, and at any scale the first operation and the first on data.
      ASSERT_GE(fs.first_data(), 0);
      std::set<int> numbers = {fs.first_data()};
      const int step = std::max(1, count / TestScale(8));
      for (int at = 0; at < count; at += step) numbers.insert(at);
      for (const int at : numbers) {
        for (FailingFs& other : fs_) other.Reset(FailingFs::kNever);
        fs.Reset(at);
        const auto loaded = LoadWith(way, LoadVerify::kAuto);
        if (loaded[0].status.ok()) {
          // What failed was not needed (a file that is only closed, a copy of what is at hand).
          EXPECT_EQ(WhatIsWrong(tensors_, wishes_, loaded), "");
          continue;
        }
        for (const LoadedRank& rank : loaded) {
          EXPECT_EQ(rank.status.message(), loaded[0].status.message());
          EXPECT_EQ(rank.status.code(), loaded[0].status.code());
        }
        const std::string& message = loaded[0].status.message();
        // Rank 0 opens for all, and what it says of that is not about a rank.
        const std::string who = "rank " + std::to_string(victim) + ": ";
        if (victim != 0 || fs.first_data() >= 0) {
          EXPECT_EQ(message.substr(0, who.size()), who) << message;
        }
        EXPECT_EQ(message.find("failed too"), std::string::npos) << message;
        stages.insert(fs.first_data() >= 0 ? "read" : "open");
      }
    }
  }
  EXPECT_EQ(stages.size(), 2u);
}

TEST_F(LoadFaults, FaultsOnSeveralRanksReportTheLowest) {
  for (FailingFs& fs : fs_) fs.Reset(FailingFs::kNever);
  (void)LoadWith(LoadPath::kDirect, LoadVerify::kLeaves);
  const int data = fs_[1].first_data();
  for (FailingFs& fs : fs_) fs.Reset(FailingFs::kNever);
  fs_[1].Reset(data);
  fs_[2].Reset(data);
  for (const LoadedRank& rank : LoadWith(LoadPath::kDirect, LoadVerify::kLeaves)) {
    EXPECT_THAT(rank.status, HasMessage("rank 1: tensor"));
    EXPECT_THAT(rank.status, HasMessage("(1 other rank failed too)"));
  }
}

// What only the proof reads: a quarter of the rows that nobody asked for.
TEST_F(LoadFaults, FaultInTheReadsForTheProofFailsAllRanks) {
  std::vector<std::vector<Wish>> wishes(kFaultRanks);
  for (int r = 0; r < kFaultRanks; ++r) {
    wishes[static_cast<std::size_t>(r)] = {{0, Box::Make({0, 100 * r}, {160, 100}).value()}};
  }
  int completers = 0;
  for (int victim = 0; victim < kFaultRanks; ++victim) {
    static std::atomic<FailingFs*> armed;
    for (FailingFs& fs : fs_) fs.Reset(FailingFs::kNever);
    armed = &fs_[victim];
    LoadSetup setup;
    setup.fs = [this](int rank) -> FileSystem& { return fs_[static_cast<std::size_t>(rank)].fs(); };
    setup.options = [victim](int) {
      LoadOptions options;
      options.not_requested = Strict::kIgnore;
      // All bytes have arrived: nothing more can be read. On the victim itself, since another rank
      // may begin to prove when it has proved its part.
      options.events = [victim](const Event& event) {
        const bool begins = event.phase == "prove" && event.kind == Event::Kind::kStart;
        if (begins && event.rank == victim) armed.load()->Reset(0);
      };
      return options;
    };
    const auto loaded = LoadWishesWith(path_, tensors_, wishes, setup);
    if (loaded[0].status.ok()) {
      EXPECT_EQ(WhatIsWrong(tensors_, wishes, loaded), "");
      EXPECT_EQ(loaded[0].report.bytes_by_digest, loaded[0].report.bytes_wanted);
      continue;
    }
    ++completers;
    for (const LoadedRank& rank : loaded) {
      EXPECT_THAT(rank.status, HasMessage("rank " + std::to_string(victim) + ": tensor w"));
    }
  }
  // One rank reads what nobody asked for.
  EXPECT_EQ(completers, 1);
}

}  // namespace
}  // namespace tensormount
