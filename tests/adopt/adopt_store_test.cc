// SPDX-License-Identifier: Apache-2.0
// A foreign checkpoint that was adopted: published, opened, read, verified, rebuilt.
#include <atomic>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "index/foreign/adopt.h"
#include "index/read/stored_range_scanner.h"
#include "index/records/record_coding.h"
#include "index/store/store.h"
#include "tests/adopt/foreign_support.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

class AdoptTest : public testing::Test {
 protected:
  void SetUp() override {
    AddManyKinds(made_);
    Result<Store> store = Store::OpenOrCreate(HostFileSystem(), dir_.Join("store"));
    ASSERT_OK(store);
    store_.emplace(std::move(store).value());
  }
  Status Adopt(const std::string& name, bool hashes = true) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto foreign, made_.Open(HostFileSystem()));
    AdoptOptions options;
    options.hashes = hashes;
    options.threads = 3;
    return AdoptSource(HostFileSystem(), *foreign, *store_, name, options).status();
  }
  std::string Path(const std::string& name) { return store_->CheckpointPath(name); }
  Result<std::shared_ptr<OpenedCheckpoint>> Open(const std::string& name) {
    return OpenedCheckpoint::Open(HostFileSystem(), Path(name), {});
  }
  std::vector<VerifyReport::Damage> Damages(const std::string& name) {
    Result<VerifyReport> report = VerifyCheckpoint(HostFileSystem(), Path(name), {.threads = 2});
    EXPECT_OK(report);
    return report.ok() ? report.value().damages : std::vector<VerifyReport::Damage>{};
  }
  // Changes a byte of a file behind its size and mtime.
  void Flip(std::uint32_t file, off_t at) {
    FlipByte(made_.FilePath(file), static_cast<std::uint64_t>(at));
  }
  bool NothingIsStaged() {
    const auto staged = HostFileSystem().List(JoinPath(store_->path(), ".staging"));
    return !staged.ok() || staged.value().empty();
  }
  static Status ReadWhole(const OpenedCheckpoint& opened, const std::string& key,
                          ReadVerify verify) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, opened.index().Find(key));
    std::string got(entry.meta.bytes(), '?');
    return opened.ReadBytes(entry, 0, got.data(), got.size(), verify, nullptr);
  }

  TempDir dir_;
  Random random_{TestSeed()};
  HandMade made_{dir_.Join("source"), random_, kManyKindsSizes};
  std::optional<Store> store_;
};

TEST_F(AdoptTest, AdoptedCheckpointReadsAndVerifies) {
  ASSERT_OK(Adopt("a"));
  EXPECT_TRUE(Damages("a").empty());
  ASSERT_OK_AND_ASSIGN(const auto opened, Open("a"));
  EXPECT_FALSE(opened->index().info().self_contained);
  EXPECT_EQ(opened->index().info().producer, "by hand");
  for (const auto& [key, bytes] : made_.all_bytes()) {
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(key));
    EXPECT_TRUE(entry.has_digest);
    EXPECT_FALSE(entry.pending);
    EXPECT_EQ(entry.digest, Crc64Extend(0, bytes.data(), bytes.size())) << key;
  }
  CompareWithHandMade(random_, *opened, made_, TestScale(6));
  UnmappedFileSystem fs;
  ASSERT_OK_AND_ASSIGN(const auto unmapped, OpenedCheckpoint::Open(fs, Path("a"), {}));
  CompareWithHandMade(random_, *unmapped, made_, TestScale(6));
  ASSERT_OK_AND_ASSIGN(const auto parts, opened->index().ObjectParts("object"));
  EXPECT_TRUE(parts[0].has_hash());
  std::string got(parts[0].length, '?');
  EXPECT_OK(opened->ReadObject(parts[0], 0, got.data(), got.size()));
}

TEST_F(AdoptTest, AdoptWithoutHashesReadsAndVerifies) {
  ASSERT_OK(Adopt("q", false));
  EXPECT_TRUE(Damages("q").empty());
  ASSERT_OK_AND_ASSIGN(const auto opened, Open("q"));
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("transposed"));
  EXPECT_FALSE(entry.has_digest);
  CompareWithHandMade(random_, *opened, made_, TestScale(3));
  ASSERT_OK_AND_ASSIGN(const auto parts, opened->index().ObjectParts("object"));
  EXPECT_FALSE(parts[0].has_hash());
  std::string got(parts[0].length, '?');
  EXPECT_OK(opened->ReadObject(parts[0], 0, got.data(), got.size()));
  // One that was adopted can be adopted again.
  AdoptOptions options;
  ASSERT_OK(AdoptSource(HostFileSystem(), *opened, *store_, "full", options));
  EXPECT_TRUE(Damages("full").empty());
  ASSERT_OK_AND_ASSIGN(const auto full, Open("full"));
  options.hashes = false;
  ASSERT_OK(AdoptSource(HostFileSystem(), *full, *store_, "q2", options));
  EXPECT_TRUE(Damages("q2").empty());
}

TEST_F(AdoptTest, ReadsAndVerifyDetectEveryChangedByte) {
  ASSERT_OK(Adopt("a"));
  // In a leaf of "large", transposed, whose stretch is [5, 1680005) of file 0.
  Flip(0, 1000000);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open("a"));
  const Status read = ReadWhole(*opened, "large", ReadVerify::kExtendLeaves);
  EXPECT_THAT(read, HasCode(Code::kDataLoss));
  EXPECT_THAT(read, HasMessage("tensor large [0:600, 0:700]: part/0.bin: byte 983045: checksum"));
  const auto damages = Damages("a");
  ASSERT_FALSE(damages.empty());
  bool found = false;
  for (const auto& damage : damages) {
    EXPECT_EQ(damage.file, "part/0.bin");
    found = found || (damage.object == "tensor large [0:600, 0:700]" && damage.offset == 983045);
  }
  EXPECT_TRUE(found);
  EXPECT_OK(ReadWhole(*opened, "permuted", ReadVerify::kExtendLeaves));
}

TEST_F(AdoptTest, VerifyReportsBytesWithoutHashes) {
  ASSERT_OK(Adopt("a"));
  ASSERT_OK(Adopt("q", false));
  const auto without = [&](const char* name) {
    const auto report = VerifyCheckpoint(HostFileSystem(), Path(name), {.threads = 2});
    EXPECT_OK(report);
    return report.value().bytes_without_hash;
  };
  EXPECT_EQ(without("a"), 0u);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open("q"));
  std::uint64_t stored = 0;
  for (std::uint32_t i = 0; i < opened->index().tensor_count(); ++i) {
    stored += opened->index().Extents(i).value()->DataBytes();
  }
  for (const ObjectRecord& object : opened->index().Objects().value()) stored += object.length;
  EXPECT_GT(stored, 0u);
  EXPECT_EQ(without("q"), stored);
}

TEST_F(AdoptTest, ChangedSourceFileIsDetected) {
  ASSERT_OK(Adopt("a"));
  ASSERT_OK(Adopt("q", false));
  ASSERT_OK_AND_ASSIGN(const auto before, Open("a"));
  ASSERT_OK(ReadWhole(*before, "packed", ReadVerify::kExtendLeaves));
  const std::string bytes = ReadWholeFile(made_.FilePath(0));
  WriteWholeFile(made_.FilePath(0), bytes + "more");
  for (const char* name : {"a", "q"}) {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open(name));
    const Status read = ReadWhole(*opened, "packed", ReadVerify::kExtendLeaves);
    EXPECT_THAT(read, HasCode(Code::kStale));
    EXPECT_THAT(read, HasMessage("part/0.bin: changed since it was adopted "
                                 "(size is 6291460 bytes, was 6291456)"));
    const auto damages = Damages(name);
    ASSERT_EQ(damages.size(), 1u);
    EXPECT_THAT(damages[0].reason, testing::HasSubstr("changed since it was adopted"));
    Result<VerifyReport> quick =
        VerifyCheckpoint(HostFileSystem(), Path(name), {.quick = true, .threads = 1});
    ASSERT_OK(quick);
    EXPECT_EQ(quick.value().damages.size(), 1u);
  }
  // Hashes tell that bytes which were read already open are still those.
  EXPECT_OK(ReadWhole(*before, "packed", ReadVerify::kExtendLeaves));
  EXPECT_THAT(ReadWhole(*before, "packed", ReadVerify::kOff), HasCode(Code::kStale));
  // And where they are not, why.
  std::string other = bytes;
  for (char& c : other) c = static_cast<char>(c ^ 1);
  WriteWholeFile(made_.FilePath(0), other);
  const Status damaged = ReadWhole(*before, "packed", ReadVerify::kExtendLeaves);
  EXPECT_THAT(damaged, HasCode(Code::kDataLoss));
  EXPECT_THAT(damaged, HasMessage("changed since it was adopted"));
}

// A hash proves the damage of an object even if its file has changed, as for tensors.
TEST_F(AdoptTest, ProvenDamageOfAnObjectIsNotReportedAsStale) {
  ASSERT_OK(Adopt("a"));
  ASSERT_OK(Adopt("q", false));
  const auto read = [](const OpenedCheckpoint& opened, ReadVerify verify) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, opened.index().ObjectParts("object"));
    std::string got(parts[0].length, '?');
    return opened.ReadObject(parts[0], 0, got.data(), got.size(), verify);
  };
  // Each checkpoint has the file open before it changes, because a later open is refused as stale.
  ASSERT_OK_AND_ASSIGN(const auto extended, Open("a"));
  ASSERT_OK_AND_ASSIGN(const auto once, Open("a"));
  ASSERT_OK_AND_ASSIGN(const auto unproven, Open("q"));
  for (const auto& opened : {extended, once, unproven}) {
    ASSERT_OK(read(*opened, ReadVerify::kExtendLeaves));
  }
  std::string other = ReadWholeFile(made_.FilePath(1));
  for (char& c : other) c = static_cast<char>(c ^ 1);
  WriteWholeFile(made_.FilePath(1), other + "more");
  for (const Status& status :
       {read(*extended, ReadVerify::kExtendLeaves), read(*once, ReadVerify::kOnce)}) {
    EXPECT_THAT(status, HasCode(Code::kDataLoss));
    EXPECT_THAT(status, HasMessage("checksum"));
    EXPECT_THAT(status, HasMessage("changed since it was adopted"));
  }
  EXPECT_THAT(read(*unproven, ReadVerify::kExtendLeaves), HasCode(Code::kStale));
}

TEST_F(AdoptTest, ErrorNamesTheMissingSource) {
  ASSERT_OK(Adopt("a"));
  ASSERT_EQ(rename(dir_.Join("source").c_str(), dir_.Join("elsewhere").c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open("a"));
  EXPECT_THAT(ReadWhole(*opened, "packed", ReadVerify::kOff),
              HasMessage(dir_.Join("source") + " does not exist"));
  const auto damages = Damages("a");
  ASSERT_EQ(damages.size(), 2u);  // One a file.
  EXPECT_THAT(damages[0].reason, testing::HasSubstr(dir_.Join("source") + " does not exist"));
}

TEST_F(AdoptTest, MissingIndexIsRebuilt) {
  ASSERT_OK(Adopt("a"));
  ASSERT_EQ(unlink(JoinPath(Path("a"), kIndexName).c_str()), 0);
  {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open("a"));
    EXPECT_TRUE(opened->index_was_rebuilt());
    CompareWithHandMade(random_, *opened, made_, 1);
  }
  ASSERT_OK_AND_ASSIGN(const auto findings, store_->Fsck({.rebuild = true}));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_TRUE(findings[0].repaired) << findings[0].problem;
  ASSERT_OK_AND_ASSIGN(const auto opened, Open("a"));
  EXPECT_FALSE(opened->index_was_rebuilt());
  CompareWithHandMade(random_, *opened, made_, 1);
}

TEST_F(AdoptTest, AdoptRefusesTensorsWithHoles) {
  made_.Add("hole", DType::kU8, {4, 6}, {{Region(Box::Make({0, 0}, {4, 2}).value()), 0, 10, {}}});
  const Status status = Adopt("a");
  EXPECT_THAT(status, HasCode(Code::kDataLoss));
  EXPECT_THAT(status, HasMessage("tensor hole: [0:4, 2:6] is stored in no chunk"));
  EXPECT_TRUE(NothingIsStaged());
}

TEST_F(AdoptTest, FailedAdoptLeavesNoStaging) {
  Random random(5);
  HandMade made(dir_.Join("cut"), random, {1000});
  made.Add("w", DType::kU8, {10, 10}, {{Region(Box::Whole({10, 10})), 0, 900, {1, 10}}});
  ASSERT_OK_AND_ASSIGN(const auto foreign, made.Open(HostFileSystem()));
  ASSERT_EQ(truncate(made.FilePath(0).c_str(), 950), 0);
  for (const bool hashes : {true, false}) {
    AdoptOptions options;
    options.hashes = hashes;
    const auto adopted = AdoptSource(HostFileSystem(), *foreign, *store_, "a", options);
    EXPECT_THAT(adopted, HasMessage("part/0.bin: changed since it was"));
    EXPECT_TRUE(NothingIsStaged());
    EXPECT_THAT(Open("a"), HasCode(Code::kNotFound));
  }
}

TEST_F(AdoptTest, ProgressReachesItsTotal) {
  ASSERT_OK_AND_ASSIGN(const auto foreign, made_.Open(HostFileSystem()));
  AdoptOptions options;
  options.threads = 1;
  std::uint64_t last = 0;
  std::uint64_t all = 0;
  options.watch = [&](std::uint64_t done, std::uint64_t total) {
    EXPECT_GE(done, last);
    last = done;
    all = total;
    return Status();
  };
  ASSERT_OK(AdoptSource(HostFileSystem(), *foreign, *store_, "a", options));
  EXPECT_EQ(last, all);
  EXPECT_GT(all, 0u);
  options.watch = [](std::uint64_t, std::uint64_t) { return Status(Code::kCancelled, "enough"); };
  EXPECT_EQ(AdoptSource(HostFileSystem(), *foreign, *store_, "b", options).status().code(),
            Code::kCancelled);
  EXPECT_EQ(store_->List().value().size(), 1U);
}

TEST_F(AdoptTest, OtherOwnersAdoptedCheckpointNeedsARoot) {
  if (geteuid() != 0) GTEST_SKIP() << "cannot give files away";
  ASSERT_OK(Adopt("a"));
  ASSERT_EQ(chown(JoinPath(Path("a"), "COMMIT").c_str(), 12345, 12345), 0);
  EXPECT_THAT(Open("a"), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(VerifyCheckpoint(HostFileSystem(), Path("a"), {.threads = 1}),
              HasCode(Code::kPermissionDenied));
  EXPECT_OK(OpenedCheckpoint::Open(HostFileSystem(), Path("a"), {.roots = {dir_.path()}}));
  EXPECT_OK(VerifyCheckpoint(HostFileSystem(), Path("a"), {.roots = {dir_.path()}, .threads = 1}));
}

TEST_F(AdoptTest, FsckReportsUntrustedAdoptionsAndContinues) {
  if (geteuid() != 0) GTEST_SKIP() << "cannot give files away";
  ASSERT_OK(Adopt("a"));
  ASSERT_OK(Adopt("b"));
  ASSERT_EQ(chown(JoinPath(Path("a"), "COMMIT").c_str(), 12345, 12345), 0);
  ASSERT_EQ(truncate(JoinPath(Path("b"), "index/index.sst").c_str(), 10), 0);
  const auto text_of = [&](const Store::FsckOptions& options) {
    const auto findings = store_->Fsck(options);
    EXPECT_OK(findings);
    std::string text;
    for (const auto& f : findings.value()) text += f.object + ": " + f.problem + "\n";
    return text;
  };
  const std::string refused = "a: not checked: " + Path("a") + ": its data are outside of it";
  EXPECT_THAT(text_of({}), testing::HasSubstr(refused));
  EXPECT_THAT(text_of({}), testing::HasSubstr("b: index: "));
  EXPECT_THAT(text_of({.roots = {dir_.path()}}), testing::Not(testing::HasSubstr("a: ")));
  // Then its data are checked too.
  ASSERT_EQ(truncate(made_.FilePath(0).c_str(), 100), 0);
  EXPECT_THAT(text_of({.roots = {dir_.path()}}), testing::HasSubstr("a: "));
}

// A file that the caller may not open may be whole; one that became a link to elsewhere is not what
// was adopted.
TEST_F(AdoptTest, UnreadableSourceIsNotReportedAsDamage) {
  ASSERT_OK(Adopt("a"));
  const std::string file = made_.FilePath(0);
  ObservedFileSystem refusing(HostFileSystem(), [&](const FileEvent& event) {
    const bool is_it =
        event.op == FileOp::kOpenRead && event.path.ends_with(file.substr(file.rfind('/')));
    return is_it ? Status::FromErrno(EACCES, "open", event.path) : Status();
  });
  EXPECT_THAT(VerifyCheckpoint(refusing, Path("a"), {}), HasCode(Code::kPermissionDenied));
  ASSERT_OK_AND_ASSIGN(const Store store, Store::Open(refusing, store_->path()));
  const auto unread = store.Fsck({});
  ASSERT_OK(unread);
  ASSERT_EQ(unread.value().size(), 1u);
  EXPECT_TRUE(unread.value()[0].unread) << unread.value()[0].problem;
  EXPECT_FALSE(unread.value()[0].damage) << unread.value()[0].problem;

  ASSERT_EQ(rename(file.c_str(), (file + ".away").c_str()), 0);
  ASSERT_EQ(symlink("/etc/passwd", file.c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                       VerifyCheckpoint(HostFileSystem(), Path("a"), {}));
  ASSERT_FALSE(report.damages.empty());
  EXPECT_THAT(report.damages[0].reason, testing::HasSubstr("leads out of"));
}

// The file can be opened when verify begins, and not when its data are read.
TEST_F(AdoptTest, SourceThatBecomesUnreadableIsNotReportedAsVerified) {
  ASSERT_OK(Adopt("a"));
  const std::string file = made_.FilePath(0);
  for (const int err : {EMFILE, EACCES, ENOENT}) {
    std::atomic<int> opens = 0;
    ObservedFileSystem refusing(HostFileSystem(), [&](const FileEvent& event) {
      const bool is_it =
          event.op == FileOp::kOpenRead && event.path.ends_with(file.substr(file.rfind('/')));
      return is_it && opens++ > 0 ? Status::FromErrno(err, "open", event.path) : Status();
    });
    const auto report = VerifyCheckpoint(refusing, Path("a"), {});
    EXPECT_GT(opens, 1);
    if (err == ENOENT) {
      ASSERT_OK(report);
      EXPECT_FALSE(report.value().damages.empty());
    } else {
      EXPECT_THAT(report, HasCode(Status::FromErrno(err, "", "").code()));
    }
  }
}

// The folder that the operator named is one in which somebody else makes links.
TEST_F(AdoptTest, LinksInATrustedRootAreNotFollowedOutOfIt) {
  if (geteuid() != 0) GTEST_SKIP() << "cannot give files away";
  ASSERT_OK(Adopt("a"));
  ASSERT_EQ(chown(JoinPath(Path("a"), "COMMIT").c_str(), 12345, 12345), 0);
  const std::string named = dir_.Join("theirs");
  ASSERT_EQ(mkdir(named.c_str(), 0755), 0);
  ASSERT_EQ(rename(dir_.Join("source").c_str(), JoinPath(named, "source").c_str()), 0);
  const auto open = [&] {
    return OpenedCheckpoint::Open(HostFileSystem(), Path("a"), {.roots = {named}});
  };
  // Its root is elsewhere, whatever leads there.
  EXPECT_THAT(open(), HasCode(Code::kPermissionDenied));
  ASSERT_EQ(rename(JoinPath(named, "source").c_str(), dir_.Join("source").c_str()), 0);
  const std::vector<std::string> all = {dir_.path()};
  ASSERT_OK_AND_ASSIGN(const auto before,
                       OpenedCheckpoint::Open(HostFileSystem(), Path("a"), {.roots = all}));
  const std::string key = made_.all_bytes().begin()->first;
  EXPECT_OK(ReadWhole(*before, key, ReadVerify::kExtendLeaves));
  // The same bytes, sizes and times, out of what was named.
  const TempDir elsewhere;
  ASSERT_EQ(rename(dir_.Join("source").c_str(), elsewhere.Join("real").c_str()), 0);
  ASSERT_EQ(symlink(elsewhere.Join("real").c_str(), dir_.Join("source").c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const auto after,
                       OpenedCheckpoint::Open(HostFileSystem(), Path("a"), {.roots = all}));
  EXPECT_THAT(ReadWhole(*after, key, ReadVerify::kExtendLeaves), HasCode(Code::kStale));
  ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                       VerifyCheckpoint(HostFileSystem(), Path("a"), {.roots = all, .threads = 1}));
  EXPECT_FALSE(report.damages.empty());
  // Whoever is trusted may have a link there.
  ASSERT_EQ(chown(JoinPath(Path("a"), "COMMIT").c_str(), 0, 0), 0);
  ASSERT_OK_AND_ASSIGN(const auto trusted, Open("a"));
  EXPECT_OK(ReadWhole(*trusted, key, ReadVerify::kExtendLeaves));
}

TEST(CheckpointInfoTest, RootMustBeANormalizedAbsolutePath) {
  const auto decoded = [](const std::string& root, bool from_memory = false) {
    CheckpointInfo info;
    info.self_contained = false;
    info.root = root;
    ByteWriter out;
    EncodeInfo(out, info);
    ByteReader in(out.bytes(), "info");
    return DecodeInfo(in, from_memory).status();
  };
  for (const char* root : {"/", "/a", "/a/b c"}) EXPECT_OK(decoded(root));
  // "/named/../etc" would lie in "/named/".
  for (const char* root : {"", "a", "/a/../b", "/a/..", "/a/", "//a", "/a//b", "/./a"}) {
    EXPECT_THAT(decoded(root), HasCode(Code::kDataLoss)) << root;
    EXPECT_THAT(decoded(root, true), HasCode(Code::kDataLoss)) << root;
  }
  // Behind a scheme only what is read in place, and never stored.
  for (const char* root : {"https://host/a", "s3://bucket", "plain:///", "plain:///a/b"}) {
    EXPECT_OK(decoded(root, true)) << root;
    EXPECT_THAT(decoded(root), HasCode(Code::kDataLoss)) << root;
  }
  for (const char* root : {"s3://", "://a", "/a://b", "s3://a//b", "s3://a/../b", "s3:///.."}) {
    EXPECT_THAT(decoded(root, true), HasCode(Code::kDataLoss)) << root;
  }
}

TEST(StoredRangeScannerTest, BoxPastTheEndOfItsPieceIsDataLoss) {
  const TempDir dir;
  WriteWholeFile(dir.Join("f"), std::string(4096, 'x'));
  ASSERT_OK_AND_ASSIGN(const auto file, HostFileSystem().OpenRead(dir.Join("f")));
  const auto read = [&](std::uint64_t length, const Dims& strides) {
    const Dims shape = {4, 100};
    const std::vector<PlacedBox> boxes = {{Box::Whole(shape), 0, strides}};
    StoredRangeScanner reader;
    StoredRangeScanner::Findings found;
    return reader.Read(*file, 0, length, boxes, shape, nullptr, found);
  };
  EXPECT_OK(read(400, {100, 1}));
  EXPECT_THAT(read(399, {100, 1}), HasCode(Code::kDataLoss));
  EXPECT_OK(read(1600, {1, 16}));
  EXPECT_THAT(read(1500, {1, 16}), HasCode(Code::kDataLoss));
}

}  // namespace
}  // namespace tensormount
