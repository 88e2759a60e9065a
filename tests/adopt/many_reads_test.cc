// SPDX-License-Identifier: Apache-2.0
// How many round trips it takes to open what others saved where nothing can be mapped: not one for
// each of its parts.
#include <string>
#include <vector>

#include "index/archives/torch_archive.h"
#include "index/archives/zip_archive.h"
#include "index/foreign/dcp_metadata.h"
#include "index/foreign/dcp_objects.h"
#include "index/foreign/foreign.h"
#include "index/foreign/open_source.h"
#include "shard/npy.h"
#include "tests/adopt/bytes.h"
#include "tests/adopt/zip_builder.h"
#include "tests/support/plain_reads_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/unmapped_file.h"

namespace tensormount {
namespace {

// Counts calls; a call for many runs may be made to fail.
class CountedFile : public UnmappedFile {
 public:
  explicit CountedFile(std::unique_ptr<File> base, bool many = true)
      : UnmappedFile(std::move(base)), many_(many) {}
  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    ++calls;
    return base_->ReadAt(offset, out, size);
  }
  Status ReadMany(std::span<const ReadRun> runs, const ReadLimits& limits) override {
    ++calls;
    if (!many_) return Status(Code::kUnavailable, "not now");
    return base_->ReadMany(runs, limits);
  }
  std::size_t calls = 0;

 private:
  const bool many_;
};

std::string NpyBytes(float first) {
  std::string bytes = MakeNpyHeader(DType::kF32, {3}).value();
  for (int i = 0; i < 3; ++i) {
    const float value = first + static_cast<float>(i);
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  return bytes;
}

TEST(ManyReadsTest, ArchiveLocalHeadersAreReadInOneBatch) {
  ZipBuilder zip;
  zip.zip64_end = true;
  for (int i = 0; i < 900; ++i) {
    ZipBuilder::Entry& entry =
        zip.Add("archive/data/" + std::to_string(i), std::string(3000 + i % 7 * 1000, 'x'));
    entry.described = i % 3 != 0;
    entry.wide_descriptor = i % 2 != 0;
    entry.padding = i % 50 == 0 ? 900 : 40;  // Some longer than is read of it at first.
  }
  zip.entries.back().described = true;
  const std::string bytes = zip.Finish();
  TempDir dir;
  const std::string path = dir.Join("f");
  WriteWholeFile(path, "before" + bytes);
  const auto open = [&] { return HostFileSystem().OpenRead(path).value(); };
  CountedFile together(open());
  ASSERT_OK_AND_ASSIGN(const ZipArchive read, ZipArchive::Read(together, 6, bytes.size()));
  EXPECT_LE(together.calls, 30u);  // The end, the directory, local headers, 18 long ones.
  CountedFile apart(open(), false);
  ASSERT_OK_AND_ASSIGN(const ZipArchive again, ZipArchive::Read(apart, 6, bytes.size()));
  EXPECT_GE(apart.calls, 600u);
  ASSERT_EQ(read.entries().size(), 900u);
  ASSERT_EQ(again.entries().size(), 900u);
  for (std::size_t i = 0; i < 900; ++i) {
    EXPECT_EQ(read.entries()[i].name, again.entries()[i].name);
    EXPECT_EQ(read.entries()[i].offset, again.entries()[i].offset);
    EXPECT_OK(CheckZipCrc(together, read.entries()[i]));
  }
}

// The end, the central directory, the local headers; then the pickle with version and byteorder,
// wherever these stand.
TEST(ManyReadsTest, TorchArchiveOpensInFourRoundTrips) {
  ZipBuilder zip;
  zip.Add("a/version", "3\n");
  for (int i = 0; i < 300; ++i) zip.Add("a/data/" + std::to_string(i), std::string(6000, 'x'));
  zip.Add("a/data.pkl", Pickle("K\5", 2));
  for (int i = 300; i < 400; ++i) zip.Add("a/data/" + std::to_string(i), std::string(6000, 'x'));
  zip.Add("a/byteorder", "little");
  const std::string bytes = zip.Finish();
  TempDir dir;
  WriteWholeFile(dir.Join("f"), bytes);
  CountedFile file(HostFileSystem().OpenRead(dir.Join("f")).value());
  const auto read = TorchArchive::Read(file, 0, bytes.size());
  EXPECT_OK(read);
  EXPECT_LE(file.calls, 4u);
  for (const char* wrong : {"a/version", "a/byteorder"}) {
    ZipBuilder other = zip;
    for (ZipBuilder::Entry& entry : other.entries) {
      if (entry.name == wrong) entry.data = "99";
    }
    const std::string changed = other.Finish();
    WriteWholeFile(dir.Join("g"), changed);
    CountedFile spoiled(HostFileSystem().OpenRead(dir.Join("g")).value());
    EXPECT_FALSE(TorchArchive::Read(spoiled, 0, changed.size()).ok()) << wrong;
  }
}

TEST(ManyReadsTest, NpzArraysAreReadInOneBatch) {
  ZipBuilder zip;
  for (int i = 0; i < 600; ++i) {
    zip.Add("array" + std::to_string(i) + ".npy",
            NpyBytes(static_cast<float>(i)) + std::string(5000, '\0'));
  }
  TempDir dir;
  WriteWholeFile(dir.Join("arrays.npz"), zip.Finish());
  PlainReadsFileSystem fs("plain://");
  ASSERT_OK_AND_ASSIGN(const auto opened, OpenNamed(fs, "plain://" + dir.Join("arrays.npz"), {}));
  EXPECT_EQ(opened->index().tensor_count(), 600u);
  EXPECT_LE(fs.counts().reads, 20u);
  ASSERT_OK_AND_ASSIGN(const TensorEntry tensor, opened->index().Find("array417"));
  float got[3] = {};
  EXPECT_OK(opened->ReadBytes(tensor, 0, got, sizeof got, ReadVerify::kOff, nullptr));
  EXPECT_EQ(got[0], 417.0f);
  EXPECT_EQ(got[2], 419.0f);
}

// Objects apart from each other, side by side and within one another, in two files.
TEST(ManyReadsTest, ObjectValuesAreReadInOneBatch) {
  TempDir dir;
  PlainReadsFileSystem fs("plain://");
  std::vector<ObjectRecord> parts;
  for (std::uint32_t file = 0; file < 2; ++file) {
    std::string bytes;
    for (int i = 0; i < 60; ++i) {
      if (i % 3 == 0) bytes.resize(bytes.size() + 70'000);
      ZipBuilder zip;
      zip.Add("archive/data.pkl", Pickle(Bytes('K', i + 100 * static_cast<int>(file)), 2));
      zip.Add("archive/version", "3\n");
      const std::string archive = zip.Finish();
      ObjectRecord part;
      part.key = "value-" + std::to_string(file) + "-" + std::to_string(i);
      part.file = file;
      part.offset = bytes.size();
      part.length = archive.size();
      part.manifest = kNoManifest;
      bytes += archive;
      parts.push_back(part);
      if (i == 30) {
        part.key += "-again";
        parts.push_back(part);
      }
    }
    WriteWholeFile(dir.Join("f" + std::to_string(file)), bytes);
  }
  ASSERT_OK_AND_ASSIGN(const ForeignFolder folder,
                       ForeignFolder::Open(fs, "plain://" + dir.path(), {}));
  ForeignBuilder builder(folder, "test");
  ASSERT_OK(builder.AddFile("f0"));
  ASSERT_OK(builder.AddFile("f1"));
  const std::uint64_t before = fs.counts().reads;
  DcpObjects objects(builder);
  for (const ObjectRecord& part : parts) objects.Add(part);
  OmissionCounter left_out;
  ASSERT_OK(objects.Finish(false, left_out));
  EXPECT_EQ(fs.counts().reads - before, 2u);
  ASSERT_OK_AND_ASSIGN(const ForeignInventory found, builder.Finish());
  ASSERT_EQ(found.inventory.common.size(), parts.size());
  for (int file = 0; file < 2; ++file) {
    for (int i = 0; i < 60; ++i) {
      const std::string key = "value-" + std::to_string(file) + "-" + std::to_string(i);
      EXPECT_EQ(found.inventory.common.at(key), CommonValue(std::int64_t{i + 100 * file})) << key;
    }
    const std::string again = "value-" + std::to_string(file) + "-30-again";
    EXPECT_EQ(found.inventory.common.at(again), CommonValue(std::int64_t{30 + 100 * file}));
  }
}

}  // namespace
}  // namespace tensormount
