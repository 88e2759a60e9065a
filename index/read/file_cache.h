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

// Weights: open files count one each, so their number is bounded; lookups, leaves and pages count
// bytes, 16, 8 and 8 MiB. What is dropped lives on while a reader holds it (shared_ptr), so no
// reader is ever told that something was evicted under it.
namespace tensormount {

// A data file or manifest that is open for reading. Thread-safe.
// Closed, and unmapped, when the cache and the last reader have let go of it. The mapping is shared
// by all readers of the file.
class OpenDataFile {
 public:
  explicit OpenDataFile(std::unique_ptr<File> file, bool foreign)
      : file_(std::move(file)), foreign_(foreign) {}
  ~OpenDataFile();
  OpenDataFile(const OpenDataFile&) = delete;
  OpenDataFile& operator=(const OpenDataFile&) = delete;

  File& file() { return *file_; }
  // The state that it is in by `info`, which is of this file.
  FileStamp StampOf(const FileInfo& info) const {
    return foreign_ ? FileStamp::Of(info) : FileStamp::OfOurs(info);
  }

  // All of the file, mapped read-only, where bytes [0, end) are there now; null where there is
  // nothing to map (no descriptor, mmap refused) or the file ends before. A file that somebody
  // truncates while it is read ends the process with SIGBUS (sealed files are never truncated by
  // us; docs/format.md, "Sealed files").
  const std::byte* MappingTo(std::uint64_t end);
  // After MappingTo gave one: whether mincore says of it what is true (base/mapping.h).
  bool mincore_is_true() const { return mincore_is_true_; }

 private:
  std::unique_ptr<File> file_;
  const bool foreign_;  // Another program's: nobody knows who links it.
  // Over the four members of the mapping; the file itself is thread-safe.
  std::mutex mutex_;
  void* map_ = nullptr;
  std::size_t map_bytes_ = 0;
  bool map_failed_ = false;
  std::atomic<bool> mincore_is_true_{false};
};

// Leaf hashes of one chunk, proved by its root.
// `root` and `length` say of which range they are: the key of the cache is a position in a
// manifest, which a damaged index may give to two ranges.
struct ProvenLeaves {
  Hash128 root;
  std::uint64_t length = 0;
  std::vector<Hash128> leaves;
  bool paged = false;  // Page hashes of the range stand behind them.
};

// Page hashes of some neighbouring leaves of a range. `root`, `length`: as above.
struct PageBlocks {
  Hash128 root;
  std::uint64_t length = 0;
  std::vector<Hash128> hashes;  // kPageBlockHashes a leaf, fewer for the last of the range.
  std::vector<bool> good;       // Of each leaf: whether its check holds.
};

// Small reads of files that are read from front to back: thousands of tensors of some hundred bytes
// each are a few reads of 64 KiB then. Only while somebody says that he reads so
// (OpenedCheckpoint::ReadInOrder): what was read ahead may be older than the file. Thread-safe.
class ReadAhead {
 public:
  static constexpr std::size_t kMostSmall = 4096;
  static constexpr std::size_t kWindowBytes = 64 * 1024;
  static constexpr std::size_t kMostFiles = 64;

  bool on() const { return users_.load(std::memory_order_relaxed) > 0; }
  void Begin() { users_.fetch_add(1, std::memory_order_relaxed); }
  void End();
  // As File::ReadAt. *read grows by what was read from storage.
  Result<std::size_t> ReadAt(const std::shared_ptr<OpenDataFile>& file, std::uint64_t offset,
                             void* out, std::size_t size, std::uint64_t* read);

 private:
  struct Window {
    std::weak_ptr<OpenDataFile> file;  // Keeps nothing open.
    std::uint64_t next = 0;            // Where the last read ended.
    std::uint64_t begin = 0;
    std::vector<std::byte> bytes;
  };
  std::atomic<int> users_{0};
  std::mutex mutex_;
  std::vector<Window> windows_;  // The last used one first.
};

// What an opened checkpoint keeps for its readers, all bounded.
// The caches lock for themselves, and no lock of one is held while another is taken.
struct OpenedCheckpoint::Files {
  Files(FileSystem& f, std::size_t max_open) : fs(f), open(max_open) {}

  // Finds `path` open, or opens it by `opener`.
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
  // Where the process runs out of descriptors, files that are only cached are closed.
  const SpareDescriptors spare{[this](bool may_wait) { open.Clear(may_wait); }};
  // Change times of foreign files, as they were when this process saw each first.
  ForeignChanges changes;
  // Where chunks of a tensor are found, with pending ones resolved: what a mount asks for thousands
  // of times.
  LruCache<std::uint32_t, const ExtentLookup> lookups{std::size_t{16} << 20};  // By ordinal.
  // Of ranges, by the manifest and the first leaf in it.
  LruCache<std::uint64_t, const ProvenLeaves> leaves{std::size_t{8} << 20};
  // Likewise, by the first of their hashes.
  LruCache<std::uint64_t, const PageBlocks> pages{std::size_t{8} << 20};
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_FILE_CACHE_H_
