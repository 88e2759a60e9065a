// SPDX-License-Identifier: Apache-2.0
// The options of the cache on disk, for all commands that read sources (cache_options.h).
#include "mount-tools/cache_options.h"

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include <fmt/core.h>

#include "base/file_system.h"
#include "remote/disk_cache.h"
#include "remote/environment.h"

namespace tensormount::tools {
namespace {

constexpr const char* kDirectoryVariable = "TENSORMOUNT_CACHE";
constexpr const char* kSizeVariable = "TENSORMOUNT_CACHE_SIZE";

// Empty: the environment names no home.
std::string DefaultDirectory() {
  // The XDG specification says that a relative path is ignored.
  const std::string xdg = EnvironmentVariable("XDG_CACHE_HOME");
  if (xdg.starts_with('/')) return JoinPath(xdg, "tensormount");
  const std::string home = EnvironmentVariable("HOME");
  return home.starts_with('/') ? JoinPath(home, ".cache/tensormount") : "";
}

}  // namespace

bool IsUrl(std::string_view source) { return source.find("://") != std::string_view::npos; }

Status ApplyCacheOptions(Terminal& terminal, bool by_default) {
  const std::string size =
      terminal.cache_size.empty() ? EnvironmentVariable(kSizeVariable) : terminal.cache_size;
  std::string directory =
      terminal.cache.empty() ? EnvironmentVariable(kDirectoryVariable) : terminal.cache;
  const bool is_default = directory.empty() && by_default;
  const auto without = [&](std::string_view why) {
    terminal.Warn(
        fmt::format("{}; the mount has no cache. Name a directory with --cache DIR, or "
                    "pass --cache none",
                    why));
    setenv(kDirectoryVariable, "none", 1);
    return Status();
  };
  if (is_default) {
    directory = DefaultDirectory();
    if (directory.empty()) return without("neither XDG_CACHE_HOME nor HOME is set");
  }
  if (directory.empty()) {
    if (terminal.cache_size.empty()) return {};
    return {Code::kInvalidArgument, "--cache-size: needs --cache DIR, or TENSORMOUNT_CACHE"};
  }
  Result<DiskCacheSettings> settings = DiskCacheSettings::Parse(directory, size);
  if (!settings.ok()) return settings.status();
  if (settings.value().directory.empty()) {
    setenv(kDirectoryVariable, "none", 1);
    return {};
  }
  // The daemon of a mount has another working directory.
  std::error_code failed;
  const std::string absolute = std::filesystem::absolute(directory, failed).string();
  if (failed) return Status::FromErrno(failed.value(), "find", directory);
  // What the environment names is opened when the first URL is.
  if (is_default || !terminal.cache.empty()) {
    const auto cache = DiskCache::Open(absolute, settings.value().most_bytes);
    if (!cache.ok() && is_default) return without(cache.status().message());
    TENSORMOUNT_RETURN_IF_ERROR(cache.status());
  }
  setenv(kDirectoryVariable, absolute.c_str(), 1);
  if (!size.empty()) setenv(kSizeVariable, size.c_str(), 1);
  return {};
}

}  // namespace tensormount::tools
