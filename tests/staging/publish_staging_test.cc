// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <thread>

#include "index/store/store_moves.h"
#include "tests/staging/staging_test_support.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

using testing::ElementsAre;

class PublishStagingTest : public StagingTest {
 protected:
  PublishStagingTest() : store_(MakeStore()) {}
  // "w" u8 [4, 8] and nothing else.
  Staging MakeW(const std::string& name) {
    return Make(store_, name, R"({"tensors": {"w": {"dtype": "u8", "shape": [4, 8]}}})");
  }
  Result<Store::Published> Publish(const std::string& name) {
    return PublishStaging(store_, fs(), name, name, &report_);
  }
  const std::string bytes_ = Random(7).Bytes(32);
  const Store store_;
  StagingReport report_;
};

TEST_F(PublishStagingTest, RowsOfTwoMountsBecomeOneCheckpoint) {
  const Staging staging = MakeW("step");
  const TensorMeta w = Meta(staging, "w");
  TestMount a(fs(), staging, 1);
  TestMount b(fs(), staging, 2);
  a.Write(a.Target(w, Box::Make({0, 0}, {2, 8}).value()), 0, bytes_.substr(0, 16));
  b.Write(b.Target(w, Box::Make({2, 0}, {2, 8}).value()), 0, bytes_.substr(16));
  ASSERT_OK(a.Flush());
  ASSERT_OK(b.Flush());
  ASSERT_OK(
      WriteCommonJson(fs(), staging, "00000000000000aa",
                      R"({"lr": 0.5, "$content": {"what": "test"}, "$ranks": {"1": {"x": 2}}})"));
  const auto published = Publish("step");
  ASSERT_OK(published) << report_.ToText();
  EXPECT_EQ(published.value().chunks, 2u);
  EXPECT_EQ(BytesOf("step", "w"), bytes_);
  EXPECT_TRUE(IsSound("step"));
  EXPECT_EQ(report_.mounts, 2u);
  EXPECT_EQ(report_.bytes_written, 32u);
  const auto opened = OpenedCheckpoint::Open(fs(), InStore("step"), OpenedCheckpoint::Options());
  ASSERT_OK(opened);
  const auto common = opened.value()->index().Common();
  ASSERT_OK(common);
  EXPECT_EQ(common.value().values.at("lr"), CommonValue(0.5));
  EXPECT_EQ(*common.value().content.Find(std::string("what")), CommonValue("test"));
  EXPECT_EQ(common.value().ranks.at(1).at("x"), CommonValue(2));
  ASSERT_OK(store_moves::SweepShared(fs(), InStore("step")));  // As gc does.
  EXPECT_THAT(NamesIn(InStore("step")), ElementsAre("COMMIT", "data", "index", "manifest"));
  // A parent is what was the latest when the staging was made.
  const Staging next = MakeW("next");
  EXPECT_EQ(next.parent, published.value().info.uuid);
  EXPECT_EQ(next.generation, published.value().info.generation + 1);
}

TEST_F(PublishStagingTest, PublishedTensorFileCanBePassedThrough) {
  const std::string big = Random(9).Bytes(3 * 65536 + 5);
  const Staging staging = Make(store_, "step",
                               R"({"tensors": {"w": {"dtype": "u8", "shape": [196613]},
                                               "odd": {"dtype": "u8", "shape": [8]},
                                               "part": {"dtype": "u8", "shape": [8]}}})");
  TestMount a(fs(), staging, 1);
  const std::uint32_t whole = a.Whole(Meta(staging, "w"));
  a.WriteInPlace(whole, 0, big.substr(0, 65536));
  a.WriteInPlace(whole, 131072, big.substr(131072));
  a.WriteInPlace(whole, 65536, big.substr(65536, 65536));
  const std::uint32_t part = a.Whole(Meta(staging, "part"));
  a.WriteInPlace(part, 0, "1234");
  a.Write(part, 4, "5678");
  const std::uint32_t odd = a.Whole(Meta(staging, "odd"));
  a.WriteInPlace(odd, 0, "1234");
  a.WriteInPlace(odd, 4, "5678");
  ASSERT_OK(a.Flush());
  const auto published = Publish("step");
  ASSERT_OK(published) << report_.ToText();
  EXPECT_EQ(published.value().chunks, 5u) << "neighbours after whole leaves are one chunk";
  EXPECT_EQ(BytesOf("step", "odd"), "12345678");
  EXPECT_TRUE(IsSound("step"));
  EXPECT_EQ(BytesOf("step", "w"), big);
  EXPECT_EQ(BytesOf("step", "part"), "12345678");
  const auto opened = OpenedCheckpoint::Open(fs(), InStore("step"), OpenedCheckpoint::Options());
  ASSERT_OK(opened);
  const CheckpointIndex& index = opened.value()->index();
  EXPECT_OK(opened.value()->WholeFileOf(index.Find("w").value()));
  EXPECT_THAT(opened.value()->WholeFileOf(index.Find("part").value()), HasCode(Code::kNotFound));
  int tensor_files = 0;
  for (const FileRecord& f : index.files()) tensor_files += f.placement == Placement::kTensorFile;
  EXPECT_EQ(tensor_files, 2);
}

// Four elements of 6 bits are 3 bytes, and a row has six: its last two stand in one unit with the
// first two of the next row. Such units, one below the other, are no box of elements.
TEST_F(PublishStagingTest, SubByteColumnsAcrossRowsArePublished) {
  const Staging staging =
      Make(store_, "step", R"({"tensors": {"w": {"dtype": "f6_e2m3", "shape": [2, 2, 6]}}})");
  TestMount a(fs(), staging, 1);
  const std::uint32_t whole = a.Whole(Meta(staging, "w"));
  a.WriteRuns(whole, 0, 3, 2, 9, "abcjkl");
  a.WriteRuns(whole, 3, 3, 2, 9, "defmno");
  a.WriteRuns(whole, 6, 3, 2, 9, "ghipqr");
  ASSERT_OK(a.Flush());
  ASSERT_OK(Publish("step")) << report_.ToText();
  EXPECT_EQ(BytesOf("step", "w"), "abcdefghijklmnopqr");
  EXPECT_TRUE(IsSound("step"));
}

TEST_F(PublishStagingTest, MissingBoxesAreReportedAndCanBeWrittenLater) {
  const Staging staging = Make(store_, "step",
                               R"({"tensors": {"w": {"dtype": "f32", "shape": [4, 4]},
                                               "x": {"dtype": "u8", "shape": [2]}},
                                   "objects": {"rng": {"grid": [2]}}})");
  const TensorMeta w = Meta(staging, "w");
  const std::string all = Random(1).Bytes(64);
  TestMount a(fs(), staging, 1);
  const std::uint32_t whole = a.Whole(w);
  a.Write(whole, 0, all.substr(0, 16));
  a.Write(whole, 48, all.substr(48, 6));  // Half of element [3, 1].
  a.Write(a.Whole(Meta(staging, "x")), 0, "ab");
  a.Object("rng", {0}, "zero");
  ASSERT_OK(a.Flush());
  EXPECT_THAT(Publish("step"), HasCode(Code::kDataLoss));
  EXPECT_THAT(Lines(report_), ElementsAre("missing|object rng[1]|not written by any mount",
                                          "missing|tensor w [1:3, :]|written by no mount",
                                          "missing|tensor w [3:4, 1:4]|written by no mount"));
  EXPECT_EQ(report_.bytes_missing, 42u);
  EXPECT_THAT(ReadWholeFile(staging.directory + "/report.txt"),
              testing::HasSubstr("tensor w [1:3, :]: written by no mount\n"));
  EXPECT_THAT(ReadWholeFile(staging.directory + "/report.json"), testing::HasSubstr("\"missing\""));
  EXPECT_THAT(NamesIn(staging.directory + "/manifest"), testing::IsEmpty());

  TestMount b(fs(), staging, 2);
  b.Write(b.Target(w, Box::Make({1, 0}, {3, 4}).value()), 0, all.substr(16));
  b.Object("rng", {1}, "");
  ASSERT_OK(b.Flush());
  ASSERT_OK(Publish("step")) << report_.ToText();
  EXPECT_EQ(BytesOf("step", "w"), all);
  EXPECT_TRUE(IsSound("step"));
}

TEST_F(PublishStagingTest, DifferingBytesOfTwoMountsAreReported) {
  const Staging staging = Make(store_, "step",
                               R"({"tensors": {"w": {"dtype": "f32", "shape": [4, 4]}},
                                   "objects": {"config": {}}})");
  const TensorMeta w = Meta(staging, "w");
  const std::string all = Random(1).Bytes(64);
  TestMount a(fs(), staging, 1);
  a.Write(a.Whole(w), 0, all);
  a.Object("config", {}, "one");
  TestMount b(fs(), staging, 2);
  std::string middle = all.substr(16, 32);
  for (const std::size_t at : {5, 9, 21, 25}) middle[at] = static_cast<char>(middle[at] ^ 1);
  b.Write(b.Target(w, Box::Make({1, 0}, {2, 4}).value()), 0, middle);
  b.Object("config", {}, "two");
  ASSERT_OK(a.Flush());
  ASSERT_OK(b.Flush());
  EXPECT_THAT(Publish("step"), HasCode(Code::kDataLoss));
  EXPECT_THAT(
      Lines(report_),
      ElementsAre("conflict|object config|differs between mounts 0000000000000001 and "
                  "0000000000000002",
                  "conflict|tensor w [1:3, 1:3]|differs between mounts 0000000000000001 and "
                  "0000000000000002"));
  // Whole extents that are the same box are told apart by their hashes, and named as exactly.
  TestMount c(fs(), staging, 3);
  std::string other = all;
  other[63] = static_cast<char>(other[63] ^ 1);
  c.Write(c.Whole(w), 0, other);
  ASSERT_OK(c.Flush());
  EXPECT_THAT(Publish("step"), HasCode(Code::kDataLoss));
  EXPECT_THAT(Lines(report_), testing::Contains("conflict|tensor w [3:4, 3:4]|differs between "
                                                "mounts 0000000000000001 and 0000000000000003"));
}

TEST_F(PublishStagingTest, EqualBytesOfTwoMountsAreStoredOnce) {
  const Staging staging = MakeW("step");
  const TensorMeta w = Meta(staging, "w");
  for (const std::uint64_t n : {1, 2, 3}) {
    TestMount m(fs(), staging, n);
    if (n == 3) {
      m.Write(m.Target(w, Box::Make({0, 2}, {4, 3}).value()), 3,
              bytes_.substr(10, 3) + bytes_.substr(18, 3));
    } else {
      m.Write(m.Whole(w), 0, bytes_);
    }
    ASSERT_OK(m.Flush());
  }
  const auto published = Publish("step");
  ASSERT_OK(published) << report_.ToText();
  EXPECT_EQ(published.value().chunks, 1u);
  EXPECT_EQ(report_.bytes_written, 32u);
  ASSERT_OK(store_moves::SweepShared(fs(), InStore("step")));  // As gc does.
  EXPECT_THAT(NamesIn(InStore("step/data")), testing::SizeIs(1)) << "files of no use are removed";
  EXPECT_EQ(BytesOf("step", "w"), bytes_);
  EXPECT_TRUE(IsSound("step"));
}

TEST_F(PublishStagingTest, CommitOfAnotherCheckpointSweepsNothing) {
  for (const char* name : {"a", "b"}) {
    const Staging staging =
        Make(store_, name, R"({"tensors": {"w": {"dtype": "u8", "shape": [4, 8]}}})");
    TestMount mount(fs(), staging, 1);
    mount.Write(mount.Whole(Meta(staging, "w")), 0, bytes_);
    ASSERT_OK(mount.Flush());
    ASSERT_OK(Publish(name)) << report_.ToText();
  }
  const std::vector<std::string> data = NamesIn(InStore("a/data"));
  const std::string own = ReadWholeFile(InStore("a/COMMIT"));
  WriteWholeFile(InStore("a/COMMIT"), ReadWholeFile(InStore("b/COMMIT")));
  EXPECT_THAT(store_moves::SweepShared(fs(), InStore("a")), HasCode(Code::kDataLoss));
  EXPECT_EQ(NamesIn(InStore("a/data")), data);
  WriteWholeFile(InStore("a/COMMIT"), own);
  EXPECT_OK(store_moves::SweepShared(fs(), InStore("a")));
  EXPECT_EQ(BytesOf("a", "w"), bytes_);
}

TEST_F(PublishStagingTest, LargeTensorsAreComparedInBands) {
  const Staging staging =
      Make(store_, "step", R"({"tensors": {"w": {"dtype": "u8", "shape": [1300, 4100]}}})");
  const TensorMeta w = Meta(staging, "w");
  const std::string all = Random(5).Bytes(1300 * 4100);
  std::string old = all;
  std::string columns;
  for (std::size_t row = 100; row < 1200; ++row) {
    columns += all.substr(row * 4100 + 1000, 3);
    old.replace(row * 4100 + 1000, 3, "old");
  }
  TestMount a(fs(), staging, 1);
  const std::uint32_t whole = a.Whole(w);
  a.Write(whole, 0, std::string_view(old).substr(0, 3000001));
  a.Write(whole, 3000001, std::string_view(old).substr(3000001));
  a.Write(a.Target(w, Box::Make({100, 1000}, {1100, 3}).value()), 0, columns);
  ASSERT_OK(a.Flush());
  TestMount b(fs(), staging, 2);
  b.Write(b.Target(w, Box::Make({600, 0}, {700, 4100}).value()), 0,
          std::string_view(all).substr(std::size_t{600} * 4100));
  ASSERT_OK(b.Flush());
  ASSERT_OK(Publish("step")) << report_.ToText();
  EXPECT_TRUE(BytesOf("step", "w") == all);
  EXPECT_TRUE(IsSound("step"));
  EXPECT_EQ(report_.bytes_written, all.size());
}

TEST_F(PublishStagingTest, DamagedBytesAreNotPublished) {
  const Staging staging = MakeW("step");
  const TensorMeta w = Meta(staging, "w");
  TestMount a(fs(), staging, 1);
  a.Write(a.Whole(w), 0, bytes_);
  a.Write(a.Target(w, Box::Make({0, 0}, {4, 1}).value()), 0, "abcd");
  ASSERT_OK(a.Flush());
  const std::string file = staging.directory + "/data/" + NamesIn(staging.directory + "/data")[0];
  std::string bytes = ReadWholeFile(file);
  bytes[10] = static_cast<char>(bytes[10] ^ 4);
  WriteWholeFile(file, bytes);
  EXPECT_THAT(Publish("step"), HasCode(Code::kDataLoss));
  EXPECT_THAT(Publish("step"), HasMessage("checksum mismatch at byte"));
  bytes[10] = static_cast<char>(bytes[10] ^ 4);
  WriteWholeFile(file, bytes.substr(0, bytes.size() - 1));
  EXPECT_THAT(Publish("step"), HasCode(Code::kDataLoss));
  WriteWholeFile(file, bytes);
  EXPECT_OK(Publish("step"));
  EXPECT_TRUE(IsSound("step"));
}

TEST_F(PublishStagingTest, CondemnedTensorIsRefusedUntilRewritten) {
  const Staging staging = MakeW("step");
  const TensorMeta w = Meta(staging, "w");
  TestMount a(fs(), staging, 1);
  const std::uint32_t whole = a.Whole(w);
  a.Write(whole, 0, bytes_);
  a.Condemn(whole, "tensors/w", "fsync failed");
  ASSERT_OK(a.Flush());
  EXPECT_THAT(Publish("step"), HasCode(Code::kDataLoss));
  EXPECT_THAT(Lines(report_),
              ElementsAre("condemned|tensors/w|fsync failed (mount 0000000000000001)"));
  const Staging again = MakeW("again");
  TestMount b(fs(), again, 1);
  const std::uint32_t target = b.Whole(w);
  b.Write(target, 0, std::string(32, 'x'));
  b.Condemn(target, "tensors/w", "fsync failed");
  b.Object("rng", {}, "old");
  b.Condemn(kNoFile, "object rng", "fsync failed");
  b.RemoveObject("rng", {});
  b.Object("rng", {}, "new");
  b.Forget(target, 0, 32);
  b.Write(target, 0, bytes_);
  ASSERT_OK(b.Flush());
  ASSERT_OK(Publish("again")) << report_.ToText();
  EXPECT_EQ(BytesOf("again", "w"), bytes_);
}

TEST_F(PublishStagingTest, MissingWriterMarksAreListedUpToSixteen) {
  for (const std::uint32_t missing : {16u, 17u}) {
    const std::string name = "step-" + std::to_string(missing);
    const Staging staging =
        Make(store_, name,
             R"({"tensors": {"w": {"dtype": "u8", "shape": [4, 8]}}, "writers": )" +
                 std::to_string(missing + 1) + "}");
    ASSERT_OK(MakeDoneMark(fs(), staging, {missing, "", 0}));
    const Status status = Publish(name).status();
    EXPECT_THAT(status, HasMessage("14, 15"));
    EXPECT_EQ(status.message().find("...") != std::string::npos, missing > 16) << status.message();
  }
}

TEST_F(PublishStagingTest, PublishNeedsMarksAndJournalsOfAllWriters) {
  const Staging staging =
      Make(store_, "step", R"({"tensors": {"w": {"dtype": "u8", "shape": [4, 8]}}, "writers": 3})");
  TestMount a(fs(), staging, 1);
  a.Write(a.Whole(Meta(staging, "w")), 0, bytes_);
  ASSERT_OK(a.Flush());
  ASSERT_OK(MakeDoneMark(fs(), staging, {1, a.journal_name(), a.journal_bytes()}));
  EXPECT_THAT(MakeDoneMark(fs(), staging, {3, "", 0}), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Publish("step"), HasCode(Code::kUnavailable));
  EXPECT_EQ(Publish("step").status().ToErrno(), EAGAIN);
  EXPECT_THAT(report_.writers_missing, ElementsAre(0u, 2u));
  EXPECT_THAT(Lines(report_),
              ElementsAre("not_done|writer 0|no done mark", "not_done|writer 2|no done mark"));
  EXPECT_THAT(Publish("step"), HasMessage("2 of 3 writers: 0, 2"));

  ASSERT_OK(MakeDoneMark(fs(), staging, {0, "", 0}));
  ASSERT_OK(MakeDoneMark(fs(), staging, {2, "0000000000000009.tmj", 10}));
  EXPECT_EQ(Publish("step").status().ToErrno(), ENODATA);
  ASSERT_OK(MakeDoneMark(fs(), staging, {2, a.journal_name(), a.journal_bytes() + 1000}));
  EXPECT_EQ(Publish("step").status().ToErrno(), ENODATA);
  EXPECT_THAT(Lines(report_)[0], testing::StartsWith("no_journal|writer 2|"));
  ASSERT_OK(RemoveDoneMark(fs(), staging, 2));
  EXPECT_THAT(Publish("step"), HasCode(Code::kUnavailable));

  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_OK(MakeDoneMark(fs(), staging, {2, a.journal_name(), a.journal_bytes()}));
  });
  EXPECT_THAT(
      PublishStagingWhenDone(store_, fs(), "step", "step", std::chrono::milliseconds(1), nullptr),
      HasCode(Code::kUnavailable));
  const auto published =
      PublishStagingWhenDone(store_, fs(), "step", "step", std::chrono::seconds(20), nullptr);
  late.join();
  ASSERT_OK(published);
  EXPECT_EQ(published.value().info.world_size, 3u);
}

TEST_F(PublishStagingTest, InvalidNameSchemaOrCommonValueHasItsOwnCode) {
  EXPECT_THAT(Publish("nothing"), HasCode(Code::kNotFound));
  const Staging staging = CreateStaging(store_, fs(), "step").value();
  EXPECT_THAT(Publish("step"), HasCode(Code::kInvalidArgument));
  ASSERT_OK(AddSchema(fs(), staging.directory, "0000000000000001",
                      StagingSchema::Parse(R"({"tensors": {"e": {"dtype": "f32", "shape": [0]}},
                                               "content": {"a": 1}})")
                          .value()));
  EXPECT_THAT(PublishStaging(store_, fs(), "step", "latest", nullptr),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(WriteCommonJson(fs(), staging, "01", "{\"$x\": 1}"), HasCode(Code::kInvalidArgument));
  ASSERT_OK(WriteCommonJson(fs(), staging, "01", R"({"$content": {"a": 2}})"));
  EXPECT_THAT(Publish("step"), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(Lines(report_)[0], testing::StartsWith("bad_common|"));
  ASSERT_OK(WriteCommonJson(fs(), staging, "00", R"({"b": 1})"));
  TestMount a(fs(), staging, 1);
  a.Object("rng", {3}, "x");
  a.Object("gone", {}, "x");
  a.RemoveObject("gone", {});
  a.Object("empty", {}, "");
  ASSERT_OK(a.Flush());
  EXPECT_THAT(Publish("step"), HasCode(Code::kDataLoss));
  EXPECT_THAT(Lines(report_),
              ElementsAre("bad_object|object rng[3]|schema.json declares no grid for this object"));
  ASSERT_OK(AddSchema(fs(), staging.directory, "0000000000000001",
                      StagingSchema::Parse(R"({"objects": {"rng": {"grid": [4]}}})").value()));
  EXPECT_THAT(Publish("step"), HasCode(Code::kDataLoss));
  EXPECT_EQ(report_.problems.size(), 3u);
  // A name that is taken leaves the staging as it is.
  const Staging other =
      Make(store_, "other", R"({"tensors": {"e": {"dtype": "f32", "shape": [0]}}})");
  TestMount b(fs(), other, 1);
  b.Object("empty", {}, "");
  ASSERT_OK(b.Flush());
  ASSERT_OK(PublishStaging(store_, fs(), "other", "taken", nullptr));
  EXPECT_TRUE(IsSound("taken"));
  EXPECT_THAT(PublishStaging(store_, fs(), "step", "taken", nullptr),
              HasCode(Code::kAlreadyExists));
  EXPECT_TRUE(IsStagingInPlace(fs(), staging));
}

TEST_F(PublishStagingTest, PublishWithOpenWritersIsBusy) {
  const Staging staging = MakeW("step");
  TestMount a(fs(), staging, 1);
  a.Write(a.Whole(Meta(staging, "w")), 0, bytes_);
  ASSERT_OK(a.Flush());
  auto lease = StagingLease::ForWriting(fs(), staging);
  ASSERT_OK(lease);
  EXPECT_TRUE(lease.value()->locked());
  EXPECT_THAT(Publish("step"), HasCode(Code::kBusy));
  {
    const auto gc = store_.Gc({.staging_age = std::chrono::seconds(0)});
    ASSERT_OK(gc);
    EXPECT_TRUE(IsStagingInPlace(fs(), staging)) << "gc leaves a live writer alone";
  }
  lease = Status(Code::kUnknown, "dropped");
  ASSERT_OK(Publish("step"));
  EXPECT_THAT(StagingLease::ForWriting(fs(), staging), HasCode(Code::kStale));
  EXPECT_THAT(StagingLease::ForPublishing(fs(), staging), HasCode(Code::kStale));
}

TEST_F(PublishStagingTest, ConcurrentPublishersHaveOneWinner) {
  for (int round = 0; round < 4; ++round) {
    const std::string name = "step" + std::to_string(round);
    const Staging staging = MakeW(name);
    TestMount a(fs(), staging, 1);
    a.Write(a.Whole(Meta(staging, "w")), 0, bytes_);
    ASSERT_OK(a.Flush());
    std::vector<Status> ended(4);
    {
      std::vector<std::jthread> threads;
      for (std::size_t i = 0; i < ended.size(); ++i) {
        threads.emplace_back(
            [&, i] { ended[i] = PublishStaging(store_, fs(), name, name, nullptr).status(); });
      }
    }
    int won = 0;
    for (const Status& s : ended) {
      won += s.ok();
      EXPECT_TRUE(s.ok() || s.code() == Code::kBusy || s.code() == Code::kStale ||
                  s.code() == Code::kNotFound)
          << s.ToString();
    }
    EXPECT_EQ(won, 1);
    EXPECT_EQ(BytesOf(name, "w"), bytes_);
  }
}

}  // namespace
}  // namespace tensormount::fs
