// SPDX-License-Identifier: Apache-2.0
// Derive: what is kept is what it was, under its new keys, and costs links; nothing half is left
// behind by what fails.
#include "tensormount/derive.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/file_system.h"
#include "index/read/checkpoint.h"
#include "index/records/common_state.h"
#include "index/records/layer_names.h"
#include "index/store/derive.h"
#include "index/store/linking.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;

class DeriveTest : public testing::Test {
 protected:
  // A store with the checkpoint "old": tensors "a.0" to "a.9" and "b.0" to "b.9" by two writers,
  // and objects.
  void Build(std::uint64_t bytes = 20000) {
    ASSERT_OK(Store::OpenOrCreate(fs_, store_));
    Random random(TestSeed());
    spec_ = RandomSpec(random, 1, 100);
    spec_.tensors.clear();
    spec_.partitions.clear();
    spec_.writers = 2;
    spec_.objects = {{"rng", {}, {}, "state"}, {"tokenizer", {}, {}, std::string(100000, 'x')}};
    for (int i = 0; i < 20; ++i) {
      const std::string key = (i < 10 ? "a." : "b.") + std::to_string(i % 10);
      spec_.tensors.push_back(MakeRandomTensor(random, key, bytes));
      spec_.partitions.push_back(RandomPartition(random, spec_.tensors.back().shape, 2));
    }
    spec_.common[std::string(kLayersRecordPrefix) + "a.0"] = CommonValue("layer.{}.w");
    spec_.page_hashes = true;
    ASSERT_OK(BuildCheckpoint(fs_, store_ + "/old", spec_));
  }

  // Every tensor of a checkpoint by key.
  std::map<std::string, std::string> Read(const std::string& name) {
    std::map<std::string, std::string> all;
    const auto opened = OpenedCheckpoint::Open(fs_, store_ + "/" + name, {});
    EXPECT_OK(opened);
    if (!opened.ok()) return all;
    EXPECT_OK(opened.value()->index().ForEachTensor(0, [&](const TensorEntry& entry) {
      std::string bytes(entry.meta.bytes(), '\0');
      EXPECT_OK(opened.value()->ReadBytes(entry, 0, bytes.data(), bytes.size(),
                                          ReadVerify::kExtendLeaves, nullptr));
      EXPECT_EQ(entry.digest, Crc64Extend(0, bytes.data(), bytes.size())) << entry.meta.key();
      all[entry.meta.key()] = std::move(bytes);
      return true;
    }));
    return all;
  }
  std::map<std::string, std::string> Wanted(const std::string& prefix) {
    std::map<std::string, std::string> wanted;
    for (const RandomTensor& t : spec_.tensors) {
      if (t.key.starts_with(prefix)) wanted[t.key] = t.bytes;
    }
    return wanted;
  }
  // Two tensors that are not empty and far from half of all.
  std::vector<std::string> Few() const {
    std::vector<std::pair<std::size_t, std::string>> by_size;
    for (const RandomTensor& t : spec_.tensors) {
      if (t.bytes.size() >= 1000) by_size.emplace_back(t.bytes.size(), t.key);
    }
    std::sort(by_size.begin(), by_size.end());
    return {by_size.at(0).second, by_size.at(1).second};
  }
  void ExpectWhole(const std::string& name) {
    const Result<VerifyReport> report = VerifyCheckpoint(fs_, store_ + "/" + name, {});
    ASSERT_OK(report);
    for (const VerifyReport::Damage& damage : report.value().damages) {
      ADD_FAILURE() << name << ": " << damage.object << ": " << damage.reason;
    }
  }
  std::vector<std::string> Keys(const std::string& name) {
    std::vector<std::string> keys;
    for (const auto& [key, bytes] : Read(name)) keys.push_back(key);
    return keys;
  }

  FileSystem& fs_ = HostFileSystem();
  TempDir dir_;
  const std::string store_ = dir_.Join("store");
  BuildSpec spec_;
};

TEST_F(DeriveTest, FullDeriveIsHardLinksOnly) {
  Build();
  ASSERT_OK_AND_ASSIGN(const DeriveReport report, DeriveOn(fs_, store_ + "/new", "old", {}));
  EXPECT_EQ(report.tensors, 20u);
  EXPECT_EQ(report.objects, 2u);
  EXPECT_EQ(report.dropped, 0u);
  EXPECT_EQ(report.bytes_copied, 0u);
  EXPECT_EQ(Read("new"), Wanted(""));
  for (const DirectoryEntry& e : fs_.List(store_ + "/old/data").value()) {
    EXPECT_EQ(fs_.LinkStat(store_ + "/old/data/" + e.name).value().inode,
              fs_.LinkStat(store_ + "/new/data/" + e.name).value().inode);
  }
  ExpectWhole("new");
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(fs_, store_ + "/new", {}));
  EXPECT_EQ(opened->index().info().parent, spec_.uuid);
  ASSERT_OK_AND_ASSIGN(const auto common, opened->index().CommonRecords());
  EXPECT_EQ(ConsecutiveLinkedSaves(opened->index()), 1u);
  EXPECT_EQ(common, spec_.common);
  // Files that did not change keep their times.
  ASSERT_OK_AND_ASSIGN(const auto old, OpenedCheckpoint::Open(fs_, store_ + "/old", {}));
  EXPECT_EQ(opened->index().info().common_mtime, old->index().info().common_mtime);
  EXPECT_EQ(opened->index().Find("a.1").value().mtime, old->index().Find("a.1").value().mtime);
}

TEST_F(DeriveTest, KeepDropAndRenameApply) {
  Build();
  DeriveOptions options;
  options.keep = {"a.*", "b.3", "rng"};
  options.drop = {"a.1", "a.2"};
  ASSERT_OK_AND_ASSIGN(options.rename, KeyMap::Make({{KeyMap::Rule::Kind::kMatch, "a.*", "z.*"},
                                                     {KeyMap::Rule::Kind::kKey, "rng", "state"}}));
  ASSERT_OK_AND_ASSIGN(const DeriveReport report, DeriveOn(fs_, store_ + "/new", "old", options));
  EXPECT_EQ(report.tensors, 9u);
  EXPECT_EQ(report.objects, 1u);
  EXPECT_EQ(report.dropped, 12u);
  EXPECT_THAT(Keys("new"),
              ElementsAre("b.3", "z.0", "z.3", "z.4", "z.5", "z.6", "z.7", "z.8", "z.9"));
  const auto wanted = Wanted("");
  for (const auto& [key, bytes] : Read("new")) {
    EXPECT_EQ(bytes, wanted.at(key[0] == 'z' ? "a" + key.substr(1) : key)) << key;
  }
  ExpectWhole("new");
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(fs_, store_ + "/new", {}));
  ASSERT_OK_AND_ASSIGN(const auto objects, opened->index().Objects());
  ASSERT_EQ(objects.size(), 1u);
  EXPECT_EQ(objects[0].key, "state");
  // Of a derived one another, and so on.
  ASSERT_OK(DeriveOn(fs_, store_ + "/again", "new", {.keep = {"z.*"}}));
  ASSERT_OK(DeriveOn(fs_, store_ + "/third", "again", {.drop = {"z.9"}}));
  ASSERT_OK(fs_.RemoveTree(store_ + "/old"));
  ASSERT_OK(fs_.RemoveTree(store_ + "/new"));
  ASSERT_OK(fs_.RemoveTree(store_ + "/again"));
  EXPECT_THAT(Keys("third"), ElementsAre("z.0", "z.3", "z.4", "z.5", "z.6", "z.7", "z.8"));
  ExpectWhole("third");
}

// Who resumes, and the next save, want the last step of the run, not what somebody cut out of one.
TEST_F(DeriveTest, DerivedCheckpointIsNotLatestOrBase) {
  Build();
  ASSERT_OK(DeriveOn(fs_, store_ + "/slim", "old", {.keep = {"a.*"}}));
  const Store store = Store::Open(fs_, store_).value();
  EXPECT_EQ(store.Latest().value().name, "old");
  const auto next = store.Begin("next", IfExists::kFail, BaseChoice::kLatest);
  ASSERT_OK(next);
  EXPECT_EQ(next.value().base_name, "old");
  EXPECT_GT(next.value().generation, store.FindListing("slim").generation);
  (void)store.AbortOrDecide(next.value());
  PruneOptions options;
  options.rules = RetentionRules::Parse("last=1").value();
  ASSERT_OK_AND_ASSIGN(const PruneReport pruned, retention::Prune(fs_, store, options));
  EXPECT_EQ(pruned.removed(), 0u);
  EXPECT_THAT(pruned.decisions.back().reason,
              testing::HasSubstr("derived from another checkpoint"));
  // Where there is nothing else it is the latest, and a base.
  ASSERT_OK(store.Remove("old"));
  EXPECT_EQ(store.Latest().value().name, "slim");
}

TEST_F(DeriveTest, RenameThatMatchesNothingIsRefused) {
  Build();
  for (const std::string from : {"zzz", "c.*", "b.3"}) {
    DeriveOptions options;
    const auto kind =
        from.find('*') == std::string::npos ? KeyMap::Rule::Kind::kKey : KeyMap::Rule::Kind::kMatch;
    ASSERT_OK_AND_ASSIGN(options.rename, KeyMap::Make({{KeyMap::Rule::Kind::kKey, "a.1", "a"},
                                                       {kind, from, from == "c.*" ? "d.*" : "d"}}));
    options.drop = {"b.3"};
    options.renames_must_match = true;
    EXPECT_THAT(DeriveOn(fs_, store_ + "/new", "old", options), HasCode(Code::kNotFound)) << from;
  }
  // A key that is to stay as it is matches, and rules of a file may speak of others.
  DeriveOptions options;
  ASSERT_OK_AND_ASSIGN(options.rename, KeyMap::Make({{KeyMap::Rule::Kind::kKey, "a.1", "a.1"},
                                                     {KeyMap::Rule::Kind::kMatch, "a.*", "z.*"}}));
  options.renames_must_match = true;
  EXPECT_OK(DeriveOn(fs_, store_ + "/new", "old", options));
  ASSERT_OK_AND_ASSIGN(options.rename,
                       KeyMap::Make({{KeyMap::Rule::Kind::kPrefix, "zzz", "y"},
                                     {KeyMap::Rule::Kind::kDrop, "optimizer.*", ""}}));
  options.renames_must_match = false;
  EXPECT_OK(DeriveOn(fs_, store_ + "/again", "old", options));
}

// Whatever is kept, the bytes on disk are at most twice those that are live.
TEST_F(DeriveTest, RestOfMostlyDroppedFilesIsCopied) {
  Build();
  ASSERT_OK_AND_ASSIGN(const DeriveReport report,
                       DeriveOn(fs_, store_ + "/new", "old", {.keep = Few()}));
  EXPECT_EQ(report.files_linked, 0u);
  std::uint64_t live = 0;
  for (const auto& [key, bytes] : Read("new")) live += bytes.size();
  EXPECT_GT(live, 0u);
  EXPECT_EQ(report.bytes_copied, live);
  std::uint64_t stored = 0;
  for (const DirectoryEntry& e : fs_.List(store_ + "/new/data").value()) {
    const FileInfo info = fs_.LinkStat(store_ + "/new/data/" + e.name).value();
    EXPECT_EQ(info.mode, 0444u);
    stored += info.size;
  }
  EXPECT_EQ(stored, live);
  ExpectWhole("new");
}

TEST_F(DeriveTest, ErrorNamesTheInvalidOptionAndLeavesNothing) {
  Build();
  const auto expect = [&](const DeriveOptions& options, const std::string& from, Code code,
                          const std::string& word) {
    const Status status = DeriveOn(fs_, store_ + "/new", from, options).status();
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_NE(status.message().find(word), std::string::npos) << status.ToString();
    EXPECT_FALSE(fs_.Exists(store_ + "/new"));
  };
  expect({}, "none", Code::kNotFound, "none");
  expect({}, "a/b", Code::kInvalidArgument, "slash");
  expect({.keep = {"a.*", "c.*"}}, "old", Code::kNotFound, "keep c.*");
  expect({.drop = {"a.77"}}, "old", Code::kNotFound, "drop a.77");
  DeriveOptions two;
  ASSERT_OK_AND_ASSIGN(two.rename, KeyMap::Make({{KeyMap::Rule::Kind::kKey, "a.1", "a.2"}}));
  expect(two, "old", Code::kInvalidArgument, "a.2");
  // What is dropped is in nobody's way.
  two.drop = {"a.2"};
  EXPECT_OK(DeriveOn(fs_, store_ + "/old2", "old", two));
  EXPECT_THAT(DeriveOn(fs_, store_ + "/old", "old", {}), HasCode(Code::kAlreadyExists));
}

// Each operation fails once: the old one is untouched, nothing new is visible, and the next try
// succeeds.
TEST_F(DeriveTest, FaultAtAnyOperationLeavesNoPartialCheckpoint) {
  Build(2000);
  const DeriveOptions options = {.keep = {"a.*", "b.1"}};
  int operations = 0;
  for (int failing = 0;; ++failing) {
    int at = 0;
    bool failed = false;
    ObservedFileSystem fs(fs_, [&](const FileEvent& e) {
      if (at++ != failing) return Status();
      failed = true;
      return Status::FromErrno(EIO, FileOpName(e.op), e.path);
    });
    const Result<DeriveReport> report = DeriveOn(fs, store_ + "/new", "old", options);
    if (!failed) break;
    ++operations;
    SCOPED_TRACE(failing);
    if (report.ok() || report.status().code() == Code::kUnknown) {
      ExpectWhole("new");
      ASSERT_OK(fs_.RemoveTree(store_ + "/new"));
    } else {
      EXPECT_FALSE(fs_.Exists(store_ + "/new")) << report.status().ToString();
    }
  }
  EXPECT_GT(operations, 40);
  EXPECT_EQ(Read("old"), Wanted(""));
  ASSERT_OK(DeriveOn(fs_, store_ + "/last", "old", options));
  ExpectWhole("last");
}

// Headers and dead ranges are extra ranges: only the manifests have their hashes.
TEST_F(DeriveTest, DamagedExtraRangeIsNotCopiedWhenLinksAreRefused) {
  Build();
  ObservedFileSystem fs(fs_, [&](const FileEvent& e) {
    return e.op == FileOp::kLink ? Status::FromErrno(EMLINK, "link", e.path) : Status();
  });
  ASSERT_OK_AND_ASSIGN(const DeriveReport whole, DeriveOn(fs, store_ + "/whole", "old", {}));
  EXPECT_EQ(whole.files_copied, 2u);
  ExpectWhole("whole");
  const std::string name = fs_.List(store_ + "/old/data").value()[0].name;
  FlipByte(store_ + "/old/data/" + name, 5);  // In the header of 32 bytes.
  const Status status = DeriveOn(fs, store_ + "/new", "old", {}).status();
  EXPECT_EQ(status.code(), Code::kDataLoss) << status.ToString();
  EXPECT_NE(status.message().find(name), std::string::npos) << status.ToString();
  EXPECT_FALSE(fs_.Exists(store_ + "/new"));
}

TEST_F(DeriveTest, ErrorNamesTheDamagedFile) {
  Build();
  for (const DirectoryEntry& e : fs_.List(store_ + "/old/data").value()) {
    const std::string path = store_ + "/old/data/" + e.name;
    const std::uint64_t size = fs_.LinkStat(path).value().size;
    for (std::uint64_t at = 40; at < size; at += 500) FlipByte(path, at);
  }
  const Status status = DeriveOn(fs_, store_ + "/new", "old", {.keep = Few()}).status();
  EXPECT_EQ(status.code(), Code::kDataLoss) << status.ToString();
  EXPECT_NE(status.message().find("data/"), std::string::npos) << status.ToString();
}

}  // namespace
}  // namespace tensormount
