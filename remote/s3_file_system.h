// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_S3_FILE_SYSTEM_H_
#define TENSORMOUNT_REMOTE_S3_FILE_SYSTEM_H_

#include <string>

#include "remote/remote_file_system.h"
#include "remote/s3_requests.h"
#include "remote/s3_writer.h"

namespace tensormount {

// s3://bucket/key, and gs://bucket/key.
class S3FileSystem : public RemoteFileSystem {
 public:
  ObjectWriter* object_writer() override { return &writer_; }

 protected:
  Result<RemoteObject> ObjectAt(const std::string& path) override;
  Result<std::optional<Entries>> EntriesOf(const std::string& path) override;
  Status FailureOf(const std::string& path, const HttpResponse& response) override;
  bool AsksAgain(const std::string& path, const RemoteObject& asked,
                 const HttpResponse& response) override;
  std::string RootOf(const std::string& path) const override;

 private:
  S3Requests requests_;
  S3Writer writer_{requests_};
};

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_S3_FILE_SYSTEM_H_
