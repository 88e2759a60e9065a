// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdio>
#include <functional>
#include <map>
#include <sys/stat.h>
#include <unistd.h>

#include "tensormount/checkpoint.h"

#include "base/coding.h"
#include "index/read/checkpoint.h"
#include "index/records/memory_table.h"
#include "index/records/sst_table.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

BuildSpec SmallSpec(std::uint64_t seed = 3) {
  Random random(seed);
  BuildSpec spec = RandomSpec(random, 3, 500);
  spec.writers = 2;
  for (std::size_t t = 0; t < 3; ++t) {
    spec.partitions[t] = RandomPartition(random, spec.tensors[t].shape, 2);
  }
  return spec;
}

class OpenTest : public testing::Test {
 protected:
  void SetUp() override {
    spec_ = SmallSpec();
    Result<BuiltCheckpoint> built = BuildCheckpoint(HostFileSystem(), path(), spec_);
    ASSERT_OK(built);
    built_ = std::move(built).value();
  }
  std::string path() { return dir_.Join("c"); }
  std::string Below(const std::string& name) { return JoinPath(path(), name); }
  Result<std::shared_ptr<OpenedCheckpoint>> Open() {
    return OpenedCheckpoint::Open(HostFileSystem(), path(), {});
  }
  // Whether everything reads as it was written.
  testing::AssertionResult Whole(const OpenedCheckpoint& opened) {
    for (const RandomTensor& tensor : spec_.tensors) {
      const Result<TensorEntry> entry = opened.index().Find(tensor.key);
      if (!entry.ok()) return testing::AssertionFailure() << entry.status().ToString();
      std::string got(tensor.bytes.size(), '?');
      const Status read = opened.ReadBytes(entry.value(), 0, got.data(), got.size(),
                                           ReadVerify::kExtendLeaves, nullptr);
      if (!read.ok()) return testing::AssertionFailure() << read.ToString();
      if (got != tensor.bytes) return testing::AssertionFailure() << tensor.key << ": other bytes";
    }
    return testing::AssertionSuccess();
  }
  std::vector<VerifyReport::Damage> Damages() {
    Result<VerifyReport> report = VerifyCheckpoint(HostFileSystem(), path(), {.threads = 1});
    EXPECT_OK(report);
    return report.ok() ? report.value().damages : std::vector<VerifyReport::Damage>{};
  }
  // An index of other content, listed by COMMIT: every checksum holds.
  void ReplaceIndex(const Inventory& inventory) {
    ASSERT_OK(HostFileSystem().RemoveFile(Below(std::string(kIndexName))));
    ASSERT_OK_AND_ASSIGN(
        const CommitRecord::Entry entry,
        CheckpointIndex::WriteSst(HostFileSystem(), inventory, built_.commit.content_root, path(),
                                  std::string(kIndexName)));
    for (CommitRecord::Entry& file : built_.commit.files) {
      if (file.name == kIndexName) file = entry;
    }
    WriteWholeFile(Below("COMMIT"), EncodeCommit(built_.commit));
  }
  void Flip(const std::string& name, std::size_t byte, int bit) {
    std::string bytes = ReadWholeFile(Below(name));
    bytes[byte] = static_cast<char>(bytes[byte] ^ (1 << bit));
    WriteWholeFile(Below(name), bytes);
  }

  TempDir dir_;
  BuildSpec spec_;
  BuiltCheckpoint built_;
};

// A record that is not what its kind must be is damage to whoever needs it, though the file is as
// COMMIT says: a list never just ends there.
TEST_F(OpenTest, IndexRecordOfAWrongKindIsDataLoss) {
  const std::string name(kIndexName);
  ASSERT_OK_AND_ASSIGN(const auto records, CheckpointIndex::RecordsOf(built_.inventory));
  ASSERT_OK_AND_ASSIGN(const auto good, SstTable::Open(HostFileSystem(), Below(name)));
  const SstIdentity identity = good->identity();
  // The index with a byte more in the last record of this kind; in none for "".
  const auto open = [&](std::string_view kind) -> Result<std::shared_ptr<const CheckpointIndex>> {
    std::vector<std::pair<std::string, std::string>> all;
    EXPECT_OK(records->Scan("", "", [&](std::string_view key, std::string_view value) {
      all.emplace_back(key, value);
      return true;
    }));
    bool changed = kind.empty();
    for (auto at = all.rbegin(); at != all.rend() && !changed; ++at) {
      changed = at->first.starts_with(kind);
      if (changed) at->second += '/';
    }
    EXPECT_TRUE(changed) << kind;
    EXPECT_OK(HostFileSystem().RemoveFile(Below(name)));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        CommitRecord::Entry entry,
        SstTable::Write(HostFileSystem(), Below(name),
                        [&](const SstTable::Emit& emit) -> Result<SstIdentity> {
                          for (const auto& [key, value] : all) {
                            const Status put = emit(key, value);
                            if (!put.ok()) return put;
                          }
                          return identity;
                        }));
    entry.name = name;
    for (CommitRecord::Entry& file : built_.commit.files) {
      if (file.name == kIndexName) file = entry;
    }
    return CheckpointIndex::OpenSst(HostFileSystem(), path(), built_.commit, ~std::uint64_t{0}, {});
  };
  ASSERT_OK_AND_ASSIGN(const auto whole, open(""));
  EXPECT_OK(whole->Objects());
  EXPECT_OK(whole->Extras());
  EXPECT_OK(whole->CommonRecords());
  EXPECT_THAT(open("f"), HasCode(Code::kDataLoss));
  EXPECT_THAT(open("m"), HasCode(Code::kDataLoss));
  ASSERT_OK_AND_ASSIGN(const auto objects, open("o"));
  EXPECT_THAT(objects->Objects(), HasCode(Code::kDataLoss));
  EXPECT_THAT(objects->ObjectParts("rng"), HasCode(Code::kDataLoss));
  ASSERT_OK_AND_ASSIGN(const auto extras, open("x"));
  EXPECT_THAT(extras->Extras(), HasCode(Code::kDataLoss));
  ASSERT_OK_AND_ASSIGN(const auto common, open("c"));
  EXPECT_THAT(common->CommonRecords(), HasCode(Code::kDataLoss));
}

TEST_F(OpenTest, DirectoryWithoutACheckpointIsNotFound) {
  EXPECT_THAT(OpenedCheckpoint::Open(HostFileSystem(), dir_.path(), {}), HasCode(Code::kNotFound));
  EXPECT_THAT(OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("x"), {}),
              HasCode(Code::kNotFound));
  EXPECT_THAT(VerifyCheckpoint(HostFileSystem(), dir_.path(), {}), HasCode(Code::kNotFound));
}

TEST_F(OpenTest, OpenCheckpointHoldsALock) {
  ASSERT_OK_AND_ASSIGN(auto opened, Open());
  ASSERT_OK_AND_ASSIGN(const auto other, HostFileSystem().OpenRead(Below("COMMIT")));
  EXPECT_THAT(other->TryLockExclusive(), HasCode(Code::kBusy));
  opened.reset();
  EXPECT_OK(other->TryLockExclusive());
  EXPECT_THAT(Open(), HasCode(Code::kStale));
  // Gc and repair both take this lock, and a reader cannot tell which of them has it.
  EXPECT_THAT(Open(), HasMessage("a repair is replacing its COMMIT"));
}

TEST_F(OpenTest, OneDamagedCopyOfCommitIsAWarning) {
  for (const std::size_t byte : {50u, 4096u + 50u}) {
    Flip("COMMIT", byte, 3);
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    ASSERT_EQ(opened->warnings().size(), 1u);
    EXPECT_THAT(opened->warnings()[0], testing::HasSubstr("copy is damaged: checksum mismatch"));
    EXPECT_TRUE(Whole(*opened));
    const auto damages = Damages();
    ASSERT_EQ(damages.size(), 1u);
    EXPECT_EQ(damages[0].object, "COMMIT");
    Flip("COMMIT", byte, 3);
  }
  Flip("COMMIT", 50, 3);
  Flip("COMMIT", 4096 + 50, 3);
  EXPECT_THAT(Open(), HasCode(Code::kDataLoss));
  EXPECT_EQ(Damages().size(), 1u);
}

TEST_F(OpenTest, NewerFormatIsRefusedWithAMessage) {
  built_.commit.incompatible = 4;
  ASSERT_OK(HostFileSystem().RemoveFile(Below("COMMIT")));
  WriteWholeFile(Below("COMMIT"), EncodeCommit(built_.commit));
  EXPECT_THAT(Open(), HasCode(Code::kUnsupported));
  EXPECT_THAT(Open(), HasMessage("newer format: incompatible feature bits 0x4"));
  EXPECT_THAT(VerifyCheckpoint(HostFileSystem(), path(), {}), HasCode(Code::kUnsupported));
}

// Flips anywhere in the index: seen at open (then rebuilt), or by the read that meets them, or by
// verify; never other bytes.
TEST_F(OpenTest, FlippedIndexBytesNeverGiveWrongData) {
  const std::string name(kIndexName);
  const std::string whole = ReadWholeFile(Below(name));
  Random random(TestSeed());
  for (int i = 0; i < TestScale(120); ++i) {
    const auto byte =
        static_cast<std::size_t>(random.Int(0, static_cast<std::int64_t>(whole.size()) - 1));
    std::string flipped = whole;
    flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << random.Int(0, 7)));
    WriteWholeFile(Below(name), flipped);
    const auto opened = Open();
    ASSERT_OK(opened);
    ASSERT_TRUE(Whole(*opened.value())) << byte;
    ASSERT_FALSE(Damages().empty()) << byte;
  }
  for (std::size_t size = 0; size < whole.size(); size += whole.size() / 50 + 1) {
    WriteWholeFile(Below(name), whole.substr(0, size));
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    ASSERT_TRUE(opened->index_was_rebuilt());
    ASSERT_TRUE(Whole(*opened));
  }
}

// The same where only the tail is looked at when it is opened: what is damaged shows as it is read,
// and is read from elsewhere then.
TEST(OpenLargeIndex, FlippedIndexIsReplacedByTheManifests) {
  TempDir dir;
  BuildSpec spec;
  Random random(5);
  for (int t = 0; t < 400; ++t) {
    RandomTensor tensor{.key = "t" + std::to_string(t), .dtype = DType::kU8, .shape = {8}};
    tensor.bytes = random.Bytes(8);
    spec.tensors.push_back(tensor);
    spec.partitions.push_back({{}, {}});
    for (std::int64_t i = 0; i < 8; ++i) {
      spec.partitions.back()[static_cast<std::size_t>(i % 2)].push_back(
          Region(Box::Make({i}, {1}).value()));
    }
  }
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
  const std::string path = dir.Join("c/index/index.sst");
  const std::string whole = ReadWholeFile(path);
  ASSERT_GT(whole.size(), 3 * kIndexTailBytes);
  int seen_by_read = 0;
  for (int i = 0; i < TestScale(25); ++i) {
    std::string flipped = whole;
    const auto byte = static_cast<std::size_t>(
        random.Int(0, static_cast<std::int64_t>(whole.size() - kIndexTailBytes) - 1));
    flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << random.Int(0, 7)));
    WriteWholeFile(path, flipped);
    // By default so small an index is compared with its hash at once.
    ASSERT_OK_AND_ASSIGN(const auto checked,
                         OpenedCheckpoint::Open(HostFileSystem(), dir.Join("c"), {}));
    ASSERT_EQ(checked->warnings().size(), 1u);
    ASSERT_TRUE(checked->index_was_rebuilt());
    OpenedCheckpoint::Options options;
    options.check_index_bytes = 0;
    ASSERT_OK_AND_ASSIGN(const auto opened,
                         OpenedCheckpoint::Open(HostFileSystem(), dir.Join("c"), options));
    // By scans and by single records, whichever comes first.
    std::uint32_t next = 0;
    const auto scan = [&] {
      return opened->index().ForEachTensor(
          0, [&](const TensorEntry& entry) { return entry.ordinal == next++; });
    };
    if (i % 2 == 0) {
      ASSERT_OK(scan());
      ASSERT_EQ(next, spec.tensors.size());
    }
    for (const RandomTensor& tensor : spec.tensors) {
      ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(tensor.key));
      std::string got(8, '?');
      ASSERT_OK(opened->ReadBytes(entry, 0, got.data(), 8, ReadVerify::kOff, nullptr));
      ASSERT_EQ(got, tensor.bytes);
    }
    next = 0;
    ASSERT_OK(scan());
    ASSERT_EQ(next, spec.tensors.size());
    EXPECT_THAT(opened->index().Find("none"), HasCode(Code::kNotFound));
    if (!opened->warnings().empty()) ++seen_by_read;
    ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                         VerifyCheckpoint(HostFileSystem(), dir.Join("c"), {.quick = true}));
    ASSERT_EQ(report.damages.size(), 1u);
  }
  EXPECT_GT(seen_by_read, 0);
}

// An index that is no file, leads elsewhere or cannot be read is as good as none.
TEST_F(OpenTest, IndexThatIsNotAFileIsRebuilt) {
  const std::string index = Below(std::string(kIndexName));
  const std::string bytes = ReadWholeFile(index);
  WriteWholeFile(dir_.Join("elsewhere"), bytes);
  const std::vector<std::function<int()>> ways = {
      [&] { return ::mkdir(index.c_str(), 0755); },
      [&] { return ::mkfifo(index.c_str(), 0644); },
      [&] { return ::symlink(dir_.Join("elsewhere").c_str(), index.c_str()); },
      [&] { return ::symlink("index.sst", index.c_str()); },
  };
  for (std::size_t way = 0; way < ways.size(); ++way) {
    ASSERT_OK(HostFileSystem().RemoveTree(index));
    ASSERT_EQ(ways[way](), 0);
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    EXPECT_TRUE(opened->index_was_rebuilt()) << way;
    EXPECT_TRUE(Whole(*opened)) << way;
  }
  // Its folder elsewhere: nothing below a checkpoint is followed out of it.
  ASSERT_OK(HostFileSystem().RemoveTree(Below("index")));
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("folder")));
  WriteWholeFile(dir_.Join("folder/index.sst"), bytes);
  ASSERT_EQ(::symlink(dir_.Join("folder").c_str(), Below("index").c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_TRUE(opened->index_was_rebuilt());
  // Likewise manifests, of which there is no second copy.
  ASSERT_EQ(::rename(Below("manifest").c_str(), dir_.Join("manifests").c_str()), 0);
  ASSERT_EQ(::symlink(dir_.Join("manifests").c_str(), Below("manifest").c_str()), 0);
  EXPECT_THAT(Open(), HasCode(Code::kDataLoss));
}

// Data files that are something else are damage, to readers and to verify; none is followed.
TEST_F(OpenTest, DataFileThatIsNotARegularFileIsDamage) {
  ASSERT_OK_AND_ASSIGN(const auto files, HostFileSystem().List(Below("data")));
  ASSERT_FALSE(files.empty());
  const std::string file = Below("data/" + files[0].name);
  ASSERT_EQ(::rename(file.c_str(), dir_.Join("elsewhere").c_str()), 0);
  const std::vector<std::function<int()>> ways = {
      [&] { return 0; },  // Nothing is there.
      [&] { return ::mkdir(file.c_str(), 0755); },
      [&] { return ::mkfifo(file.c_str(), 0644); },
      [&] { return ::symlink(dir_.Join("elsewhere").c_str(), file.c_str()); },
      [&] { return ::mknod(file.c_str(), S_IFSOCK | 0644, 0); },
  };
  for (std::size_t way = 0; way < ways.size(); ++way) {
    SCOPED_TRACE(way);
    ASSERT_EQ(ways[way](), 0);
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    int failed = 0;
    for (const RandomTensor& tensor : spec_.tensors) {
      ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(tensor.key));
      std::string got(tensor.bytes.size(), '?');
      const Status read =
          opened->ReadBytes(entry, 0, got.data(), got.size(), ReadVerify::kOnce, nullptr);
      if (read.ok()) continue;
      ++failed;
      EXPECT_THAT(read, HasCode(Code::kDataLoss));
      EXPECT_THAT(read, HasMessage("data/" + files[0].name));
    }
    EXPECT_GT(failed, 0);
    ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                         VerifyCheckpoint(HostFileSystem(), path(), {.threads = 1}));
    EXPECT_FALSE(report.damages.empty());
    ASSERT_OK(HostFileSystem().RemoveTree(file));
  }
  // Their folder elsewhere.
  ASSERT_EQ(::rename(dir_.Join("elsewhere").c_str(), file.c_str()), 0);
  ASSERT_EQ(::rename(Below("data").c_str(), dir_.Join("moved").c_str()), 0);
  ASSERT_EQ(::symlink(dir_.Join("moved").c_str(), Below("data").c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  ASSERT_OK_AND_ASSIGN(const VerifyReport report, VerifyCheckpoint(HostFileSystem(), path(), {}));
  EXPECT_GT(report.damages.size(), spec_.tensors.size() / 2) << "nothing below it is read";
}

// Where data cannot be read for want of descriptors or rights, verify knows nothing of them.
TEST_F(OpenTest, UnreadableDataIsNotReportedAsDamage) {
  for (const int err : {EMFILE, EACCES, ENOMEM, ETIMEDOUT, EIO}) {
    SCOPED_TRACE(std::strerror(err));
    for (const FileOp op : {FileOp::kOpenRead, FileOp::kRead}) {
      ObservedFileSystem bad(HostFileSystem(), [&](const FileEvent& event) {
        const bool hit = event.op == op && event.path.find("/data/") != std::string::npos;
        return hit ? Status::FromErrno(err, "open", event.path) : Status();
      });
      const auto report = VerifyCheckpoint(bad, path(), {.threads = 2});
      if (err == EIO) {
        ASSERT_OK(report);
        EXPECT_FALSE(report.value().damages.empty());
        continue;
      }
      EXPECT_THAT(report, HasCode(Status::FromErrno(err, "", "").code()));
      // Beside damage it is a warning.
      const std::string stranger = Below("stranger");
      WriteWholeFile(stranger, "1");
      const auto both = VerifyCheckpoint(bad, path(), {.threads = 2});
      ASSERT_OK(both);
      EXPECT_EQ(both.value().damages.size(), 1u);
      EXPECT_THAT(both.value().warnings,
                  testing::Contains(testing::HasSubstr("not everything could be")));
      ASSERT_EQ(::unlink(stranger.c_str()), 0);
    }
  }
}

// One page of COMMIT that the disk does not give costs one copy.
TEST_F(OpenTest, UnreadablePageOfCommitLosesOneCopy) {
  const std::uint64_t size = ReadWholeFile(Below("COMMIT")).size();
  ASSERT_EQ(size % 8192, 0u);
  for (std::uint64_t page = 0; page < size; page += 4096) {
    ObservedFileSystem bad(HostFileSystem(), [&](const FileEvent& event) {
      const bool hit = event.op == FileOp::kRead && event.path.ends_with("/COMMIT") &&
                       event.offset < page + 4096 && event.offset + event.size > page;
      return hit ? Status::FromErrno(EIO, "read", event.path) : Status();
    });
    ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(bad, path(), {}));
    EXPECT_THAT(opened->warnings(), testing::ElementsAre(testing::HasSubstr("copy is damaged")));
    EXPECT_TRUE(Whole(*opened));
    ASSERT_OK_AND_ASSIGN(const VerifyReport report, VerifyCheckpoint(bad, path(), {.threads = 1}));
    ASSERT_EQ(report.damages.size(), 1u);
    EXPECT_EQ(report.damages[0].file, "COMMIT");
  }
}

// What is open is read to its end under whatever name, or none.
TEST_F(OpenTest, RemovedOrReplacedCheckpointReadsToTheEnd) {
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  ASSERT_OK(HostFileSystem().RenameNoReplace(path(), dir_.Join("trash")));
  EXPECT_TRUE(Whole(*opened));
  BuildSpec other = SmallSpec(4);
  other.uuid.low ^= 1;
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), path(), other));
  ASSERT_OK_AND_ASSIGN(const auto again, Open());
  EXPECT_NE(again->commit()->record.uuid, opened->commit()->record.uuid);
  EXPECT_TRUE(Whole(*opened));
}

TEST_F(OpenTest, VerifyFinishesTheCheckpointItStarted) {
  VerifyOptions options;
  options.threads = 1;
  bool moved = false;
  options.watch = [&](std::uint64_t, std::uint64_t) {
    if (!moved) moved = HostFileSystem().RenameNoReplace(path(), dir_.Join("trash")).ok();
    return Status();
  };
  ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                       VerifyCheckpoint(HostFileSystem(), path(), options));
  EXPECT_TRUE(moved);
  EXPECT_TRUE(report.damages.empty()) << report.damages[0].reason;
}

// It is no finding about the checkpoint.
TEST_F(OpenTest, VerifyCanBeCancelledByItsWatcher) {
  VerifyOptions options;
  std::atomic<int> asked = 0;
  options.watch = [&](std::uint64_t, std::uint64_t) {
    ++asked;
    return Status(Code::kCancelled, "enough");
  };
  const auto report = VerifyCheckpoint(HostFileSystem(), path(), options);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), Code::kCancelled);
  EXPECT_GE(asked, 1);
}

// Errors name files as people know them, not by the descriptor that leads there.
TEST_F(OpenTest, ErrorsNameTheCheckpoint) {
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  const std::string file = Below(opened->index().files()[0].name);
  ASSERT_OK(HostFileSystem().RemoveTree(file));
  ASSERT_EQ(::mkdir(file.c_str(), 0755), 0);
  EXPECT_THAT(opened->OpenFile(0), HasMessage(file));
}

TEST_F(OpenTest, IndexOfAnotherCheckpointIsNotUsed) {
  // Same content and length, another uuid.
  BuildSpec other = spec_;
  other.uuid.low ^= 1;
  ASSERT_OK_AND_ASSIGN(const BuiltCheckpoint built,
                       BuildCheckpoint(HostFileSystem(), dir_.Join("other"), other));
  WriteWholeFile(Below(std::string(kIndexName)),
                 ReadWholeFile(JoinPath(built.directory, kIndexName)));
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_TRUE(opened->index_was_rebuilt());
  EXPECT_TRUE(Whole(*opened));
  // Even where COMMIT was made to list its length and hashes.
  for (CommitRecord::Entry& entry : built_.commit.files) {
    if (entry.name == kIndexName) entry = *built.commit.Find(kIndexName);
  }
  WriteWholeFile(Below("COMMIT"), EncodeCommit(built_.commit));
  ASSERT_OK_AND_ASSIGN(const auto again, Open());
  EXPECT_TRUE(again->index_was_rebuilt());
  EXPECT_THAT(again->warnings()[0], testing::HasSubstr("it is the index of another checkpoint"));
}

TEST_F(OpenTest, VerifyDetectsFlippedManifestBytes) {
  Random random(TestSeed() + 1);
  for (const char* name :
       {"manifest/rank-0.tmm", "manifest/rank-1.tmm", "manifest/coordinator.tmm"}) {
    const std::string whole = ReadWholeFile(Below(name));
    for (int i = 0; i < TestScale(25); ++i) {
      std::string flipped = whole;
      const auto byte =
          static_cast<std::size_t>(random.Int(0, static_cast<std::int64_t>(whole.size()) - 1));
      flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << random.Int(0, 7)));
      WriteWholeFile(Below(name), flipped);
      ASSERT_OK(Open());
      const auto damages = Damages();
      ASSERT_FALSE(damages.empty()) << name << byte;
      EXPECT_EQ(damages[0].object, name);
    }
    WriteWholeFile(Below(name), whole.substr(0, whole.size() / 2));
    ASSERT_FALSE(Damages().empty());
    // Neither index nor manifests: refused, not guessed.
    const std::string index = ReadWholeFile(Below(std::string(kIndexName)));
    WriteWholeFile(Below(std::string(kIndexName)), index.substr(1));
    EXPECT_THAT(Open(), HasCode(Code::kDataLoss));
    WriteWholeFile(Below(std::string(kIndexName)), index);
    WriteWholeFile(Below(name), whole);
  }
  EXPECT_TRUE(Damages().empty());
}

TEST_F(OpenTest, VerifyDetectsEveryFlippedDataByte) {
  for (const FileRecord& file : built_.inventory.files) {
    const std::string whole = ReadWholeFile(Below(file.name));
    for (std::size_t byte = 0; byte < whole.size(); byte += 1 + whole.size() / 150) {
      Flip(file.name, byte, static_cast<int>(byte % 8));
      const auto damages = Damages();
      ASSERT_FALSE(damages.empty()) << file.name << byte;
      EXPECT_EQ(damages[0].file, file.name);
      WriteWholeFile(Below(file.name), whole);
    }
  }
  EXPECT_TRUE(Damages().empty());
}

TEST_F(OpenTest, VerifyReportsAnUnreadableIndexAndContinues) {
  ObservedFileSystem sick(HostFileSystem(), [](const FileEvent& event) {
    const bool index = event.path.find("/index/") != std::string::npos;
    return index && event.op == FileOp::kRead ? Status::FromErrno(EIO, "read", event.path)
                                              : Status();
  });
  const Result<VerifyReport> report = VerifyCheckpoint(sick, path(), {.threads = 1});
  ASSERT_OK(report);
  ASSERT_FALSE(report.value().damages.empty());
  EXPECT_EQ(report.value().damages[0].object, "index");
  EXPECT_THAT(report.value().damages[0].reason, testing::HasSubstr("Input/output error"));
  EXPECT_GT(report.value().chunks, 0u);  // The rest was checked all the same.
}

TEST_F(OpenTest, VerifyReportsUnexpectedFiles) {
  WriteWholeFile(Below("data/stranger"), "x");
  WriteWholeFile(Below("note.txt"), "x");
  ASSERT_OK(HostFileSystem().CreateDirectory(Below("more")));
  const auto damages = Damages();
  ASSERT_EQ(damages.size(), 3u);
  for (const auto& damage : damages)
    EXPECT_EQ(damage.reason, "the file is not part of this checkpoint");
  EXPECT_EQ(damages[0].object, "data/stranger");
}

TEST_F(OpenTest, VerifyDetectsWrongIndexWithValidChecksums) {
  // Of content with another mtime.
  Inventory inventory = built_.inventory;
  inventory.tensors[0].mtime += 1;
  ReplaceIndex(inventory);
  const auto damages = Damages();
  ASSERT_EQ(damages.size(), 1u);
  EXPECT_THAT(damages[0].reason, testing::HasSubstr("1 of "));
}

TEST_F(OpenTest, ForeignFilesAreReadOnlyBelowATrustedRoot) {
  // Under right checksums, a record that names a file elsewhere.
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("root")));
  const std::string theirs = dir_.Join("root/theirs");
  Inventory inventory = built_.inventory;
  WriteWholeFile(theirs, std::string(inventory.files[0].length, 's'));
  ASSERT_OK_AND_ASSIGN(const FileInfo info, HostFileSystem().Stat(theirs));
  inventory.info.self_contained = false;
  inventory.info.root = dir_.Join("root");
  FileRecord& file = inventory.files[0];
  file.name = "theirs";
  file.placement = Placement::kForeign;
  file.mtime_seconds = info.mtime_seconds;
  file.mtime_nanoseconds = info.mtime_nanoseconds;
  ReplaceIndex(inventory);
  {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    ASSERT_OK(opened->OpenFile(0).status());
    WriteWholeFile(theirs, "longer or shorter");
    EXPECT_THAT(opened->OpenFile(0).status(), HasCode(Code::kStale));
    // A link out of the root.
    ASSERT_EQ(unlink(theirs.c_str()), 0);
    WriteWholeFile(dir_.Join("secret"), std::string(file.length, 's'));
    ASSERT_EQ(symlink("../secret", theirs.c_str()), 0);
    EXPECT_FALSE(opened->OpenFile(0).ok());
  }
  // Without a root there is nothing that they could be below.
  inventory.info.self_contained = true;
  ReplaceIndex(inventory);
  {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    EXPECT_TRUE(opened->index_was_rebuilt());
    EXPECT_NE(opened->index().files()[0].placement, Placement::kForeign);
  }
  inventory.info.self_contained = false;
  ReplaceIndex(inventory);
  // COMMIT of somebody else, whom the operator does not vouch for.
  if (geteuid() != 0) GTEST_SKIP() << "cannot give files away";
  ASSERT_EQ(chown(Below("COMMIT").c_str(), 12345, 12345), 0);
  EXPECT_THAT(Open(), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(Open(), HasMessage("--root"));
  const auto open = [&](const std::string& root) {
    return OpenedCheckpoint::Open(HostFileSystem(), path(), {.roots = {dir_.Join(root)}});
  };
  EXPECT_OK(open("root"));
  EXPECT_OK(open(""));
  EXPECT_THAT(open("roo"), HasCode(Code::kPermissionDenied));
}

TEST_F(OpenTest, LinksInACheckpointAreNotFollowed) {
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  ASSERT_EQ(rename(Below("data").c_str(), dir_.Join("elsewhere").c_str()), 0);
  ASSERT_EQ(symlink(dir_.Join("elsewhere").c_str(), Below("data").c_str()), 0);
  EXPECT_FALSE(Whole(*opened));
  ASSERT_EQ(unlink(Below("data").c_str()), 0);
  ASSERT_EQ(rename(dir_.Join("elsewhere").c_str(), Below("data").c_str()), 0);
  EXPECT_TRUE(Whole(*opened));
}

TEST_F(OpenTest, IndexDoesNotContainTheHostName) {
  const std::string bytes = ReadWholeFile(Below(std::string(kIndexName)));
  char host[256] = {};
  ASSERT_EQ(gethostname(host, sizeof(host) - 1), 0);
  if (std::string(host).size() >= 4) {
    EXPECT_EQ(bytes.find(host), std::string::npos);
  }
  EXPECT_EQ(bytes.find(dir_.path()), std::string::npos);
}

TEST_F(OpenTest, FailedIndexWriteIsAnError) {
  ASSERT_OK(HostFileSystem().RemoveFile(Below(std::string(kIndexName))));
  for (const FileOp op : {FileOp::kCreate, FileOp::kWrite, FileOp::kSync}) {
    ObservedFileSystem failing(HostFileSystem(), [&](const FileEvent& event) {
      return event.op == op ? Status::FromErrno(ENOSPC, "write", event.path) : Status();
    });
    EXPECT_THAT(CheckpointIndex::WriteSst(failing, built_.inventory, built_.commit.content_root,
                                          path(), std::string(kIndexName)),
                HasCode(Code::kResourceExhausted))
        << FileOpName(op);
    (void)HostFileSystem().RemoveFile(Below(std::string(kIndexName)));
  }
  int syncs = 0;
  ObservedFileSystem counting(HostFileSystem(), {}, [&](const FileEvent& event) {
    if (event.op == FileOp::kSync) ++syncs;
  });
  ASSERT_OK(CheckpointIndex::WriteSst(counting, built_.inventory, built_.commit.content_root,
                                      path(), std::string(kIndexName)));
  EXPECT_EQ(syncs, 1);
}

TEST_F(OpenTest, SafetensorsHeaderAlignsTensors) {
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  ASSERT_OK_AND_ASSIGN(const std::string header, opened->index().SafetensorsHeader());
  EXPECT_EQ(header.size(), opened->index().safetensors_header_bytes());
  EXPECT_EQ(LoadLittle<std::uint64_t>(header.data()) + 8, header.size());
  EXPECT_NE(header.find("\"format\":\"pt\""), std::string::npos);
  ASSERT_OK(opened->index().ForEachTensor(0, [&](const TensorEntry& entry) {
    if (entry.in_safetensors) {
      EXPECT_GE(entry.safetensors_offset, header.size());
      EXPECT_EQ(entry.safetensors_offset % (entry.meta.bits() / 8), 0u);
    }
    return true;
  }));
}

TEST_F(OpenTest, KeysAreListedInOrder) {
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  std::vector<std::string> keys;
  for (const RandomTensor& tensor : spec_.tensors) keys.push_back(tensor.key);
  std::sort(keys.begin(), keys.end());
  EXPECT_THAT(opened->index().LowerBound(""), IsOkAndHolds(0u));
  EXPECT_THAT(opened->index().LowerBound(keys[1]), IsOkAndHolds(1u));
  EXPECT_THAT(opened->index().LowerBound(keys[1] + "!"), IsOkAndHolds(2u));
  EXPECT_THAT(opened->index().LowerBound("~"), IsOkAndHolds(3u));
  EXPECT_THAT(opened->index().At(3), HasCode(Code::kNotFound));
  ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(path()));
  EXPECT_THAT(checkpoint.keys(), IsOkAndHolds(keys));
  EXPECT_THAT(checkpoint.object("rng", {0}), IsOkAndHolds(spec_.objects[0].bytes));
  EXPECT_THAT(checkpoint.object("rng", {2}), HasCode(Code::kNotFound));
  EXPECT_THAT(checkpoint.objects(),
              IsOkAndHolds(std::vector<std::string>{"config", "empty", "rng"}));
  EXPECT_THAT(checkpoint.common("int"), IsOkAndHolds(CommonValue(std::int64_t{-5})));
  ASSERT_OK_AND_ASSIGN(const Tensor tensor, checkpoint.tensor(spec_.tensors[0].key));
  std::string out(tensor.bytes(), '?');
  ASSERT_OK(tensor.Read(Region(Box::Whole(tensor.shape())),
                        BufferView::Host(tensor.dtype(), out.data(), tensor.shape())));
  EXPECT_EQ(out, spec_.tensors[0].bytes);
}

// Reads that go on where others ended: in order, out of order, ended early, within each other, of
// keys that are there, missing, or prefixes of one another.
TEST(SstTableTest, ReadsMatchAPlainTableAfterAnyReads) {
  Random random(TestSeed());
  TempDir dir;
  const auto name = [&] {
    std::string key;
    for (std::int64_t n = random.Int(1, 4); n > 0; --n) {
      key += static_cast<char>('a' + random.Int(0, 2));
    }
    return key;
  };
  std::map<std::string, std::string> records;
  for (int i = 0; i < 70; ++i) {  // Of 16 KiB blocks there are several.
    records[name()] = random.Bytes(static_cast<std::size_t>(random.Int(0, 2'000)));
  }
  MemoryTable plain;
  ASSERT_OK(SstTable::Write(HostFileSystem(), dir.Join("t.sst"),
                            [&](const SstTable::Emit& emit) -> Result<SstIdentity> {
                              for (const auto& [key, value] : records) {
                                plain.Append(key, value);
                                TENSORMOUNT_RETURN_IF_ERROR(emit(key, value));
                              }
                              return SstIdentity{};
                            }));
  ASSERT_OK_AND_ASSIGN(const auto table, SstTable::Open(HostFileSystem(), dir.Join("t.sst")));
  using Seen = std::vector<std::pair<std::string, std::string>>;
  const std::function<Seen(const Table&, const std::string&, const std::string&, std::size_t, bool)>
      scan = [&](const Table& of, const std::string& prefix, const std::string& from,
                 std::size_t most, bool within) {
        Seen seen;
        EXPECT_OK(of.Scan(prefix, from, [&](std::string_view key, std::string_view value) {
          seen.emplace_back(key, value);
          if (within) {
            for (auto& record : scan(of, std::string(key), "", 2, false)) seen.push_back(record);
          }
          return seen.size() < most;
        }));
        return seen;
      };
  std::string last = "a";
  for (int i = 0; i < TestScale(4'000); ++i) {
    const std::string key = name();
    if (random.OneIn(3)) {
      const Result<std::string> got = table->Get(key);
      const Result<std::string> expected = plain.Get(key);
      ASSERT_EQ(got.status().code(), expected.status().code()) << key;
      if (got.ok()) {
        ASSERT_EQ(got.value(), expected.value()) << key;
      }
      continue;
    }
    // One prefix after the other is what loads do.
    std::string prefix = random.OneIn(2) ? key : last;
    if (const auto next = records.upper_bound(prefix); next != records.end()) last = next->first;
    if (random.OneIn(20)) prefix.clear();
    const std::string from = random.OneIn(4) ? (random.OneIn(2) ? prefix : "") + name() : "";
    const std::size_t most = random.OneIn(4) ? 1 : 1'000;
    const bool within = random.OneIn(5);
    ASSERT_EQ(scan(*table, prefix, from, most, within), scan(plain, prefix, from, most, within))
        << prefix << " from " << from;
  }
}

}  // namespace
}  // namespace tensormount
