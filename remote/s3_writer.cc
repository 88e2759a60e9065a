// SPDX-License-Identifier: Apache-2.0
// Writes, lists and deletes objects of buckets.
#include "remote/s3_writer.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "remote/s3_upload.h"
#include "remote/sigv4.h"
#include "remote/text.h"
#include "remote/url.h"
#include "remote/xml_text.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kLeastPart = std::uint64_t{16} << 20;
constexpr std::uint64_t kMostParts = 10'000;
constexpr std::uint64_t kMostObject = std::uint64_t{5} << 40;
constexpr std::uint64_t kMostCopied = std::uint64_t{5} << 30;
// Of conditional puts that met another one.
constexpr int kPutTries = 5;
constexpr std::chrono::milliseconds kBetweenPuts{200};
constexpr std::size_t kDeletesAtOnce = 32;
constexpr std::size_t kMostListed = 10'000'000;

ObjectInfo InfoOfAnswer(const std::string& path, const HttpResponse& response) {
  ObjectInfo info;
  info.path = path;
  info.size = ParseNumber(response.Header("content-length")).value_or(0);
  info.etag = QuotedEtag(response.Header("etag"));
  info.modified_seconds = ParseHttpDate(response.Header("last-modified")).value_or(0);
  info.mark = response.Header("x-amz-meta-tensormount");
  return info;
}

// An object of at most one part.
class SinglePut : public ObjectUpload {
 public:
  SinglePut(S3Writer& writer, std::string path, std::uint64_t size, PutOptions options)
      : writer_(writer), path_(std::move(path)), size_(size), options_(std::move(options)) {
    data_.reserve(size);
  }
  Status Add(const std::byte* data, std::size_t size) override {
    if (size > size_ - data_.size()) {
      return {Code::kDataLoss,
              path_ + ": more bytes than the " + std::to_string(size_) + " that were announced"};
    }
    data_.append(reinterpret_cast<const char*>(data), size);
    return {};
  }
  Result<std::string> Finish() override {
    if (data_.size() != size_) {
      return Status(Code::kDataLoss, path_ + ": " + std::to_string(data_.size()) + " bytes of " +
                                         std::to_string(size_) + " were added");
    }
    return writer_.Put(path_, std::move(data_), options_);
  }
  std::uint64_t bytes_kept() const override { return 0; }

 private:
  S3Writer& writer_;
  const std::string path_;
  const std::uint64_t size_;
  const PutOptions options_;
  std::string data_;
};

Result<S3Requests::Location> KeyOf(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(S3Requests::Location at, S3Requests::LocationOf(path));
  if (at.key.empty() || at.key.ends_with('/')) {
    return Status(Code::kInvalidArgument, path + ": is no name of an object");
  }
  if (at.key.size() > 1024) {
    return Status(Code::kUnsupported, path + ": the key has more than 1,024 bytes");
  }
  return at;
}

// What the keys of everything below a path begin with.
std::string PrefixOf(const S3Requests::Location& at) {
  return at.key.empty() ? "" : WithoutTrailingSlashes(at.key) + "/";
}

}  // namespace

std::uint64_t S3Writer::PartBytes(std::uint64_t size) {
  const std::uint64_t least = size / (kMostParts - 1) + 1;
  constexpr std::uint64_t kMiB = 1 << 20;
  return std::max(kLeastPart, (least + kMiB - 1) / kMiB * kMiB);
}

Result<std::string> S3Writer::Put(const std::string& path, std::string data,
                                  const PutOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const S3Requests::Location at, KeyOf(path));
  HttpRequest request;
  request.method = "PUT";
  request.headers = {"Content-Type: application/octet-stream"};
  if (!options.mark.empty()) request.headers.push_back("x-amz-meta-tensormount: " + options.mark);
  if (options.if_absent) request.headers.emplace_back("If-None-Match: *");
  if (!options.if_match.empty()) request.headers.push_back("If-Match: " + options.if_match);
  const Sha256Digest digest = Sha256(data);
  request.body_sha256 = Hexadecimal(digest);
  // Without a signature nothing else would prove the bytes.
  if (!S3Requests::Signs(at)) {
    request.headers.push_back("x-amz-checksum-sha256: " + Base64(digest));
  }
  request.body = std::move(data);
  if (options.once) request.tries = 1;
  for (int turn = 1;; ++turn) {
    Result<std::shared_ptr<HttpCall>> call = requests_.Ask(at, "", request);
    ForgetWhatIsKnown();
    if (!call.ok()) return call.status().WithContext(path);
    const HttpResponse& response = call.value()->response();
    if (response.code == 200) return QuotedEtag(response.Header("etag"));
    if (options.if_absent && response.code == 412) {
      return Status(Code::kAlreadyExists, path + ": there is an object already");
    }
    if (!options.if_match.empty() && (response.code == 412 || response.code == 404)) {
      return Status(Code::kStale, path + ": the object was changed by somebody else");
    }
    // Another conditional put of this object is under way.
    if (response.code != 409 || options.once || turn == kPutTries)
      return S3Requests::FailureOf(path, response);
    std::this_thread::sleep_for(kBetweenPuts * turn);
  }
}

Result<std::unique_ptr<ObjectUpload>> S3Writer::Upload(const std::string& path, std::uint64_t size,
                                                       const PutOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(S3Requests::Location at, KeyOf(path));
  if (size > kMostObject) {
    return Status(Code::kUnsupported,
                  path + ": has " + std::to_string(size) + " bytes; an object has at most 5 TiB");
  }
  if (size <= PartBytes(size)) {
    return std::unique_ptr<ObjectUpload>(std::make_unique<SinglePut>(*this, path, size, options));
  }
  auto upload = std::make_unique<S3Upload>(*this, requests_, path, std::move(at), size, options);
  TENSORMOUNT_RETURN_IF_ERROR(upload->Begin().WithContext(path));
  return std::unique_ptr<ObjectUpload>(std::move(upload));
}

Result<std::string> S3Writer::CopyObject(const ObjectInfo& from, const std::string& to) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const S3Requests::Location source, KeyOf(from.path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const S3Requests::Location at, KeyOf(to));
  if (from.size > kMostCopied || from.etag.empty()) {
    return Status(Code::kUnsupported, from.path + ": is larger than 5 GiB, or has no ETag");
  }
  for (const bool condition : {true, false}) {
    HttpRequest request;
    request.method = "PUT";
    request.headers = {
        "Content-Type: application/octet-stream",
        "x-amz-copy-source: /" + source.bucket + "/" + PercentEncode(source.key, true),
        "x-amz-copy-source-if-match: " + from.etag};
    if (condition) request.headers.emplace_back("If-None-Match: *");
    request.tries = 1;
    request.answers_late = true;
    const Result<std::shared_ptr<HttpCall>> call = requests_.Ask(
        at, "", std::move(request), {.deadline = Deadline::After(S3Requests::kLateAnswer)});
    ForgetWhatIsKnown();
    if (!call.ok()) return call.status().WithContext(to);
    const HttpResponse& response = call.value()->response();
    // An answer of 200 may be an error: it is begun before the result is known.
    if (response.code == 200 && response.body.find("<CopyObjectResult") != std::string::npos) {
      return QuotedEtag(XmlText(response.body, "ETag"));
    }
    if (condition && (response.code == 400 || response.code == 501)) continue;
    if (response.code == 412 && response.body.find("If-None-Match") != std::string::npos) {
      return Status(Code::kAlreadyExists, to + ": there is an object already");
    }
    if (response.code == 412) return Status(Code::kStale, from.path + ": the object was replaced");
    return S3Requests::FailureOf(to, response);
  }
  return Status(Code::kInternal, to + ": no answer");
}

Result<std::optional<ObjectInfo>> S3Writer::InfoOf(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const S3Requests::Location at, KeyOf(path));
  HttpRequest request;
  request.method = "HEAD";
  const Result<std::shared_ptr<HttpCall>> call = requests_.Ask(at, "", std::move(request));
  if (!call.ok()) return call.status().WithContext(path);
  const HttpResponse& response = call.value()->response();
  if (response.code == 404) return std::optional<ObjectInfo>();
  if (response.code != 200) return S3Requests::FailureOf(path, response);
  ForgetWhatIsKnown();  // A read may have been told a moment ago that it is missing.
  return std::optional<ObjectInfo>(InfoOfAnswer(path, response));
}

Result<std::string> S3Writer::Get(const std::string& path, std::uint64_t most, ObjectInfo* info) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const S3Requests::Location at, KeyOf(path));
  HttpRequest request;
  request.most_body = most;
  const Result<std::shared_ptr<HttpCall>> call = requests_.Ask(at, "", std::move(request));
  if (!call.ok()) return call.status().WithContext(path);
  const HttpResponse& response = call.value()->response();
  if (response.code != 200) return S3Requests::FailureOf(path, response);
  if (info != nullptr) *info = InfoOfAnswer(path, response);
  return std::move(call.value()->response().body);
}

Result<ObjectListing> S3Writer::ListBelow(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(S3Requests::Location at, S3Requests::LocationOf(path));
  const std::string prefix = PrefixOf(at);
  at.key.clear();
  const std::string root = S3Requests::RootOf(at);
  const std::string query = "encoding-type=url&list-type=2&prefix=" + PercentEncode(prefix, false);
  ObjectListing listing;
  const auto take = [&](const std::string& xml,
                        const HttpResponse& response) -> Result<std::string> {
    const bool encoded = XmlText(xml, "EncodingType") == "url";
    for (const std::string_view element : XmlElements(xml, "Contents")) {
      const std::string key = KeyOfListing(element, "Key", encoded);
      // An empty object with a slash at its end is a directory of a console.
      if (!key.starts_with(prefix) || key.ends_with('/')) continue;
      ObjectInfo info;
      info.path = root + key;
      info.size = ParseNumber(XmlText(element, "Size")).value_or(0);
      info.etag = QuotedEtag(XmlText(element, "ETag"));
      info.modified_seconds = ParseIsoTime(XmlText(element, "LastModified")).value_or(0);
      listing.objects.push_back(std::move(info));
    }
    if (listing.objects.size() > kMostListed) {
      return Status(Code::kUnsupported, path + ": has more than 10,000,000 objects");
    }
    listing.now = ParseHttpDate(response.Header("date")).value_or(0);
    return NextPageOfObjects(path, xml, query);
  };
  TENSORMOUNT_RETURN_IF_ERROR(requests_.List(path, at, "ListBucketResult", query, take));
  std::sort(listing.objects.begin(), listing.objects.end(),
            [](const ObjectInfo& a, const ObjectInfo& b) { return a.path < b.path; });
  return listing;
}

Status S3Writer::Delete(std::span<const ObjectInfo> objects) {
  Status failure;
  while (!objects.empty()) {
    const auto some = objects.first(std::min(objects.size(), kDeletesAtOnce));
    objects = objects.subspan(some.size());
    Status deleted = DeleteSome(some, true);
    if (failure.ok()) failure = std::move(deleted);
  }
  return failure;
}

Status S3Writer::DeleteSome(std::span<const ObjectInfo> objects, bool conditions) {
  std::vector<std::shared_ptr<HttpCall>> calls;
  std::vector<ObjectInfo> again;
  Status failure;
  for (const ObjectInfo& object : objects) {
    Result<S3Requests::Location> at = KeyOf(object.path);
    HttpRequest request;
    request.method = "DELETE";
    request.tries = 1;
    if (conditions && !object.etag.empty()) request.headers = {"If-Match: " + object.etag};
    Result<std::shared_ptr<HttpCall>> call =
        at.ok() ? requests_.Start(at.value(), "", std::move(request)) : at.status();
    if (!call.ok()) {
      failure = call.status();
      break;
    }
    calls.push_back(std::move(call).value());
  }
  for (std::size_t n = 0; n < calls.size(); ++n) {
    const std::string& path = objects[n].path;
    Status ended = calls[n]->Await().WithContext(path);
    const HttpResponse& response = calls[n]->response();
    const int code = response.code;
    if (ended.ok() && code == 412) {
      ended = Status(Code::kStale, path + ": was changed by somebody else");
    } else if (ended.ok() && conditions && (code == 400 || code == 501)) {
      again.push_back(objects[n]);  // A server that knows no conditions of deletions.
    } else if (ended.ok() && code != 200 && code != 204 && code != 404) {
      ended = S3Requests::FailureOf(path, response);
    }
    if (failure.ok()) failure = std::move(ended);
  }
  ForgetWhatIsKnown();
  if (failure.ok() && !again.empty()) failure = DeleteSome(again, false);
  return failure;
}

Result<std::vector<UnfinishedUpload>> S3Writer::Unfinished(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(S3Requests::Location at, S3Requests::LocationOf(path));
  const std::string prefix = PrefixOf(at);
  return ListUploads(path, std::move(at), prefix);
}

Result<std::vector<UnfinishedUpload>> S3Writer::UnfinishedOf(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(S3Requests::Location at, KeyOf(path));
  const std::string prefix = at.key;
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<UnfinishedUpload> all,
                               ListUploads(path, std::move(at), prefix));
  std::erase_if(all, [&](const UnfinishedUpload& upload) { return upload.path != path; });
  return all;
}

Result<std::vector<UnfinishedUpload>> S3Writer::ListUploads(const std::string& path,
                                                            S3Requests::Location at,
                                                            const std::string& prefix) {
  at.key.clear();
  const std::string root = S3Requests::RootOf(at);
  const std::string query =
      "encoding-type=url&prefix=" + PercentEncode(prefix, false) + "&uploads=";
  std::vector<UnfinishedUpload> out;
  const auto take = [&](const std::string& xml, const HttpResponse&) -> Result<std::string> {
    const bool encoded = XmlText(xml, "EncodingType") == "url";
    for (const std::string_view element : XmlElements(xml, "Upload")) {
      const std::string key = KeyOfListing(element, "Key", encoded);
      if (!key.starts_with(prefix)) continue;
      out.push_back({root + key, XmlText(element, "UploadId"),
                     ParseIsoTime(XmlText(element, "Initiated")).value_or(0)});
    }
    if (XmlText(xml, "IsTruncated") != "true") return std::string();
    std::string key = KeyOfListing(xml, "NextKeyMarker", encoded);
    if (key.empty()) return Status(Code::kDataLoss, path + ": the listing of uploads is cut off");
    return "key-marker=" + PercentEncode(key, false) +
           "&upload-id-marker=" + PercentEncode(XmlText(xml, "NextUploadIdMarker"), false) + "&" +
           query;
  };
  TENSORMOUNT_RETURN_IF_ERROR(requests_.List(path, at, "ListMultipartUploadsResult", query, take));
  return out;
}

Status S3Writer::Abort(const UnfinishedUpload& upload) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const S3Requests::Location at, KeyOf(upload.path));
  HttpRequest request;
  request.method = "DELETE";
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::shared_ptr<HttpCall> call,
      requests_.Ask(at, "uploadId=" + PercentEncode(upload.id, false), std::move(request)));
  const int code = call->response().code;
  if (code == 200 || code == 204 || code == 404) return {};
  return S3Requests::FailureOf(upload.path, call->response());
}

}  // namespace tensormount
