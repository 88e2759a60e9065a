// SPDX-License-Identifier: Apache-2.0
// Objects and directories of buckets.
#include "remote/s3_file_system.h"

#include <utility>

#include "remote/url.h"
#include "remote/xml_text.h"

namespace tensormount {
namespace {

// Of a directory; a store has two entries a checkpoint.
constexpr std::size_t kMostEntries = 1'000'000;

}  // namespace

Result<RemoteObject> S3FileSystem::ObjectAt(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const S3Requests::Location at, S3Requests::LocationOf(path));
  if (at.key.empty()) return Status(Code::kNotFound, path + ": is a bucket, not a file");
  return requests_.ObjectAt(at, "");
}

Result<std::optional<RemoteFileSystem::Entries>> S3FileSystem::EntriesOf(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(S3Requests::Location at, S3Requests::LocationOf(path));
  const std::string prefix = at.key.empty() ? "" : WithoutTrailingSlashes(at.key) + "/";
  at.key.clear();
  const std::string query =
      "delimiter=%2F&encoding-type=url&list-type=2&prefix=" + PercentEncode(prefix, false);
  Entries entries;
  const auto take = [&](const std::string& xml, const HttpResponse&) -> Result<std::string> {
    const bool encoded = XmlText(xml, "EncodingType") == "url";
    const auto add = [&](std::string_view element, std::string_view name, FileKind kind) {
      const std::string key = KeyOfListing(element, name, encoded);
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
    if (entries.size() > kMostEntries) {
      return Status(Code::kUnsupported, path + ": has more than 1,000,000 entries");
    }
    return NextPageOfObjects(path, xml, query);
  };
  TENSORMOUNT_RETURN_IF_ERROR(requests_.List(path, at, "ListBucketResult", query, take));
  return std::optional<Entries>(std::move(entries));
}

bool S3FileSystem::AsksAgain(const std::string& path, const RemoteObject& asked,
                             const HttpResponse& response) {
  if (response.code == 200 || response.code == 206) return false;
  const Result<S3Requests::Location> at = S3Requests::LocationOf(path);
  return at.ok() && requests_.LearnsRegion(at.value(), asked.region, response);
}

Status S3FileSystem::FailureOf(const std::string& path, const HttpResponse& response) {
  return S3Requests::FailureOf(path, response);
}

std::string S3FileSystem::RootOf(const std::string& path) const {
  return path.substr(0, path.find('/', 5));
}

}  // namespace tensormount
