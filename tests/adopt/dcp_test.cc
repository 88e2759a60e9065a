// SPDX-License-Identifier: Apache-2.0
// Checkpoints of torch.distributed.checkpoint, Megatron-Core and OLMo-core, read in place. The
// fixtures are written by tests/golden/foreign/make_dcp.py (torch 2.13 itself) and make_dcp_old.py.
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <map>
#include <sys/stat.h>

#include "index/archives/pickle.h"
#include "index/foreign/dcp_metadata.h"
#include "index/foreign/format.h"
#include "index/foreign/megatron.h"
#include "index/read/checkpoint.h"
#include "tests/adopt/adopted.h"
#include "tests/adopt/zip_builder.h"
#include "tests/support/cells.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/subprocess.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// What the generators put into cell `i` of a tensor.
std::string Formula(DType dtype, std::int64_t i) {
  const std::int64_t value = (i * 7 + 3) % 251;
  std::string out(InfoOf(dtype).bits / 8, '\0');
  const auto put = [&](auto v) { std::memcpy(out.data(), &v, sizeof v); };
  switch (dtype) {
    case DType::kBool:
      out[0] = i % 3 == 0 ? 1 : 0;
      break;
    case DType::kF32:
      put(static_cast<float>(value));
      break;
    case DType::kF64:
      put(static_cast<double>(value));
      break;
    case DType::kBF16: {
      const auto wide = static_cast<float>(value);
      std::memcpy(out.data(), reinterpret_cast<const char*>(&wide) + 2, 2);
      break;
    }
    default:  // Integers, and float8 by its bytes.
      std::memcpy(out.data(), &value, out.size());
  }
  return out;
}

struct Opened {
  ForeignInventory inventory;
  std::string root;

  const TensorRecord* Tensor(const std::string& key) const {
    for (const TensorRecord& tensor : inventory.inventory.tensors) {
      if (tensor.meta.key() == key) return &tensor;
    }
    return nullptr;
  }
  const ObjectRecord* Object(const std::string& key) const {
    for (const ObjectRecord& object : inventory.inventory.objects) {
      if (object.key == key) return &object;
    }
    return nullptr;
  }
  std::vector<std::string> Keys() const {
    std::vector<std::string> out;
    for (const TensorRecord& tensor : inventory.inventory.tensors) out.push_back(tensor.meta.key());
    return out;
  }
  const CommonValue* Common(const std::string& name) const {
    const auto it = inventory.inventory.common.find(name);
    return it == inventory.inventory.common.end() ? nullptr : &it->second;
  }
  std::string Warnings() const {
    std::string out;
    for (const std::string& warning : inventory.warnings) out += warning + "\n";
    return out;
  }
};

Result<Opened> Open(const std::string& path, FileSystem& fs = HostFileSystem()) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder, ForeignFolder::Open(fs, path, {}));
  const ForeignFormat* format = nullptr;
  for (const ForeignFormat* known : {&TorchDcpFormat(), &TorchDcpRankFormat()}) {
    if (format == nullptr && known->Probe(folder)) format = known;
  }
  if (format == nullptr) return Status(Code::kUnsupported, "no DCP");
  ForeignBuilder builder(folder, std::string(format->name()));
  TENSORMOUNT_RETURN_IF_ERROR(format->Read(folder, builder));
  TENSORMOUNT_ASSIGN_OR_RETURN(ForeignInventory inventory, builder.Finish());
  return Opened{std::move(inventory), folder.root()};
}

Opened MustOpen(const std::string& name) {
  Result<Opened> opened = Open(SourcePath("tests/golden/foreign/" + name));
  EXPECT_THAT(opened, IsOk());
  return opened.ok() ? std::move(opened).value() : Opened{};
}

// Cell by cell through the chunks, past all the code that reads tensors in earnest: how many cells
// are stored, and whether each is the formula's.
Result<std::int64_t> CheckCells(const Opened& opened, const TensorRecord& tensor) {
  const TensorMeta& meta = tensor.meta;
  const std::size_t size = meta.bits() / 8;
  std::int64_t seen = 0;
  for (std::size_t i = 0; i < tensor.extents.size(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(ChunkRecord chunk, tensor.extents.At(i));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::unique_ptr<File> file,
        HostFileSystem().OpenReadBeneath(opened.root,
                                         opened.inventory.inventory.files[chunk.file].name));
    EXPECT_TRUE(chunk.pending);
    TENSORMOUNT_RETURN_IF_ERROR(opened.inventory.resolver(meta, *file, chunk));
    EXPECT_FALSE(chunk.pending);
    std::string bytes(chunk.length, '\0');
    TENSORMOUNT_RETURN_IF_ERROR(file->ReadExactAt(chunk.offset, bytes.data(), bytes.size()));
    const Dims& extent = chunk.region.box().extent();
    ForEachCell(meta.shape(), chunk.region, [&](std::int64_t position, std::int64_t element) {
      std::size_t at = static_cast<std::size_t>(position) * size;
      if (chunk.strides.rank() > 0) {
        at = 0;
        std::int64_t rest = position;
        for (int a = extent.rank() - 1; a >= 0; --a) {
          at += static_cast<std::size_t>(rest % extent[a] * chunk.strides[a]);
          rest /= extent[a];
        }
      }
      EXPECT_EQ(bytes.substr(at, size), Formula(meta.dtype(), element))
          << meta.key() << " cell " << element;
      ++seen;
    });
  }
  return seen;
}

void ExpectWhole(const Opened& opened, const std::string& key, DType dtype, const Dims& shape) {
  SCOPED_TRACE(key);
  const TensorRecord* tensor = opened.Tensor(key);
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->meta.dtype(), dtype);
  EXPECT_EQ(tensor->meta.shape(), shape);
  EXPECT_THAT(CheckCells(opened, *tensor), IsOkAndHolds(CheckedProduct(shape).value()));
}

TEST(DcpTest, ReadsFourRankSaveOfTorch213) {
  const Opened opened = MustOpen("dcp-2.13/global");
  EXPECT_THAT(opened.inventory.warnings, IsEmpty());
  EXPECT_EQ(opened.inventory.inventory.info.producer, "torch.distributed.checkpoint");
  EXPECT_EQ(opened.inventory.inventory.info.world_size, 4u);
  EXPECT_EQ(opened.inventory.inventory.files.size(), 4u);
  ExpectWhole(opened, "model.rows", DType::kF32, {8, 6});
  ExpectWhole(opened, "model.columns", DType::kBF16, {4, 8});
  ExpectWhole(opened, "model.grid", DType::kI64, {6, 8});
  ExpectWhole(opened, "model.uneven", DType::kF32, {5, 3});
  ExpectWhole(opened, "model.short", DType::kF32, {2, 3});
  ExpectWhole(opened, "model.replicated", DType::kF32, {3, 4});
  ExpectWhole(opened, "plain", DType::kF64, {3});
  ExpectWhole(opened, "scalar", DType::kF32, {});
  ExpectWhole(opened, "empty", DType::kF32, {0, 4});
  ExpectWhole(opened, "bool", DType::kBool, {7});
  ExpectWhole(opened, "f8", DType::kF8E4M3, {4, 4});
  EXPECT_EQ(opened.Keys().size(), 13u);
}

// The generator turns what the formula filled, so that cells are the formula's of [j, i].
TEST(DcpTest, ReadsPayloadsWithTheirOwnStrides) {
  const Opened opened = MustOpen("dcp-2.13/global");
  for (const auto& [key, rows, columns] :
       {std::tuple("model.transposed", 6, 4), std::tuple("strided", 4, 5)}) {
    const TensorRecord* tensor = opened.Tensor(key);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->meta.shape(), Dims({rows, columns}));
    for (std::size_t i = 0; i < tensor->extents.size(); ++i) {
      ChunkRecord chunk = tensor->extents.At(i).value();
      const std::string& name = opened.inventory.inventory.files[chunk.file].name;
      auto file = HostFileSystem().OpenReadBeneath(opened.root, name).value();
      ASSERT_OK(opened.inventory.resolver(tensor->meta, *file, chunk));
      ASSERT_EQ(chunk.strides.rank(), 2);
      const Box& box = chunk.region.box();
      for (std::int64_t r = 0; r < box.extent(0); ++r) {
        for (std::int64_t c = 0; c < box.extent(1); ++c) {
          std::string cell(4, '\0');
          const std::int64_t at = r * chunk.strides[0] + c * chunk.strides[1];
          ASSERT_OK(
              file->ReadExactAt(chunk.offset + static_cast<std::uint64_t>(at), cell.data(), 4));
          EXPECT_EQ(cell, Formula(DType::kF32, (box.begin(1) + c) * rows + box.begin(0) + r));
        }
      }
    }
  }
}

TEST(DcpTest, ShowsPlainObjectsAsValuesAndOthersAsBytes) {
  const Opened opened = MustOpen("dcp-2.13/global");
  ASSERT_NE(opened.Common("iteration"), nullptr);
  EXPECT_EQ(*opened.Common("iteration"), CommonValue(1200));
  EXPECT_EQ(*opened.Common("name"), CommonValue("run"));
  EXPECT_EQ(*opened.Common("betas"), CommonValue(CommonTuple{{0.9, 0.95}}));
  EXPECT_EQ(*opened.Common("flags"), CommonValue(CommonList{{true, CommonNone(), -1}}));
  EXPECT_EQ(*opened.Common("bytes"), CommonValue(CommonBytes{std::string("\0\xff", 2)}));
  EXPECT_EQ(opened.Common("opaque"), nullptr);
  ASSERT_NE(opened.Object("opaque"), nullptr);
  ASSERT_NE(opened.Object("iteration"), nullptr);
  EXPECT_FALSE(opened.Object("iteration")->has_hash());
  // How keys nest, for who wants to write the same again.
  const CommonValue* nesting = opened.Common("torch.planner_data");
  ASSERT_NE(nesting, nullptr);
  const CommonValue* rows =
      nesting->get_if<CommonDict>()->Find(CommonKey(std::string("model.rows")));
  ASSERT_NE(rows, nullptr);
  EXPECT_EQ(*rows, CommonValue(CommonTuple{{"model", "rows"}}));
  EXPECT_EQ(nesting->get_if<CommonDict>()->Find(CommonKey(std::string("plain"))), nullptr);
}

TEST(DcpTest, AdjacentValuesAreReadInOneRead) {
  std::map<std::string, int> reads;
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
    if (event.op == FileOp::kRead && event.path.ends_with(".distcp")) ++reads[event.path];
    return Status();
  });
  ASSERT_OK(Open(SourcePath("tests/golden/foreign/dcp-2.13/global"), fs));
  EXPECT_FALSE(reads.empty());
  for (const auto& [path, count] : reads) EXPECT_EQ(count, 1) << path;
}

TEST(DcpTest, ReadsSeveralFilesPerRank) {
  const Opened opened = MustOpen("dcp-2.13/files");
  EXPECT_EQ(opened.inventory.inventory.files.size(), 2u);
  EXPECT_EQ(opened.inventory.inventory.info.world_size, 1u);
  ExpectWhole(opened, "a", DType::kF32, {9});
  ExpectWhole(opened, "b", DType::kI16, {3, 3});
  EXPECT_EQ(*opened.Common("n"), CommonValue(5));
}

TEST(DcpTest, MergesRanksSavedWithoutAGlobalPlan) {
  const Opened opened = MustOpen("dcp-2.13/ranks");
  // Of `own` every rank has another shape.
  EXPECT_THAT(opened.Keys(), ElementsAre("rank0/own", "rank1/own", "w"));
  ExpectWhole(opened, "rank0/own", DType::kI32, {1});
  ExpectWhole(opened, "rank1/own", DType::kI32, {2});
  ExpectWhole(opened, "w", DType::kF32, {4, 3});
  EXPECT_THAT(opened.inventory.lost, IsEmpty());
  EXPECT_THAT(opened.Warnings(), HasSubstr("without a global plan: 1 tensor is assembled"));
  EXPECT_EQ(*opened.Common("rank1/rank"), CommonValue(1));
  EXPECT_EQ(opened.inventory.inventory.info.world_size, 2u);
}

TEST(DcpTest, ReadsTorchReleasesSince113) {
  for (const std::string release : {"torch-1.13", "torch-2.1", "olmo/step100"}) {
    SCOPED_TRACE(release);
    const Opened opened = MustOpen("dcp-old/" + release);
    ExpectWhole(opened, "rows", DType::kF32, {4, 6});
    ExpectWhole(opened, "columns", DType::kBF16, {4, 6});
    ExpectWhole(opened, "scalar", DType::kF64, {});
    ExpectWhole(opened, "empty", DType::kI64, {0, 3});
    ExpectWhole(opened, "turned", DType::kF32, {5, 4});
    ASSERT_NE(opened.Common("iteration"), nullptr);
    EXPECT_EQ(*opened.Common("iteration"), CommonValue(1200));
    EXPECT_EQ(opened.inventory.inventory.info.world_size, 2u);
  }
  EXPECT_THAT(MustOpen("dcp-old/torch-1.13").inventory.warnings, IsEmpty());
  const Opened odd_keys = MustOpen("dcp-old/torch-2.1");
  EXPECT_THAT(
      odd_keys.inventory.warnings,
      ElementsAre(HasSubstr("1 entries of storage_data do not name a tensor or an object")));
  const CommonValue* nesting = odd_keys.Common("torch.planner_data");
  ASSERT_NE(nesting, nullptr);
  EXPECT_EQ(*nesting->get_if<CommonDict>()->Find(CommonKey(std::string("columns"))),
            CommonValue(CommonTuple{{"model", 0, "columns"}}));
}

TEST(DcpTest, ShowsOlmoTrainerFilesAsObjects) {
  const Opened opened = MustOpen("dcp-old/olmo/step100");
  EXPECT_EQ(opened.inventory.inventory.info.producer, "olmo-core");
  ASSERT_NE(opened.Object("train/rank1.pt"), nullptr);
  EXPECT_THAT(opened.inventory.warnings, IsEmpty());
  // The folder itself is a checkpoint too.
  const Opened inner = MustOpen("dcp-old/olmo/step100/model_and_optim");
  EXPECT_EQ(inner.Keys(), opened.Keys());
  EXPECT_EQ(inner.Object("train/rank1.pt"), nullptr);
}

TEST(DcpTest, UnreadableTensorsAreLeftOutWithAWarning) {
  const Opened opened = MustOpen("dcp-old/odd");
  EXPECT_THAT(opened.Keys(), ElementsAre("ends", "fine", "hole", "other_dtype", "other_shape"));
  ExpectWhole(opened, "fine", DType::kF32, {3});
  ExpectWhole(opened, "ends", DType::kF32, {2, 3});
  EXPECT_THAT(CheckCells(opened, *opened.Tensor("hole")), IsOkAndHolds(2));
  EXPECT_THAT(opened.inventory.inventory.objects, IsEmpty());
  for (const char* warning :
       {"tensor zstd: left out: the item is stored with the unsupported transform 'zstd'",
        "object zstd_object: left out: the item is stored with the unsupported transform 'zstd'",
        "tensor hole: [2:4] is not stored", "tensor overlap: left out: [2:3] is stored twice",
        "tensor twice: left out: two chunks of the tensor have the same offsets",
        "tensor outside: left out: the chunk at [0] of size [5] is not within shape [4]",
        "tensor quantised: left out: the dtype torch.qint8 is not supported",
        "__7_0.distcp: the file is missing: tensor no_file is left out",
        "__0_0.distcp: the file ends after 8974 bytes, before the end of an item: tensor "
        "short_file is",
        "1 stored items match no chunk in the metadata (the first: stray)"}) {
    EXPECT_THAT(opened.Warnings(), HasSubstr(warning));
  }
  EXPECT_EQ(opened.inventory.warnings.size(), 10u) << opened.Warnings();
  // What only the item tells is found when it is read.
  EXPECT_THAT(CheckCells(opened, *opened.Tensor("other_dtype")), HasCode(Code::kDataLoss));
  EXPECT_THAT(CheckCells(opened, *opened.Tensor("other_dtype")),
              HasMessage("the item has dtype f32, the tensor has dtype i64"));
  EXPECT_THAT(CheckCells(opened, *opened.Tensor("other_shape")),
              HasMessage("the item has shape [2, 3], the chunk has shape [3, 2]"));
}

TEST(DcpTest, SharedPickleListsDoNotMultiplyChunks) {
  const Opened opened = MustOpen("dcp-old/shared");
  EXPECT_THAT(opened.Keys(), Contains("a"));
  EXPECT_LT(opened.Keys().size(), 50u);
  EXPECT_THAT(opened.Warnings(),
              HasSubstr("tensors left out: more chunks are listed than a metadata file"));
}

TEST(DcpTest, ReadsMegatronWithBothKindsOfCommonState) {
  for (const std::string release : {"megatron", "megatron-0.19"}) {
    SCOPED_TRACE(release);
    const Opened opened = MustOpen("dcp-old/" + release);
    EXPECT_EQ(opened.inventory.inventory.info.producer, "megatron.core.dist_checkpointing");
    ExpectWhole(opened, "decoder.layers.w", DType::kBF16, {3, 4, 3});
    ASSERT_NE(opened.Common("iteration"), nullptr) << opened.Warnings();
    EXPECT_EQ(*opened.Common("iteration"), CommonValue(7));
    EXPECT_EQ(*opened.Common("args"),
              CommonValue(CommonDict{{{CommonKey(std::string("seed")), CommonValue(1)}}}));
    EXPECT_EQ(opened.Common("fn"), nullptr);
    EXPECT_THAT(opened.Warnings(), HasSubstr("2 values are not plain data and only shown in the "
                                             "object (the first: args.dtype)"));
    EXPECT_NE(opened.Object(release == "megatron" ? "common.pt" : "common_state"), nullptr);
    EXPECT_EQ(*opened.Common("extra"),
              CommonValue(CommonDict{{{CommonKey(std::string("lr")), CommonValue(0.5)}}}));
  }
}

TEST(DcpTest, PlacesMegatronShardedObjectsOnTheirGrids) {
  const Opened opened = MustOpen("dcp-old/megatron");
  std::vector<std::string> rng;
  for (const ObjectRecord& object : opened.inventory.inventory.objects) {
    if (object.key == "rng/a_b") {
      rng.push_back(object.index.ToString() + " of " + object.grid.ToString());
    }
  }
  EXPECT_THAT(rng, ElementsAre("[0, 0] of [2, 1]", "[1, 0] of [2, 1]"));
  // Written without the last extent.
  ASSERT_NE(opened.Object("old"), nullptr);
  EXPECT_EQ(opened.Object("old")->grid, Dims({1, 2}));
  // Not all parts are there: the name stays as it is.
  ASSERT_NE(opened.Object("partial/shard_0_2"), nullptr);
  EXPECT_EQ(opened.Object("partial/shard_0_2")->grid.rank(), 0);
}

TEST(DcpTest, ReassemblesFlattenedOptimizerState) {
  const Opened opened = MustOpen("dcp-old/megatron");
  ExpectWhole(opened, "optimizer.exp_avg", DType::kF32, {4, 6});
  ExpectWhole(opened, "optimizer.rows", DType::kF32, {4, 6});
  // Without mcore_data nobody knows the shape.
  ASSERT_NE(opened.Tensor("optimizer.lost"), nullptr);
  EXPECT_EQ(opened.Tensor("optimizer.lost")->meta.shape(), Dims({2, 2, 6}));
}

TEST(DcpTest, FlatShapesMustMatchTheStoredTensor) {
  EXPECT_TRUE(MegatronFlatShape::Make({2, 2, 6}, {4, 6}).has_value());
  EXPECT_FALSE(MegatronFlatShape::Make({2, 2, 6}, {4, 7}).has_value());
  EXPECT_FALSE(MegatronFlatShape::Make({2, 2, 7}, {4, 6}).has_value());
  EXPECT_FALSE(MegatronFlatShape::Make({0, 2, 6}, {4, 6}).has_value());
  EXPECT_FALSE(MegatronFlatShape::Make({2, 6}, {4, 6}).has_value());
  const MegatronFlatShape flat = *MegatronFlatShape::Make({2, 2, 6}, {4, 6});
  const auto region = [&](std::vector<std::int64_t> offsets, std::vector<std::int64_t> sizes) {
    return flat.RegionOf(offsets, sizes);
  };
  ASSERT_THAT(region({1, 0, 2}, {1, 1, 3}), IsOk());
  EXPECT_EQ(region({1, 0, 2}, {1, 1, 3}).value().ToString(), "[2:4, 0:3] flat 2:5");
  EXPECT_THAT(region({1, 0, 4}, {1, 1, 3}), HasCode(Code::kDataLoss));
  EXPECT_THAT(region({2, 0, 0}, {1, 1, 3}), HasCode(Code::kDataLoss));
  EXPECT_THAT(region({0, 0, 0}, {2, 1, 3}), HasCode(Code::kDataLoss));
  EXPECT_THAT(region({INT64_MAX, 0, 0}, {1, 1, 3}), HasCode(Code::kDataLoss));
}

TEST(DcpTest, ShardedObjectNamesAreParsedFromTheRight) {
  const std::vector<std::string> names = {
      "a/shard_0_1",       "b/shard_1_x/shard_0_1", "c/shard_0_0", "d/shard_-1_1", "/shard_0_1",
      "e/shard_0.0_1.1.1", "f/shard_0.5_1",         "plain",       "g/shard_0_1",  "g"};
  std::vector<std::string> keys;
  for (const ObjectRecord& object : MegatronObjects(names)) {
    keys.push_back(object.key + object.grid.ToString());
  }
  EXPECT_THAT(keys, ElementsAre("a[1]", "b/shard_1_x[1]", "c/shard_0_0[]", "d/shard_-1_1[]",
                                "/shard_0_1[]", "e/shard_0.0_1.1.1[]", "f/shard_0.5_1[]", "plain[]",
                                "g/shard_0_1[]", "g[]"));
}

// Through the code that reads every checkpoint: whole tensors, and windows that cut chunks.
TEST(DcpTest, DcpTensorsReadWholeAndInWindows) {
  for (const std::string fixture : {"dcp-2.13/global", "dcp-2.13/files", "dcp-old/torch-1.13",
                                    "dcp-old/olmo/step100", "dcp-old/megatron"}) {
    SCOPED_TRACE(fixture);
    Opened opened = MustOpen(fixture);
    const Result<std::shared_ptr<OpenedCheckpoint>> checkpoint = OpenedCheckpoint::OpenForeign(
        HostFileSystem(), std::move(opened.inventory), opened.root, {});
    ASSERT_OK(checkpoint);
    const CheckpointIndex& index = checkpoint.value()->index();
    for (std::uint32_t n = 0; n < index.tensor_count(); ++n) {
      const TensorEntry tensor = index.At(n).value();
      const TensorMeta& meta = tensor.meta;
      SCOPED_TRACE(meta.key());
      // These two are the formula's turned, `lost` is shown as it is stored.
      if (meta.key() == "model.transposed" || meta.key() == "strided" ||
          meta.key() == "optimizer.lost") {
        continue;
      }
      std::string whole;
      for (std::uint64_t i = 0; i < meta.elements(); ++i) {
        whole += Formula(meta.dtype(), static_cast<std::int64_t>(i));
      }
      for (std::size_t begin = 0; begin < whole.size() || begin == 0; begin += 7) {
        for (const std::size_t size : {whole.size() - begin, std::size_t{5}}) {
          std::string bytes(std::min(size, whole.size() - begin), '?');
          ASSERT_OK(checkpoint.value()->ReadBytes(tensor, begin, bytes.data(), bytes.size(),
                                                  ReadVerify::kWholeLeaves, nullptr));
          EXPECT_EQ(bytes, whole.substr(begin, bytes.size())) << begin;
        }
      }
    }
  }
}

// torch has two of them in one element: sizes and offsets count those.
TEST(DcpTest, ReadsF4PairsAsSingleElements) {
  const auto adopted = Adopt(TorchDcpFormat(), SourcePath("tests/golden/foreign/dcp-2.13/f4"));
  ASSERT_OK(adopted);
  EXPECT_EQ(WarningsOf(adopted.value()), "");
  const std::pair<const char*, Dims> kTensors[] = {
      {"rows", {4, 12}}, {"columns", {4, 12}}, {"line", {10}}};
  for (const auto& [key, shape] : kTensors) {
    ASSERT_OK_AND_ASSIGN(const TensorEntry entry, adopted.value()->index().Find(key));
    EXPECT_EQ(entry.meta.dtype(), DType::kF4);
    EXPECT_EQ(entry.meta.shape(), shape);
    EXPECT_EQ(entry.chunks, 2u);
    const auto bytes = static_cast<std::int64_t>(entry.meta.bytes());
    ASSERT_OK_AND_ASSIGN(const std::string got, ReadTensor(adopted.value(), key));
    EXPECT_EQ(got, CellRange(DType::kU8, 0, bytes)) << key;
  }
}

TEST(DcpTest, ReadsTransposedPayloadsInTensorOrder) {
  Opened opened = MustOpen("dcp-2.13/global");
  const Result<std::shared_ptr<OpenedCheckpoint>> checkpoint =
      OpenedCheckpoint::OpenForeign(HostFileSystem(), std::move(opened.inventory), opened.root, {});
  ASSERT_OK(checkpoint);
  for (const auto& [key, rows, columns] :
       {std::tuple("model.transposed", 6, 4), std::tuple("strided", 4, 5)}) {
    const TensorEntry tensor = checkpoint.value()->index().Find(key).value();
    std::string bytes(tensor.meta.bytes(), '?');
    ASSERT_OK(checkpoint.value()->ReadBytes(tensor, 0, bytes.data(), bytes.size(),
                                            ReadVerify::kWholeLeaves, nullptr));
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) {
        EXPECT_EQ(bytes.substr(static_cast<std::size_t>(r * columns + c) * 4, 4),
                  Formula(DType::kF32, c * rows + r));
      }
    }
  }
}

TEST(DcpTest, ReadingMissingChunksFails) {
  Opened opened = MustOpen("dcp-old/odd");
  const Result<std::shared_ptr<OpenedCheckpoint>> checkpoint =
      OpenedCheckpoint::OpenForeign(HostFileSystem(), std::move(opened.inventory), opened.root, {});
  ASSERT_OK(checkpoint);
  char bytes[16];
  for (const char* key : {"hole", "other_dtype", "other_shape"}) {
    const TensorEntry tensor = checkpoint.value()->index().Find(key).value();
    EXPECT_THAT(checkpoint.value()->ReadBytes(tensor, 0, bytes, sizeof bytes,
                                              ReadVerify::kWholeLeaves, nullptr),
                HasCode(Code::kDataLoss))
        << key;
  }
  // What is there of it can be read.
  const TensorEntry hole = checkpoint.value()->index().Find("hole").value();
  ASSERT_OK(checkpoint.value()->ReadBytes(hole, 0, bytes, 8, ReadVerify::kWholeLeaves, nullptr));
  EXPECT_EQ(std::string(bytes, 4), Formula(DType::kF32, 0));
}

class ChangedDcpTest : public testing::Test {
 protected:
  // A copy of a fixture whose metadata have `from` replaced by `to` everywhere, of the same length.
  std::string Changed(const std::string& fixture, const std::string& from, const std::string& to) {
    const std::string path = dir_.Join("c");
    EXPECT_THAT(HostFileSystem().CreateDirectory(path), IsOk());
    const std::string source = SourcePath("tests/golden/foreign/" + fixture);
    const auto entries = HostFileSystem().List(source);
    EXPECT_THAT(entries, IsOk());
    for (const DirectoryEntry& entry : entries.value()) {
      std::string bytes = ReadWholeFile(source + "/" + entry.name);
      if (entry.name == ".metadata" && !from.empty()) {
        EXPECT_EQ(from.size(), to.size());
        std::size_t at = bytes.find(from);
        EXPECT_NE(at, std::string::npos);
        for (; at != std::string::npos; at = bytes.find(from, at + 1)) {
          bytes.replace(at, from.size(), to);
        }
      }
      WriteWholeFile(path + "/" + entry.name, bytes);
    }
    return path;
  }

  TempDir dir_;
};

TEST_F(ChangedDcpTest, FileNamesCannotLeaveTheCheckpoint) {
  const std::string path = Changed("dcp-old/torch-1.13", "__0_0.distcp", "../_0.distcp");
  WriteWholeFile(dir_.Join("_0.distcp"), ReadWholeFile(path + "/__0_0.distcp"));
  EXPECT_FALSE(Open(path).ok());
}

TEST_F(ChangedDcpTest, AbsoluteFileNamesAreRefused) {
  const std::string path = Changed("dcp-old/torch-1.13", "__0_0.distcp", "/etc/hostnam");
  EXPECT_THAT(Open(path), HasCode(Code::kPermissionDenied));
}

TEST_F(ChangedDcpTest, UnlistedPickleClassIsRefused) {
  const std::string path = Changed("dcp-old/torch-1.13", "_StorageInfo", "_StorageEvil");
  EXPECT_THAT(Open(path), HasCode(Code::kUnsupported));
  EXPECT_THAT(Open(path), HasMessage("_StorageEvil"));
}

TEST_F(ChangedDcpTest, MetadataWithoutStorageDataIsRefused) {
  EXPECT_THAT(Open(Changed("dcp-old/torch-1.13", "storage_data", "storage_dado")),
              HasMessage("storage_data is not a dict"));
}

TEST_F(ChangedDcpTest, TruncatedFileLosesOnlyItsOwnTensors) {
  const std::string path = Changed("dcp-old/torch-1.13", "", "");
  WriteWholeFile(path + "/__1_0.distcp", "");
  Result<Opened> opened = Open(path);
  ASSERT_OK(opened);
  // The cells that other ranks wrote are there, and those that are not are named.
  EXPECT_THAT(opened.value().Keys(), ElementsAre("columns", "empty", "rows", "scalar", "turned"));
  const std::string warnings = opened.value().Warnings();
  EXPECT_THAT(warnings,
              HasSubstr("__1_0.distcp: the file ends after 0 bytes, before the end of an item: "
                        "parts of 3 tensors are lost: rows, columns, turned"));
  for (const char* key : {"rows", "columns", "turned"}) {
    EXPECT_THAT(warnings, HasSubstr("tensor " + std::string(key) + ": ["));
    EXPECT_THAT(CheckCells(opened.value(), *opened.value().Tensor(key)),
                IsOkAndHolds(testing::Gt(0)));
  }
  // Whoever wants whole tensors alone gets those.
  RemoveIncompleteTensors(opened.value().inventory);
  EXPECT_THAT(opened.value().Keys(), ElementsAre("empty", "scalar"));
}

// Its index still says chunk 1, which begins at another cell.
TEST_F(ChangedDcpTest, ItemsThatMatchNoChunkAreLeftOut) {
  const std::string path = Changed("dcp-old/torch-1.13", "\x0bh\xa7h%K\x02", "\x0bh\xa7h%K\x01");
  ASSERT_OK_AND_ASSIGN(const Opened opened, Open(path));
  EXPECT_THAT(opened.inventory.warnings,
              ElementsAre(HasSubstr("1 stored items match no chunk in the metadata (the first: "
                                    "rows)"),
                          HasSubstr("tensor rows: [2:4, 0:6] is not stored")));
  EXPECT_THAT(CheckCells(opened, *opened.Tensor("rows")), IsOkAndHolds(12));
}

// A namespace holds its attributes in its state.
TEST_F(ChangedDcpTest, PlainRunArgumentsAreShownOthersLeftOut) {
  const std::string path = Changed("dcp-old/megatron", "", "");
  const auto open_with = [&](const std::string& common) {
    ZipBuilder zip;
    zip.Add("common/data.pkl", Pickle(common, 2));
    zip.Add("common/version", "3\n");
    WriteWholeFile(path + "/common.pt", zip.Finish());
    return Open(path);
  };
  ASSERT_OK_AND_ASSIGN(const Opened plain, open_with(Bytes("}", Str("seed"), "K", 2, "s")));
  ASSERT_NE(plain.Common("seed"), nullptr);
  EXPECT_EQ(*plain.Common("seed"), CommonValue(2));
  EXPECT_THAT(plain.Warnings(), testing::Not(HasSubstr("common.pt")));

  ASSERT_OK_AND_ASSIGN(
      const Opened opened,
      open_with(Bytes("}", Str("args"), Glob("argparse", "Namespace"), ")", 0x81, "}(", Str("seed"),
                      "K", 3, Str("dtype"), Glob("torch", "bfloat16"), Str("by rate"), "}G", 0x3f,
                      0xf8, std::string(6, '\0'), "K", 1, "subs")));
  ASSERT_NE(opened.Common("args"), nullptr) << opened.Warnings();
  EXPECT_EQ(*opened.Common("args"),
            CommonValue(CommonDict{{{CommonKey(std::string("seed")), CommonValue(3)}}}));
  EXPECT_THAT(opened.Warnings(), HasSubstr("common.pt: 2 values are not plain data and "
                                           "only shown in the object (the first: args.dtype)"));
  EXPECT_THAT(opened.Warnings(), testing::Not(HasSubstr("not all of its tensors are shown")));
}

TEST_F(ChangedDcpTest, WarningCountsEachHiddenValueOnce) {
  const std::string path = Changed("dcp-old/megatron", "", "");
  const auto open_with = [&](const std::string& common) {
    ZipBuilder zip;
    zip.Add("common/data.pkl", Pickle(common, 2));
    zip.Add("common/version", "3\n");
    zip.Add("common/data/a", "AAAA");
    WriteWholeFile(path + "/common.pt", zip.Finish());
    return Open(path);
  };
  const auto number = [](std::int64_t v) { return Bytes(0x8a, 8, Little(v)); };
  const std::string tensor =
      Bytes(Glob("torch._utils", "_rebuild_tensor_v2"), "((", Str("storage"),
            Glob("torch", "ByteStorage"), Str("a"), Str("cpu"), number(4), "tQ", "K", 0, number(4),
            0x85, number(1), 0x85, 0x89, Glob("collections", "OrderedDict"), ")RtR");
  // The tensor of a namespace is shown as a tensor.
  ASSERT_OK_AND_ASSIGN(
      const Opened shown,
      open_with(Bytes("}", Str("args"), Glob("argparse", "Namespace"), ")", 0x81, "}(", Str("w"),
                      tensor, Str("dtype"), Glob("torch", "bfloat16"), "ubs")));
  EXPECT_THAT(shown.Keys(), Contains("args.w")) << shown.Warnings();
  EXPECT_THAT(shown.Warnings(), HasSubstr("common.pt: 1 value is not plain data and only shown in "
                                          "the object (the first: args.dtype)"));
  // A dict that is left out as a whole, because one of its keys is a number, is one value.
  ASSERT_OK_AND_ASSIGN(
      const Opened whole,
      open_with(Bytes("}", Str("args"), "}(", Str("dtype"), Glob("torch", "bfloat16"), "G", 0x3f,
                      0xf8, std::string(6, '\0'), "K", 1, "us")));
  EXPECT_THAT(whole.Warnings(), HasSubstr("common.pt: 1 value is not plain data and only shown in "
                                          "the object (the first: args)"));
}

// Half of what the ranks stored is half a tensor each, as it was before.
TEST_F(ChangedDcpTest, InconsistentRanksAreShownSeparately) {
  const std::string path = Changed("dcp-2.13/ranks", "", "");
  ASSERT_OK(HostFileSystem().RemoveFile(path + "/__1.metadata"));
  Result<Opened> opened = Open(path);
  ASSERT_OK(opened);
  EXPECT_THAT(opened.value().Keys(), ElementsAre("own", "rank0/w"));
  EXPECT_THAT(CheckCells(opened.value(), *opened.value().Tensor("rank0/w")), IsOkAndHolds(6));
  ASSERT_EQ(opened.value().inventory.lost.size(), 1u);
  EXPECT_TRUE(opened.value().inventory.lost[0].holes);
}

TEST_F(ChangedDcpTest, TruncatedMetadataIsDataLoss) {
  const std::string path = Changed("dcp-old/torch-1.13", "", "");
  const std::string whole = ReadWholeFile(path + "/.metadata");
  for (std::size_t n = 0; n < whole.size(); n += 97) {
    WriteWholeFile(path + "/.metadata", whole.substr(0, n));
    EXPECT_THAT(Open(path), HasCode(Code::kDataLoss)) << n;
  }
}

TEST_F(ChangedDcpTest, DataFilesNewerThanMetadataAreWarnedAbout) {
  const std::string path = Changed("dcp-old/torch-1.13", "", "");
  const auto at = [&](const char* name, std::time_t seconds) {
    const timespec times[2] = {{.tv_sec = seconds, .tv_nsec = 0},
                               {.tv_sec = seconds, .tv_nsec = 0}};
    EXPECT_EQ(utimensat(AT_FDCWD, (path + "/" + name).c_str(), times, 0), 0);
  };
  at(".metadata", 1000);
  at("__0_0.distcp", 900);
  at("__1_0.distcp", 1060);
  Result<Opened> opened = Open(path);
  ASSERT_OK(opened);
  EXPECT_THAT(opened.value().inventory.warnings, IsEmpty());
  at("__1_0.distcp", 1061);
  opened = Open(path);
  ASSERT_OK(opened);
  EXPECT_THAT(opened.value().Warnings(), HasSubstr("__1_0.distcp is newer than .metadata"));
}

TEST_F(ChangedDcpTest, MissingMegatronMetadataJsonIsWarnedAbout) {
  const std::string path = Changed("dcp-old/megatron", "", "");
  ASSERT_OK(HostFileSystem().RemoveFile(path + "/metadata.json"));
  Result<Opened> opened = Open(path);
  ASSERT_OK(opened);
  EXPECT_THAT(opened.value().Warnings(), HasSubstr("metadata.json is missing"));
  EXPECT_EQ(*opened.value().Common("iteration"), CommonValue(7));
}

}  // namespace
}  // namespace tensormount
