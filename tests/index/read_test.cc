// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <fcntl.h>
#include <optional>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mapping.h"
#include "index/foreign/open_source.h"
#include "index/read/checkpoint.h"
#include "index/read/threaded_read.h"
#include "shard/leaf_hash.h"
#include "shard/strided_digest.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/guard_for_a_while.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/plain_reads_file_system.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"
#include "tests/support/unmapped_file.h"

namespace tensormount {
namespace {

constexpr ReadVerify kModes[] = {ReadVerify::kOff, ReadVerify::kWholeLeaves,
                                 ReadVerify::kExtendLeaves, ReadVerify::kOnce};

// What is not on this machine's disk: reads never map.
class Undescribed : public ObservedFileSystem {
 public:
  Undescribed() : ObservedFileSystem(HostFileSystem(), {}) {}
  Result<std::unique_ptr<File>> OpenRead(const std::string& path) override {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, HostFileSystem().OpenRead(path));
    return std::unique_ptr<File>(std::make_unique<UnmappedFile>(std::move(file)));
  }
};

Crc64 OracleDigest(const RandomTensor& tensor, const Region& region) {
  const TensorMeta meta = TensorMeta::Make(tensor.key, tensor.dtype, tensor.shape).value();
  const Dims shape = ByteShape(meta.dtype(), meta.shape());
  Crc64 digest = 0;
  const Region bytes = ByteRegion(meta.dtype(), meta.shape(), region).value();
  const std::string packed = OracleBytes(tensor, region);
  for (const PlacedBox& placed : PlacePacked(bytes, 0)) {
    digest ^= DigestOfPlaced(placed, reinterpret_cast<const std::byte*>(packed.data()), shape);
  }
  return digest;
}

std::string Joined(const std::vector<OpenedCheckpoint::MappedRange>& pieces) {
  std::string joined;
  for (const auto& piece : pieces) {
    joined.append(reinterpret_cast<const char*>(piece.data), piece.size);
  }
  return joined;
}

// Reads random regions and byte ranges of everything in every mode and compares with the oracle.
void CompareWithOracle(Random& random, const OpenedCheckpoint& opened, const BuildSpec& spec,
                       int reads) {
  ASSERT_EQ(opened.index().tensor_count(), spec.tensors.size());
  for (const RandomTensor& tensor : spec.tensors) {
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened.index().Find(tensor.key));
    ASSERT_EQ(entry.digest, Crc64Bitwise(0, tensor.bytes.data(), tensor.bytes.size()));
    const int ranks = static_cast<int>(random.Int(1, 3));
    const Partition request = RandomRequest(random, tensor.shape, ranks, true);
    for (const std::vector<Region>& mine : request) {
      for (const Region& region : mine) {
        // Where they lie: all of them in order, or none at all.
        ASSERT_OK_AND_ASSIGN(const Region cells, ByteRegion(tensor.dtype, tensor.shape, region));
        ASSERT_OK_AND_ASSIGN(const auto placed,
                             opened.MapPlaced(entry, PlacePacked(cells, 0), ReadVerify::kOff));
        if (!placed.empty()) {
          ASSERT_EQ(Joined(placed), OracleBytes(tensor, region)) << tensor.key << region.ToString();
        }
        for (const ReadVerify mode : kModes) {
          ShardMemory out = MakeShardMemory(random, tensor, region, false);
          ReadStats stats;
          Crc64 digest = 1;
          const bool with_digest = random.OneIn(2);
          ASSERT_OK(
              opened.Read(entry, region, out.view, mode, &stats, with_digest ? &digest : nullptr))
              << tensor.key << region.ToString();
          const std::string wanted = OracleBytes(tensor, region);
          ASSERT_EQ(CellsOf(tensor, out), wanted) << tensor.key << region.ToString();
          ASSERT_EQ(stats.bytes_wanted, wanted.size());
          ASSERT_GE(stats.bytes_read, wanted.size());
          if (mode == ReadVerify::kExtendLeaves) {
            ASSERT_EQ(stats.bytes_by_leaf, wanted.size());
          }
          if (mode == ReadVerify::kOff) {
            ASSERT_EQ(stats.bytes_by_leaf, 0u);
          }
          if (with_digest) {
            ASSERT_EQ(digest, OracleDigest(tensor, region)) << region.ToString();
          }
        }
      }
    }
    for (int i = 0; i < reads; ++i) {
      const auto size = static_cast<std::int64_t>(tensor.bytes.size());
      const auto at = static_cast<std::size_t>(random.Int(0, size));
      const auto n = static_cast<std::size_t>(random.Int(0, size - static_cast<std::int64_t>(at)));
      std::string got(n, '?');
      ReadStats stats;
      ASSERT_OK(opened.ReadBytes(entry, at, got.data(), n, kModes[i % 4], &stats));
      ASSERT_EQ(got, tensor.bytes.substr(at, n)) << tensor.key << " " << at << "+" << n;
      ASSERT_EQ(stats.bytes_wanted, n);
      // The bytes where they lie: all of them, or none at all.
      ASSERT_OK_AND_ASSIGN(const auto mapped, opened.MapBytes(entry, at, n, ReadVerify::kOff));
      if (mapped.empty()) continue;
      ASSERT_EQ(Joined(mapped), tensor.bytes.substr(at, n)) << tensor.key << " " << at << "+" << n;
    }
  }
  for (const BuildObject& object : spec.objects) {
    ASSERT_OK_AND_ASSIGN(const auto parts, opened.index().ObjectParts(object.key));
    for (const ObjectRecord& part : parts) {
      if (!(part.index == object.index)) continue;
      std::string got(part.length, '?');
      ASSERT_OK(opened.ReadObject(part, 0, got.data(), got.size()));
      ASSERT_EQ(got, object.bytes);
    }
  }
  ASSERT_OK_AND_ASSIGN(const auto common, opened.index().CommonRecords());
  ASSERT_EQ(common, spec.common);
}

// Two halves of columns: rows of 4 KiB are scattered into place, whole chunks are mapped.
TEST(Read, ColumnsAreScatteredAndRowsAreMapped) {
  TempDir dir;
  Random random(TestSeed());
  BuildSpec spec;
  for (const char* key : {"c", "r"}) {
    RandomTensor tensor{.key = key, .dtype = DType::kF32, .shape = {64, 2048}, .bytes = {}};
    for (int i = 0; i < 64 * 2048 * 4; ++i) {
      tensor.bytes.push_back(static_cast<char>(random.Int(0, 255)));
    }
    spec.tensors.push_back(std::move(tensor));
  }
  const auto half = [](int axis, int which) {
    Dims begin{0, 0};
    Dims extent{64, 2048};
    extent[axis] /= 2;
    begin[axis] = which * extent[axis];
    return Region(Box::Make(begin, extent).value());
  };
  spec.partitions = {{{half(1, 0)}, {half(1, 1)}}, {{half(0, 0)}, {half(0, 1)}}};
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenedCheckpoint::Open(HostFileSystem(), dir.Join("c"), {}));
  CompareWithOracle(random, *opened, spec, 40);
  ASSERT_OK_AND_ASSIGN(const TensorEntry rows, opened->index().Find("r"));
  ASSERT_OK_AND_ASSIGN(const auto mapped, opened->MapBytes(rows, 100, 400000, ReadVerify::kOff));
  EXPECT_EQ(mapped.size(), 2u);
  ASSERT_OK_AND_ASSIGN(const TensorEntry columns, opened->index().Find("c"));
  ASSERT_OK_AND_ASSIGN(const auto strided, opened->MapBytes(columns, 0, 400000, ReadVerify::kOff));
  EXPECT_TRUE(strided.empty());
  // Past the end nothing is mapped, and a file cut short is not either.
  ASSERT_OK_AND_ASSIGN(const auto past, opened->MapBytes(rows, 524288, 1, ReadVerify::kOff));
  EXPECT_TRUE(past.empty());
  for (const FileRecord& file : opened->index().files()) {
    const std::string path = dir.Join("c/") + file.name;
    ASSERT_EQ(chmod(path.c_str(), 0644), 0);
    ASSERT_EQ(truncate(path.c_str(), 100), 0);
  }
  ASSERT_OK_AND_ASSIGN(const auto cut, opened->MapBytes(rows, 100, 400000, ReadVerify::kOff));
  EXPECT_TRUE(cut.empty());
}

// A slow source is waited for once, not once a chunk: whoever reads says first what it will read.
TEST(Read, AllReadsStartBeforeTheFirstWait) {
  TempDir dir;
  Random random(TestSeed());
  constexpr std::int64_t kWriters = 8;
  constexpr std::int64_t kColumns = 100'000;
  BuildSpec spec;
  spec.writers = kWriters;
  spec.tensors.push_back({.key = "w",
                          .dtype = DType::kU8,
                          .shape = {kWriters, kColumns},
                          .bytes = random.Bytes(kWriters * kColumns)});
  Partition rows;
  for (std::int64_t row = 0; row < kWriters; ++row) {
    rows.push_back({Region(Box::Make({row, 0}, {1, kColumns}).value())});
  }
  spec.partitions.push_back(rows);
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
  PlainReadsFileSystem fs("plain://");
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenedCheckpoint::Open(fs, "plain://" + dir.Join("c"), {}));
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("w"));
  PlainReadsFileSystem::Counts& counts = fs.counts();
  const auto read = [&](std::uint64_t offset, std::uint64_t size, ReadVerify verify) {
    counts.hints = counts.hinted_bytes = 0;
    const std::uint64_t before = counts.reads;
    std::string got(size, '?');
    EXPECT_OK(opened->ReadBytes(entry, offset, got.data(), size, verify, nullptr));
    EXPECT_EQ(got, spec.tensors[0].bytes.substr(offset, size));
    EXPECT_TRUE(counts.hints == 0 || counts.reads_at_hint == before);
  };
  read(0, kWriters * kColumns, ReadVerify::kOff);
  EXPECT_EQ(counts.hints, static_cast<std::uint64_t>(kWriters));
  EXPECT_EQ(counts.hinted_bytes, static_cast<std::uint64_t>(kWriters * kColumns));
  // The end of one row and the begin of the next: of both the leaves that prove it.
  read(kColumns - 10, 20, ReadVerify::kExtendLeaves);
  EXPECT_EQ(counts.hints, 2u);
  EXPECT_EQ(counts.hinted_bytes, static_cast<std::uint64_t>(kColumns));
  read(5, 100, ReadVerify::kExtendLeaves);  // One read of data, and nothing to begin before it.
  EXPECT_EQ(counts.hints, 0u);
}

// Thousands of small tensors are a few reads where somebody reads them in order, and as many as
// they are elsewhere: what was read ahead is nobody's later.
TEST(Read, SmallTensorsInOrderTakeFewReads) {
  TempDir dir;
  Random random(TestSeed());
  BuildSpec spec;
  spec.writers = 1;
  for (int i = 0; i < 300; ++i) {
    RandomTensor tensor{.key = "k" + std::to_string(1000 + i),
                        .dtype = DType::kU8,
                        .shape = {random.Int(1, 900)},
                        .bytes = {}};
    tensor.bytes = random.Bytes(static_cast<std::size_t>(tensor.shape[0]));
    spec.partitions.push_back({{Region(Box::Whole(tensor.shape))}});
    spec.tensors.push_back(std::move(tensor));
  }
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
  std::atomic<int> reads{0};
  std::string path;
  ObservedFileSystem fs(HostFileSystem(), {}, [&](const FileEvent& event) {
    if (event.op != FileOp::kRead || event.path.find("data/") == std::string::npos) return;
    path = event.path;
    ++reads;
  });
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(fs, dir.Join("c"), {}));
  // Forwards, backwards, and every other one: the bytes are those of the tensor.
  const auto read_all = [&](int from, int step) {
    Status status;
    for (int i = from; i >= 0 && i < 300 && status.ok(); i += step) {
      const RandomTensor& tensor = spec.tensors[static_cast<std::size_t>(i)];
      std::string got(tensor.bytes.size(), '?');
      status = opened->ReadBytes(opened->index().Find(tensor.key).value(), 0, got.data(),
                                 got.size(), ReadVerify::kExtendLeaves, nullptr);
      if (status.ok()) {
        EXPECT_EQ(got, tensor.bytes) << tensor.key;
      }
    }
    return status;
  };
  ASSERT_OK(read_all(0, 1));
  EXPECT_EQ(reads.exchange(0), 300);
  {
    const auto in_order = opened->ReadInOrder();
    ASSERT_OK(read_all(0, 1));
    EXPECT_LT(reads.exchange(0), 10);
    ASSERT_OK(read_all(0, 2));
    ASSERT_OK(read_all(299, -1));
  }
  reads = 0;
  ASSERT_OK(read_all(0, 1));
  EXPECT_EQ(reads.exchange(0), 300);
  // Damaged, or cut short: found where it is.
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  std::string whole = ReadWholeFile(path);
  whole[whole.size() / 2] = static_cast<char>(whole[whole.size() / 2] ^ 1);
  const auto damaged = [&](const std::string& bytes) {
    WriteWholeFile(path, bytes);
    const auto in_order = opened->ReadInOrder();
    return read_all(0, 1);
  };
  EXPECT_THAT(damaged(whole), HasCode(Code::kDataLoss));
  whole[whole.size() / 2] = static_cast<char>(whole[whole.size() / 2] ^ 1);
  EXPECT_OK(damaged(whole));
  EXPECT_THAT(damaged(whole.substr(0, whole.size() - 1)), HasCode(Code::kDataLoss));
}

// A checkpoint of one tensor of several leaves, held by two ranks in two chunks of rows.
class MappedLeavesTest : public testing::Test {
 protected:
  static constexpr std::int64_t kRows = 700;
  static constexpr std::int64_t kColumns = 448;  // Rows of 1,792 bytes, as leaves do not divide.
  void SetUp() override {
    Random random(TestSeed());
    tensor_ = {.key = "w", .dtype = DType::kF32, .shape = {kRows, kColumns}, .bytes = {}};
    tensor_.bytes = random.Bytes(kRows * kColumns * 4);
    spec_.tensors = {tensor_};
    spec_.partitions = {{{Rows(0, 300)}, {Rows(300, kRows - 300)}}};
    ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir_.Join("c"), spec_));
    ASSERT_OK_AND_ASSIGN(opened_, OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("c"), {}));
  }
  static Region Rows(std::int64_t from, std::int64_t count) {
    return Region(Box::Make({from, 0}, {count, kColumns}).value());
  }
  // Columns [100, 212) of all rows, each byte of them proved.
  Status ReadColumns(std::string* got, ReadStats* stats) {
    const TensorEntry entry = opened_->index().Find("w").value();
    got->assign(kRows * 112 * 4, '?');
    return opened_->Read(entry, Region(Box::Make({0, 100}, {kRows, 112}).value()),
                         BufferView::Host(DType::kF32, got->data(), {kRows, 112}),
                         ReadVerify::kExtendLeaves, stats, nullptr);
  }
  std::string Columns() const {
    std::string columns;
    for (std::int64_t row = 0; row < kRows; ++row) {
      columns += tensor_.bytes.substr(static_cast<std::size_t>((row * kColumns + 100) * 4), 448);
    }
    return columns;
  }

  GuardForAWhile guard_;
  TempDir dir_;
  RandomTensor tensor_;
  BuildSpec spec_;
  std::shared_ptr<OpenedCheckpoint> opened_;
};

TEST_F(MappedLeavesTest, EachLeafIsReadOnce) {
  std::string got;
  ReadStats stats;
  ASSERT_OK(ReadColumns(&got, &stats));
  EXPECT_EQ(got, Columns());
  EXPECT_EQ(stats.bytes_by_leaf, got.size());
  // All leaves of both chunks, and nothing twice.
  EXPECT_EQ(stats.bytes_read, tensor_.bytes.size());
}

// Rows of two leaves of which 16 KiB are wanted: the other leaf is nobody's, with a guard or
// without.
TEST(Read, UnneededLeavesAreNotRead) {
  constexpr std::int64_t kRows = 20;
  constexpr std::int64_t kColumns = 128 * 1024;
  TempDir dir;
  Random random(TestSeed());
  BuildSpec spec;
  RandomTensor tensor{.key = "w", .dtype = DType::kU8, .shape = {kRows, kColumns}, .bytes = {}};
  tensor.bytes = random.Bytes(kRows * kColumns);
  spec.tensors.push_back(tensor);
  spec.partitions = {{{Region(Box::Whole(tensor.shape))}, {}}};
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
  const Region part(Box::Make({0, 20000}, {kRows, 16 * 1024}).value());
  for (const bool guarded : {false, true}) {
    std::optional<GuardForAWhile> guard;
    if (guarded) guard.emplace();
    ASSERT_OK_AND_ASSIGN(const auto opened,
                         OpenedCheckpoint::Open(HostFileSystem(), dir.Join("c"), {}));
    std::string got(kRows * 16 * 1024, '?');
    ReadStats stats;
    ASSERT_OK(opened->Read(opened->index().Find("w").value(), part,
                           BufferView::Host(DType::kU8, got.data(), {kRows, 16 * 1024}),
                           ReadVerify::kExtendLeaves, &stats, nullptr));
    EXPECT_EQ(got, OracleBytes(tensor, part));
    EXPECT_EQ(stats.bytes_by_leaf, got.size());
    EXPECT_EQ(stats.bytes_read, static_cast<std::uint64_t>(kRows) * 64 * 1024) << guarded;
  }
}

// By threads: what one would read, of all or of any region, into strided memory too; what is
// damaged in the part of any of them fails all.
TEST(Read, AnyNumberOfThreadsReadsTheSame) {
  Random random(TestSeed());
  TempDir dir;
  BuildSpec spec;
  const auto add = [&](DType dtype, const Dims& shape) {
    RandomTensor tensor{.key = "t" + std::to_string(spec.tensors.size()),
                        .dtype = dtype,
                        .shape = shape,
                        .bytes = {}};
    tensor.bytes = random.Bytes(static_cast<std::size_t>(
        Box::Whole(shape).volume() * static_cast<std::int64_t>(tensor.element_bytes())));
    spec.partitions.push_back(RandomPartition(random, shape, spec.writers));
    spec.tensors.push_back(std::move(tensor));
  };
  // Many rows; few long ones, so that no axis but the last has a part for each; a vector; short
  // axes alone, whose largest is the longest that there is.
  add(DType::kC128, {Amount(3000, 1200), 471});
  add(DType::kC128, {3, 2, Amount(262'500, 90'000)});
  add(DType::kC128, {Amount(1'500'001, 600'001)});
  add(DType::kC128, {2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3});
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenedCheckpoint::Open(HostFileSystem(), dir.Join("c"), {}));
  for (const RandomTensor& tensor : spec.tensors) {
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(tensor.key));
    std::string got(tensor.bytes.size() + 1, '?');
    for (const int threads : {0, 1, 2, 5, 7}) {
      std::fill(got.begin(), got.end(), '?');
      ASSERT_OK(ReadByThreads(*opened, entry, Region(Box::Whole(tensor.shape)),
                              BufferView::Host(tensor.dtype, got.data(), tensor.shape),
                              ReadVerify::kExtendLeaves, threads));
      ASSERT_TRUE(got == tensor.bytes + "?") << tensor.key << " by " << threads;
      const auto at = static_cast<std::size_t>(random.Int(0, 1000));
      std::fill(got.begin(), got.end(), '?');
      ASSERT_OK(ReadBytesByThreads(*opened, entry, at, got.data(), tensor.bytes.size() - at,
                                   ReadVerify::kOnce, threads));
      ASSERT_TRUE(got.starts_with(std::string_view(tensor.bytes).substr(at)) && got.back() == '?');
    }
    const Region region = RandomRequest(random, tensor.shape, 1, false)[0][0];
    ShardMemory out = MakeShardMemory(random, tensor, region, false);
    ASSERT_OK(ReadByThreads(*opened, entry, region, out.view, ReadVerify::kExtendLeaves, 7));
    ASSERT_TRUE(CellsOf(tensor, out) == OracleBytes(tensor, region)) << region.ToString();
    EXPECT_THAT(
        ReadBytesByThreads(*opened, entry, 0, got.data(), got.size(), ReadVerify::kExtendLeaves, 3),
        HasCode(Code::kInvalidArgument));
    ASSERT_OK_AND_ASSIGN(const auto extents, opened->index().Extents(entry.ordinal));
    for (const std::size_t row : {std::size_t{0}, extents->size() - 1}) {
      ASSERT_OK_AND_ASSIGN(const ChunkRecord chunk, extents->At(row));
      const std::string path = dir.Join("c/") + opened->index().files()[chunk.file].name;
      ASSERT_EQ(chmod(path.c_str(), 0644), 0);
      FlipByte(path, chunk.offset + chunk.length / 2);
      EXPECT_THAT(ReadBytesByThreads(*opened, entry, 0, got.data(), got.size() - 1,
                                     ReadVerify::kExtendLeaves, 3),
                  HasCode(Code::kDataLoss));
      FlipByte(path, chunk.offset + chunk.length / 2);
    }
  }
}

// Thousands of runs of a few bytes are shared, too; so are elements of half a byte.
TEST(Read, ShortRunsAndHalfBytesAreSharedBetweenThreads) {
  Random random(TestSeed());
  TempDir dir;
  BuildSpec spec;
  constexpr std::int64_t kHalves = Amount(8'000'002, 5'800'002);  // Two threads share 8 MiB.
  RandomTensor narrow{.key = "narrow", .dtype = DType::kU8, .shape = {9'000, 500}, .bytes = {}};
  RandomTensor half{.key = "half", .dtype = DType::kF4, .shape = {3, kHalves}, .bytes = {}};
  narrow.bytes = random.Bytes(9'000 * 500);
  half.bytes = random.Bytes(3 * kHalves / 2);
  spec.tensors = {narrow, half};
  const Region rows(Box::Make({0, 0}, {2, kHalves}).value());
  const Region row(Box::Make({2, 0}, {1, kHalves}).value());
  spec.partitions = {RandomPartition(random, narrow.shape, 2), {{rows}, {row}}};
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenedCheckpoint::Open(HostFileSystem(), dir.Join("c"), {}));
  const Region columns(Box::Make({0, 7}, {9'000, 3}).value());
  std::string got(27'000, '?');
  ASSERT_OK(ReadByThreads(*opened, opened->index().Find("narrow").value(), columns,
                          BufferView::Host(DType::kU8, got.data(), {9'000, 3}),
                          ReadVerify::kExtendLeaves, 4));
  EXPECT_TRUE(got == OracleBytes(narrow, columns));
  got.assign(half.bytes.size(), '?');
  ASSERT_OK(ReadByThreads(
      *opened, opened->index().Find("half").value(), Region(Box::Whole(half.shape)),
      BufferView::Host(DType::kF4, got.data(), half.shape), ReadVerify::kExtendLeaves, 2));
  EXPECT_TRUE(got == half.bytes);
}

// A byte of any leaf, one that is wanted or one between: the leaf is named.
TEST_F(MappedLeavesTest, ErrorNamesTheDamagedLeaf) {
  ASSERT_OK_AND_ASSIGN(const auto extents,
                       opened_->index().Extents(opened_->index().Find("w").value().ordinal));
  ASSERT_EQ(extents->size(), 2u);
  for (std::size_t c = 0; c < extents->size(); ++c) {
    ASSERT_OK_AND_ASSIGN(const ChunkRecord chunk, extents->At(c));
    const std::string path = dir_.Join("c/") + opened_->index().files()[chunk.file].name;
    ASSERT_EQ(chmod(path.c_str(), 0644), 0);
    const std::string whole = ReadWholeFile(path);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    std::string got;
    for (std::uint64_t at = 17; at < chunk.length; at += 50'000) {
      const auto place = static_cast<off_t>(chunk.offset + at);
      char byte = 0;
      ASSERT_EQ(pread(fd, &byte, 1, place), 1);
      const char other = static_cast<char>(byte ^ 4);
      ASSERT_EQ(pwrite(fd, &other, 1, place), 1);
      const Status status = ReadColumns(&got, nullptr);
      EXPECT_THAT(status, HasCode(Code::kDataLoss)) << at;
      EXPECT_THAT(status.message(),
                  testing::HasSubstr("byte " + std::to_string(chunk.offset + at / 65536 * 65536) +
                                     ": checksum mismatch"));
      ASSERT_EQ(pwrite(fd, &byte, 1, place), 1);
    }
    ASSERT_OK(ReadColumns(&got, nullptr));
    EXPECT_EQ(got, Columns());
    // Cut short after it was mapped, and filled up again with zeros.
    const auto end = static_cast<off_t>(chunk.offset + chunk.length);
    ASSERT_EQ(ftruncate(fd, end - 5000), 0);
    EXPECT_THAT(ReadColumns(&got, nullptr), HasCode(Code::kDataLoss));
    ASSERT_EQ(ftruncate(fd, end), 0);
    EXPECT_THAT(ReadColumns(&got, nullptr), HasCode(Code::kDataLoss));
    ASSERT_EQ(pwrite(fd, whole.data(), whole.size(), 0), static_cast<ssize_t>(whole.size()));
    close(fd);
  }
}

// Where nothing catches SIGBUS, as in the programs of others, a bad block must not end them: few
// columns of long rows are read instead of mapped, others fetched before they are touched. (In this
// process nothing enables the guard.)
TEST(Read, ColumnsReadWithoutTheMappingGuard) {
  ASSERT_FALSE(MappingGuarded());
  TempDir dir;
  Random random(TestSeed());
  BuildSpec spec;
  RandomTensor tensor{.key = "c", .dtype = DType::kF32, .shape = {64, 512}, .bytes = {}};
  tensor.bytes = random.Bytes(64 * 512 * 4);
  spec.tensors.push_back(tensor);
  spec.partitions = {{{Region(Box::Make({0, 0}, {64, 512}).value())}, {}}};
  ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenedCheckpoint::Open(HostFileSystem(), dir.Join("c"), {}));
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("c"));
  for (const std::int64_t columns : {1, 100, 400}) {
    std::string got(static_cast<std::size_t>(64 * columns * 4), '?');
    const Region part(Box::Make({0, 7}, {64, columns}).value());
    Crc64 digest = 0;
    ReadStats stats;
    ASSERT_OK(opened->Read(entry, part, BufferView::Host(DType::kF32, got.data(), {64, columns}),
                           ReadVerify::kOff, &stats, columns == 1 ? nullptr : &digest));
    for (std::int64_t row = 0; row < 64; ++row) {
      ASSERT_EQ(got.substr(static_cast<std::size_t>(row * columns * 4), 4),
                tensor.bytes.substr(static_cast<std::size_t>((row * 512 + 7) * 4), 4));
    }
  }
}

TEST(ReadProperty, AnyRegionOfAnyPartitionEqualsTheOracle) {
  Random random(TestSeed());
  Undescribed undescribed;
  for (int i = 0; i < TestScale(12); ++i) {
    SCOPED_TRACE(i);
    std::optional<GuardForAWhile> guard;
    if (i % 3 != 1) guard.emplace();
    TempDir dir;
    // Every third with tensors of several leaves.
    const BuildSpec spec = RandomSpec(random, 3, i % 3 == 0 ? 400000 : 3000);
    ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
    FileSystem& fs = i % 2 == 0 ? HostFileSystem() : static_cast<FileSystem&>(undescribed);
    ASSERT_OK_AND_ASSIGN(const auto opened, OpenedCheckpoint::Open(fs, dir.Join("c"), {}));
    EXPECT_TRUE(opened->warnings().empty());
    CompareWithOracle(random, *opened, spec, 20);
    ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                         VerifyCheckpoint(fs, dir.Join("c"), {.threads = 2}));
    for (const auto& damage : report.damages) ADD_FAILURE() << damage.object << damage.reason;
    EXPECT_EQ(report.tensors, spec.tensors.size());
    // The index lost: rebuilt, same answers.
    ASSERT_OK(HostFileSystem().RemoveFile(dir.Join("c/index/index.sst")));
    ASSERT_OK_AND_ASSIGN(const auto rebuilt, OpenedCheckpoint::Open(fs, dir.Join("c"), {}));
    EXPECT_TRUE(rebuilt->index_was_rebuilt());
    EXPECT_EQ(rebuilt->warnings().size(), 1u);
    CompareWithOracle(random, *rebuilt, spec, 3);
    EXPECT_THAT(OpenedCheckpoint::Open(fs, dir.Join("c"), {.rebuild_index = false}),
                HasCode(Code::kNotFound));
  }
}

// A tensor [rows, 4096] u8 cut into columns or rows, of several leaves a chunk.
BuildSpec TwoChunks(bool columns) {
  BuildSpec spec;
  RandomTensor tensor{.key = "w", .dtype = DType::kU8, .shape = {64, 4096}, .bytes = {}};
  Random random(1);
  tensor.bytes = random.Bytes(64 * 4096);
  const Dims half = columns ? Dims{64, 2048} : Dims{32, 4096};
  const Dims second = columns ? Dims{0, 2048} : Dims{32, 0};
  spec.tensors = {tensor};
  spec.partitions = {
      {{Region(Box::Make({0, 0}, half).value())}, {Region(Box::Make(second, half).value())}}};
  return spec;
}

struct Flipped {
  TempDir dir;
  std::string data;  // Path of writer 1's file.
  std::shared_ptr<OpenedCheckpoint> opened;
  TensorEntry entry;

  explicit Flipped(const BuildSpec& spec, std::size_t byte) {
    EXPECT_OK(BuildCheckpoint(HostFileSystem(), dir.Join("c"), spec));
    data = dir.Join("c/data/11112222-r1.bin");
    std::string bytes = ReadWholeFile(data);
    if (byte < bytes.size()) bytes[byte] = static_cast<char>(bytes[byte] ^ 0x10);
    WriteWholeFile(data, bytes);
    Reopen();
  }
  void Reopen() {
    opened = OpenedCheckpoint::Open(HostFileSystem(), dir.Join("c"), {}).value();
    entry = opened->index().Find("w").value();
  }
};

TEST(ReadDamage, FlippedByteErrorNamesTensorBoxFileAndLeaf) {
  // Byte 32 + 65536 + 5 of the file: the second leaf of writer 1's chunk.
  Flipped f(TwoChunks(true), 32 + 65536 + 5);
  std::string out(64 * 4096, '\0');
  const std::string where =
      "tensor w [0:64, 2048:4096]: data/11112222-r1.bin: byte 65568: checksum mismatch";
  for (const ReadVerify mode : {ReadVerify::kWholeLeaves, ReadVerify::kExtendLeaves}) {
    const Status status = f.opened->ReadBytes(f.entry, 0, out.data(), out.size(), mode, nullptr);
    EXPECT_THAT(status, HasCode(Code::kDataLoss));
    EXPECT_THAT(status, HasMessage(where));
  }
  EXPECT_OK(f.opened->ReadBytes(f.entry, 0, out.data(), out.size(), ReadVerify::kOff, nullptr));
  // Four bytes of that leaf: seen where reads are widened.
  const std::uint64_t offset = 33 * 4096 + 2048;
  EXPECT_THAT(
      f.opened->ReadBytes(f.entry, offset, out.data(), 4, ReadVerify::kExtendLeaves, nullptr),
      HasMessage(where));
  EXPECT_OK(f.opened->ReadBytes(f.entry, offset, out.data(), 4, ReadVerify::kWholeLeaves, nullptr));
  // Other leaves are whole.
  EXPECT_OK(f.opened->ReadBytes(f.entry, 2048, out.data(), 4, ReadVerify::kExtendLeaves, nullptr));
  ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                       VerifyCheckpoint(HostFileSystem(), f.dir.Join("c"), {}));
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].object, "tensor w [0:64, 2048:4096]");
  EXPECT_EQ(report.damages[0].file, "data/11112222-r1.bin");
  EXPECT_EQ(report.damages[0].offset, 65568u);
  EXPECT_EQ(report.damages[0].reason, "checksum mismatch");
  ASSERT_OK_AND_ASSIGN(const VerifyReport quick,
                       VerifyCheckpoint(HostFileSystem(), f.dir.Join("c"), {.quick = true}));
  EXPECT_TRUE(quick.damages.empty());
}

TEST(ReadDamage, ErrorNamesTheRightSmallNeighbor) {
  BuildSpec spec = TwoChunks(false);
  spec.partitions = {{{}, {}}};
  for (std::int64_t row = 0; row < 64; ++row) {
    spec.partitions[0][1].push_back(Region(Box::Make({row, 0}, {1, 4096}).value()));
  }
  Flipped f(spec, 32 + 20 * 4096 + 7);
  std::string out(64 * 4096, '\0');
  const auto read = [&](ReadVerify mode) {
    return f.opened->ReadBytes(f.entry, 4096 + 1, out.data(), 40 * 4096, mode, nullptr);
  };
  for (const ReadVerify mode : {ReadVerify::kWholeLeaves, ReadVerify::kExtendLeaves}) {
    EXPECT_THAT(read(mode), HasMessage("tensor w [20:21, 0:4096]: data/11112222-r1.bin: byte "
                                       "81952: checksum mismatch"));
  }
  EXPECT_OK(read(ReadVerify::kOff));
  WriteWholeFile(f.data, ReadWholeFile(f.data).substr(0, 32 + 30 * 4096 + 9));
  f.Reopen();
  EXPECT_THAT(read(ReadVerify::kOff), HasMessage("tensor w [30:31, 0:4096]: data/11112222-r1.bin: "
                                                 "byte 122921: the file ends here"));
}

TEST(ReadDamage, DigestDetectsDamageOutsideWholeLeaves) {
  // Column pieces out of rows cover no whole leaf.
  Flipped f(TwoChunks(false), 32 + 5);
  Crc64 sum = 0;
  for (const std::int64_t begin : {0, 2048}) {
    std::string out(64 * 2048, '\0');
    Crc64 digest = 0;
    ReadStats stats;
    ASSERT_OK(f.opened->Read(f.entry, Region(Box::Make({0, begin}, {64, 2048}).value()),
                             BufferView::Host(DType::kU8, out.data(), {64, 2048}),
                             ReadVerify::kWholeLeaves, &stats, &digest));
    EXPECT_EQ(stats.bytes_by_leaf, 0u);
    sum ^= digest;
  }
  EXPECT_NE(sum, f.entry.digest);
}

TEST(ReadDamage, ShortAndMissingFilesAreDataLoss) {
  Flipped f(TwoChunks(true), SIZE_MAX);
  std::string bytes = ReadWholeFile(f.data);
  WriteWholeFile(f.data, bytes.substr(0, bytes.size() - 1));
  f.Reopen();
  std::string out(64 * 4096, '\0');
  for (const ReadVerify mode : kModes) {
    EXPECT_THAT(f.opened->ReadBytes(f.entry, 0, out.data(), out.size(), mode, nullptr),
                HasMessage("tensor w [0:64, 2048:4096]: data/11112222-r1.bin: byte 131103: "
                           "the file ends here"));
  }
  ASSERT_OK_AND_ASSIGN(VerifyReport report,
                       VerifyCheckpoint(HostFileSystem(), f.dir.Join("c"), {.quick = true}));
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].reason, "the file has 131103 bytes, 131104 expected");
  ASSERT_OK(HostFileSystem().RemoveFile(f.data));
  f.Reopen();
  const Status missing =
      f.opened->ReadBytes(f.entry, 0, out.data(), out.size(), ReadVerify::kOff, nullptr);
  EXPECT_THAT(missing, HasCode(Code::kDataLoss));
  EXPECT_THAT(missing, HasMessage("the file is missing"));
  // The file, and what lies in it.
  ASSERT_OK_AND_ASSIGN(report, VerifyCheckpoint(HostFileSystem(), f.dir.Join("c"), {}));
  for (const char* object : {"data/11112222-r1.bin", "tensor w [0:64, 2048:4096]"}) {
    EXPECT_THAT(report.damages,
                testing::Contains(testing::Field(&VerifyReport::Damage::object, object)));
  }
}

TEST(ReadDamage, DamagedManifestVerifiesNothing) {
  Flipped f(TwoChunks(true), SIZE_MAX);
  const std::string path = f.dir.Join("c/manifest/rank-1.tmm");
  std::string bytes = ReadWholeFile(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);  // A leaf hash.
  WriteWholeFile(path, bytes);
  std::string out(64 * 4096, '\0');
  EXPECT_THAT(
      f.opened->ReadBytes(f.entry, 0, out.data(), out.size(), ReadVerify::kWholeLeaves, nullptr),
      HasMessage("rank-1.tmm: the leaf hashes do not match its chunk hash"));
  EXPECT_OK(f.opened->ReadBytes(f.entry, 0, out.data(), out.size(), ReadVerify::kOff, nullptr));
}

TEST(Read, RefusesRegionsAndBuffersThatDoNotFit) {
  Flipped f(TwoChunks(true), SIZE_MAX);
  std::string out(64 * 4096, '\0');
  const BufferView whole = BufferView::Host(DType::kU8, out.data(), {64, 4096});
  const auto read = [&](const Region& region, const BufferView& to) {
    return f.opened->Read(f.entry, region, to, ReadVerify::kOff, nullptr, nullptr);
  };
  EXPECT_OK(read(Region(Box::Whole({64, 4096})), whole));
  EXPECT_THAT(read(Region(Box::Make({1, 0}, {64, 4096}).value()), whole),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(read(Region(Box::Whole({64, 4095})), whole), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(
      read(Region(Box::Whole({64, 4096})), BufferView::Host(DType::kI8, out.data(), {64, 4096})),
      HasCode(Code::kInvalidArgument));
  EXPECT_THAT(f.opened->ReadBytes(f.entry, 64 * 4096, out.data(), 1, ReadVerify::kOff, nullptr),
              HasCode(Code::kInvalidArgument));
  BufferView device = whole;
  device.device.kind = DeviceKind::kCuda;
  EXPECT_THAT(read(Region(Box::Whole({64, 4096})), device), HasCode(Code::kUnsupported));
}

TEST(Read, TensorFileIsFound) {
  TempDir dir;
  const TinySpec spec = DefaultTinySpec();
  ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), dir.Join("store"), "c", spec, {}));
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenedCheckpoint::Open(HostFileSystem(), dir.Join("store/c"), {}));
  int found = 0;
  for (const TinyTensor& tensor : spec.tensors) {
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find(tensor.key));
    const Result<std::uint32_t> number = opened->WholeFileOf(entry);
    if (!tensor.tensor_file) {
      EXPECT_THAT(number, HasCode(Code::kNotFound)) << tensor.key;
      continue;
    }
    ASSERT_OK(number);
    const std::string file = opened->FilePath(number.value());
    EXPECT_EQ(ReadWholeFile(file), TinyBytes(tensor));
    ++found;
    // Another length: not handed out.
    ASSERT_EQ(chmod(file.c_str(), 0600), 0);
    WriteWholeFile(file, "short");
    EXPECT_THAT(opened->WholeFileOf(entry), HasCode(Code::kDataLoss));
  }
  EXPECT_EQ(found, 1);
}

TEST(Read, SafetensorsFileOpensAsACheckpoint) {
  TempDir dir;
  std::string bytes(1000, 'x');
  std::string header = R"({"w":{"dtype":"U8","shape":[1000],"data_offsets":[0,1000]}})";
  header.resize(64, ' ');
  std::string file(8, '\0');
  file[0] = 64;
  WriteWholeFile(dir.Join("model.safetensors"), file + header + bytes);
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenNamed(HostFileSystem(), dir.Join("model.safetensors"), {}));
  EXPECT_EQ(opened->name(), "model");
  EXPECT_EQ(opened->commit(), nullptr);
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("w"));
  EXPECT_FALSE(entry.has_digest);
  std::string out(10, '\0');
  ReadStats stats;
  ASSERT_OK(opened->ReadBytes(entry, 990, out.data(), 10, ReadVerify::kExtendLeaves, &stats));
  EXPECT_EQ(out, "xxxxxxxxxx");
  EXPECT_EQ(stats.bytes_by_leaf, 0u);
  EXPECT_THAT(opened->WholeFileOf(entry), HasCode(Code::kNotFound));  // A header stands before it.
  EXPECT_THAT(opened->index().Find("v"), HasCode(Code::kNotFound));
}

}  // namespace
}  // namespace tensormount
