// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_REMOTE_FILE_H_
#define TENSORMOUNT_REMOTE_REMOTE_FILE_H_

#include <atomic>
#include <memory>
#include <string>

#include "base/read_only.h"
#include "remote/block_cache.h"

namespace tensormount {

// An object of a server, open for reading. Long reads go straight to the caller's memory, in parts
// that are requested together; short ones through the BlockCache. Both look into the cache on disk
// first, if there is one. After the object was replaced every read that asks the server fails with
// kStale.
class RemoteFile : public ReadOnlyFile {
 public:
  explicit RemoteFile(std::shared_ptr<const RemoteObject> object) : object_(std::move(object)) {}

  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    return ReadAtWithin(offset, out, size, offset);
  }
  Result<std::size_t> ReadAtWithin(std::uint64_t offset, void* out, std::size_t size,
                                   std::uint64_t end) override;
  Status ReadMany(std::span<const ReadRun> runs, const ReadLimits& limits) override;
  void StartReading(std::uint64_t offset, std::uint64_t size) override;
  std::optional<bool> IsCached(std::uint64_t offset) override;
  bool Fetch(std::uint64_t offset, std::uint64_t size) override;
  Result<FileInfo> Stat() override { return InfoOf(*object_); }
  const std::string& path() const override { return object_->path; }

  static FileInfo InfoOf(const RemoteObject& object);

 private:
  // Reads ahead up to `end`, if reads follow each other.
  Status ReadSmall(ByteRange range, std::byte* out, std::uint64_t end, const ReadLimits& limits);
  // Reads runs, sorted by offset, from the caches in memory and on disk; what neither has is
  // requested in whole blocks. Only with object_->disk.
  Status ReadBlocks(std::span<const ReadRun> runs, const ReadLimits& limits);
  // Requests what neither cache has, and awaits nothing. `wait` as in BlockCache::Start.
  Status StartMissing(ByteRange range, bool wait);

  const std::shared_ptr<const RemoteObject> object_;
  // Where the last short read ended, and how many bytes were read one after the other.
  std::atomic<std::uint64_t> last_end_{~std::uint64_t{0}};
  std::atomic<std::uint64_t> in_a_row_{0};
  std::atomic<int> misses_{0};
};

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_REMOTE_FILE_H_
