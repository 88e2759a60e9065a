// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "index/foreign/format.h"
#include "index/foreign/open_source.h"
#include "tests/adopt/safetensors_maker.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class HuggingFaceTest : public testing::Test {
 protected:
  HuggingFaceTest() { EXPECT_OK(HostFileSystem().CreateDirectory(dir_.Join("m"))); }

  void Write(const std::string& name, const std::vector<MadeTensor>& tensors,
             const std::map<std::string, std::string>& metadata = {},
             const std::vector<std::string>& bytes = {}) {
    WriteSafetensors(dir_.Join("m/" + name), tensors, metadata, bytes);
  }
  void Index(const std::string& weight_map, const std::string& name = "model") {
    WriteWholeFile(dir_.Join("m/" + name + ".safetensors.index.json"),
                   R"({"metadata": {"total_size": 1}, "weight_map": {)" + weight_map + "}}");
  }
  Result<std::shared_ptr<OpenedCheckpoint>> Open(const std::string& name = "m",
                                                 const std::vector<std::string>& roots = {}) {
    return OpenNamed(HostFileSystem(), dir_.Join(name), roots);
  }
  static std::string Bytes(const OpenedCheckpoint& opened, const std::string& key) {
    const auto entry = opened.index().Find(key);
    if (!entry.ok()) return entry.status().ToString();
    std::string out(entry.value().meta.bytes(), '\0');
    const Status read = opened.ReadBytes(entry.value(), 0, out.data(), out.size(),
                                         ReadVerify::kExtendLeaves, nullptr);
    return read.ok() ? out : read.ToString();
  }
  static std::vector<std::string> Keys(const OpenedCheckpoint& opened) {
    std::vector<std::string> keys;
    EXPECT_OK(opened.index().ForEachTensor(0, [&](const TensorEntry& entry) {
      keys.push_back(entry.meta.key());
      return true;
    }));
    return keys;
  }

  TempDir dir_;
  const MadeTensor a_{"a", DType::kF32, {3, 4}};
  const MadeTensor b_{"b", DType::kBF16, {5}};
  const MadeTensor c_{"c", DType::kI64, {}};
};

TEST_F(HuggingFaceTest, SafetensorsFileOpensAsACheckpoint) {
  Write("model.safetensors", {a_, b_}, {{"format", "pt"}, {"$rank.1", "no"}});
  ASSERT_OK_AND_ASSIGN(const auto opened, Open("m/model.safetensors"));
  EXPECT_EQ(opened->name(), "model");
  EXPECT_EQ(opened->commit(), nullptr);
  EXPECT_EQ(Bytes(*opened, "a"), a_.bytes());
  EXPECT_EQ(Bytes(*opened, "b"), b_.bytes());
  EXPECT_EQ(opened->index().CommonRecord("format").value(), CommonValue("pt"));
  EXPECT_EQ(opened->index().info().producer, "safetensors");
  EXPECT_THAT(opened->warnings(), ElementsAre(HasSubstr("$rank.1")));
  // As hubs keep it: by a name that says nothing.
  WriteWholeFile(dir_.Join("blob"), ReadWholeFile(dir_.Join("m/model.safetensors")));
  EXPECT_OK(Open("blob"));
  WriteWholeFile(dir_.Join("text"), "some text that is no such file");
  EXPECT_THAT(Open("text"), HasCode(Code::kUnsupported));
  WriteWholeFile(dir_.Join("broken.safetensors"), "some text that is no such file");
  EXPECT_THAT(Open("broken.safetensors"), HasCode(Code::kDataLoss));
}

TEST_F(HuggingFaceTest, IndexSelectsTheFilesAndTensors) {
  Write("model-00001-of-00002.safetensors", {a_, c_}, {{"format", "pt"}});
  Write("model-00002-of-00002.safetensors", {b_}, {{"format", "pt"}});
  Write("stray.safetensors", {{"a", DType::kU8, {1}}, {"x", DType::kU8, {1}}});
  Index(R"("a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors",
           "c": "model-00001-of-00002.safetensors")");
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(opened->warnings(), IsEmpty());
  EXPECT_THAT(Keys(*opened), ElementsAre("a", "b", "c"));
  for (const MadeTensor& tensor : {a_, b_, c_}) {
    EXPECT_EQ(Bytes(*opened, tensor.key), tensor.bytes());
  }
  EXPECT_EQ(opened->index().files().size(), 2u);
  EXPECT_EQ(opened->index().CommonRecord("format").value(), CommonValue("pt"));
}

TEST_F(HuggingFaceTest, MissingIndexedTensorsAreLeftOutWithAWarning) {
  Write("one.safetensors", {a_, c_});
  Index(R"("a": "one.safetensors", "b": "two.safetensors", "d": "one.safetensors")");
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(Keys(*opened), ElementsAre("a"));
  EXPECT_THAT(
      opened->warnings(),
      testing::UnorderedElementsAre(
          HasSubstr(
              "two.safetensors: the file is listed in model.safetensors.index.json, but does not"),
          HasSubstr("one.safetensors: the file does not contain all tensors that "
                    "model.safetensors.index.json lists for it: tensor d is left out"),
          HasSubstr("1 tensors in it are not in the index")));
}

TEST_F(HuggingFaceTest, NonstandardIndexNamesAreFound) {
  Write("diffusion_pytorch_model-1.safetensors", {a_});
  Index(R"("a": "diffusion_pytorch_model-1.safetensors")", "diffusion_pytorch_model");
  Index(R"("a": "nothing")", "a.fp16");
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(Keys(*opened), ElementsAre("a"));
  EXPECT_THAT(opened->warnings(), IsEmpty());
}

TEST_F(HuggingFaceTest, WrongIndicesAreRefused) {
  Write("one.safetensors", {a_});
  WriteWholeFile(dir_.Join("secret.safetensors"), "x");
  const std::pair<const char*, Code> cases[] = {
      {R"("a": "../secret.safetensors")", Code::kPermissionDenied},
      {R"("a": "/etc/passwd")", Code::kDataLoss},
      {R"("a": "x\u0000y")", Code::kDataLoss},
      {R"("a": "")", Code::kDataLoss},
      {R"("a": 5)", Code::kDataLoss},
      {R"("a": "one.safetensors", "a": "one.safetensors")", Code::kDataLoss},
      {R"("a": "one.safetensors")"
       "\xff",
       Code::kDataLoss},
      {R"("a": "one.safetensors",)", Code::kDataLoss},
  };
  for (const auto& [map, code] : cases) {
    Index(map);
    EXPECT_THAT(Open(), HasCode(code)) << map;
  }
  for (const char* text : {"", "[]", "{}", R"({"weight_map": 5})", R"({"weight_map": {}} x)"}) {
    WriteWholeFile(dir_.Join("m/model.safetensors.index.json"), text);
    EXPECT_THAT(Open(), HasCode(Code::kDataLoss)) << text;
  }
}

TEST_F(HuggingFaceTest, DirectoriesWithoutAnIndexOpen) {
  Write("x-00001-of-00003.safetensors", {a_});
  Write("x-00003-of-00003.safetensors", {b_}, {{"k", "1"}});
  Write("other.safetensors", {c_}, {{"k", "2"}});
  {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    EXPECT_THAT(Keys(*opened), ElementsAre("a", "b", "c"));
    EXPECT_THAT(opened->warnings(),
                testing::UnorderedElementsAre(HasSubstr("only 2 of 3 files exist"),
                                              HasSubstr("metadata k differs")));
  }
  // The usual name is the whole model, whatever lies beside it.
  Write("model.safetensors", {a_});
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(Keys(*opened), ElementsAre("a"));
}

TEST_F(HuggingFaceTest, LinksIntoAHubNeedARoot) {
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("blobs")));
  WriteSafetensors(dir_.Join("blobs/0123"), {a_});
  ASSERT_EQ(symlink("../blobs/0123", dir_.Join("m/model.safetensors").c_str()), 0);
  const auto refused = Open();
  EXPECT_THAT(refused, HasCode(Code::kPermissionDenied));
  EXPECT_THAT(refused.status().message(), HasSubstr("--root"));
  ASSERT_OK_AND_ASSIGN(const auto opened, Open("m", {dir_.path()}));
  EXPECT_EQ(Bytes(*opened, "a"), a_.bytes());
  EXPECT_OK(Open("m/model.safetensors"));  // Resolved: the link is the user's own word.
}

// ---- Shards that torch.distributed.checkpoint wrote ----

std::string Offsets(const std::string& items) { return "{" + items + "}"; }

TEST_F(HuggingFaceTest, DcpShardsAreJoinedToWholeTensors) {
  const MadeTensor top{"w", DType::kF32, {2, 3}};
  const MadeTensor low{"w", DType::kF32, {1, 3}};
  const std::string low_bytes(12, 'z');
  const auto metadata = [](const std::string& items) {
    return std::map<std::string, std::string>{
        {"DCP_SHARDING_INFO", Offsets(items)}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
  };
  Write("shard-00001-model-00001-of-00001.safetensors", {top, c_},
        metadata(R"("w": {"saved_offsets": [0, 0]}, "c": {"saved_offsets": []})"));
  Write("shard-00002-model-00001-of-00001.safetensors", {low},
        metadata(R"("w": {"saved_offsets": [2, 0]})"), {low_bytes});
  {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    EXPECT_THAT(opened->warnings(), IsEmpty());
    ASSERT_OK_AND_ASSIGN(const TensorEntry w, opened->index().Find("w"));
    EXPECT_EQ(w.meta.shape(), (Dims{3, 3}));
    EXPECT_EQ(w.chunks, 2u);
    EXPECT_EQ(Bytes(*opened, "w"), top.bytes() + low_bytes);
    EXPECT_EQ(Bytes(*opened, "c"), c_.bytes());
    EXPECT_THAT(opened->index().CommonRecord("DCP_SHARDING_INFO"), HasCode(Code::kNotFound));
  }
  {
    // One file alone shows what it stores, and says so.
    ASSERT_OK_AND_ASSIGN(const auto one, Open("m/shard-00002-model-00001-of-00001.safetensors"));
    EXPECT_EQ(one->index().Find("w").value().meta.shape(), (Dims{1, 3}));
    EXPECT_THAT(one->warnings(), ElementsAre(HasSubstr("are shards")));
  }
  // A shard in the middle is lost: the hole is found.
  ASSERT_OK(
      HostFileSystem().RemoveFile(dir_.Join("m/shard-00001-model-00001-of-00001.safetensors")));
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(opened->warnings(), ElementsAre(HasSubstr("w: [0:2, 0:3] is not stored")));
  EXPECT_THAT(Bytes(*opened, "w"), HasSubstr("DATA_LOSS"));
}

TEST_F(HuggingFaceTest, ZeroOffsetsMeanAWholeTensor) {
  // What one rank writes for a whole tensor.
  Write("model-00001-of-00001.safetensors", {a_},
        {{"DCP_SHARDING_INFO", Offsets(R"("a": {"saved_offsets": [0, 0]})")}});
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(opened->warnings(), IsEmpty());
  EXPECT_EQ(Bytes(*opened, "a"), a_.bytes());
}

TEST_F(HuggingFaceTest, ConsolidatedFilesArePreferredToTheirShards) {
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("m/sharded")));
  WriteSafetensors(dir_.Join("m/sharded/shard-00001-model-00001-of-00001.safetensors"),
                   {{"a", DType::kF32, {1, 4}}},
                   {{"DCP_SHARDING_INFO", Offsets(R"("a": {"saved_offsets": [2, 0]})")}});
  Write("model-00001-of-00001.safetensors", {a_});
  Index(R"("a": "model-00001-of-00001.safetensors")");
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_EQ(opened->index().files().size(), 1u);
  EXPECT_EQ(Bytes(*opened, "a"), a_.bytes());
}

TEST_F(HuggingFaceTest, InconsistentShardsAreRefusedOrLeftOut) {
  const auto with = [&](const std::string& offsets) {
    Write("one.safetensors", {a_}, {{"DCP_SHARDING_INFO", offsets}});
    return Open();
  };
  for (const char* bad :
       {"", "[]", R"({"a": {}})", R"({"a": {"saved_offsets": 3}})",
        R"({"a": {"saved_offsets": [0]}})", R"({"a": {"saved_offsets": [0, -1]}})",
        R"({"a": {"saved_offsets": [0, 0]}, "a": {"saved_offsets": [0, 0]}})",
        R"({"a": {"saved_offsets": [0, 9223372036854775807]}})",
        R"({"a": {"saved_offsets": [0, 18446744073709551616]}})"}) {
    EXPECT_THAT(with(bad), HasCode(Code::kDataLoss)) << bad;
  }
  // The same cells in two files, and two types: the tensors are left out, the rest is there.
  const auto shard = [](const std::string& items) {
    return std::map<std::string, std::string>{{"DCP_SHARDING_INFO", Offsets(items)}};
  };
  Write("one.safetensors", {a_, c_}, shard(R"("a": {"saved_offsets": [0, 0]})"));
  Write("two.safetensors", {a_}, shard(R"("a": {"saved_offsets": [0, 0]})"));
  Write("three.safetensors", {{"b", DType::kU8, {2}}}, shard(R"("b": {"saved_offsets": [0]})"));
  Write("four.safetensors", {{"b", DType::kI8, {2}}}, shard(R"("b": {"saved_offsets": [2]})"));
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(Keys(*opened), ElementsAre("c"));
  EXPECT_THAT(opened->warnings(), testing::UnorderedElementsAre(
                                      HasSubstr("a: left out: [0:3, 0:4] is stored twice"),
                                      HasSubstr("b: left out: the shards have different dtypes")));
}

TEST_F(HuggingFaceTest, ConfigAndTokenizerFilesAreCarried) {
  Write("model.safetensors", {a_});
  WriteWholeFile(dir_.Join("m/config.json"), R"({"model_type": "bert"})");
  WriteWholeFile(dir_.Join("m/tokenizer_config.json"), "{}");
  WriteWholeFile(dir_.Join("m/vocab.txt"), "");
  for (const char* other : {"README.md", "training_args.bin", "config.json.bak", "optimizer.pt"}) {
    WriteWholeFile(dir_.Join("m/" + std::string(other)), "no");
  }
  ASSERT_OK(HostFileSystem().CreateDirectory(dir_.Join("m/tokenizer.json")));
  // A link that leads out of the folder, as in caches, needs leave; one that leads nowhere is
  // nothing.
  WriteWholeFile(dir_.Join("outside"), "merges");
  ASSERT_EQ(symlink("../outside", dir_.Join("m/merges.txt").c_str()), 0);
  ASSERT_EQ(symlink("nowhere", dir_.Join("m/chat_template.jinja").c_str()), 0);
  const auto names = [](const OpenedCheckpoint& opened) {
    std::vector<std::string> keys;
    const auto objects = opened.index().Objects();
    EXPECT_OK(objects);
    for (const ObjectRecord& object : objects.value()) keys.push_back(object.key);
    return keys;
  };
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(Keys(*opened), ElementsAre("a"));
  EXPECT_THAT(names(*opened), ElementsAre("config.json", "tokenizer_config.json", "vocab.txt"));
  EXPECT_THAT(opened->warnings(),
              testing::UnorderedElementsAre(HasSubstr("object merges.txt: left out"),
                                            HasSubstr("object chat_template.jinja: left out")));
  ASSERT_OK_AND_ASSIGN(const auto parts, opened->index().ObjectParts("config.json"));
  std::string text(parts[0].length, ' ');
  ASSERT_OK(opened->ReadObject(parts[0], 0, text.data(), text.size()));
  EXPECT_EQ(text, R"({"model_type": "bert"})");
  ASSERT_OK_AND_ASSIGN(const auto wide, Open("m", {dir_.path()}));
  EXPECT_THAT(names(*wide),
              ElementsAre("config.json", "merges.txt", "tokenizer_config.json", "vocab.txt"));
}

TEST_F(HuggingFaceTest, AFileThatChangesIsNeverMisread) {
  Write("model.safetensors", {a_});
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_EQ(Bytes(*opened, "a"), a_.bytes());
  Write("model.safetensors", {{"a", DType::kF32, {3, 4}}, b_});
  EXPECT_THAT(Bytes(*opened, "a"), HasSubstr("STALE"));
}

}  // namespace
}  // namespace tensormount
