// SPDX-License-Identifier: Apache-2.0
#include "base/fetch_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file_system.h"
#include "base/mapping.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

TEST(FetchPages, BringsTheRangeAndNoOtherUnit) {
  constexpr std::uint64_t kSize = 4 * kFetchUnitBytes + 12345;
  TempDir dir;
  ASSERT_OK(HostFileSystem().WriteFileDurably(dir.Join("f"), std::string(kSize, 'x')));
  const int fd = open(dir.Join("f").c_str(), O_RDONLY);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  const auto* const map =
      static_cast<const std::byte*>(mmap(nullptr, kSize, PROT_READ, MAP_SHARED, fd, 0));
  ASSERT_NE(map, MAP_FAILED);
  if (InMemory(map, 1)) GTEST_SKIP() << "files of this file system cannot leave the page cache";
  if (!FetchPages(fd, kFetchUnitBytes, kFetchUnitBytes)) GTEST_SKIP() << "an older kernel";
  EXPECT_TRUE(InMemory(map + kFetchUnitBytes, kFetchUnitBytes));
  EXPECT_FALSE(InMemory(map, 1));
  EXPECT_FALSE(InMemory(map + 2 * kFetchUnitBytes, 1));
  EXPECT_TRUE(FetchPages(fd, 4 * kFetchUnitBytes, 12345));
  EXPECT_TRUE(InMemory(map + 4 * kFetchUnitBytes, 12345));
  EXPECT_FALSE(InMemory(map + 3 * kFetchUnitBytes, 1));
  munmap(const_cast<std::byte*>(map), kSize);
  close(fd);
}

TEST(FetchPages, RefusesWhatIsNotThere) {
  TempDir dir;
  ASSERT_OK(HostFileSystem().WriteFileDurably(dir.Join("f"), "short"));
  const int fd = open(dir.Join("f").c_str(), O_RDONLY);
  ASSERT_GE(fd, 0);
  EXPECT_FALSE(FetchPages(fd, kFetchUnitBytes, kFetchUnitBytes));  // Behind the end.
  EXPECT_FALSE(FetchPages(fd, 0, 0));
  EXPECT_FALSE(FetchPages(-1, 0, 1));
  close(fd);
}

}  // namespace
}  // namespace tensormount
