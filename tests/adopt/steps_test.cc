// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "index/foreign/format.h"
#include "index/foreign/open_source.h"
#include "tests/adopt/safetensors_maker.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class StepsTest : public testing::Test {
 protected:
  StepsTest() { EXPECT_OK(HostFileSystem().CreateDirectory(dir_.Join("run"))); }
  void Step(const std::string& name) {
    ASSERT_OK(HostFileSystem().CreateDirectories(dir_.Join("run/" + name)));
    WriteSafetensors(dir_.Join("run/" + name + "/model.safetensors"), {{name, DType::kU8, {4}}});
  }
  ForeignFolder Folder(const std::string& name = "run") {
    return ForeignFolder::Open(HostFileSystem(), HostFileSystem().Resolve(dir_.Join(name)).value(),
                               {})
        .value();
  }
  std::string Latest() {
    const auto steps = ReadForeignSteps(Folder());
    EXPECT_OK(steps);
    return steps.value() ? steps.value()->latest : "none";
  }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    const auto steps = ReadForeignSteps(Folder());
    for (const ForeignStep& step : steps.value().value_or(ForeignSteps()).steps) {
      names.push_back(step.name + "=" + std::to_string(step.generation));
    }
    return names;
  }
  void Said(const std::string& text) {
    WriteWholeFile(dir_.Join("run/latest_checkpointed_iteration.txt"), text);
  }
  Result<FoundSource> Find(const std::string& name) {
    return FindSource(HostFileSystem(), dir_.Join(name), {});
  }
  TempDir dir_;
};

TEST_F(StepsTest, StepNumbersAreParsedFromDirectoryNames) {
  EXPECT_EQ(IterationOf("iter_0001000"), 1000u);
  EXPECT_EQ(IterationOf("release"), 0u);
  EXPECT_EQ(IterationOf("step1000"), 1000u);
  EXPECT_EQ(IterationOf("step-12"), 12u);
  EXPECT_EQ(IterationOf("step_12"), 12u);
  EXPECT_EQ(IterationOf("checkpoint-500"), 500u);
  for (const char* name : {"iter_", "iter_1x", "iter_-1", "step", "stepx", "checkpoint", "steps1",
                           "iter_99999999999999999999", "release2", "", "tensorboard"}) {
    EXPECT_EQ(IterationOf(name), std::nullopt) << name;
  }
}

TEST_F(StepsTest, DirectoriesWithoutACheckpointAreNotSteps) {
  EXPECT_EQ(Latest(), "none");
  Step("iter_0000100");
  Step("iter_0000020");
  Step("release");
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("run/iter_0000300")));  // Being saved.
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("run/tensorboard")));
  WriteWholeFile(dir_.Join("run/iter_0000400"), "a file");
  Step("stray");
  EXPECT_THAT(Names(), ElementsAre("iter_0000020=20", "iter_0000100=100", "release=0"));
  EXPECT_EQ(Latest(), "iter_0000100");
}

TEST_F(StepsTest, ValidLatestFileNamesTheLatestStep) {
  Step("iter_0000100");
  Step("iter_0000200");
  Step("release");
  Said("100\n");
  EXPECT_EQ(Latest(), "iter_0000100");
  Said("release");
  EXPECT_EQ(Latest(), "release");
  // Not there, no number, nothing, too long.
  for (const std::string& text : {std::string("300"), std::string("newest"), std::string(" \n"),
                                  std::string(), std::string(10000, '1')}) {
    Said(text);
    EXPECT_EQ(Latest(), "iter_0000200") << text;
  }
}

TEST_F(StepsTest, LinksOutOfTheRunAreNotSteps) {
  Step("step10");
  Step("../elsewhere");
  ASSERT_EQ(symlink("step10", dir_.Join("run/step11").c_str()), 0);
  ASSERT_EQ(symlink("../elsewhere", dir_.Join("run/step12").c_str()), 0);
  EXPECT_THAT(Names(), ElementsAre("step10=10", "step11=11"));
}

TEST_F(StepsTest, TrainingDirectoriesAreSources) {
  Step("step10");
  Step("step9");
  ASSERT_OK_AND_ASSIGN(const FoundSource found, Find("run"));
  EXPECT_EQ(found.kind, SourceKind::kForeignSteps);
  EXPECT_THAT(OpenFound(found, {}), HasCode(Code::kInvalidArgument));
  ASSERT_OK_AND_ASSIGN(const FoundSource latest, LatestOf(found, {}));
  EXPECT_EQ(latest.kind, SourceKind::kForeign);
  EXPECT_TRUE(latest.path.ends_with("/run/step10")) << latest.path;
  EXPECT_EQ(Find("run/latest").value().path, latest.path);
  EXPECT_EQ(Find("run/latest/").value().path, latest.path);
  EXPECT_EQ(Find("run/step9").value().kind, SourceKind::kForeign);
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenFound(latest, {}));
  EXPECT_OK(opened->index().Find("step10"));
  EXPECT_EQ(opened->name(), "step10");
  // A checkpoint may have others in it (a final model among its steps): it is what it is.
  WriteSafetensors(dir_.Join("run/model.safetensors"), {{"final", DType::kU8, {4}}});
  EXPECT_EQ(Find("run").value().kind, SourceKind::kForeign);
}

TEST_F(StepsTest, OwnStoresAreNotTakenForForeignRuns) {
  ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), dir_.Join("store"), "step-1", DefaultTinySpec()));
  EXPECT_EQ(Find("store").value().kind, SourceKind::kStore);
  EXPECT_EQ(Find("store/step-1").value().kind, SourceKind::kCheckpoint);
  EXPECT_EQ(Find("store/latest").value().kind, SourceKind::kCheckpoint);
  ASSERT_OK_AND_ASSIGN(const FoundSource latest, LatestOf(Find("store").value(), {}));
  EXPECT_EQ(latest.path, Find("store/step-1").value().path);
  EXPECT_OK(OpenFound(latest, {}));
  EXPECT_THAT(Find("nothing"), HasCode(Code::kNotFound));
  EXPECT_THAT(Find("run/latest").status(), HasCode(Code::kNotFound));
  EXPECT_THAT(Find("run").status(), HasCode(Code::kUnsupported));
  EXPECT_THAT(Find("run").status().message(), HasSubstr("the directory is empty"));
}

TEST_F(StepsTest, StepMarkDependsOnTheMetadataFiles) {
  Step("step1");
  const auto mark = [&] { return FormatStamp(Folder("run/step1")).value(); };
  const FileInfo before = mark();
  EXPECT_EQ(mark().inode, before.inode);
  WriteWholeFile(dir_.Join("run/step1/notes.txt"), "x");
  EXPECT_EQ(mark().inode, before.inode);
  Step("step1");  // Other bytes of the same size come with another time.
  const FileInfo written = mark();
  EXPECT_NE(written.inode, before.inode);
  WriteWholeFile(dir_.Join("run/step1/.metadata"), "x");
  EXPECT_NE(mark().inode, written.inode);
  // Nothing that we know by name: all files count.
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("run/step2")));
  const FileInfo empty = FormatStamp(Folder("run/step2")).value();
  EXPECT_EQ(empty.kind, FileKind::kDirectory);
  WriteWholeFile(dir_.Join("run/step2/x.npy"), "x");
  EXPECT_EQ(FormatStamp(Folder("run/step2")).value().kind, FileKind::kFile);
}

TEST_F(StepsTest, LinkOutOfTheStepIsNotAnUnfinishedSave) {
  ASSERT_OK(HostFileSystem().CreateDirectories(dir_.Join("run/step1")));
  WriteWholeFile(dir_.Join("run/blob"), "x");
  WriteWholeFile(dir_.Join("run/step1/__0_0.distcp"), "x");
  EXPECT_THAT(Find("run/step1").status().message(), HasSubstr("the save did not finish"));
  ASSERT_EQ(symlink("../blob", dir_.Join("run/step1/.metadata").c_str()), 0);
  EXPECT_THAT(Find("run/step1"), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(Find("run/step1").status().message(), HasSubstr("--root"));
}

TEST_F(StepsTest, StepReplacedDuringOpenIsStale) {
  Step("step1");
  const std::string path = Folder("run/step1").path();
  bool armed = false;
  ObservedFileSystem fs(HostFileSystem(), {}, [&](const FileEvent& event) {
    if (armed && event.op == FileOp::kRead) Step("step1");
  });
  ASSERT_OK_AND_ASSIGN(const ForeignFolder folder, ForeignFolder::Open(fs, path, {}));
  ASSERT_OK(ReadForeign(folder));
  armed = true;
  EXPECT_THAT(ReadForeign(folder), HasCode(Code::kStale));
}

}  // namespace
}  // namespace tensormount
