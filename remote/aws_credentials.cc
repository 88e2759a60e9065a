// SPDX-License-Identifier: Apache-2.0
// Finds credentials for S3 where the AWS tools find them.
#include "remote/aws_credentials.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <fstream>
#include <poll.h>
#include <spawn.h>
#include <sstream>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/per_process.h"
#include "remote/environment.h"
#include "remote/http_client.h"
#include "remote/text.h"
#include "remote/url.h"
#include "remote/xml_text.h"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace tensormount {
namespace {

constexpr std::chrono::seconds kProcessPatience{60};
constexpr std::chrono::seconds kMetadataPatience{5};
// Credentials that expire within this time are fetched again.
constexpr std::time_t kEarly = 300;
constexpr std::time_t kAgain = 60;
constexpr std::time_t kFailureHolds = 3;
// Keys without an end: the files may have changed.
constexpr std::time_t kLong = 3600;

// Adds the settings of a section of an INI file.
void ReadSection(const std::string& file, const std::string& section,
                 std::map<std::string, std::string>& out) {
  std::ifstream in(file);
  std::string line;
  bool inside = false;
  while (std::getline(in, line)) {
    const std::string text(Trimmed(line));
    if (text.empty() || text[0] == '#' || text[0] == ';') continue;
    if (text[0] == '[') {
      inside = text.back() == ']' && Trimmed(text.substr(1, text.size() - 2)) == section;
      continue;
    }
    const std::size_t equals = text.find('=');
    // Indented lines are nested settings.
    if (!inside || equals == std::string::npos || line[0] == ' ' || line[0] == '\t') continue;
    out[std::string(Trimmed(text.substr(0, equals)))] = Trimmed(text.substr(equals + 1));
  }
}

// The words of a command line; quotes group, nothing is expanded.
std::vector<std::string> Words(const std::string& text) {
  std::vector<std::string> out;
  std::string word;
  char quote = '\0';
  bool any = false;
  for (const char c : text) {
    if (quote != '\0') {
      if (c == quote) {
        quote = '\0';
      } else {
        word += c;
      }
    } else if (c == '"' || c == '\'') {
      quote = c;
      any = true;
    } else if (c == ' ' || c == '\t') {
      if (any || !word.empty()) out.push_back(std::exchange(word, {}));
      any = false;
    } else {
      word += c;
    }
  }
  if (any || !word.empty()) out.push_back(word);
  return out;
}

// The output of a program, at most 64 KiB.
Result<std::string> OutputOf(const std::vector<std::string>& words) {
  if (words.empty()) return Status(Code::kInvalidArgument, "an empty command");
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return Status::FromErrno(errno, "open", "a pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t child = -1;
  // Threads of the library block signals; the program must not.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const int failed =
      posix_spawnp(&child, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (failed != 0) {
    close(ends[0]);
    return Status::FromErrno(failed, "run", words[0]);
  }
  std::string out;
  const Deadline deadline = Deadline::After(kProcessPatience);
  bool over = false;
  while (!over && !deadline.Passed() && out.size() < (64U << 10)) {
    pollfd ready{ends[0], POLLIN, 0};
    if (poll(&ready, 1, 100) <= 0) continue;
    std::array<char, 4096> block{};
    const ssize_t n = read(ends[0], block.data(), block.size());
    if (n > 0) out.append(block.data(), static_cast<std::size_t>(n));
    over = n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN);
  }
  close(ends[0]);
  int status = 0;
  pid_t ended = 0;
  while (over && ended == 0 && !deadline.Passed()) {
    ended = waitpid(child, &status, WNOHANG);
    if (ended == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (ended == 0) {
    over = false;
    kill(child, SIGKILL);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }
  if (!over) return Status(Code::kDeadlineExceeded, words[0] + ": no end within 60 s");
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return Status(Code::kPermissionDenied, words[0] + " failed");
  }
  return out;
}

Result<std::string> Ask(HttpRequest request, const std::string& what) {
  ReadLimits limits;
  limits.deadline = Deadline::After(kMetadataPatience);
  request.tries = 3;
  request.follow_redirects = false;  // They would carry tokens to another host.
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto call, HttpClient::Get().Run(std::move(request), limits));
  if (call->response().code != 200) {
    const Status failure = HttpFailure(call->request().url, call->response()).WithContext(what);
    return failure.code() == Code::kUnavailable
               ? failure
               : Status(Code::kPermissionDenied, std::string(failure.message()));
  }
  return call->response().body;
}

}  // namespace

AwsSettings AwsSettings::Read() {
  AwsSettings out;
  std::string profile = EnvironmentVariable("AWS_PROFILE");
  if (profile.empty()) profile = "default";
  const std::string home = EnvironmentVariable("HOME") + "/.aws/";
  std::string config = EnvironmentVariable("AWS_CONFIG_FILE");
  if (config.empty()) config = home + "config";
  std::string secrets = EnvironmentVariable("AWS_SHARED_CREDENTIALS_FILE");
  if (secrets.empty()) secrets = home + "credentials";
  ReadSection(config, profile == "default" ? profile : "profile " + profile, out.profile_);
  ReadSection(secrets, profile, out.profile_);
  return out;
}

std::string AwsSettings::Profile(const std::string& name) const {
  const auto found = profile_.find(name);
  return found == profile_.end() ? std::string() : found->second;
}

std::string AwsSettings::Find(std::initializer_list<const char*> variables,
                              const std::string& setting) const {
  for (const char* name : variables) {
    if (std::string value = EnvironmentVariable(name); !value.empty()) return value;
  }
  return Profile(setting);
}

AwsCredentialChain& AwsCredentialChain::Get() { return PerProcess<AwsCredentialChain>(); }

Result<AwsCredentialChain::Found> AwsCredentialChain::ParseJson(const std::string& text,
                                                                const std::string& origin) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  const auto text_of = [&](const char* name) {
    return json.is_object() && json.contains(name) && json[name].is_string()
               ? json[name].get<std::string>()
               : std::string();
  };
  Found found;
  found.origin = origin;
  found.credentials.access_key = text_of("AccessKeyId");
  found.credentials.secret_key = text_of("SecretAccessKey");
  found.credentials.session_token =
      text_of("SessionToken").empty() ? text_of("Token") : text_of("SessionToken");
  if (!text_of("Expiration").empty()) found.expires = ParseIsoTime(text_of("Expiration"));
  if (found.credentials.access_key.empty() || found.credentials.secret_key.empty()) {
    return Status(Code::kPermissionDenied, origin + " gave no credentials");
  }
  return found;
}

Result<std::optional<AwsCredentialChain::Found>> AwsCredentialChain::FromProcess(
    const AwsSettings& settings) const {
  const std::string command = settings.Profile("credential_process");
  if (command.empty()) return std::optional<Found>();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, OutputOf(Words(command)));
  TENSORMOUNT_ASSIGN_OR_RETURN(Found found, ParseJson(text, "credential_process"));
  return std::optional<Found>(std::move(found));
}

Result<std::optional<AwsCredentialChain::Found>> AwsCredentialChain::FromWebIdentity(
    const AwsSettings& settings) const {
  const std::string file =
      settings.Find({"AWS_WEB_IDENTITY_TOKEN_FILE"}, "web_identity_token_file");
  const std::string role = settings.Find({"AWS_ROLE_ARN"}, "role_arn");
  if (file.empty() || role.empty()) return std::optional<Found>();
  std::ifstream in(file);
  std::stringstream token;
  token << in.rdbuf();
  if (!in) return Status(Code::kPermissionDenied, file + ": the web identity cannot be read");
  std::string session = settings.Find({"AWS_ROLE_SESSION_NAME"}, "role_session_name");
  if (session.empty()) session = "tensormount";
  std::string endpoint = EnvironmentVariable("AWS_ENDPOINT_URL_STS");
  const std::string region = settings.Find({"AWS_REGION", "AWS_DEFAULT_REGION"}, "region");
  if (endpoint.empty()) {
    endpoint =
        region.empty() ? "https://sts.amazonaws.com" : "https://sts." + region + ".amazonaws.com";
  }
  const std::string identity = token.str();
  HttpRequest request;
  request.method = "POST";
  request.url = endpoint + "/";
  request.headers = {"Content-Type: application/x-www-form-urlencoded"};
  request.body =
      "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=" + PercentEncode(role, false) +
      "&RoleSessionName=" + PercentEncode(session, false) +
      "&WebIdentityToken=" + PercentEncode(Trimmed(identity), false);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text,
                               Ask(std::move(request), "AssumeRoleWithWebIdentity"));
  Found found;
  found.origin = "web identity";
  found.credentials = {XmlText(text, "AccessKeyId"), XmlText(text, "SecretAccessKey"),
                       XmlText(text, "SessionToken")};
  found.expires = ParseIsoTime(XmlText(text, "Expiration"));
  if (found.credentials.access_key.empty()) {
    return Status(Code::kPermissionDenied, "AssumeRoleWithWebIdentity gave no credentials");
  }
  return std::optional<Found>(std::move(found));
}

Result<std::optional<AwsCredentialChain::Found>> AwsCredentialChain::FromContainer() const {
  std::string url = EnvironmentVariable("AWS_CONTAINER_CREDENTIALS_FULL_URI");
  if (const std::string relative = EnvironmentVariable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
      !relative.empty()) {
    url = "http://169.254.170.2" + relative;
  }
  if (url.empty()) return std::optional<Found>();
  HttpRequest request;
  request.url = url;
  request.use_proxy = false;
  std::string token = EnvironmentVariable("AWS_CONTAINER_AUTHORIZATION_TOKEN");
  if (const std::string file = EnvironmentVariable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
      !file.empty()) {
    std::ifstream in(file);
    std::getline(in, token);
  }
  if (!token.empty()) request.headers.push_back("Authorization: " + std::string(Trimmed(token)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text,
                               Ask(std::move(request), "credentials of the container"));
  TENSORMOUNT_ASSIGN_OR_RETURN(Found found, ParseJson(text, "container"));
  return std::optional<Found>(std::move(found));
}

Result<std::optional<AwsCredentialChain::Found>> AwsCredentialChain::FromInstance() const {
  if (EnvironmentVariable("AWS_EC2_METADATA_DISABLED") == "true") return std::optional<Found>();
  std::string base = EnvironmentVariable("AWS_EC2_METADATA_SERVICE_ENDPOINT");
  // Elsewhere nothing answers at this address, and waiting for it would delay every program.
  const bool given = !base.empty();
  if (!given) base = "http://169.254.169.254";
  HttpRequest request;
  request.method = "PUT";
  request.url = base + "/latest/api/token";
  request.headers = {"x-aws-ec2-metadata-token-ttl-seconds: 21600"};
  request.tries = 1;
  request.use_proxy = request.follow_redirects = false;
  ReadLimits limits;
  limits.deadline = Deadline::After(given ? kMetadataPatience : std::chrono::seconds(1));
  const auto call = HttpClient::Get().Run(std::move(request), limits);
  if (!call.ok() || call.value()->response().code != 200) return std::optional<Found>();
  const std::string header = "x-aws-ec2-metadata-token: " + call.value()->response().body;
  const std::string path = base + "/latest/meta-data/iam/security-credentials/";
  HttpRequest roles;
  roles.url = path;
  roles.headers = {header};
  roles.use_proxy = false;
  const Result<std::string> role = Ask(std::move(roles), "role of the instance");
  if (!role.ok()) return std::optional<Found>();  // An instance without a role.
  HttpRequest keys;
  keys.url =
      path + std::string(Trimmed(std::string_view(role.value()).substr(0, role.value().find('\n'))));
  keys.headers = {header};
  keys.use_proxy = false;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text,
                               Ask(std::move(keys), "credentials of the instance"));
  TENSORMOUNT_ASSIGN_OR_RETURN(Found found, ParseJson(text, "instance"));
  return std::optional<Found>(std::move(found));
}

Result<AwsCredentialChain::Found> AwsCredentialChain::Find() const {
  const std::string unsigned_requests = EnvironmentVariable("AWS_NO_SIGN_REQUEST");
  if (!unsigned_requests.empty() && unsigned_requests != "0") return Found{};
  Found found;
  found.credentials = {EnvironmentVariable("AWS_ACCESS_KEY_ID"),
                       EnvironmentVariable("AWS_SECRET_ACCESS_KEY"),
                       EnvironmentVariable("AWS_SESSION_TOKEN")};
  found.origin = "environment";
  if (!found.credentials.access_key.empty() && !found.credentials.secret_key.empty()) return found;
  const AwsSettings settings = AwsSettings::Read();
  TENSORMOUNT_ASSIGN_OR_RETURN(std::optional<Found> other, FromWebIdentity(settings));
  if (other) return *other;
  found.credentials = {settings.Profile("aws_access_key_id"),
                       settings.Profile("aws_secret_access_key"),
                       settings.Profile("aws_session_token")};
  found.origin = "profile";
  if (!found.credentials.access_key.empty() && !found.credentials.secret_key.empty()) return found;
  TENSORMOUNT_ASSIGN_OR_RETURN(other, FromProcess(settings));
  if (other) return *other;
  TENSORMOUNT_ASSIGN_OR_RETURN(other, FromContainer());
  if (other) return *other;
  TENSORMOUNT_ASSIGN_OR_RETURN(other, FromInstance());
  return other ? *other : Found{};
}

Result<AwsCredentials> AwsCredentialChain::Current() {
  const auto known = [&](bool is_renewed) -> std::optional<Result<AwsCredentials>> {
    const std::lock_guard lock(mutex_);
    const std::time_t now = std::time(nullptr);
    if (failure_until_ > now) return Result<AwsCredentials>(failure_);
    const bool valid = found_ && (!found_->expires || *found_->expires > now);
    if (found_ && (now < renew_ || (is_renewed && valid))) return found_->credentials;
    return std::nullopt;
  };
  if (const auto found = known(false)) return *found;
  std::unique_lock alone(finding_, std::try_to_lock);
  // Those that are still valid serve while another thread renews them.
  if (const auto found = known(!alone.owns_lock())) return *found;
  if (!alone.owns_lock()) {
    alone.lock();
    if (const auto found = known(false)) return *found;
  }
  Result<Found> found = Find();
  // The end of one caller is no failure of the source.
  if (found.status().code() == Code::kCancelled) return found.status();
  const std::lock_guard lock(mutex_);
  const std::time_t now = std::time(nullptr);
  if (!found.ok()) {
    // Those that are still valid serve until the source answers again.
    if (!found_ || !found_->expires || *found_->expires <= now) {
      failure_ = found.status();
      failure_until_ = now + kFailureHolds;
      return failure_;
    }
    renew_ = now + kAgain;
    return found_->credentials;
  }
  found_ = std::move(found).value();
  if (found_->expires) {
    const std::time_t left = std::max<std::time_t>(*found_->expires - now, 0);
    renew_ = *found_->expires - std::min(kEarly, left / 4);
  } else {
    // An instance's metadata may not have answered yet.
    renew_ = now + (found_->origin == "none" ? kAgain : kLong);
  }
  return found_->credentials;
}

AwsCredentials AwsCredentialChain::Latest() {
  const std::lock_guard lock(mutex_);
  return found_ ? found_->credentials : AwsCredentials();
}

std::string AwsCredentialChain::Origin() {
  const std::lock_guard lock(mutex_);
  return found_ ? found_->origin : "none";
}

}  // namespace tensormount
