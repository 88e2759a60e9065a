// SPDX-License-Identifier: Apache-2.0
// A publish that fails or dies anywhere leaves a checkpoint, or a staging that can be published.

#include <cerrno>

#include "tests/staging/staging_test_support.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/power_cut.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

constexpr Store::GcOptions kGcNow{.grace = std::chrono::seconds(0)};

class PublishCrashTest : public StagingTest {
 protected:
  // A staging of everything: two mounts, cells that both wrote, rewritten ones and ones that need a
  // patch, an object, marks, common values; on `fs`, in a store at `path`.
  void Write(FileSystem& fs, const std::string& path) {
    const auto store = Store::OpenOrCreate(fs, path);
    ASSERT_OK(store);
    const auto staging = CreateStaging(store.value(), fs, "step");
    ASSERT_OK(staging);
    const std::string& directory = staging.value().directory;
    ASSERT_OK(AddSchema(fs, directory, "0000000000000001",
                        StagingSchema::Parse(R"({"tensors": {"e": {"dtype": "u8", "shape": [0]},
                            "w": {"dtype": "f32", "shape": [4, 4]}}, "writers": 1})")
                            .value()));
    const TensorMeta w = ReadSchemas(fs, directory).value().tensors().at("w");
    TestMount a(fs, staging.value(), 1);
    const std::uint32_t whole = a.Whole(w);
    a.Write(whole, 0, std::string(14, 'x'));
    a.Write(whole, 0, bytes_.substr(0, 6));
    a.Write(whole, 6, bytes_.substr(6, 40));
    a.Object("rng", {}, "state");
    ASSERT_OK(a.Flush());
    TestMount b(fs, staging.value(), 2);
    b.Write(b.Target(w, Box::Make({2, 0}, {2, 4}).value()), 0, bytes_.substr(32));
    ASSERT_OK(b.Flush());
    ASSERT_OK(WriteCommonJson(fs, staging.value(), "0000000000000001", "{\"iteration\": 7}"));
    ASSERT_OK(MakeDoneMark(fs, staging.value(), {0, a.journal_name(), a.journal_bytes()}));
  }
  static Result<Store::Published> Publish(FileSystem& fs, const std::string& path) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(fs, path));
    return PublishStaging(store, fs, "step", "step", nullptr);
  }
  // Published as it should be, and nothing is left in the staging folder or, after gc, of it.
  void ExpectWhole(FileSystem& fs, const std::string& path) {
    const std::string step = JoinPath(path, "step");
    const auto before = VerifyCheckpoint(fs, step, VerifyOptions{.threads = 1});
    ASSERT_OK(before);
    ASSERT_TRUE(before.value().damages.empty()) << before.value().damages[0].reason;
    const auto store = Store::Open(fs, path);
    ASSERT_OK(store);
    const auto findings = store.value().Fsck({});
    ASSERT_OK(findings);
    for (const auto& f : findings.value()) ASSERT_FALSE(f.damage) << f.object << f.problem;
    ASSERT_OK(store.value().Gc(kGcNow));
    ASSERT_THAT(NamesIn(step), testing::ElementsAre("COMMIT", "data", "index", "manifest"));
    ASSERT_THAT(NamesIn(JoinPath(path, ".staging")), testing::IsEmpty());
    const auto opened = OpenedCheckpoint::Open(fs, step, OpenedCheckpoint::Options());
    ASSERT_OK(opened);
    ASSERT_EQ(NamesIn(JoinPath(step, "data")).size(), opened.value()->index().files().size());
    std::string bytes(64, '?');
    ASSERT_OK(opened.value()->ReadBytes(opened.value()->index().Find("w").value(), 0, bytes.data(),
                                        64, ReadVerify::kExtendLeaves, nullptr));
    ASSERT_EQ(bytes, bytes_);
    ASSERT_EQ(opened.value()->index().CommonRecord("iteration").value(), CommonValue(7));
  }
  const std::string bytes_ = Random(3).Bytes(64);
};

TEST_F(PublishCrashTest, PublishCanBeRetriedAfterAnyFailure) {
  bool failed = true;
  int published = 0;
  int k = 0;
  for (; failed; ++k) {
    ASSERT_LT(k, 2000);
    const std::string root = dir_.Join("live" + std::to_string(k));
    ASSERT_OK(HostFileSystem().CreateDirectory(root));
    PowerCutFileSystem live(root);  // Syncs nothing, so that it is quick.
    const std::string path = root + "/store";
    ASSERT_NO_FATAL_FAILURE(Write(live, path));
    int op = 0;
    std::string what;
    ObservedFileSystem failing(live, [&](const FileEvent& e) {
      if (op++ != k) return Status();
      what = std::string(FileOpName(e.op)) + " " + e.path;
      return Status::FromErrno(EIO, "injected", e.path);
    });
    const auto first = Publish(failing, path);
    SCOPED_TRACE("failed at operation " + std::to_string(k) + ": " + what + ": " +
                 first.status().ToString());
    failed = op > k;
    if (!live.Exists(JoinPath(path, "step"))) {
      ASSERT_FALSE(first.ok());
      ASSERT_OK(Publish(live, path));
    } else {
      ++published;
      ASSERT_TRUE(first.ok() || first.status().code() == Code::kUnknown);
    }
    ASSERT_NO_FATAL_FAILURE(ExpectWhole(live, path));
    ASSERT_OK(HostFileSystem().RemoveTree(root));
  }
  EXPECT_GT(k, 100);
  EXPECT_GE(published, 3);  // The rename, and the syncs of both folders after it.
}

TEST_F(PublishCrashTest, PublishIsDoneOrRepeatableAfterAnyPowerCut) {
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("live")));
  PowerCutFileSystem live(dir_.Join("live"));
  ASSERT_NO_FATAL_FAILURE(Write(live, dir_.Join("live/store")));
  const std::size_t written = live.op_count();
  ASSERT_OK(Publish(live, dir_.Join("live/store")));
  const std::size_t acknowledged = live.op_count();
  Random random(TestSeed());
  int again = 0;
  const int tries = TestScale(2);
  for (std::size_t k = written; k <= acknowledged; ++k) {
    // The last steps matter most.
    for (int i = 0; i < (k + 6 > acknowledged ? 4 * tries : tries); ++i) {
      const std::string after = dir_.Join("after");
      ASSERT_OK(live.Materialise(k, random, after));
      SCOPED_TRACE("power cut after " + live.Describe(k - 1));
      {
        PowerCutFileSystem cut(after);
        const std::string path = after + "/store";
        if (!cut.Exists(JoinPath(path, "step"))) {
          ASSERT_NE(k, acknowledged);
          ++again;
          ASSERT_OK(Publish(cut, path));
        }
        ASSERT_NO_FATAL_FAILURE(ExpectWhole(cut, path));
      }
      ASSERT_OK(HostFileSystem().RemoveTree(after));
    }
  }
  EXPECT_GT(again, 20);
}

TEST_F(PublishCrashTest, StagingIsWholeOrAbsentAfterAPowerCut) {
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("live")));
  PowerCutFileSystem live(dir_.Join("live"));
  const auto store = Store::OpenOrCreate(live, dir_.Join("live/store"));
  ASSERT_OK(store);
  const std::size_t before = live.op_count();
  ASSERT_OK(CreateStaging(store.value(), live, "step"));
  Random random(TestSeed());
  for (std::size_t k = before; k <= live.op_count(); ++k) {
    const std::string after = dir_.Join("after");
    ASSERT_OK(live.Materialise(k, random, after));
    SCOPED_TRACE("power cut after " + live.Describe(k - 1));
    const auto again = Store::Open(fs(), after + "/store");
    ASSERT_OK(again);
    auto staging = OpenStaging(again.value(), fs(), "step");
    if (k == live.op_count()) {
      ASSERT_OK(staging);
    }
    if (!staging.ok()) {
      ASSERT_THAT(staging, HasCode(Code::kNotFound));
      staging = CreateStaging(again.value(), fs(), "step");
    }
    ASSERT_OK(staging);
    EXPECT_TRUE(IsStagingInPlace(fs(), staging.value()));
    EXPECT_OK(StagingLease::ForWriting(fs(), staging.value()));
    EXPECT_OK(ReadSchemas(fs(), staging.value().directory));
    EXPECT_OK(ReadDoneMarks(fs(), staging.value()));
    ASSERT_OK(again.value().Gc({.staging_age = std::chrono::seconds(0)}));
    EXPECT_THAT(NamesIn(after + "/store/.staging"), testing::IsEmpty());
    ASSERT_OK(HostFileSystem().RemoveTree(after));
  }
}

}  // namespace
}  // namespace tensormount::fs
