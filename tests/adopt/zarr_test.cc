// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <set>
#include <string>
#include <vector>

#include "index/foreign/zarr_array.h"
#include "tests/adopt/adopted.h"
#include "tests/support/subprocess.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

struct ArrayOptions {
  std::string descr = "<f4";
  DType dtype = DType::kF32;
  bool fortran = false;
  char separator = '.';
  std::string fill = "null";
  std::set<std::string> missing;  // Names of chunks.
  std::string compressor = "null";
};

// An array as zarr 2 writes it: every chunk is whole, those at the edges are padded (here with
// bytes that nobody must ever see).
void PutArray(const std::string& folder, const Dims& shape, const Dims& chunks,
              const ArrayOptions& options = {}) {
  std::string json = R"({"chunks":)" + chunks.ToString() + R"(,"compressor":)" +
                     options.compressor + R"(,"dtype":")" + options.descr + R"(","fill_value":)" +
                     options.fill + R"(,"filters":null,"order":")" + (options.fortran ? "F" : "C") +
                     R"(","shape":)" + shape.ToString() + R"(,"zarr_format":2)";
  if (options.separator != '.') json += R"(,"dimension_separator":"/")";
  PutFile(folder + "/.zarray", json + "}");
  const int rank = shape.rank();
  Dims index = Dims::Filled(rank, 0);
  const std::size_t size = InfoOf(options.dtype).bits / 8;
  for (const std::int64_t extent : shape) {
    if (extent == 0) return;
  }
  while (true) {
    std::string name;
    for (const std::int64_t i : index) {
      name += (name.empty() ? "" : std::string(1, options.separator)) + std::to_string(i);
    }
    if (rank == 0) name = "0";
    const Box chunk = Box::Whole(chunks);
    std::string bytes(static_cast<std::size_t>(chunk.volume()) * size, '\xEE');
    for (std::int64_t n = 0; n < chunk.volume(); ++n) {
      // Cell n of the chunk, in the order in which it is stored.
      Dims at = Dims::Filled(rank, 0);
      std::int64_t rest = n;
      for (int i = 0; i < rank; ++i) {
        const int a = options.fortran ? i : rank - 1 - i;
        at[a] = index[a] * chunks[a] + rest % chunks[a];
        rest /= chunks[a];
      }
      std::int64_t element = 0;
      bool inside = true;
      for (int a = 0; a < rank; ++a) {
        inside = inside && at[a] < shape[a];
        element = element * shape[a] + at[a];
      }
      if (inside) {
        bytes.replace(static_cast<std::size_t>(n) * size, size, CellBytes(options.dtype, element));
      }
    }
    if (!options.missing.contains(name)) PutFile(folder + "/" + name, bytes);
    int a = rank - 1;
    for (; a >= 0; --a) {
      if (++index[a] * chunks[a] < shape[a]) break;
      index[a] = 0;
    }
    if (a < 0) return;
  }
}

constexpr char kMegatronJson[] = R"({"sharded_backend":"zarr","sharded_backend_version":1})";

TEST(ZarrTest, ReadsMegatronZarrCheckpoint) {
  const TempDir dir;
  const std::string c = dir.Join("iter_1");
  PutFile(c + "/metadata.json", kMegatronJson);
  PutArray(c + "/decoder.layers.weight", {10, 6}, {4, 3});
  PutArray(c + "/rows", {7, 4}, {2, 4});
  PutArray(c + "/one.axis", {10}, {4}, {.descr = "<i8", .dtype = DType::kI64});
  PutArray(c + "/three", {3, 5, 4}, {2, 2, 3}, {.descr = "|b1", .dtype = DType::kBool});
  PutArray(c + "/scalar", {}, {}, {.descr = "<f8", .dtype = DType::kF64});
  PutArray(c + "/empty", {0, 4}, {1, 4});
  PutArray(c + "/bf16.patched", {5, 5}, {3, 3}, {.descr = "bfloat16", .dtype = DType::kBF16});
  PutArray(c + "/bf16.raw", {5, 5}, {3, 3}, {.descr = "|V2", .dtype = DType::kBF16});
  PutArray(c + "/bf16.little", {5, 5}, {3, 3}, {.descr = "<V2", .dtype = DType::kBF16});
  PutFile(c + "/rows.sync/0.0", "lock");
  for (const char* part : {"0.0_1.2", "0.1_1.2"}) {
    PutFile(c + "/rng_state/shard_" + part + ".pt", part);
  }
  PutFile(c + "/extra/shard_0_1.pt", "only");
  const auto adopted = Adopt(MegatronZarrFormat(), c);
  ASSERT_OK(adopted);
  EXPECT_THAT(adopted.value()->warnings(), IsEmpty());
  ExpectCells(adopted.value(), "decoder.layers.weight", DType::kF32, {10, 6});
  ExpectCells(adopted.value(), "rows", DType::kF32, {7, 4});
  ExpectCells(adopted.value(), "one.axis", DType::kI64, {10});
  ExpectCells(adopted.value(), "three", DType::kBool, {3, 5, 4});
  ExpectCells(adopted.value(), "scalar", DType::kF64, {});
  ExpectCells(adopted.value(), "empty", DType::kF32, {0, 4});
  ExpectCells(adopted.value(), "bf16.patched", DType::kBF16, {5, 5});
  ExpectCells(adopted.value(), "bf16.raw", DType::kBF16, {5, 5});
  ExpectCells(adopted.value(), "bf16.little", DType::kBF16, {5, 5});
  EXPECT_EQ(KeysOf(adopted.value()).size(), 9u);
  const auto parts = adopted.value()->index().ObjectParts("rng_state");
  ASSERT_OK(parts);
  ASSERT_EQ(parts.value().size(), 2u);
  EXPECT_EQ(parts.value()[1].index, (Dims{0, 1}));
  EXPECT_EQ(parts.value()[1].grid, (Dims{1, 2}));
  EXPECT_THAT(ReadObject(adopted.value(), "rng_state"), IsOkAndHolds("0.0_1.20.1_1.2"));
  EXPECT_THAT(ReadObject(adopted.value(), "extra"), IsOkAndHolds("only"));
}

TEST(ZarrTest, ReadsPlainZarrHierarchies) {
  const TempDir dir;
  const std::string c = dir.Join("g");
  PutFile(c + "/.zgroup", R"({"zarr_format":2})");
  PutFile(c + "/layer/.zgroup", R"({"zarr_format":2})");
  PutArray(c + "/layer/w", {6, 7}, {4, 4}, {.fortran = true});
  PutArray(c + "/nested", {5, 3, 2}, {2, 2, 2}, {.separator = '/'});
  PutArray(c + "/both", {5, 3}, {2, 2}, {.fortran = true, .separator = '/'});
  PutFile(c + "/nested/.zattrs", "{}");
  const auto adopted = Adopt(MegatronZarrFormat(), c);
  ASSERT_OK(adopted);
  EXPECT_THAT(adopted.value()->warnings(), IsEmpty());
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("both", "layer/w", "nested"));
  ExpectCells(adopted.value(), "layer/w", DType::kF32, {6, 7});
  ExpectCells(adopted.value(), "nested", DType::kF32, {5, 3, 2});
  ExpectCells(adopted.value(), "both", DType::kF32, {5, 3});
  // Raw bytes that are nobody's bfloat16.
  PutArray(c + "/raw", {2}, {2}, {.descr = "|V2", .dtype = DType::kBF16});
  const auto again = Adopt(MegatronZarrFormat(), c);
  ASSERT_OK(again);
  EXPECT_THAT(
      WarningsOf(again.value()),
      HasSubstr("tensor raw: left out: .zarray: element type '|V2' is not supported: raw bytes"));
  // One array is a checkpoint too.
  const auto alone = Adopt(MegatronZarrFormat(), c + "/nested");
  ASSERT_OK(alone);
  ExpectCells(alone.value(), "nested", DType::kF32, {5, 3, 2});
}

// tests/golden/foreign/make_zarr.py
TEST(ZarrTest, ReadsArraysOfZarrPython218) {
  const std::string folder = SourcePath("tests/golden/foreign/zarr-2.18/");
  const auto plain = Adopt(MegatronZarrFormat(), folder + "plain");
  ASSERT_OK(plain);
  EXPECT_THAT(KeysOf(plain.value()),
              ElementsAre("edges", "fortran", "layer/bool", "layer/nested", "scalar"));
  EXPECT_EQ(plain.value()->index().ToInventory().value().info.producer, "zarr");
  ExpectCells(plain.value(), "edges", DType::kF32, {10, 6});
  ExpectCells(plain.value(), "fortran", DType::kI64, {5, 7});
  ExpectCells(plain.value(), "layer/bool", DType::kBool, {7});
  ExpectCells(plain.value(), "layer/nested", DType::kI16, {4, 3, 5});
  ExpectCells(plain.value(), "scalar", DType::kF64, {});
  const std::string warnings = WarningsOf(plain.value());
  EXPECT_EQ(plain.value()->warnings().size(), 2u) << warnings;
  EXPECT_THAT(warnings, HasSubstr("tensor blosc: left out: .zarray: compressed with blosc"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor sparse: left out: 3 of the tensor's chunks are not stored"));
  const auto megatron = Adopt(MegatronZarrFormat(), folder + "megatron");
  ASSERT_OK(megatron);
  EXPECT_THAT(megatron.value()->warnings(), IsEmpty());
  EXPECT_EQ(megatron.value()->index().ToInventory().value().info.producer,
            "megatron.core.dist_checkpointing");
  ExpectCells(megatron.value(), "decoder.layers.self_attention.weight", DType::kF32, {2, 6, 4});
  ExpectCells(megatron.value(), "uneven", DType::kF32, {7, 5});
  ExpectCells(megatron.value(), "steps", DType::kI64, {});
  ExpectCells(megatron.value(), "half", DType::kBF16, {6, 4});
  ExpectCells(megatron.value(), "patched", DType::kBF16, {6, 4});
  EXPECT_EQ(KeysOf(megatron.value()).size(), 5u);
}

TEST(ZarrTest, MissingChunksAreHolesOrFillValues) {
  const TempDir dir;
  const std::string c = dir.Join("c");
  PutFile(c + "/metadata.json", kMegatronJson);
  PutArray(c + "/hole", {4, 4}, {2, 2}, {.missing = {"0.1"}});
  PutArray(c + "/filled", {4, 4}, {2, 2}, {.fill = "0.0", .missing = {"0.1", "1.1"}});
  PutArray(c + "/whole", {4, 4}, {2, 2}, {.fill = "0.0"});
  PutArray(c + "/short", {4}, {2});
  PutFile(c + "/short/1", "seven b");
  PutArray(c + "/strange", {4}, {2});
  for (const char* name : {"2", "01", "1.0", "-1", "x", "99999999999999999999"}) {
    PutFile(c + "/strange/" + name, "12345678");
  }
  const auto adopted = Adopt(MegatronZarrFormat(), c);
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("hole", "short", "strange", "whole"));
  ExpectCells(adopted.value(), "whole", DType::kF32, {4, 4});
  ExpectCells(adopted.value(), "strange", DType::kF32, {4});
  EXPECT_THAT(ReadTensor(adopted.value(), "hole"), HasCode(Code::kDataLoss));
  EXPECT_THAT(ReadTensor(adopted.value(), "short"), HasCode(Code::kDataLoss));
  const std::string warnings = WarningsOf(adopted.value());
  EXPECT_THAT(warnings, HasSubstr("tensor hole: [0:2, 2:4] is not stored"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor filled: left out: 2 of the tensor's chunks are not stored and "
                        "consist of the fill value 0.0, which cannot be read in place"));
  EXPECT_THAT(warnings, HasSubstr("short/1 has 7 bytes instead of 8"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor strange: 6 files in the tensor's directory are not chunks"));
}

TEST(ZarrTest, ErrorNamesTheUnsupportedFeature) {
  const TempDir dir;
  const std::string c = dir.Join("c");
  PutFile(c + "/.zgroup", R"({"zarr_format":2})");
  PutArray(c + "/blosc", {4}, {2}, {.compressor = R"({"id":"blosc","cname":"lz4"})"});
  PutArray(c + "/big", {4}, {2}, {.descr = ">f4"});
  PutArray(c + "/good", {4}, {2});
  PutFile(c + "/three/zarr.json", "{}");
  const auto adopted = Adopt(MegatronZarrFormat(), c);
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("good"));
  const std::string warnings = WarningsOf(adopted.value());
  EXPECT_THAT(warnings, HasSubstr("tensor blosc: left out: .zarray: compressed with blosc"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor big: left out: .zarray: element type '>f4' is not supported: "
                        "big-endian"));
  EXPECT_THAT(warnings, HasSubstr("directory three: left out: zarr version 3 is not supported"));
  PutFile(dir.Join("v3/zarr.json"), "{}");
  EXPECT_THAT(Adopt(MegatronZarrFormat(), dir.Join("v3")), HasCode(Code::kUnsupported));
}

// Chunks by the million that nobody stored cost nothing.
TEST(ZarrTest, HugeGridsAreNotWalked) {
  const TempDir dir;
  PutFile(dir.Join("c/.zgroup"), R"({"zarr_format":2})");
  for (const char* fill : {"null", "1"}) {
    PutFile(dir.Join("c/w/.zarray"),
            R"({"chunks":[1,1],"compressor":null,"dtype":"|u1","fill_value":)" + std::string(fill) +
                R"(,"filters":null,"order":"C","shape":[1000000000,1000000000],"zarr_format":2})");
    PutFile(dir.Join("c/w/5.7"), "x");
    EXPECT_OK(Adopt(MegatronZarrFormat(), dir.Join("c")));
  }
}

TEST(ZarrayTest, RefusesImpossibleMetadata) {
  const std::map<std::string, std::string> good = {
      {"chunks", "[2,3]"}, {"compressor", "null"}, {"dtype", "\"<f4\""}, {"fill_value", "null"},
      {"filters", "null"}, {"order", "\"C\""},     {"shape", "[4,3]"},   {"zarr_format", "2"}};
  const auto parse = [&](const std::string& field, const std::string& value) {
    std::string json = "{";
    for (const auto& [name, text] : good) {
      json += (json.size() > 1 ? ",\"" : "\"") + name + "\":" + (name == field ? value : text);
    }
    if (!good.contains(field)) json += ",\"" + field + "\":" + value;
    return ParseZarray(json + "}");
  };
  ASSERT_OK(parse("attrs", "{}"));
  EXPECT_EQ(parse("shape", "[5,3]").value().Grid(), (Dims{3, 1}));
  const std::vector<std::tuple<std::string, std::string, Code, std::string>> cases = {
      {"chunks", "[0,3]", Code::kDataLoss, "chunks [0, 3]"},
      {"chunks", "[2]", Code::kDataLoss, "as many axes as shape"},
      {"chunks", "[-1,3]", Code::kDataLoss, "not a whole number"},
      {"chunks", "[4611686018427387904,4]", Code::kDataLoss, "chunks"},
      {"shape", "[4611686018427387904,3]", Code::kDataLoss, ".zarray"},
      {"shape", "\"x\"", Code::kDataLoss, "not a list"},
      {"shape", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", Code::kUnsupported, "axes"},
      {"order", "\"A\"", Code::kDataLoss, "order"},
      {"dimension_separator", "\"-\"", Code::kDataLoss, "dimension_separator"},
      {"zarr_format", "3", Code::kUnsupported, "zarr_format 3"},
      {"zarr_format", "\"2\"", Code::kUnsupported, "zarr_format"},
      {"filters", "[{\"id\":\"delta\"}]", Code::kUnsupported, "filtered with delta"},
      {"filters", "{}", Code::kDataLoss, "not a list"},
      {"compressor", "{}", Code::kUnsupported, "a codec without a name"},
      {"dtype", "\"|O\"", Code::kUnsupported, "Python objects"},
      {"dtype", "[[\"a\",\"<f4\"]]", Code::kUnsupported, "several fields"},
      {"dtype", "4", Code::kDataLoss, "not a string"},
  };
  for (const auto& [field, value, code, message] : cases) {
    EXPECT_THAT(parse(field, value), HasCode(code)) << field << value;
    EXPECT_THAT(parse(field, value), HasMessage(message)) << field << value;
  }
  EXPECT_OK(parse("filters", "[]"));
  EXPECT_THAT(ParseZarray(R"({"zarr_format":2,"zarr_format":2})"), HasMessage("occurs twice"));
  EXPECT_THAT(ParseZarray(""), HasCode(Code::kDataLoss));
}

TEST(ZarrayTest, ChunkFileNamesAreParsedStrictly) {
  EXPECT_EQ(ParseChunkName("0", 0, '.'), Dims());
  EXPECT_EQ(ParseChunkName("10.0.3", 3, '.'), (Dims{10, 0, 3}));
  EXPECT_EQ(ParseChunkName("1/2", 2, '/'), (Dims{1, 2}));
  for (const char* name : {"", "1.", ".1", "1.2.3", "1", "1/2", "01.2", "+1.2", "1.-2", "1 .2"}) {
    EXPECT_EQ(ParseChunkName(name, 2, '.'), std::nullopt) << name;
  }
  EXPECT_EQ(ParseChunkName("1", 0, '.'), std::nullopt);
}

}  // namespace
}  // namespace tensormount
