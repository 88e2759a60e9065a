// SPDX-License-Identifier: Apache-2.0
// What Python would make of a file of torch.save is what is shown, or nothing is.
#include <functional>
#include <string>

#include "tests/adopt/adopted.h"
#include "tests/adopt/bytes.h"
#include "tests/adopt/zip_builder.h"

namespace tensormount {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

std::string Number(std::int64_t v) { return Bytes(0x8a, 8, Little(v)); }

std::string StorageId(std::string_view type, std::string_view key, std::int64_t count) {
  return Bytes('(', Str("storage"), Glob("torch", type), Str(key), Str("cpu"), Number(count), "tQ");
}

std::string MadeOf(std::string_view storage, std::int64_t count, std::string_view more = "") {
  return Bytes(Glob("torch._utils", "_rebuild_tensor_v2"), '(', storage, "K", 0, Number(count),
               0x85, Number(1), 0x85, 0x89, Glob("collections", "OrderedDict"), ")R", more, "tR");
}

// Storage a holds "AAAA", b "BBBB", as bytes.
std::string TensorA(std::string_view more = "") {
  return MadeOf(StorageId("ByteStorage", "a", 4), 4, more);
}
std::string TensorB() { return MadeOf(StorageId("ByteStorage", "b", 4), 4); }

ZipBuilder ZipOf(const std::string& operations) {
  ZipBuilder zip;
  zip.Add("x/data.pkl", Pickle(operations, 2));
  zip.Add("x/byteorder", "little");
  zip.Add("x/data/a", "AAAA");
  zip.Add("x/data/b", "BBBB");
  zip.Add("x/version", "3\n");
  return zip;
}

class TorchPythonTest : public testing::Test {
 protected:
  Result<Adopted> Open(const std::string& operations) {
    return OpenBytes(ZipOf(operations).Finish());
  }
  Result<Adopted> OpenBytes(const std::string& bytes) {
    const std::string path = dir_.Join("c" + std::to_string(++files_) + ".pt");
    PutFile(path, bytes);
    return Adopt(TorchSaveFormat(), path);
  }
  // "key=bytes" of every tensor, then warnings.
  std::string Shown(const std::string& operations) {
    const Result<Adopted> opened = Open(operations);
    if (!opened.ok()) return std::string(CodeName(opened.status().code()));
    std::string out;
    for (const std::string& key : KeysOf(opened.value())) {
      const Result<std::string> bytes = ReadTensor(opened.value(), key);
      out += key + "=" + (bytes.ok() ? bytes.value() : bytes.status().message()) + "\n";
    }
    return out + WarningsOf(opened.value());
  }

  TempDir dir_;
  int files_ = 0;
};

TEST_F(TorchPythonTest, LastValueOfADuplicateKeyIsShown) {
  const std::string a = TensorA();
  const std::string b = TensorB();
  EXPECT_EQ(Shown(Bytes("}(", Str("w"), a, Str("w"), b, 'u')), "w=BBBB\n");
  EXPECT_EQ(Shown(Bytes('}', Str("w"), a, 's', Str("w"), b, 's')), "w=BBBB\n");
  EXPECT_EQ(Shown(Bytes("}(K", 1, a, 0x88, b, 'u')), "1=BBBB\n");
  EXPECT_EQ(Shown(Bytes("}(K", 1, a, 'G', std::string("\x3f\xf0\0\0\0\0\0\0", 8), b, 'u')),
            "1=BBBB\n");
  EXPECT_EQ(Shown(Bytes(Glob("collections", "OrderedDict"), ")R(", Str("w"), a, Str("w"), b, 'u')),
            "w=BBBB\n");
  EXPECT_EQ(Shown(Bytes("}(", Str("m"), "}(", Str("w"), a, Str("w"), b, "uu")), "m.w=BBBB\n");
  std::string many = Bytes("}(", Str("w"), a);
  for (int i = 0; i < 50; ++i) many += Bytes(Str("n" + std::to_string(i)), 'K', i);
  EXPECT_EQ(Shown(many + Bytes(Str("w"), b, 'u')), "w=BBBB\n");
}

// {True: a, 1: b} has the key True, of which no name is made.
TEST_F(TorchPythonTest, EqualKeysOfTwoTypesKeepTheFirstKey) {
  EXPECT_THAT(Shown(Bytes("}(", 0x88, TensorA(), 'K', 1, TensorB(), 'u')),
              HasSubstr("item 1 of the file is left out"));
}

TEST_F(TorchPythonTest, TensorsModifiedAfterRebuildAreLeftOut) {
  const auto w = [](const std::string& tensor) { return Bytes("}(", Str("w"), tensor, 'u'); };
  const std::string set =
      Bytes('(', StorageId("ByteStorage", "b", 4), 'K', 0, Number(4), 0x85, Number(1), 0x85, "tb");
  EXPECT_THAT(Shown(w(TensorA() + set)),
              HasSubstr("tensor w: left out: tensor: the pickle sets the state"));
  EXPECT_THAT(Shown(w(TensorA() + "Nb")), HasSubstr("tensor w: left out"));
  EXPECT_THAT(Shown(w(Bytes(TensorA(), 'K', 0, 'K', 7, 's'))),
              HasSubstr("the pickle adds items to the tensor"));
}

TEST_F(TorchPythonTest, AttributesThatChangeTheTensorAreLeftOut) {
  const auto typed = [](const std::string& state) {
    return Bytes("}(", Str("w"), Glob("torch._tensor", "_rebuild_from_type_v2"), '(',
                 Glob("torch._utils", "_rebuild_tensor_v2"), Glob("torch", "Tensor"), '(',
                 StorageId("ByteStorage", "a", 4), 'K', 0, Number(4), 0x85, Number(1), 0x85, 0x89,
                 Glob("collections", "OrderedDict"), ")Rt", state, "tRu");
  };
  const auto parameter = [](const std::string& state) {
    return Bytes("}(", Str("w"), Glob("torch._utils", "_rebuild_parameter_with_state"), '(',
                 TensorA(), 0x89, Glob("collections", "OrderedDict"), ")R", state, "tRu");
  };
  const std::string plain = Bytes("}(", Str("partition_dim"), 'K', 0, 'u');
  const std::string data = Bytes("}(", Str("data"), TensorB(), 'u');
  for (const auto& made : {std::function<std::string(const std::string&)>(typed),
                           std::function<std::string(const std::string&)>(parameter)}) {
    EXPECT_EQ(Shown(made("N")), "w=AAAA\n");
    EXPECT_EQ(Shown(made(plain)), "w=AAAA\n");
    EXPECT_EQ(Shown(made(Bytes(plain, 'N', 0x86))), "w=AAAA\n");
    EXPECT_THAT(Shown(made(data)), HasSubstr("tensor w: left out"));
    EXPECT_THAT(Shown(made(Bytes('N', data, 0x86))), HasSubstr("tensor w: left out"));
  }
}

TEST_F(TorchPythonTest, LazyConjugateAndNegativeViewsAreLeftOut) {
  const auto w = [](const std::string& metadata) {
    return Bytes("}(", Str("w"), TensorA(metadata), 'u');
  };
  EXPECT_EQ(Shown(w("}")), "w=AAAA\n");
  EXPECT_EQ(Shown(w("N")), "w=AAAA\n");
  const std::string ordered = Bytes(Glob("collections", "OrderedDict"), ")R");
  for (const std::string& value : {Bytes(0x88), Bytes(0x89), Bytes('K', 1), std::string("N")}) {
    for (const std::string& dict : {std::string("}"), ordered}) {
      EXPECT_THAT(Shown(w(Bytes(dict, Str("neg"), value, 's'))), HasSubstr("a lazy view"));
    }
  }
}

TEST_F(TorchPythonTest, ConflictingStorageTypeOrSizeIsLeftOut) {
  const auto two = [](const std::string& one, const std::string& other) {
    return Bytes("}(", Str("v"), one, Str("w"), other, 'u');
  };
  const std::string bytes = MadeOf(StorageId("ByteStorage", "a", 4), 4);
  for (const std::string& other :
       {MadeOf(StorageId("HalfStorage", "a", 2), 2), MadeOf(StorageId("CharStorage", "a", 4), 4),
        MadeOf(StorageId("ByteStorage", "a", 3), 3)}) {
    EXPECT_THAT(Shown(two(bytes, other)), HasSubstr("tensor v: left out: the storage 'data/a'"));
    EXPECT_THAT(Shown(two(other, bytes)), HasSubstr("tensor w: left out: the storage 'data/a'"));
  }
  // Also where nothing refers to the first one.
  EXPECT_THAT(Shown(StorageId("HalfStorage", "a", 2) + "0" + two(bytes, TensorB())),
              HasSubstr("tensor v: left out"));
  EXPECT_EQ(Shown(two(bytes, bytes)), "v=AAAA\nw=AAAA\n");
}

TEST_F(TorchPythonTest, DictsAreBuiltFromConstructorArguments) {
  const std::string pairs = Bytes("](", Str("w"), TensorA(), 0x86, "](", Str("v"), TensorB(), "ee");
  const std::string dict = Bytes("}(", Str("w"), TensorA(), Str("v"), TensorB(), 'u');
  const std::string both = "v=BBBB\nw=AAAA\n";
  const std::string ordered = Glob("collections", "OrderedDict");
  EXPECT_EQ(Shown(Bytes(ordered, pairs, 0x85, 'R')), both);
  EXPECT_EQ(Shown(Bytes(ordered, dict, 0x85, 'R')), both);
  EXPECT_EQ(Shown(Bytes(Glob("builtins", "dict"), dict, 0x85, 'R')), both);
  EXPECT_EQ(
      Shown(Bytes(Glob("collections", "defaultdict"), Glob("builtins", "int"), dict, 0x86, 'R')),
      both);
  EXPECT_EQ(Shown(Bytes(ordered, pairs, 0x85, 'R', Str("w"), TensorB(), 's')), "v=BBBB\nw=BBBB\n");
  // What is put into the argument afterwards is not in what was made of it.
  EXPECT_EQ(Shown(Bytes('(', Str("x"), "}q", 1, Str("w"), TensorA(), 's', Str("y"), ordered, "h", 1,
                        0x85, 'R', "h", 1, Str("w"), TensorB(), "s0", "t")),
            "1.w=BBBB\n3.w=AAAA\n");
  // Made without a call, none of it.
  EXPECT_EQ(Shown(Bytes(ordered, pairs, 0x85, 0x81)), "");
  EXPECT_EQ(Shown(Bytes(ordered, Str("ab"), 0x85, 'R')), "UNSUPPORTED");
  // Attributes, which torch gives to what state_dict() returns, are not items.
  EXPECT_EQ(Shown(Bytes(ordered, dict, 0x85, "R}", Str("_metadata"), "}sb")), both);
  EXPECT_EQ(Shown(Bytes(ordered, dict, 0x85, "RN}", Str("x"), "Ns", 0x86, 'b')), "UNSUPPORTED");
  EXPECT_EQ(Shown(Bytes(Glob("builtins", "dict"), dict, 0x85, "R}b")), "UNSUPPORTED");
  const std::string bag = Bytes(Glob("argparse", "Namespace"), ")R");
  EXPECT_EQ(Shown(Bytes(bag, dict, 'b')), both);
  EXPECT_EQ(Shown(Bytes(bag, 'N', dict, 0x86, 'b')), "UNSUPPORTED");
  EXPECT_EQ(Shown(Bytes(bag, Str("w"), TensorA(), 's')), "UNSUPPORTED");
}

TEST_F(TorchPythonTest, WrongArgumentCountIsLeftOut) {
  EXPECT_EQ(Shown(Bytes("}(", Str("w"), TensorA("NN"), 'u')).rfind("tensor w: left out", 0), 0u);
  const std::string grad = [] {
    std::string out = TensorA();
    out[out.rfind(static_cast<char>(0x89))] = static_cast<char>(0x88);
    return out;
  }();
  EXPECT_THAT(Shown(Bytes("}(", Str("w"), grad, 'u')), HasSubstr("requires a gradient"));
}

TEST_F(TorchPythonTest, OverexpandedViewsAreLeftOut) {
  const auto wide = [](std::int64_t times) {
    return Bytes("}(", Str("w"), Glob("torch._utils", "_rebuild_tensor_v2"), '(',
                 StorageId("ByteStorage", "a", 4), 'K', 0, Number(times), 0x85, Number(0), 0x85,
                 0x89, Glob("collections", "OrderedDict"), ")RtRu");
  };
  EXPECT_EQ(Shown(wide(5)), "w=AAAAA\n");
  EXPECT_THAT(Open(wide(1 << 20)), IsOk());
  EXPECT_THAT(WarningsOf(Open(wide(1 << 20)).value()), IsEmpty());
  EXPECT_THAT(
      Shown(wide(std::int64_t{1} << 52)),
      HasSubstr(
          "tensor w: left out: tensor: the tensor is a view that expands its storage of 4 bytes"));
}

// An unknown function may change the tensor that it is given, at any depth that is looked at: 200.
TEST_F(TorchPythonTest, UnknownRebuildFunctionIsRefusedAtEveryDepth) {
  const auto at_depth = [](int depth, const std::string& value) {
    std::string out = Bytes("}(", Str("w"), TensorA(), Str("d"));
    for (int i = 1; i < depth; ++i) out += Bytes('}', Str("d"));
    return out + value + std::string(static_cast<std::size_t>(depth) - 1, 's') + 'u';
  };
  const std::string apart = Bytes(Glob("acme", "f"), ")R");
  const std::string shared = Bytes(Glob("acme", "f"), TensorA(), 0x85, 'R');
  for (const int depth : {1, 2, 100, 199, 200, 201, 202, 500}) {
    SCOPED_TRACE(depth);
    EXPECT_EQ(Shown(at_depth(depth, shared)), "UNSUPPORTED");
    // A global that is not called changes nothing.
    EXPECT_THAT(Shown(at_depth(depth, Glob("acme", "f"))), HasSubstr("w=AAAA\n"));
  }
  EXPECT_THAT(Shown(at_depth(100, apart)), HasSubstr("w=AAAA\n"));
}

TEST_F(TorchPythonTest, EntriesDifferingOnlyInCaseAreRefused) {
  const std::string w = Bytes("}(", Str("w"), TensorA(), 'u');
  for (const char* name :
       {"x/DATA.PKL", "x/data/A", "x/BYTEORDER", "X/data/c", "x/Data/c", "y/z"}) {
    ZipBuilder zip = ZipOf(w);
    zip.Add(name, "little");
    EXPECT_THAT(OpenBytes(zip.Finish()), HasCode(Code::kDataLoss)) << name;
  }
  ZipBuilder zip = ZipOf(w);
  zip.Add("x/other", "little");
  EXPECT_THAT(OpenBytes(zip.Finish()), IsOk());
}

// An archive in the comment of another: readers that take the last signature see that one.
TEST_F(TorchPythonTest, LastZipEndRecordIsUsed) {
  const auto one = [](const std::string& tensor) {
    return ZipOf(Bytes("}(", Str("w"), tensor, 'u')).Finish();
  };
  std::string first = one(TensorA());
  std::string second = one(TensorB());
  const auto with_comment = [&](std::string tail) {
    return first.substr(0, first.size() - 2) + U16(tail.size()) + tail;
  };
  EXPECT_THAT(OpenBytes(with_comment("a comment")), IsOk());
  std::string lies = second;
  lies.replace(lies.size() - 2, 2, U16(5));
  EXPECT_THAT(OpenBytes(with_comment(lies)), HasCode(Code::kDataLoss));
  EXPECT_THAT(OpenBytes(with_comment("PK\5\6 is no record")), HasCode(Code::kDataLoss));
}

}  // namespace
}  // namespace tensormount
