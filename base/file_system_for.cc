// SPDX-License-Identifier: Apache-2.0
// Finds the file system for a path that a user typed.
#include "base/file_system_for.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tensormount {
namespace {

// Whether `text` has the form of a remote path of scp or rsync: "user@host:x", "host:/x", "host:".
bool IsRemotePath(std::string_view text) {
  const std::string_view head = text.substr(0, text.find('/'));
  const std::size_t colon = head.find(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::size_t at = head.substr(0, colon).find('@');
  const std::string_view rest = text.substr(colon + 1);
  return (at != std::string_view::npos && at > 0 && at + 1 < colon) || rest.empty() ||
         rest.starts_with('/');
}

Status CheckIsPath(std::string_view text) {
  if (IsRemotePath(text) && text.find("://") == std::string_view::npos) {
    return {Code::kUnsupported, std::string(text) +
                                    ": is a path on another machine; only local directories can be "
                                    "read and written. Mount it here (sshfs, NFS) or copy it with "
                                    "rsync. For a local directory of this name pass ./" +
                                    std::string(text)};
  }
  if (text == "~" || text.starts_with("~/")) {
    return {Code::kUnsupported, std::string(text) +
                                    ": only a shell expands ~ to your home directory; pass the "
                                    "full path. For a directory called ~ pass ./~"};
  }
  const std::size_t colon = text.find("://");
  if (colon == std::string_view::npos || colon == 0) return Status();
  for (std::size_t i = 0; i < colon; ++i) {
    const char c = text[i];
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool other = (c >= '0' && c <= '9') || c == '+' || c == '-' || c == '.';
    if (!letter && (i == 0 || !other)) return Status();
  }
  const std::string name(text);
  if (text.starts_with("file:///")) {
    return {Code::kUnsupported, name + ": is a URL; pass the path instead: " + name.substr(7)};
  }
  return {Code::kUnsupported,
          name +
              ": is a URL of a kind that cannot be read: http, https, s3, gs and hf "
              "can (docs/remote.md). Mount it, or copy it to this machine first"};
}

// A list that only grows: readers take no lock, which a fork could leave locked.
struct Scheme {
  std::string begin;
  FileSystem* fs = nullptr;
  const Scheme* next = nullptr;
};
std::atomic<const Scheme*> newest_scheme = nullptr;

}  // namespace

Result<FileSystem*> FileSystemFor(std::string_view text) {
  for (const Scheme* known = newest_scheme.load(); known != nullptr; known = known->next) {
    if (text.starts_with(known->begin)) return known->fs;
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckIsPath(text));
  return &HostFileSystem();
}

std::string WithoutQuery(std::string_view text) {
  // A name in a bucket may have a '?'.
  const bool has_query = text.starts_with("http://") || text.starts_with("https://");
  return std::string(has_query ? text.substr(0, text.find('?')) : text);
}

void AddFileSystem(std::string_view scheme, FileSystem& fs) {
  auto added = std::make_unique<Scheme>(Scheme{std::string(scheme), &fs, newest_scheme.load()});
  while (!newest_scheme.compare_exchange_strong(added->next, added.get())) {
  }
  (void)added.release();
}

}  // namespace tensormount
