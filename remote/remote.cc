// SPDX-License-Identifier: Apache-2.0
// Which file system serves which scheme, and what `doctor` says of a URL.
#include "remote/remote.h"

#include <chrono>
#include <random>

#include "base/file_system_for.h"
#include "base/object_writer.h"
#include "remote/aws_credentials.h"
#include "remote/curl_library.h"
#include "remote/hub_file_system.h"
#include "remote/remote_file_system.h"
#include "remote/s3_file_system.h"

namespace tensormount {

void AddRemoteFileSystems() {
  static const bool added = [] {
    static auto* http = new HttpFileSystem;  // Never destroyed: threads may use it during exit.
    AddFileSystem("http://", *http);
    AddFileSystem("https://", *http);
    static auto* s3 = new S3FileSystem;
    AddFileSystem("s3://", *s3);
    AddFileSystem("gs://", *s3);
    static auto* hub = new HubFileSystem;
    AddFileSystem("hf://", *hub);
    return true;
  }();
  (void)added;
}

Result<std::string> UrlLibraryVersion() {
  TENSORMOUNT_ASSIGN_OR_RETURN(const curl::Library* const library, curl::Open());
  const std::string version = library->curl_version();
  return version.substr(0, version.find(" zlib"));
}

namespace {

// Whether checkpoints can be copied to a bucket: puts a small object, on conditions, and deletes
// it.
UrlFinding ExamineWrites(ObjectWriter& writer, const std::string& url) {
  UrlFinding finding{"copies to it", false, "", ""};
  const std::string path =
      JoinPath(url, ".tensormount-doctor-" + std::to_string(std::random_device{}()));
  const Status first = writer.Put(path, "test", {.if_absent = true}).status();
  // The same put again has to fail, or the condition means nothing.
  const Status again = first.ok() ? writer.Put(path, "test", {.if_absent = true}).status() : first;
  const Status deleted =
      first.ok() ? writer.Delete(std::vector<ObjectInfo>{{.path = path}}) : Status();
  finding.good = again.code() == Code::kAlreadyExists && deleted.ok();
  if (!deleted.ok()) {
    finding.detail = deleted.ToString();
  } else if (finding.good) {
    finding.detail = "possible; the server knows conditional puts";
  } else if (again.ok()) {
    finding.detail = "the server ignores conditional puts";
    finding.remedy = "copy --unconditional copies without protection from other writers";
  } else {
    finding.detail = again.ToString();
  }
  return finding;
}

}  // namespace

std::vector<UrlFinding> ExamineUrl(const std::string& url) {
  std::vector<UrlFinding> out;
  const Result<FileSystem*> fs = FileSystemFor(url);
  if (!fs.ok()) return {{"url", false, fs.status().ToString(), ""}};
  const auto begin = std::chrono::steady_clock::now();
  const Result<FileInfo> info = fs.value()->Stat(url);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - begin);
  if (url.starts_with("s3://") || url.starts_with("gs://")) {
    const std::string origin = AwsCredentialChain::Get().Origin();
    out.push_back({"credentials", origin != "none",
                   origin == "none" ? "none were found: requests are not signed" : origin,
                   "only public buckets can be read; docs/remote.md lists where credentials are "
                   "looked for"});
  }
  const bool is_file = info.ok() && info.value().kind == FileKind::kFile;
  ObjectWriter* const writer = fs.value()->object_writer();
  if (writer != nullptr && !is_file) out.push_back(ExamineWrites(*writer, url));
  if (!info.ok()) {
    out.push_back({"url", false, info.status().ToString(), ""});
    return out;
  }
  out.push_back({"url", true,
                 (is_file ? "a file of " + std::to_string(info.value().size) + " bytes"
                          : std::string("a directory")) +
                     ", found within " + std::to_string(took.count()) + " ms",
                 ""});
  if (!is_file) {
    const auto entries = fs.value()->List(url);
    out.push_back({"listing", entries.ok(),
                   entries.ok() ? std::to_string(entries.value().size()) + " known entries"
                                : entries.status().ToString(),
                   "name a checkpoint: URL/NAME"});
    return out;
  }
  std::byte last{};
  const auto file = fs.value()->OpenRead(url);
  const std::uint64_t size = info.value().size;
  const Result<std::size_t> read =
      !file.ok() ? Result<std::size_t>(file.status())
                 : file.value()->ReadAt(size == 0 ? 0 : size - 1, &last, size == 0 ? 0 : 1);
  out.push_back({"byte ranges", read.ok(), read.ok() ? "work" : read.status().ToString(), ""});
  const bool has_etag = info.value().inode != 0;
  out.push_back({"version of the object", has_etag,
                 has_etag ? "the server sends an ETag" : "only Last-Modified and the size tell",
                 "an object that is replaced twice within a second may not be noticed"});
  return out;
}

}  // namespace tensormount
