// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_DISK_CACHE_H_
#define TENSORMOUNT_REMOTE_DISK_CACHE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "base/byte_range.h"

namespace tensormount {

// Blocks of remote objects in files of a directory, which several processes may share.
//
//   DIR/blocks/KEY-BLOCK   one block of 1 MiB, or the last one of an object (BlockHeader)
//   DIR/blocks/.new-...    a block that is being written; renamed when it is complete
//   DIR/blocks/usage       how many bytes the files have; locked by whoever adds a block
//
// A block proves itself: its file has its key and a hash of each 64 KiB. So nothing is synced, and
// a block that is cut off or damaged is removed and counts as missing. The time of a file's last
// use is its mtime; the files that were used the longest time ago are removed for new ones.
// After an error of the disk the cache is off for the rest of the process, with one warning; it
// never fails a read. Thread-safe, also in a forked child.
class DiskCache : public std::enable_shared_from_this<DiskCache> {
 public:
  static constexpr std::uint64_t kBlockBytes = std::uint64_t{1} << 20;
  static constexpr std::uint64_t kDefaultMostBytes = std::uint64_t{10} << 30;
  // Of the options: less would not have a request's worth of blocks.
  static constexpr std::uint64_t kLeastMostBytes = std::uint64_t{16} << 20;

  // Creates `directory` and those above it with mode 0700. Fails if it is a symbolic link, belongs
  // to another user, or may be written by others. `most_bytes`: of all files together.
  static Result<std::shared_ptr<DiskCache>> Open(const std::string& directory,
                                                 std::uint64_t most_bytes);
  ~DiskCache();
  DiskCache(const DiskCache&) = delete;
  DiskCache& operator=(const DiskCache&) = delete;

  // The block's file name is made of these.
  struct BlockName {
    std::string key;  // 64 hexadecimal digits.
    std::uint64_t number = 0;
    std::uint64_t bytes = 0;  // kBlockBytes, or fewer for the last block of an object.
  };
  bool Has(const BlockName& name) const;
  // Begins to read the block from disk.
  void StartReading(const BlockName& name) const;
  // Copies a part of the block. False: the block is not there, or is damaged and was removed; `out`
  // may have been changed.
  bool Read(const BlockName& name, ByteRange part, std::byte* out);
  // Whether it still keeps blocks.
  bool writes() const { return writes_.load(); }
  // Writes a block, and removes others for it if need be. It may wait for the disk and for other
  // processes; CachedObject::Keep does not.
  void Write(const BlockName& name, const std::byte* bytes);

 private:
  DiskCache(std::string path, int blocks, std::uint64_t most_bytes)
      : path_(std::move(path)), blocks_(blocks), most_bytes_(most_bytes) {}
  std::string FileName(const BlockName& name) const;
  // Makes room for a file of this size and counts it. False: no room.
  bool Reserve(std::uint64_t bytes);
  // Removes files until at most `most` bytes are left; returns how many are.
  Result<std::uint64_t> Evict(std::uint64_t most);
  void Remove(const BlockName& name, const char* why);
  void StopWriting(int error);
  void StopReading(int error);

  const std::string path_;
  const int blocks_;  // Descriptor of DIR/blocks.
  const std::uint64_t most_bytes_;
  std::atomic<bool> reads_{true};
  std::atomic<bool> writes_{true};
  std::atomic<bool> told_of_damage_{false};
};

// The blocks of one version of an object. Thread-safe.
class CachedObject {
 public:
  // `url`: its signature does not count. `identity`: the ETag, which changes with the bytes. Null
  // if there is no cache, no identity, or no bytes.
  static std::shared_ptr<const CachedObject> Make(std::shared_ptr<DiskCache> cache,
                                                  std::string_view url, std::string_view identity,
                                                  std::uint64_t size);

  // Whether the block of this byte is there. It may be gone, or prove to be damaged, when it is
  // read.
  bool Has(std::uint64_t offset) const { return cache_->Has(NameAt(offset)); }
  void StartReading(std::uint64_t offset) const { cache_->StartReading(NameAt(offset)); }
  // Copies a range that lies within one block. False: not there; `out` may have been changed.
  bool Read(ByteRange range, std::byte* out) const;
  // The blocks of the range that are not there, joined where they follow each other.
  std::vector<ByteRange> Missing(ByteRange range) const;
  // Has the whole blocks of the range written by a thread of this process, unless it has too much
  // to do already. Bytes that have no owner are copied.
  void Keep(ByteRange range, const std::byte* bytes, std::shared_ptr<const void> owner) const;

 private:
  CachedObject(std::shared_ptr<DiskCache> cache, std::string key, std::uint64_t size)
      : cache_(std::move(cache)), key_(std::move(key)), size_(size) {}
  DiskCache::BlockName NameAt(std::uint64_t offset) const;

  const std::shared_ptr<DiskCache> cache_;
  const std::string key_;
  const std::uint64_t size_;
};

// TENSORMOUNT_CACHE (a directory; "none" or empty: no cache) and TENSORMOUNT_CACHE_SIZE.
struct DiskCacheSettings {
  std::string directory;
  std::uint64_t most_bytes = DiskCache::kDefaultMostBytes;

  // kInvalidArgument: a size that is none, or is less than kLeastMostBytes.
  static Result<DiskCacheSettings> Parse(std::string_view directory, std::string_view size);
};

// The cache that the environment names, the same object for equal settings; null: none. A cache
// that cannot be used is a warning, once.
std::shared_ptr<DiskCache> DiskCacheOfEnvironment();

// Waits until this process has written what it keeps in caches, for a few seconds at most. exit()
// does it, _exit() does not.
void FinishDiskCaches();

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_DISK_CACHE_H_
