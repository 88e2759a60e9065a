// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_AWS_CREDENTIALS_H_
#define TENSORMOUNT_REMOTE_AWS_CREDENTIALS_H_

#include <cstdint>
#include <ctime>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "tensormount/status.h"

#include "remote/sigv4.h"

namespace tensormount {

// Settings of the AWS tools: the environment, then the profile AWS_PROFILE (else "default") of
// ~/.aws/config and ~/.aws/credentials.
class AwsSettings {
 public:
  // Reads the files; missing ones are empty.
  static AwsSettings Read();
  // A setting of the profile, such as "region"; empty: none.
  std::string Profile(const std::string& name) const;
  // The first that is set: the variables, then the setting of the profile.
  std::string Find(std::initializer_list<const char*> variables, const std::string& setting) const;

 private:
  std::map<std::string, std::string> profile_;
};

// The credentials for S3, looked for in the order of the AWS tools:
//   AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN);
//   a web identity (AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN, by STS);
//   the profile: keys, or the answer of its credential_process;
//   the container's endpoint (AWS_CONTAINER_CREDENTIALS_*);
//   the instance's metadata service (IMDSv2), unless AWS_EC2_METADATA_DISABLED is "true".
// None of these, or AWS_NO_SIGN_REQUEST=1: requests are not signed. Credentials that expire are
// fetched again some minutes before. Thread-safe.
class AwsCredentialChain {
 public:
  static AwsCredentialChain& Get();
  // May run a program, or ask a server and wait for it: never on the client's thread. An error: a
  // source is configured, and gives none.
  Result<AwsCredentials> Current();
  // The credentials that Current() found last; empty if it found none yet. Never waits.
  AwsCredentials Latest();
  // Where the credentials are from, for `doctor`; "none".
  std::string Origin();

 private:
  struct Found {
    AwsCredentials credentials;
    std::optional<std::time_t> expires;
    std::string origin = "none";
  };
  Result<Found> Find() const;
  Result<std::optional<Found>> FromProcess(const AwsSettings& settings) const;
  Result<std::optional<Found>> FromWebIdentity(const AwsSettings& settings) const;
  Result<std::optional<Found>> FromContainer() const;
  Result<std::optional<Found>> FromInstance() const;
  static Result<Found> ParseJson(const std::string& text, const std::string& origin);

  std::mutex finding_;  // Held while credentials are looked for.
  std::mutex mutex_;    // Guards found_.
  std::optional<Found> found_;
  std::time_t renew_ = 0;  // When to look again.
  Status failure_;         // Of the last search, for the readers until failure_until_.
  std::time_t failure_until_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_AWS_CREDENTIALS_H_
