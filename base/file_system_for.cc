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

using Schemes = std::vector<std::pair<std::string, FileSystem*>>;

// Replaced as a whole and never freed: readers take no lock, which a fork could leave locked.
std::atomic<const Schemes*> all_schemes = nullptr;

}  // namespace

Result<FileSystem*> FileSystemFor(std::string_view text) {
  if (const Schemes* const schemes = all_schemes.load(); schemes != nullptr) {
    for (const auto& [scheme, fs] : *schemes) {
      if (text.starts_with(scheme)) return fs;
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckIsPath(text));
  return &HostFileSystem();
}

std::string WithoutQuery(std::string_view text) {
  const bool is_url = text.find("://") != std::string_view::npos;
  return std::string(is_url ? text.substr(0, text.find('?')) : text);
}

void AddFileSystem(std::string_view scheme, FileSystem& fs) {
  const Schemes* known = all_schemes.load();
  for (;;) {
    auto more = std::make_unique<Schemes>(known == nullptr ? Schemes() : *known);
    more->emplace_back(scheme, &fs);
    if (all_schemes.compare_exchange_strong(known, more.get())) {
      (void)more.release();
      return;
    }
  }
}

}  // namespace tensormount
