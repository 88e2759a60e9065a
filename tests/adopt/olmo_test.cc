// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "index/foreign/olmo_metadata.h"
#include "shard/safetensors.h"
#include "tests/adopt/adopted.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

// Writes as OLMo-core 0.1 did: every share is flattened, a safetensors file a rank.
class Writer {
 public:
  explicit Writer(int ranks) : files_(static_cast<std::size_t>(ranks)) {}

  void Flat(const std::string& key, DType dtype, const Dims& shape,
            const std::map<int, Ranges>& ranks, bool old_release = false) {
    std::string specs;
    for (const auto& [rank, ranges] : ranks) {
      std::string bytes;
      std::string list;
      for (const auto& [begin, end] : ranges) {
        bytes += CellRange(dtype, begin, end);
        list +=
            (list.empty() ? "[" : ",[") + std::to_string(begin) + "," + std::to_string(end) + "]";
      }
      Put(rank, key, dtype, bytes);
      specs += (specs.empty() ? "" : ",") + FileName(rank) + ":";
      specs += old_release ? list : R"({"flattened_offsets":[)" + list + "]}";
    }
    Describe(key, dtype, shape, specs, old_release);
  }

  // A box a rank, of a matrix.
  void Boxes(const std::string& key, DType dtype, const Dims& shape,
             const std::map<int, Box>& ranks) {
    std::string specs;
    for (const auto& [rank, box] : ranks) {
      std::string bytes;
      for (std::int64_t row = box.begin(0); row < box.end(0); ++row) {
        bytes += CellRange(dtype, row * shape[1] + box.begin(1), row * shape[1] + box.end(1));
      }
      Put(rank, key, dtype, bytes);
      specs += (specs.empty() ? "" : ",") + FileName(rank) +
               R"(:{"flattened_offsets":null,"local_shape":)" + box.extent().ToString() +
               R"(,"global_offset":)" + box.begin().ToString() + "}";
    }
    Describe(key, dtype, shape, specs, false);
  }

  void Describe(const std::string& key, DType dtype, const Dims& shape, const std::string& specs,
                bool old_release) {
    json_ += (json_.empty() ? "" : ",") + ("\"" + key + R"(":{"shape":)") + shape.ToString() +
             R"(,"is_sharded":true)";
    if (!old_release) json_ += R"(,"dtype":")" + std::string(InfoOf(dtype).safetensors) + '"';
    json_ += old_release ? R"(,"flattened_offsets_per_file":{)" : R"(,"shard_spec_per_file":{)";
    json_ += specs + "}}";
  }

  void Put(int rank, const std::string& key, DType dtype, const std::string& bytes) {
    SafetensorsEntry entry;
    entry.key = key;
    entry.dtype = dtype;
    entry.shape = {static_cast<std::int64_t>(bytes.size() / (InfoOf(dtype).bits / 8))};
    files_[static_cast<std::size_t>(rank)].emplace_back(entry, bytes);
  }

  void Write(const std::string& folder) {
    for (std::size_t rank = 0; rank < files_.size(); ++rank) {
      std::vector<SafetensorsEntry> entries;
      for (const auto& [entry, bytes] : files_[rank]) entries.push_back(entry);
      std::string file = MakeSafetensorsHeader(entries, {}, 8).value();
      for (const auto& [entry, bytes] : files_[rank]) file += bytes;
      PutFile(folder + "/rank_" + std::to_string(rank) + ".safetensors", file);
    }
    PutFile(folder + "/metadata.json", R"({"tensors":{)" + json_ + "}}");
  }

 private:
  static std::string FileName(int rank) {
    return "\"rank_" + std::to_string(rank) + ".safetensors\"";
  }
  std::vector<std::vector<std::pair<SafetensorsEntry, std::string>>> files_;
  std::string json_;
};

Box MakeBox(const Dims& begin, const Dims& extent) { return Box::Make(begin, extent).value(); }

TEST(OlmoTest, ReadsFlatAndBoxShards) {
  const TempDir dir;
  Writer writer(3);
  writer.Flat("halves", DType::kF32, {7, 5}, {{0, {{0, 17}}}, {1, {{17, 35}}}});
  // Several ranges stand one after the other, in the order that is said.
  writer.Flat("ranges", DType::kBF16, {6, 4}, {{0, {{8, 11}, {0, 3}}}, {2, {{3, 8}, {11, 24}}}});
  writer.Boxes(
      "columns", DType::kI64, {4, 6},
      {{0, MakeBox({0, 0}, {4, 2})}, {1, MakeBox({0, 2}, {4, 3})}, {2, MakeBox({0, 5}, {4, 1})}});
  writer.Flat("scalar", DType::kF64, {}, {{0, {{0, 1}}}});
  writer.Flat("empty", DType::kF32, {0, 3}, {{1, {{0, 0}}}});
  writer.Write(dir.Join("c"));
  const auto adopted = Adopt(OlmoFormat(), dir.Join("c"));
  ASSERT_OK(adopted);
  EXPECT_THAT(adopted.value()->warnings(), IsEmpty());
  EXPECT_THAT(KeysOf(adopted.value()),
              ElementsAre("columns", "empty", "halves", "ranges", "scalar"));
  ExpectCells(adopted.value(), "halves", DType::kF32, {7, 5});
  ExpectCells(adopted.value(), "ranges", DType::kBF16, {6, 4});
  ExpectCells(adopted.value(), "columns", DType::kI64, {4, 6});
  ExpectCells(adopted.value(), "scalar", DType::kF64, {});
  ExpectCells(adopted.value(), "empty", DType::kF32, {0, 3});
}

// A pair instead of a list of pairs, and no dtype: the files say.
TEST(OlmoTest, ReadsMetadataOfOlderReleases) {
  const TempDir dir;
  Writer writer(2);
  writer.Flat("w", DType::kF16, {3, 4}, {{0, {{0, 5}}}, {1, {{5, 12}}}}, true);
  writer.Write(dir.Join("c"));
  const auto adopted = Adopt(OlmoFormat(), dir.Join("c"));
  ASSERT_OK(adopted);
  ExpectCells(adopted.value(), "w", DType::kF16, {3, 4});
}

TEST(OlmoTest, ModelAndOptimizerOpenAsOneCheckpoint) {
  const TempDir dir;
  Writer model(2);
  model.Flat("w", DType::kF32, {4, 4}, {{0, {{0, 8}}}, {1, {{8, 16}}}});
  model.Write(dir.Join("step1/model"));
  Writer optim(2);
  optim.Flat("state.w.__exp_avg", DType::kF32, {4, 4}, {{0, {{0, 8}}}, {1, {{8, 16}}}});
  // Pickles of {'lr': 0.5, 'foreach': None} and of os.system: only the first is plain data.
  const std::string group(
      "\x80\x02}q\x00(X\x02\x00\x00\x00lrG?\xe0\x00\x00\x00\x00\x00\x00"
      "X\x07\x00\x00\x00"
      "foreachNu.",
      37);
  const std::string evil = "cos\nsystem\n(S'x'\ntR.";
  for (const auto& [key, bytes] :
       {std::pair("param_group0", group), std::pair("param_group1", evil)}) {
    optim.Put(0, key, DType::kU8, bytes);
    const auto size = static_cast<std::int64_t>(bytes.size());
    optim.Describe(
        key, DType::kU8, {size},
        R"("rank_0.safetensors":{"flattened_offsets":[[0,)" + std::to_string(size) + "]]}", false);
  }
  optim.Write(dir.Join("step1/optim"));
  const auto adopted = Adopt(OlmoFormat(), dir.Join("step1"));
  ASSERT_OK(adopted);
  EXPECT_THAT(adopted.value()->warnings(), IsEmpty());
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("model.w", "optim.state.w.__exp_avg"));
  ExpectCells(adopted.value(), "model.w", DType::kF32, {4, 4});
  ExpectCells(adopted.value(), "optim.state.w.__exp_avg", DType::kF32, {4, 4});
  EXPECT_THAT(ReadObject(adopted.value(), "optim.param_group0"), IsOkAndHolds(group));
  EXPECT_THAT(ReadObject(adopted.value(), "optim.param_group1"), IsOkAndHolds(evil));
  const auto common = adopted.value()->index().CommonRecords();
  ASSERT_OK(common);
  ASSERT_EQ(common.value().size(), 1u);
  const CommonValue* value = &common.value().begin()->second;
  EXPECT_EQ(value->At("lr").value(), CommonValue(0.5));
}

// Common values stay in memory while the checkpoint is open, so a pickle over 1 MiB is an object
// only, even if its value is small.
TEST(OlmoTest, PicklesOver1MiBAreShownAsObjectsOnly) {
  const TempDir dir;
  Writer writer(1);
  // {'step': 7}, behind values that are thrown away.
  const std::string step("}X\x04\x00\x00\x00stepK\x07s.", 14);
  constexpr std::size_t kMost = std::size_t{1} << 20;
  std::map<std::string, std::string> pickles;
  for (const auto& [key, size] : {std::pair("param_group0", kMost), {"param_group1", kMost + 2}}) {
    std::string& bytes = pickles[key] = "\x80\x02";
    while (bytes.size() + step.size() < size) bytes += "N0";
    bytes += step;
    ASSERT_EQ(bytes.size(), size);
    writer.Put(0, key, DType::kU8, bytes);
    writer.Describe(
        key, DType::kU8, {static_cast<std::int64_t>(size)},
        R"("rank_0.safetensors":{"flattened_offsets":[[0,)" + std::to_string(size) + "]]}", false);
  }
  writer.Write(dir.Join("c"));
  const auto adopted = Adopt(OlmoFormat(), dir.Join("c"));
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()), IsEmpty());
  for (const auto& [key, bytes] : pickles) {
    const auto read = ReadObject(adopted.value(), key);
    ASSERT_OK(read);
    EXPECT_TRUE(read.value() == bytes) << key;
  }
  ASSERT_OK_AND_ASSIGN(const CommonValues common, adopted.value()->index().CommonRecords());
  ASSERT_EQ(common.size(), 1u);
  EXPECT_EQ(common.at("param_group0").At("step").value(), CommonValue(7));
}

TEST(OlmoTest, ReplicasAreReadFromOneOrSeveralFiles) {
  const TempDir dir;
  Writer writer(4);
  // Named of every rank, written by the first only; and a second group that wrote all again.
  const std::string whole = R"({"flattened_offsets":[[0,6]]})";
  std::string specs;
  for (int rank = 0; rank < 4; ++rank) {
    specs +=
        (rank == 0 ? "" : ",") + ("\"rank_" + std::to_string(rank)) + ".safetensors\":" + whole;
  }
  writer.Put(0, "replicated", DType::kF32, CellRange(DType::kF32, 0, 6));
  writer.Describe("replicated", DType::kF32, {6}, specs, false);
  writer.Flat("hybrid", DType::kF32, {8},
              {{0, {{0, 4}}}, {1, {{4, 8}}}, {2, {{0, 4}}}, {3, {{4, 8}}}});
  writer.Write(dir.Join("c"));
  const auto adopted = Adopt(OlmoFormat(), dir.Join("c"));
  ASSERT_OK(adopted);
  EXPECT_THAT(adopted.value()->warnings(), IsEmpty());
  ExpectCells(adopted.value(), "replicated", DType::kF32, {6});
  ExpectCells(adopted.value(), "hybrid", DType::kF32, {8});
}

TEST(OlmoTest, MissingFilesAreReportedAsHoles) {
  const TempDir dir;
  Writer writer(2);
  writer.Flat("w", DType::kF32, {8}, {{0, {{0, 4}}}, {1, {{4, 8}}}});
  writer.Flat("first", DType::kF32, {2}, {{0, {{0, 2}}}});
  writer.Write(dir.Join("c"));
  ASSERT_OK(HostFileSystem().RemoveFile(dir.Join("c/rank_1.safetensors")));
  const auto adopted = Adopt(OlmoFormat(), dir.Join("c"));
  ASSERT_OK(adopted);
  EXPECT_THAT(
      WarningsOf(adopted.value()),
      HasSubstr("rank_1.safetensors: the file is missing: the contents of the file are lost"));
  EXPECT_THAT(WarningsOf(adopted.value()), HasSubstr("tensor w: [4:8] is not stored"));
  ExpectCells(adopted.value(), "first", DType::kF32, {2});
  EXPECT_THAT(ReadTensor(adopted.value(), "w"), HasCode(Code::kDataLoss));
}

TEST(OlmoTest, TensorsThatContradictMetadataAreLeftOut) {
  const TempDir dir;
  Writer writer(1);
  const auto describe = [&](const std::string& key, DType dtype, std::int64_t n) {
    writer.Describe(key, dtype, {n},
                    R"("rank_0.safetensors":{"flattened_offsets":[[0,)" + std::to_string(n) + "]]}",
                    false);
  };
  writer.Put(0, "short", DType::kF32, CellRange(DType::kF32, 0, 3));
  describe("short", DType::kF32, 4);
  writer.Put(0, "long", DType::kF32, CellRange(DType::kF32, 0, 5));
  describe("long", DType::kF32, 4);
  writer.Put(0, "other", DType::kI32, CellRange(DType::kI32, 0, 4));
  describe("other", DType::kF32, 4);
  writer.Flat("good", DType::kF32, {4}, {{0, {{0, 4}}}});
  writer.Write(dir.Join("c"));
  const auto adopted = Adopt(OlmoFormat(), dir.Join("c"));
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("good"));
  const std::string warnings = WarningsOf(adopted.value());
  EXPECT_THAT(warnings, HasSubstr("tensor short: left out: rank_0.safetensors stores less"));
  EXPECT_THAT(warnings, HasSubstr("tensor long: left out: rank_0.safetensors stores more"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor other: left out: rank_0.safetensors stores the tensor as i32, "
                        "but metadata.json declares f32"));
}

TEST(OlmoTest, OverlappingShardsAreLeftOut) {
  const TempDir dir;
  Writer writer(2);
  writer.Flat("w", DType::kF32, {8}, {{0, {{0, 5}}}, {1, {{4, 8}}}});
  writer.Write(dir.Join("c"));
  const auto adopted = Adopt(OlmoFormat(), dir.Join("c"));
  ASSERT_OK(adopted);
  EXPECT_THAT(WarningsOf(adopted.value()), HasSubstr("tensor w: left out: [4:5] is stored twice"));
}

TEST(OlmoTest, MetadataFileNamesCannotLeaveTheCheckpoint) {
  const TempDir dir;
  PutFile(dir.Join("secret/rank_0.safetensors"), "x");
  for (const char* name : {"../secret/rank_0.safetensors", "/etc/passwd", "a//b", ""}) {
    PutFile(dir.Join("c/metadata.json"),
            R"({"tensors":{"w":{"shape":[1],"dtype":"F32","shard_spec_per_file":{")" +
                std::string(name) + R"(":{"flattened_offsets":[[0,1]]}}}}})");
    const auto adopted = Adopt(OlmoFormat(), dir.Join("c"));
    EXPECT_FALSE(adopted.ok()) << name;
    EXPECT_NE(adopted.status().code(), Code::kNotFound) << name;
  }
}

TEST(OlmoTest, OtherMetadataJsonIsNotTakenForOlmo) {
  const TempDir dir;
  PutFile(dir.Join("c/metadata.json"), R"({"sharded_backend":"torch_dist"})");
  EXPECT_THAT(Adopt(OlmoFormat(), dir.Join("c")), HasCode(Code::kNotFound));
}

TEST(OlmoMetadataTest, RefusesImpossibleMetadata) {
  const auto with = [](const std::string& tensor) { return R"({"tensors":{"w":)" + tensor + "}}"; };
  const auto spec = [&](const std::string& one) {
    return with(R"({"shape":[2,3],"dtype":"F32","shard_spec_per_file":{"f":)" + one + "}}");
  };
  EXPECT_OK(ParseOlmoMetadata(spec(R"({"flattened_offsets":[[0,6]]})")));
  EXPECT_OK(ParseOlmoMetadata(spec("null")));
  EXPECT_OK(ParseOlmoMetadata(R"({"tensors":{}})"));
  const std::map<std::string, std::string> bad = {
      {R"({"tensors":[]})", "no object 'tensors'"},
      {R"({"other":{}})", "no object 'tensors'"},
      {R"({"tensors":{"w":{},"w":{}}})", "has no shape"},
      {with("{}"), "tensor w: the description has no shape"},
      {with(R"({"shape":[2]})"), "must have exactly one of"},
      {with(R"({"shape":[-2],"shard_spec_per_file":{}})"), "not a whole number"},
      {with(R"({"shape":[1.5],"shard_spec_per_file":{}})"), "not a whole number"},
      {with(R"({"shape":[4294967296,4294967296],"shard_spec_per_file":{}})"), "overflows"},
      {with(R"({"shape":[2],"dtype":3,"shard_spec_per_file":{}})"), "dtype is not a string"},
      {spec(R"({"flattened_offsets":[[0,7]]})"), "range 0 to 7 is not within the 6 elements"},
      {spec(R"({"flattened_offsets":[[4,3]]})"), "range 4 to 3"},
      {spec(R"({"flattened_offsets":[[0,1,2]]})"), "not a pair"},
      {spec(R"({"flattened_offsets":[[0,18446744073709551615]]})"), "not a pair"},
      {spec(R"({"flattened_offsets":{}})"), "not a list"},
      {spec(R"({"local_shape":[1,1]})"), "only one of local_shape and global_offset"},
      {spec(R"({"local_shape":[3,1],"global_offset":[0,0]})"), "is not within [2, 3]"},
      {spec(R"({"local_shape":[1],"global_offset":[0]})"), "is not within [2, 3]"},
      {spec(R"({"local_shape":[1,1],"global_offset":[9223372036854775807,0]})"), "in f"},
      {spec(R"([1])"), "the description of a shard is not an object"},
  };
  for (const auto& [json, message] : bad) {
    const auto parsed = ParseOlmoMetadata(json);
    EXPECT_THAT(parsed, HasCode(Code::kDataLoss)) << json;
    EXPECT_THAT(parsed, HasMessage(message)) << json;
  }
  const auto twice = ParseOlmoMetadata(R"({"tensors":{"w":{"shape":[1],"shard_spec_per_file":{}},
                                           "w":{"shape":[1],"shard_spec_per_file":{}}}})");
  EXPECT_THAT(twice, HasMessage("key 'w' occurs twice"));
  const auto unknown =
      ParseOlmoMetadata(with(R"({"shape":[2],"dtype":"Q4","shard_spec_per_file":{}})"));
  ASSERT_OK(unknown);
  EXPECT_THAT(unknown.value().tensors.at(0).problem, HasCode(Code::kUnsupported));
}

}  // namespace
}  // namespace tensormount
