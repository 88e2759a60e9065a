// SPDX-License-Identifier: Apache-2.0
// Steps that are saved through mounts: what the parent holds is linked, whoever cut it how, and
// what was written beside it goes with the rest of the staging.
#include <cerrno>
#include <functional>
#include <map>

#include <nlohmann/json.hpp>

#include "index/store/linking.h"
#include "index/store/store_moves.h"
#include "tests/staging/staging_test_support.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

constexpr const char* kStepSchema = R"({"tensors": {"frozen": {"dtype": "u8", "shape": [1000, 300]},
                                                "small": {"dtype": "u8", "shape": [64]},
                                                "trained": {"dtype": "u8", "shape": [100, 10]}}REST})";

class StagedReuseTest : public StagingTest {
 protected:
  StagedReuseTest() : store_(MakeStore()) {}

  // Writes a step by `mounts` mounts, each its rows, and publishes it on `with`.
  Result<Store::Published> SaveStep(const std::string& name, int mounts,
                                    const std::string& rest = "", FileSystem* with = nullptr) {
    std::string schema = kStepSchema;
    schema.replace(schema.find("REST"), 4, rest);
    const Staging staging = Make(store_, name, schema);
    for (int m = 0; m < mounts; ++m) {
      TestMount mount(fs(), staging, static_cast<std::uint64_t>(++mounts_));
      const auto rows = [&](const std::string& key, std::int64_t all, std::int64_t width,
                            const std::string& bytes) {
        const std::int64_t from = all * m / mounts;
        const std::int64_t to = all * (m + 1) / mounts;
        const std::string part = bytes.substr(static_cast<std::size_t>(from * width),
                                              static_cast<std::size_t>((to - from) * width));
        const TensorMeta meta = Meta(staging, key);
        if (mounts == 1) {
          mount.WriteInPlace(mount.Whole(meta), 0, part);
        } else {
          mount.Write(mount.Target(meta, Box::Make({from, 0}, {to - from, width}).value()), 0,
                      part);
        }
      };
      rows("frozen", 1000, 300, frozen_);
      rows("trained", 100, 10, trained_);
      if (m == 0) {
        mount.Write(mount.Whole(Meta(staging, "small")), 0, small_);
        mount.Object("rng", {}, rng_);
      }
      EXPECT_OK(mount.Flush());
    }
    const Store store = with == nullptr ? store_ : Store::Open(*with, store_.path()).value();
    return PublishStaging(store, with == nullptr ? fs() : *with, name, name, &report_);
  }

  void ExpectReads(const std::string& name) {
    SCOPED_TRACE(name);
    EXPECT_EQ(BytesOf(name, "frozen"), frozen_);
    EXPECT_EQ(BytesOf(name, "trained"), trained_);
    EXPECT_EQ(BytesOf(name, "small"), small_);
    EXPECT_TRUE(IsSound(name));
  }
  // Names in data/ that other checkpoints have too.
  std::vector<std::string> Linked(const std::string& name) {
    std::vector<std::string> linked;
    for (const std::string& file : NamesIn(InStore(name + "/data"))) {
      if (fs().LinkStat(InStore(name + "/data/" + file)).value().links > 1) linked.push_back(file);
    }
    return linked;
  }

  const Store store_;
  int mounts_ = 0;
  std::string frozen_ = Random(1).Bytes(300000);
  std::string small_ = Random(2).Bytes(64);
  std::string trained_ = Random(3).Bytes(1000);
  std::string rng_ = "state";
  StagingReport report_;
};

TEST_F(StagedReuseTest, UnchangedTensorsOfTheParentAreLinked) {
  ASSERT_OK(SaveStep("step-1", 1)) << report_.ToText();
  EXPECT_EQ(report_.reused_tensors, 0u);
  const std::string old = trained_;
  trained_ = Random(4).Bytes(1000);
  ASSERT_OK(SaveStep("step-2", 1)) << report_.ToText();
  EXPECT_EQ(report_.reused_tensors, 2u);
  EXPECT_EQ(report_.reused_bytes, frozen_.size() + small_.size() + rng_.size());
  EXPECT_FALSE(Linked("step-2").empty());
  ExpectReads("step-2");
  // Under another cut.
  ASSERT_OK(SaveStep("step-3", 3)) << report_.ToText();
  EXPECT_EQ(report_.reused_tensors, 3u);
  ExpectReads("step-3");
  // The next gc takes what was written and is not needed.
  ASSERT_OK(store_moves::SweepShared(fs(), InStore("step-3")));
  EXPECT_EQ(NamesIn(InStore("step-3/data")), Linked("step-3"));
  ExpectReads("step-3");
  ASSERT_OK(fs().RemoveTree(InStore("step-2")));
  ExpectReads("step-3");
  trained_ = old;
  ExpectReads("step-1");
}

TEST_F(StagedReuseTest, ChangedByteIsDetectedUnderAnySharding) {
  Random random(TestSeed());
  int step = 0;
  ASSERT_OK(SaveStep("s0", 1));
  for (int round = 0; round < TestScale(20); ++round) {
    SCOPED_TRACE(round);
    std::string& bytes = random.OneIn(2) ? frozen_ : trained_;
    bytes[static_cast<std::size_t>(random.Next() % bytes.size())] ^= 1;
    const std::string name = "s" + std::to_string(++step);
    ASSERT_OK(SaveStep(name, static_cast<int>(random.Int(1, 4)))) << report_.ToText();
    EXPECT_EQ(report_.reused_tensors, 2u);
    ExpectReads(name);
  }
}

// If the sharding changed, a save compares its bytes with the stored ones. Where those are damaged
// it writes its own, although the digests agree.
TEST_F(StagedReuseTest, DamagedParentDataIsNotReused) {
  ASSERT_OK(SaveStep("step-1", 1)) << report_.ToText();
  for (const std::string& file : NamesIn(InStore("step-1/data"))) {
    const std::string path = InStore("step-1/data/" + file);
    const std::size_t at = ReadWholeFile(path).find(frozen_);
    if (at != std::string::npos) FlipByte(path, at + 150000);
  }
  ASSERT_FALSE(IsSound("step-1"));
  ASSERT_OK(SaveStep("step-2", 3)) << report_.ToText();
  EXPECT_EQ(report_.reused_tensors, 2u) << "small and trained";
  ExpectReads("step-2");
}

TEST_F(StagedReuseTest, SchemaCanDisableOrNameTheBase) {
  ASSERT_OK(SaveStep("step-1", 1));
  const std::string old = trained_;
  trained_ = Random(4).Bytes(1000);
  ASSERT_OK(SaveStep("step-2", 1, R"(, "reuse": "off")"));
  EXPECT_EQ(report_.reused_tensors, 0u);
  EXPECT_TRUE(Linked("step-2").empty());
  trained_ = old;
  ASSERT_OK(SaveStep("step-3", 1, R"(, "reuse": "step-1")"));
  EXPECT_EQ(report_.reused_tensors, 3u);
  ExpectReads("step-3");
  // It was there when the schema was written.
  ASSERT_OK(SaveStep("step-4", 1, R"(, "reuse": "none")"));
  EXPECT_EQ(report_.reused_tensors, 0u);
  EXPECT_THAT(report_.reuse_note, testing::HasSubstr("nothing is reused"));
  ExpectReads("step-4");
  EXPECT_FALSE(StagingSchema::Parse(R"({"tensors": {}, "reuse": 1})").ok());
  EXPECT_FALSE(StagingSchema::Parse(R"({"tensors": {}, "reuse": "a/b"})").ok());
  EXPECT_EQ(StagingSchema::Parse(R"({"tensors": {}, "reuse": "a"})").value().reuse(), "a");
}

// A staging.json is a file that anybody may have written.
TEST_F(StagedReuseTest, ParentOutsideTheStoreIsNotUsed) {
  ASSERT_OK(SaveStep("step-1", 1));
  const Uuid uuid = store_.FindListing("step-1").uuid;
  ASSERT_OK(fs().CreateDirectory(InStore("../elsewhere")));
  ASSERT_OK(fs().RenameNoReplace(InStore("step-1"), InStore("../elsewhere/step-1")));
  const Staging staging = Make(
      store_, "step-2", std::string(R"({"tensors": {"small": {"dtype": "u8", "shape": [64]}}})"));
  std::string json = ReadWholeFile(JoinPath(staging.directory, "staging.json"));
  nlohmann::json changed = nlohmann::json::parse(json);
  changed["parent"] = uuid.ToString();
  changed["parent_name"] = "../elsewhere/step-1";
  WriteWholeFile(JoinPath(staging.directory, "staging.json"), changed.dump());
  TestMount mount(fs(), staging, 1);
  mount.Write(mount.Whole(Meta(staging, "small")), 0, small_);
  ASSERT_OK(mount.Flush());
  ASSERT_OK(PublishStaging(store_, fs(), "step-2", "step-2", &report_));
  EXPECT_EQ(report_.reused_tensors, 0u);
}

// A publish never fails for the sake of a base, and what a failed one left is in nobody's way.
TEST_F(StagedReuseTest, BaseFaultsOnlyDisableReuse) {
  ASSERT_OK(SaveStep("step-1", 1));
  int step = 1;
  for (const FileOp op : {FileOp::kLink, FileOp::kRead, FileOp::kOpenRead}) {
    SCOPED_TRACE(std::string(FileOpName(op)));
    ObservedFileSystem fails(fs(), [&](const FileEvent& e) {
      const bool of_base = e.path.find("step-1/") != std::string::npos;
      return e.op == op && of_base ? Status::FromErrno(EIO, "use", e.path) : Status();
    });
    const std::string name = "step-" + std::to_string(++step);
    ASSERT_OK(SaveStep(name, 1, R"(, "reuse": "step-1")", &fails)) << report_.ToText();
    EXPECT_EQ(report_.reused_tensors, 0u);
    ExpectReads(name);
  }
  // COMMIT cannot be written: the links are there already at the next try.
  bool failing = true;
  ObservedFileSystem fails(fs(), [&](const FileEvent& e) {
    return failing && e.op == FileOp::kCreate && e.path.ends_with("/COMMIT")
               ? Status::FromErrno(ENOSPC, "write", e.path)
               : Status();
  });
  EXPECT_THAT(SaveStep("last", 1, "", &fails), HasCode(Code::kResourceExhausted));
  failing = false;
  ASSERT_OK(PublishStaging(store_, fs(), "last", "last", &report_)) << report_.ToText();
  EXPECT_EQ(report_.reused_tensors, 3u);
  ExpectReads("last");
}

// Many small tensors and an object in the pack of one mount, as the daemon packs them.
class SmallTensorsTest : public StagingTest {
 protected:
  static constexpr int kTensors = 20;
  SmallTensorsTest() : store_(MakeStore()) {
    for (int i = 0; i < kTensors; ++i) bytes_[KeyOf(i)] = Random(10 + i).Bytes(4000);
  }
  static std::string KeyOf(int i) { return "layer." + std::to_string(i); }

  // Without an `object`, there is none.
  Result<Store::Published> SaveStep(const std::string& name, std::string_view object = "state",
                                    FileSystem* with = nullptr) {
    nlohmann::json schema;
    for (const auto& [key, bytes] : bytes_) {
      schema["tensors"][key] = {{"dtype", "f32"}, {"shape", {1000}}};
    }
    const Staging staging = Make(store_, name, schema.dump());
    TestMount mount(fs(), staging, static_cast<std::uint64_t>(++mounts_));
    for (const auto& [key, bytes] : bytes_) mount.Write(mount.Whole(Meta(staging, key)), 0, bytes);
    if (!object.empty()) mount.Object("rng", {}, object);
    EXPECT_OK(mount.Flush());
    if (before_publish_) before_publish_(staging);
    const Store store = with == nullptr ? store_ : Store::Open(*with, store_.path()).value();
    return PublishStaging(store, with == nullptr ? fs() : *with, name, name, &report_);
  }
  void ExpectReads(const std::string& name) {
    SCOPED_TRACE(name);
    for (const auto& [key, bytes] : bytes_) EXPECT_EQ(BytesOf(name, key), bytes) << key;
    EXPECT_TRUE(IsSound(name));
  }
  // Of the data files that COMMIT lists and no other checkpoint has.
  std::uint64_t OwnBytes(const std::string& name) {
    std::uint64_t own = 0;
    const DecodedCommit commit = store_moves::ReadCommit(fs(), InStore(name)).value();
    for (const CommitRecord::Entry& file : commit.record.files) {
      if (!file.name.starts_with("data/")) continue;
      own += fs().LinkStat(InStore(name + "/" + file.name)).value().links > 1 ? 0 : file.length;
    }
    return own;
  }

  const Store store_;
  int mounts_ = 0;
  std::map<std::string, std::string> bytes_;
  std::function<void(const Staging&)> before_publish_;
  StagingReport report_;
};

// All of them are in one pack: of that of the new step nothing else is needed.
TEST_F(SmallTensorsTest, ChangedTensorDoesNotKeepTheOldPack) {
  ASSERT_OK(SaveStep("step-1")) << report_.ToText();
  EXPECT_GT(OwnBytes("step-1"), 80000u);
  for (int step = 2; step <= 4; ++step) {
    const std::string name = "step-" + std::to_string(step);
    SCOPED_TRACE(name);
    bytes_[KeyOf(step)] = Random(100 + step).Bytes(4000);
    const std::string object = "state " + std::to_string(step);
    ASSERT_OK(SaveStep(name, object)) << report_.ToText();
    EXPECT_EQ(report_.reused_tensors, 19u);
    EXPECT_EQ(OwnBytes(name), 4000u + object.size());
    ExpectReads(name);
    const auto opened = OpenedCheckpoint::Open(fs(), InStore(name), {});
    ASSERT_OK(opened);
    std::string read(object.size(), '?');
    ASSERT_OK(opened.value()->ReadObject(opened.value()->index().Objects().value().at(0), 0,
                                         read.data(), read.size()));
    EXPECT_EQ(read, object);
  }
  // What was written goes at the next gc, which says so before and after.
  Store::GcOptions options;
  options.grace = std::chrono::seconds(0);
  options.dry_run = true;
  const auto dry = store_.Gc(options);
  ASSERT_OK(dry);
  EXPECT_GT(dry.value().bytes_freed, 3u * 80000u);
  EXPECT_THAT(dry.value().removed, testing::Contains(testing::StartsWith("step-4/data/")));
  options.dry_run = false;
  const auto freed = store_.Gc(options);
  ASSERT_OK(freed);
  EXPECT_EQ(freed.value().bytes_freed, dry.value().bytes_freed);
  EXPECT_EQ(freed.value().removed, dry.value().removed);
  ExpectReads("step-4");
}

TEST_F(SmallTensorsTest, HalfLiveFileIsKept) {
  ASSERT_OK(SaveStep("step-1", "")) << report_.ToText();
  for (int i = 0; i < 9; ++i) bytes_[KeyOf(i)] = Random(200 + i).Bytes(4000);
  ASSERT_OK(SaveStep("step-2", "")) << report_.ToText();
  EXPECT_EQ(OwnBytes("step-2"), 9u * 4000u);
  // Then less than half of the base's file is live, which is copied as well.
  ASSERT_OK(fs().RemoveTree(InStore("step-2")));
  for (int i = 0; i < 11; ++i) bytes_[KeyOf(i)] = Random(300 + i).Bytes(4000);
  ASSERT_OK(SaveStep("step-3", "")) << report_.ToText();
  EXPECT_EQ(OwnBytes("step-3"), 20u * 4003u + 9u * 4000u) << "each 3 bytes apart";
  ExpectReads("step-3");
}

TEST_F(SmallTensorsTest, DamagedBytesAreNotCopied) {
  ASSERT_OK(SaveStep("step-1")) << report_.ToText();
  bytes_[KeyOf(3)] = Random(5).Bytes(4000);
  before_publish_ = [&](const Staging& staging) {
    const std::string folder = JoinPath(staging.directory, "data");
    const std::string path = JoinPath(folder, NamesIn(folder).at(0));
    std::string file = ReadWholeFile(path);
    file[file.find(bytes_[KeyOf(3)]) + 100] ^= 1;
    WriteWholeFile(path, file);
  };
  const auto published = SaveStep("step-2");
  EXPECT_THAT(published, HasCode(Code::kDataLoss));
  EXPECT_THAT(published.status().message(), testing::HasSubstr("checksum mismatch at byte"));
}

TEST_F(SmallTensorsTest, WrittenFileIsUsedWhenTheDiskIsFull) {
  ASSERT_OK(SaveStep("step-1")) << report_.ToText();
  bytes_[KeyOf(3)] = Random(5).Bytes(4000);
  ObservedFileSystem full(fs(), [&](const FileEvent& e) {
    const bool copy = e.op == FileOp::kWrite && e.path.find("-patch-") != std::string::npos;
    return copy ? Status::FromErrno(ENOSPC, "write", e.path) : Status();
  });
  ASSERT_OK(SaveStep("step-2", "state", &full)) << report_.ToText();
  EXPECT_EQ(report_.reused_tensors, 19u);
  EXPECT_GT(OwnBytes("step-2"), 80000u);
  ExpectReads("step-2");
}

}  // namespace
}  // namespace tensormount::fs
