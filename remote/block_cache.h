// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_BLOCK_CACHE_H_
#define TENSORMOUNT_REMOTE_BLOCK_CACHE_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "base/byte_range.h"
#include "base/file_system.h"
#include "remote/disk_cache.h"
#include "remote/http_client.h"

namespace tensormount {

// An object on a server as it was when it was opened.
struct RemoteObject {
  std::string path;  // As the user typed it, for messages.
  std::string url;
  std::vector<std::string> headers;  // Of each request, without If-Match.
  std::function<Status(const HttpRequest&, std::vector<std::string>&)> sign;
  // Renews what `sign` uses, if need be; called before each request, and may wait. May be empty.
  std::function<void()> prepare;
  bool follow_redirects = true;
  std::string region;  // Of S3.
  std::uint64_t size = 0;
  // What tells that the object is unchanged: its ETag, or Last-Modified if there is none.
  std::string etag;
  std::string last_modified;
  std::string linked_etag;            // Of the object behind the hub's redirects.
  std::int64_t modified_seconds = 0;  // Last-Modified since 1970; 0: unknown.
  std::string begin;                  // Its first bytes.
  // Its blocks on disk; null: it has none. RemoteFile looks there; what is read from requests is
  // kept there.
  std::shared_ptr<const CachedObject> disk;
  std::uint64_t number = 0;  // Another one for each object that was opened.

  // A request for some of its bytes, which fails if the object has changed. Call `prepare` before.
  HttpRequest RequestFor(ByteRange range, std::span<std::byte> into) const;
};

// The error of an answer to RequestFor; ok: the bytes are there.
Status CheckAnswer(const RemoteObject& object, const HttpCall& call);

// An object was replaced: what servers said before this moment is forgotten (RemoteFileSystem).
void ForgetWhatIsKnown();
bool IsForgotten(std::chrono::steady_clock::time_point when);

// Blocks of remote objects in memory, and requests for blocks that are on their way. One for each
// process, at most kMostBytes. Thread-safe.
class BlockCache {
 public:
  static constexpr std::uint64_t kBlockBytes = 64 << 10;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{256} << 20;
  // A request is for consecutive blocks.
  static constexpr std::uint64_t kRequestBytes = std::uint64_t{8} << 20;

  static BlockCache& Get();
  BlockCache() = default;

  // Requests those blocks of the range that are not there. `wait`: waits for room, if the blocks on
  // their way fill the cache; otherwise begins as many requests as there is room for.
  Status Start(const std::shared_ptr<const RemoteObject>& object, ByteRange range, bool wait);
  // Copies the range to `out`, and requests and awaits what is missing, and `ahead` bytes more
  // after it, which it does not await.
  Status Read(const std::shared_ptr<const RemoteObject>& object, ByteRange range, std::byte* out,
              std::uint64_t ahead, const ReadLimits& limits = {});
  // Whether the block of this byte is there or on its way.
  bool Has(const RemoteObject& object, std::uint64_t offset) {
    return HasAll(object, {offset, offset + 1});
  }
  // Whether all of the range is there or on its way.
  bool HasAll(const RemoteObject& object, ByteRange range);

 private:
  struct Request;  // Some consecutive blocks, which one answer brings.
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // Object and number of the block.
  // These are called with mutex_ locked. `started`: gets the requests that were begun; may be null.
  Status StartLocked(const std::shared_ptr<const RemoteObject>& object, ByteRange range,
                     bool whatever_the_room, std::vector<std::shared_ptr<Request>>* started);
  bool MakeRoom(std::uint64_t bytes);
  // The request that has or brings a block; null: none, or one that failed, which is forgotten.
  std::shared_ptr<Request> Find(const Key& key);
  void Forget(const std::shared_ptr<Request>& request);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::shared_ptr<Request>> blocks_;
  std::list<std::shared_ptr<Request>> by_use_;  // The one that was used last is the first.
  std::uint64_t bytes_ = 0;                     // Of all requests.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_BLOCK_CACHE_H_
