// SPDX-License-Identifier: Apache-2.0
#include "fs/views/hf_view.h"

#include <nlohmann/json.hpp>

#include "shard/safetensors.h"
#include "tests/fs/vfs_ops.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class HfTest : public testing::Test {
 protected:
  std::string source() const { return dir_.Join("store") + "/step-1"; }
  void Write(const TinySpec& spec) {
    ASSERT_OK(WriteTinyCheckpoint(HostFileSystem(), dir_.Join("store"), "step-1", spec));
  }
  Status TryOpen(std::uint64_t part_bytes, std::string_view rules = "", std::string_view map = "") {
    VfsOptions options{.source = source(), .list_views = true};
    options.hf.part_bytes = part_bytes;
    if (!rules.empty()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(KeyMap made, KeyMap::FromJson(rules));
      options.hf.rules = std::make_shared<const KeyMap>(std::move(made));
    }
    if (!map.empty()) {
      options.map.rules = map;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(vfs_, Vfs::Open(HostFileSystem(), options));
    ops_ = std::make_unique<VfsOps>(*vfs_);
    return {};
  }
  nlohmann::json Index() {
    return nlohmann::json::parse(ops_->ReadAll("hf/model.safetensors.index.json").value());
  }

  // Adds what a part has to `found`: bytes by name. Sizes, header and types are checked here.
  void ReadPart(const std::string& name, const TinySpec& spec,
                std::map<std::string, std::string>& found) {
    ASSERT_OK_AND_ASSIGN(const std::string all, ops_->ReadAll("hf/" + name));
    ASSERT_OK_AND_ASSIGN(const FileStat stat, ops_->Stat("hf/" + name));
    ASSERT_EQ(stat.size, all.size());
    ASSERT_OK_AND_ASSIGN(const auto file, HostFileSystem().CreateExclusive(dir_.Join(name)));
    ASSERT_OK(file->WriteAt(0, all.data(), all.size()));
    ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ReadSafetensorsHeader(*file));
    EXPECT_EQ(header.metadata.at("format"), "pt");
    EXPECT_EQ(header.data_offset % 4096, 0u);
    for (const SafetensorsEntry& entry : header.entries) {
      EXPECT_EQ(found.count(entry.key), 0u) << entry.key;
      found[entry.key] = all.substr(header.data_offset + entry.begin, entry.end - entry.begin);
      for (const TinyTensor& tensor : spec.tensors) {
        if (tensor.key != entry.key) continue;
        EXPECT_EQ(entry.dtype, tensor.dtype) << entry.key;
        EXPECT_EQ(entry.shape, tensor.shape) << entry.key;
      }
    }
    ASSERT_OK(HostFileSystem().RemoveFile(dir_.Join(name)));
  }

  TempDir dir_;
  std::unique_ptr<Vfs> vfs_;
  std::unique_ptr<VfsOps> ops_;
};

std::map<std::string, std::string> BytesByKey(const TinySpec& spec) {
  std::map<std::string, std::string> bytes;
  for (const TinyTensor& tensor : spec.tensors) bytes[tensor.key] = TinyBytes(tensor);
  return bytes;
}

TEST(HfOptionsTest, PartSizesAreParsed) {
  EXPECT_THAT(ParsePartSize("100000"), IsOkAndHolds(100'000u));
  EXPECT_THAT(ParsePartSize("5GB"), IsOkAndHolds(HfOptions().part_bytes));
  EXPECT_THAT(ParsePartSize("5G"), IsOkAndHolds(5'000'000'000u));
  EXPECT_THAT(ParsePartSize("512MiB"), IsOkAndHolds(512u << 20));
  EXPECT_THAT(ParsePartSize("512MB"), IsOkAndHolds(512'000'000u));
  EXPECT_THAT(ParsePartSize("3KiB"), IsOkAndHolds(3072u));
  EXPECT_THAT(ParsePartSize("3K"), IsOkAndHolds(3000u));
  EXPECT_THAT(ParsePartSize("9223372036854775807"), IsOkAndHolds(9223372036854775807u));
  for (const char* bad : {"", "G", "0", "0GB", "-1", "1.5GB", "5 GB", "5TB", "5gb", "5GBB", "0x10",
                          "99999999999999999999", "9999999999G", "9223372036854775808"}) {
    EXPECT_THAT(ParsePartSize(bad), HasCode(Code::kInvalidArgument)) << bad;
  }
}

TEST_F(HfTest, SmallModelIsOneFile) {
  const TinySpec spec = DefaultTinySpec();
  Write(spec);
  ASSERT_OK(TryOpen(HfOptions().part_bytes));
  EXPECT_THAT(ops_->List("hf"), IsOkAndHolds(ElementsAre("model.safetensors")));
  EXPECT_THAT(ops_->Stat("hf/model.safetensors.index.json"), HasCode(Code::kNotFound));
  EXPECT_THAT(ops_->Stat("hf/model-00001-of-00001.safetensors"), HasCode(Code::kNotFound));
  std::map<std::string, std::string> found;
  ReadPart("model.safetensors", spec, found);
  EXPECT_TRUE(found == BytesByKey(spec));
  // The same file as the one beside it.
  EXPECT_EQ(ops_->ReadAll("hf/model.safetensors").value(),
            ops_->ReadAll("model.safetensors").value());
}

TEST_F(HfTest, PartsHaveTheChosenSize) {
  const TinySpec spec = DefaultTinySpec();
  Write(spec);
  // In order: bias 128, embed.weight 256, empty 0, layers.0.cols 240, layers.0.w 2048, step 8.
  ASSERT_OK(TryOpen(384));
  EXPECT_THAT(ops_->List("hf"),
              IsOkAndHolds(ElementsAre(
                  "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                  "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors",
                  "model.safetensors.index.json")));
  const nlohmann::json index = Index();
  EXPECT_EQ(index["metadata"], nlohmann::json({{"total_size", 128 + 256 + 240 + 2048 + 8}}));
  const auto part = [](int n) {
    return "model-0000" + std::to_string(n) + "-of-00004.safetensors";
  };
  EXPECT_EQ(index["weight_map"], nlohmann::json({{"bias", part(1)},
                                                 {"embed.weight", part(1)},
                                                 {"empty", part(1)},
                                                 {"layers.0.cols", part(2)},
                                                 {"layers.0.w", part(3)},
                                                 {"step", part(4)}}));
  std::map<std::string, std::string> found;
  for (int n = 1; n <= 4; ++n) {
    std::map<std::string, std::string> one;
    ReadPart(part(n), spec, one);
    for (const auto& [name, bytes] : one) EXPECT_EQ(index["weight_map"][name], part(n));
    found.merge(one);
  }
  EXPECT_TRUE(found == BytesByKey(spec));
  for (const char* none :
       {"model.safetensors", "model-00005-of-00004.safetensors", "model-00000-of-00004.safetensors",
        "model-1-of-00004.safetensors", "model-00001-of-00003.safetensors", "model-.safetensors",
        "config.json", "model-00001-of-00004.safetensors/x"}) {
    EXPECT_THAT(ops_->Stat(std::string("hf/") + none), Not(IsOk())) << none;
  }
  // One byte less, and what just fitted does not.
  ASSERT_OK(TryOpen(383));
  EXPECT_EQ(Index()["weight_map"]["embed.weight"], "model-00002-of-00005.safetensors");
  ASSERT_OK(TryOpen(1));
  EXPECT_EQ(Index()["weight_map"]["step"], "model-00006-of-00006.safetensors");
}

constexpr std::string_view kRules = R"([
  {"match": "layers.*.w", "to": "model.layers.*.weight"},
  {"key": "embed.weight", "to": "model.embed.weight"},
  {"key": "bias", "to": "bias"},
  {"drop": "*"}])";

TEST_F(HfTest, RulesSelectAndRename) {
  TinySpec spec = DefaultTinySpec();
  Write(spec);
  const KeyMap rules = KeyMap::FromJson(kRules).value();
  std::erase_if(spec.tensors, [&](const TinyTensor& t) { return rules.Apply(t.key).empty(); });
  for (TinyTensor& tensor : spec.tensors) tensor.key = rules.Apply(tensor.key);
  ASSERT_EQ(spec.tensors.size(), 3u);

  ASSERT_OK(TryOpen(1 << 20, kRules));
  std::map<std::string, std::string> found;
  ReadPart("model.safetensors", spec, found);
  EXPECT_TRUE(found == BytesByKey(spec));
  // Only here.
  EXPECT_OK(ops_->Stat("tensors/step"));
  CheckSafetensors(*ops_, "", DefaultTinySpec());

  ASSERT_OK(TryOpen(384, kRules));
  EXPECT_EQ(Index()["weight_map"],
            nlohmann::json({{"bias", "model-00001-of-00002.safetensors"},
                            {"model.embed.weight", "model-00001-of-00002.safetensors"},
                            {"model.layers.0.weight", "model-00002-of-00002.safetensors"}}));
  EXPECT_EQ(Index()["metadata"]["total_size"], 128 + 256 + 2048);
  found.clear();
  ReadPart("model-00001-of-00002.safetensors", spec, found);
  ReadPart("model-00002-of-00002.safetensors", spec, found);
  EXPECT_TRUE(found == BytesByKey(spec));
}

TEST_F(HfTest, RulesApplyToMappedKeys) {
  Write(DefaultTinySpec());
  ASSERT_OK(
      TryOpen(1, R"([{"key": "shown", "to": "hf.name"}, {"key": "z", "to": "y"}, {"drop": "*"}])",
              R"([{"key": "bias", "to": "shown"}, {"key": "step", "to": "z"}])"));
  EXPECT_EQ(Index()["weight_map"], nlohmann::json({{"hf.name", "model-00001-of-00002.safetensors"},
                                                   {"y", "model-00002-of-00002.safetensors"}}));
}

TEST_F(HfTest, ConflictingRulesFailTheMountWithAMessage) {
  Write(DefaultTinySpec());
  const Status status = TryOpen(1 << 20, R"([{"key": "bias", "to": "step"}])");
  ASSERT_THAT(status, HasCode(Code::kInvalidArgument));
  EXPECT_THAT(status.message(), HasSubstr("rules of hf/"));
  EXPECT_THAT(status.message(), HasSubstr("bias and step would both be called step"));
}

TEST_F(HfTest, UnsupportedTensorsAreLeftOutAndListed) {
  TinySpec spec = DefaultTinySpec();
  const TinySpec held = spec;
  spec.tensors.push_back({.key = "a \"complex\" one", .dtype = DType::kC128, .shape = {3}});
  spec.tensors.push_back({.key = "z", .dtype = DType::kC128, .shape = {5}});
  spec.tensors.push_back(
      {.key = "__metadata__", .dtype = DType::kU8, .shape = {5}, .tensor_file = true});
  Write(spec);
  ASSERT_OK(TryOpen(1 << 20));
  // One part, and an index that lists them.
  EXPECT_THAT(ops_->List("hf"),
              IsOkAndHolds(ElementsAre("model.safetensors", "model.safetensors.index.json")));
  EXPECT_EQ(Index()["metadata"]["tensormount_left_out"],
            nlohmann::json({"__metadata__", "a \"complex\" one", "z"}));
  EXPECT_EQ(Index()["weight_map"].size(), held.tensors.size());
  EXPECT_EQ(Index()["weight_map"]["step"], "model.safetensors");
  EXPECT_EQ(Index()["metadata"]["total_size"], 128 + 256 + 240 + 2048 + 8);
  std::map<std::string, std::string> found;
  ReadPart("model.safetensors", held, found);
  EXPECT_TRUE(found == BytesByKey(held));

  ASSERT_OK(TryOpen(384));
  EXPECT_EQ(Index()["metadata"]["tensormount_left_out"].size(), 3u);
  EXPECT_EQ(Index()["weight_map"].size(), held.tensors.size());
  // What rules drop is not left out: nobody wanted it.
  ASSERT_OK(TryOpen(384, R"([{"drop": "a *"}, {"key": "z", "to": "zz"}])"));
  EXPECT_EQ(Index()["metadata"]["tensormount_left_out"], nlohmann::json({"__metadata__", "zz"}));
  // Nothing is left: still a model.
  ASSERT_OK(TryOpen(384, R"([{"drop": "*"}])"));
  found.clear();
  ReadPart("model.safetensors", held, found);
  EXPECT_TRUE(found.empty());
}

TEST_F(HfTest, NoHfDirectoryWithoutTensors) {
  TinySpec spec = DefaultTinySpec();
  spec.tensors.clear();
  Write(spec);
  ASSERT_OK(TryOpen(1 << 20));
  EXPECT_THAT(ops_->Stat("hf"), HasCode(Code::kNotFound));
}

TEST_F(HfTest, ConfigAndTokenizerFilesAreShown) {
  TinySpec spec = DefaultTinySpec();
  const auto object = [](std::string key, std::string bytes) {
    return TinyObject{.key = std::move(key), .bytes = std::move(bytes), .index = {}, .grid = {}};
  };
  spec.objects = {object("assets/config.json", "below"),
                  object("config.json", "{}"),
                  object("model/chat_template.jinja", "{{ x }}"),
                  object("tokenizer.model", std::string(70'000, 'm')),
                  object("tokenizer_config.json", "1"),
                  object("tok/vocab.txt", "a\nb\n"),
                  object("x/vocab.txt", "other"),
                  object("myconfig.json", "no"),
                  object("config.json.bak", "no"),
                  object("rng", "no"),
                  {.key = "merges.txt", .bytes = "part", .index = {0}, .grid = {1}}};
  Write(spec);
  ASSERT_OK(TryOpen(1 << 20));
  EXPECT_THAT(ops_->List("hf"),
              IsOkAndHolds(ElementsAre("chat_template.jinja", "config.json", "model.safetensors",
                                       "tokenizer.model", "tokenizer_config.json", "vocab.txt")));
  EXPECT_THAT(ops_->ReadAll("hf/config.json"), IsOkAndHolds("{}"));
  EXPECT_THAT(ops_->ReadAll("hf/chat_template.jinja"), IsOkAndHolds("{{ x }}"));
  EXPECT_THAT(ops_->ReadAll("hf/tokenizer.model"), IsOkAndHolds(std::string(70'000, 'm')));
  EXPECT_THAT(ops_->ReadAll("hf/vocab.txt"), IsOkAndHolds("a\nb\n"));
  EXPECT_EQ(ops_->Stat("hf/config.json").value().mtime,
            ops_->Stat("objects/config.json").value().mtime);
  EXPECT_THAT(ops_->Xattr("hf/vocab.txt", "user.tensormount.key"), IsOkAndHolds("tok/vocab.txt"));
  EXPECT_THAT(ops_->Stat("hf/rng"), HasCode(Code::kNotFound));
  EXPECT_THAT(ops_->Stat("hf/merges.txt"), HasCode(Code::kNotFound));
}

TEST_F(HfTest, ManyPartsReadExactlyWithASmallCache) {
  TinySpec spec;
  spec.tensors.reserve(300);
  for (int i = 0; i < 300; ++i) {
    spec.tensors.push_back({.key = std::string(1500, 'k') + std::to_string(1000 + i),
                            .dtype = DType::kU8,
                            .shape = {7 + i % 5},
                            .seed = static_cast<std::uint64_t>(i)});
  }
  Write(spec);
  ASSERT_OK(TryOpen(20));
  std::map<std::string, std::string> found;
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> names, ops_->List("hf"));
  EXPECT_GT(names.size(), 100u);
  for (const std::string& name : names) {
    if (name.ends_with(".json")) continue;
    ReadPart(name, spec, found);
  }
  EXPECT_TRUE(found == BytesByKey(spec));
  // The index is made in pieces.
  const nlohmann::json index = Index();
  EXPECT_EQ(index["weight_map"].size(), spec.tensors.size());
  std::map<std::string, int> in_part;
  for (const auto& [key, part] : index["weight_map"].items()) ++in_part[part];
  EXPECT_EQ(in_part.size(), names.size() - 1);
  for (const auto& [part, tensors] : in_part) EXPECT_LE(tensors, 2) << part;
  std::map<std::string, std::string> last;
  ReadPart(index["weight_map"][spec.tensors.back().key], spec, last);
  EXPECT_EQ(last.count(spec.tensors.back().key), 1u);
}

// As the Python package stores {"lm_head.weight": e, "model.embed_tokens.weight": e, "norm": n}.
TinySpec TiedSpec(std::string_view config = "") {
  TinySpec spec;
  spec.tensors = {{.key = "lm_head.weight", .dtype = DType::kF32, .shape = Dims({4, 8}), .seed = 3},
                  {.key = "norm", .dtype = DType::kF32, .shape = Dims({8}), .seed = 4}};
  if (!config.empty()) spec.objects = {{.key = "config.json", .bytes = std::string(config)}};
  const CommonList keys{{"lm_head.weight", "model.embed_tokens.weight", "norm"}};
  const CommonList nodes{
      {CommonList{{"dict", keys}}, "tensor", CommonList{{"tensor", "lm_head.weight"}}, "tensor"}};
  spec.common["tensormount.tree.0"] = CommonDict{{{"version", 1}, {"nodes", nodes}}};
  return spec;
}

std::map<std::string, std::string> TiedBytes(const TinySpec& spec,
                                             const std::vector<std::string>& names) {
  std::map<std::string, std::string> bytes = {{"norm", TinyBytes(spec.tensors[1])}};
  for (const std::string& name : names) bytes[name] = TinyBytes(spec.tensors[0]);
  return bytes;
}

// transformers wants the embedding and drops the output layer where config.json says that they are
// one; where nothing says so, it may want either.
TEST_F(HfTest, TiedTensorsGetTheNamesThatTheModelKeeps) {
  const std::vector<std::string> both = {"lm_head.weight", "model.embed_tokens.weight"};
  const std::vector<std::string> embedding = {"model.embed_tokens.weight"};
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {"", both},
      {"{}", both},
      {"no JSON", both},
      {R"({"tie_word_embeddings": false})", both},
      {R"({"tie_word_embeddings": true})", embedding},
      {R"({"text_config": {"tie_word_embeddings": true}})", embedding},
      {R"({"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}})", both}};
  for (const auto& [config, names] : cases) {
    SCOPED_TRACE(config);
    const TinySpec spec = TiedSpec(config);
    ASSERT_OK(HostFileSystem().RemoveTree(dir_.Join("store")));
    Write(spec);
    ASSERT_OK(TryOpen(HfOptions().part_bytes));
    std::map<std::string, std::string> found;
    ReadPart("model.safetensors", spec, found);
    EXPECT_TRUE(found == TiedBytes(spec, names));
  }
}

TEST_F(HfTest, TiedTensorsWorkInPartsAndWithRules) {
  const TinySpec spec = TiedSpec();
  Write(spec);
  ASSERT_OK(TryOpen(256));
  std::map<std::string, std::string> found;
  ReadPart("model-00001-of-00002.safetensors", spec, found);
  ReadPart("model-00002-of-00002.safetensors", spec, found);
  EXPECT_TRUE(found == TiedBytes(spec, {"lm_head.weight", "model.embed_tokens.weight"}));
  EXPECT_EQ(Index()["metadata"]["total_size"], 128 + 128 + 32);
  EXPECT_EQ(Index()["weight_map"].size(), 3u);
  EXPECT_EQ(Index()["weight_map"]["model.embed_tokens.weight"], "model-00001-of-00002.safetensors");
  // Rules are for every name; two names of one tensor may become one, those of keys come first.
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {R"([{"drop": "lm_head.*"}])", {"model.embed_tokens.weight"}},
      {R"([{"key": "lm_head.weight", "to": "model.embed_tokens.weight"}])",
       {"model.embed_tokens.weight"}},
      {R"([{"key": "model.embed_tokens.weight", "to": "norm"}])", {"lm_head.weight"}},
      {R"([{"prefix": "model.", "to": ""}])", {"embed_tokens.weight", "lm_head.weight"}}};
  for (const auto& [rules, names] : cases) {
    for (const bool map : {false, true}) {
      SCOPED_TRACE(rules);
      if (map && rules.find("drop") != rules.npos) continue;  // A map drops the stored key.
      ASSERT_OK(TryOpen(HfOptions().part_bytes, map ? "" : rules, map ? rules : ""));
      found.clear();
      ReadPart("model.safetensors", spec, found);
      EXPECT_TRUE(found == TiedBytes(spec, names));
    }
  }
}

// As safetensors.torch.save_model writes them and load_model wants them: once.
TEST_F(HfTest, ModelSafetensorsContainsTiedTensorsOnce) {
  const TinySpec spec = TiedSpec();
  Write(spec);
  ASSERT_OK(TryOpen(HfOptions().part_bytes));
  ASSERT_OK_AND_ASSIGN(const std::string all, ops_->ReadAll("model.safetensors"));
  ASSERT_OK_AND_ASSIGN(const auto file, HostFileSystem().CreateExclusive(dir_.Join("whole")));
  ASSERT_OK(file->WriteAt(0, all.data(), all.size()));
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ReadSafetensorsHeader(*file));
  EXPECT_EQ(header.metadata,
            (std::map<std::string, std::string>{{"format", "pt"},
                                                {"model.embed_tokens.weight", "lm_head.weight"}}));
  ASSERT_EQ(header.entries.size(), 2u);
  for (const SafetensorsEntry& entry : header.entries) {
    EXPECT_EQ(all.substr(header.data_offset + entry.begin, entry.end - entry.begin),
              TiedBytes(spec, {"lm_head.weight"}).at(entry.key));
  }
}

}  // namespace
}  // namespace tensormount::fs
