// SPDX-License-Identifier: Apache-2.0
// Files of torch.save of PyTorch 2.13 (tests/golden/foreign/make_torch_save.py) and such as it
// would not write.
#include <string>

#include "index/foreign/torch_tree.h"
#include "tests/adopt/adopted.h"
#include "tests/adopt/zip_builder.h"
#include "tests/support/subprocess.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string Golden(const std::string& name) {
  return SourcePath("tests/golden/foreign/torch-save-2.13/" + name);
}

CommonValues AdoptedCommon(const Adopted& adopted) {
  return adopted->index().CommonRecords().value();
}

TEST(TorchSaveTest, ReadsTensorsOfPyTorch213) {
  const auto adopted = Adopt(TorchSaveFormat(), Golden("nested.pt"));
  ASSERT_OK(adopted);
  const Adopted& c = adopted.value();
  ExpectCells(c, "model.w", DType::kF32, {4, 6});
  ExpectCells(c, "model.transposed", DType::kF32, {4, 6});
  ExpectCells(c, "model.permuted", DType::kI32, {2, 3, 4});
  ExpectCells(c, "model.window", DType::kF32, {4, 4});
  ExpectCells(c, "model.first_half", DType::kF32, {3, 4});
  ExpectCells(c, "model.second_half", DType::kF32, {12});
  ExpectCells(c, "model.tied", DType::kF32, {5});
  ExpectCells(c, "model.tied_too", DType::kF32, {5});
  ExpectCells(c, "model.parameter", DType::kF32, {3, 3});
  ExpectCells(c, "model.bf16", DType::kBF16, {5, 3});
  ExpectCells(c, "model.f16", DType::kF16, {6});
  ExpectCells(c, "model.f64", DType::kF64, {6});
  ExpectCells(c, "model.f8", DType::kF8E4M3, {4, 4});
  ExpectCells(c, "model.i64", DType::kI64, {7});
  ExpectCells(c, "model.u16", DType::kU16, {7});
  ExpectCells(c, "model.u8", DType::kU8, {7});
  ExpectCells(c, "model.bool", DType::kBool, {7});
  ExpectCells(c, "model.c64", DType::kC64, {3});
  ExpectCells(c, "model.scalar", DType::kF32, {});
  ExpectCells(c, "model.empty", DType::kF32, {0, 3});
  std::string threes;
  for (int i = 0; i < 4; ++i) threes += CellBytes(DType::kF32, 0);
  EXPECT_THAT(ReadTensor(c, "model.expanded"), IsOkAndHolds(threes));
  ExpectCells(c, "optimizer.state.0.step", DType::kF32, {});
  ExpectCells(c, "optimizer.state.0.exp_avg", DType::kF32, {4, 6});
  ExpectCells(c, "optimizer.state.1.exp_avg", DType::kF32, {2});
  ExpectCells(c, "list.0", DType::kI64, {2});
  ExpectCells(c, "list.1.x", DType::kI64, {3});
  // {"a": {"b": ...}, "a.b": ...}: the first has the name, the second is spelled out.
  ExpectCells(c, "a.b", DType::kF32, {2});
  ExpectCells(c, "[\"a.b\"]", DType::kF32, {3});
  EXPECT_EQ(KeysOf(c).size(), 28u);
  const std::string warnings = WarningsOf(c);
  EXPECT_EQ(c->warnings().size(), 2u) << warnings;
  EXPECT_THAT(warnings, HasSubstr("tensor model.sparse: left out: "));
  EXPECT_THAT(warnings, HasSubstr(" is left out: its key is neither text nor a number"));
}

TEST(TorchSaveTest, NonTensorValuesBecomeCommonValues) {
  const auto adopted = Adopt(TorchSaveFormat(), Golden("nested.pt"));
  ASSERT_OK(adopted);
  const CommonValues common = AdoptedCommon(adopted.value());
  std::vector<std::string> names;
  for (const auto& [name, value] : common) names.push_back(name);
  EXPECT_THAT(names,
              ElementsAre("[\"a.c\"]", "a.c", "args", "epoch", "list.2", "optimizer.param_groups",
                          "optimizer.state.1.step", "torch.planner_data"));
  // Of what is more than a key of the root: a position in a list is a number, a key that is one a
  // list of it.
  const auto path = [&](const std::string& name) {
    const auto* paths = common.at("torch.planner_data").get_if<CommonDict>();
    const CommonValue* found = paths->Find(name);
    return found != nullptr ? *found : CommonValue();
  };
  EXPECT_EQ(path("list.1.x"), CommonValue(CommonTuple{{"list", 1, "x"}}));
  EXPECT_EQ(path("optimizer.state.1.step"),
            CommonValue(CommonTuple{{"optimizer", "state", CommonList{{1}}, "step"}}));
  EXPECT_EQ(path("a.b"), CommonValue(CommonTuple{{"a", "b"}}));
  EXPECT_EQ(path("[\"a.b\"]"), CommonValue(CommonTuple{{"a.b"}}));
  EXPECT_EQ(path("epoch"), CommonValue());
  EXPECT_EQ(common.at("a.c"), CommonValue(1));
  EXPECT_EQ(common.at("[\"a.c\"]"), CommonValue(2));
  EXPECT_EQ(common.at("epoch"), CommonValue(3));
  EXPECT_EQ(common.at("list.2"), CommonValue(5));
  EXPECT_EQ(common.at("optimizer.state.1.step"), CommonValue(7));
  EXPECT_EQ(common.at("optimizer.param_groups").At("[0].lr").value(), CommonValue(0.125));
  EXPECT_EQ(common.at("optimizer.param_groups").At("[0].betas(1)").value(), CommonValue(0.95));
  EXPECT_EQ(common.at("args").At("seed").value(), CommonValue(1));
  EXPECT_EQ(common.at("args").At("path").value(), CommonValue("/data/x"));
}

TEST(TorchSaveTest, ReadsRootsThatAreNotADict) {
  const auto alone = Adopt(TorchSaveFormat(), Golden("alone.weights.pth"));
  ASSERT_OK(alone);
  EXPECT_THAT(KeysOf(alone.value()), ElementsAre("alone.weights"));
  ExpectCells(alone.value(), "alone.weights", DType::kF32, {3, 2});
  const auto number = Adopt(TorchSaveFormat(), Golden("number.pt"));
  ASSERT_OK(number);
  EXPECT_EQ(AdoptedCommon(number.value()).at("number"), CommonValue(17));
  const auto plain = Adopt(TorchSaveFormat(), Golden("plain.bin"));
  ASSERT_OK(plain);
  EXPECT_THAT(KeysOf(plain.value()), IsEmpty());
  const CommonValues common = AdoptedCommon(plain.value());
  EXPECT_EQ(common.size(), 3u);
  EXPECT_EQ(common.at("epoch"), CommonValue(4));
  EXPECT_EQ(common.at("5"), CommonValue());
}

TEST(TorchSaveTest, ErrorNamesTheUnsupportedContent) {
  const auto old = Adopt(TorchSaveFormat(), Golden("old.pt"));
  EXPECT_THAT(old, HasCode(Code::kUnsupported));
  EXPECT_THAT(old, HasMessage("in the legacy format of torch.save (before PyTorch 1.6"));
  const auto script = Adopt(TorchSaveFormat(), Golden("script.pt"));
  EXPECT_THAT(script, HasCode(Code::kUnsupported));
  EXPECT_THAT(script, HasMessage("a TorchScript program"));
  const auto refused = Adopt(TorchSaveFormat(), Golden("refused.pt"));
  EXPECT_THAT(refused, HasCode(Code::kUnsupported));
  EXPECT_THAT(refused, HasMessage("functools.partial"));
}

TEST(TorchSaveTest, ReadsHuggingFacePytorchModelBin) {
  const auto adopted = Adopt(TorchSaveFormat(), Golden("hf"));
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("embed.w", "head.w", "layers.0.w"));
  ExpectCells(adopted.value(), "embed.w", DType::kBF16, {4, 2});
  ExpectCells(adopted.value(), "head.w", DType::kBF16, {4, 2});
  ExpectCells(adopted.value(), "layers.0.w", DType::kBF16, {4, 3});
  const std::string warnings = WarningsOf(adopted.value());
  EXPECT_THAT(warnings,
              HasSubstr("pytorch_model-00003-of-00002.bin: the file is missing: tensor gone.w "
                        "is left out"));
  EXPECT_THAT(warnings,
              HasSubstr("pytorch_model-00002-of-00002.bin: the file does not contain all tensors "
                        "that the index lists for it: tensor lost.w is left out"));
}

TEST(TorchSaveTest, ReadsMegatronRankDirectories) {
  const auto adopted = Adopt(TorchSaveFormat(), Golden("ranks"));
  ASSERT_OK(adopted);
  EXPECT_THAT(adopted.value()->warnings(), IsEmpty());
  EXPECT_THAT(KeysOf(adopted.value()),
              ElementsAre("mp_rank_00/distrib_optim/0.param", "mp_rank_00/model.language_model.w",
                          "mp_rank_01/distrib_optim/0.param", "mp_rank_01/model.language_model.w"));
  ExpectCells(adopted.value(), "mp_rank_00/model.language_model.w", DType::kF32, {3, 1});
  ExpectCells(adopted.value(), "mp_rank_01/model.language_model.w", DType::kF32, {3, 2});
  ExpectCells(adopted.value(), "mp_rank_01/distrib_optim/0.param", DType::kF32, {6});
  const CommonValues common = AdoptedCommon(adopted.value());
  EXPECT_EQ(common.at("mp_rank_01/iteration"), CommonValue(10));
  EXPECT_EQ(common.at("mp_rank_00/args").At("tensor_model_parallel_size").value(), CommonValue(2));
}

TEST(TorchSaveTest, IndexCannotLeaveTheCheckpoint) {
  const TempDir dir;
  const auto adopt = [&](const std::string& json) {
    PutFile(dir.Join("c/pytorch_model.bin.index.json"), json);
    return Adopt(TorchSaveFormat(), dir.Join("c"));
  };
  EXPECT_THAT(adopt(R"({"weight_map":{"w":"../../x.bin"}})"), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(adopt(R"({"weight_map":{"w":"/etc/passwd"}})"), HasCode(Code::kDataLoss));
  EXPECT_THAT(adopt(R"({"weight_map":{"w":7}})"),
              HasMessage("weight_map: the file name of 'w' is not a string"));
  EXPECT_THAT(adopt(R"({"weight_map":{"w":"a","w":"b"}})"), HasMessage("'w' occurs twice"));
  EXPECT_THAT(adopt(R"({"weight_map":[]})"), HasMessage("weight_map is not an object"));
  EXPECT_THAT(adopt("{}"), HasMessage("no weight_map"));
}

// A zip around a pickle that was written by hand.
std::string Archive(const std::string& pickle) {
  ZipBuilder zip;
  zip.Add("x/data.pkl", pickle);
  zip.Add("x/byteorder", "little");
  zip.Add("x/version", "3\n");
  return zip.Finish();
}

// A value of a class that nobody here knows takes itself away and nothing else.
TEST(TorchSaveTest, AnUnknownClassHidesOnlyItsValue) {
  const TempDir dir;
  const auto text = [](const std::string& t) {
    return "X" + std::string(1, static_cast<char>(t.size())) + std::string(3, '\0') + t;
  };
  const std::string tensor = "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") +
                             "ctorch\nFloatStorage\n" + text("0") + text("cpu") +
                             std::string("K\1tQK\0))\x89NtR", 12);
  const auto open = [&](const std::string& items) {
    ZipBuilder zip;
    zip.Add("x/data.pkl", "\x80\x02}(" + items + "u.");
    zip.Add("x/byteorder", "little");
    zip.Add("x/data/0", std::string("\0\0\x80?", 4));
    zip.Add("x/version", "3\n");
    PutFile(dir.Join("a.pt"), zip.Finish());
    return Adopt(TorchSaveFormat(), dir.Join("a.pt"));
  };
  const std::string config = "cacme.config\nConfig\n)\x81}" + text("lr") + "K\1sb";
  const auto adopted = open(text("w") + tensor + text("args") + "}" + text("cfg") + config + "s" +
                            text("step") + "K\7");
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("w"));
  EXPECT_EQ(AdoptedCommon(adopted.value()).at("step"), CommonValue(7));
  ASSERT_EQ(adopted.value()->lost().size(), 1u);
  const ForeignLoss& loss = adopted.value()->lost()[0];
  EXPECT_THAT(loss.objects, ElementsAre("args.cfg"));
  EXPECT_THAT(loss.reason, HasSubstr("acme.config.Config"));
  EXPECT_THAT(loss.reason, HasSubstr("state_dict()"));
  EXPECT_THAT(CheckNoLoss(adopted.value()->lost()), HasCode(Code::kDataLoss));
  // Where there is nothing else there is nothing.
  EXPECT_THAT(open(text("cfg") + config),
              HasMessage("contains a Python object (acme.config.Config) that is not loaded"));
  // A whole module of torch.
  EXPECT_OK(open(text("w") + tensor + text("m") + "ctorch.nn.modules.linear\nLinear\n)\x81"));
  // Functions that could change what was made before: Python's own, and any that is given a value
  // that is shown elsewhere, or its storage.
  for (const std::string& value :
       {std::string("coperator\nsetitem\n)R"), std::string("cposix\nsystem\n)R"),
        std::string("ctorch._C\nzero_\n)R"), std::string("cacme\nf\nh\1\x85R"),
        "cacme\nf\n" + tensor + "\x85R"}) {
    const auto refused =
        open(text("d") + "}q" + std::string(1, '\1') + text("w") + tensor + text("x") + value);
    EXPECT_THAT(refused, HasCode(Code::kUnsupported)) << value;
    EXPECT_THAT(refused, HasMessage("that is not loaded for safety")) << value;
  }
}

// Tuples that hold the one before twice: 2^60 paths, or circles, out of some hundred bytes.
TEST(TorchSaveTest, SharedAndCyclicValuesAreBounded) {
  const TempDir dir;
  std::string doubled = "\x80\x02]q";
  doubled += '\0';
  for (char i = 0; i < 60; ++i) {
    doubled += 'h';
    doubled += i;
    doubled += "\x86q";
    doubled += static_cast<char>(i + 1);
  }
  doubled += '.';
  PutFile(dir.Join("doubled.pt"), Archive(doubled));
  const auto bomb = Adopt(TorchSaveFormat(), dir.Join("doubled.pt"));
  EXPECT_THAT(bomb, HasCode(Code::kDataLoss));
  EXPECT_THAT(bomb, HasMessage("refer to each other in an endless loop"));
  // {"self": itself}
  std::string circle = "\x80\x02}q";
  circle += '\0';
  circle += std::string("X\4\0\0\0self", 9) + "h";
  circle += '\0';
  circle += "s.";
  PutFile(dir.Join("circle.pt"), Archive(circle));
  const auto adopted = Adopt(TorchSaveFormat(), dir.Join("circle.pt"));
  ASSERT_OK(adopted);
  EXPECT_THAT(WarningsOf(adopted.value()), HasSubstr("common value self: left out"));
}

// Text that a stream says once, of `bytes` letters, kept in memo slot `slot`.
std::string Kept(std::size_t bytes, char slot) {
  std::string out = "X";
  for (int i = 0; i < 4; ++i) out += static_cast<char>(bytes >> (8 * i));
  return out + std::string(bytes, 'k') + "q" + slot;
}

// Text is said once and meant everywhere: what comes of it is bounded, not what was said.
TEST(TorchSaveTest, RepeatedLongTextsAndKeysAreBounded) {
  const TempDir dir;
  // 4000 keys, one value of 1 MiB.
  std::string shared = std::string("\x80\x02}(", 4);
  for (int i = 0; i < 4000; ++i) {
    const std::string key = std::to_string(i);
    shared += "X" + std::string(1, static_cast<char>(key.size())) + std::string(3, '\0') + key;
    shared += i == 0 ? Kept(1 << 20, 1) : std::string("h\1");
  }
  PutFile(dir.Join("shared.pt"), Archive(shared + "u."));
  const auto adopted = Adopt(TorchSaveFormat(), dir.Join("shared.pt"));
  ASSERT_OK(adopted);
  EXPECT_LT(AdoptedCommon(adopted.value()).size(), 1000u);
  EXPECT_THAT(WarningsOf(adopted.value()),
              HasSubstr("left out: it is not plain data, or too large"));
  // Dicts 100 deep below one long key each time.
  std::string deep = std::string("\x80\x02N0", 4) + Kept(1 << 20, 1) + "0";
  for (int i = 0; i < 100; ++i) deep += "}h\1";
  deep += "N" + std::string(100, 's') + ".";
  PutFile(dir.Join("deep.pt"), Archive(deep));
  const auto long_names = Adopt(TorchSaveFormat(), dir.Join("deep.pt"));
  ASSERT_OK(long_names);
  EXPECT_TRUE(AdoptedCommon(long_names.value()).empty());
  EXPECT_LT(WarningsOf(long_names.value()).size(), 10000u);
  // Keys of 1000 letters: two of them go, three do not.
  const auto text = [](const std::string& t) {
    return "X" + std::string(1, static_cast<char>(t.size())) + std::string(3, '\0') + t;
  };
  const std::string tensor = "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") +
                             "ctorch\nFloatStorage\n" + text("0") + text("cpu") +
                             std::string("K\1tQK\0))\x89NtR", 12);
  const std::string three = std::string("\x80\x02N0", 4) + Kept(1000, 1) + "0}(h\1}(h\1}h\1" +
                            tensor + "s" + text("v") + "K\7uu.";
  PutFile(dir.Join("three.pt"), Archive(three));
  const auto kept = Adopt(TorchSaveFormat(), dir.Join("three.pt"));
  ASSERT_OK(kept);
  const CommonValues common = AdoptedCommon(kept.value());
  ASSERT_EQ(common.size(), 2u) << WarningsOf(kept.value());
  EXPECT_TRUE(common.contains("torch.planner_data"));
  EXPECT_EQ(common.begin()->first.size(), 1002u);
  EXPECT_THAT(WarningsOf(kept.value()), HasSubstr("its name would be too long"));
  // One key 20000 times.
  std::string again = std::string("\x80\x02N0", 4) + Kept(1, 1) + "0}(";
  for (int i = 0; i < 20000; ++i) again += "h\1N";
  PutFile(dir.Join("again.pt"), Archive(again + "u."));
  const auto once = Adopt(TorchSaveFormat(), dir.Join("again.pt"));
  ASSERT_OK(once);
  EXPECT_LT(AdoptedCommon(once.value()).size(), 16u);
}

// Whom the whole table of formats gives a source to.
TEST(FormatsTest, EachFormatRecognizesOnlyItsOwnFiles) {
  const std::pair<const char*, const char*> kinds[] = {
      {"torch-save-2.13/nested.pt", "torch.save"},
      {"torch-save-2.13/alone.weights.pth", "torch.save"},
      {"torch-save-2.13/plain.bin", "torch.save"},
      {"torch-save-2.13/hf", "torch.save"},
      {"torch-save-2.13/ranks", "megatron-lm"},
      {"numpy-2.4/folder", "numpy"},
      {"numpy-2.4/folder/w.npy", "numpy"},
      {"numpy-2.4/stored.npz", "numpy"},
      {"zarr-2.18/plain", "zarr"},
      {"zarr-2.18/plain/layer/nested", "zarr"},
      {"zarr-2.18/megatron", "megatron.core.dist_checkpointing"},
  };
  for (const auto& [name, producer] : kinds) {
    const auto folder = ForeignFolder::Open(
        HostFileSystem(), SourcePath(std::string("tests/golden/foreign/") + name), {});
    ASSERT_OK(folder);
    const auto found = ReadForeign(folder.value());
    ASSERT_OK(found);
    EXPECT_EQ(found.value().inventory.info.producer, producer) << name;
  }
}

TEST(TorchNamesTest, DifferentPathsGetDifferentNames) {
  using Part = TorchNames::Part;
  TorchNames names;
  EXPECT_EQ(names.Of("", {Part{"a"}, Part{"b"}}), "a.b");
  EXPECT_EQ(names.Of("", {Part{"a.b"}}), "[\"a.b\"]");
  EXPECT_EQ(names.Of("", {Part{"[\"a.b\"]"}}), "[\"[\\\"a.b\\\"]\"]");
  EXPECT_EQ(names.Of("", {Part{"x"}, Part{"0", true}}), "x.0");
  EXPECT_EQ(names.Of("", {Part{"x"}, Part{"0"}}), "[\"x\"][\"0\"]");
  EXPECT_EQ(names.Of("", {Part{""}}), "[\"\"]");
  EXPECT_EQ(names.Of("r/", {Part{""}}), "r/[\"\"]");
  EXPECT_EQ(names.Of("r/", {Part{"a"}, Part{"b"}}), "r/a.b");
  // Whoever has a key like that gets it all the same, somehow.
  TorchNames odd;
  EXPECT_EQ(odd.Of("", {Part{"[\"a.b\"]"}}), "[\"a.b\"]");
  EXPECT_EQ(odd.Of("", {Part{"a"}, Part{"b"}}), "a.b");
  EXPECT_EQ(odd.Of("", {Part{"a.b"}}), "[\"a.b\"]'");
}

}  // namespace
}  // namespace tensormount
