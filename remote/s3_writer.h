// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_S3_WRITER_H_
#define TENSORMOUNT_REMOTE_S3_WRITER_H_

#include "base/object_writer.h"
#include "remote/s3_requests.h"

namespace tensormount {

// Writes objects of buckets. Objects over PartBytes go up in parts, several at a time; each part
// and each small object is signed with the SHA-256 of its bytes, which the server checks.
class S3Writer : public ObjectWriter {
 public:
  explicit S3Writer(S3Requests& requests) : requests_(requests) {}

  Result<std::string> Put(const std::string& path, std::string data,
                          const PutOptions& options) override;
  Result<std::unique_ptr<ObjectUpload>> Upload(const std::string& path, std::uint64_t size,
                                               const PutOptions& options) override;
  Result<std::string> CopyObject(const ObjectInfo& from, const std::string& to) override;
  Result<std::optional<ObjectInfo>> InfoOf(const std::string& path) override;
  Result<std::string> Get(const std::string& path, std::uint64_t most, ObjectInfo* info) override;
  Result<ObjectListing> ListBelow(const std::string& path) override;
  Status Delete(std::span<const ObjectInfo> objects) override;
  Result<std::vector<UnfinishedUpload>> Unfinished(const std::string& path) override;
  Result<std::vector<UnfinishedUpload>> UnfinishedOf(const std::string& path) override;
  Status Abort(const UnfinishedUpload& upload) override;

  // Size of each part but the last, of an object of `size` bytes: 16 MiB, or more where 10,000
  // parts, the most that S3 takes, would not be enough.
  static std::uint64_t PartBytes(std::uint64_t size);

 private:
  // Deletes some objects at the same time.
  Status DeleteSome(std::span<const ObjectInfo> objects, bool conditions);
  Result<std::vector<UnfinishedUpload>> ListUploads(const std::string& path,
                                                    S3Requests::Location at,
                                                    const std::string& prefix);

  S3Requests& requests_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_S3_WRITER_H_
