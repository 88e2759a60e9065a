// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_S3_REQUESTS_H_
#define TENSORMOUNT_REMOTE_S3_REQUESTS_H_

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "base/per_process.h"
#include "remote/aws_credentials.h"
#include "remote/block_cache.h"
#include "remote/http_client.h"

namespace tensormount {

// Requests to S3, and to Google Cloud Storage through its interface for S3: where a bucket is
// asked, how requests are signed, and what its answers say.
//
// The endpoint: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, or endpoint_url of the profile, with the
// bucket in the path; otherwise Amazon's of the region, with the bucket in the host unless its name
// has a dot. The region: AWS_REGION, AWS_DEFAULT_REGION, the profile, us-east-1; a bucket that says
// to be in another one is asked there. Requests are signed if there are credentials
// (AwsCredentialChain). Thread-safe.
class S3Requests {
 public:
  struct Location {
    std::string bucket;
    std::string key;
    bool google = false;
  };
  // How long a server may work on the end of an upload, or on a copy.
  static constexpr std::chrono::minutes kLateAnswer{10};

  // Whether requests to the bucket are signed now.
  static bool Signs(const Location& at);
  // The parts of "s3://BUCKET/KEY" or "gs://BUCKET/KEY".
  static Result<Location> LocationOf(const std::string& path);
  // "s3://BUCKET/", or "gs://BUCKET/".
  static std::string RootOf(const Location& at);

  // The URL of a key, or of the bucket if the key is empty, and how requests for it are signed.
  // `query` is encoded.
  Result<RemoteObject> ObjectAt(const Location& at, const std::string& query);
  // Whether the answer says that the bucket is in another region than `asked`; it is then known.
  bool LearnsRegion(const Location& at, const std::string& asked, const HttpResponse& response);
  // The error for an answer that is none of those that were expected.
  static Status FailureOf(const std::string& path, const HttpResponse& response);

  // Sends a request, a second time if the bucket is in another region, and waits for the answer,
  // which may have any code. Of `request`, url and sign are set here.
  Result<std::shared_ptr<HttpCall>> Ask(const Location& at, const std::string& query,
                                        HttpRequest request, const ReadLimits& limits = {});
  // Starts such a request and does not wait; for a bucket that has answered before.
  Result<std::shared_ptr<HttpCall>> Start(const Location& at, const std::string& query,
                                          HttpRequest request);

  // Asks for a listing in pages. `query`: what chooses it. `page` is called with each page's XML
  // and answer, and returns the query for the next page; empty: it was the last. `root` is the name
  // of the listing's element.
  using Page = std::function<Result<std::string>(const std::string& xml, const HttpResponse&)>;
  Status List(const std::string& path, const Location& bucket, std::string_view root,
              const std::string& query, const Page& page);

 private:
  std::string RegionOf(const Location& at, const AwsSettings& settings);

  struct Regions {
    std::mutex mutex;
    std::map<std::string, std::string> by_bucket;  // By RootOf.
  };
  PerProcessMember<Regions> regions_;
};

// For List: the query for what follows a page of objects; empty: it was the last.
Result<std::string> NextPageOfObjects(const std::string& path, const std::string& xml,
                                      const std::string& query);
// An ETag with its quotes. Servers exist that leave them out in some answers.
std::string QuotedEtag(std::string_view etag);
// A key of a listing: decoded if the listing says that it is encoded ("encoding-type=url").
std::string KeyOfListing(std::string_view element, std::string_view name, bool encoded);

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_S3_REQUESTS_H_
