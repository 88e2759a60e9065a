// SPDX-License-Identifier: Apache-2.0
// Saves that remove earlier checkpoints: by rules, by the store's policy, ephemeral ones; and what
// a full disk is told.
#include <cerrno>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/checkpoint.h"
#include "tensormount/retention.h"
#include "tensormount/store.h"

#include "tests/collective/save_testing.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class RetentionSaveTest : public testing::Test {
 protected:
  std::string StorePath() const { return dir_.Join("store"); }
  std::string Path(const std::string& name) const { return dir_.Join("store/" + name); }
  std::vector<Result<SaveReport>> SaveStep(
      int step, const SaveOptions& options = {},
      const std::function<FileSystem&(int)>& fs_of = {}) const {
    return SaveOnThreads(
        Path("step-" + std::to_string(step)), 2,
        [&](int rank, RankState& state) {
          state.Add(w_, Box::Make({32 * rank, 0}, {32, 30}).value());
          ASSERT_OK(state.dict.SetCommon("loss", 1.0 / step));
        },
        options, fs_of);
  }
  std::vector<std::string> Left() const {
    std::vector<std::string> names;
    for (const StoredCheckpoint& c : ListCheckpoints(StorePath()).value()) names.push_back(c.name);
    return names;
  }
  static SaveOptions Retaining(const std::string& rules) {
    SaveOptions options;
    options.retention = RetentionRules::Parse(rules).value();
    return options;
  }

  TempDir dir_;
  const RandomTensor w_ = MakeTensor("w", DType::kF32, {64, 30});
};

TEST_F(RetentionSaveTest, RanksPruneAfterTheCommit) {
  ASSERT_OK(OneVerdict(SaveStep(1)));
  ASSERT_OK(OneVerdict(SaveStep(2)));
  ASSERT_OK(OneVerdict(SaveStep(3)));
  EXPECT_THAT(Left(), SizeIs(3)) << "a save that does not ask removes nothing";
  const auto saved = SaveStep(4, Retaining("last=2,best=loss:max:1"));
  ASSERT_OK(OneVerdict(saved));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3", "step-4"));
  EXPECT_THAT(saved[0].value().pruned, ElementsAre("step-2"));
  EXPECT_THAT(saved[0].value().not_pruned, IsEmpty());
  EXPECT_THAT(saved[1].value().pruned, IsEmpty());
  EXPECT_EQ(ReadAll(Path("step-4")).at("w"), w_.bytes);
}

TEST_F(RetentionSaveTest, SavePrunesByTheStorePolicy) {
  ASSERT_OK(OneVerdict(SaveStep(1, Retaining("policy"))));
  ASSERT_OK(OneVerdict(SaveStep(2, Retaining("policy"))));
  EXPECT_THAT(Left(), SizeIs(2)) << "a store without a policy";
  ASSERT_OK(SetRetentionPolicy(StorePath(), RetentionRules::Parse("last=1").value()));
  ASSERT_OK(OneVerdict(SaveStep(3)));
  EXPECT_THAT(Left(), SizeIs(3)) << "who does not ask";
  ASSERT_OK(OneVerdict(SaveStep(4, Retaining("policy"))));
  EXPECT_THAT(Left(), ElementsAre("step-4"));
}

TEST_F(RetentionSaveTest, PruneFailureDoesNotFailTheSave) {
  ASSERT_OK(OneVerdict(SaveStep(1)));
  // A policy that cannot be read.
  WriteWholeFile(StorePath() + "/policy.json", "{");
  auto saved = SaveStep(2, Retaining("policy"));
  ASSERT_OK(OneVerdict(saved));
  EXPECT_THAT(saved[0].value().not_pruned, ElementsAre(HasSubstr("policy.json")));
  EXPECT_THAT(Left(), SizeIs(2));
  ASSERT_OK(HostFileSystem().RemoveFile(StorePath() + "/policy.json"));
  // A removal that fails.
  ObservedFileSystem failing(HostFileSystem(), [](const FileEvent& e) {
    return e.op == FileOp::kRename && e.path.ends_with("/step-1")
               ? Status::FromErrno(EACCES, "injected", e.path)
               : Status();
  });
  saved = SaveStep(3, Retaining("last=1"), [&](int) -> FileSystem& { return failing; });
  ASSERT_OK(OneVerdict(saved));
  EXPECT_THAT(saved[0].value().pruned, ElementsAre("step-2"));
  EXPECT_THAT(saved[0].value().not_pruned, ElementsAre(HasSubstr("step-1")));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3"));
}

TEST_F(RetentionSaveTest, NextSaveRemovesEphemeralCheckpoints) {
  SaveOptions ephemeral;
  ephemeral.ephemeral = true;
  ASSERT_OK(OneVerdict(SaveStep(1)));
  ASSERT_OK(OneVerdict(SaveStep(2, ephemeral)));
  EXPECT_THAT(Left(), SizeIs(2));
  const auto saved = SaveStep(3, ephemeral);
  ASSERT_OK(OneVerdict(saved));
  EXPECT_THAT(saved[0].value().pruned, ElementsAre("step-2"));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3"));
  ASSERT_OK(PinCheckpoint(Path("step-3")));
  ASSERT_OK(OneVerdict(SaveStep(4)));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3", "step-4"));
  // A mark that cannot be made makes it one to keep, and is told.
  ObservedFileSystem failing(HostFileSystem(), [](const FileEvent& e) {
    return e.op == FileOp::kCreate && e.path.find("/.ephemeral/") != std::string::npos
               ? Status::FromErrno(EACCES, "injected", e.path)
               : Status();
  });
  const auto unmarked = SaveStep(5, ephemeral, [&](int) -> FileSystem& { return failing; });
  ASSERT_OK(OneVerdict(unmarked));
  EXPECT_THAT(unmarked[0].value().not_pruned, ElementsAre(HasSubstr("ephemeral")));
  ASSERT_OK(OneVerdict(SaveStep(6)));
  EXPECT_THAT(Left(), ElementsAre("step-1", "step-3", "step-4", "step-5", "step-6"));
}

// A disk for two checkpoints is enough although a reader kept one for a while.
TEST_F(RetentionSaveTest, NextSaveFreesWhatAReaderKeptBeforeItWrites) {
  ASSERT_OK(OneVerdict(SaveStep(1, Retaining("last=1"))));
  auto reader = Checkpoint::Open(Path("step-1"));
  ASSERT_OK(reader);
  ASSERT_OK(OneVerdict(SaveStep(2, Retaining("last=1"))));
  const auto entries = [&] { return HostFileSystem().List(StorePath() + "/.trash").value(); };
  EXPECT_THAT(entries(), SizeIs(2)) << "the checkpoint and its mark";
  reader = Status(Code::kInternal, "closed");
  std::size_t while_written = 99;
  std::mutex mutex;
  ObservedFileSystem watched(HostFileSystem(), [&](const FileEvent& e) {
    if (e.op == FileOp::kWrite && e.path.find("/data/") != std::string::npos) {
      const std::lock_guard lock(mutex);
      while_written = entries().size();
    }
    return Status();
  });
  SaveOptions options = Retaining("last=1");
  options.reuse = Reuse::kOff;
  ASSERT_OK(OneVerdict(SaveStep(3, options, [&](int) -> FileSystem& { return watched; })));
  EXPECT_EQ(while_written, 0u);
  EXPECT_THAT(entries(), IsEmpty());
}

TEST_F(RetentionSaveTest, FullDiskErrorSuggestsGc) {
  ASSERT_OK(OneVerdict(SaveStep(1)));
  ASSERT_OK(OneVerdict(SaveStep(2)));
  ObservedFileSystem full(HostFileSystem(), [](const FileEvent& e) {
    return e.op == FileOp::kWrite && e.path.find("/data/") != std::string::npos
               ? Status::FromErrno(ENOSPC, "write", e.path)
               : Status();
  });
  const auto fs_of = [&](int) -> FileSystem& { return full; };
  SaveOptions own_files;
  own_files.reuse = Reuse::kOff;
  auto saved = SaveStep(3, own_files, fs_of);
  EXPECT_THAT(saved[0], HasCode(Code::kResourceExhausted));
  EXPECT_EQ(saved[0].status().fields().cause, "") << "there is nothing in .trash";
  ASSERT_OK(RemoveCheckpoint(Path("step-1")));
  saved = SaveStep(3, own_files, fs_of);
  EXPECT_THAT(saved[0].status().fields().cause, HasSubstr(" kB of removed checkpoints"));
  EXPECT_THAT(saved[0].status().fields().cause, HasSubstr("`tensormount gc "));
  EXPECT_THAT(saved[0], HasMessage(" kB of removed checkpoints"));
}

}  // namespace
}  // namespace tensormount
