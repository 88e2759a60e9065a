// SPDX-License-Identifier: Apache-2.0
// Reading in place what an adapter found: strided, shared, pending, changed.
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "index/records/completeness.h"
#include "tests/adopt/foreign_support.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

class ForeignReadTest : public testing::Test {
 protected:
  Result<std::shared_ptr<OpenedCheckpoint>> Open() { return made_.Open(HostFileSystem()); }
  static Status ReadWhole(const OpenedCheckpoint& opened, const std::string& key) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, opened.index().Find(key));
    std::string got(entry.meta.bytes(), '?');
    return opened.ReadBytes(entry, 0, got.data(), got.size(), ReadVerify::kOff, nullptr);
  }
  Box WholeOf(const Dims& shape) { return Box::Whole(shape); }

  TempDir dir_;
  Random random_{TestSeed()};
  HandMade made_{dir_.Join("source"), random_, kManyKindsSizes};
};

TEST_F(ForeignReadTest, EveryStorageLayoutReadsExactly) {
  AddManyKinds(made_);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_EQ(opened->commit(), nullptr);
  CompareWithHandMade(random_, *opened, made_, TestScale(6));
}

TEST_F(ForeignReadTest, EveryStorageLayoutReadsExactlyWithoutMmap) {
  AddManyKinds(made_);
  UnmappedFileSystem fs;
  ASSERT_OK_AND_ASSIGN(const auto opened, made_.Open(fs));
  CompareWithHandMade(random_, *opened, made_, TestScale(6));
}

TEST_F(ForeignReadTest, ATransposedTensorIsReadOnceFromTheFile) {
  AddManyKinds(made_);
  // Exactly what is read at once.
  made_.Add("large block", DType::kF32, {512, 512},
            {{Region(Box::Whole({512, 512})), 0, 5, {4, 2048}}});
  UnmappedFileSystem fs;
  ASSERT_OK_AND_ASSIGN(const auto opened, made_.Open(fs));
  for (const char* key : {"large", "large block", "large planes", "large long runs"}) {
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(key));
    std::string got(entry.meta.bytes(), '?');
    ReadStats stats;
    ASSERT_OK(opened->ReadBytes(entry, 0, got.data(), got.size(), ReadVerify::kOff, &stats));
    EXPECT_EQ(stats.bytes_read, got.size()) << key;
    EXPECT_TRUE(got == made_.Bytes(key)) << key;
  }
}

// The second begins in the file where the first row of the first one ends, and in the buffer too.
TEST_F(ForeignReadTest, AdjacentColumnsAreNotReadAsOneRun) {
  const auto box = [](const Dims& begin, const Dims& extent) {
    return Region(Box::Make(begin, extent).value());
  };
  made_.Add("w", DType::kU8, {50, 20},
            {{box({0, 0}, {1, 20}), 0, 7, {}},
             {box({1, 0}, {49, 10}), 0, 100, {20, 1}},
             {box({1, 10}, {49, 10}), 0, 110, {20, 1}}});
  for (const bool mapped : {true, false}) {
    UnmappedFileSystem fs;
    ASSERT_OK_AND_ASSIGN(const auto opened, mapped ? Open() : made_.Open(fs));
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("w"));
    std::string got(entry.meta.bytes(), '?');
    ReadStats stats;
    ASSERT_OK(opened->ReadBytes(entry, 0, got.data(), got.size(), ReadVerify::kOff, &stats));
    EXPECT_TRUE(got == made_.Bytes("w"));
  }
}

TEST_F(ForeignReadTest, ConcurrentThreadsReadExactly) {
  AddManyKinds(made_);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Random random(TestSeed() + t);
      CompareWithHandMade(random, *opened, made_, TestScale(2));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ForeignReadTest, PendingChunksAreResolvedOnFirstUse) {
  AddManyKinds(made_);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("pending packed"));
  EXPECT_TRUE(entry.pending);
  EXPECT_EQ(made_.resolver().calls, 0);
  ASSERT_OK(ReadWhole(*opened, "pending packed"));
  ASSERT_OK(ReadWhole(*opened, "pending packed"));
  EXPECT_EQ(made_.resolver().calls, 2);  // Two chunks, once each.
  ASSERT_OK_AND_ASSIGN(const auto extents, opened->Extents(entry));
  EXPECT_FALSE(extents->pending());
  EXPECT_FALSE(extents->wide());  // Strides of packed rows are none.
  ASSERT_OK_AND_ASSIGN(const ChunkRecord chunk, extents->At(0));
  EXPECT_EQ(chunk.offset, 512u);
  EXPECT_EQ(chunk.length, 1200u);
}

TEST_F(ForeignReadTest, UnresolvableItemFailsOnlyItsTensor) {
  AddManyKinds(made_);
  made_.resolver().failure = Status(Code::kUnsupported, "it is compressed");
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  for (int i = 0; i < 2; ++i) {
    const Status status = ReadWhole(*opened, "pending");
    EXPECT_THAT(status, HasCode(Code::kUnsupported));
    EXPECT_THAT(status, HasMessage("tensor pending [0:20, 0:30]: it is compressed"));
  }
  EXPECT_OK(ReadWhole(*opened, "packed"));
  made_.resolver().failure = Status();
  EXPECT_OK(ReadWhole(*opened, "pending"));
}

TEST_F(ForeignReadTest, WrongResolverResultIsDataLoss) {
  const Region whole = WholeOf({20, 30});
  made_.Add("far", DType::kF32, {20, 30}, {{whole, 1, 0, {}, true}});
  made_.Add("short", DType::kF32, {20, 30}, {{whole, 1, 0, {}, true}});
  made_.Add("strides", DType::kF32, {20, 30}, {{whole, 1, 0, {4, 80}, true}});
  made_.resolver().items[0].offset = kManyKindsSizes[1] - 100;
  made_.resolver().items[1].length -= 4;
  made_.resolver().items[2].strides = {std::int64_t{1} << 60, std::int64_t{1} << 60};
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  for (const char* key : {"far", "short", "strides"}) {
    EXPECT_THAT(ReadWhole(*opened, key), HasCode(Code::kDataLoss)) << key;
  }
}

TEST_F(ForeignReadTest, TensorWithAHoleReadsOutsideTheHole) {
  made_.Add("hole", DType::kU8, {4, 6},
            {{Region(Box::Make({0, 0}, {4, 2}).value()), 0, 10, {}},
             {Region(Box::Make({0, 4}, {4, 2}).value()), 0, 20, {1, 4}}});
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("hole"));
  char got[8];
  const auto read = [&](const Dims& begin) {
    const Dims extent{4, 2};
    return opened->Read(entry, Region(Box::Make(begin, extent).value()),
                        BufferView::Host(DType::kU8, static_cast<void*>(got), extent),
                        ReadVerify::kOff, nullptr, nullptr);
  };
  EXPECT_OK(read({0, 0}));
  EXPECT_OK(read({0, 4}));
  EXPECT_THAT(read({0, 3}), HasCode(Code::kDataLoss));
  EXPECT_THAT(read({0, 3}), HasMessage("tensor hole [0:4, 3:4] is stored in no chunk"));
  // What adapters ask.
  const ForeignInventory found = made_.Found();
  EXPECT_EQ(CompletenessCheck().Check(found.inventory, found.inventory.tensors[0]).verdict,
            Completeness::kHole);
}

TEST_F(ForeignReadTest, CompletenessReportsHolesAndOverlaps) {
  AddManyKinds(made_);
  const auto rows = [](std::int64_t begin, std::int64_t n) {
    return Region(Box::Make({begin, 0}, {n, 6}).value());
  };
  made_.Add("z double", DType::kU8, {4, 6}, {{rows(0, 3), 0, 0, {}}, {rows(2, 2), 0, 50, {1, 2}}});
  made_.Add("z far", DType::kU8, {4, 6}, {{rows(0, 4), 1, 0, {}}});
  made_.Add("z long", DType::kU8, {4, 6}, {{rows(0, 4), 1, 0, {1, 4}}});
  ForeignInventory found = made_.Found();
  for (TensorRecord& tensor : found.inventory.tensors) {
    const std::string& key = tensor.meta.key();
    auto want = Completeness::kWhole;
    if (key == "z double") want = Completeness::kOverlap;
    if (key.ends_with("far") || key.ends_with("long")) {
      want = Completeness::kBad;
      ASSERT_OK_AND_ASSIGN(ChunkRecord chunk, tensor.extents.At(0));
      if (key.ends_with("far")) chunk.offset = kManyKindsSizes[1] - 23;
      if (key.ends_with("long")) chunk.length += 1;
      tensor.extents = ExtentTable(2);
      tensor.extents.Append(chunk);
    }
    const TensorCheck check = CompletenessCheck().Check(found.inventory, tensor);
    EXPECT_EQ(check.verdict, want) << key << ": " << check.why;
    EXPECT_EQ(check.why.empty(), want == Completeness::kWhole);
  }
}

TEST_F(ForeignReadTest, AChangedFileIsNeverMisread) {
  AddManyKinds(made_);
  for (const bool open_before : {false, true}) {
    for (const int how : {0, 1, 2}) {
      SCOPED_TRACE(how);
      Random random(TestSeed());
      HandMade made(dir_.Join("c" + std::to_string(how + 10 * open_before)), random,
                    kManyKindsSizes);
      AddManyKinds(made);
      ASSERT_OK_AND_ASSIGN(const auto opened, made.Open(HostFileSystem()));
      if (open_before) {
        ASSERT_OK(ReadWhole(*opened, "transposed"));
      }
      const std::string path = made.FilePath(0);
      struct stat now = {};
      ASSERT_EQ(stat(path.c_str(), &now), 0);
      if (how == 0) {  // One byte, in place; the clock of files may be coarse.
        const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
        ASSERT_EQ(pwrite(fd, "x", 1, 3000), 1);
        ASSERT_EQ(close(fd), 0);
        now.st_mtim.tv_nsec = (now.st_mtim.tv_nsec + 1) % 1000000000;
        const timespec times[2] = {now.st_atim, now.st_mtim};
        ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
      } else if (how == 1) {  // Longer, at the same time.
        ASSERT_EQ(truncate(path.c_str(), now.st_size + 1), 0);
        const timespec times[2] = {now.st_atim, now.st_mtim};
        ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
      } else {
        ASSERT_EQ(truncate(path.c_str(), now.st_size - 1), 0);
      }
      for (const char* key : {"packed", "transposed", "large", "pending", "large long runs"}) {
        const Status status = ReadWhole(*opened, key);
        EXPECT_THAT(status, HasCode(Code::kStale)) << key;
        EXPECT_THAT(status, HasMessage("part/0.bin: changed since it was opened (")) << key;
        ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(key));
        // Not even of one that is as it was: it may change before the bytes are taken.
        const auto mapped = opened->MapBytes(entry, 0, 16, ReadVerify::kOff);
        EXPECT_FALSE(mapped.ok() && !mapped.value().empty());
      }
      EXPECT_OK(ReadWhole(*opened, "permuted"));  // In the other file.
    }
  }
}

TEST_F(ForeignReadTest, BytesWrittenDuringTheReadAreRefused) {
  AddManyKinds(made_);
  const std::string path = made_.FilePath(0);
  bool armed = false;
  ObservedFileSystem fs(HostFileSystem(), {}, [&](const FileEvent& event) {
    if (!armed || event.op != FileOp::kRead || event.path != path) return;
    const timespec times[2] = {{.tv_sec = 1000, .tv_nsec = 0}, {.tv_sec = 1000, .tv_nsec = 0}};
    EXPECT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  });
  ASSERT_OK_AND_ASSIGN(const auto opened, made_.Open(fs));
  ASSERT_OK(ReadWhole(*opened, "packed"));
  armed = true;
  EXPECT_THAT(ReadWhole(*opened, "packed"), HasCode(Code::kStale));
}

TEST_F(ForeignReadTest, TruncationDuringAReadDoesNotCrash) {
  AddManyKinds(made_);
  namespace stdfs = std::filesystem;
  const auto copy_all = [](const stdfs::path& from, const stdfs::path& to) {
    stdfs::remove_all(to);
    stdfs::copy(from, to, stdfs::copy_options::recursive);
    for (const auto& file : stdfs::recursive_directory_iterator(from)) {
      stdfs::last_write_time(to / stdfs::relative(file.path(), from), file.last_write_time());
    }
  };
  const std::string kept = dir_.Join("kept");
  copy_all(made_.root(), kept);
  for (const auto& [key, bytes] : made_.all_bytes()) {
    for (Crc64 digest = 0; Crc64* const taken : {static_cast<Crc64*>(nullptr), &digest}) {
      copy_all(kept, made_.root());
      CutFileSystem fs;
      ASSERT_OK_AND_ASSIGN(const auto opened, made_.Open(fs));
      ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(key));
      const DType dtype = entry.meta.dtype();
      const Dims& shape = entry.meta.shape();
      if (entry.meta.bits() % 8 != 0 || entry.meta.elements() == 0 || shape.rank() == 0) continue;
      // A column, so that what lies between is not wanted.
      Dims extent = shape;
      extent[shape.rank() - 1] = 1;
      std::string got(bytes.size(), '?');
      const Status status =
          opened->Read(entry, Region(Box::Make(Dims::Filled(shape.rank(), 0), extent).value()),
                       BufferView::Host(dtype, static_cast<void*>(got.data()), extent),
                       ReadVerify::kOff, nullptr, taken);
      if (!status.ok()) {
        EXPECT_THAT(status, HasCode(Code::kStale)) << key;
      }
    }
  }
}

TEST_F(ForeignReadTest, ErrorNamesTheMissingFile) {
  AddManyKinds(made_);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  ASSERT_EQ(unlink(made_.FilePath(0).c_str()), 0);
  EXPECT_THAT(ReadWhole(*opened, "packed"), HasCode(Code::kDataLoss));
  EXPECT_THAT(ReadWhole(*opened, "packed"), HasMessage("part/0.bin does not exist"));
  EXPECT_THAT(ReadWhole(*opened, "pending"), HasMessage("part/0.bin does not exist"));
}

TEST_F(ForeignReadTest, ObjectsWithoutHashesAreRead) {
  AddManyKinds(made_);
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  ASSERT_OK_AND_ASSIGN(const auto parts, opened->index().ObjectParts("object"));
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_FALSE(parts[0].has_hash());
  std::string got(parts[0].length, '?');
  ASSERT_OK(opened->ReadObject(parts[0], 0, got.data(), got.size()));
  EXPECT_EQ(got, ReadWholeFile(made_.FilePath(1)).substr(1000, 70000));
  ASSERT_EQ(truncate(made_.FilePath(1).c_str(), 50000), 0);
  EXPECT_THAT(opened->ReadObject(parts[0], 0, got.data(), got.size()), HasCode(Code::kStale));
}

TEST_F(ForeignReadTest, StridedTensorIsNotAWholeFile) {
  Random random(1);
  HandMade made(dir_.Join("one"), random, {4 * 600});
  made.Add("packed", DType::kF32, {20, 30}, {{WholeOf({20, 30}), 0, 0, {}}});
  made.Add("strided", DType::kF32, {20, 30}, {{WholeOf({20, 30}), 0, 0, {4, 80}}});
  ASSERT_OK_AND_ASSIGN(const auto opened, made.Open(HostFileSystem()));
  EXPECT_OK(opened->WholeFileOf(opened->index().Find("packed").value()));
  EXPECT_THAT(opened->WholeFileOf(opened->index().Find("strided").value()),
              HasCode(Code::kNotFound));
}

}  // namespace
}  // namespace tensormount
