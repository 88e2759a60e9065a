// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_OBJECT_WRITER_H_
#define TENSORMOUNT_BASE_OBJECT_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensormount/status.h"

// Changes in a bucket of objects (S3). An object appears as a whole or not at all, but it cannot be
// renamed, locked or linked, so stores in buckets are changed by this interface and not by that of
// FileSystem (docs/remote.md, "Writing").

namespace tensormount {

struct ObjectInfo {
  std::string path;  // As on the file system, with scheme and bucket.
  std::uint64_t size = 0;
  std::string etag;  // Equal ETags: equal bytes. Empty: the server sends none.
  // By the clock of the server, in seconds since 1970.
  std::int64_t modified_seconds = 0;
  std::string mark;  // PutOptions::mark. Listings do not have it.
};

struct ObjectListing {
  std::vector<ObjectInfo> objects;  // Sorted by path.
  std::int64_t now = 0;             // The clock of the server, in seconds since 1970.
};

// An upload in parts that was begun and not ended; its parts take space, and no listing of objects
// has it.
struct UnfinishedUpload {
  std::string path;
  std::string id;
  std::int64_t begun_seconds = 0;
};

struct PutOptions {
  // Fails with kAlreadyExists if there is an object. The failure may be due to an earlier try of
  // the same call, whose answer was lost: look at the object.
  bool if_absent = false;
  // Fails with kStale unless the object has this ETag. Empty: no such condition.
  std::string if_match;
  // Sends one request only. Otherwise one whose answer is lost is sent again, for minutes.
  bool once = false;
  // A short text that is kept with the object, of letters, digits and "-.:".
  std::string mark;
  // UnfinishedUpload::id of an upload of the same bytes to this path, whose parts are used as far
  // as their SHA-256, as the server tells it, is the same. Empty: none.
  std::string continued;
};

// A new object on its way. For one thread. Destroyed before Finish, it leaves the parts that were
// sent, for the next upload of the same object.
class ObjectUpload {
 public:
  virtual ~ObjectUpload() = default;
  // The next bytes. Waits while too much is on its way. kDataLoss: more than the announced size.
  virtual Status Add(const std::byte* data, std::size_t size) = 0;
  // After the last byte. Returns the ETag. kAlreadyExists as PutOptions says.
  virtual Result<std::string> Finish() = 0;
  // Bytes of parts that an earlier upload had sent, and that were not sent again.
  virtual std::uint64_t bytes_kept() const = 0;
};

// All calls block, within the deadlines of requests and until CancelScope (base/cancel_scope.h) ends
// them, and are thread-safe. kUnavailable,
// kDeadlineExceeded: whether the change was made is not known.
class ObjectWriter {
 public:
  virtual ~ObjectWriter() = default;

  // Creates or replaces a small object. Returns its ETag.
  virtual Result<std::string> Put(const std::string& path, std::string data,
                                  const PutOptions& options) = 0;
  // Begins an object of `size` bytes.
  virtual Result<std::unique_ptr<ObjectUpload>> Upload(const std::string& path, std::uint64_t size,
                                                       const PutOptions& options) = 0;
  // Lets the server copy an object, with its mark, to a path of the same bucket, as long as it has
  // the ETag of `from`. kAlreadyExists: there is an object (servers that know no such condition
  // replace it). Returns the ETag of the copy. kUnsupported: the object is too large for one
  // request, or the server cannot do it.
  virtual Result<std::string> CopyObject(const ObjectInfo& from, const std::string& to) = 0;
  // nullopt: there is no such object.
  virtual Result<std::optional<ObjectInfo>> InfoOf(const std::string& path) = 0;
  // The bytes of a small object. kNotFound; kDataLoss: it is larger than `most`.
  virtual Result<std::string> Get(const std::string& path, std::uint64_t most,
                                  ObjectInfo* info = nullptr) = 0;
  // All objects below a path, not only those directly in it.
  virtual Result<ObjectListing> ListBelow(const std::string& path) = 0;
  // Deletes objects that still have these ETags, as far as the server knows conditions of deletions;
  // an empty ETag is no condition. Those that are not there count as deleted. Each request is sent
  // once: an answer that comes late must not lead to the deletion of a newer object. Goes on after
  // failures, and returns the first; kStale: an object has another ETag, and stays.
  virtual Status Delete(std::span<const ObjectInfo> objects) = 0;
  // Uploads below a path that were begun and not ended. kUnsupported: the server does not tell.
  // (MinIO tells none: it knows whole keys only.)
  virtual Result<std::vector<UnfinishedUpload>> Unfinished(const std::string& path) = 0;
  // The same for one object.
  virtual Result<std::vector<UnfinishedUpload>> UnfinishedOf(const std::string& path) = 0;
  virtual Status Abort(const UnfinishedUpload& upload) = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_OBJECT_WRITER_H_
