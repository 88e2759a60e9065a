// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_REMOTE_H_
#define TENSORMOUNT_REMOTE_REMOTE_H_

#include <string>
#include <vector>

#include "tensormount/status.h"

namespace tensormount {

// Makes FileSystemFor know http://, https://, s3:// and gs://, and hf://. Programs and the library
// call it when they start. Nothing is opened before a path needs it. May be called again.
void AddRemoteFileSystems();

// The version of libcurl, which is opened for it. kUnsupported: there is none; the error says what
// to install.
Result<std::string> UrlLibraryVersion();

// What a URL offers, for `doctor`: whether it answers, with which credentials, whether byte ranges
// and the comparison of versions work, and whether a bucket can be copied to. Asks the server.
struct UrlFinding {
  std::string name;
  bool good = false;
  std::string detail;
  std::string remedy;  // Empty: unknown or not needed.
};
std::vector<UrlFinding> ExamineUrl(const std::string& url);

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_REMOTE_H_
