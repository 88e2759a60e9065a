// SPDX-License-Identifier: Apache-2.0
#include "index/records/inventory.h"

#include "index/records/completeness.h"
#include "index/records/file_roots.h"
#include "index/records/manifest.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

Region BoxOf(const Dims& begin, const Dims& extent) {
  return Region(Box::Make(begin, extent).value());
}

ChunkRecord Chunk(const Region& region, std::uint32_t file, std::uint64_t offset,
                  std::uint64_t element_bytes) {
  ChunkRecord chunk;
  chunk.region = region;
  chunk.file = file;
  chunk.offset = offset;
  chunk.length = static_cast<std::uint64_t>(region.volume()) * element_bytes;
  chunk.hash = {offset + 1, 42};
  return chunk;
}

TensorMeta Meta(const std::string& key, DType dtype, const Dims& shape) {
  return TensorMeta::Make(key, dtype, shape).value();
}

// One writer's content with one tensor in one file.
Inventory WriterInventory(const std::string& key, const Dims& shape, const std::string& file,
                          const std::vector<Region>& regions) {
  Inventory inventory;
  inventory.info.uuid = {1, 2};
  inventory.files.push_back({.name = file, .placement = Placement::kRankShard});
  TensorRecord& tensor = inventory.tensors.emplace_back(Meta(key, DType::kF32, shape));
  tensor.has_digest = true;
  std::uint64_t offset = 0;
  for (const Region& region : regions) {
    tensor.extents.Append(Chunk(region, 0, offset, 4));
    offset += static_cast<std::uint64_t>(region.volume()) * 4;
  }
  inventory.files[0].length = offset;
  return inventory;
}

Result<Inventory> Merge(const std::vector<Inventory>& writers) {
  InventoryMerger merger;
  for (std::size_t i = 0; i < writers.size(); ++i) {
    TENSORMOUNT_RETURN_IF_ERROR(
        merger.Add(writers[i], "manifest/rank-" + std::to_string(i) + ".tmm"));
  }
  return merger.Finish();
}

TEST(Uuid, TextRoundTrips) {
  const Uuid uuid{0x0123456789abcdef, 0xfedcba9876543210};
  EXPECT_EQ(uuid.ToString(), "0123456789abcdeffedcba9876543210");
  EXPECT_EQ(uuid.Short(), "01234567");
  EXPECT_EQ(Uuid::Parse(uuid.ToString()), uuid);
  EXPECT_FALSE(Uuid::Parse("0123456789ABCDEFfedcba9876543210"));
  EXPECT_FALSE(Uuid::Parse("0123"));
  EXPECT_NE(Uuid::Random(), Uuid::Random());
}

TEST(ExtentTable, RowsRoundTrip) {
  ExtentTable table(2);
  ChunkRecord box = Chunk(BoxOf({1, 2}, {3, 4}), 5, 600, 4);
  box.manifest = 7;
  box.first_leaf = 8;
  const Region flat = Region::Flat(Box::Make({2, 0}, {4, 10}).value(), 5, 17).value();
  ASSERT_TRUE(flat.is_flat());
  table.Append(box);
  table.Append(Chunk(flat, 1, 0, 4));
  ASSERT_EQ(table.size(), 2u);
  ASSERT_OK_AND_ASSIGN(const ChunkRecord first, table.At(0));
  EXPECT_EQ(first.region, box.region);
  EXPECT_EQ(first.file, 5u);
  EXPECT_EQ(first.manifest, 7u);
  EXPECT_EQ(first.offset, 600u);
  EXPECT_EQ(first.length, 48u);
  EXPECT_EQ(first.first_leaf, 8u);
  EXPECT_EQ(first.hash, box.hash);
  EXPECT_TRUE(first.has_hash);
  ASSERT_OK_AND_ASSIGN(const ChunkRecord second, table.At(1));
  EXPECT_EQ(second.region, flat);
  EXPECT_THAT(table.At(2), HasCode(Code::kDataLoss));
}

TEST(ExtentTable, RefusesMalformedRows) {
  EXPECT_THAT(ExtentTable::FromPacked(2, std::string(ExtentTable(2).row_bytes() + 1, '\0')),
              HasCode(Code::kDataLoss));
  EXPECT_THAT(ExtentTable::FromPacked(17, ""), HasCode(Code::kDataLoss));
  // No flip of a bit may crash; what still decodes lies within bounds.
  ExtentTable table(2);
  table.Append(Chunk(Region::Flat(Box::Make({2, 0}, {4, 10}).value(), 5, 17).value(), 1, 0, 4));
  for (std::size_t bit = 0; bit < table.packed().size() * 8; ++bit) {
    std::string rows(table.packed());
    rows[bit / 8] = static_cast<char>(rows[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_OK_AND_ASSIGN(ExtentTable flipped, ExtentTable::FromPacked(2, rows));
    flipped.Sort();
    const Result<ChunkRecord> chunk = flipped.At(0);
    if (chunk.ok()) {
      EXPECT_GE(chunk.value().region.volume(), 0);
    }
  }
}

TEST(ExtentTable, SortsByFirstElement) {
  ExtentTable table(2);
  table.Append(Chunk(BoxOf({4, 0}, {4, 8}), 0, 0, 4));
  table.Append(Chunk(Region::Flat(Box::Make({0, 0}, {4, 8}).value(), 9, 23).value(), 1, 0, 4));
  table.Append(Chunk(Region::Flat(Box::Make({0, 0}, {4, 8}).value(), 0, 9).value(), 2, 0, 4));
  table.Sort();
  EXPECT_EQ(table.At(0).value().file, 2u);
  EXPECT_EQ(table.At(1).value().file, 1u);
  EXPECT_EQ(table.At(2).value().file, 0u);
}

TEST(InventoryMerger, MergeIgnoresManifestOrder) {
  Inventory a = WriterInventory("w", {4, 4}, "data/b", {BoxOf({0, 0}, {2, 4})});
  Inventory b = WriterInventory("w", {4, 4}, "data/a", {BoxOf({2, 0}, {2, 4})});
  a.tensors[0].digest = 5;
  b.tensors[0].digest = 6;
  InventoryMerger one;
  ASSERT_OK(one.Add(a, "manifest/z.tmm"));
  ASSERT_OK(one.Add(b, "manifest/y.tmm"));
  InventoryMerger two;
  ASSERT_OK(two.Add(b, "manifest/y.tmm"));
  ASSERT_OK(two.Add(a, "manifest/z.tmm"));
  ASSERT_OK_AND_ASSIGN(const Inventory x, one.Finish());
  ASSERT_OK_AND_ASSIGN(const Inventory y, two.Finish());
  EXPECT_EQ(x.files[0].name, "data/a");
  EXPECT_EQ(x.manifests, (std::vector<std::string>{"manifest/y.tmm", "manifest/z.tmm"}));
  EXPECT_EQ(x.tensors[0].digest, 3u);
  EXPECT_EQ(x.tensors[0].extents.packed(), y.tensors[0].extents.packed());
  const ChunkRecord first = x.tensors[0].extents.At(0).value();
  EXPECT_EQ(first.file, 1u);      // data/b
  EXPECT_EQ(first.manifest, 1u);  // manifest/z.tmm
  EXPECT_OK(CheckComplete(x));
}

TEST(InventoryMerger, RefusesDisagreement) {
  const Inventory a = WriterInventory("w", {4, 4}, "data/a", {BoxOf({0, 0}, {2, 4})});
  EXPECT_THAT(Merge({a, WriterInventory("w", {4, 5}, "data/b", {})}),
              HasMessage("tensor w: writers disagree: f32[4, 4] and f32[4, 5]"));
  Inventory longer = a;
  longer.files[0].length += 1;
  EXPECT_THAT(Merge({a, longer}), HasMessage("data/a: writers disagree"));
  Inventory other = a;
  other.info.uuid = {1, 3};
  EXPECT_THAT(Merge({a, other}), HasMessage("belongs to checkpoint"));
  Inventory wild = a;
  wild.tensors[0].extents = ExtentTable(2);
  wild.tensors[0].extents.Append(Chunk(BoxOf({0, 0}, {2, 4}), 1, 0, 4));
  EXPECT_THAT(Merge({wild}), HasMessage("file number 1"));
  Inventory object = a;
  object.objects.push_back({.key = "rng"});
  EXPECT_THAT(Merge({object, object}), HasMessage("object rng: the part was written twice"));
  InventoryMerger twice;
  ASSERT_OK(twice.Add(a, "manifest/a.tmm"));
  EXPECT_THAT(twice.Add(a, "manifest/a.tmm"), HasCode(Code::kDataLoss));
}

TEST(InventoryMerger, MergedContentMustMatchTheCoordinatorList) {
  const Inventory a = WriterInventory("w", {4, 4}, "data/a", {BoxOf({0, 0}, {4, 4})});
  ASSERT_OK_AND_ASSIGN(Inventory merged, Merge({a}));
  merged.tensors[0].mtime = 99;
  merged.info.producer = "p";
  Inventory list = CoordinatorInventory(merged);
  const auto with = [&](const Inventory& coordinator) {
    InventoryMerger merger;
    EXPECT_OK(merger.Add(coordinator, std::string(kCoordinatorManifest)));
    EXPECT_OK(merger.Add(a, "manifest/rank-0.tmm"));
    return merger.Finish();
  };
  ASSERT_OK_AND_ASSIGN(const Inventory again, with(list));
  EXPECT_EQ(again.tensors[0].mtime, 99);
  EXPECT_EQ(again.info.producer, "p");
  list.tensors[0].digest ^= 1;
  EXPECT_THAT(with(list), HasMessage("dtype, shape or digest"));
  list = CoordinatorInventory(merged);
  list.tensors.emplace_back(Meta("x", DType::kF32, {1}));
  EXPECT_THAT(with(list), HasMessage("lists 2 tensors, but the writers wrote 1"));
}

TEST(CheckComplete, ErrorNamesTheMissingOrDuplicateBox) {
  ASSERT_OK_AND_ASSIGN(Inventory gap,
                       Merge({WriterInventory("w", {4, 8}, "data/a",
                                              {BoxOf({0, 0}, {4, 3}), BoxOf({0, 4}, {4, 4})})}));
  EXPECT_THAT(CheckComplete(gap), HasMessage("tensor w: [0:4, 3:4] is stored in no chunk"));
  ASSERT_OK_AND_ASSIGN(Inventory overlap,
                       Merge({WriterInventory("w", {4, 8}, "data/a", {BoxOf({0, 0}, {4, 5})}),
                              WriterInventory("w", {4, 8}, "data/b", {BoxOf({0, 4}, {4, 4})})}));
  EXPECT_THAT(CheckComplete(overlap),
              HasMessage("tensor w: [0:4, 4:5] is stored twice: in data/a and data/b"));
  ASSERT_OK_AND_ASSIGN(Inventory nothing, Merge({WriterInventory("w", {4, 8}, "data/a", {})}));
  EXPECT_THAT(CheckComplete(nothing), HasMessage("[0:4, 0:8] is stored in no chunk"));
  // Rows that follow each other, but stop early.
  ASSERT_OK_AND_ASSIGN(Inventory early,
                       Merge({WriterInventory("w", {4, 8}, "data/a", {BoxOf({0, 0}, {3, 8})})}));
  EXPECT_THAT(CheckComplete(early), HasMessage("[3:4, 0:8] is stored in no chunk"));
}

TEST(CheckComplete, AcceptsFlatCutsAndEmptyTensors) {
  const Box whole = Box::Make({0, 0}, {4, 8}).value();
  ASSERT_OK_AND_ASSIGN(Inventory flat,
                       Merge({WriterInventory("w", {4, 8}, "data/a",
                                              {Region::Flat(whole, 0, 11).value(),
                                               Region::Flat(whole, 11, 21).value()}),
                              WriterInventory("zero", {0, 8}, "data/b", {}),
                              WriterInventory("scalar", {}, "data/c", {Region(Box())})}));
  EXPECT_OK(CheckComplete(flat));
}

// Cells of an uneven grid, whole and with one cell wrong in every way.
TEST(CheckComplete, DetectsEveryFlawOfAGrid) {
  const std::vector<std::int64_t> rows = {0, 1, 4};
  const std::vector<std::int64_t> columns = {0, 5, 6, 8};
  std::vector<Region> cells;
  for (std::size_t r = 0; r + 1 < rows.size(); ++r) {
    for (std::size_t c = 0; c + 1 < columns.size(); ++c) {
      cells.push_back(
          BoxOf({rows[r], columns[c]}, {rows[r + 1] - rows[r], columns[c + 1] - columns[c]}));
    }
  }
  const auto check = [](const std::vector<Region>& regions) {
    Result<Inventory> inventory = Merge({WriterInventory("w", {4, 8}, "data/a", regions)});
    EXPECT_OK(inventory);
    return CheckComplete(inventory.value());
  };
  EXPECT_OK(check(cells));
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const Box& box = cells[i].box();
    for (int axis = 0; axis < 2; ++axis) {
      for (const std::int64_t by : {-1, 1}) {
        std::vector<Region> flawed = cells;
        Dims begin = box.begin();
        Dims extent = box.extent();
        extent[axis] += by;
        if (extent[axis] > 0 && begin[axis] + extent[axis] <= (axis == 0 ? 4 : 8)) {
          flawed[i] = BoxOf(begin, extent);
          EXPECT_THAT(check(flawed), HasCode(Code::kDataLoss)) << i << axis << by;
        }
        begin[axis] += by;
        extent = box.extent();
        if (begin[axis] >= 0 && begin[axis] + extent[axis] <= (axis == 0 ? 4 : 8)) {
          flawed[i] = BoxOf(begin, extent);
          EXPECT_THAT(check(flawed), HasCode(Code::kDataLoss)) << i << axis << by;
        }
      }
    }
    std::vector<Region> missing = cells;
    missing.erase(missing.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_THAT(check(missing), HasMessage(cells[i].ToString() + " is stored in no chunk"));
    std::vector<Region> twice = cells;
    twice.push_back(cells[i]);
    EXPECT_THAT(check(twice), HasMessage("is stored twice"));
  }
}

TEST(CheckComplete, ComparesLengthsWithRegionsAndFiles) {
  Inventory inventory = WriterInventory("w", {4, 8}, "data/a", {});
  ChunkRecord chunk = Chunk(BoxOf({0, 0}, {4, 8}), 0, 0, 4);
  chunk.length -= 1;
  inventory.files[0].length = 128;
  inventory.manifests = {"manifest/a.tmm"};
  inventory.tensors[0].extents.Append(chunk);
  EXPECT_THAT(CheckComplete(inventory), HasMessage("127 bytes are stored, 128 are needed"));
  chunk.length = 128;
  inventory.files[0].length = 100;
  inventory.tensors[0].extents = ExtentTable(2);
  inventory.tensors[0].extents.Append(chunk);
  EXPECT_THAT(CheckComplete(inventory),
              HasMessage("data/a: a chunk reaches past the end of the file"));
}

TEST(CheckComplete, RefusesUnknownChunkKinds) {
  ASSERT_OK_AND_ASSIGN(Inventory inventory,
                       Merge({WriterInventory("w", {4, 8}, "data/a", {BoxOf({0, 0}, {4, 8})})}));
  ASSERT_OK(CheckComplete(inventory));
  const std::string rows(inventory.tensors[0].extents.packed());
  // Flags that format 1 does not have on disk: pending, and one that is nothing.
  for (const int flag : {8, 16}) {
    std::string odd = rows;
    odd[24] = static_cast<char>(odd[24] | flag);
    ASSERT_OK_AND_ASSIGN(inventory.tensors[0].extents, ExtentTable::FromPacked(2, odd));
    EXPECT_THAT(CheckComplete(inventory), HasMessage("a chunk has unknown flags"));
    EXPECT_FALSE(inventory.tensors[0].extents.At(0).ok());
  }
}

// A region has one row: another that means the same is refused, also where the chunks come one
// after the other.
TEST(CheckComplete, RefusesNonCanonicalRows) {
  const Box whole = Box::Make({0, 0}, {4, 8}).value();
  ASSERT_OK_AND_ASSIGN(Inventory inventory,
                       Merge({WriterInventory("w", {4, 8}, "data/a",
                                              {Region::Flat(whole, 0, 11).value(),
                                               Region::Flat(whole, 11, 21).value()})}));
  ASSERT_OK(CheckComplete(inventory));
  const std::string rows(inventory.tensors[0].extents.packed());
  const auto check = [&](std::size_t at, std::uint64_t value) {
    std::string odd = rows;
    StoreLittle(odd.data() + at, value);
    Result<ExtentTable> table = ExtentTable::FromPacked(2, odd);
    EXPECT_OK(table);
    inventory.tensors[0].extents = std::move(table).value();
    const Status status = CheckComplete(inventory);
    EXPECT_EQ(status.code(), Code::kDataLoss) << status.ToString();
    return status.message();
  };
  EXPECT_THAT(check(52, 1), testing::HasSubstr("stored twice"));              // Its first element.
  EXPECT_THAT(check(60, 12), testing::HasSubstr("44 bytes are stored, 48"));  // Their number.
  EXPECT_THAT(check(60, 0), testing::HasSubstr("44 bytes are stored, 0"));
  EXPECT_THAT(check(68 + 16, 1), testing::HasSubstr("row 0"));  // One row of the shape.
  EXPECT_THAT(check(24, 1 | std::uint64_t{44} << 32),
              testing::HasSubstr("a box has fields of a flat range"));

  // Two rows each, with nothing wrong but how that is written.
  ASSERT_OK_AND_ASSIGN(inventory,
                       Merge({WriterInventory("w", {4, 8}, "data/a",
                                              {BoxOf({0, 0}, {2, 8}), BoxOf({2, 0}, {2, 8})})}));
  ASSERT_OK(CheckComplete(inventory));
  std::string odd(inventory.tensors[0].extents.packed());
  odd[24] = static_cast<char>(odd[24] | 2);
  odd[60] = 16;
  ASSERT_OK_AND_ASSIGN(inventory.tensors[0].extents, ExtentTable::FromPacked(2, odd));
  EXPECT_THAT(CheckComplete(inventory), HasMessage("a flat range is equal to a box"));
  odd[24] = static_cast<char>(odd[24] & ~2);
  ASSERT_OK_AND_ASSIGN(inventory.tensors[0].extents, ExtentTable::FromPacked(2, odd));
  EXPECT_THAT(CheckComplete(inventory), HasMessage("a box has fields of a flat range"));
}

TEST(CheckComplete, SubByteChunksMustMeetAtWholeBytes) {
  const auto check = [](std::int64_t cut, std::uint64_t length, std::uint64_t rest) {
    Inventory inventory = WriterInventory("w", {4, 6}, "data/a", {});
    inventory.tensors[0].meta = Meta("w", DType::kF4, {4, 6});
    inventory.manifests = {"manifest/a.tmm"};
    const Box whole = Box::Make({0, 0}, {4, 6}).value();
    const std::pair<std::int64_t, std::int64_t> parts[] = {{0, cut}, {cut, 24 - cut}};
    std::uint64_t offset = 0;
    for (const auto& [first, count] : parts) {
      ChunkRecord chunk = Chunk(Region::Flat(whole, first, count).value(), 0, offset, 4);
      chunk.length = first == 0 ? length : rest;
      offset += chunk.length;
      inventory.tensors[0].extents.Append(chunk);
    }
    inventory.files[0].length = 12;
    return CheckComplete(inventory);
  };
  EXPECT_OK(check(8, 4, 8));
  EXPECT_THAT(check(8, 5, 7), HasMessage("5 bytes are stored, 4 are needed"));
  EXPECT_THAT(check(7, 4, 8), HasCode(Code::kDataLoss));
  EXPECT_THAT(check(7, 3, 8), HasCode(Code::kDataLoss));
}

TEST(CheckComplete, ObjectsMustFillTheirGrids) {
  Inventory inventory;
  inventory.files.push_back({.name = "data/a", .placement = Placement::kPack});
  inventory.manifests = {"manifest/a.tmm"};
  for (const std::int64_t i : {0, 1, 3}) {
    inventory.objects.push_back({.key = "rng", .index = {i / 2, i % 2}, .grid = {2, 2}});
  }
  EXPECT_THAT(CheckComplete(inventory), HasMessage("object rng: part [1, 0] of its grid"));
  inventory.objects.insert(inventory.objects.begin() + 2,
                           {.key = "rng", .index = {1, 0}, .grid = {2, 2}});
  EXPECT_OK(CheckComplete(inventory));
}

TEST(FileRoots, RefuseOverlappingAndOutOfFileRanges) {
  Inventory inventory = WriterInventory("w", {4, 8}, "data/a", {BoxOf({0, 0}, {4, 8})});
  const Result<std::vector<FileRoot>> roots = FileRootsOf(inventory);
  ASSERT_OK(roots);
  EXPECT_NE(roots.value()[0].root, Hash128{});
  EXPECT_EQ(roots.value()[0].ranges, 1u);
  inventory.extras.push_back({.file = 0, .offset = 127, .length = 1});
  EXPECT_THAT(FileRootsOf(inventory), HasMessage("at byte 127 overlaps the range before it"));
  inventory.extras[0].offset = 128;
  EXPECT_THAT(FileRootsOf(inventory), HasMessage("reaches past the end"));
  inventory.files[0].length = 129;
  const Result<std::vector<FileRoot>> more = FileRootsOf(inventory);
  ASSERT_OK(more);
  EXPECT_NE(more.value()[0].root, roots.value()[0].root);
  EXPECT_EQ(more.value()[0].ranges, 2u);
}

TEST(ContentRoot, DependsOnContentAndNotOnPlacement) {
  Inventory inventory = WriterInventory("w", {4, 8}, "data/a", {BoxOf({0, 0}, {4, 8})});
  const Hash128 root = ContentRoot(inventory);
  Inventory moved = inventory;
  moved.files[0].name = "data/b";
  moved.tensors[0].mtime = 5;
  ChunkRecord chunk = inventory.tensors[0].extents.At(0).value();
  chunk.offset = 64;
  chunk.first_leaf = 3;
  moved.tensors[0].extents = ExtentTable(2);
  moved.tensors[0].extents.Append(chunk);
  EXPECT_EQ(ContentRoot(moved), root);
  chunk.hash.low ^= 1;
  moved.tensors[0].extents = ExtentTable(2);
  moved.tensors[0].extents.Append(chunk);
  EXPECT_NE(ContentRoot(moved), root);
  moved = inventory;
  moved.common["a"] = true;
  EXPECT_NE(ContentRoot(moved), root);
}

}  // namespace
}  // namespace tensormount
