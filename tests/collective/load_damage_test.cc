// SPDX-License-Identifier: Apache-2.0
// What is not as it was written must not be loaded, and has a name.
#include <algorithm>
#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "tests/collective/load_testing.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

// Where the hook of a test flips a byte after the load and before the proof.
std::byte* victim = nullptr;
int victim_rank = 0;
// The bytes have arrived then, and are not proved yet.
void FlipVictim(const Event& event) {
  const bool begins = event.phase == "prove" && event.kind == Event::Kind::kStart;
  if (begins && event.rank == victim_rank) *victim ^= std::byte{0x10};
}

class LoadDamage : public testing::Test {
 protected:
  void SetUp() override {
    SaveOptions options;
    options.placement = PlacementRule::kTensorFile;
    ASSERT_OK(SaveByRule(path_, tensors_, "rows", 2, options));
    // The tensor file of `w` is the only one of this size.
    for (const std::string& name : DataFiles(path_)) {
      struct stat st;
      ASSERT_EQ(stat(name.c_str(), &st), 0);
      if (static_cast<std::size_t>(st.st_size) == tensors_[0].bytes.size()) file_ = name;
    }
    ASSERT_NE(file_, "");
    base_name_ = file_.substr(file_.rfind('/') + 1);
  }

  std::vector<LoadedRank> LoadAs(const std::string& rule, int ranks, LoadOptions options = {}) {
    return LoadWishes(path_, tensors_, WishesByRule(tensors_, rule, ranks), options);
  }

  // Rank 1 of 2 asks for its columns with a buffer that the hook damages.
  std::vector<Status> LoadColumnsAndFlip(LoadPath way, std::vector<std::vector<Region>> regions,
                                         LoadVerify verify = LoadVerify::kEnd) {
    std::vector<Status> verdicts(regions.size());
    std::vector<std::vector<std::string>> buffers(regions.size());
    const Status run = RunOnThreads(static_cast<int>(regions.size()), [&](Communicator& comm) {
      const auto rank = static_cast<std::size_t>(comm.rank());
      StateDict request;
      for (const Region& region : regions[rank]) {
        buffers[rank].emplace_back(static_cast<std::size_t>(region.volume()) * 4, '\0');
      }
      for (std::size_t i = 0; i < regions[rank].size(); ++i) {
        void* data = buffers[rank][i].data();
        (void)request.AddTensor(
            "w", {tensors_[0].shape, regions[rank][i],
                  BufferView::Host(DType::kF32, data, regions[rank][i].box().extent())});
      }
      if (comm.rank() == victim_rank) {
        victim = reinterpret_cast<std::byte*>(buffers[rank][0].data()) + kFlipped * 4 + 1;
      }
      LoadOptions options;
      options.path = way;
      options.verify = verify;
      options.events = &FlipVictim;
      verdicts[rank] = Load(request, path_, comm, options).status();
      return Status();
    });
    EXPECT_OK(run);
    return verdicts;
  }

  static constexpr std::size_t kFlipped = 3 * 200 + 7;  // Element of the buffer: row 3, column 7.

  TempDir dir_;
  const std::string path_ = dir_.Join("store/step");
  const std::vector<GlobalTensor> tensors_ = {MakeGlobal("w", DType::kF32, {300, 400})};
  std::string file_;
  std::string base_name_;
};

TEST_F(LoadDamage, FlippedByteErrorNamesTensorBoxAndFile) {
  FlipByte(file_, 100 * 1600 + 900);  // Row 100, column 225.
  for (const std::string rule : {"rows", "cols", "flat", "replicate"}) {
    for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
      LoadOptions options;
      options.path = way;
      for (const LoadedRank& rank : LoadAs(rule, 2, options)) {
        EXPECT_THAT(rank.status, HasCode(Code::kDataLoss)) << rule;
        EXPECT_THAT(rank.status, HasMessage("tensor w [")) << rule;
        EXPECT_THAT(rank.status, HasMessage(base_name_)) << rule;
      }
    }
  }
}

TEST_F(LoadDamage, DamageIsNotDetectedWithoutVerification) {
  FlipByte(file_, 100 * 1600 + 900);
  LoadOptions options;
  options.verify = LoadVerify::kOff;
  for (const LoadedRank& rank : LoadAs("cols", 2, options)) {
    EXPECT_OK(rank.status);
    EXPECT_GT(rank.report.bytes_unverified, 0u);
  }
}

TEST_F(LoadDamage, ShortOrMissingFileFailsEveryRank) {
  const std::string bytes = ReadWholeFile(file_);
  ASSERT_EQ(chmod(file_.c_str(), 0644), 0);
  ASSERT_EQ(truncate(file_.c_str(), static_cast<off_t>(bytes.size() - 5000)), 0);
  for (const std::string rule : {"rows", "cols"}) {
    for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
      LoadOptions options;
      options.path = way;
      for (const LoadedRank& rank : LoadAs(rule, 3, options)) {
        EXPECT_THAT(rank.status, HasCode(Code::kDataLoss)) << rule;
        EXPECT_THAT(rank.status, HasMessage(base_name_)) << rule;
      }
    }
  }
  ASSERT_EQ(unlink(file_.c_str()), 0);
  for (const LoadedRank& rank : LoadAs("cols", 2)) {
    EXPECT_FALSE(rank.status.ok());
    EXPECT_THAT(rank.status, HasMessage(base_name_));
  }
}

TEST_F(LoadDamage, ByteFlippedInTheDestinationIsDetected) {
  victim_rank = 1;
  for (const LoadPath way : {LoadPath::kDirect, LoadPath::kExchange}) {
    const std::vector<Status> verdicts = LoadColumnsAndFlip(
        way, {{Box::Make({0, 0}, {300, 200}).value()}, {Box::Make({0, 200}, {300, 200}).value()}});
    for (const Status& verdict : verdicts) {
      EXPECT_THAT(verdict, HasCode(Code::kDataLoss));
      EXPECT_THAT(verdict, HasMessage("rank 1: tensor w [3:4, 207:208]: bytes changed between "
                                      "storage and the buffer"));
    }
  }
}

// By default each block is proved when it has been written: what changes it later is not the load.
TEST_F(LoadDamage, OnlyAProofAtTheEndDetectsALaterChange) {
  victim_rank = 0;
  const std::vector<std::vector<Region>> columns = {
      {Region(Box::Make({0, 0}, {300, 200}).value())},
      {Region(Box::Make({0, 200}, {300, 200}).value())}};
  for (const Status& verdict : LoadColumnsAndFlip(LoadPath::kDirect, columns, LoadVerify::kAuto)) {
    EXPECT_OK(verdict);
  }
}

TEST_F(LoadDamage, ByteFlippedInAReplicaIsDetected) {
  const Region left = Box::Make({0, 0}, {300, 200}).value();
  const Region right = Box::Make({0, 200}, {300, 200}).value();
  // Rank 1 holds what rank 0 contributes: its bytes are compared, not counted.
  victim_rank = 1;
  for (const Status& verdict :
       LoadColumnsAndFlip(LoadPath::kDirect, {{left, right}, {left}, {right}})) {
    EXPECT_THAT(verdict, HasCode(Code::kDataLoss));
    EXPECT_THAT(verdict, HasMessage("rank 1: tensor w [3:4, 7:8]"));
  }
}

TEST_F(LoadDamage, DamageOutsideTheRequestedRowsIsNotRead) {
  FlipByte(file_, 299 * 1600);
  const std::vector<std::vector<Wish>> wishes = {{{0, Box::Make({0, 0}, {82, 400}).value()}}};
  EXPECT_EQ(WhatIsWrong(tensors_, wishes, LoadWishes(path_, tensors_, wishes)), "");
}

}  // namespace
}  // namespace tensormount
