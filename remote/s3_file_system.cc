// SPDX-License-Identifier: Apache-2.0
// Objects and directories of buckets.
#include "remote/s3_file_system.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "remote/aws_credentials.h"
#include "remote/url.h"
#include "remote/xml_text.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kMostListing = std::uint64_t{16} << 20;
// Of a directory; a store has two entries a checkpoint.
constexpr std::size_t kMostEntries = 1'000'000;
// In addition to the patience of a request.
constexpr std::chrono::seconds kListingPatience{60};

std::string KeyOf(const std::string& bucket, bool google) {
  return (google ? "gs://" : "s3://") + bucket;
}

}  // namespace

Result<S3FileSystem::Location> S3FileSystem::LocationOf(const std::string& path) {
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

std::string S3FileSystem::RegionOf(const Location& at, const AwsSettings& settings) {
  {
    Regions& regions = regions_.Get();
    const std::lock_guard lock(regions.mutex);
    const auto known = regions.by_bucket.find(KeyOf(at.bucket, at.google));
    if (known != regions.by_bucket.end()) return known->second;
  }
 const std::string region = settings.Find({"AWS_REGION", "AWS_DEFAULT_REGION"}, "region");
  if (!region.empty()) return region;
  return at.google ? "auto" : "us-east-1";
}

bool S3FileSystem::LearnsRegion(const Location& at, const std::string& asked,
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
  regions.by_bucket[KeyOf(at.bucket, at.google)] = region;
  return true;
}

Result<RemoteObject> S3FileSystem::RequestsFor(const Location& at, const std::string& query) {
  TENSORMOUNT_RETURN_IF_ERROR(AwsCredentialChain::Get().Current().status());
  const AwsSettings settings = AwsSettings::Read();
  const std::string region = RegionOf(at, settings);
  std::string endpoint =
      settings.Find({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}, "endpoint_url");
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
  const bool google = at.google;
  object.sign = [region, google](const HttpRequest& request,
                                 std::vector<std::string>& headers) -> Status {
    // On the client's thread, which must not wait.
    const AwsCredentials credentials = AwsCredentialChain::Get().Latest();
    // A session of Amazon's is nothing for Google.
    if (credentials.access_key.empty() || (google && !credentials.session_token.empty())) return {};
    TENSORMOUNT_ASSIGN_OR_RETURN(const Url url, ParseUrl(request.url));
    for (std::string& header : SignV4(request.method, url, Hexadecimal(Sha256(request.body)),
                                      credentials, region, "s3", std::time(nullptr))) {
      headers.push_back(std::move(header));
    }
    return {};
  };
  // If this fails, the server says that the credentials have expired.
  object.prepare = [] { (void)AwsCredentialChain::Get().Current(); };
  return object;
}

Result<RemoteObject> S3FileSystem::ObjectAt(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Location at, LocationOf(path));
  if (at.key.empty()) return Status(Code::kNotFound, path + ": is a bucket, not a file");
  return RequestsFor(at, "");
}

Result<std::optional<RemoteFileSystem::Entries>> S3FileSystem::EntriesOf(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(Location at, LocationOf(path));
  const std::string prefix = at.key.empty() ? "" : WithoutTrailingSlashes(at.key) + "/";
  at.key.clear();
  Entries entries;
  std::string token;
  ReadLimits limits;
  limits.deadline = Deadline::After(kListingPatience + HttpClient::Patience());
  do {
    std::string query =
        "delimiter=%2F&encoding-type=url&list-type=2&prefix=" + PercentEncode(prefix, false);
    if (!token.empty()) query = "continuation-token=" + PercentEncode(token, false) + "&" + query;
    std::shared_ptr<HttpCall> call;
    for (int turn = 0; turn < 2; ++turn) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const RemoteObject asked, RequestsFor(at, query));
      HttpRequest request;
      request.url = asked.url;
      request.sign = asked.sign;
      request.most_body = kMostListing;
      request.follow_redirects = false;
      Result<std::shared_ptr<HttpCall>> answered =
          HttpClient::Get().Run(std::move(request), limits);
      if (!answered.ok()) return answered.status().WithContext(path);
      call = std::move(answered).value();
      if (call->response().code == 200 || !LearnsRegion(at, asked.region, call->response())) break;
    }
    if (call->response().code != 200) return FailureOf(path, call->response());
    const std::string& xml = call->response().body;
    if (xml.find("<ListBucketResult") == std::string::npos) {
      return Status(Code::kUnsupported, path + ": the server's answer is no listing of S3");
    }
    // In this form a space is a plus, as in the fields of a form.
    const bool encoded = XmlText(xml, "EncodingType") == "url";
    const auto add = [&](std::string_view element, std::string_view name, FileKind kind) {
      std::string key = XmlText(element, name);
      if (encoded) {
        std::replace(key.begin(), key.end(), '+', ' ');
        key = PercentDecode(key);
      }
      if (!key.starts_with(prefix)) return;
      std::string entry = key.substr(prefix.size());
      if (entry.ends_with('/')) entry.pop_back();
      if (!entry.empty() && entry.find('/') == std::string::npos) entries[entry] = kind;
    };
    for (const std::string_view element : XmlElements(xml, "Contents")) {
      add(element, "Key", FileKind::kFile);
    }
    for (const std::string_view element : XmlElements(xml, "CommonPrefixes")) {
      add(element, "Prefix", FileKind::kDirectory);
    }
    std::string next = XmlText(xml, "IsTruncated") == "true" ? XmlText(xml, "NextContinuationToken")
                                                             : std::string();
    if (next.empty() && XmlText(xml, "IsTruncated") == "true") {
      return Status(Code::kDataLoss, path + ": the server's listing is cut off");
    }
    if (!next.empty() && next == token) {
      return Status(Code::kDataLoss, path + ": the server lists the same entries again");
    }
    token = std::move(next);
    if (entries.size() > kMostEntries) {
      return Status(Code::kUnsupported, path + ": has more than 1,000,000 entries");
    }
  } while (!token.empty());
  return std::optional<Entries>(std::move(entries));
}

bool S3FileSystem::AsksAgain(const std::string& path, const RemoteObject& asked,
                             const HttpResponse& response) {
  if (response.code == 200 || response.code == 206) return false;
  const Result<Location> at = LocationOf(path);
  return at.ok() && LearnsRegion(at.value(), asked.region, response);
}

Status S3FileSystem::FailureOf(const std::string& path, const HttpResponse& response) {
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

std::string S3FileSystem::RootOf(const std::string& path) const {
  return path.substr(0, path.find('/', 5));
}

}  // namespace tensormount
