// SPDX-License-Identifier: Apache-2.0
#include "fs/views/zarr_view.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "bench/synthetic_staging.h"
#include "fs/views/zarr_metadata.h"
#include "tests/fs/shown_fixture.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

using ::testing::ElementsAre;
using Json = nlohmann::json;

TinySpec ZarrSpec() {
  const std::string long_part(250, 'L');
  TinySpec spec;
  spec.tensors = {
      {.key = "rows", .dtype = DType::kF32, .shape = {13, 6}, .seed = 1, .parts = 3},
      {.key = "cols", .dtype = DType::kBF16, .shape = {6, 10}, .seed = 2, .parts = 4, .axis = 1},
      {.key = "cube", .dtype = DType::kC64, .shape = {4, 5, 6}, .seed = 3, .parts = 2, .axis = 1},
      {.key = "layers/0/w", .dtype = DType::kF64, .shape = {8, 3}, .seed = 4, .tensor_file = true},
      {.key = "layers/0/zarr.json", .dtype = DType::kI16, .shape = {9}, .seed = 5, .parts = 2},
      {.key = "layers/0", .dtype = DType::kF16, .shape = {1}, .seed = 6},
      {.key = "layers/0-x", .dtype = DType::kF8E4M3, .shape = {2, 2}, .seed = 7},
      {.key = "scalar", .dtype = DType::kI64, .shape = {}, .seed = 8},
      {.key = "none", .dtype = DType::kBool, .shape = {0, 4}, .seed = 9},
      {.key = "a/f4", .dtype = DType::kF4, .shape = {4, 6}, .seed = 10},
      {.key = "zarr.json", .dtype = DType::kU8, .shape = {3}, .seed = 11},
      {.key = "zarr.json/x", .dtype = DType::kU8, .shape = {3}, .seed = 12},
      // Between keys of one "%+" folder stands one that is not in it.
      {.key = "d/" + long_part.substr(0, 240) + "-x", .shape = {2}, .seed = 16},
      {.key = "d/" + long_part, .dtype = DType::kU8, .shape = {3, 2}, .seed = 13},
      {.key = "d/" + long_part.substr(0, 240) + "/in",
       .dtype = DType::kU8,
       .shape = {5},
       .seed = 14},
      {.key = "d/" + long_part.substr(0, 240) + "more",
       .dtype = DType::kU8,
       .shape = {5},
       .seed = 15},
  };
  return spec;
}

class ZarrTest : public testing::Test {
 protected:
  Result<ViewNode> Walk(const std::string& path) { return WalkView(view_, path); }
  Result<std::string> Read(const std::string& path) {
    return ReadView(fixture_.shown(), view_, path);
  }
  Json Metadata(const std::string& folder) {
    return Json::parse(Read(folder.empty() ? "zarr.json" : folder + "/zarr.json").value());
  }
  // All paths below a folder; what List, Lookup and Stat say is one.
  void Collect(const std::string& folder, std::map<std::string, ViewNode>& all) {
    const ViewNode node = Walk(folder).value();
    std::uint64_t cookie = 0;
    // One at a time, as a kernel with small buffers would.
    for (bool more = true; more;) {
      more = false;
      std::string name;
      ViewNode listed;
      ASSERT_OK(view_.List(node.item, cookie, [&](const ViewChild& child, std::uint64_t next) {
        if (!name.empty()) {
          more = true;
          return false;
        }
        name = child.name;
        listed = child.node;
        EXPECT_GT(next, cookie);
        cookie = next;
        return true;
      }));
      if (name.empty()) return;
      const std::string path = folder.empty() ? name : folder + "/" + name;
      ASSERT_TRUE(all.emplace(path, listed).second) << path;
      ASSERT_OK_AND_ASSIGN(const ViewChild found, view_.Lookup(node.item, name));
      ASSERT_OK_AND_ASSIGN(const ViewNode stat, view_.Stat(listed.item));
      for (const ViewNode& other : {found.node, stat}) {
        EXPECT_EQ(other.item, listed.item) << path;
        EXPECT_EQ(other.folder, listed.folder) << path;
        EXPECT_EQ(other.size, listed.size) << path;
        EXPECT_EQ(other.mtime, listed.mtime) << path;
        EXPECT_EQ(other.identity, listed.identity) << path;
      }
      EXPECT_EQ(view_.PathOf(listed.item), "zarr/" + path);
      EXPECT_LT(listed.item, View::kMaxItems);
      if (listed.folder) Collect(path, all);
    }
  }
  std::map<std::string, ViewNode> Collect() {
    std::map<std::string, ViewNode> all;
    Collect("", all);
    return all;
  }

  ShownFixture fixture_{ZarrSpec()};
  ZarrView view_{fixture_.shown()};
};

// What a Zarr library does, in short: the whole array from its metadata and chunks.
std::string Assemble(const Json& metadata, std::size_t item,
                     const std::function<std::string(const std::string&)>& chunk_of) {
  const std::vector<std::int64_t> shape = metadata["shape"];
  const std::vector<std::int64_t> chunk = metadata["chunk_grid"]["configuration"]["chunk_shape"];
  std::size_t cells = 1;
  for (const std::int64_t extent : shape) cells *= static_cast<std::size_t>(extent);
  std::string out(cells * item, '?');
  for (std::size_t i = 0; i < cells; ++i) {
    std::string name = "c";
    std::size_t left = i;
    std::size_t inner = cells;
    std::size_t at = 0;  // In the chunk.
    for (std::size_t a = 0; a < shape.size(); ++a) {
      inner /= static_cast<std::size_t>(shape[a]);
      const std::size_t index = left / inner;
      left %= inner;
      const std::size_t extent = static_cast<std::size_t>(chunk[a]);
      name += "." + std::to_string(index / extent);
      at = at * extent + index % extent;
    }
    out.replace(i * item, item, chunk_of(name).substr(at * item, item));
  }
  return out;
}

TEST_F(ZarrTest, EveryArrayReadsFromMetadataAndChunks) {
  const std::map<std::string, std::string> paths = {
      {"layers/0", "layers/0%="},
      {"layers/0/zarr.json", "layers/0/zarr%2Ejson"},
      {"zarr.json", "zarr.json%="},
      {"zarr.json/x", "zarr%2Ejson/x"},
  };
  for (const TinyTensor& tensor : fixture_.spec().tensors) {
    if (tensor.dtype == DType::kF4) continue;
    const auto renamed = paths.find(tensor.key);
    std::string path = renamed == paths.end() ? tensor.key : renamed->second;
    if (path.size() > 240 && path.find("/in") == std::string::npos) {
      path.insert(2, "%+");
      path.insert(244, "/");
    }
    SCOPED_TRACE(path);
    const Json metadata = Metadata(path);
    EXPECT_EQ(metadata["attributes"]["tensormount_key"], tensor.key);
    EXPECT_EQ(metadata["attributes"]["tensormount_dtype"], InfoOf(tensor.dtype).name);
    EXPECT_EQ(metadata["shape"].size(), static_cast<std::size_t>(tensor.shape.rank()));
    std::map<std::string, std::string> chunks;
    const std::string got =
        Assemble(metadata, InfoOf(tensor.dtype).bits / 8, [&](const std::string& name) {
          const auto [at, added] = chunks.try_emplace(name);
          if (added) at->second = Read(path + "/" + name).value();
          return at->second;
        });
    EXPECT_EQ(got, TinyBytes(tensor));
    for (const auto& [name, bytes] : chunks) EXPECT_EQ(bytes.size(), chunks.begin()->second.size());
  }
}

TEST_F(ZarrTest, ListingsContainEveryEntryOnce) {
  const std::map<std::string, ViewNode> all = Collect();
  std::set<std::uint64_t> items;
  std::set<std::pair<bool, std::string>> identities;
  for (const auto& [path, node] : all) {
    EXPECT_TRUE(items.insert(node.item).second) << path;
    EXPECT_TRUE(identities.insert({node.folder, node.identity}).second) << path;
    if (!node.folder) {
      EXPECT_THAT(Read(path), IsOk()) << path;
    }
  }
  const auto below = [&](const std::string& folder) {
    std::vector<std::string> names;
    for (const auto& [path, node] : all) {
      if (path.starts_with(folder) && path.find('/', folder.size()) == std::string::npos) {
        names.push_back(path.substr(folder.size()));
      }
    }
    return names;
  };
  EXPECT_THAT(below(""), ElementsAre("a", "cols", "cube", "d", "layers", "none", "rows", "scalar",
                                     "zarr%2Ejson", "zarr.json", "zarr.json%="));
  EXPECT_THAT(below("a/"), ElementsAre("zarr.json"));
  EXPECT_THAT(below("layers/"), ElementsAre("0", "0%=", "0-x", "zarr.json"));
  EXPECT_THAT(below("layers/0/"), ElementsAre("w", "zarr%2Ejson", "zarr.json"));
  EXPECT_THAT(below("rows/"), ElementsAre("c.0.0", "c.1.0", "c.2.0", "zarr.json"));
  EXPECT_THAT(below("cols/"), ElementsAre("c.0.0", "c.0.1", "c.0.2", "c.0.3", "zarr.json"));
  EXPECT_THAT(below("scalar/"), ElementsAre("c", "zarr.json"));
  EXPECT_THAT(below("none/"), ElementsAre("zarr.json"));
  EXPECT_THAT(below("zarr.json%=/"), ElementsAre("c.0", "zarr.json"));
}

TEST_F(ZarrTest, ConsolidatedMetadataCoversEveryDirectory) {
  const Json root = Metadata("");
  EXPECT_EQ(root["zarr_format"], 3);
  EXPECT_EQ(root["node_type"], "group");
  EXPECT_EQ(root["attributes"]["tensormount_left_out"], Json({"a/f4"}));
  EXPECT_EQ(root["consolidated_metadata"]["kind"], "inline");
  EXPECT_EQ(root["consolidated_metadata"]["must_understand"], false);
  const Json& metadata = root["consolidated_metadata"]["metadata"];
  std::size_t folders = 0;
  for (const auto& [path, node] : Collect()) {
    if (!node.folder) continue;
    ++folders;
    ASSERT_TRUE(metadata.contains(path)) << path;
    EXPECT_EQ(metadata[path], Metadata(path)) << path;
  }
  EXPECT_EQ(metadata.size(), folders);
  // A line each: none is said twice, which the parser would not see.
  const std::string text = Read("zarr.json").value();
  std::size_t lines = 0;
  for (std::size_t at = 0; (at = text.find("\n\"", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, folders);
}

TEST_F(ZarrTest, MetadataContainsAllThatZarrLibrariesNeed) {
  EXPECT_EQ(Metadata("rows"), Json::parse(R"({
    "zarr_format": 3, "node_type": "array", "shape": [13, 6], "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [5, 6]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    "fill_value": 0.0, "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "attributes": {"tensormount_key": "rows", "tensormount_dtype": "f32"}})"));
  EXPECT_EQ(Metadata("cols")["data_type"], "uint16");
  EXPECT_EQ(Metadata("layers/0-x")["data_type"], "uint8");
  EXPECT_EQ(Metadata("cube")["data_type"], "complex64");
  EXPECT_EQ(Metadata("cube")["fill_value"], Json({0.0, 0.0}));
  EXPECT_EQ(Metadata("none")["fill_value"], false);
  EXPECT_EQ(Metadata("none")["chunk_grid"]["configuration"]["chunk_shape"], Json({1, 4}));
  EXPECT_EQ(Metadata("scalar")["chunk_grid"]["configuration"]["chunk_shape"], Json::array());
  EXPECT_EQ(Metadata("a")["node_type"], "group");
}

TEST_F(ZarrTest, EveryWholeByteTypeHasAZarrType) {
  for (const DTypeInfo& info : AllDTypes()) {
    const std::string_view type = ZarrType(info.dtype);
    EXPECT_EQ(type.empty(), info.bits < 8) << info.name;
    if (type.empty() || type == "bool") continue;
    EXPECT_TRUE(type.ends_with(std::to_string(info.bits))) << info.name << " " << type;
  }
}

TEST_F(ZarrTest, NonCanonicalNamesAreNotFound) {
  for (const char* none :
       {"rows/c.3.0", "rows/c.0.1", "rows/c.00.0", "rows/c.0", "rows/c", "rows/c.0.0.0",
        "rows/c.-1.0", "rows/c.+1.0", "rows/c/0/0", "rows/d.0.0", "scalar/c.0", "none/c.0.0",
        "a/f4", "layers/1", "zarr%2Ejson/zarr%2Ejson", "c", "rows/rows"}) {
    EXPECT_THAT(Walk(none), HasCode(Code::kNotFound)) << none;
  }
  EXPECT_EQ(Walk("rows/zarr.json/x").status().ToErrno(), ENOTDIR);
}

TEST_F(ZarrTest, UnissuedItemNumbersAreStale) {
  std::set<std::uint64_t> items = {View::kRoot};
  for (const auto& [path, node] : Collect()) items.insert(node.item);
  for (std::uint64_t bit = 0; bit < 40; ++bit) {
    for (const std::uint64_t item : items) {
      const std::uint64_t other = item ^ (std::uint64_t{1} << bit);
      if (items.contains(other) || (other >> 39) != 0) continue;
      EXPECT_THAT(view_.Stat(other), HasCode(Code::kStale)) << item << " " << bit;
      EXPECT_THAT(view_.Open(other), HasCode(Code::kStale)) << item << " " << bit;
    }
  }
  EXPECT_THAT(view_.Stat(0), HasCode(Code::kStale));
  EXPECT_THAT(view_.Stat(~std::uint64_t{0}), HasCode(Code::kStale));
}

TEST_F(ZarrTest, ChunksHaveTimesAndAttributes) {
  const ViewNode chunk = Walk("cols/c.0.3").value();
  const OpenedCheckpoint& opened = fixture_.shown().opened;
  EXPECT_EQ(chunk.mtime, opened.index().Find("cols").value().mtime);
  EXPECT_EQ(chunk.size, 6u * 3 * 2);
  EXPECT_EQ(Walk("cols/zarr.json").value().mtime, opened.index().info().json_mtime);
  const auto attributes = view_.Attributes(chunk.item).value();
  EXPECT_EQ(attributes.at("key"), "cols");
  EXPECT_EQ(attributes.at("dtype"), "bf16");
  EXPECT_EQ(attributes.at("shape"), "[6, 3]");
  EXPECT_EQ(attributes.at("box"), "[0:6, 9:10]");
}

// With TENSORMOUNT_TEST_SCALE=100 the 100,000 tensors of a million chunks.
TEST(ZarrScaleTest, MetadataOfManyTensorsIsComplete) {
  const auto seconds_since = [](std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  TempDir dir;
  const SyntheticSpec spec{.tensors = TestScale(1000), .chunks_per_tensor = 10, .writers = 4};
  const Store store = Store::OpenOrCreate(HostFileSystem(), dir.Join("store")).value();
  const Staging staging = store.Begin("step-1", IfExists::kFail).value();
  ASSERT_OK(WriteSyntheticStaging(HostFileSystem(), staging, spec));
  ASSERT_OK(store.Publish(staging, Inventory(), {.now = 5000}));
  ASSERT_OK_AND_ASSIGN(const auto opened,
                       OpenedCheckpoint::Open(HostFileSystem(), dir.Join("store/step-1"), {}));
  const CheckpointIndex& index = opened->index();
  const auto tensors = std::make_unique<const ShownTensors>(index);
  const KeyTree tree(*tensors);
  const auto layers = LayerFiles::Make(index).value();
  const auto objects = ShownObjects::Make(index).value();
  const ShownCheckpoint shown{*opened, *tensors, tree, *layers, *objects};
  const ZarrView view(shown);
  auto start = std::chrono::steady_clock::now();
  ASSERT_OK_AND_ASSIGN(const ViewNode json, WalkView(view, "zarr.json"));
  std::printf("%d tensors: zarr.json of %llu bytes sized in %.3f s", spec.tensors,
              static_cast<unsigned long long>(json.size), seconds_since(start));
  start = std::chrono::steady_clock::now();
  std::uint64_t arrays = 0;
  std::vector<std::uint64_t> folders;
  ASSERT_OK(view.List(View::kRoot, 1, [&](const ViewChild& child, std::uint64_t) {
    if (child.node.folder) folders.push_back(child.node.item);
    ++arrays;
    return true;
  }));
  std::printf(", %llu names listed in %.3f s", static_cast<unsigned long long>(arrays),
              seconds_since(start));
  start = std::chrono::steady_clock::now();
  std::uint64_t files = 0;
  for (const std::uint64_t folder : folders) {
    ASSERT_OK(view.List(folder, 0, [&](const ViewChild&, std::uint64_t) {
      ++files;
      return true;
    }));
  }
  std::printf(", %llu below in %.3f s\n", static_cast<unsigned long long>(files),
              seconds_since(start));
  ASSERT_OK_AND_ASSIGN(const std::string text, ReadView(shown, view, "zarr.json"));
  EXPECT_EQ(Json::parse(text)["consolidated_metadata"]["metadata"].size(),
            static_cast<std::size_t>(spec.tensors));
  EXPECT_EQ(files, static_cast<std::uint64_t>(spec.tensors) * 11);
}

TEST(ZarrEmptyTest, CheckpointWithoutTensorsIsAnEmptyGroup) {
  const ShownFixture fixture{TinySpec{}};
  const ZarrView view(fixture.shown());
  ASSERT_OK_AND_ASSIGN(const std::string text, ReadView(fixture.shown(), view, "zarr.json"));
  EXPECT_EQ(Json::parse(text)["consolidated_metadata"]["metadata"], Json::object());
  EXPECT_THAT(WalkView(view, "w"), HasCode(Code::kNotFound));
}

// A tensor of 1-byte elements cut in these boxes, no data.
ZarrGrid GridOf(const Dims& shape, const std::vector<Region>& regions, std::uint64_t max = 1000) {
  Inventory inventory;
  inventory.info.uuid = {1, 2};
  inventory.files.push_back({.name = "data/x", .length = std::uint64_t{1} << 60, .root = {}});
  TensorRecord tensor(TensorMeta::Make("w", DType::kU8, shape).value());
  for (const Region& region : regions) {
    ChunkRecord chunk;
    chunk.region = region;
    chunk.length = static_cast<std::uint64_t>(region.volume());
    tensor.extents.Append(chunk);
  }
  tensor.extents.Sort();
  inventory.tensors.push_back(std::move(tensor));
  const auto index = CheckpointIndex::FromInventory(inventory).value();
  return ZarrGrid::Make(*index, index->At(0).value(), max).value();
}

Box BoxFrom(const Dims& begin, const Dims& extent) { return Box::Make(begin, extent).value(); }

TEST(ZarrGridTest, RegularChunksAreShownAsStored) {
  // 2-D, the last row and column smaller.
  std::vector<Region> regions;
  for (std::int64_t r = 0; r < 10; r += 4) {
    for (std::int64_t c = 0; c < 7; c += 3) {
      regions.push_back(
          BoxFrom({r, c}, {std::min<std::int64_t>(4, 10 - r), std::min<std::int64_t>(3, 7 - c)}));
    }
  }
  const ZarrGrid grid = GridOf({10, 7}, regions);
  EXPECT_EQ(grid.chunk(), (Dims{4, 3}));
  EXPECT_EQ(grid.chunks(), 9u);
  EXPECT_EQ(grid.BoxOf(5), BoxFrom({4, 6}, {4, 1}));
  EXPECT_EQ(grid.NameOf(5), "c.1.2");
  EXPECT_EQ(grid.NumberOf("c.1.2"), 5u);
  // Chunks that hold nothing, and copies of one, do not count.
  EXPECT_EQ(
      GridOf({4}, {BoxFrom({0}, {0}), BoxFrom({0}, {2}), BoxFrom({2}, {2}), BoxFrom({4}, {0})})
          .chunk(),
      (Dims{2}));
  EXPECT_EQ(GridOf({4}, {BoxFrom({0}, {2}), BoxFrom({0}, {2}), BoxFrom({2}, {2})}).chunk(),
            (Dims{2}));
}

TEST(ZarrGridTest, VeryLargePiecesAreCut) {
  constexpr std::int64_t kMi = 1 << 20;
  EXPECT_EQ(GridOf({1024, kMi}, {Box::Whole({1024, kMi})}).chunk(), (Dims{256, kMi}));
  EXPECT_EQ(GridOf({256, kMi}, {Box::Whole({256, kMi})}).chunk(), (Dims{256, kMi}));
  // Halves of columns of odd length.
  const ZarrGrid halves =
      GridOf({601, 2 * kMi}, {BoxFrom({0, 0}, {601, kMi}), BoxFrom({0, kMi}, {601, kMi})});
  EXPECT_EQ(halves.chunk(), (Dims{151, kMi}));
  EXPECT_EQ(halves.chunks(), 8u);
  // One row is too large.
  EXPECT_EQ(GridOf({1024 * kMi}, {Box::Whole({1024 * kMi})}).chunk(), (Dims{256 * kMi}));
}

TEST(ZarrGridTest, IrregularGridsAreCutIntoRows) {
  const Dims whole{6, 8};
  for (const std::vector<Region>& regions :
       {std::vector<Region>{BoxFrom({0, 0}, {2, 8}), BoxFrom({2, 0}, {3, 8}),
                            BoxFrom({5, 0}, {1, 8})},
        {BoxFrom({0, 0}, {4, 8}), BoxFrom({4, 0}, {1, 8}), BoxFrom({5, 0}, {1, 8})},
        {BoxFrom({0, 0}, {3, 4}), BoxFrom({0, 4}, {3, 4}), BoxFrom({3, 0}, {3, 8})},
        {Region::Flat(Box::Whole(whole), 0, 13).value(),
         Region::Flat(Box::Whole(whole), 13, 35).value()}}) {
    EXPECT_EQ(GridOf(whole, regions).chunk(), whole);
  }
  // Too many chunks for the numbers that there are.
  std::vector<Region> cells;
  for (std::int64_t i = 0; i < 20; ++i) cells.push_back(BoxFrom({i}, {1}));
  EXPECT_EQ(GridOf({20}, cells, 20).chunk(), (Dims{1}));
  EXPECT_EQ(GridOf({20}, cells, 19).chunk(), (Dims{20}));
}

TEST(ZarrGridTest, RowBlocksAreAFewMegabytes) {
  const auto rows = [](const Dims& shape, std::uint64_t max = std::uint64_t{1} << 20) {
    return ZarrGrid::RowBlocks(TensorMeta::Make("w", DType::kF32, shape).value(), max);
  };
  EXPECT_EQ(rows({100, 1000}).chunk(), (Dims{100, 1000}));
  EXPECT_EQ(rows({100'000, 1024}).chunk(), (Dims{8192, 1024}));
  EXPECT_EQ(rows({100'000, 1024}).chunks(), 13u);
  EXPECT_EQ(rows({3, 100'000, 1024}).chunk(), (Dims{1, 8192, 1024}));
  // Rows that are too large are cut too.
  EXPECT_EQ(rows({4, 100'000'000}).chunk(), (Dims{1, 8'388'608}));
  EXPECT_EQ(rows({100'000'000}).chunk(), (Dims{8'388'608}));
  // Never more than there are numbers for.
  const ZarrGrid large = rows({std::int64_t{1} << 40, 1024}, 1000);
  EXPECT_LE(large.chunks(), 1000u);
  EXPECT_GT(large.chunks(), 100u);
  EXPECT_EQ(rows({1, 1'000'000'000}, 1).chunks(), 1u);
}

}  // namespace
}  // namespace tensormount::fs
