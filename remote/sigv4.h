// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_SIGV4_H_
#define TENSORMOUNT_REMOTE_SIGV4_H_

#include <ctime>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "remote/sha256.h"
#include "remote/url.h"

namespace tensormount {

// RFC 2104.
Sha256Digest HmacSha256(std::string_view key, std::string_view data);

struct AwsCredentials {
  std::string access_key;  // Empty: requests are not signed.
  std::string secret_key;
  std::string session_token;  // Empty: none.
};

// The headers that sign a request with AWS Signature Version 4: x-amz-date, x-amz-content-sha256,
// x-amz-security-token and authorization. `url` is encoded; its query is signed, too. `body_hash`:
// the SHA-256 of the body in hexadecimal. `more`: headers of the request ("name: value"), of which
// those that begin with "x-amz-" are signed, too. Source: "Create a signed AWS API request" in the
// AWS Identity and Access Management user guide.
std::vector<std::string> SignV4(std::string_view method, const Url& url, std::string_view body_hash,
                                const AwsCredentials& credentials, std::string_view region,
                                std::string_view service, std::time_t now,
                                std::span<const std::string> more = {});

// SHA-256 of no bytes.
inline constexpr std::string_view kEmptySha256 =
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_SIGV4_H_
