// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_S3_FILE_SYSTEM_H_
#define TENSORMOUNT_REMOTE_S3_FILE_SYSTEM_H_

#include <map>
#include <mutex>
#include <string>

#include "remote/aws_credentials.h"
#include "remote/remote_file_system.h"

namespace tensormount {

// s3://bucket/key, and gs://bucket/key through the interface of Google Cloud Storage for S3.
// Requests are signed if there are credentials (AwsCredentialChain).
//
// The endpoint: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, or endpoint_url of the profile, with the
// bucket in the path; otherwise Amazon's of the region, with the bucket in the host unless its name
// has a dot. The region: AWS_REGION, AWS_DEFAULT_REGION, the profile, us-east-1; a bucket that says
// to be in another one is asked there.
class S3FileSystem : public RemoteFileSystem {
 public:
 protected:
  Result<RemoteObject> ObjectAt(const std::string& path) override;
  Result<std::optional<Entries>> EntriesOf(const std::string& path) override;
  Status FailureOf(const std::string& path, const HttpResponse& response) override;
  bool AsksAgain(const std::string& path, const RemoteObject& asked,
                 const HttpResponse& response) override;
  std::string RootOf(const std::string& path) const override;

 private:
  struct Location {
    std::string bucket;
    std::string key;
    bool google = false;
  };
  static Result<Location> LocationOf(const std::string& path);
  // The URL of a key, or of the bucket if the key is empty, and how requests for it are signed.
  Result<RemoteObject> RequestsFor(const Location& at, const std::string& query);
  std::string RegionOf(const Location& at, const AwsSettings& settings);
  // Whether the answer says that the bucket is in another region than `asked`; it is then known.
  bool LearnsRegion(const Location& at, const std::string& asked, const HttpResponse& response);

  struct Regions {
    std::mutex mutex;
    std::map<std::string, std::string> by_bucket;  // "s3://BUCKET"
  };
  PerProcessMember<Regions> regions_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_S3_FILE_SYSTEM_H_
