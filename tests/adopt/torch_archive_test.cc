// SPDX-License-Identifier: Apache-2.0
#include "index/archives/torch_archive.h"

#include <functional>
#include <limits>
#include <numeric>

#include "index/archives/torch_tensor.h"
#include "tests/adopt/zip_builder.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string Tuple(const std::vector<std::int64_t>& items) {
  std::string out = "(";
  for (const std::int64_t v : items) out += Bytes(0x8a, 8, Little(v));
  return out + "t";
}

// What torch writes of a tensor, protocol 2.
struct TensorSpec {
  std::string storage_class = "FloatStorage";
  std::string key = "0";
  std::int64_t count = 12;
  std::int64_t first = 0;
  std::vector<std::int64_t> shape = {3, 4};
  std::vector<std::int64_t> strides = {4, 1};
  std::string dtype;     // Not empty: _rebuild_tensor_v3.
  std::string metadata;  // One more argument.

  std::string Operations() const {
    const std::string id =
        Bytes('(', Str("storage"),
              Glob(storage_class.find("Untyped") == 0 ? "torch.storage" : "torch", storage_class),
              Str(key), Str("cpu"), Bytes(0x8a, 8, Little(count)), "tQ");
    return Bytes(Glob("torch._utils", dtype.empty() ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3"),
                 '(', id, Bytes(0x8a, 8, Little(first)), Tuple(shape), Tuple(strides), 0x89,
                 Glob("collections", "OrderedDict"), ")R",
                 dtype.empty() ? "" : Glob("torch", dtype), metadata, "tR");
  }
};

// As torch 2.13 writes it.
ZipBuilder ArchiveOf(const std::string& operations, const std::string& payload) {
  ZipBuilder zip;
  zip.zip64_end = true;
  const auto add = [&zip](const std::string& name, const std::string& data, int padding) {
    ZipBuilder::Entry& entry = zip.Add("archive/" + name, data);
    entry.flags = 0x0800;
    entry.described = !data.empty();
    entry.padding = padding;
  };
  add("data.pkl", Pickle(operations, 2), 0);
  add(".format_version", "1", 20);
  add("byteorder", "little", 20);
  add("data/0", payload, 50);
  add("version", "3\n", 30);
  return zip;
}

class TorchArchiveTest : public testing::Test {
 protected:
  // The archive stands behind 7 other bytes.
  std::unique_ptr<File> Open(const std::string& bytes) {
    const std::string path = dir_.Join("file" + std::to_string(++files_));
    EXPECT_OK(HostFileSystem().WriteFileDurably(path, "before " + bytes));
    return HostFileSystem().OpenRead(path).value();
  }
  Result<StoredTensor> ReadItem(const std::string& bytes) {
    const auto file = Open(bytes);
    return ReadTorchItem(*file, 7, bytes.size());
  }
  Result<StoredTensor> ReadItem(const TensorSpec& spec, std::size_t payload = 48) {
    return ReadItem(ArchiveOf(spec.Operations(), std::string(payload, 'x')).Finish());
  }
  Result<StoredTensor> ReadWhole(const std::string& bytes) {
    const auto file = Open(bytes);
    TENSORMOUNT_ASSIGN_OR_RETURN(const TorchArchive archive,
                                 TorchArchive::Read(*file, 7, bytes.size()));
    return archive.TensorOf(archive.document().root());
  }

  TempDir dir_;
  int files_ = 0;
};

TEST_F(TorchArchiveTest, ReadsPackedTensors) {
  const std::string payload = "0123456789abcdef0123456789abcdef0123456789abcdef";
  const std::string bytes = ArchiveOf(TensorSpec().Operations(), payload).Finish();
  const std::uint64_t place = 7 + bytes.find(payload);
  for (const Result<StoredTensor>& read : {ReadItem(bytes), ReadWhole(bytes)}) {
    ASSERT_OK(read);
    EXPECT_EQ(read.value().dtype, DType::kF32);
    EXPECT_EQ(read.value().shape, Dims({3, 4}));
    EXPECT_EQ(read.value().strides, Dims({16, 4}));
    EXPECT_EQ(read.value().offset, place);
    EXPECT_EQ(read.value().length, 48u);
    EXPECT_TRUE(read.value().packed);
  }
}

// The end with the central directory, the head with its local headers, what follows the payload,
// and the pickle: never the payload.
TEST_F(TorchArchiveTest, ItemsAreLocatedInFewReads) {
  const auto reads_of = [&](std::int64_t rows) {
    TensorSpec spec;
    spec.count = rows * 100;
    spec.shape = {rows, 100};
    spec.strides = {100, 1};
    const std::string payload(static_cast<std::size_t>(rows) * 400, 'x');
    const std::string bytes = ArchiveOf(spec.Operations(), payload).Finish();
    const std::string path = dir_.Join("item" + std::to_string(rows));
    EXPECT_OK(HostFileSystem().WriteFileDurably(path, bytes));
    std::vector<std::uint64_t> reads;
    ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
      if (event.op == FileOp::kRead) reads.push_back(event.size);
      return Status();
    });
    const auto file = fs.OpenRead(path).value();
    EXPECT_OK(ReadTorchItem(*file, 0, bytes.size()));
    return reads;
  };
  EXPECT_LE(reads_of(4).size(), 3u);
  const std::vector<std::uint64_t> large = reads_of(2500);
  EXPECT_LE(large.size(), 6u);
  EXPECT_LE(std::accumulate(large.begin(), large.end(), std::uint64_t{0}), 16384u);
}

// torch itself reads by the central directory.
TEST_F(TorchArchiveTest, WrongCentralDirectoryIsDataLoss) {
  const std::string good = ArchiveOf(TensorSpec().Operations(), std::string(48, 'x')).Finish();
  ASSERT_OK(ReadItem(good));
  const std::size_t central = good.rfind("data/0");
  const std::size_t header = good.rfind("PK\1\2", central);
  ASSERT_NE(header, std::string::npos);
  for (const std::size_t field : {16u, 24u, 42u, 46u}) {  // CRC, size, place, name.
    std::string bad = good;
    bad[header + field] = static_cast<char>(bad[header + field] ^ 1);
    EXPECT_THAT(ReadItem(bad), HasCode(Code::kDataLoss)) << field;
  }
}

TEST_F(TorchArchiveTest, ReadsTransposedAndScalarViews) {
  TensorSpec transposed;
  transposed.shape = {4, 3};
  transposed.strides = {1, 4};
  ASSERT_OK_AND_ASSIGN(const StoredTensor t, ReadItem(transposed));
  EXPECT_EQ(t.strides, Dims({4, 16}));
  EXPECT_FALSE(t.packed);
  EXPECT_EQ(t.length, 48u);
  TensorSpec window;  // [1:3, 1:3] of 3 x 4.
  window.first = 5;
  window.shape = {2, 2};
  ASSERT_OK_AND_ASSIGN(const StoredTensor w, ReadItem(window));
  EXPECT_EQ(w.offset, t.offset + 20);
  EXPECT_EQ(w.length, 24u);
  EXPECT_FALSE(w.packed);
  TensorSpec expanded;
  expanded.shape = {1000, 3};
  expanded.strides = {0, 1};
  ASSERT_OK_AND_ASSIGN(const StoredTensor e, ReadItem(expanded));
  EXPECT_EQ(e.strides, Dims({0, 4}));
  EXPECT_EQ(e.length, 12u);
  // The stride of an axis of one says nothing, however large.
  TensorSpec one;
  one.shape = {1, 12};
  one.strides = {std::int64_t{1} << 62, 1};
  ASSERT_OK_AND_ASSIGN(const StoredTensor o, ReadItem(one));
  EXPECT_TRUE(o.packed);
  TensorSpec empty;
  empty.count = 0;
  empty.shape = {0, 4};
  ASSERT_OK_AND_ASSIGN(const StoredTensor n, ReadItem(empty, 0));
  EXPECT_EQ(n.length, 0u);
  EXPECT_TRUE(n.packed);
  TensorSpec scalar;
  scalar.count = 1;
  scalar.shape = scalar.strides = {};
  ASSERT_OK_AND_ASSIGN(const StoredTensor s, ReadItem(scalar, 4));
  EXPECT_EQ(s.shape, Dims());
  EXPECT_EQ(s.length, 4u);
}

TEST_F(TorchArchiveTest, ReadsEveryElementType) {
  const struct {
    std::string storage;
    std::string dtype;
    DType wanted;
    std::int64_t bytes;
  } cases[] = {{"DoubleStorage", "", DType::kF64, 8},
               {"HalfStorage", "", DType::kF16, 2},
               {"BFloat16Storage", "", DType::kBF16, 2},
               {"LongStorage", "", DType::kI64, 8},
               {"IntStorage", "", DType::kI32, 4},
               {"ShortStorage", "", DType::kI16, 2},
               {"CharStorage", "", DType::kI8, 1},
               {"ByteStorage", "", DType::kU8, 1},
               {"BoolStorage", "", DType::kBool, 1},
               {"ComplexFloatStorage", "", DType::kC64, 8},
               {"ComplexDoubleStorage", "", DType::kC128, 16},
               {"UntypedStorage", "float8_e4m3fn", DType::kF8E4M3, 1},
               {"UntypedStorage", "float8_e8m0fnu", DType::kF8E8M0, 1},
               {"UntypedStorage", "uint16", DType::kU16, 2},
               {"UntypedStorage", "uint64", DType::kU64, 8}};
  for (const auto& c : cases) {
    TensorSpec spec;
    spec.storage_class = c.storage;
    spec.dtype = c.dtype;
    spec.count = c.dtype.empty() ? 12 : 12 * c.bytes;
    ASSERT_OK_AND_ASSIGN(const StoredTensor read,
                         ReadItem(spec, static_cast<std::size_t>(12 * c.bytes)));
    EXPECT_EQ(read.dtype, c.wanted);
    EXPECT_EQ(read.length, static_cast<std::uint64_t>(12 * c.bytes));
    EXPECT_EQ(read.strides, Dims({4 * c.bytes, c.bytes}));
  }
  // Two elements to torch's one.
  TensorSpec pairs;
  pairs.storage_class = "UntypedStorage";
  pairs.dtype = "float4_e2m1fn_x2";
  ASSERT_OK_AND_ASSIGN(const StoredTensor f4, ReadItem(pairs, 12));
  EXPECT_EQ(f4.dtype, DType::kF4);
  EXPECT_EQ(f4.shape, Dims({3, 8}));
  EXPECT_EQ(f4.length, 12u);
  EXPECT_TRUE(f4.packed);
  EXPECT_EQ(f4.strides, Dims());
  pairs.strides = {1, 3};
  EXPECT_THAT(ReadItem(pairs, 12), HasCode(Code::kUnsupported));
  pairs.dtype = "bits8";
  EXPECT_THAT(ReadItem(pairs, 12), AllOf(HasCode(Code::kUnsupported), HasMessage("torch.bits8")));
}

TEST_F(TorchArchiveTest, RefusesViewsOutsideTheirStorage) {
  const std::int64_t large = std::int64_t{1} << 62;
  const std::pair<std::function<void(TensorSpec&)>, std::string> cases[] = {
      {[](TensorSpec& s) { s.first = 1; }, "past the end of the storage of 48 bytes"},
      {[](TensorSpec& s) {
         s.strides = {5, 1};
       },
       "past the end of the storage"},
      {[](TensorSpec& s) {
         s.shape = {4, 4};
       },
       "past the end of the storage"},
      {[=](TensorSpec& s) { s.first = large; }, "past the end of the storage"},
      {[=](TensorSpec& s) {
         s.strides = {large, 1};
       },
       "strides overflow"},
      {[=](TensorSpec& s) {
         s.strides = {large / 4, 1};
       },
       "past the end of the storage"},
      {[=](TensorSpec& s) {
         s.shape = {large, 4};
       },
       "overflows"},
      {[=](TensorSpec& s) {
         s.shape = {large, large};
         s.strides = {0, 0};
       },
       "overflows"},
      {[=](TensorSpec& s) { s.count = large; }, "the size of the storage overflows"},
      {[](TensorSpec& s) { s.count = -1; }, "not a valid storage reference"},
      {[](TensorSpec& s) {
         s.shape = {-3, -4};
       },
       "has an element that is not a non-negative integer"},
      {[](TensorSpec& s) {
         s.strides = {-4, 1};
       },
       "has an element that is not a non-negative integer"},
      {[](TensorSpec& s) { s.first = -1; }, "offset is not a non-negative integer"},
      {[](TensorSpec& s) { s.strides = {1}; }, "2 axes, but its stride has 1"},
      {[](TensorSpec& s) { s.count = 13; }, "has 48 bytes instead of 52"},
      {[](TensorSpec& s) { s.key = "1"; }, "'data/1' is missing"},
      {[](TensorSpec& s) { s.key = "../0"; }, "'data/../0' is missing"},
      {[](TensorSpec& s) { s.storage_class = "UntypedStorage"; }, "the tensor has no dtype"},
      {[](TensorSpec& s) { s.dtype = "float32"; }, "the storage is typed, but an untyped"}};
  int i = 0;
  for (const auto& [spoil, message] : cases) {
    TensorSpec spec;
    spoil(spec);
    EXPECT_THAT(ReadItem(spec), AllOf(HasCode(Code::kDataLoss), HasMessage(message))) << i++;
  }
  TensorSpec deep;
  deep.shape = deep.strides = std::vector<std::int64_t>(17, 1);
  EXPECT_THAT(ReadItem(deep), AllOf(HasCode(Code::kUnsupported), HasMessage("17 axes")));
}

TEST_F(TorchArchiveTest, ReadsParametersAndOtherTensorWrappers) {
  const std::string tensor = TensorSpec().Operations();
  const std::string payload(48, 'x');
  const std::string hooks = Glob("collections", "OrderedDict") + ")R";
  const std::string parameter =
      Bytes(Glob("torch._utils", "_rebuild_parameter"), tensor, Bytes(0x88), hooks, 0x87, 'R');
  ASSERT_OK_AND_ASSIGN(const StoredTensor p, ReadItem(ArchiveOf(parameter, payload).Finish()));
  EXPECT_EQ(p.length, 48u);
  // _rebuild_from_type_v2(function, type, arguments, state)
  const std::string call = tensor.substr(Glob("torch._utils", "_rebuild_tensor_v2").size());
  const auto from_type = [&](const std::string& type) {
    return Bytes(Glob("torch._tensor", "_rebuild_from_type_v2"), '(',
                 Glob("torch._utils", "_rebuild_tensor_v2"), type, call.substr(0, call.size() - 1),
                 "}tR");
  };
  ASSERT_OK(
      ReadItem(ArchiveOf(from_type(Glob("torch.nn.parameter", "Parameter")), payload).Finish()));
  EXPECT_THAT(
      ReadItem(ArchiveOf(from_type(Glob("torch.distributed.tensor", "DTensor")), payload).Finish()),
      AllOf(HasCode(Code::kUnsupported), HasMessage("torch.distributed.tensor.DTensor")));
  TensorSpec conjugate;
  conjugate.metadata = Bytes('}', Str("conj"), 0x88, 's');
  EXPECT_THAT(ReadItem(conjugate), AllOf(HasCode(Code::kUnsupported), HasMessage("conj")));
  for (const std::string name :
       {"_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_nested_tensor",
        "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass"}) {
    EXPECT_THAT(ReadItem(ArchiveOf(Glob("torch._utils", name) + ")R", payload).Finish()),
                AllOf(HasCode(Code::kUnsupported), HasMessage(name)));
  }
  EXPECT_THAT(ReadItem(ArchiveOf("N", payload).Finish()),
              AllOf(HasCode(Code::kDataLoss), HasMessage("the archive does not contain a tensor")));
}

TEST_F(TorchArchiveTest, RefusesMalformedArchives) {
  const std::string payload(48, 'x');
  const std::string ops = TensorSpec().Operations();
  ZipBuilder big = ArchiveOf(ops, payload);
  big.entries[2].data = "big";
  EXPECT_THAT(ReadItem(big.Finish()), AllOf(HasCode(Code::kUnsupported), HasMessage("big-endian")));
  big.entries[2].data = "middle";
  EXPECT_THAT(ReadItem(big.Finish()), AllOf(HasCode(Code::kDataLoss), HasMessage("neither")));
  ZipBuilder none = ArchiveOf(ops, payload);
  none.entries[0].name = "archive/other.pkl";
  EXPECT_THAT(ReadItem(none.Finish()), HasMessage("the archive has no data.pkl"));
  ZipBuilder two = ArchiveOf(ops, payload);
  two.entries[1].name = "archive2/data.pkl";
  EXPECT_THAT(ReadWhole(two.Finish()), HasMessage("the archive has two data.pkl"));
  ZipBuilder script = ArchiveOf(ops, payload);
  script.entries[1].name = "archive/constants.pkl";
  EXPECT_THAT(ReadWhole(script.Finish()),
              AllOf(HasCode(Code::kUnsupported), HasMessage("TorchScript")));
  ZipBuilder flipped = ArchiveOf(ops, payload);
  flipped.entries[0].crc = 12345;
  EXPECT_THAT(ReadItem(flipped.Finish()), HasMessage("data.pkl has a checksum mismatch (CRC-32)"));
  EXPECT_THAT(
      ReadItem(ArchiveOf(Glob("os", "system") + Str("x") + "\x85R", payload).Finish()),
      AllOf(HasCode(Code::kUnsupported), HasMessage("contains a Python object (os.system)")));
  // As torch 2.13 has it: from 1 to 10, and behind the number anything.
  ZipBuilder other = ArchiveOf(ops, payload);
  for (const char* version : {"1", "10\n", " \n3 and more"}) {
    other.entries[4].data = version;
    EXPECT_OK(ReadItem(other.Finish())) << version;
  }
  for (const char* version : {"0", "11\n", "999", "99999999999999999999", "-1", "x", ""}) {
    other.entries[4].data = version;
    EXPECT_THAT(ReadItem(other.Finish()),
                AllOf(HasCode(Code::kUnsupported), HasMessage("the format version '")))
        << version;
  }
  other.entries[1].name = "archive/.data/version";  // torch asks for this one first.
  other.entries[1].data = "3";
  EXPECT_OK(ReadItem(other.Finish()));
  other.entries[4].data = "3";
  other.entries[1].data = "11";
  EXPECT_THAT(ReadItem(other.Finish()),
              HasMessage("version '11' is not supported (supported: 1 to 10)"));
  ZipBuilder without = ArchiveOf(ops, payload);
  without.entries.pop_back();
  EXPECT_THAT(ReadItem(without.Finish()),
              AllOf(HasCode(Code::kUnsupported), HasMessage("the archive has no version")));
  EXPECT_THAT(ReadItem("no archive at all"), HasCode(Code::kDataLoss));
  EXPECT_THAT(ReadItem(""), HasCode(Code::kDataLoss));
  const auto file = Open("short");
  EXPECT_THAT(ReadTorchItem(*file, 3, 100), HasMessage("past the end of the file"));
}

// A payload that is not where its descriptor says is not taken from the head.
TEST_F(TorchArchiveTest, DescriptorBehindThePayloadIsChecked) {
  ZipBuilder zip = ArchiveOf(TensorSpec().Operations(), std::string(48, 'x'));
  zip.entries[3].descriptor_size = 47;
  EXPECT_THAT(ReadItem(zip.Finish()), HasMessage("data descriptor that does not match"));
  const std::string whole = ArchiveOf(TensorSpec().Operations(), std::string(4000, 'x')).Finish();
  EXPECT_THAT(ReadItem(whole), HasMessage("has 4000 bytes instead of 48"));
  // Cut anywhere: an error.
  const std::string bytes = ArchiveOf(TensorSpec().Operations(), std::string(48, 'x')).Finish();
  for (std::size_t n = 0; n + 700 < bytes.size(); n += 13) {
    EXPECT_FALSE(ReadWhole(bytes.substr(0, n)).ok()) << n;
  }
}

TEST_F(TorchArchiveTest, ObjectsAreDescribed) {
  const auto describe = [&](const std::string& bytes) {
    const auto file = Open(bytes);
    Result<std::string> text = DescribeObject(*file, 7, bytes.size());
    EXPECT_OK(text);
    return text.ok() ? text.value() : "";
  };
  EXPECT_EQ(describe(""), "the object has no bytes\n");
  EXPECT_EQ(describe("hello"), "5 bytes of text\n");
  EXPECT_EQ(describe(std::string("\0\1\2", 3)), "3 bytes, neither a pickle nor a torch archive\n");
  EXPECT_EQ(describe(Pickle(Glob("os", "system") + ")R")), "os.system (not called)\n");
  EXPECT_THAT(describe("\x80\x04i"), HasSubstr("that begin like a pickle: pickle: byte 2"));
  EXPECT_THAT(describe("PK\3\4x"), HasSubstr("that begin like a zip archive"));
  EXPECT_THAT(describe(ArchiveOf(TensorSpec().Operations(), std::string(48, 'x')).Finish()),
              HasSubstr("torch._utils._rebuild_tensor_v2 (not called)"));
}

// The length is compared with the file before anything else, whatever it is.
TEST_F(TorchArchiveTest, ObjectPastTheEndOfItsFileIsDataLoss) {
  const auto file = Open("short");
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  for (const auto& [begin, length] : {std::pair<std::uint64_t, std::uint64_t>(7, 6),
                                      {7, std::uint64_t{65} << 20},
                                      {13, 0},
                                      {7, most}}) {
    EXPECT_THAT(DescribeObject(*file, begin, length),
                AllOf(HasCode(Code::kDataLoss), HasMessage("past the end of the file")))
        << begin << " " << length;
  }
  EXPECT_THAT(DescribeObject(*file, 12, 0), IsOkAndHolds("the object has no bytes\n"));
}

}  // namespace
}  // namespace tensormount
