// SPDX-License-Identifier: Apache-2.0
// A save finds its parent without reading each COMMIT, and whatever the file of known generations
// says, it is the same parent.
#include "index/store/known_generations.h"

#include <atomic>
#include <filesystem>

#include "index/records/commit_record.h"
#include "tests/index/store_test_support.h"
#include "tests/support/observed_file_system.h"

namespace tensormount {
namespace {

using testing::AllOf;
using testing::Ge;
using testing::IsEmpty;
using testing::Le;
using testing::SizeIs;

constexpr int kSteps = 300;

// The time can be set forward, and COMMITs that are opened are counted.
class ClockedFileSystem : public ObservedFileSystem {
 public:
  ClockedFileSystem()
      : ObservedFileSystem(HostFileSystem(), [this](const FileEvent& event) {
          if (event.op == FileOp::kOpenRead && event.path.ends_with("/COMMIT")) ++commits_opened;
          return Status();
        }) {}
  std::int64_t NowSeconds() override { return ObservedFileSystem::NowSeconds() + later; }

  std::atomic<int> commits_opened = 0;
  std::int64_t later = 10;
};

class KnownGenerationsTest : public StoreTest {
 protected:
  // Stores `kSteps` checkpoints without data: step-N has generation N.
  void SetUp() override {
    auto store = Store::OpenOrCreate(clocked_, StorePath());
    ASSERT_OK(store);
    store_.emplace(std::move(store).value());
    ASSERT_OK(store_->PrepareToWrite());
    for (int i = 1; i <= kSteps; ++i) {
      ASSERT_NO_FATAL_FAILURE(MakeStep("step-" + std::to_string(i), i));
    }
  }

  static std::string CommitOf(std::uint64_t generation, bool derived = false) {
    CommitRecord record;
    record.uuid = Uuid::Random();
    record.generation = generation;
    record.compatible = derived ? kCommitDerived : 0;
    return EncodeCommit(record);
  }
  void MakeStep(const std::string& name, std::uint64_t generation, bool derived = false) {
    ASSERT_OK(fs().CreateDirectory(InStore(name)));
    ASSERT_OK(fs().WriteFileDurably(InStore(name + "/COMMIT"), CommitOf(generation, derived)));
  }
  std::string ParentOfNextSave() {
    const int before = clocked_.commits_opened;
    const auto staging = store_->Begin("next", IfExists::kFail);
    opened_ = clocked_.commits_opened - before;
    if (!staging.ok()) return staging.status().ToString();
    EXPECT_OK(fs().RemoveTree(staging.value().directory));
    return staging.value().parent_name;
  }
  std::string KnownPath() { return InStore(".generations/known"); }

  ClockedFileSystem clocked_;
  std::optional<Store> store_;
  int opened_ = 0;  // COMMITs opened by the last ParentOfNextSave.
};

TEST_F(KnownGenerationsTest, LaterSavesReadOnlyTheLatestCommit) {
  EXPECT_EQ(ParentOfNextSave(), "step-300");
  EXPECT_EQ(opened_, kSteps);
  EXPECT_THAT(ReadKnownGenerations(fs(), StorePath()), SizeIs(kSteps));
  EXPECT_EQ(ParentOfNextSave(), "step-300");
  EXPECT_EQ(opened_, 1);
  // A new checkpoint is read, and so is one that moved.
  ASSERT_NO_FATAL_FAILURE(MakeStep("another", 301));
  ASSERT_EQ(std::rename(InStore("step-7").c_str(), InStore("renamed").c_str()), 0);
  EXPECT_EQ(ParentOfNextSave(), "another");
  EXPECT_EQ(opened_, 2);
  ASSERT_OK(fs().RemoveTree(InStore("another")));
  EXPECT_EQ(ParentOfNextSave(), "step-300");
  ASSERT_OK(fs().RemoveTree(InStore("step-300")));
  EXPECT_EQ(ParentOfNextSave(), "step-299");
}

TEST_F(KnownGenerationsTest, FewCheckpointsHaveNoFile) {
  for (int i = 1; i <= 100; ++i) {
    ASSERT_OK(fs().RemoveTree(InStore("step-" + std::to_string(i))));
  }
  EXPECT_EQ(ParentOfNextSave(), "step-300");
  EXPECT_FALSE(fs().Exists(KnownPath()));
}

// A name may get another checkpoint, even in a directory with the inode of the old one.
TEST_F(KnownGenerationsTest, ReplacedCheckpointIsReadAgain) {
  ASSERT_EQ(ParentOfNextSave(), "step-300");
  const std::string commit = InStore("step-5/COMMIT");
  ASSERT_OK(fs().WriteFileDurably(commit + ".new", CommitOf(400)));
  ASSERT_EQ(std::rename((commit + ".new").c_str(), commit.c_str()), 0);
  EXPECT_EQ(ParentOfNextSave(), "step-5");
  ASSERT_OK(fs().RemoveTree(InStore("step-9")));
  ASSERT_NO_FATAL_FAILURE(MakeStep("step-9", 500));
  EXPECT_EQ(ParentOfNextSave(), "step-9");
}

// Until a directory is old enough, a change may leave its times as they are.
TEST_F(KnownGenerationsTest, DirectoriesThatChangedJustNowAreNotWritten) {
  clocked_.later = 0;
  EXPECT_EQ(ParentOfNextSave(), "step-300");
  EXPECT_THAT(ReadKnownGenerations(fs(), StorePath()), SizeIs(Le(kSteps - 1)));
}

TEST_F(KnownGenerationsTest, DamagedCommitOfTheLatestIsNotTheParent) {
  ASSERT_EQ(ParentOfNextSave(), "step-300");
  const std::string commit = InStore("step-300/COMMIT");
  std::filesystem::resize_file(commit, 100);  // Leaves the directory as it was.
  EXPECT_EQ(ParentOfNextSave(), "step-299");
}

TEST_F(KnownGenerationsTest, NoByteOfTheFileCanBeWrong) {
  ASSERT_EQ(ParentOfNextSave(), "step-300");
  const auto good = fs().ReadFile(KnownPath(), 1 << 20);
  ASSERT_OK(good);
  for (std::size_t at = 0; at < good.value().size(); at += at < 64 ? 1 : 97) {
    std::string bad = good.value();
    bad[at] = static_cast<char>(bad[at] ^ 1);
    EXPECT_THAT(DecodeKnownGenerations(bad), IsEmpty()) << at;
    EXPECT_THAT(DecodeKnownGenerations(good.value().substr(0, at)), IsEmpty()) << at;
  }
  ASSERT_OK(fs().RemoveFile(KnownPath()));
  ASSERT_OK(fs().WriteFileDurably(KnownPath(), "not the file"));
  EXPECT_EQ(ParentOfNextSave(), "step-300");
  EXPECT_EQ(opened_, kSteps);
}

// The file may be intact and yet say what is not so.
TEST_F(KnownGenerationsTest, FileThatLiesAboutTheHighestIsNotBelieved) {
  ASSERT_EQ(ParentOfNextSave(), "step-300");
  const std::vector<KnownGeneration> known = ReadKnownGenerations(fs(), StorePath());
  const auto says = [&](auto change) {
    std::vector<KnownGeneration> lies = known;
    change(lies[7]);
    WriteKnownGenerations(fs(), StorePath(), lies);
  };
  says([](KnownGeneration& one) { one.generation = INT64_MAX; });
  EXPECT_EQ(ParentOfNextSave(), "step-300");
  says([](KnownGeneration& one) {
    one.generation = INT64_MAX;
    one.derived = true;
  });
  EXPECT_EQ(ParentOfNextSave(), "step-300");
  std::vector<KnownGeneration> lies = known;
  for (KnownGeneration& one : lies) {
    if (one.name == "step-300") one.uuid = Uuid::Random();
  }
  WriteKnownGenerations(fs(), StorePath(), lies);
  EXPECT_EQ(ParentOfNextSave(), "step-300");
  EXPECT_EQ(opened_, kSteps + 1);
}

}  // namespace
}  // namespace tensormount
