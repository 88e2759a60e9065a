// SPDX-License-Identifier: Apache-2.0
// Tests which data are brought into the page cache, and when.
#include "index/read/prefetch.h"

#include <chrono>
#include <fcntl.h>
#include <thread>
#include <unistd.h>

#include "base/fetch_pages.h"
#include "shard/tensor_meta.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/random.h"
#include "tests/support/require.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

constexpr std::uint64_t kUnit = kFetchUnitBytes;

FileRecord FileOfLength(std::uint64_t length) {
  FileRecord file;
  file.length = length;
  return file;
}

using Numbers = std::vector<std::pair<std::uint32_t, std::uint64_t>>;  // File, number of the unit.

Numbers NumbersOf(FetchUnits& units) {
  Numbers numbers;
  for (const FetchUnit& unit : units.chosen()) {
    numbers.emplace_back(unit.file, unit.bytes.begin / kUnit);
  }
  return numbers;
}

TEST(FetchUnits, WholeFilesAreChosenInParts) {
  const std::vector<FileRecord> files = {FileOfLength(2 * kUnit + 1000), FileOfLength(100)};
  FetchUnits units(files);
  units.Add({0, {32, kUnit + 7}}, 0);  // Behind a small header.
  units.Add({1, {0, 100}}, 1);
  units.Add({0, {kUnit + 64, 2 * kUnit + 1000}}, 2);  // Behind a gap within a page.
  EXPECT_THAT(units.chosen(), IsEmpty());
  units.End();
  EXPECT_THAT(NumbersOf(units), ElementsAre(std::pair(0u, 0u), std::pair(0u, 1u), std::pair(0u, 2u),
                                            std::pair(1u, 0u)));
  EXPECT_EQ(units.chosen()[1].first_read, 0u);
  EXPECT_EQ(units.chosen()[1].last_read, 2u);
  EXPECT_EQ(units.chosen()[1].wanted, kUnit - 57);
  EXPECT_EQ(units.chosen()[2].bytes.size(), 1000u);
}

// Behind a unit the kernel reads on, so none is chosen near the end of what is wanted.
TEST(FetchUnits, UnitsBeforeUnwantedBytesAreNotChosen) {
  const std::vector<FileRecord> files = {FileOfLength(100 * kUnit)};
  FetchUnits units(files);
  units.Add({0, {10 * kUnit, 16 * kUnit}}, 0);
  units.Add({0, {20 * kUnit, 24 * kUnit}}, 1);
  units.Add({0, {30 * kUnit, 36 * kUnit - kUnit / 2}}, 2);
  units.Add({0, {95 * kUnit, 100 * kUnit}}, 3);
  units.End();
  EXPECT_THAT(
      NumbersOf(units),
      ElementsAre(std::pair(0u, 10u), std::pair(0u, 11u), std::pair(0u, 30u), std::pair(0u, 95u),
                  std::pair(0u, 96u), std::pair(0u, 97u), std::pair(0u, 98u), std::pair(0u, 99u)));
}

TEST(FetchUnits, FilesInTurnsAreStretchesOfTheirOwn) {
  const std::vector<FileRecord> files = {FileOfLength(4 * kUnit), FileOfLength(4 * kUnit)};
  FetchUnits units(files);
  for (std::uint64_t i = 0; i < 8; ++i) {
    for (const std::uint32_t file : {0u, 1u}) {
      units.Add({file, {i * kUnit / 2, (i + 1) * kUnit / 2}}, i);
    }
  }
  units.End();
  EXPECT_THAT(units.chosen(), SizeIs(8));
}

TEST(FetchUnits, StretchesOutsideTheFileAreIgnored) {
  const std::vector<FileRecord> files = {FileOfLength(4 * kUnit)};
  FetchUnits units(files);
  units.Add({0, {UINT64_MAX - kUnit, UINT64_MAX - 5}}, 0);
  units.Add({0, {3 * kUnit, 5 * kUnit}}, 0);
  units.Add({0, {kUnit, kUnit}}, 0);
  units.End();
  EXPECT_THAT(units.chosen(), IsEmpty());
}

class PrefetchTest : public testing::Test {
 protected:
  // A checkpoint of one tensor "w" of u8, [rows, columns], in one file.
  void Build(std::int64_t rows, std::int64_t columns) {
    Random random(TestSeed());
    BuildSpec spec;
    spec.writers = 1;
    spec.tensors.push_back({.key = "w",
                            .dtype = DType::kU8,
                            .shape = {rows, columns},
                            .bytes = random.Bytes(static_cast<std::size_t>(rows * columns))});
    spec.partitions.push_back({{Region(Box::Whole(spec.tensors[0].shape))}});
    ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir_.Join("c"), spec));
    bytes_ = spec.tensors[0].bytes;
    ASSERT_OK_AND_ASSIGN(opened_, OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("c"), {}));
    ASSERT_OK_AND_ASSIGN(entry_, opened_->index().Find("w"));
  }
  std::vector<PlacedBox> Boxes(const Dims& begin, const Dims& extent) const {
    const Region region(Box::Make(begin, extent).value());
    return PlacePacked(ByteRegion(entry_.meta.dtype(), entry_.meta.shape(), region).value(), 0);
  }
  std::vector<PlacedBox> Rows(std::int64_t first, std::int64_t count) const {
    return Boxes({first, 0}, {count, entry_.meta.shape()[1]});
  }
  // Removes the data from the page cache. False where that is not possible (tmpfs).
  bool Drop() {
    const int fd = open(opened_->FilePath(0).c_str(), O_RDONLY);
    EXPECT_GE(fd, 0);
    EXPECT_EQ(fsync(fd), 0);
    EXPECT_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
    return !Cached(0) && !Cached(bytes_.size() - 1);
  }
  bool Cached(std::uint64_t offset) const {
    return opened_->IsCached(0, 32 + offset).value_or(true);  // 32: an extra piece.
  }
  bool CachedSoon(std::uint64_t offset) const {
    for (int i = 0; i < 2000 && !Cached(offset); ++i) std::this_thread::sleep_for(milliseconds(5));
    return Cached(offset);
  }

  TempDir dir_;
  std::shared_ptr<OpenedCheckpoint> opened_;
  TensorEntry entry_;
  std::string bytes_;
};

TEST_F(PrefetchTest, StretchesAreTheRangesOfAReadWithItsSmallGaps) {
  constexpr std::int64_t kColumns = 200'000;
  ASSERT_NO_FATAL_FAILURE(Build(10, kColumns));
  const auto stretches = [&](const Dims& begin, const Dims& extent, int readers) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> out;
    const auto found = opened_->StretchesOf(entry_, Boxes(begin, extent), readers);
    EXPECT_OK(found);
    for (const auto& one : found.value()) out.emplace_back(one.bytes.begin, one.bytes.end);
    return out;
  };
  EXPECT_THAT(stretches({2, 0}, {3, kColumns}, 1),
              ElementsAre(std::pair(32 + 2 * kColumns, 32 + 5 * kColumns)));
  // A gap of 4,000 bytes is within a page; one of 5,000 is not.
  EXPECT_THAT(stretches({0, 4'000}, {2, kColumns - 4'000}, 1),
              ElementsAre(std::pair(32 + 4'000, 32 + 2 * kColumns)));
  EXPECT_THAT(stretches({0, 5'000}, {2, kColumns - 5'000}, 1), SizeIs(2));
  // Four readers of a quarter each fill the gaps, three do not.
  EXPECT_THAT(stretches({0, 0}, {2, 50'000}, 4),
              ElementsAre(std::pair(32, 32 + kColumns + 50'000)));
  EXPECT_THAT(
      stretches({0, 0}, {2, 50'000}, 3),
      ElementsAre(std::pair(32, 32 + 50'000), std::pair(32 + kColumns, 32 + kColumns + 50'000)));
}

TEST_F(PrefetchTest, ColdDataAreBroughtWithinTheLead) {
  constexpr std::int64_t kRow = 1 << 20;
  constexpr std::int64_t kRows = 96;  // One window and a half.
  ASSERT_NO_FATAL_FAILURE(Build(kRows, kRow));
  EXPECT_FALSE(Prefetcher::LooksCold(*opened_, {}));
  std::vector<std::vector<PlacedBox>> wanted;
  for (std::int64_t row = 0; row < kRows; ++row) wanted.push_back(Rows(row, 1));
  std::vector<Prefetcher::Read> reads;
  for (const std::vector<PlacedBox>& want : wanted) reads.push_back({&entry_, want, false});
  std::string got(bytes_.size(), '?');
  ASSERT_OK(opened_->ReadBytes(entry_, 0, got.data(), got.size(), ReadVerify::kOff, nullptr));
  EXPECT_FALSE(Prefetcher::LooksCold(*opened_, reads));
  if (!Drop()) GTEST_SKIP() << "files of this file system cannot leave the page cache";
  EXPECT_TRUE(Prefetcher::LooksCold(*opened_, reads));
  {
    Prefetcher prefetcher(*opened_, reads,
                          {.reader = 1, .readers = 3, .cancel = nullptr, .lead_bytes = 0});
    for (const std::int64_t row : {0, 20, 40, 62}) EXPECT_TRUE(CachedSoon(row * kRow)) << row;
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_FALSE(Cached((kRows - 1) * kRow)) << "nothing told it that the reader came nearer";
    prefetcher.Await(kRows / 2);
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_FALSE(Cached((kRows - 1) * kRow));
    prefetcher.Await(kRows - 1);
    EXPECT_TRUE(CachedSoon((kRows - 1) * kRow));
  }
  ASSERT_OK(
      opened_->ReadBytes(entry_, 0, got.data(), got.size(), ReadVerify::kExtendLeaves, nullptr));
  EXPECT_TRUE(got == bytes_);
}

TEST_F(PrefetchTest, ReadersOfOneMachineBringAllThatTheyWantTogether) {
  ASSERT_NO_FATAL_FAILURE(Build(16, 1 << 20));
  if (!Drop()) GTEST_SKIP() << "files of this file system cannot leave the page cache";
  const std::vector<PlacedBox> want = Rows(0, 4);
  Prefetcher prefetcher(*opened_, {{&entry_, want, true}}, {.reader = 3, .readers = 4});
  prefetcher.Await(0);
  for (std::int64_t row = 0; row < 16; ++row) EXPECT_TRUE(CachedSoon(row << 20)) << row;
}

TEST_F(PrefetchTest, EndsWhenTheLoadIsCancelled) {
  ASSERT_NO_FATAL_FAILURE(Build(32, 1 << 20));
  const std::vector<PlacedBox> want = Rows(0, 32);
  std::atomic<bool> cancel{true};
  const auto begin = std::chrono::steady_clock::now();
  {
    Prefetcher prefetcher(*opened_, {{&entry_, want, false}},
                          {.reader = 0, .readers = 1, .cancel = &cancel});
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

}  // namespace
}  // namespace tensormount
