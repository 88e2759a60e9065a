// SPDX-License-Identifier: Apache-2.0
// An upload in parts: each part is sent as soon as it is full, while the next one is filled.
#include "remote/s3_upload.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "remote/sigv4.h"
#include "remote/text.h"
#include "remote/url.h"
#include "remote/xml_text.h"

namespace tensormount {
namespace {

// Bytes of parts on their way, of one upload.
constexpr std::uint64_t kMostOnTheWay = std::uint64_t{48} << 20;
constexpr int kCompleteTries = 4;
constexpr std::chrono::milliseconds kBetweenTries{250};

std::string IdQuery(const std::string& id) { return "uploadId=" + PercentEncode(id, false); }

}  // namespace

S3Upload::S3Upload(S3Writer& writer, S3Requests& requests, std::string path,
                   S3Requests::Location at, std::uint64_t size, PutOptions options)
    : writer_(writer),
      requests_(requests),
      path_(std::move(path)),
      at_(std::move(at)),
      size_(size),
      options_(std::move(options)),
      part_bytes_(S3Writer::PartBytes(size)) {}

S3Upload::~S3Upload() {
  for (std::size_t n = awaited_; n < parts_.size(); ++n) {
    if (parts_[n].call != nullptr) parts_[n].call->Cancel();
  }
}

Status S3Upload::Begin() {
  if (options_.continued.empty()) return Create();
  id_ = options_.continued;
  return ReadParts();
}

Status S3Upload::Create() {
  for (;;) {
    HttpRequest request;
    request.method = "POST";
    request.headers = {"Content-Type: application/octet-stream"};
    if (!options_.mark.empty())
      request.headers.push_back("x-amz-meta-tensormount: " + options_.mark);
    if (with_checksums_) request.headers.emplace_back("x-amz-checksum-algorithm: SHA256");
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<HttpCall> call,
                                 requests_.Ask(at_, "uploads=", std::move(request)));
    const HttpResponse& response = call->response();
    if (response.code == 200) {
      id_ = XmlText(response.body, "UploadId");
      if (!id_.empty()) return {};
      return {Code::kUnsupported, path_ + ": the server's answer has no id of an upload"};
    }
    // Servers exist that refuse what they do not know.
    const bool maybe = response.code == 400 || response.code == 501;
    if (!maybe || !std::exchange(with_checksums_, false)) {
      return S3Requests::FailureOf(path_, response);
    }
  }
}

Status S3Upload::ReadParts() {
  bool all_told = true;
  const std::string query = IdQuery(id_);
  const Status read = requests_.List(
      path_, at_, "ListParts", query,
      [&](const std::string& xml, const HttpResponse&) -> Result<std::string> {
        for (const std::string_view element : XmlElements(xml, "Part")) {
          Part part;
          part.etag = XmlText(element, "ETag");
          part.checksum = XmlText(element, "ChecksumSHA256");
          part.size = ParseNumber(XmlText(element, "Size")).value_or(0);
          all_told = all_told && !part.checksum.empty();
          const std::uint64_t number = ParseNumber(XmlText(element, "PartNumber")).value_or(0);
          if (number >= 1 && number <= 10'000) there_[static_cast<int>(number)] = std::move(part);
        }
        if (XmlText(xml, "IsTruncated") != "true") return std::string();
        return "part-number-marker=" + XmlText(xml, "NextPartNumberMarker") + "&" + query;
      });
  // It may have been completed or aborted meanwhile.
  if (!read.ok() && read.code() != Code::kNotFound) return read;
  if (!read.ok()) {
    there_.clear();
    return Create();
  }
  with_checksums_ = all_told && !there_.empty();
  return {};
}

Status S3Upload::Add(const std::byte* data, std::size_t size) {
  if (size > size_ - added_) {
    return {Code::kDataLoss,
            path_ + ": more bytes than the " + std::to_string(size_) + " that were announced"};
  }
  while (size > 0) {
    if (buffer_.empty()) buffer_.reserve(std::min(part_bytes_, size_ - added_));
    const std::size_t n = std::min<std::uint64_t>(size, part_bytes_ - buffer_.size());
    buffer_.append(reinterpret_cast<const char*>(data), n);
    added_ += n;
    data += n;
    size -= n;
    if (buffer_.size() == part_bytes_) TENSORMOUNT_RETURN_IF_ERROR(SendPart());
  }
  return {};
}

Status S3Upload::SendPart() {
  const int number = static_cast<int>(parts_.size()) + 1;
  const Sha256Digest digest = Sha256(buffer_);
  Part part;
  part.size = buffer_.size();
  part.checksum = Base64(digest);
  const auto known = there_.find(number);
  if (known != there_.end() && known->second.size == part.size &&
      known->second.checksum == part.checksum) {
    part.etag = known->second.etag;
    kept_ += part.size;
    parts_.push_back(std::move(part));
    buffer_.clear();
    return {};
  }
  HttpRequest request;
  request.method = "PUT";
  request.headers = {"Content-Type: application/octet-stream"};
  if (with_checksums_) request.headers.push_back("x-amz-checksum-sha256: " + part.checksum);
  request.body_sha256 = Hexadecimal(digest);
  request.body = std::exchange(buffer_, {});
  TENSORMOUNT_ASSIGN_OR_RETURN(
      part.call, requests_.Start(at_, "partNumber=" + std::to_string(number) + "&" + IdQuery(id_),
                                 std::move(request)));
  parts_.push_back(std::move(part));
  return AwaitUntil(std::max<std::uint64_t>(kMostOnTheWay / part_bytes_, 1));
}

// Waits until at most so many parts are on their way.
Status S3Upload::AwaitUntil(std::size_t most) {
  for (; parts_.size() - awaited_ > most; ++awaited_) {
    Part& part = parts_[awaited_];
    if (part.call == nullptr) continue;
    TENSORMOUNT_RETURN_IF_ERROR(part.call->Await().WithContext(path_));
    const HttpResponse& response = part.call->response();
    if (response.code != 200) {
      if (XmlText(response.body, "Code") == "NoSuchUpload") {
        return {Code::kStale, path_ + ": the upload was aborted by somebody else"};
      }
      return S3Requests::FailureOf(path_, response);
    }
    part.etag = response.Header("etag");
    if (part.etag.empty()) {
      return {Code::kUnsupported, path_ + ": the server sends no ETag of a part"};
    }
    part.call.reset();  // And its memory.
  }
  return {};
}

Result<std::string> S3Upload::Finish() {
  if (added_ != size_) {
    return Status(Code::kDataLoss, path_ + ": " + std::to_string(added_) + " bytes of " +
                                       std::to_string(size_) + " were added");
  }
  if (!buffer_.empty()) TENSORMOUNT_RETURN_IF_ERROR(SendPart());
  TENSORMOUNT_RETURN_IF_ERROR(AwaitUntil(0));
  return Complete();
}

Result<std::string> S3Upload::Complete() {
  std::string xml = "<CompleteMultipartUpload>";
  for (std::size_t n = 0; n < parts_.size(); ++n) {
    xml += "<Part><PartNumber>" + std::to_string(n + 1) + "</PartNumber><ETag>" + parts_[n].etag +
           "</ETag>";
    if (with_checksums_) xml += "<ChecksumSHA256>" + parts_[n].checksum + "</ChecksumSHA256>";
    xml += "</Part>";
  }
  xml += "</CompleteMultipartUpload>";
  bool condition = options_.if_absent;
  for (int turn = 1;; ++turn) {
    HttpRequest request;
    request.method = "POST";
    request.headers = {"Content-Type: application/xml"};
    if (condition) request.headers.emplace_back("If-None-Match: *");
    request.body = xml;
    request.answers_late = true;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::shared_ptr<HttpCall> call,
        requests_.Ask(at_, IdQuery(id_), std::move(request),
                      {.deadline = Deadline::After(S3Requests::kLateAnswer)}));
    const HttpResponse& response = call->response();
    // An answer of 200 may be an error: it is begun before the result is known.
    if (response.code == 200 &&
        response.body.find("<CompleteMultipartUploadResult") != std::string::npos) {
      ForgetWhatIsKnown();
      return QuotedEtag(XmlText(response.body, "ETag"));
    }
    const std::string code = XmlText(response.body, "Code");
    if (response.code == 412 || code == "PreconditionFailed") {
      return Status(Code::kAlreadyExists, path_ + ": there is an object already");
    }
    // An earlier try may have succeeded; or somebody else ended the upload.
    if (response.code == 404) return AsFound();
    // The server knows no conditions here. Whoever needs one compares before it counts.
    if (condition && response.code == 501) {
      condition = false;
      continue;
    }
    const bool again = response.code == 200 || response.code == 409;
    if (!again || turn == kCompleteTries) {
      Status failure = S3Requests::FailureOf(path_, response);
      if (response.code == 200) failure = {Code::kUnavailable, path_ + ": " + code};
      return failure;
    }
    std::this_thread::sleep_for(kBetweenTries * turn);
  }
}

Result<std::string> S3Upload::AsFound() {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ObjectInfo> now, writer_.InfoOf(path_));
  if (now && now->size == size_ && now->mark == options_.mark && !options_.mark.empty()) {
    return now->etag;
  }
  return Status(Code::kStale, path_ + ": the upload was aborted by somebody else");
}

}  // namespace tensormount
