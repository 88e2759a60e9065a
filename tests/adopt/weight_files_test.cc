// SPDX-License-Identifier: Apache-2.0
// Folders in which several files could be the weights, and files that are damaged or are not what
// their names say.
#include "index/foreign/weight_files.h"

#include <string>
#include <unistd.h>
#include <vector>

#include "index/foreign/open_source.h"
#include "index/foreign/verify_foreign.h"
#include "shard/npy.h"
#include "tests/adopt/adopted.h"
#include "tests/adopt/safetensors_maker.h"
#include "tests/adopt/zip_builder.h"
#include "tests/support/subprocess.h"

namespace tensormount {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

constexpr std::string_view kLfs =
    "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";

class WeightFilesTest : public testing::Test {
 protected:
  void Write(const std::string& name, const std::vector<MadeTensor>& tensors,
             const std::vector<std::string>& bytes = {}) {
    PutFile(dir_.Join("m/" + name), "");
    WriteSafetensors(dir_.Join("m/" + name), tensors, {}, bytes);
  }
  void Index(const std::string& weight_map,
             const std::string& name = "model.safetensors.index.json") {
    PutFile(dir_.Join("m/" + name), R"({"metadata": {}, "weight_map": {)" + weight_map + "}}");
  }
  // A file of torch.save, of the golden folder "hf".
  void Torch(const std::string& name, const std::string& golden) {
    PutFile(dir_.Join("m/" + name),
            ReadWholeFile(SourcePath("tests/golden/foreign/torch-save-2.13/" + golden)));
  }
  Result<Adopted> Open(const std::string& name = "m", const std::vector<std::string>& roots = {}) {
    return OpenNamed(HostFileSystem(), dir_.Join(name), roots);
  }
  static std::string Bytes(const Adopted& opened, const std::string& key) {
    const Result<std::string> read = ReadTensor(opened, key);
    return read.ok() ? read.value() : read.status().ToString();
  }

  TempDir dir_;
  const MadeTensor a_{"a", DType::kF32, {3}};
  const MadeTensor b_{"b", DType::kF32, {2}};
  const MadeTensor c_{"c", DType::kF32, {1}};
};

TEST_F(WeightFilesTest, DotFilesAreIgnored) {
  Write("model-00001-of-00001.safetensors", {a_});
  for (const char* name : {"._model-00001-of-00001.safetensors", "._model.safetensors",
                           "._x.safetensors.index.json", ".pytorch_model.bin", "._w.npy"}) {
    PutFile(dir_.Join("m/" + std::string(name)), "\x00\x05\x16\x07 a Mac's");
  }
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(KeysOf(opened), ElementsAre("a"));
  EXPECT_THAT(opened->warnings(), IsEmpty());
  // And where there is nothing else, there is nothing.
  PutFile(dir_.Join("dots/._model.safetensors"), "x");
  PutFile(dir_.Join("dots/._w.npy"), "x");
  EXPECT_THAT(Open("dots"), HasCode(Code::kUnsupported));
  // Beside the files of a rank.
  const std::string ranks = SourcePath("tests/golden/foreign/torch-save-2.13/ranks/mp_rank_00/");
  PutFile(dir_.Join("ranks/mp_rank_00/model_optim_rng.pt"),
          ReadWholeFile(ranks + "model_optim_rng.pt"));
  PutFile(dir_.Join("ranks/mp_rank_00/._model_optim_rng.pt"), "x");
  ASSERT_OK_AND_ASSIGN(const auto rank, Open("ranks"));
  EXPECT_THAT(rank->lost(), IsEmpty());
}

TEST_F(WeightFilesTest, SingleFileIsPreferredToAnIndexOfTheSameTensors) {
  const std::string threes(12, '3');
  const std::string sevens(12, '7');
  Write("model.safetensors", {a_, b_}, {threes});
  Write("model-00001-of-00002.safetensors", {a_}, {sevens});
  Write("model-00002-of-00002.safetensors", {b_});
  Index(R"("a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors")");
  {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    EXPECT_EQ(Bytes(opened, "a"), threes);  // What transformers reads.
    EXPECT_THAT(opened->warnings(),
                ElementsAre(AllOf(HasSubstr("model.safetensors is read"),
                                  HasSubstr("model.safetensors.index.json is ignored"))));
    EXPECT_THAT(opened->beside(), UnorderedElementsAre("model-00001-of-00002.safetensors",
                                                       "model-00002-of-00002.safetensors"));
  }
  // The index by its name.
  ASSERT_OK_AND_ASSIGN(const auto other, Open("m/model.safetensors.index.json"));
  EXPECT_EQ(Bytes(other, "a"), sevens);
  EXPECT_EQ(Bytes(other, "b"), b_.bytes());
  EXPECT_THAT(other->warnings(), IsEmpty());
}

TEST_F(WeightFilesTest, TwoDifferentModelsInADirectoryAreRefused) {
  Write("model.safetensors", {a_});
  Write("one.safetensors", {a_});
  Write("two.safetensors", {b_});
  Index(R"("a": "one.safetensors", "b": "two.safetensors")");
  EXPECT_THAT(Open(), AllOf(HasCode(Code::kUnsupported),
                            HasMessage("--file, or as the source: model.safetensors, "
                                       "model.safetensors.index.json")));
  ASSERT_OK_AND_ASSIGN(const auto one, Open("m/model.safetensors"));
  EXPECT_THAT(KeysOf(one), ElementsAre("a"));
  ASSERT_OK_AND_ASSIGN(const auto two, Open("m/model.safetensors.index.json"));
  EXPECT_THAT(KeysOf(two), ElementsAre("a", "b"));
  // Another type is another set of weights.
  Index(R"("a": "one.safetensors")");
  Write("one.safetensors", {{"a", DType::kI32, {3}}});
  EXPECT_THAT(Open(), HasCode(Code::kUnsupported));
  // An index that nothing is left of is not a candidate.
  ASSERT_OK(HostFileSystem().RemoveFile(dir_.Join("m/one.safetensors")));
  ASSERT_OK_AND_ASSIGN(const auto left, Open());
  EXPECT_THAT(KeysOf(left), ElementsAre("a"));
  EXPECT_THAT(left->lost(), IsEmpty());
}

TEST_F(WeightFilesTest, SingleTorchFileIsPreferredToItsIndex) {
  Torch("pytorch_model.bin", "hf/pytorch_model-00001-of-00002.bin");
  Torch("part.bin", "hf/pytorch_model-00001-of-00002.bin");
  ASSERT_OK_AND_ASSIGN(const auto alone, Open());
  std::string map;
  for (const std::string& key : KeysOf(alone)) {
    map += (map.empty() ? "\"" : ", \"") + key + R"(": "part.bin")";
  }
  Index(map, "pytorch_model.bin.index.json");
  ASSERT_OK_AND_ASSIGN(const auto both, Open());
  EXPECT_THAT(both->warnings(), ElementsAre(HasSubstr("pytorch_model.bin is read")));
  Torch("part.bin", "hf/pytorch_model-00002-of-00002.bin");
  EXPECT_THAT(Open(), HasCode(Code::kUnsupported));
  // By name the index is read, whose tensors the file lacks.
  EXPECT_THAT(Open("m/pytorch_model.bin.index.json").value()->lost(), testing::SizeIs(1));
}

TEST_F(WeightFilesTest, AdapterIsNotTakenForTheModel) {
  Torch("pytorch_model.bin", "hf/pytorch_model-00001-of-00002.bin");
  Write("adapter_model.safetensors", {a_});
  ASSERT_OK_AND_ASSIGN(const auto model, Open());
  EXPECT_EQ(model->index().info().producer, "torch.save");
  EXPECT_THAT(model->beside(), ElementsAre("adapter_model.safetensors"));
  // Other weights than those of transformers are what vLLM would take.
  Write("other.safetensors", {b_});
  EXPECT_THAT(Open(), AllOf(HasCode(Code::kUnsupported),
                            HasMessage("pytorch_model.bin, other.safetensors")));
  // An adapter alone is one.
  ASSERT_OK(HostFileSystem().RemoveFile(dir_.Join("m/other.safetensors")));
  ASSERT_OK(HostFileSystem().RemoveFile(dir_.Join("m/pytorch_model.bin")));
  ASSERT_OK_AND_ASSIGN(const auto adapter, Open());
  EXPECT_THAT(KeysOf(adapter), ElementsAre("a"));
}

TEST_F(WeightFilesTest, ConsolidatedCopiesAreListedBesideTheModel) {
  Write("model-00001-of-00002.safetensors", {a_});
  Write("model-00002-of-00002.safetensors", {b_});
  Write("consolidated.safetensors", {c_});
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(KeysOf(opened), ElementsAre("a", "b"));
  EXPECT_THAT(opened->beside(), ElementsAre("consolidated.safetensors"));
}

TEST_F(WeightFilesTest, UnindexedFilesWithTheSameKeysAreRefused) {
  Write("model0-mp2.safetensors", {a_, b_});
  Write("model1-mp2.safetensors", {{"a", DType::kF16, {3}}});
  EXPECT_THAT(Open(), AllOf(HasCode(Code::kUnsupported),
                            HasMessage("a is in model0-mp2.safetensors and in "
                                       "model1-mp2.safetensors: choose one of them")));
  EXPECT_OK(Open("m/model1-mp2.safetensors"));
  // What diffusers takes is the file without a variant in its name.
  Write("diffusion_pytorch_model.safetensors", {a_});
  Write("diffusion_pytorch_model.fp16.safetensors", {{"a", DType::kF16, {3}}});
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_EQ(Bytes(opened, "a"), a_.bytes());
}

TEST_F(WeightFilesTest, OneBadShardHidesOnlyItsTensors) {
  const auto cut = [&](const std::string& name, std::size_t bytes) {
    PutFile(dir_.Join("m/" + name), ReadWholeFile(dir_.Join("m/" + name)).substr(0, bytes));
  };
  Write("one.safetensors", {a_});
  Write("two.safetensors", {b_});
  Write("three.safetensors", {c_});
  cut("two.safetensors", 20);
  cut("three.safetensors", 0);
  ASSERT_EQ(symlink("nowhere", dir_.Join("m/four.safetensors").c_str()), 0);
  for (const bool index : {false, true}) {
    if (index) {
      Index(R"("a": "one.safetensors", "b": "./two.safetensors", "c": "three.safetensors",
               "d": "four.safetensors")");
    }
    ASSERT_OK_AND_ASSIGN(const auto opened, Open());
    EXPECT_THAT(KeysOf(opened), ElementsAre("a"));
    EXPECT_EQ(Bytes(opened, "a"), a_.bytes());
    std::vector<std::string> files;
    for (const ForeignLoss& loss : opened->lost()) files.push_back(loss.file);
    EXPECT_THAT(files,
                UnorderedElementsAre("two.safetensors", "three.safetensors", "four.safetensors"));
    EXPECT_THAT(OpenComplete(dir_.Join("m"), {}, false), HasCode(Code::kDataLoss));
    EXPECT_OK(OpenComplete(dir_.Join("m"), {}, true));
    ASSERT_OK_AND_ASSIGN(const std::string path, HostFileSystem().Resolve(dir_.Join("m")));
    ASSERT_OK_AND_ASSIGN(const VerifyReport report, VerifyForeign(HostFileSystem(), path, {}));
    EXPECT_EQ(report.damages.size(), 3u);
  }
  // Where no file can be read, all of them are named.
  ASSERT_OK(HostFileSystem().RemoveFile(dir_.Join("m/one.safetensors")));
  EXPECT_THAT(Open(), AllOf(HasCode(Code::kDataLoss), HasMessage("two.safetensors"),
                            HasMessage("three.safetensors")));
}

TEST_F(WeightFilesTest, OneBadTorchShardHidesOnlyItsTensors) {
  Torch("one.bin", "hf/pytorch_model-00001-of-00002.bin");
  Torch("two.bin", "hf/pytorch_model-00002-of-00002.bin");
  ASSERT_OK_AND_ASSIGN(const auto first, Open("m/one.bin"));
  const std::string key = KeysOf(first).front();
  Index("\"" + key + R"(": "one.bin", "x": "two.bin")", "pytorch_model.bin.index.json");
  PutFile(dir_.Join("m/two.bin"), "PK\3\4 and no more");
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(KeysOf(opened), ElementsAre(key));
  ASSERT_THAT(opened->lost(), testing::SizeIs(1));
  EXPECT_EQ(opened->lost()[0].file, "two.bin");
  EXPECT_THAT(opened->lost()[0].tensors, ElementsAre("x"));
}

// A model whose files are all damaged fails to open, instead of opening without tensors.
TEST_F(WeightFilesTest, DamageOfAllTorchShardsIsAnError) {
  for (const char* name : {"one.bin", "two.bin"}) {
    PutFile(dir_.Join(std::string("m/") + name), "PK\3\4 and no more");
  }
  Index(R"("w": "one.bin", "x": "two.bin")", "pytorch_model.bin.index.json");
  const auto opened = Open();
  EXPECT_THAT(opened, HasCode(Code::kDataLoss));
  EXPECT_THAT(opened, HasMessage("one.bin"));
}

TEST_F(WeightFilesTest, TensorOfAnUnknownTypeIsLeftOut) {
  Write("model.safetensors", {a_, {"b", DType::kF16, {2}}});
  std::string bytes = ReadWholeFile(dir_.Join("m/model.safetensors"));
  bytes.replace(bytes.find("F16"), 3, "Q99");
  PutFile(dir_.Join("m/model.safetensors"), bytes);
  for (const char* name : {"m", "m/model.safetensors"}) {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open(name));
    EXPECT_THAT(KeysOf(opened), ElementsAre("a"));
    EXPECT_EQ(Bytes(opened, "a"), a_.bytes());
    EXPECT_THAT(opened->warnings(),
                ElementsAre(HasSubstr("tensor b: left out: dtype 'Q99' is not supported")));
    EXPECT_THAT(opened->lost(), IsEmpty());
  }
}

TEST_F(WeightFilesTest, FileFormatIsDetectedFromContent) {
  const std::string golden = SourcePath("tests/golden/foreign/");
  const auto blob = [&](const std::string& from, const std::string& link) {
    PutFile(dir_.Join("blobs/" + link.substr(0, 3)), ReadWholeFile(golden + from));
    PutFile(dir_.Join("m/x"), "");
    ASSERT_EQ(symlink(("../blobs/" + link.substr(0, 3)).c_str(), dir_.Join("m/" + link).c_str()),
              0);
  };
  blob("torch-save-2.13/nested.pt", "pyt.bin");
  blob("torch-save-2.13/old.pt", "old.pt");
  blob("numpy-2.4/stored.npz", "w.npz");
  PutFile(dir_.Join("blobs/npy"), MakeNpyHeader(DType::kU8, {1}).value() + "x");
  ASSERT_EQ(symlink("../blobs/npy", dir_.Join("m/w.npy").c_str()), 0);
  Torch("checkpoint.pth.tar", "nested.pt");
  Torch("run-000100.weights", "nested.pt");
  ASSERT_EQ(symlink("run-000100.weights", dir_.Join("m/latest.pt").c_str()), 0);
  for (const char* name : {"pyt.bin", "w.npz", "w.npy", "checkpoint.pth.tar", "latest.pt"}) {
    EXPECT_OK(Open("m/" + std::string(name))) << name;
  }
  EXPECT_THAT(Open("m/old.pt"), HasMessage("torch.save (before PyTorch 1.6"));
  // A zip of something else is none.
  ZipBuilder zip;
  zip.Add("word/document.xml", "<x/>");
  PutFile(dir_.Join("m/letter.docx"), zip.Finish());
  EXPECT_THAT(Open("m/letter.docx"), HasMessage("not a file of a supported format"));
  // A wrong name.
  Torch("zip.safetensors", "nested.pt");
  EXPECT_OK(Open("m/zip.safetensors"));
}

TEST_F(WeightFilesTest, ErrorNamesGitLfsPointers) {
  PutFile(dir_.Join("m/model.safetensors"), std::string(kLfs));
  PutFile(dir_.Join("t/pytorch_model.bin"), std::string(kLfs));
  for (const char* name : {"m", "m/model.safetensors", "t", "t/pytorch_model.bin"}) {
    EXPECT_THAT(Open(name), HasMessage("git-lfs pointer")) << name;
    EXPECT_THAT(Open(name), HasMessage("git lfs pull")) << name;
  }
  // Of several files one.
  Write("one.safetensors", {a_});
  Index(R"("a": "one.safetensors", "b": "two.safetensors")");
  PutFile(dir_.Join("m/two.safetensors"), std::string(kLfs));
  ASSERT_OK(HostFileSystem().RemoveFile(dir_.Join("m/model.safetensors")));
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  ASSERT_THAT(opened->lost(), testing::SizeIs(1));
  EXPECT_THAT(opened->lost()[0].reason, HasSubstr("git-lfs pointer"));
}

TEST_F(WeightFilesTest, HubCacheOpensWithoutARoot) {
  const std::string snapshot = "models--x/snapshots/0123/";
  PutFile(dir_.Join("models--x/blobs/aaaa"), "");
  WriteSafetensors(dir_.Join("models--x/blobs/aaaa"), {a_});
  PutFile(dir_.Join("models--x/blobs/bbbb"),
          R"({"weight_map": {"a": "model-00001-of-00001.safetensors"}})");
  PutFile(dir_.Join("models--x/refs/main"), "0123");
  PutFile(dir_.Join("secret"), "x");
  PutFile(dir_.Join(snapshot + "README.md"), "");
  const auto link = [&](const char* target, const std::string& name) {
    ASSERT_EQ(symlink(target, dir_.Join(snapshot + name).c_str()), 0);
  };
  link("../../blobs/aaaa", "model-00001-of-00001.safetensors");
  link("../../blobs/bbbb", "model.safetensors.index.json");
  link("../../../secret", "vocab.txt");
  link("../../refs/main", "merges.txt");
  for (const std::string name :
       {"models--x/snapshots/0123", "models--x/snapshots/0123/model.safetensors.index.json",
        "models--x/snapshots/0123/model-00001-of-00001.safetensors"}) {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open(name));
    EXPECT_EQ(Bytes(opened, "a"), a_.bytes()) << name;
  }
  // Nothing else that links lead to.
  ASSERT_OK_AND_ASSIGN(const auto opened, Open("models--x/snapshots/0123"));
  EXPECT_THAT(opened->warnings(), UnorderedElementsAre(HasSubstr("vocab.txt: left out"),
                                                       HasSubstr("merges.txt: left out")));
  // A blob that is a link out is refused when it is read, too.
  ASSERT_OK(HostFileSystem().RemoveFile(dir_.Join("models--x/blobs/aaaa")));
  PutFile(dir_.Join("out"), ReadWholeFile(dir_.Join("models--x/blobs/bbbb")));
  ASSERT_EQ(symlink("../../out", dir_.Join("models--x/blobs/aaaa").c_str()), 0);
  EXPECT_THAT(Bytes(opened, "a"), HasSubstr("leads out of"));
  EXPECT_THAT(Open("models--x/snapshots/0123"), HasCode(Code::kPermissionDenied));
}

TEST_F(WeightFilesTest, LinksMayPointIntoAnyGivenRoot) {
  PutFile(dir_.Join("nfs/blobs/aaaa"), "");
  WriteSafetensors(dir_.Join("nfs/blobs/aaaa"), {a_});
  PutFile(dir_.Join("disk2/bbbb"), "");
  WriteSafetensors(dir_.Join("disk2/bbbb"), {b_});
  PutFile(dir_.Join("ssd/snap/README.md"), "");
  ASSERT_EQ(symlink("../../nfs/blobs/aaaa", dir_.Join("ssd/snap/one.safetensors").c_str()), 0);
  ASSERT_EQ(symlink(dir_.Join("disk2/bbbb").c_str(), dir_.Join("ssd/snap/two.safetensors").c_str()),
            0);
  const std::string a = dir_.Join("nfs/blobs");
  const std::string b = dir_.Join("disk2");
  EXPECT_THAT(Open("ssd/snap"), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(Open("ssd/snap", {a}), AllOf(HasCode(Code::kPermissionDenied), HasMessage("bbbb")));
  EXPECT_THAT(Open("ssd/snap", {b}), AllOf(HasCode(Code::kPermissionDenied), HasMessage("aaaa")));
  for (const std::vector<std::string>& roots :
       {std::vector{a, b}, std::vector{b, dir_.Join("ssd"), a}}) {
    ASSERT_OK_AND_ASSIGN(const auto opened, Open("ssd/snap", roots));
    EXPECT_EQ(Bytes(opened, "a"), a_.bytes());
    EXPECT_EQ(Bytes(opened, "b"), b_.bytes());
  }
  // A root that nothing leads into changes nothing.
  Write("model.safetensors", {a_});
  ASSERT_OK_AND_ASSIGN(const auto plain, Open("m"));
  ASSERT_OK_AND_ASSIGN(const auto rooted, Open("m", {a}));
  EXPECT_EQ(plain->index().info().root, rooted->index().info().root);
}

TEST_F(WeightFilesTest, LargeIndicesAreRead) {
  // The format of an index has no limit; ours is far above that of a header.
  EXPECT_GE(kMaxWeightIndexBytes, std::uint64_t{1} << 30);
  PutFile(dir_.Join("m/model.safetensors.index.json"), "{");
  ASSERT_EQ(truncate(dir_.Join("m/model.safetensors.index.json").c_str(),
                     static_cast<off_t>(kMaxWeightIndexBytes) + 1),
            0);
  EXPECT_THAT(Open(), HasCode(Code::kUnsupported));
}

TEST_F(WeightFilesTest, TrainerFilesAreListedBesideTheModel) {
  Write("model.safetensors", {a_});
  for (const char* name : {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin",
                           "README.md", "config.json"}) {
    PutFile(dir_.Join("m/" + std::string(name)), "{}");
  }
  PutFile(dir_.Join("m/sub/w.npy"), "x");
  PutFile(dir_.Join("m/logs/events"), "x");
  ASSERT_OK_AND_ASSIGN(const auto opened, Open());
  EXPECT_THAT(opened->warnings(), IsEmpty());
  EXPECT_THAT(opened->beside(), UnorderedElementsAre("optimizer.pt", "scheduler.pt",
                                                     "rng_state.pth", "training_args.bin", "sub/"));
}

}  // namespace
}  // namespace tensormount
