// SPDX-License-Identifier: Apache-2.0
// Requests to buckets and their answers.
#include "remote/s3_requests.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <utility>

#include "remote/sigv4.h"
#include "remote/url.h"
#include "remote/xml_text.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kMostListing = std::uint64_t{16} << 20;
// In addition to the patience of a request.
constexpr std::chrono::seconds kListingPatience{60};

}  // namespace

Result<S3Requests::Location> S3Requests::LocationOf(const std::string& path) {
  Location at;
  at.google = path.starts_with("gs://");
  const std::string rest = path.substr(5);
  const std::size_t slash = rest.find('/');
  at.bucket = rest.substr(0, slash);
  if (slash != std::string::npos) at.key = rest.substr(slash + 1);
  if (at.bucket.empty()) {
    return Status(Code::kInvalidArgument, path + ": names no bucket: s3://BUCKET/KEY");
  }
  for (const char c : at.bucket) {
    if ((c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '.' && c != '_' &&
        (c < 'A' || c > 'Z')) {
      return Status(Code::kInvalidArgument, path + ": is no name of a bucket");
    }
  }
  return at;
}

std::string S3Requests::RootOf(const Location& at) {
  return (at.google ? "gs://" : "s3://") + at.bucket + "/";
}

std::string S3Requests::RegionOf(const Location& at, const AwsSettings& settings) {
  {
    Regions& regions = regions_.Get();
    const std::lock_guard lock(regions.mutex);
    const auto known = regions.by_bucket.find(RootOf(at));
    if (known != regions.by_bucket.end()) return known->second;
  }
  const std::string region = settings.Find({"AWS_REGION", "AWS_DEFAULT_REGION"}, "region");
  if (!region.empty()) return region;
  return at.google ? "auto" : "us-east-1";
}

bool S3Requests::LearnsRegion(const Location& at, const std::string& asked,
                              const HttpResponse& response) {
  std::string region(response.Header("x-amz-bucket-region"));
  if (region.empty()) region = XmlText(response.body, "Region");
  // It becomes a part of a host's name.
  if (region.empty() || region.size() > 64 || region == asked ||
      region.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") != std::string::npos) {
    return false;
  }
  Regions& regions = regions_.Get();
  const std::lock_guard lock(regions.mutex);
  regions.by_bucket[RootOf(at)] = region;
  return true;
}

Result<RemoteObject> S3Requests::ObjectAt(const Location& at, const std::string& query) {
  TENSORMOUNT_RETURN_IF_ERROR(AwsCredentialChain::Get().Current().status());
  const AwsSettings settings = AwsSettings::Read();
  const std::string region = RegionOf(at, settings);
  std::string endpoint = settings.Find({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}, "endpoint_url");
  if (endpoint.empty() && at.google) endpoint = "https://storage.googleapis.com";
  const std::string key = PercentEncode(at.key, true);
  RemoteObject object;
  if (!endpoint.empty()) {
    object.url = WithoutTrailingSlashes(endpoint) + "/" + at.bucket + "/" + key;
  } else if (at.bucket.find('.') == std::string::npos) {
    object.url = "https://" + at.bucket + ".s3." + region + ".amazonaws.com/" + key;
  } else {
    object.url = "https://s3." + region + ".amazonaws.com/" + at.bucket + "/" + key;
  }
  if (!query.empty()) object.url += "?" + query;
  object.region = region;
  object.follow_redirects = false;  // They name another region, which LearnsRegion finds.
  object.sign = [region, at](const HttpRequest& request,
                             std::vector<std::string>& headers) -> Status {
    // On the client's thread, which must not wait.
    if (!Signs(at)) return {};
    const AwsCredentials credentials = AwsCredentialChain::Get().Latest();
    TENSORMOUNT_ASSIGN_OR_RETURN(const Url url, ParseUrl(request.url));
    const std::string hash =
        request.body_sha256.empty() ? Hexadecimal(Sha256(request.body)) : request.body_sha256;
    for (std::string& header : SignV4(request.method, url, hash, credentials, region, "s3",
                                      std::time(nullptr), request.headers)) {
      headers.push_back(std::move(header));
    }
    return {};
  };
  // If this fails, the server says that the credentials have expired.
  object.prepare = [] { (void)AwsCredentialChain::Get().Current(); };
  return object;
}

bool S3Requests::Signs(const Location& at) {
  const AwsCredentials credentials = AwsCredentialChain::Get().Latest();
  // A session of Amazon's is nothing for Google.
  return !credentials.access_key.empty() && (!at.google || credentials.session_token.empty());
}

Status S3Requests::FailureOf(const std::string& path, const HttpResponse& response) {
  Status failure = HttpFailure(path, response);
  std::string text(failure.message());
  const std::string code = XmlText(response.body, "Code");
  // 400, although it is about the credentials.
  if (code == "ExpiredToken" || code == "InvalidToken" || code == "TokenRefreshRequired") {
    failure = Status(Code::kPermissionDenied, text);
  }
  const std::string why = XmlText(response.body, "Message");
  if (!code.empty()) text += " (" + code + (why.empty() ? "" : ": " + why) + ")";
  if (failure.code() == Code::kPermissionDenied) {
    const std::string origin = AwsCredentialChain::Get().Origin();
    text += origin == "none" ? "; the request was not signed: no credentials were found "
                               "(docs/remote.md, \"Credentials\")"
                             : "; signed with credentials of: " + origin;
  }
  return failure.WithMessage(std::move(text));
}

Result<std::shared_ptr<HttpCall>> S3Requests::Ask(const Location& at, const std::string& query,
                                                  HttpRequest request, const ReadLimits& limits) {
  request.follow_redirects = false;
  for (int turn = 0;; ++turn) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const RemoteObject asked, ObjectAt(at, query));
    request.url = asked.url;
    request.sign = asked.sign;
    TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<HttpCall> call,
                                 HttpClient::Get().Run(request, limits));
    const HttpResponse& response = call->response();
    const bool success = response.code >= 200 && response.code <= 299;
    if (success || turn > 0 || !LearnsRegion(at, asked.region, response)) return call;
  }
}

Result<std::shared_ptr<HttpCall>> S3Requests::Start(const Location& at, const std::string& query,
                                                    HttpRequest request) {
  request.follow_redirects = false;
  TENSORMOUNT_ASSIGN_OR_RETURN(const RemoteObject asked, ObjectAt(at, query));
  request.url = asked.url;
  request.sign = asked.sign;
  return HttpClient::Get().Start(std::move(request), std::nullopt);
}

Status S3Requests::List(const std::string& path, const Location& bucket, std::string_view root,
                        const std::string& query, const Page& page) {
  ReadLimits limits;
  limits.deadline = Deadline::After(kListingPatience + HttpClient::Patience());
  std::string asked = query;
  while (!asked.empty()) {
    HttpRequest request;
    request.most_body = kMostListing;
    const Result<std::shared_ptr<HttpCall>> call = Ask(bucket, asked, std::move(request), limits);
    if (!call.ok()) return call.status().WithContext(path);
    const HttpResponse& response = call.value()->response();
    if (response.code != 200) return FailureOf(path, response);
    if (response.body.find("<" + std::string(root)) == std::string::npos) {
      return Status(Code::kUnsupported, path + ": the server's answer is no listing of S3");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string next, page(response.body, response));
    if (next == asked) {
      return Status(Code::kDataLoss, path + ": the server lists the same entries again");
    }
    asked = std::move(next);
  }
  return {};
}

Result<std::string> NextPageOfObjects(const std::string& path, const std::string& xml,
                                      const std::string& query) {
  if (XmlText(xml, "IsTruncated") != "true") return std::string();
  const std::string token = XmlText(xml, "NextContinuationToken");
  if (token.empty()) {
    return Status(Code::kDataLoss, path + ": the server's listing is cut off");
  }
  return "continuation-token=" + PercentEncode(token, false) + "&" + query;
}

std::string QuotedEtag(std::string_view etag) {
  if (etag.empty() || etag.starts_with('"') || etag.starts_with("W/")) return std::string(etag);
  return '"' + std::string(etag) + '"';
}

std::string KeyOfListing(std::string_view element, std::string_view name, bool encoded) {
  std::string key = XmlText(element, name);
  if (!encoded) return key;
  // In this form a space is a plus, as in the fields of a form.
  std::replace(key.begin(), key.end(), '+', ' ');
  return PercentDecode(key);
}

}  // namespace tensormount
