// SPDX-License-Identifier: Apache-2.0
// Opens libcurl by the names that it has on the usual systems.
#include "remote/curl_library.h"

#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <unistd.h>
#include <vector>

namespace tensormount::curl {
namespace {

// The file with the certificates of the authorities that this system trusts; null: not found.
const char* SystemCaFile() {
  for (const char* file : {"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
                           "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"}) {
    if (access(file, R_OK) == 0) return file;
  }
  return nullptr;
}

Result<const Library*> OpenOnce() {
  std::vector<std::string> names = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl-nss.so.4"};
  if (const char* given = std::getenv("TENSORMOUNT_LIBCURL"); given != nullptr && *given != '\0') {
    names = {given};
  }
  // A library that does not belong to the system, so that it does not know the system's
  // certificates.
  const char* const other = std::getenv("TENSORMOUNT_LIBCURL_ELSE");
  if (other != nullptr && *other != '\0') names.emplace_back(other);
  static Library library;
  void* handle = nullptr;
  std::string reasons;
  for (const std::string& name : names) {
    handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) {
      if (other != nullptr && name == other) library.ca_file = SystemCaFile();
      break;
    }
    const char* reason = dlerror();
    reasons += (reasons.empty() ? "" : "; ") + std::string(reason == nullptr ? name : reason);
  }
  if (handle == nullptr) {
    return Status(Code::kUnsupported,
                  "URLs are read by libcurl, which cannot be opened (" + reasons +
                      "). Install libcurl4 (Debian, Ubuntu) or libcurl (RHEL, Fedora, SUSE), or "
                      "in Python tensormount[remote], or set TENSORMOUNT_LIBCURL to its file");
  }
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
