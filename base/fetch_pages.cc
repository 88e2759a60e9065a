// SPDX-License-Identifier: Apache-2.0
// FetchPages of fetch_pages.h.
//
// A page fault in a mapping with MADV_HUGEPAGE reads one huge page (Linux 5.18), whatever the
// read-ahead of the device. Without MADV_RANDOM it reads the next one, too. On a kernel without the
// first, the second would read single pages, so the kernel's version is looked at. The kernel marks
// the page: the next read of it by another mapping or descriptor starts read-ahead behind it. The
// kernel's own read-ahead begins with single pages in each file, and reaches large ones only after
// megabytes.
#include "base/fetch_pages.h"

#include <algorithm>
#include <cstdio>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace tensormount {
namespace {

#ifdef MADV_POPULATE_READ
constexpr int kPopulateRead = MADV_POPULATE_READ;
#else
constexpr int kPopulateRead = 22;  // Kernel newer than the headers.
#endif

bool KernelFetchesHugePages() {
  utsname name{};
  int major = 0;
  int minor = 0;
  if (uname(&name) != 0 || std::sscanf(name.release, "%d.%d", &major, &minor) != 2) return false;
  if (major < 5 || (major == 5 && minor < 18)) return false;
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
  std::uint64_t bytes = 0;
  return (file >> bytes) && bytes == kFetchUnitBytes;  // With pages of 64 KiB it is 512 MiB.
}

// Whether faults in a mapping of the file are served by the kernel's page cache as FetchPages
// expects. Others have faults of their own (Lustre), or nothing to fetch (tmpfs).
bool HasUsualPageCache(int fd) {
  constexpr unsigned long kKnown[] = {
      EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC,  BTRFS_SUPER_MAGIC,     F2FS_SUPER_MAGIC,
      NFS_SUPER_MAGIC,  FUSE_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC,
  };
  struct statfs info {};
  if (fstatfs(fd, &info) != 0) return false;
  return std::ranges::find(kKnown, static_cast<unsigned long>(info.f_type)) != std::end(kKnown);
}

}  // namespace

bool FetchPages(int fd, std::uint64_t begin, std::uint64_t size) {
  static const bool able = KernelFetchesHugePages();
  if (!able || fd < 0 || size == 0 || !HasUsualPageCache(fd)) return false;
  void* const map = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin));
  if (map == MAP_FAILED) return false;
  const bool fetched = madvise(map, size, MADV_HUGEPAGE) == 0 &&
                       madvise(map, size, MADV_RANDOM) == 0 &&
                       madvise(map, size, kPopulateRead) == 0;
  munmap(map, size);
  // Storage that cannot read one sector fails the whole huge page, which then fails the reads of
  // all its bytes.
  if (!fetched) {
    (void)posix_fadvise(fd, static_cast<off_t>(begin), kFetchUnitBytes, POSIX_FADV_DONTNEED);
  }
  return fetched;
}

std::optional<bool> IsPageCached(int fd, std::uint64_t offset) {
  static const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  void* const map =
      mmap(nullptr, page, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(offset / page * page));
  if (map == MAP_FAILED) return std::nullopt;
  unsigned char there = 0;
  const bool known = mincore(map, page, &there) == 0;
  munmap(map, page);
  return known ? std::optional((there & 1) != 0) : std::nullopt;
}

}  // namespace tensormount
