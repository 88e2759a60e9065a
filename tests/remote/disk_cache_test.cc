// SPDX-License-Identifier: Apache-2.0
#include "remote/disk_cache.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <mutex>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "tensormount/log.h"

#include "tests/support/forked.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

namespace stdfs = std::filesystem;
using testing::HasSubstr;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kFileBytes = kMiB + 4096;
constexpr const char* kUrl = "https://host/model.safetensors";
constexpr std::uint64_t kSize = 5 * kMiB + 70'000;

// Other bytes for each offset and seed.
std::vector<std::byte> BytesOfSeed(int seed, std::uint64_t size = kSize) {
  std::vector<std::byte> out(size);
  for (std::uint64_t i = 0; i < size; i += 8) {
    const std::uint64_t word = (i + 1) * 0x9E3779B97F4A7C15 + static_cast<std::uint64_t>(seed);
    std::memcpy(out.data() + i, &word, std::min<std::uint64_t>(8, size - i));
  }
  return out;
}

class DiskCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    SetLogSink([this](LogLevel, std::string_view line) { warnings_.emplace_back(line); });
  }
  void TearDown() override { SetLogSink({}); }

  std::shared_ptr<DiskCache> Open(std::uint64_t most = 100 * kMiB) {
    auto cache = DiskCache::Open(directory_, most);
    EXPECT_OK(cache.status());
    return cache.ok() ? cache.value() : nullptr;
  }
  static std::shared_ptr<const CachedObject> Object(std::shared_ptr<DiskCache> cache,
                                                    std::string_view etag = "\"one\"",
                                                    std::uint64_t size = kSize) {
    return CachedObject::Make(std::move(cache), kUrl, etag, size);
  }
  static void Keep(const CachedObject& object, const std::vector<std::byte>& bytes) {
    object.Keep({0, bytes.size()}, bytes.data(), nullptr);
    FinishDiskCaches();
  }
  // Whether all of the range is there and right.
  static bool Reads(const CachedObject& object, const std::vector<std::byte>& bytes,
                    ByteRange range) {
    std::vector<std::byte> out(range.size());
    for (std::uint64_t at = range.begin; at < range.end;) {
      const std::uint64_t end = std::min(range.end, (at / kMiB + 1) * kMiB);
      if (!object.Read({at, end}, out.data() + (at - range.begin))) return false;
      at = end;
    }
    EXPECT_TRUE(std::equal(out.begin(), out.end(), bytes.begin() + std::int64_t(range.begin)));
    return true;
  }
  std::vector<std::string> Files() const {
    std::vector<std::string> out;
    for (const auto& entry : stdfs::directory_iterator(blocks_)) {
      if (entry.path().filename() != "usage") out.push_back(entry.path());
    }
    std::sort(out.begin(), out.end());
    return out;
  }
  std::string FileOf(std::uint64_t block) const {
    for (const std::string& file : Files()) {
      if (file.ends_with("-" + std::to_string(block))) return file;
    }
    ADD_FAILURE() << "no file of block " << block;
    return {};
  }
  std::uint64_t BytesOfFiles() const {
    std::uint64_t sum = 0;
    for (const std::string& file : Files()) sum += stdfs::file_size(file);
    return sum;
  }
  static void SetAge(const std::string& file, std::int64_t seconds) {
    const timespec times[2] = {{std::time(nullptr) - seconds, 0},
                               {std::time(nullptr) - seconds, 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
  }

  TempDir dir_;
  const std::string directory_ = dir_.Join("a/cache");
  const std::string blocks_ = directory_ + "/blocks";
  std::vector<std::string> warnings_;
};

TEST_F(DiskCacheTest, KeptBytesAreRead) {
  const auto object = Object(Open());
  const auto bytes = BytesOfSeed(1);
  EXPECT_FALSE(object->Has(0));
  EXPECT_EQ(object->Missing({0, kSize}), (std::vector<ByteRange>{{0, kSize}}));
  Keep(*object, bytes);
  EXPECT_EQ(Files().size(), 6u);
  EXPECT_TRUE(object->Missing({0, kSize}).empty());
  for (const ByteRange range : {ByteRange{0, kSize}, ByteRange{0, 1}, ByteRange{kSize - 1, kSize},
                                ByteRange{65'535, 65'537}, ByteRange{kMiB - 3, 2 * kMiB + 3},
                                ByteRange{5 * kMiB + 65'536, kSize}}) {
    EXPECT_TRUE(Reads(*object, bytes, range)) << range.begin;
  }
  // Also by a process that opens it later.
  EXPECT_TRUE(Reads(*Object(Open()), bytes, {0, kSize}));
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(DiskCacheTest, OnlyWholeBlocksAreKept) {
  const auto object = Object(Open());
  const auto bytes = BytesOfSeed(1);
  object->Keep({1, 2 * kMiB - 1}, bytes.data() + 1, nullptr);
  FinishDiskCaches();
  EXPECT_TRUE(Files().empty());
  object->Keep({kMiB - 1, 3 * kMiB + 1}, bytes.data() + kMiB - 1, nullptr);
  object->Keep({5 * kMiB, kSize - 1}, bytes.data() + 5 * kMiB, nullptr);
  FinishDiskCaches();
  EXPECT_EQ(object->Missing({0, kSize}), (std::vector<ByteRange>{{0, kMiB}, {3 * kMiB, kSize}}));
  EXPECT_TRUE(Reads(*object, bytes, {kMiB, 3 * kMiB}));
}

TEST_F(DiskCacheTest, OtherVersionsAndUrlsAreOtherBlocks) {
  const auto cache = Open();
  Keep(*Object(cache), BytesOfSeed(1));
  const auto has = [&](const char* url, const char* etag, std::uint64_t size) {
    return CachedObject::Make(cache, url, etag, size)->Has(0);
  };
  EXPECT_TRUE(has(kUrl, "\"one\"", kSize));
  EXPECT_FALSE(has(kUrl, "\"two\"", kSize));
  EXPECT_FALSE(has(kUrl, "\"one\"", kSize + 1));
  EXPECT_FALSE(has("https://other/model.safetensors", "\"one\"", kSize));
  EXPECT_FALSE(has("https://host/model.safetensors?versionId=2", "\"one\"", kSize));
  // A signature is another one each time, and names no other object.
  for (const char* query : {"X-Amz-Signature=1&x-amz-date=2", "X-Goog-Signature=1",
                            "AWSAccessKeyId=A&Signature=B&Expires=9"}) {
    EXPECT_TRUE(has((std::string(kUrl) + "?" + query).c_str(), "\"one\"", kSize)) << query;
  }
  EXPECT_FALSE(has((std::string(kUrl) + "?Expires=9").c_str(), "\"one\"", kSize));
  // What has no identity, or is empty, has no blocks.
  EXPECT_EQ(CachedObject::Make(cache, kUrl, "", kSize), nullptr);
  EXPECT_EQ(CachedObject::Make(cache, kUrl, "\"one\"", 0), nullptr);
  EXPECT_EQ(CachedObject::Make(nullptr, kUrl, "\"one\"", kSize), nullptr);
}

TEST_F(DiskCacheTest, DamagedBlocksAreMissing) {
  const auto bytes = BytesOfSeed(1);
  // Of the file: the magic, the key, the number, a hash, the hash of the header, and data.
  for (const std::uint64_t at : {0, 8, 72, 88, 344, 4096, 4096 + 300'000}) {
    const auto object = Object(Open());
    Keep(*object, bytes);
    FlipByte(FileOf(2), at);
    EXPECT_FALSE(Reads(*object, bytes, {2 * kMiB, 3 * kMiB})) << at;
    EXPECT_FALSE(object->Has(2 * kMiB));
    EXPECT_TRUE(Reads(*object, bytes, {0, 2 * kMiB}));
  }
  EXPECT_THAT(warnings_.at(0), HasSubstr("does not have the bytes"));
}

TEST_F(DiskCacheTest, ShortReadsProveWhatTheyReturn) {
  const auto object = Object(Open());
  const auto bytes = BytesOfSeed(1);
  Keep(*object, bytes);
  FlipByte(FileOf(0), 4096 + 70'000);
  EXPECT_TRUE(Reads(*object, bytes, {0, 65'536}));
  EXPECT_FALSE(Reads(*object, bytes, {69'000, 69'001}));
  EXPECT_FALSE(object->Has(0));
}

TEST_F(DiskCacheTest, FilesThatAreNoBlocksAreMissing) {
  const auto object = Object(Open());
  const auto bytes = BytesOfSeed(1);
  Keep(*object, bytes);
  stdfs::resize_file(FileOf(0), kFileBytes - 1);
  stdfs::copy_file(FileOf(2), FileOf(1), stdfs::copy_options::overwrite_existing);
  WriteWholeFile(FileOf(3), "");
  const std::string fifo = FileOf(4);
  stdfs::remove(fifo);
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::uint64_t block : {0, 1, 3, 4}) {
    EXPECT_FALSE(Reads(*object, bytes, {block * kMiB, (block + 1) * kMiB})) << block;
  }
  EXPECT_EQ(warnings_.size(), 1u);  // One is told for all.
  Keep(*object, bytes);
  EXPECT_TRUE(Reads(*object, bytes, {0, kSize}));
}

TEST_F(DiskCacheTest, LinksAreNotFollowed) {
  const auto bytes = BytesOfSeed(1);
  const std::string elsewhere = dir_.Join("elsewhere");
  WriteWholeFile(elsewhere, "precious");
  {
    const auto object = Object(Open());
    Keep(*object, bytes);
    const std::string file = FileOf(0);
    stdfs::rename(file, dir_.Join("moved"));
    stdfs::create_symlink(dir_.Join("moved"), file);
    EXPECT_FALSE(Reads(*object, bytes, {0, kMiB}));
    stdfs::create_symlink(elsewhere, file);
    Keep(*object, bytes);
    EXPECT_TRUE(Reads(*object, bytes, {0, kMiB}));
    EXPECT_FALSE(stdfs::is_symlink(file));
    stdfs::remove(file);
    stdfs::remove(blocks_ + "/usage");
    stdfs::create_symlink(elsewhere, blocks_ + "/usage");
    Keep(*object, bytes);
    EXPECT_FALSE(object->Has(0));
  }
  EXPECT_EQ(ReadWholeFile(elsewhere), "precious");
  const std::string real = dir_.Join("real");
  stdfs::create_directory(real);
  stdfs::remove_all(blocks_);
  stdfs::create_directory_symlink(real, blocks_);
  EXPECT_THAT(DiskCache::Open(directory_, kMiB), HasMessage("symbolic link"));
  stdfs::remove_all(directory_);
  stdfs::create_directory_symlink(real, directory_);
  EXPECT_THAT(DiskCache::Open(directory_, kMiB), HasCode(Code::kPermissionDenied));
  EXPECT_THAT(DiskCache::Open(directory_ + "/", kMiB), HasMessage("symbolic link"));
  EXPECT_TRUE(stdfs::is_empty(real));
}

TEST_F(DiskCacheTest, NobodyElseMayWriteThere) {
  const mode_t before = umask(0);
  const auto cache = Open();
  Keep(*Object(cache), BytesOfSeed(1));
  umask(before);
  for (const std::string& path : {dir_.Join("a"), directory_, blocks_}) {
    EXPECT_EQ(unsigned(stdfs::status(path).permissions()), 0700u) << path;
  }
  EXPECT_EQ(unsigned(stdfs::status(FileOf(0)).permissions()), 0600u);
  for (const std::string& path : {directory_, blocks_}) {
    for (const unsigned mode : {0720u, 0702u}) {
      stdfs::permissions(path, stdfs::perms(mode));
      EXPECT_THAT(DiskCache::Open(directory_, kMiB), HasMessage("other users may write"));
    }
    stdfs::permissions(path, stdfs::perms(0700));
  }
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a directory away";
  ASSERT_EQ(chown(directory_.c_str(), 12'345, gid_t(-1)), 0);
  EXPECT_THAT(DiskCache::Open(directory_, kMiB), HasMessage("belongs to the user 12345"));
}

TEST_F(DiskCacheTest, TheOldestBlocksAreRemoved) {
  const auto object = Object(Open(6 * kFileBytes));
  const auto bytes = BytesOfSeed(1);
  Keep(*object, bytes);
  ASSERT_EQ(Files().size(), 6u);
  for (std::uint64_t block = 0; block < 6; ++block) {
    SetAge(FileOf(block), 1000 - std::int64_t(block));
  }
  // A read is a use, and a time ahead of the clock is none.
  EXPECT_TRUE(Reads(*object, bytes, {0, 10}));
  SetAge(FileOf(3), -100'000);
  const auto other = Object(object == nullptr ? nullptr : Open(6 * kFileBytes), "\"two\"");
  other->Keep({0, 2 * kMiB}, bytes.data(), nullptr);
  FinishDiskCaches();
  EXPECT_TRUE(other->Has(0) && other->Has(kMiB));
  EXPECT_TRUE(object->Has(0));
  EXPECT_FALSE(object->Has(kMiB));
  EXPECT_FALSE(object->Has(3 * kMiB));
  EXPECT_TRUE(object->Has(4 * kMiB));
  EXPECT_LE(BytesOfFiles(), 6 * kFileBytes);
}

TEST_F(DiskCacheTest, FilesThatNobodyCountedAreEvicted) {
  const auto bytes = BytesOfSeed(1);
  Keep(*Object(Open(6 * kFileBytes)), bytes);
  // A process was killed while it wrote, and the count is damaged, or is that of another directory.
  WriteWholeFile(blocks_ + "/.new-1-2", std::string(kFileBytes, 'x'));
  SetAge(blocks_ + "/.new-1-2", 5000);
  WriteWholeFile(blocks_ + "/notes", "of somebody");
  WriteWholeFile(blocks_ + "/usage", std::string(24, '\0'));
  Keep(*Object(Open(6 * kFileBytes), "\"two\""), bytes);
  EXPECT_FALSE(stdfs::exists(blocks_ + "/.new-1-2"));
  EXPECT_EQ(ReadWholeFile(blocks_ + "/notes"), "of somebody");
  EXPECT_LE(BytesOfFiles(), 6 * kFileBytes + 100);
  EXPECT_TRUE(Object(Open(), "\"two\"")->Has(4 * kMiB));
}

TEST_F(DiskCacheTest, TheBoundHoldsForSeveralProcesses) {
  constexpr std::uint64_t kMost = 8 * kFileBytes;
  constexpr std::uint64_t kBytes = 24 * kMiB;
  ASSERT_NE(Open(kMost), nullptr);
  std::vector<pid_t> children;
  for (int n = 0; n < 3; ++n) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const auto cache = Open(kMost);
      const auto name = [&](std::uint64_t number) {
        return DiskCache::BlockName{std::string(64, char('a' + n)), number, kMiB};
      };
      const auto bytes = BytesOfSeed(n, kBytes);
      std::vector<std::byte> out(kMiB);
      bool good = true;
      for (std::uint64_t at = 0; at < kBytes; at += kMiB) {
        cache->Write(name(at / kMiB), bytes.data() + at);
        for (std::uint64_t back = 0; back <= at; back += kMiB) {
          const bool read = cache->Read(name(back / kMiB), {0, kMiB}, out.data());
          good = good && (!read || std::memcmp(out.data(), bytes.data() + back, kMiB) == 0);
        }
      }
      _exit(!good ? 2 : cache->Has(name(kBytes / kMiB - 1)) ? 0 : 1);
    }
    children.push_back(child);
  }
  std::uint64_t most = 0;
  int good = 0;
  for (std::size_t left = children.size(); left > 0;) {
    std::uint64_t sum = 0;
    for (const auto& entry : stdfs::directory_iterator(blocks_)) {
      std::error_code gone;
      const std::uint64_t size = entry.file_size(gone);
      if (!gone && entry.path().filename() != "usage") sum += size;
    }
    most = std::max(most, sum);
    int status = 0;
    if (waitpid(-1, &status, WNOHANG) <= 0) continue;
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) != 2) << status;  // 2: other bytes.
    good += status == 0;
    --left;
  }
  EXPECT_GE(good, 1);  // The last one to end has its last block.
  EXPECT_LE(BytesOfFiles(), kMost);
  EXPECT_GT(most, kMost / 2);
  EXPECT_TRUE(warnings_.empty()) << warnings_.at(0);
}

TEST_F(DiskCacheTest, AFullDiskEndsWritingWithOneWarning) {
  const auto cache = Open();
  const auto bytes = BytesOfSeed(1);
  Keep(*Object(cache), bytes);
  EXPECT_TRUE(InForkedChild([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{500'000, 500'000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    for (const std::uint64_t number : {0, 1}) {
      cache->Write({std::string(64, 'a'), number, kMiB}, bytes.data());
      if (cache->Has({std::string(64, 'a'), number, kMiB}) || cache->writes()) return false;
    }
    return warnings_.size() == 1 && warnings_[0].find("keeps nothing more") != std::string::npos &&
           warnings_[0].find("too large") != std::string::npos &&
           Reads(*Object(cache), bytes, {0, kSize});
  }));
  EXPECT_EQ(Files().size(), 6u);  // Nothing is left of what could not be written.
}

TEST_F(DiskCacheTest, AForkedChildWritesWithAThreadOfItsOwn) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer lets forked children start no threads";
  const auto cache = Open();
  Keep(*Object(cache), BytesOfSeed(1));
  EXPECT_TRUE(InForkedChild([&] {
    Keep(*Object(cache, "\"two\""), BytesOfSeed(2));
    return Reads(*Object(cache, "\"two\""), BytesOfSeed(2), {0, kSize});
  }));
  EXPECT_TRUE(Reads(*Object(cache, "\"two\""), BytesOfSeed(2), {0, kSize}));
}

TEST_F(DiskCacheTest, ARemovedDirectoryEndsWritingWithOneWarning) {
  const auto object = Object(Open());
  const auto bytes = BytesOfSeed(1);
  Keep(*object, bytes);
  stdfs::remove_all(directory_);
  EXPECT_FALSE(Reads(*object, bytes, {0, kMiB}));
  Keep(*object, bytes);
  Keep(*object, bytes);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_THAT(warnings_[0], HasSubstr("its directory was removed"));
  EXPECT_FALSE(stdfs::exists(directory_));
}

TEST_F(DiskCacheTest, TooMuchAtOnceIsDropped) {
  const auto object = Object(Open(), "\"one\"", 65 * kMiB);
  const auto bytes = BytesOfSeed(1, 65 * kMiB);
  Keep(*object, bytes);
  EXPECT_TRUE(Files().empty());
  object->Keep({0, 64 * kMiB}, bytes.data(), nullptr);
  FinishDiskCaches();
  EXPECT_EQ(Files().size(), 64u);
}

TEST_F(DiskCacheTest, TheEnvironmentNamesTheCache) {
  const auto with = [&](const char* directory, const char* size) {
    setenv("TENSORMOUNT_CACHE", directory, 1);
    setenv("TENSORMOUNT_CACHE_SIZE", size, 1);
    auto cache = DiskCacheOfEnvironment();
    unsetenv("TENSORMOUNT_CACHE");
    unsetenv("TENSORMOUNT_CACHE_SIZE");
    return cache;
  };
  EXPECT_EQ(DiskCacheOfEnvironment(), nullptr);
  EXPECT_EQ(with("none", ""), nullptr);
  EXPECT_FALSE(stdfs::exists(directory_));
  const auto cache = with(directory_.c_str(), "20MiB");
  ASSERT_NE(cache, nullptr);
  EXPECT_EQ(cache, with(directory_.c_str(), "20MiB"));
  EXPECT_TRUE(warnings_.empty());
  for (int turn = 0; turn < 2; ++turn) {
    EXPECT_EQ(with(directory_.c_str(), "15MiB"), nullptr);
    EXPECT_EQ(with(directory_.c_str(), "much"), nullptr);
    EXPECT_EQ(with("/proc/none/there", ""), nullptr);
  }
  ASSERT_EQ(warnings_.size(), 3u);
  EXPECT_THAT(warnings_[0], HasSubstr("must be at least 16MiB; no cache is used"));
  EXPECT_THAT(warnings_[1], HasSubstr("\"much\": not a number of bytes"));
  EXPECT_THAT(warnings_[2], HasSubstr("/proc/none"));
}

}  // namespace
}  // namespace tensormount
