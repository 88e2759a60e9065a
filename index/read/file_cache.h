// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_FILE_CACHE_H_
#define TENSORMOUNT_INDEX_READ_FILE_CACHE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/file_system.h"
#include "base/spare_descriptors.h"
#include "index/read/checkpoint.h"
#include "index/read/foreign_file.h"
#include "index/read/proven_ranges.h"
#include "index/records/extent_lookup.h"
#include "index/records/lru_cache.h"

// The caches of an opened checkpoint have weights: 1 for each open file, so that the number of
// files is bounded; bytes for lookups (16 MiB), leaves and pages (8 MiB each). An evicted value
// lives as long as a reader has a shared_ptr to it.
namespace tensormount {

// A data file or manifest that is open for reading, with one mapping for all readers. Closed and
// unmapped when the cache and the last reader have released it. Thread-safe.
class OpenDataFile {
 public:
  explicit OpenDataFile(std::unique_ptr<File> file, bool foreign)
      : file_(std::move(file)), foreign_(foreign) {}
  ~OpenDataFile();
  OpenDataFile(const OpenDataFile&) = delete;
  OpenDataFile& operator=(const OpenDataFile&) = delete;

  File& file() { return *file_; }
  // State of this file according to `info`, a stat result of this file.
  FileStamp StampOf(const FileInfo& info) const {
    return foreign_ ? FileStamp::OfForeignFile(info) : FileStamp::OfStoreFile(info);
  }

  // The mapping of the whole file, read-only, if the file now has bytes [0, end). Null if the file
  // is shorter or cannot be mapped (no descriptor, mmap refused). A truncation during a read of the
  // mapping raises SIGBUS; tensormount never truncates sealed files (docs/format.md, "Sealed
  // files").
  const std::byte* MappingTo(std::uint64_t end);
  // Whether mincore is known to be accurate for this file (base/mapping.h). Valid after a
  // successful MappingTo.
  bool mincore_is_true() const { return mincore_is_true_; }

 private:
  std::unique_ptr<File> file_;
  // Whether another program wrote the file. Hard links to such a file are not made by saves, so the
  // stamp ignores them.
  const bool foreign_;
  // Guards the mapping's members below. The file itself is thread-safe.
  std::mutex mutex_;
  void* map_ = nullptr;
  std::size_t map_bytes_ = 0;
  bool map_failed_ = false;
  std::atomic<bool> mincore_is_true_{false};
};

// Leaf hashes of one stored range, proved by its root. `root` and `length` identify the range. The
// cache's key cannot, because it is a position in a manifest, which a damaged index may give to two
// ranges.
struct ProvenLeaves {
  Hash128 root;
  std::uint64_t length = 0;
  std::vector<Hash128> leaves;
  bool paged = false;  // Whether the range's page hashes follow its leaf hashes.
};

// Page hashes of some neighbouring leaves of a range. `root` and `length` identify the range, as in
// ProvenLeaves.
struct PageBlocks {
  Hash128 root;
  std::uint64_t length = 0;
  // kPageBlockHashes hashes for each leaf; fewer for the last leaf of the range.
  std::vector<Hash128> hashes;
  // For each leaf, whether its page hashes match their checksum.
  std::vector<bool> good;
};

// Serves small reads in file order (thousands of tensors of some hundred bytes) from windows of 64
// KiB. Used only while a caller asks for it (OpenedCheckpoint::ReadInOrder), because a window does
// not show later changes of the file. Thread-safe.
class ReadAhead {
 public:
  static constexpr std::size_t kMostSmall = 4096;
  static constexpr std::size_t kWindowBytes = 64 * 1024;
  static constexpr std::size_t kMostFiles = 64;

  bool on() const { return users_.load(std::memory_order_relaxed) > 0; }
  void Begin() { users_.fetch_add(1, std::memory_order_relaxed); }
  void End();
  // Like File::ReadAt. *read grows by the number of bytes that were read from storage.
  Result<std::size_t> ReadAt(const std::shared_ptr<OpenDataFile>& file, std::uint64_t offset,
                             void* out, std::size_t size, std::uint64_t* read);

 private:
  struct Window {
    std::weak_ptr<OpenDataFile> file;  // Does not keep the file open.
    std::uint64_t next = 0;            // End of the last read.
    std::uint64_t begin = 0;
    std::vector<std::byte> bytes;
  };
  std::atomic<int> users_{0};
  std::mutex mutex_;
  std::vector<Window> windows_;  // Most recently used first.
};

// The bounded caches of an opened checkpoint. Each cache has its own lock. A thread holds at most
// one of these locks at a time.
struct OpenedCheckpoint::Files {
  Files(FileSystem& f, std::size_t max_open) : fs(f), open(max_open) {}

  // Returns the cached file `path`, or opens it by `opener`.
  Result<std::shared_ptr<OpenDataFile>> Open(
      const std::string& path, bool foreign,
      const std::function<Result<std::unique_ptr<File>>()>& opener);
  Result<std::shared_ptr<OpenDataFile>> Open(const OpenedCheckpoint& checkpoint,
                                             std::uint32_t file) {
    return Open(checkpoint.FilePath(file), checkpoint.IsForeignFile(file),
                [&] { return checkpoint.OpenFile(file); });
  }

  FileSystem& fs;
  LruCache<std::string, OpenDataFile> open;
  ReadAhead ahead;
  // Closes cached files without readers when the process runs out of descriptors.
  const SpareDescriptors spare{[this](bool may_wait) { open.Clear(may_wait); }};
  // States of foreign files since their first use through this checkpoint.
  ForeignChanges changes;
  // Lookups by tensor ordinal, with pending chunks located. Cached because a mount uses a tensor's
  // lookup thousands of times.
  LruCache<std::uint32_t, const ExtentLookup> lookups{std::size_t{16} << 20};
  // Leaf hashes of ranges. The key combines the number of the manifest and the range's first leaf.
  LruCache<std::uint64_t, const ProvenLeaves> leaves{std::size_t{8} << 20};
  // Page hashes. The key combines the number of the manifest and the position of the first of these
  // page hashes in it.
  LruCache<std::uint64_t, const PageBlocks> pages{std::size_t{8} << 20};
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_FILE_CACHE_H_
