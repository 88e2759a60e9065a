// SPDX-License-Identifier: Apache-2.0
// Opens libcurl by the names that it has on the usual systems.
#include "remote/curl_library.h"

#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <vector>

namespace tensormount::curl {
namespace {

Result<const Library*> OpenOnce() {
  std::vector<std::string> names = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl-nss.so.4"};
  if (const char* given = std::getenv("TENSORMOUNT_LIBCURL"); given != nullptr && *given != '\0') {
    names = {given};
  }
  void* handle = nullptr;
  std::string reasons;
  for (const std::string& name : names) {
    handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    const char* reason = dlerror();
    reasons += (reasons.empty() ? "" : "; ") + std::string(reason == nullptr ? name : reason);
  }
  if (handle == nullptr) {
    return Status(Code::kUnsupported,
                  "URLs are read by libcurl, which cannot be opened (" + reasons +
                      "). Install libcurl4 (Debian, Ubuntu) or libcurl (RHEL, Fedora, SUSE), or "
                      "set TENSORMOUNT_LIBCURL to its file");
  }
  static Library library;
  std::string missing;
#define TENSORMOUNT_RESOLVE(name, result, parameters)                            \
  library.name = reinterpret_cast<decltype(library.name)>(dlsym(handle, #name)); \
  if (library.name == nullptr && missing.empty()) missing = #name;
  TENSORMOUNT_CURL_FUNCTIONS(TENSORMOUNT_RESOLVE)
#undef TENSORMOUNT_RESOLVE
  if (!missing.empty()) {
    return Status(Code::kUnsupported, "libcurl has no function " + missing);
  }
  if (library.curl_global_init(kGlobalDefault) != kOk) {
    return Status(Code::kUnavailable, "libcurl could not be initialised");
  }
  return &library;
}

}  // namespace

Result<const Library*> Open() {
  static const Result<const Library*> opened = OpenOnce();
  return opened;
}

}  // namespace tensormount::curl
