// SPDX-License-Identifier: Apache-2.0
// Files of NumPy 2.4 (tests/golden/foreign/make_numpy.py) and such as it would not write.
#include <string>
#include <unistd.h>

#include "shard/npy.h"
#include "tests/adopt/adopted.h"
#include "tests/adopt/zip_builder.h"
#include "tests/support/subprocess.h"

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string Npy(DType dtype, const Dims& shape) {
  return MakeNpyHeader(dtype, shape).value() + CellRange(dtype, 0, CheckedProduct(shape).value());
}

TEST(NumpyTest, ReadsNumPy24Directory) {
  const auto adopted = Adopt(NumpyFormat(), SourcePath("tests/golden/foreign/numpy-2.4/folder"));
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()),
              ElementsAre("bool", "empty", "f16", "fortran", "layer/c128", "layer/view", "scalar",
                          "two", "u64", "version2", "version3", "w"));
  ExpectCells(adopted.value(), "w", DType::kF32, {4, 6});
  ExpectCells(adopted.value(), "fortran", DType::kF64, {3, 4, 5});
  ExpectCells(adopted.value(), "bool", DType::kBool, {7});
  ExpectCells(adopted.value(), "f16", DType::kF16, {3, 3});
  ExpectCells(adopted.value(), "u64", DType::kU64, {5});
  ExpectCells(adopted.value(), "scalar", DType::kI32, {});
  ExpectCells(adopted.value(), "empty", DType::kF32, {0, 3});
  ExpectCells(adopted.value(), "layer/c128", DType::kC128, {2, 2});
  ExpectCells(adopted.value(), "version2", DType::kI64, {2, 3});
  ExpectCells(adopted.value(), "version3", DType::kI64, {2, 3});
  ExpectCells(adopted.value(), "two", DType::kI8, {5});
  // Every second row of the formula.
  EXPECT_THAT(ReadTensor(adopted.value(), "layer/view"),
              IsOkAndHolds(CellRange(DType::kI16, 0, 4) + CellRange(DType::kI16, 8, 12) +
                           CellRange(DType::kI16, 16, 20)));
  const std::string warnings = WarningsOf(adopted.value());
  EXPECT_EQ(adopted.value()->warnings().size(), 7u) << warnings;
  EXPECT_THAT(warnings,
              HasSubstr("tensor big: left out: element type '>f4' is not supported: big-endian"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor object: left out: element type '|O' is not supported: Python"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor text: left out: element type '<U2' is not supported: text"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor dates: left out: element type '<M8[D]' is not supported: dates"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor records: left out: npy header: elements with several fields"));
  EXPECT_THAT(warnings,
              HasSubstr("tensor void: left out: element type '|V2' is not supported: raw bytes"));
  EXPECT_THAT(warnings, HasSubstr("tensor two: 133 bytes after its elements are ignored"));
}

TEST(NumpyTest, ReadsNumPy24Archives) {
  const std::string folder = SourcePath("tests/golden/foreign/numpy-2.4");
  const auto adopted = Adopt(NumpyFormat(), folder + "/stored.npz");
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("fortran", "layer/x.y", "w"));
  ExpectCells(adopted.value(), "w", DType::kF32, {4, 6});
  ExpectCells(adopted.value(), "fortran", DType::kI32, {4, 6});
  ExpectCells(adopted.value(), "layer/x.y", DType::kU8, {9});
  EXPECT_THAT(WarningsOf(adopted.value()), HasSubstr("tensor object: left out"));
  const auto packed = Adopt(NumpyFormat(), folder + "/compressed.npz");
  EXPECT_THAT(packed, HasCode(Code::kUnsupported));
  EXPECT_THAT(packed, HasMessage("compress"));
}

TEST(NumpyTest, ReadsSingleNpyFiles) {
  const TempDir dir;
  PutFile(dir.Join("w.npy"), Npy(DType::kBF16, {3, 4}));
  const auto adopted = Adopt(NumpyFormat(), dir.Join("w.npy"));
  ASSERT_OK(adopted);
  EXPECT_THAT(adopted.value()->warnings(), IsEmpty());
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("w"));
  ExpectCells(adopted.value(), "w", DType::kBF16, {3, 4});
  // What concerns the only array concerns all.
  const std::string whole = Npy(DType::kF32, {3, 4});
  PutFile(dir.Join("short.npy"), whole.substr(0, whole.size() - 1));
  EXPECT_THAT(Adopt(NumpyFormat(), dir.Join("short.npy")), HasCode(Code::kDataLoss));
  EXPECT_THAT(Adopt(NumpyFormat(), dir.Join("short.npy")),
              HasMessage("47 bytes of elements are stored, but shape [3, 4] of f32 needs 48"));
  PutFile(dir.Join("cut.npy"), whole.substr(0, 20));
  EXPECT_THAT(Adopt(NumpyFormat(), dir.Join("cut.npy")), HasMessage("npy header: truncated"));
  PutFile(dir.Join("no.npy"), "something else");
  EXPECT_THAT(Adopt(NumpyFormat(), dir.Join("no.npy")), HasCode(Code::kNotFound));
}

TEST(NumpyTest, BadNpzEntriesAreLeftOutWithAWarning) {
  const TempDir dir;
  ZipBuilder zip;
  zip.Add("good.npy", Npy(DType::kI64, {5}));
  const std::string whole = Npy(DType::kI64, {5});
  // What follows the entry in the file is not its array.
  zip.Add("short.npy", whole.substr(0, whole.size() - 8));
  zip.Add("notes.txt", "x");
  zip.Add(".npy", whole);
  zip.Add("empty.npy", "");
  PutFile(dir.Join("a.npz"), zip.Finish());
  const auto adopted = Adopt(NumpyFormat(), dir.Join("a.npz"));
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("good"));
  ExpectCells(adopted.value(), "good", DType::kI64, {5});
  const std::string warnings = WarningsOf(adopted.value());
  EXPECT_THAT(warnings, HasSubstr("tensor short: left out: 32 bytes of elements"));
  EXPECT_THAT(warnings, HasSubstr("entry notes.txt: left out: it is not an .npy file"));
  EXPECT_THAT(warnings, HasSubstr("entry .npy: left out"));
  EXPECT_THAT(warnings, HasSubstr("tensor empty: left out: npy header"));
}

TEST(NumpyTest, LinksOutOfTheDirectoryAreNotFollowed) {
  const TempDir dir;
  PutFile(dir.Join("c/w.npy"), Npy(DType::kF32, {2}));
  PutFile(dir.Join("outside.npy"), Npy(DType::kF32, {2}));
  ASSERT_EQ(symlink("../outside.npy", dir.Join("c/link.npy").c_str()), 0);
  EXPECT_THAT(Adopt(NumpyFormat(), dir.Join("c")), HasCode(Code::kPermissionDenied));
  ASSERT_OK(HostFileSystem().RemoveFile(dir.Join("c/link.npy")));
  // Circles are not walked.
  ASSERT_EQ(symlink(".", dir.Join("c/circle").c_str()), 0);
  const auto adopted = Adopt(NumpyFormat(), dir.Join("c"));
  ASSERT_OK(adopted);
  EXPECT_THAT(KeysOf(adopted.value()), ElementsAre("w"));
  EXPECT_THAT(Adopt(NumpyFormat(), dir.path()), IsOk());
}

}  // namespace
}  // namespace tensormount
