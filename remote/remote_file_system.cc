// SPDX-License-Identifier: Apache-2.0
// Files and directories of servers, from what their answers say.
#include "remote/remote_file_system.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/log.h"
#include "remote/remote_file.h"
#include "remote/text.h"
#include "remote/url.h"

namespace tensormount {
namespace {

constexpr std::chrono::seconds kKnownFor{2};
// Somebody may write a file that was not there.
constexpr std::chrono::milliseconds kMissingFor{500};
constexpr std::size_t kMostKnown = 1024;
// What the first request of a file brings.
constexpr std::uint64_t kBeginBytes = 64 << 10;

// By these files a directory is known on a server that lists nothing: those of our own checkpoints
// and stores, and those that the formats of other programs begin with.
constexpr std::string_view kTellingNames[] = {
    "COMMIT",
    "store.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
    ".metadata",
    "common.pt",
    "metadata.json",
    "zarr.json",
    ".zarray",
    ".zgroup",
    ".zmetadata",
};

bool IsFresh(std::chrono::steady_clock::time_point when, bool is_there = true) {
  const std::chrono::milliseconds most = is_there ? kKnownFor : kMissingFor;
  return std::chrono::steady_clock::now() - when < most && !IsForgotten(when);
}

FileInfo DirectoryInfo() {
  FileInfo info;
  info.kind = FileKind::kDirectory;
  info.mode = 0555;
  return info;
}

std::string_view LastPart(std::string_view path) { return path.substr(path.rfind('/') + 1); }

// Without "/." and "x/..", which readers add and servers do not know, and without slashes at the
// end.
std::string Cleaned(std::string_view given) {
  const std::size_t scheme = given.find("://");
  if (scheme == std::string_view::npos) return std::string(given);
  // A name in a bucket may have a '?'.
  const std::size_t query = given.starts_with("http") ? given.find('?') : std::string_view::npos;
  const std::string_view path = given.substr(scheme + 3, query - scheme - 3);
  std::vector<std::string_view> parts;
  for (std::size_t at = 0; at <= path.size();) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    const std::string_view part = path.substr(at, end - at);
    at = end + 1;
    if (part == ".." && parts.size() > 1) parts.pop_back();
    if (part != "." && part != "..") parts.push_back(part);
  }
  while (parts.size() > 1 && parts.back().empty()) parts.pop_back();
  std::string out(given.substr(0, scheme + 3));
  for (std::size_t n = 0; n < parts.size(); ++n) {
    if (n > 0) out += '/';
    out += parts[n];
  }
  // Paths are cut at slashes.
  if (query != std::string_view::npos) {
    for (const char c : given.substr(query)) out += c == '/' ? "%2F" : std::string(1, c);
  }
  return out;
}

// Whether the last part of a path looks like the name of a file, and is asked for as one first.
bool LooksLikeFile(std::string_view path) {
  return LastPart(path).find('.') != std::string_view::npos;
}

// Whether it can only be a file.
bool IsFileName(std::string_view path) {
  constexpr std::string_view kSuffixes[] = {".safetensors", ".json", ".pt",  ".pth",    ".bin",
                                            ".npy",         ".npz",  ".sst", ".distcp", ".tmm"};
  const auto& names = kTellingNames;
  return std::find(std::begin(names), std::end(names), LastPart(path)) != std::end(names) ||
         std::any_of(std::begin(kSuffixes), std::end(kSuffixes),
                     [&](std::string_view suffix) { return path.ends_with(suffix); });
}

// "a/b" from "a/./b", "a//b" and "a/x/../b"; nullopt: the path leaves the directory.
std::optional<std::string> Normal(std::string_view name) {
  std::vector<std::string_view> parts;
  while (!name.empty()) {
    const std::size_t end = std::min(name.find('/'), name.size());
    const std::string_view part = name.substr(0, end);
    name.remove_prefix(std::min(end + 1, name.size()));
    if (part.empty() || part == ".") continue;
    if (part != "..") {
      parts.push_back(part);
    } else if (parts.empty()) {
      return std::nullopt;
    } else {
      parts.pop_back();
    }
  }
  std::string out;
  for (const std::string_view part : parts) out += (out.empty() ? "" : "/") + std::string(part);
  return out;
}

}  // namespace

Result<std::string> RemoteFileSystem::Below(const std::string& directory, const std::string& name) {
  const std::optional<std::string> normal = name.starts_with('/') ? std::nullopt : Normal(name);
  if (!normal) return Status::FromErrno(EXDEV, "open", ShownUrl(directory) + "/" + name);
  if (normal->empty()) return Cleaned(directory);
  // The file that a user named comes back as a directory and a name.
  std::string as_typed = JoinPath(directory, *normal);
  Memory& memory = memory_.Get();
  const std::lock_guard lock(memory.mutex);
  if (memory.typed.contains(as_typed)) return as_typed;
  return JoinPath(directory, NameInPath(*normal));
}

Status RemoteFileSystem::FailureOf(const std::string& path, const HttpResponse& response) {
  return HttpFailure(path, response);  // Without the query.
}

RemoteFileSystem::Known RemoteFileSystem::Answered(const std::string& path,
                                                   const RemoteObject& asked,
                                                   const HttpCall& call) {
  static std::atomic<std::uint64_t> numbers{1};
  const HttpResponse& response = call.response();
  Known known;
  known.when = std::chrono::steady_clock::now();
  // An empty object has no byte 0. S3 says so in the body.
  const bool empty =
      response.code == 416 && (response.Header("content-range") == "bytes */0" ||
                               response.body.find("<ActualObjectSize>0</") != std::string::npos);
  if (!empty && response.code != 200 && response.code != 206) {
    known.failure = FailureOf(path, response);
    return known;
  }
  auto object = std::make_shared<RemoteObject>(asked);
  object->path = ShownUrl(path);
  object->number = numbers++;
  object->size = empty ? 0 : response.object_size.value_or(response.body.size());
  // Behind a redirect to another server (the hub's), the first one names the object.
  const auto& first = response.redirect_headers;
  const auto linked = first.find("x-linked-etag");
  if (linked == first.end()) {
    object->etag = response.Header("etag");
    object->last_modified = response.Header("last-modified");
  } else {
    object->linked_etag = linked->second;
    const auto size = first.find("x-linked-size");
    if (size != first.end() && size->second != std::to_string(object->size)) {
      known.failure =
          Status(Code::kDataLoss, ShownUrl(path) + ": the hub says " + size->second +
                                      " bytes, the object has " + std::to_string(object->size));
      return known;
    }
  }
  object->modified_seconds = ParseHttpDate(object->last_modified).value_or(0);
  object->begin = response.body;
  // A weak ETag does not promise equal bytes.
  if (object->etag.starts_with("W/")) object->etag.clear();
  if (object->etag.empty() && object->linked_etag.empty() && object->size > 0) {
    if (object->last_modified.empty()) {
      known.failure = Status(
          Code::kUnsupported,
          object->path +
              ": the server sends neither an ETag nor Last-Modified, so it would not be seen if "
              "the object was replaced while it is read");
      return known;
    }
    static std::atomic<bool> warned{false};
    if (!warned.exchange(true)) {
      Log(LogLevel::kWarning, object->path +
                                  ": the server sends no ETag; whether an object was replaced is "
                                  "told from Last-Modified and its size");
    }
  }
  object->disk =
      object->linked_etag.empty()
          ? CachedObject::Make(DiskCacheOfEnvironment(), object->url, object->etag, object->size)
          : CachedObject::Make(DiskCacheOfEnvironment(), object->url,
                               "linked " + object->linked_etag, object->size);
  known.object = std::move(object);
  return known;
}

Result<std::vector<RemoteFileSystem::Known>> RemoteFileSystem::LookUp(
    const std::vector<std::string>& paths) {
  Memory& memory = memory_.Get();
  std::vector<Known> found(paths.size());
  std::vector<std::size_t> left;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    const std::lock_guard lock(memory.mutex);
    const auto known = memory.files.find(paths[i]);
    if (known != memory.files.end() &&
        IsFresh(known->second.when, known->second.object != nullptr)) {
      found[i] = known->second;
      continue;
    }
    // What a listing does not have need not be asked for.
    const std::size_t slash = paths[i].rfind('/');
    const auto above = memory.directories.find(paths[i].substr(0, slash));
    if (above != memory.directories.end() && IsFresh(above->second.when) && above->second.entries &&
        !above->second.entries->contains(paths[i].substr(slash + 1))) {
      found[i].failure = Status(Code::kNotFound, ShownUrl(paths[i]) + ": no such file");
      continue;
    }
    left.push_back(i);
  }
  for (int turn = 0; turn < 2 && !left.empty(); ++turn) {
    std::vector<RemoteObject> objects;
    std::vector<HttpRequest> requests;
    for (const std::size_t i : left) {
      TENSORMOUNT_ASSIGN_OR_RETURN(RemoteObject object, ObjectAt(paths[i]));
      if (object.prepare) object.prepare();
      requests.push_back(object.RequestFor({0, kBeginBytes}, {}));
      requests.back().most_body = kBeginBytes;
      requests.back().refuse_directories = !IsFileName(paths[i]);
      objects.push_back(std::move(object));
    }
    const auto calls = HttpClient::Get().Run(std::move(requests));
    if (!calls.ok()) {
      if (left.size() == 1 && calls.status().code() != Code::kCancelled) {
        const std::lock_guard lock(memory.mutex);
        if (memory.files.size() > kMostKnown) memory.files.clear();
        memory.files[paths[left[0]]] = {nullptr, calls.status(), std::chrono::steady_clock::now()};
      }
      const bool named = std::any_of(left.begin(), left.end(), [&](std::size_t i) {
        return calls.status().message().starts_with(ShownUrl(paths[i]));
      });
      if (named) return calls.status();
      const std::string& path = paths[left[0]];  // Several are of one directory.
      return calls.status().WithContext(
          ShownUrl(left.size() == 1 ? path : path.substr(0, path.rfind('/'))));
    }
    std::vector<std::size_t> again;
    for (std::size_t n = 0; n < left.size(); ++n) {
      const std::string& path = paths[left[n]];
      if (turn == 0 && AsksAgain(path, objects[n], calls.value()[n]->response())) {
        again.push_back(left[n]);
        continue;
      }
      Known known = Answered(path, objects[n], *calls.value()[n]);
      const std::lock_guard lock(memory.mutex);
      if (memory.files.size() > kMostKnown) memory.files.clear();
      found[left[n]] = memory.files[path] = std::move(known);
    }
    left = std::move(again);
  }
  return found;
}

Result<RemoteFileSystem::Known> RemoteFileSystem::LookUp(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Known> found,
                               LookUp(std::vector<std::string>{path}));
  return found.front();
}

Result<std::optional<RemoteFileSystem::Entries>> RemoteFileSystem::KnownEntriesOf(
    const std::string& path) {
  Memory& memory = memory_.Get();
  const std::string key = Cleaned(path);
  {
    const std::lock_guard lock(memory.mutex);
    const auto known = memory.directories.find(key);
    if (known != memory.directories.end() && IsFresh(known->second.when)) {
      return known->second.entries;
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::optional<Entries> entries, EntriesOf(key));
  const std::lock_guard lock(memory.mutex);
  if (memory.directories.size() > kMostKnown) memory.directories.clear();
  memory.directories[key] = {entries, std::chrono::steady_clock::now()};
  return entries;
}

// The entries of a directory whose server lists nothing: those of kTellingNames that exist. Our
// own checkpoints are asked for first, by one request.
Result<std::optional<RemoteFileSystem::Entries>> RemoteFileSystem::ProbedEntriesOf(
    const std::string& path) {
  // What tools keep for themselves: .trash, .git, .cache.
  if (LastPart(path).starts_with('.')) {
    return Status(Code::kNotFound, ShownUrl(path) + ": no such directory");
  }
  Entries entries;
  TENSORMOUNT_ASSIGN_OR_RETURN(const Known own, LookUp(JoinPath(path, kTellingNames[0])));
  if (own.object != nullptr) {
    entries[std::string(kTellingNames[0])] = FileKind::kFile;
    return std::optional<Entries>(std::move(entries));
  }
  if (own.failure.code() != Code::kNotFound && own.failure.code() != Code::kPermissionDenied) {
    return own.failure;
  }
  std::vector<std::string> paths;
  for (const std::string_view name : kTellingNames) paths.push_back(JoinPath(path, name));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Known> found, LookUp(paths));
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i].object != nullptr) entries[std::string(kTellingNames[i])] = FileKind::kFile;
  }
  if (entries.empty()) return own.failure;
  return std::optional<Entries>(std::move(entries));
}

// What is known of a path without asking the server.
std::optional<Result<FileInfo>> RemoteFileSystem::KnownInfo(const std::string& path) {
  Memory& memory = memory_.Get();
  const std::lock_guard lock(memory.mutex);
  const auto file = memory.files.find(path);
  if (file != memory.files.end() && IsFresh(file->second.when) && file->second.object != nullptr) {
    return RemoteFile::InfoOf(*file->second.object);
  }
  // A directory with a file.
  const std::string inside = path + "/";
  for (auto at = memory.files.lower_bound(inside);
       at != memory.files.end() && at->first.starts_with(inside); ++at) {
    if (at->second.object != nullptr && IsFresh(at->second.when)) return DirectoryInfo();
  }
  // If the directory above has been listed, it says what the path is.
  const std::size_t slash = path.rfind('/');
  const auto above = memory.directories.find(path.substr(0, slash));
  if (above == memory.directories.end() || !IsFresh(above->second.when) || !above->second.entries) {
    return std::nullopt;
  }
  const auto entry = above->second.entries->find(path.substr(slash + 1));
  if (entry == above->second.entries->end()) {
    return Status(Code::kNotFound, ShownUrl(path) + ": no such file or directory");
  }
  if (entry->second == FileKind::kDirectory) return DirectoryInfo();
  return std::nullopt;
}

Result<FileInfo> RemoteFileSystem::Stat(const std::string& given) {
  const std::string path = Cleaned(given);
  if (path == RootOf(path)) return DirectoryInfo();
  if (const std::optional<Result<FileInfo>> known = KnownInfo(path)) return *known;
  const auto as_file = [&]() -> Result<FileInfo> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Known known, LookUp(path));
    if (known.object == nullptr) return known.failure;
    return RemoteFile::InfoOf(*known.object);
  };
  const auto as_directory = [&]() -> Result<FileInfo> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<Entries> entries, KnownEntriesOf(path));
    if (!entries) {
      TENSORMOUNT_RETURN_IF_ERROR(ProbedEntriesOf(path).status());
    } else if (entries->empty()) {
      return Status(Code::kNotFound, ShownUrl(path) + ": no such file or directory");
    }
    return DirectoryInfo();
  };
  if (given.ends_with('/')) return as_directory();
  if (IsFileName(path)) return as_file();
  const bool file_first = LooksLikeFile(path);
  Result<FileInfo> first = file_first ? as_file() : as_directory();
  if (first.ok() || (first.status().code() != Code::kNotFound &&
                     first.status().code() != Code::kPermissionDenied)) {
    return first;
  }
  const Result<FileInfo> second = file_first ? as_directory() : as_file();
  return second.ok() || second.status().code() != Code::kNotFound ? second : first;
}

Result<std::unique_ptr<File>> RemoteFileSystem::OpenRead(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Known known, LookUp(Cleaned(path)));
  if (known.object == nullptr) return known.failure;
  return std::unique_ptr<File>(std::make_unique<RemoteFile>(known.object));
}

Result<std::vector<DirectoryEntry>> RemoteFileSystem::List(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::optional<Entries> entries, KnownEntriesOf(path));
  if (!entries) {
    TENSORMOUNT_ASSIGN_OR_RETURN(entries, ProbedEntriesOf(Cleaned(path)));
  }
  if (entries->empty() && Cleaned(path) != RootOf(path)) {
    return Status(Code::kNotFound, ShownUrl(path) + ": no such directory");
  }
  std::vector<DirectoryEntry> out;
  for (const auto& [name, kind] : *entries) out.push_back({name, kind});
  return out;
}

Result<std::string> RemoteFileSystem::Resolve(const std::string& path) {
  TENSORMOUNT_RETURN_IF_ERROR(Stat(path).status());
  std::string cleaned = Cleaned(path);
  const std::string name(LastPart(cleaned));
  if (NameInPath(name) != name) {
    Memory& memory = memory_.Get();
    const std::lock_guard lock(memory.mutex);
    memory.typed.insert(cleaned);
  }
  return cleaned;
}

Result<std::unique_ptr<File>> RemoteFileSystem::OpenReadBeneath(const std::string& directory,
                                                                const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, Below(directory, name));
  return OpenRead(path);
}

Result<std::vector<DirectoryEntry>> RemoteFileSystem::ListBeneath(const std::string& directory,
                                                                  const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, Below(directory, name));
  return List(path);
}

Result<FileInfo> RemoteFileSystem::StatBeneath(const std::string& directory,
                                               const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string path, Below(directory, name));
  return Stat(path);
}

Result<RemoteObject> HttpFileSystem::ObjectAt(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Url url, ParseUrl(path));
  RemoteObject object;
  object.url = url.ToString();
  return object;
}

Result<std::optional<RemoteFileSystem::Entries>> HttpFileSystem::EntriesOf(const std::string&) {
  return std::optional<Entries>();
}

Result<std::vector<DirectoryEntry>> HttpFileSystem::List(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<DirectoryEntry> entries, RemoteFileSystem::List(path));
  // The names of checkpoints cannot be guessed, and a store must not seem to be empty.
  const bool is_store = std::any_of(entries.begin(), entries.end(),
                                    [](const auto& entry) { return entry.name == "store.json"; });
  if (is_store) {
    return Status(Code::kUnsupported,
                  path +
                      ": servers for HTTP list no directories: which checkpoints the store has is "
                      "not known. Name one (" +
                      WithoutTrailingSlashes(path) + "/NAME), or use s3://");
  }
  return entries;
}

// What the user typed is a URL, in which "%41" is "A"; names of files inside are not.
std::string HttpFileSystem::NameInPath(const std::string& name) const {
  return PercentEncode(name, true);
}

std::string HttpFileSystem::RootOf(const std::string& path) const {
  const std::size_t host = path.find("://");
  return path.substr(0, path.find('/', host + 3));
}

}  // namespace tensormount
