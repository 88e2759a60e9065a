// SPDX-License-Identifier: Apache-2.0
// Models of the Hugging Face hub, by its interface for programs.
#include "remote/hub_file_system.h"

#include <cstdlib>
#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "remote/environment.h"
#include "remote/text.h"
#include "remote/url.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kMostAnswer = std::uint64_t{16} << 20;

std::string Endpoint() {
  const std::string given = EnvironmentVariable("HF_ENDPOINT");
  return given.empty() ? "https://huggingface.co" : WithoutTrailingSlashes(given);
}

std::string Token() {
  if (std::string token(Trimmed(EnvironmentVariable("HF_TOKEN"))); !token.empty())
    return token;
  std::string file = EnvironmentVariable("HF_TOKEN_PATH");
  if (file.empty()) {
    const std::string home = EnvironmentVariable("HF_HOME");
    file = (home.empty() ? EnvironmentVariable("HOME") + "/.cache/huggingface" : home) + "/token";
  }
  std::ifstream in(file);
  std::string token;
  std::getline(in, token);
  return std::string(Trimmed(token));
}

std::vector<std::string> Headers() {
  const std::string token = Token();
  if (token.empty()) return {};
  return {"Authorization: Bearer " + token};
}

}  // namespace

Result<HubFileSystem::Location> HubFileSystem::LocationOf(const std::string& path) {
  const auto bad = [&](const char* why) {
    return Status(Code::kInvalidArgument, path + ": " + why + ": hf://ORG/MODEL[@REVISION][/FILE]");
  };
  const std::string rest = path.substr(5);
  const std::size_t org = rest.find('/');
  if (org == 0 || org == std::string::npos) return bad("names no model");
  const std::size_t end = rest.find('/', org + 1);
  Location at;
  at.model = rest.substr(0, end);
  if (end != std::string::npos) at.file = rest.substr(end + 1);
  const std::size_t sign = at.model.find('@');
  at.revision = sign == std::string::npos ? "main" : PercentDecode(at.model.substr(sign + 1));
  at.model = at.model.substr(0, sign);
  if (at.model.size() == org + 1 || at.revision.empty()) return bad("names no model or revision");
  if (at.model.find_first_of("?#%") != std::string::npos) return bad("is no name of a model");
  return at;
}

Result<std::shared_ptr<const HubFileSystem::Commit>> HubFileSystem::CommitOf(
    const std::string& path, const Location& at) {
  const std::string key = at.model + "@" + at.revision;
  {
    Commits& commits = commits_.Get();
    const std::lock_guard lock(commits.mutex);
    const auto known = commits.by_name.find(key);
    if (known != commits.by_name.end()) return known->second;
  }
  HttpRequest request;
  request.url = Endpoint() + "/api/models/" + PercentEncode(at.model, true) + "/revision/" +
                PercentEncode(at.revision, false);
  request.headers = Headers();
  request.most_body = kMostAnswer;
  const auto answered = HttpClient::Get().Run(std::move(request));
  if (!answered.ok()) return answered.status().WithContext(path);
  const auto& call = answered.value();
  if (call->response().code != 200) return FailureOf(path, call->response());
  const nlohmann::json json = nlohmann::json::parse(call->response().body, nullptr, false);
  auto commit = std::make_shared<Commit>();
  if (json.is_object() && json.contains("sha") && json["sha"].is_string()) {
    commit->hash = json["sha"].get<std::string>();
  }
  if (json.is_object() && json.contains("siblings") && json["siblings"].is_array()) {
    for (const auto& file : json["siblings"]) {
      if (file.is_object() && file.contains("rfilename") && file["rfilename"].is_string()) {
        commit->files.push_back(file["rfilename"].get<std::string>());
      }
    }
  }
  if (commit->hash.empty() ||
      commit->hash.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return Status(Code::kUnsupported, path + ": the hub's answer names no commit");
  }
  Commits& commits = commits_.Get();
  const std::lock_guard lock(commits.mutex);
  // Another thread may have been first: all use the same commit.
  return commits.by_name.emplace(key, std::move(commit)).first->second;
}

Result<RemoteObject> HubFileSystem::ObjectAt(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Location at, LocationOf(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto commit, CommitOf(path, at));
  RemoteObject object;
  object.url = Endpoint() + "/" + PercentEncode(at.model, true) + "/resolve/" + commit->hash + "/" +
               PercentEncode(at.file, true);
  object.headers = Headers();
  return object;
}

Result<std::optional<RemoteFileSystem::Entries>> HubFileSystem::EntriesOf(const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Location at, LocationOf(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto commit, CommitOf(path, at));
  const std::string prefix = at.file.empty() ? "" : WithoutTrailingSlashes(at.file) + "/";
  Entries entries;
  for (const std::string& file : commit->files) {
    if (!file.starts_with(prefix)) continue;
    const std::string rest = file.substr(prefix.size());
    const std::size_t slash = rest.find('/');
    if (slash != 0 && !rest.empty()) {
      entries[rest.substr(0, slash)] =
          slash == std::string::npos ? FileKind::kFile : FileKind::kDirectory;
    }
  }
  return std::optional<Entries>(std::move(entries));
}

Status HubFileSystem::FailureOf(const std::string& path, const HttpResponse& response) {
  const Status failure = HttpFailure(path, response);
  // The hub answers 401 for models that do not exist, too.
  if (failure.code() != Code::kPermissionDenied) return failure;
  return failure.WithMessage(
      std::string(failure.message()) +
      (Token().empty() ? ": there is no such model, or it needs a token (HF_TOKEN, `hf auth login`)"
                       : ": there is no such model, or the token may not read it"));
}

std::string HubFileSystem::RootOf(const std::string& path) const {
  const std::size_t org = path.find('/', 5);
  // Of a path without a model there is no root: asking for it says what is wrong.
  return org == std::string::npos ? "" : path.substr(0, path.find('/', org + 1));
}

}  // namespace tensormount
