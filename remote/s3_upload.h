// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_S3_UPLOAD_H_
#define TENSORMOUNT_REMOTE_S3_UPLOAD_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/object_writer.h"
#include "remote/s3_writer.h"

namespace tensormount {

// An object that goes up in parts.
class S3Upload : public ObjectUpload {
 public:
  S3Upload(S3Writer& writer, S3Requests& requests, std::string path, S3Requests::Location at,
           std::uint64_t size, PutOptions options);
  ~S3Upload() override;

  // Creates the upload, or takes up the one of `options.continued`.
  Status Begin();
  Status Add(const std::byte* data, std::size_t size) override;
  Result<std::string> Finish() override;
  std::uint64_t bytes_kept() const override { return kept_; }

 private:
  struct Part {
    std::string etag;
    std::string checksum;  // SHA-256 in base64; empty: the server does not tell.
    std::uint64_t size = 0;
    std::shared_ptr<HttpCall> call;  // Null: it is there.
  };
  Status Create();
  Status ReadParts();
  Status SendPart();
  Status AwaitUntil(std::size_t most);
  Result<std::string> Complete();
  Result<std::string> AsFound();

  S3Writer& writer_;
  S3Requests& requests_;
  const std::string path_;
  const S3Requests::Location at_;
  const std::uint64_t size_;
  const PutOptions options_;
  const std::uint64_t part_bytes_;
  std::string id_;
  bool with_checksums_ = true;
  std::uint64_t added_ = 0;
  std::uint64_t kept_ = 0;
  std::string buffer_;
  std::map<int, Part> there_;  // Parts that the server had at the begin, by number.
  std::vector<Part> parts_;    // In order; the first has number 1.
  std::size_t awaited_ = 0;    // Of parts_.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_S3_UPLOAD_H_
