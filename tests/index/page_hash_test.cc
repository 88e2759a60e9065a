// SPDX-License-Identifier: Apache-2.0
// Reads of checkpoints with page hashes (docs/format.md): proved by the pages that they touch,
// whichever way they take, and by whole leaves where the page hashes themselves are damaged.
#include "shard/page_hash.h"

#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "index/read/checkpoint.h"
#include "index/read/proven_ranges.h"
#include "index/records/manifest.h"
#include "tests/index/checkpoint_builder.h"
#include "tests/support/guard_for_a_while.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {
namespace {

TEST(PageHash, MatchesTheFormatSpecification) {
  std::string mark("tensormount pages v1\0", 21);
  std::string check("tensormount page block v1\0", 26);
  const std::uint64_t words[] = {1, 2, 3, 4, 5, 6};
  mark.append(reinterpret_cast<const char*>(words), 16);
  check.append(reinterpret_cast<const char*>(words), 48);
  EXPECT_EQ(PagesMark({1, 2}), Xxh3(mark));
  const std::vector<Hash128> pages = {{3, 4}, {5, 6}};
  EXPECT_EQ(PageBlockCheck({1, 2}, pages), Xxh3(check));

  // Two leaves, of 16 pages and of 2, the last of them 5 bytes.
  const std::uint64_t length = kLeafBytes + kHashPageBytes + 5;
  EXPECT_EQ(PagesOfLeaf(0, length), 16u);
  EXPECT_EQ(PagesOfLeaf(1, length), 2u);
  std::vector<Hash128> all(18);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = {i, ~i};
  const std::vector<Hash128> leaves = {{7, 7}, {8, 8}};
  std::vector<Hash128> out = {{9, 9}};
  AppendPageHashes(leaves, {1, 2}, all, out);
  ASSERT_EQ(out.size(), 1u + 1 + kPageBlockHashes + 3);
  EXPECT_EQ(out[1], PagesMark({1, 2}));
  EXPECT_EQ(out[2], all[0]);
  EXPECT_EQ(out[1 + kPageBlockHashes], PageBlockCheck(leaves[0], std::span(all).first(16)));
  EXPECT_EQ(out[2 + kPageBlockHashes], all[16]);
  EXPECT_EQ(out.back(), PageBlockCheck(leaves[1], std::span(all).last(2)));
}

class PageHashTest : public testing::TestWithParam<bool> {
 protected:
  static constexpr std::int64_t kRows = 24;
  static constexpr std::int64_t kColumns = 50'001;  // Rows lie across pages; the last is short.
  static constexpr std::uint64_t kHead = 32;        // What the builder puts before the first chunk.

  PageHashTest() : random_(TestSeed()) {
    if (GetParam()) guard_.emplace();
    tensor_ = {.key = "w", .dtype = DType::kU8, .shape = {kRows, kColumns}, .bytes = {}};
    tensor_.bytes = random_.Bytes(kRows * kColumns);
    spec_.tensors = {tensor_};
    spec_.partitions = {{{Region(Box::Whole(tensor_.shape))}, {}}};
    spec_.page_hashes = true;
    EXPECT_OK(BuildCheckpoint(HostFileSystem(), dir_.Join("c"), spec_));
  }

  // `verify` of a region, with a checkpoint that has read nothing yet.
  Status Read(const Box& box, std::string* got, ReadStats* stats,
              ReadVerify verify = ReadVerify::kExtendLeaves) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened,
                                 OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("c"), {}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, opened->index().Find("w"));
    got->assign(static_cast<std::size_t>(box.volume()), '?');
    return opened->Read(entry, Region(box), BufferView::Host(DType::kU8, got->data(), box.extent()),
                        verify, stats, nullptr);
  }

  // The bytes of the pages that hold a box.
  static std::uint64_t PagesOf(const Box& box) {
    std::set<std::int64_t> pages;
    for (std::int64_t row = box.begin(0); row < box.end(0); ++row) {
      const std::int64_t first = row * kColumns + box.begin(1);
      const std::int64_t last = row * kColumns + box.end(1) - 1;
      for (std::int64_t page = first / 4096; page <= last / 4096; ++page) pages.insert(page);
    }
    std::uint64_t bytes = 0;
    for (const std::int64_t page : pages) {
      bytes +=
          static_cast<std::uint64_t>(std::min<std::int64_t>(4096, kRows * kColumns - page * 4096));
    }
    return bytes;
  }

  void Rewrite(const std::string& name, const std::function<void(std::string&)>& change) {
    const std::string path = dir_.Join("c/" + name);
    std::string bytes = ReadWholeFile(path);
    change(bytes);
    WriteWholeFile(path, bytes);
  }
  std::string DataFile() const { return "data/" + spec_.uuid.Short() + "-r0.bin"; }

  Random random_;
  std::optional<GuardForAWhile> guard_;
  TempDir dir_;
  RandomTensor tensor_;
  BuildSpec spec_;
};
INSTANTIATE_TEST_SUITE_P(Guarded, PageHashTest, testing::Bool());

// Runs that are part of a leaf, parts of two leaves, columns with pages between them, and some that
// touch all.
TEST_P(PageHashTest, ReadsFetchOnlyTheTouchedPages) {
  std::vector<Box> boxes = {Box::Make({3, 100}, {1, 20}).value(), Box::Make({0, 0}, {1, 1}).value(),
                            Box::Make({23, 50'000}, {1, 1}).value(),
                            Box::Make({0, 700}, {kRows, 300}).value(),
                            Box::Make({2, 4'000}, {20, 9'000}).value()};
  for (int i = 0; i < 40; ++i) {
    const std::int64_t row = random_.Int(0, kRows - 1);
    const std::int64_t column = random_.Int(0, kColumns - 1);
    boxes.push_back(Box::Make({row, column},
                              {random_.Int(1, kRows - row),
                               random_.Int(1, std::min<std::int64_t>(kColumns - column, 12'000))})
                        .value());
  }
  for (const Box& box : boxes) {
    for (const ReadVerify verify : {ReadVerify::kExtendLeaves, ReadVerify::kOnce}) {
      std::string got;
      ReadStats stats;
      ASSERT_OK(Read(box, &got, &stats, verify)) << box.ToString();
      ASSERT_EQ(got, OracleBytes(tensor_, Region(box))) << box.ToString();
      ASSERT_EQ(stats.bytes_by_leaf, got.size()) << box.ToString();
      ASSERT_LE(stats.bytes_read, PagesOf(box)) << box.ToString();
    }
  }
}

// The page is named; the pages beside it, of the same leaf, are still read.
TEST_P(PageHashTest, DamagedPageIsNamedAndItsNeighborsRead) {
  constexpr std::int64_t kBad = 7 * kColumns + 20'000;  // Of the tensor.
  Rewrite(DataFile(), [](std::string& data) { data[kHead + kBad] ^= 4; });
  const std::string name =
      "byte " + std::to_string(kHead + kBad / 4096 * 4096) + ": checksum mismatch";
  std::string got;
  ReadStats stats;
  const Box bad[] = {Box::Make({7, 20'000}, {1, 1}).value(),
                     Box::Make({7, 19'000}, {1, 2'000}).value(),
                     Box::Make({0, 19'900}, {kRows, 200}).value()};
  for (const Box& box : bad) {
    for (const ReadVerify verify : {ReadVerify::kExtendLeaves, ReadVerify::kOnce}) {
      const Status status = Read(box, &got, &stats, verify);
      EXPECT_THAT(status, HasCode(Code::kDataLoss)) << box.ToString();
      EXPECT_THAT(status, HasMessage(name)) << box.ToString();
    }
  }
  for (const Box& box :
       {Box::Make({7, 10'000}, {1, 5'000}).value(), Box::Make({0, 30'000}, {kRows, 200}).value()}) {
    ASSERT_OK(Read(box, &got, &stats)) << box.ToString();
    EXPECT_EQ(got, OracleBytes(tensor_, Region(box)));
  }
}

// What is known to be good of a leaf is the page that was compared, and no other.
TEST_P(PageHashTest, VerifiedPageDoesNotVerifyItsLeaf) {
  constexpr std::uint64_t kBad = 5 * 4096 + 7;
  Rewrite(DataFile(), [](std::string& data) { data[kHead + kBad] ^= 4; });
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenedCheckpoint::Open(HostFileSystem(), dir_.Join("c"), {}));
  ASSERT_OK_AND_ASSIGN(const TensorEntry entry, opened->index().Find("w"));
  const std::string path = dir_.Join("c/" + DataFile());
  const Deadline deadline = Deadline::After(FileStamp::kSettleTime);
  while (!FileStamp::OfForeignFile(HostFileSystem().Stat(path).value()).IsSettled() &&
         !deadline.Passed()) {
    std::this_thread::yield();
  }
  const auto read = [&](std::uint64_t at, std::size_t size, std::uint64_t* from_storage) {
    std::string got(size, '?');
    ReadStats stats;
    const Status status = opened->ReadBytes(entry, at, got.data(), size, ReadVerify::kOnce, &stats);
    if (status.ok()) {
      EXPECT_EQ(got, tensor_.bytes.substr(at, size));
    }
    *from_storage = stats.bytes_read;
    return status;
  };
  std::uint64_t read_bytes = 0;
  ASSERT_OK(read(4'096, 8'192, &read_bytes));
  EXPECT_EQ(read_bytes, 8'192u);
  ASSERT_OK(read(5'000, 10, &read_bytes));  // Known to be good: no page around it.
  EXPECT_EQ(read_bytes, 10u);
  EXPECT_THAT(read(kBad - 3, 10, &read_bytes), HasCode(Code::kDataLoss));
  EXPECT_THAT(read(8'000, 20'000, &read_bytes), HasCode(Code::kDataLoss));
}

// A byte of the page hashes: what they were to prove is proved by its leaf, and only that.
TEST_P(PageHashTest, DamagedPageHashesAreIgnored) {
  const std::string manifest = "manifest/rank-0.tmm";
  const std::string before = ReadWholeFile(dir_.Join("c/" + manifest));
  const std::uint64_t leaves = LeafCount(kRows * kColumns);
  // The manifest ends with the mark and the blocks of its only long range.
  const std::uint64_t last = PagesOfLeaf(leaves - 1, kRows * kColumns) + 1;
  const std::uint64_t hashes = 1 + (leaves - 1) * kPageBlockHashes + last;
  const std::uint64_t mark = before.size() - hashes * sizeof(Hash128);
  const Box box = Box::Make({0, 700}, {1, 300}).value();  // In the first leaf.
  const auto hash_at = [&](std::uint64_t number) { return mark + number * sizeof(Hash128) + 3; };
  struct Case {
    std::uint64_t damaged;
    std::uint64_t read;
  };
  for (const Case& c :
       {Case{hash_at(0), kLeafBytes}, Case{hash_at(1), kLeafBytes}, Case{hash_at(9), kLeafBytes},
        Case{hash_at(17), kLeafBytes}, Case{hash_at(18), kHashPageBytes}}) {
    Rewrite(manifest, [&](std::string& bytes) { bytes[c.damaged] ^= 1; });
    std::string got;
    ReadStats stats;
    ASSERT_OK(Read(box, &got, &stats)) << c.damaged;
    EXPECT_EQ(got, OracleBytes(tensor_, Region(box)));
    EXPECT_EQ(stats.bytes_read, c.read) << c.damaged;
    ASSERT_OK_AND_ASSIGN(const VerifyReport report,
                         VerifyCheckpoint(HostFileSystem(), dir_.Join("c"), {}));
    EXPECT_EQ(report.damages.size(), 1u);
    Rewrite(manifest, [&](std::string& bytes) { bytes = before; });
  }
}

// A writer that got page hashes wrong, and their check right: the leaf has the last word, of whole
// bytes and of damaged ones.
TEST_P(PageHashTest, WrongPageHashesDoNotRefuseGoodData) {
  const std::string manifest = "manifest/rank-0.tmm";
  const std::string before = ReadWholeFile(dir_.Join("c/" + manifest));
  const std::uint64_t leaves = LeafCount(kRows * kColumns);
  const std::uint64_t last = PagesOfLeaf(leaves - 1, kRows * kColumns) + 1;
  const std::size_t block =
      before.size() - ((leaves - 1) * kPageBlockHashes + last) * sizeof(Hash128);
  Rewrite(manifest, [&](std::string& bytes) {
    std::vector<Hash128> pages(kPageBlockHashes - 1);
    bytes[block] ^= 1;  // Of the first page of the first leaf.
    std::memcpy(pages.data(), bytes.data() + block, pages.size() * sizeof(Hash128));
    const Hash128 check =
        PageBlockCheck(Xxh3(std::string_view(tensor_.bytes).substr(0, kLeafBytes)), pages);
    std::memcpy(bytes.data() + block + pages.size() * sizeof(Hash128), &check, sizeof(check));
  });
  const Box boxes[] = {Box::Make({0, 700}, {1, 300}).value(), Box::Make({0, 0}, {2, 9'000}).value(),
                       Box::Make({0, 700}, {kRows, 300}).value()};
  std::string got;
  ReadStats stats;
  for (const Box& box : boxes) {
    ASSERT_OK(Read(box, &got, &stats)) << box.ToString();
    EXPECT_EQ(got, OracleBytes(tensor_, Region(box)));
  }
  Rewrite(DataFile(), [](std::string& data) { data[kHead + 50] ^= 4; });  // Not what is wanted.
  for (const Box& box : boxes) EXPECT_THAT(Read(box, &got, &stats), HasCode(Code::kDataLoss));
}

// Gaps of some pages between runs as long: the gaps are spared, though much of all is wanted.
TEST_P(PageHashTest, PagesBetweenLongRunsAreNotRead) {
  const Box box = Box::Make({0, 0}, {kRows, 30'000}).value();
  std::string got;
  ReadStats stats;
  ASSERT_OK(Read(box, &got, &stats));
  EXPECT_EQ(got, OracleBytes(tensor_, Region(box)));
  EXPECT_LE(stats.bytes_read, PagesOf(box));
}

// Everything but the manifests, and COMMIT and the index that name them, is as without.
TEST(PageHash, PageHashesChangeOnlyTheManifests) {
  Random random(TestSeed());
  TempDir dir;
  BuildSpec spec;
  spec.tensors = {{.key = "w", .dtype = DType::kU8, .shape = {3, 70'000}, .bytes = {}}};
  spec.tensors[0].bytes = random.Bytes(210'000);
  spec.partitions = {{{Region(Box::Whole(spec.tensors[0].shape))}, {}}};
  ASSERT_OK_AND_ASSIGN(const auto plain,
                       BuildCheckpoint(HostFileSystem(), dir.Join("plain"), spec));
  spec.page_hashes = true;
  ASSERT_OK_AND_ASSIGN(const auto paged,
                       BuildCheckpoint(HostFileSystem(), dir.Join("paged"), spec));
  EXPECT_EQ(plain.commit.content_root, paged.commit.content_root);
  for (const CommitRecord::Entry& entry : plain.commit.files) {
    const std::string a = ReadWholeFile(dir.Join("plain/" + entry.name));
    const std::string b = ReadWholeFile(dir.Join("paged/" + entry.name));
    if (entry.name.starts_with("data/")) {
      EXPECT_EQ(a, b) << entry.name;
    }
    if (entry.name != "manifest/rank-0.tmm") continue;
    ASSERT_OK_AND_ASSIGN(const Manifest without, DecodeManifest(a, "a"));
    ASSERT_OK_AND_ASSIGN(const Manifest with, DecodeManifest(b, "b"));
    EXPECT_FALSE(without.extras.pages);
    EXPECT_TRUE(with.extras.pages);
    EXPECT_TRUE(std::equal(without.leaves.begin(), without.leaves.end(), with.leaves.begin()));
    const std::uint64_t leaves = LeafCount(210'000);
    EXPECT_EQ(with.leaves.size() - without.leaves.size(), 1 + leaves + (210'000 + 4095) / 4096);
  }
}

}  // namespace
}  // namespace tensormount
