// SPDX-License-Identifier: Apache-2.0
#include "base/coding.h"
#include "index/records/commit_record.h"
#include "index/records/completeness.h"
#include "index/records/manifest.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

CommitRecord SmallRecord() {
  CommitRecord record;
  record.uuid = {1, 2};
  record.generation = 3;
  record.parent = {4, 5};
  record.content_root = {6, 7};
  record.files = {{.name = "data/a", .length = 8, .hash = {9, 10}},
                  {.name = "index/index.sst", .length = 11, .hash = {12, 13}, .tail = {14, 15}}};
  return record;
}

// With a change made under valid checksums.
std::string Resealed(std::string bytes, std::size_t at, std::uint64_t value) {
  const auto length = LoadLittle<std::uint64_t>(bytes.data() + 40);
  const std::size_t half = bytes.size() / 2;
  for (const std::size_t copy : {std::size_t{0}, half}) {
    StoreLittle(bytes.data() + copy + at, value);
    ByteWriter sum;
    sum.Hash(Xxh3(bytes.data() + copy, length - 16));
    bytes.replace(copy + length - 16, 16, sum.bytes());
  }
  return bytes;
}

TEST(CommitRecord, CommitRecordRoundTrips) {
  const CommitRecord record = SmallRecord();
  const std::string bytes = EncodeCommit(record);
  EXPECT_EQ(bytes.size(), 8192u);
  ASSERT_OK_AND_ASSIGN(const DecodedCommit decoded, DecodeCommit(bytes, "COMMIT"));
  EXPECT_FALSE(decoded.one_copy_damaged);
  EXPECT_EQ(EncodeCommit(decoded.record), bytes);
  ASSERT_NE(decoded.record.Find("index/index.sst"), nullptr);
  EXPECT_EQ(decoded.record.Find("index/index.sst")->tail, (Hash128{14, 15}));
  EXPECT_EQ(decoded.record.Find("index/x"), nullptr);
}

TEST(CommitRecord, EveryFlippedBitIsDetected) {
  const std::string bytes = EncodeCommit(SmallRecord());
  // All of what is written, and a sample of the padding.
  const auto length = LoadLittle<std::uint64_t>(bytes.data() + 40);
  for (std::size_t byte = 0; byte < bytes.size(); ++byte) {
    const std::size_t in_copy = byte % 4096;
    if (in_copy >= length && in_copy % 97 != 0) continue;
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = bytes;
      flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << bit));
      ASSERT_OK_AND_ASSIGN(const DecodedCommit decoded, DecodeCommit(flipped, "COMMIT"));
      ASSERT_TRUE(decoded.one_copy_damaged) << byte;
      ASSERT_THAT(decoded.damage, testing::HasSubstr(byte < 4096 ? "first copy" : "second copy"));
      ASSERT_EQ(EncodeCommit(decoded.record), bytes);
      // The same bit in both copies: refused.
      const std::size_t other = (byte + 4096) % 8192;
      flipped[other] = static_cast<char>(flipped[other] ^ (1 << bit));
      ASSERT_THAT(DecodeCommit(flipped, "COMMIT"), HasCode(Code::kDataLoss)) << byte;
    }
  }
}

TEST(CommitRecord, SurvivesTruncationAfterTheFirstCopy) {
  CommitRecord record = SmallRecord();
  for (int i = 0; i < 100; ++i) {
    record.files.push_back({.name = "manifest/" + std::to_string(1000 + i)});
  }
  const std::string bytes = EncodeCommit(record);
  ASSERT_GT(bytes.size(), 2 * 4096u);
  const auto length = LoadLittle<std::uint64_t>(bytes.data() + 40);
  for (std::size_t size = 0; size < bytes.size(); size += 61) {
    const Result<DecodedCommit> decoded = DecodeCommit(bytes.substr(0, size), "COMMIT");
    if (size < length) {
      EXPECT_THAT(decoded, HasCode(Code::kDataLoss)) << size;
    } else {
      ASSERT_OK(decoded);
      EXPECT_TRUE(decoded.value().one_copy_damaged);
      EXPECT_EQ(EncodeCommit(decoded.value().record), bytes);
    }
  }
  ASSERT_OK_AND_ASSIGN(const DecodedCommit grown, DecodeCommit(bytes + "x", "COMMIT"));
  EXPECT_TRUE(grown.one_copy_damaged);
}

TEST(CommitRecord, CopiesThatDisagreeAreRefused) {
  CommitRecord other = SmallRecord();
  other.generation = 4;
  const std::string mixed =
      EncodeCommit(SmallRecord()).substr(0, 4096) + EncodeCommit(other).substr(4096);
  EXPECT_THAT(DecodeCommit(mixed, "COMMIT"), HasMessage("its two copies disagree"));
}

TEST(CommitRecord, OnlyUnknownIncompatibleBitsAreRefused) {
  const std::string bytes = EncodeCommit(SmallRecord());
  const Result<DecodedCommit> incompatible = DecodeCommit(Resealed(bytes, 32, 0x240), "COMMIT");
  EXPECT_THAT(incompatible, HasCode(Code::kUnsupported));
  EXPECT_THAT(incompatible, HasMessage("newer format: incompatible feature bits 0x240"));
  EXPECT_OK(DecodeCommit(Resealed(bytes, 16, 1), "COMMIT"));
  EXPECT_OK(DecodeCommit(Resealed(bytes, 24, 1), "COMMIT"));
}

TEST(CommitRecord, FileNamesOutsideTheCheckpointAreRefused) {
  for (const char* name : {"data/../../etc", "/data/x", "COMMIT", "data/", "data//x", "data/./x"}) {
    CommitRecord record = SmallRecord();
    record.files = {{.name = name}};
    EXPECT_THAT(DecodeCommit(EncodeCommit(record), "COMMIT"), HasCode(Code::kDataLoss)) << name;
  }
}

Inventory SmallInventory() {
  Inventory inventory;
  inventory.info.uuid = {1, 2};
  inventory.files.push_back({.name = "data/a", .placement = Placement::kPack, .length = 100});
  TensorRecord& tensor =
      inventory.tensors.emplace_back(TensorMeta::Make("w", DType::kF32, {2, 3}).value());
  tensor.digest = 77;
  tensor.has_digest = true;
  ChunkRecord chunk;
  chunk.region = Region(Box::Whole({2, 3}));
  chunk.length = 24;
  tensor.extents.Append(chunk);
  inventory.objects.push_back(
      {.key = "rng", .index = {0}, .grid = {1}, .offset = 24, .length = 5, .first_leaf = 1});
  inventory.extras.push_back({.offset = 30, .length = 2, .first_leaf = 2});
  inventory.common = {{"lr", 0.5}, {"n", std::int64_t{3}}};
  return inventory;
}

TEST(Manifest, ManifestRoundTrips) {
  const std::vector<Hash128> leaves = {{1, 2}, {3, 4}, {5, 6}};
  ASSERT_OK_AND_ASSIGN(const std::string bytes, EncodeManifest(SmallInventory(), leaves));
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, DecodeManifest(bytes, "manifest/a.tmm"));
  EXPECT_EQ(manifest.leaves, leaves);
  EXPECT_EQ(manifest.inventory.objects[0].first_leaf, 1u);
  EXPECT_EQ(manifest.inventory.common, SmallInventory().common);
  ASSERT_OK_AND_ASSIGN(const std::string again, EncodeManifest(manifest.inventory, leaves));
  EXPECT_EQ(again, bytes);
}

TEST(Manifest, ReservedCommonRecordsMayNameAnyKey) {
  const std::vector<Hash128> leaves = {{1, 2}, {3, 4}, {5, 6}};
  Inventory inventory = SmallInventory();
  inventory.common["$layers." + std::string(kMaxKeyBytes, 'k')] = "layers.{}";
  ASSERT_OK_AND_ASSIGN(const std::string bytes, EncodeManifest(inventory, leaves));
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, DecodeManifest(bytes, "manifest/a.tmm"));
  EXPECT_EQ(manifest.inventory.common, inventory.common);
  inventory.common[std::string(2 * kMaxKeyBytes, 'k')] = 1;
  EXPECT_THAT(EncodeManifest(inventory, leaves), HasCode(Code::kInvalidArgument));
}

// A manifest that is written must be readable.
TEST(Manifest, NamesThatTheDecoderRefusesAreNotWritten) {
  const std::vector<Hash128> leaves = {{1, 2}, {3, 4}, {5, 6}};
  const auto encoded = [&](const std::function<void(Inventory&)>& change) {
    Inventory inventory = SmallInventory();
    change(inventory);
    return EncodeManifest(inventory, leaves);
  };
  const auto foreign = [&](const std::string& name) {
    return encoded([&](Inventory& inventory) {
      inventory.files[0].name = name;
      inventory.files[0].placement = Placement::kForeign;
    });
  };
  const std::string longest(kMaxFileNameBytes, 'f');
  const auto kept = foreign(longest);
  ASSERT_OK(kept);
  EXPECT_OK(DecodeManifest(kept.value(), "manifest/a.tmm"));
  const auto refused = foreign(longest + "f");
  EXPECT_THAT(refused, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(refused, HasMessage("has 4097 bytes, at most 4096 are allowed"));
  EXPECT_THAT(refused, HasMessage("ffff"));
  for (const char* name : {"", "/a", "a/../b", "a//b"}) {
    EXPECT_THAT(foreign(name), HasCode(Code::kInvalidArgument)) << name;
  }
  const auto with = [&](auto change) { return encoded(change).status(); };
  EXPECT_THAT(with([](Inventory& i) { i.files[0].name = "elsewhere/a"; }),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(with([](Inventory& i) { i.info.parent_name.assign(kMaxTextBytes + 1, 'p'); }),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(with([](Inventory& i) { i.objects[0].key.assign(kMaxKeyBytes + 1, 'k'); }),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(with([](Inventory& i) {
                i.info.self_contained = false;
                i.info.root = "/" + std::string(kMaxFileNameBytes, 'r');
              }),
              HasCode(Code::kInvalidArgument));
  EXPECT_THAT(with([](Inventory& i) {
                i.info.self_contained = false;
                i.info.root = "relative";
              }),
              HasCode(Code::kInvalidArgument));
}

TEST(Manifest, EveryFlippedBitAndEveryCutIsRefused) {
  const std::vector<Hash128> leaves = {{1, 2}, {3, 4}, {5, 6}};
  ASSERT_OK_AND_ASSIGN(const std::string bytes, EncodeManifest(SmallInventory(), leaves));
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_THAT(DecodeManifest(flipped, "manifest/a.tmm"), HasCode(Code::kDataLoss)) << bit;
  }
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_THAT(DecodeManifest(bytes.substr(0, size), "m"), HasCode(Code::kDataLoss)) << size;
  }
  EXPECT_THAT(DecodeManifest(bytes + "x", "m"), HasCode(Code::kDataLoss));
}

// Checksums hold, contents lie: what decodes is refused or harmless, never a crash.
TEST(Manifest, WrongContentWithValidChecksumsDoesNotCrash) {
  const std::vector<Hash128> leaves = {{1, 2}, {3, 4}, {5, 6}};
  ASSERT_OK_AND_ASSIGN(const std::string bytes, EncodeManifest(SmallInventory(), leaves));
  const auto records = LoadLittle<std::uint64_t>(bytes.data() + 48);
  Random random(TestSeed());
  for (int i = 0; i < TestScale(3000); ++i) {
    std::string lie = bytes;
    for (int n = 0; n < 2; ++n) {
      lie[128 + static_cast<std::size_t>(random.Int(0, static_cast<int>(records) - 1))] =
          static_cast<char>(random.Next());
    }
    ByteWriter sum;
    sum.Hash(Xxh3(lie.data() + 128, records));
    lie.replace(72, 16, sum.bytes());
    sum.bytes().clear();
    sum.Hash(Xxh3(lie.data(), 112));
    lie.replace(112, 16, sum.bytes());
    const Result<Manifest> manifest = DecodeManifest(lie, "m");
    if (!manifest.ok()) {
      ASSERT_THAT(manifest.status().code(), testing::AnyOf(Code::kDataLoss, Code::kUnsupported));
      continue;
    }
    InventoryMerger merger;
    if (!merger.Add(manifest.value().inventory, "manifest/a.tmm").ok()) continue;
    Result<Inventory> inventory = merger.Finish();
    if (!inventory.ok()) continue;
    (void)CheckComplete(inventory.value());  // Must only not crash.
  }
}

TEST(Manifest, LeavesAreReadWithoutTheRestOfTheManifest) {
  TempDir dir;
  const std::vector<Hash128> leaves = {{1, 2}, {3, 4}, {5, 6}};
  ASSERT_OK_AND_ASSIGN(const std::string bytes, EncodeManifest(SmallInventory(), leaves));
  WriteWholeFile(dir.Join("m"), bytes);
  ASSERT_OK_AND_ASSIGN(const auto file, HostFileSystem().OpenRead(dir.Join("m")));
  EXPECT_THAT(ReadManifestLeaves(*file, 1, 2), IsOkAndHolds(std::vector<Hash128>{{3, 4}, {5, 6}}));
  EXPECT_THAT(ReadManifestLeaves(*file, 1, 3), HasCode(Code::kDataLoss));
  EXPECT_THAT(ReadManifestLeaves(*file, UINT64_MAX, 2), HasCode(Code::kDataLoss));
}

}  // namespace
}  // namespace tensormount
