// SPDX-License-Identifier: Apache-2.0
#include <functional>

#include "index/archives/zip_archive.h"
#include "tests/adopt/zip_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

using testing::AllOf;

class ZipTest : public testing::Test {
 protected:
  std::unique_ptr<File> Open(const std::string& bytes) {
    const std::string path = dir_.Join("file" + std::to_string(++files_));
    EXPECT_OK(HostFileSystem().WriteFileDurably(path, bytes));
    return HostFileSystem().OpenRead(path).value();
  }
  Result<ZipArchive> Read(const std::string& bytes) {
    const auto file = Open(bytes);
    return ZipArchive::Read(*file, 0, bytes.size());
  }
  // Two entries, of which a test spoils something.
  Result<ZipArchive> Spoiled(const std::function<void(ZipBuilder&)>& spoil) {
    ZipBuilder zip;
    zip.Add("a/one", "first");
    zip.Add("a/two", "second!");
    spoil(zip);
    return Read(zip.Finish());
  }

  TempDir dir_;
  int files_ = 0;
};

TEST_F(ZipTest, FindsEntriesByName) {
  ZipBuilder zip;
  zip.Add("x/b", "bytes of b");
  zip.Add("x/a", "");
  const std::string bytes = zip.Finish();
  // Somewhere in a larger file.
  const auto file = Open("before" + bytes + "after");
  ASSERT_OK_AND_ASSIGN(const ZipArchive read, ZipArchive::Read(*file, 6, bytes.size()));
  ASSERT_EQ(read.entries().size(), 2u);
  EXPECT_EQ(read.entries()[0].name, "x/a");
  const ZipEntry* b = read.Find("x/b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->size, 10u);
  std::string got(10, '?');
  ASSERT_OK(file->ReadExactAt(b->offset, got.data(), got.size()));
  EXPECT_EQ(got, "bytes of b");
  EXPECT_EQ(read.Find("x/c"), nullptr);
  EXPECT_OK(CheckZipCrc(*file, *b));
}

// torch: flag bit 3, no sizes in local headers, descriptors, zip64 end records always.
TEST_F(ZipTest, ReadsArchivesAsTorchWritesThem) {
  for (const bool wide : {false, true}) {
    ZipBuilder zip;
    zip.zip64_end = true;
    ZipBuilder::Entry& entry = zip.Add("archive/data.pkl", "pickle");
    entry.described = true;
    entry.wide_descriptor = wide;
    entry.padding = 13;
    zip.Add("archive/data/0", "").flags = 0x0800;
    const std::string bytes = zip.Finish();
    const auto file = Open(bytes);
    ASSERT_OK_AND_ASSIGN(const ZipArchive read, ZipArchive::Read(*file, 0, bytes.size()));
    EXPECT_EQ(read.Find("archive/data.pkl")->offset, 30u + 16 + 13);
    EXPECT_EQ(read.Find("archive/data/0")->size, 0u);
    EXPECT_OK(CheckZipCrc(*file, *read.Find("archive/data.pkl")));
  }
}

TEST_F(ZipTest, ReadsArchiveWithALongComment) {
  ZipBuilder zip;
  zip.Add("a", "b");
  zip.comment = std::string(40000, 'c');
  ASSERT_OK_AND_ASSIGN(const ZipArchive read, Read(zip.Finish()));
  EXPECT_EQ(read.entries().size(), 1u);
}

TEST_F(ZipTest, ReadsZip64Fields) {
  ZipBuilder zip;
  zip.zip64_end = true;
  zip.end_fields_in_64 = true;
  zip.Add("a", "bcd").sizes_in_64 = true;
  ASSERT_OK_AND_ASSIGN(const ZipArchive read, Read(zip.Finish()));
  EXPECT_EQ(read.entries()[0].size, 3u);
  EXPECT_EQ(read.entries()[0].header, 0u);
  EXPECT_THAT(Spoiled([](ZipBuilder& z) {
                z.entries[0].sizes_in_64 = true;
                z.entries[0].lose_field_64 = true;
              }),
              AllOf(HasCode(Code::kDataLoss), HasMessage("lacks its zip64 sizes")));
}

TEST_F(ZipTest, CrcIsChecked) {
  ZipBuilder zip;
  zip.Add("a", "bcd").crc = 0x12345678;
  zip.Add("b", "without").crc = 0;
  const std::string bytes = zip.Finish();
  const auto file = Open(bytes);
  ASSERT_OK_AND_ASSIGN(const ZipArchive read, ZipArchive::Read(*file, 0, bytes.size()));
  EXPECT_THAT(
      CheckZipCrc(*file, *read.Find("a")),
      AllOf(HasCode(Code::kDataLoss), HasMessage("entry 'a' has a checksum mismatch (CRC-32)")));
  EXPECT_OK(CheckZipCrc(*file, *read.Find("b")));
}

TEST_F(ZipTest, RefusesUnsafeNames) {
  const std::pair<std::string, std::string> cases[] = {
      {"/etc/passwd", "absolute"}, {"../x", "'.' or '..'"},        {"a/../../x", "'.' or '..'"},
      {"a/..", "'.' or '..'"},     {"./a", "'.' or '..'"},         {std::string("a\0b", 3), "NUL"},
      {"a\\b", "backslash"},       {"a\nb", "control characters"}, {"a\xff", "not valid UTF-8"},
      {"", "has no name"}};
  for (const auto& [name, message] : cases) {
    EXPECT_THAT(Spoiled([&name = name](ZipBuilder& zip) { zip.entries[0].name = name; }),
                AllOf(HasCode(Code::kDataLoss), HasMessage(message)));
  }
  EXPECT_THAT(Spoiled([](ZipBuilder& zip) { zip.entries[1].name = "a/one"; }),
              AllOf(HasCode(Code::kDataLoss), HasMessage("entry 'a/one' occurs twice")));
}

TEST_F(ZipTest, RefusesCompressedAndEncryptedEntries) {
  EXPECT_THAT(Spoiled([](ZipBuilder& zip) { zip.entries[0].method = 8; }),
              AllOf(HasCode(Code::kUnsupported), HasMessage("compressed (method 8)")));
  for (const int flag : {0, 6, 13}) {
    EXPECT_THAT(Spoiled([&](ZipBuilder& zip) {
                  zip.entries[0].flags = static_cast<std::uint16_t>(1 << flag);
                }),
                AllOf(HasCode(Code::kUnsupported), HasMessage("encrypted")));
  }
}

TEST_F(ZipTest, RefusesHeadersThatDisagree) {
  const std::pair<std::function<void(ZipBuilder&)>, std::string> cases[] = {
      {[](ZipBuilder& z) { z.entries[0].local_name = "a/onf"; }, "another name, method or flags"},
      {[](ZipBuilder& z) { z.entries[0].local_name = "a/one2"; }, "another name, method or flags"},
      {[](ZipBuilder& z) { z.entries[0].local_method = 8; }, "another name, method or flags"},
      {[](ZipBuilder& z) { z.entries[0].local_flags = 0x0800; }, "another name, method or flags"},
      {[](ZipBuilder& z) { z.entries[0].local_size = 4; }, "another size or CRC"},
      {[](ZipBuilder& z) { z.entries[0].local_packed = 4; }, "another size or CRC"},
      {[](ZipBuilder& z) { z.entries[0].local_size = 4, z.entries[0].local_packed = 5; },
       "another size or CRC"},
      {[](ZipBuilder& z) { z.entries[0].local_crc = 4; }, "another size or CRC"},
      {[](ZipBuilder& z) { z.entries[0].packed_size = 4; },
       "is stored uncompressed, but has two different sizes"},
      {[](ZipBuilder& z) { z.entries[0].size = 400; }, "is outside of the archive"},
      {[](ZipBuilder& z) { z.entries[0].size = 20; }, "another size or CRC"},
      {[](ZipBuilder& z) { z.entries[1].header = 1; }, "overlaps another"},
      {[](ZipBuilder& z) { z.entries[1].header = 0; }, "overlaps another"},
      {[](ZipBuilder& z) { z.entries[1].header = 100000; }, "is outside of the archive"},
      {[](ZipBuilder& z) { z.entries[0].header = 1; }, "has no local header"},
      {[](ZipBuilder& z) { z.entries[0].extra = U16(9) + U16(50); }, "damaged extra fields"},
      {[](ZipBuilder& z) {
         z.entries[0].described = true;
         z.entries[0].descriptor_size = 6;
       },
       "data descriptor that does not match"},
      {[](ZipBuilder& z) {
         z.entries[0].described = true;
         z.entries[0].descriptor_packed = 6;
       },
       "data descriptor that does not match"},
      {[](ZipBuilder& z) {
         z.entries[0].described = true;
         z.entries[0].descriptor_crc = 6;
       },
       "data descriptor that does not match"},
      {[](ZipBuilder& z) {
         z.entries[0].described = true;
         z.entries[0].lose_descriptor = true;
       },
       "data descriptor that does not match"}};
  int i = 0;
  for (const auto& [spoil, message] : cases) {
    EXPECT_THAT(Spoiled(spoil), AllOf(HasCode(Code::kDataLoss), HasMessage(message))) << i++;
  }
}

TEST_F(ZipTest, RefusesWrongEndRecords) {
  const std::pair<std::function<void(ZipBuilder&)>, std::string> cases[] = {
      {[](ZipBuilder& z) { z.count = 1; }, "has data after its last entry"},
      {[](ZipBuilder& z) { z.count = 3; }, "too short for 3 entries"},
      {[](ZipBuilder& z) { z.count_here = 1; }, "has two different entry counts"},
      {[](ZipBuilder& z) { z.directory = 1; }, "does not end where its end record begins"},
      {[](ZipBuilder& z) { z.directory_bytes = 1; }, "does not end where its end record begins"},
      {[](ZipBuilder& z) { z.end_fields_in_64 = true; }, "no zip64 end record"},
      {[](ZipBuilder& z) {
         z.zip64_end = true;
         z.locator = 0;
       },
       "not where the locator points"},
      {[](ZipBuilder& z) {
         z.zip64_end = true;
         z.locator = ~std::uint64_t{0} - 10;
       },
       "locator points outside"},
      {[](ZipBuilder& z) {
         z.zip64_end = true;
         z.count64 = 1;
       },
       "the end record and the zip64 end record disagree"},
      {[](ZipBuilder& z) {
         z.zip64_end = z.end_fields_in_64 = true;
         z.directory64_bytes = ~std::uint64_t{0};
       },
       "does not end where its end record begins"},
      {[](ZipBuilder& z) { z.cut = 4; }, "the archive has no end record"}};
  int i = 0;
  for (const auto& [spoil, message] : cases) {
    EXPECT_THAT(Spoiled(spoil), AllOf(HasCode(Code::kDataLoss), HasMessage(message))) << i++;
  }
  EXPECT_THAT(Spoiled([](ZipBuilder& z) { z.disk = 1; }), HasCode(Code::kUnsupported));
  EXPECT_THAT(Read(""), AllOf(HasCode(Code::kDataLoss), HasMessage("too few")));
  EXPECT_THAT(Read(std::string(100, 'P')), HasMessage("no end record"));
}

TEST_F(ZipTest, RefusesRangeOutsideTheFile) {
  const auto file = Open("short");
  EXPECT_THAT(ZipArchive::Read(*file, 2, 100), HasMessage("past the end of the file"));
  EXPECT_THAT(ZipArchive::Read(*file, ~std::uint64_t{0}, 100), HasCode(Code::kDataLoss));
}

// 20,000 entries, in the worst order, in no time worth speaking of.
TEST_F(ZipTest, ReadsTwentyThousandEntries) {
  ZipBuilder zip;
  for (int i = 20000; i-- > 0;) zip.Add("archive/data/" + std::to_string(i), "x");
  zip.zip64_end = true;
  ASSERT_OK_AND_ASSIGN(const ZipArchive read, Read(zip.Finish()));
  EXPECT_EQ(read.entries().size(), 20000u);
}

}  // namespace
}  // namespace tensormount
