// SPDX-License-Identifier: Apache-2.0
// Reads that compare bytes with their hashes once, and again when their file has changed.
#include <fcntl.h>
#include <functional>
#include <future>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "base/deadline.h"
#include "index/read/checkpoint.h"
#include "index/read/proven_ranges.h"
#include "index/records/lru_cache.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {

// A key of a cache whose hash is computed under the lock of the cache, and may take long.
struct SlowKey {
  int number = 0;
  std::function<void()> hashing;
  bool operator==(const SlowKey& other) const { return number == other.number; }
};

}  // namespace tensormount

template <>
struct std::hash<tensormount::SlowKey> {
  std::size_t operator()(const tensormount::SlowKey& key) const {
    if (key.hashing) key.hashing();
    return static_cast<std::size_t>(key.number);
  }
};

namespace tensormount {
namespace {

FileStamp StampAt(std::uint64_t inode) {
  return {.device = 1, .inode = inode, .size = 4000, .changed_seconds = 1000};
}

TEST(ProvenRanges, MatchAPerByteModel) {
  Random random(TestSeed());
  ProvenRanges ranges;
  constexpr std::size_t kBytes = 400;
  std::vector<bool> good(kBytes, false);
  std::uint64_t inode = 1;
  for (int i = 0; i < TestScale(4000); ++i) {
    const auto begin = static_cast<std::size_t>(random.Int(0, kBytes));
    const auto end = static_cast<std::size_t>(
        random.Int(static_cast<std::int64_t>(begin),
                   std::min<std::int64_t>(kBytes, static_cast<std::int64_t>(begin) + 40)));
    if (random.OneIn(100)) {  // The file changed.
      ++inode;
      ASSERT_FALSE(ranges.AreProven(7, StampAt(inode), {begin, begin + 1}));
      good.assign(kBytes, false);
    }
    ranges.Add(7, StampAt(inode), {begin, end});
    std::fill(good.begin() + static_cast<std::ptrdiff_t>(begin),
              good.begin() + static_cast<std::ptrdiff_t>(end), true);
    ASSERT_EQ(ranges.Bytes(7, StampAt(inode)),
              static_cast<std::uint64_t>(std::count(good.begin(), good.end(), true)));
    ASSERT_EQ(ranges.Bytes(7, StampAt(inode + 1)), 0u);
    const auto from = static_cast<std::size_t>(random.Int(0, kBytes - 1));
    const auto to =
        static_cast<std::size_t>(random.Int(static_cast<std::int64_t>(from) + 1, kBytes));
    const bool all =
        std::all_of(good.begin() + static_cast<std::ptrdiff_t>(from),
                    good.begin() + static_cast<std::ptrdiff_t>(to), [](bool g) { return g; });
    ASSERT_EQ(ranges.AreProven(7, StampAt(inode), {from, to}), all) << from << " " << to;
    ASSERT_FALSE(ranges.AreProven(8, StampAt(inode), {from, to}));
  }
}

TEST(ProvenRanges, AreBounded) {
  ProvenRanges ranges;
  const FileStamp stamp = StampAt(1);
  for (std::uint64_t i = 0; i < ProvenRanges::kMaxRanges + 10; ++i) {
    ranges.Add(0, stamp, {10 * i, 10 * i + 5});
  }
  const std::uint64_t last = 10 * (ProvenRanges::kMaxRanges + 9);
  EXPECT_TRUE(ranges.AreProven(0, stamp, {0, 5}));
  EXPECT_FALSE(ranges.AreProven(0, stamp, {last, last + 5}));
  // What joins others always fits.
  ranges.Add(0, stamp, {0, last + 5});
  EXPECT_TRUE(ranges.AreProven(0, stamp, {0, last + 5}));
  ranges.Add(1, stamp, {0, 5});
  EXPECT_TRUE(ranges.AreProven(1, stamp, {0, 5}));
}

// A thread that frees descriptors of other checkpoints may hold what a reader of this one waits
// for.
TEST(LruCacheTest, ClearWaitsForOtherThreadsOnlyIfAllowed) {
  LruCache<SlowKey, int> cache(100);
  const SlowKey one{.number = 1};
  cache.Put(one, std::make_shared<int>(1), 1);
  std::promise<void> inside;
  std::promise<void> cleared;
  bool in_time = false;
  const SlowKey slow{.number = 2, .hashing = [&] {
                       inside.set_value();
                       // The limit is for a Clear that waits after all, which is then seen below.
                       in_time = cleared.get_future().wait_for(std::chrono::seconds(30)) ==
                                 std::future_status::ready;
                     }};
  std::thread reader([&] { EXPECT_EQ(cache.Get(slow), nullptr); });
  inside.get_future().wait();
  cache.Clear(/*may_wait=*/false);
  cleared.set_value();
  reader.join();
  EXPECT_TRUE(in_time);
  EXPECT_NE(cache.Get(one), nullptr);
  cache.Clear(/*may_wait=*/false);
  EXPECT_EQ(cache.Get(one), nullptr) << "nobody had the lock";
}

TEST(FileStamp, IsSettledAfterATimestampGrain) {
  TempDir dir;
  const std::string path = dir.Join("f");
  WriteWholeFile(path, "1");
  const auto stamp = [&] { return FileStamp::OfForeignFile(HostFileSystem().Stat(path).value()); };
  EXPECT_FALSE(stamp().IsSettled());
  const Deadline deadline = Deadline::After(FileStamp::kSettleTime);
  while (!stamp().IsSettled() && !deadline.Passed()) std::this_thread::yield();
  const FileStamp before = stamp();
  ASSERT_TRUE(before.IsSettled());
  WriteWholeFile(path, "2");
  EXPECT_NE(stamp(), before);
  FileStamp odd = before;
  odd.changed_seconds = INT64_MAX;
  EXPECT_TRUE(odd.IsSettled());
  odd.changed_seconds = INT64_MIN;
  EXPECT_TRUE(odd.IsSettled());
  // Of a file system that does not tell files and their changes apart.
  FileStamp unknown;
  unknown.size = 1;
  unknown.modified_seconds = 1;
  EXPECT_FALSE(unknown.IsSettled());
}

TEST(FileStamp, HardLinkIsNotTakenForAWrite) {
  TempDir dir;
  const std::string path = dir.Join("f");
  WriteWholeFile(path, "1");
  const FileStamp one = FileStamp::OfStoreFile(HostFileSystem().Stat(path).value());
  FileStamp two = one;
  EXPECT_TRUE(two.IsUnwrittenSince(one));
  two.links = 2;
  two.changed_nanoseconds += 1;
  EXPECT_TRUE(two.IsUnwrittenSince(one));
  EXPECT_TRUE(one.IsUnwrittenSince(two));
  FileStamp written = two;
  written.modified_nanoseconds += 1;
  EXPECT_FALSE(written.IsUnwrittenSince(one));
  FileStamp put_back = two;
  put_back.changed_seconds += 1;
  EXPECT_FALSE(put_back.IsUnwrittenSince(two));
  // Of other programs' files nobody knows who links them.
  FileStamp foreign = FileStamp::OfForeignFile(HostFileSystem().Stat(path).value());
  const FileStamp before = foreign;
  foreign.changed_nanoseconds += 1;
  EXPECT_FALSE(foreign.IsUnwrittenSince(before));
}

// Who looked before the link must not make its state the known one again: a change that is like
// another link from there would go unseen.
TEST(ProvenRanges, FollowAHardLinkForwardOnly) {
  const auto stamp = [](std::uint64_t links, std::int64_t changed) {
    return FileStamp{
        .device = 1, .inode = 2, .size = 9, .changed_seconds = changed, .links = links};
  };
  ProvenRanges ranges;
  ranges.Add(0, stamp(1, 100), {0, 9});
  EXPECT_TRUE(ranges.AreProven(0, stamp(2, 200), {0, 9}));
  EXPECT_TRUE(ranges.AreProven(0, stamp(1, 100), {0, 9}));
  EXPECT_FALSE(ranges.AreProven(0, stamp(2, 201), {0, 9}));
  EXPECT_TRUE(ranges.AreProven(0, stamp(3, 300), {0, 9}));
  EXPECT_TRUE(ranges.AreProven(0, stamp(2, 400), {0, 9}));
  EXPECT_EQ(ranges.Bytes(0, stamp(2, 400)), 9u);
  EXPECT_FALSE(ranges.AreProven(0, stamp(2, 401), {0, 9}));
  // What is added in another state is all that is known.
  ranges.Add(0, stamp(2, 401), {3, 4});
  EXPECT_FALSE(ranges.AreProven(0, stamp(2, 401), {0, 9}));
  EXPECT_TRUE(ranges.AreProven(0, stamp(2, 401), {3, 4}));
}

// With page hashes, and without.
class ReadOnce : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    Random random(TestSeed());
    for (const char* key : {"a", "b"}) {
      RandomTensor tensor{.key = key, .dtype = DType::kU8, .shape = {300, 1000}, .bytes = {}};
      tensor.bytes = random.Bytes(300 * 1000);
      spec_.tensors.push_back(std::move(tensor));
    }
    const auto columns = [](std::int64_t from, std::int64_t to) {
      return Region(Box::Make({0, from}, {300, to - from}).value());
    };
    const auto rows = [](std::int64_t from, std::int64_t to) {
      return Region(Box::Make({from, 0}, {to - from, 1000}).value());
    };
    spec_.partitions = {{{columns(0, 377)}, {columns(377, 1000)}},
                        {{rows(0, 101)}, {rows(101, 300)}}};
    spec_.objects = {{.key = "o", .bytes = random.Bytes(200'000)}};
    spec_.page_hashes = GetParam();
    ASSERT_OK(BuildCheckpoint(HostFileSystem(), dir_.Join("c"), spec_));
    ASSERT_OK_AND_ASSIGN(opened_, OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("c"), {}));
    for (const FileRecord& file : opened_->index().files()) {
      files_.push_back(dir_.Join("c/" + file.name));
    }
  }
  // Waits until no file's state is of a moment ago.
  void Settle() const {
    for (const std::string& path : files_) {
      const Deadline deadline = Deadline::After(FileStamp::kSettleTime);
      while (!FileStamp::OfForeignFile(HostFileSystem().Stat(path).value()).IsSettled() &&
             !deadline.Passed()) {
        std::this_thread::yield();
      }
    }
  }
  TempDir dir_;
  BuildSpec spec_;
  std::shared_ptr<OpenedCheckpoint> opened_;
  std::vector<std::string> files_;
};

INSTANTIATE_TEST_SUITE_P(PageHashes, ReadOnce, testing::Bool());

// Reads of every kind beside damage that comes and goes, often within one tick of the clock: what
// is handed out is always right, and nothing is refused while all is whole.
TEST_P(ReadOnce, EveryDamageIsDetectedAndGoodDataIsRead) {
  Random random(TestSeed() + 1);
  std::vector<std::pair<std::string, std::uint64_t>> damage;
  int failed = 0;
  int good = 0;
  for (int i = 0; i < TestScale(600); ++i) {
    if (random.OneIn(25)) Settle();
    if (random.OneIn(6)) {
      const std::string& path = random.Pick(files_);
      const auto size = static_cast<std::int64_t>(HostFileSystem().Stat(path).value().size);
      damage.emplace_back(path, static_cast<std::uint64_t>(random.Int(0, size - 1)));
      FlipByte(damage.back().first, damage.back().second);
    } else if (!damage.empty() && random.OneIn(2)) {
      FlipByte(damage.back().first, damage.back().second);
      damage.pop_back();
    }
    const RandomTensor& tensor = random.Pick(spec_.tensors);
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened_->index().Find(tensor.key));
    Status status;
    if (random.OneIn(3)) {
      const Dims begin{random.Int(0, 299), random.Int(0, 999)};
      const Dims extent{random.Int(1, 300 - begin[0]), random.Int(1, 1000 - begin[1])};
      const Region region(Box::Make(begin, extent).value());
      ShardMemory out = MakeShardMemory(random, tensor, region, false);
      status = opened_->Read(entry, region, out.view, ReadVerify::kOnce, nullptr, nullptr);
      if (status.ok()) {
        ASSERT_EQ(CellsOf(tensor, out), OracleBytes(tensor, region));
      }
    } else if (random.OneIn(3)) {
      ASSERT_OK_AND_ASSIGN(const auto parts, opened_->index().ObjectParts("o"));
      const auto at = static_cast<std::size_t>(random.Int(0, 199'999));
      const auto n =
          static_cast<std::size_t>(random.Int(1, static_cast<std::int64_t>(200'000 - at)));
      std::string got(n, '?');
      status = opened_->ReadObject(parts[0], at, got.data(), n, ReadVerify::kOnce);
      if (status.ok()) {
        ASSERT_EQ(got, spec_.objects[0].bytes.substr(at, n));
      }
    } else {
      const auto at = static_cast<std::size_t>(random.Int(0, 299'999));
      auto n = static_cast<std::size_t>(random.Int(1, static_cast<std::int64_t>(300'000 - at)));
      if (random.OneIn(2)) n = std::min<std::size_t>(n, 3'000);  // Some pages of a leaf.
      ASSERT_OK_AND_ASSIGN(const auto mapped, opened_->MapBytes(entry, at, n, ReadVerify::kOnce));
      std::string in_place;
      for (const auto& piece : mapped) {
        in_place.append(reinterpret_cast<const char*>(piece.data), piece.size);
      }
      if (!mapped.empty()) {
        ASSERT_EQ(in_place, tensor.bytes.substr(at, n));
      }
      std::string got(n, '?');
      status = opened_->ReadBytes(entry, at, got.data(), n, ReadVerify::kOnce, nullptr);
      if (status.ok()) {
        ASSERT_EQ(got, tensor.bytes.substr(at, n));
      }
    }
    if (damage.empty()) {
      ASSERT_OK(status);
    }
    ++(status.ok() ? good : failed);
  }
  EXPECT_GT(failed, 0);
  EXPECT_GT(good, 0);
}

TEST_P(ReadOnce, VerifiedBytesAreNotHashedAgain) {
  ASSERT_OK_AND_ASSIGN(const TensorEntry rows, opened_->index().Find("b"));
  std::string all(300'000, '?');
  Settle();
  EXPECT_TRUE(opened_->MapBytes(rows, 0, 101'000, ReadVerify::kOnce).value().empty());
  ReadStats first;
  ASSERT_OK(opened_->ReadBytes(rows, 0, all.data(), all.size(), ReadVerify::kOnce, &first));
  EXPECT_EQ(first.bytes_by_leaf, all.size());
  ReadStats second;
  ASSERT_OK(opened_->ReadBytes(rows, 0, all.data(), all.size(), ReadVerify::kOnce, &second));
  EXPECT_EQ(second.bytes_by_leaf, 0u);
  EXPECT_FALSE(opened_->MapBytes(rows, 0, 101'000, ReadVerify::kOnce).value().empty());
  EXPECT_TRUE(opened_->MapBytes(rows, 0, 101'000, ReadVerify::kExtendLeaves).value().empty());
  // Its own, not its neighbours'.
  ASSERT_OK_AND_ASSIGN(const TensorEntry columns, opened_->index().Find("a"));
  ReadStats other;
  ASSERT_OK(opened_->ReadBytes(columns, 5, all.data(), 10, ReadVerify::kOnce, &other));
  EXPECT_EQ(other.bytes_by_leaf, 10u);
}

// A later save links a file, and a checkpoint that shared it is deleted: nothing is compared again.
// What is written after that, and given its old time, is noticed all the same.
TEST_P(ReadOnce, HardLinksOfLaterSavesCauseNoRehash) {
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened_->index().Find("b"));
  std::string all(300'000, '?');
  const auto hashed = [&]() -> Result<std::uint64_t> {
    ReadStats stats;
    TENSORMOUNT_RETURN_IF_ERROR(
        opened_->ReadBytes(entry, 0, all.data(), all.size(), ReadVerify::kOnce, &stats));
    return stats.bytes_by_leaf;
  };
  Settle();
  EXPECT_EQ(hashed().value(), all.size());
  EXPECT_EQ(hashed().value(), 0u);
  for (const std::string& path : files_) ASSERT_EQ(link(path.c_str(), (path + ".b").c_str()), 0);
  EXPECT_EQ(hashed().value(), 0u);
  for (const std::string& path : files_) ASSERT_EQ(link(path.c_str(), (path + ".c").c_str()), 0);
  EXPECT_EQ(hashed().value(), 0u);
  for (const std::string& path : files_) ASSERT_EQ(unlink((path + ".b").c_str()), 0);
  EXPECT_EQ(hashed().value(), 0u);
  Settle();
  for (const std::string& path : files_) {
    struct stat st;
    ASSERT_EQ(stat(path.c_str(), &st), 0);
    const timespec times[2] = {st.st_atim, st.st_mtim};
    for (std::int64_t at = 100; at < st.st_size; at += 1000) {
      FlipByte(path, static_cast<std::uint64_t>(at));
    }
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  }
  EXPECT_THAT(hashed(), HasCode(Code::kDataLoss));
}

// A damaged file that is restored by another one of its name serves again, without a new open.
TEST_P(ReadOnce, RepairedFileIsReadAgain) {
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened_->index().Find("a"));
  std::string got(300'000, '?');
  std::string damaged;
  for (const std::string& path : files_) {
    const std::string bytes = ReadWholeFile(path);
    const std::size_t at = bytes.find(spec_.tensors[0].bytes.substr(0, 64));
    if (at == std::string::npos) continue;
    damaged = path;
    WriteWholeFile(path + ".copy", bytes);
    FlipByte(path, at + 10);
  }
  ASSERT_NE(damaged, "");
  const auto read = [&] {
    return opened_->ReadBytes(entry, 0, got.data(), got.size(), ReadVerify::kOnce, nullptr);
  };
  EXPECT_THAT(read(), HasCode(Code::kDataLoss));
  ASSERT_EQ(rename((damaged + ".copy").c_str(), damaged.c_str()), 0);
  EXPECT_OK(read());
  EXPECT_EQ(got, spec_.tensors[0].bytes);
}

}  // namespace
}  // namespace tensormount
