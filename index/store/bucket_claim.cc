// SPDX-License-Identifier: Apache-2.0
// Claims of names in buckets: small objects that are put on conditions.
#include "index/store/bucket_claim.h"

#include <algorithm>
#include <ctime>
#include <unistd.h>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/file_system.h"
#include "index/records/store_paths.h"
#include "index/store/store.h"

namespace tensormount::bucket {
namespace {

constexpr std::uint64_t kMostClaim = kMaxCommitBytes + (64 << 10);
constexpr int kReleaseTries = 4;
constexpr std::string_view kClaimFormat = "tensormount-claim";

std::string ThisProcess() {
  char host[256] = {};
  if (gethostname(host, sizeof(host) - 1) != 0) return "process " + std::to_string(getpid());
  return std::string(host) + ", process " + std::to_string(getpid());
}

std::string PathOf(const std::string& store, const std::string& name) {
  return JoinPath(JoinPath(store, store_paths::kClaimsFolder), name);
}

// The claim as an object: a line of JSON, and for a removal the bytes of COMMIT. The random part
// makes each claim's ETag its own.
std::string Encoded(const Claim& claim) {
  nlohmann::ordered_json json;
  json["format"] = std::string(kClaimFormat);
  json["version"] = 1;
  json["uuid"] = claim.uuid.ToString();
  json["for"] = claim.purpose == Purpose::kCopy ? "copy" : "removal";
  json["by"] = claim.by;
  json["random"] = Uuid::Random().ToString();
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n" + claim.commit;
}

Result<Claim> Decoded(const std::string& path, const std::string& name, std::string text) {
  const std::size_t end = text.find('\n');
  const auto bad = [&] { return Status(Code::kDataLoss, path + ": is no claim of a name"); };
  if (end == std::string::npos || end > 4096) return bad();
  const nlohmann::json json = nlohmann::json::parse(
      text.begin(), text.begin() + static_cast<std::ptrdiff_t>(end), nullptr, false);
  if (!json.is_object()) return bad();
  const auto text_of = [&](const char* field) {
    const auto found = json.find(field);
    return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  const std::optional<Uuid> uuid = Uuid::Parse(text_of("uuid"));
  const std::string purpose = text_of("for");
  if (text_of("format") == kClaimFormat && json.value("version", nlohmann::json()) != 1) {
    return Status(Code::kUnsupported, path + ": a claim of a newer version");
  }
  if (text_of("format") != kClaimFormat || !uuid || (purpose != "copy" && purpose != "removal")) {
    return bad();
  }
  Claim claim;
  claim.path = path;
  claim.name = name;
  claim.uuid = *uuid;
  claim.purpose = purpose == "copy" ? Purpose::kCopy : Purpose::kRemoval;
  claim.by = text_of("by");
  claim.commit = text.substr(end + 1);
  return claim;
}

// Puts the claim. On success its ETag is known.
Status PutClaim(ObjectWriter& writer, Claim& claim, PutOptions options) {
  if (claim.unconditional) options = {};
  claim.by = ThisProcess();
  const std::string text = Encoded(claim);
  Result<std::string> put = writer.Put(claim.path, text, options);
  if (!put.ok() &&
      (put.status().code() == Code::kAlreadyExists || put.status().code() == Code::kStale)) {
    // The answer to an earlier try may have been lost.
    ObjectInfo info;
    const Result<std::string> there = writer.Get(claim.path, kMostClaim, &info);
    if (!there.ok() || there.value() != text) return put.status();
    claim.etag = info.etag;
    return {};
  }
  TENSORMOUNT_RETURN_IF_ERROR(put.status());
  claim.etag = std::move(put).value();
  if (claim.etag.empty() && !claim.unconditional) {
    if (options.if_absent) (void)writer.Delete(std::vector<ObjectInfo>{{.path = claim.path}});
    return {Code::kUnsupported, claim.path + ": the server sends no ETag"};
  }
  return {};
}

}  // namespace

std::string Describe(const Claim& claim, std::int64_t now) {
  const std::int64_t age = std::max<std::int64_t>(now - claim.renewed_seconds, 0);
  const std::string time = age < 120         ? std::to_string(age) + " s"
                           : age < 7200      ? std::to_string(age / 60) + " min"
                           : age < 86400 * 2 ? std::to_string(age / 3600) + " h"
                                             : std::to_string(age / 86400) + " days";
  return "last renewed " + time + " ago" + (claim.by.empty() ? "" : " by " + claim.by);
}

Result<std::optional<Claim>> Read(ObjectWriter& writer, const std::string& store,
                                  const std::string& name) {
  const std::string path = PathOf(store, name);
  ObjectInfo info;
  Result<std::string> text = writer.Get(path, kMostClaim, &info);
  if (text.status().code() == Code::kNotFound) return std::optional<Claim>();
  TENSORMOUNT_RETURN_IF_ERROR(text.status());
  TENSORMOUNT_ASSIGN_OR_RETURN(Claim claim, Decoded(path, name, std::move(text).value()));
  claim.etag = info.etag;
  claim.renewed_seconds = info.modified_seconds;
  return std::optional<Claim>(std::move(claim));
}

Result<std::vector<std::string>> ClaimedNames(ObjectWriter& writer, const std::string& store) {
  const std::string folder = JoinPath(store, store_paths::kClaimsFolder);
  TENSORMOUNT_ASSIGN_OR_RETURN(const ObjectListing listing, writer.ListBelow(folder));
  std::vector<std::string> names;
  for (const ObjectInfo& object : listing.objects) {
    std::string name = object.path.substr(folder.size() + 1);
    if (CheckCheckpointName(name).ok()) names.push_back(std::move(name));
  }
  return names;
}

Result<Claim> TakeForCopy(ObjectWriter& writer, const std::string& store, const std::string& name,
                          const Uuid& uuid, bool unconditional) {
  Claim claim{
      .path = PathOf(store, name), .name = name, .uuid = uuid, .unconditional = unconditional};
  const auto without_conditions = [&](const std::string& what) {
    return Status(Code::kUnsupported,
                  store + ": the server " + what +
                      ", so two copies to one name at once could mix, and one could replace what "
                      "the other published. If nobody else writes there, --unconditional copies "
                      "without this protection");
  };
  for (int turn = 0; turn < 3; ++turn) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::optional<Claim> there, Read(writer, store, name));
    if (there && there->purpose == Purpose::kRemoval) {
      return Status(Code::kBusy,
                    JoinPath(store, name) +
                        ": a checkpoint of this name was removed, and its objects are not deleted "
                        "yet: `tensormount gc " +
                        store + "` deletes them");
    }
    if (there && there->uuid != uuid) {
      return Status(Code::kBusy,
                    JoinPath(store, name) + ": another checkpoint (" + there->uuid.ToString() +
                        ") is being copied to this name, or its copy was interrupted (" +
                        Describe(*there, std::time(nullptr)) + "); `tensormount gc " + store +
                        "` removes what an interrupted copy left, after a day");
    }
    PutOptions options;
    claim.is_new = !there;
    if (there) {
      options.if_match = there->etag;
    } else {
      options.if_absent = true;
    }
    const Status put = PutClaim(writer, claim, options);
    if (put.code() == Code::kAlreadyExists || put.code() == Code::kStale) continue;
    if (put.code() == Code::kUnsupported && !unconditional) {
      return without_conditions("refuses conditional puts (" + put.message() + ")");
    }
    TENSORMOUNT_RETURN_IF_ERROR(put);
    if (unconditional) return claim;
    // Whether conditions count: the claim is there now, so these puts have to fail.
    const std::pair<PutOptions, Code> probes[] = {
        {{.if_absent = true}, Code::kAlreadyExists},
        {{.if_match = "\"00000000000000000000000000000000\""}, Code::kStale}};
    for (const auto& [conditions, expected] : probes) {
      Status again;
      // Another copy that has just ended may have deleted the claim: the first put makes it anew.
      for (int probe = 0; probe < 2 && again.code() != expected; ++probe) {
        again = writer.Put(claim.path, Encoded(claim), conditions).status();
        if (!again.ok() && again.code() != expected) break;
      }
      if (again.code() == expected) continue;
      if (!again.ok() && again.code() != Code::kUnsupported) return again;
      if (claim.is_new) (void)writer.Delete(std::vector<ObjectInfo>{{.path = claim.path}});
      return without_conditions(std::string(again.ok() ? "ignores" : "refuses") +
                                (conditions.if_absent ? " \"If-None-Match\"" : " \"If-Match\""));
    }
    // If a probe has written the claim, its ETag is another one now.
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool ours, IsOurs(writer, claim));
    if (!ours) continue;
    return claim;
  }
  return Status(Code::kBusy,
                JoinPath(store, name) + ": several copies claim this name at the same time");
}

Result<Claim> TakeForRemoval(ObjectWriter& writer, const std::string& store,
                             const std::string& name, const Uuid& uuid, std::string commit) {
  Claim claim{.path = PathOf(store, name),
              .name = name,
              .uuid = uuid,
              .purpose = Purpose::kRemoval,
              .commit = std::move(commit)};
  TENSORMOUNT_ASSIGN_OR_RETURN(std::optional<Claim> there, Read(writer, store, name));
  PutOptions options;
  if (there) {
    // The checkpoint is published, so a copy has ended, or its removal was interrupted.
    options.if_match = there->etag;
  } else {
    options.if_absent = true;
  }
  Status put = PutClaim(writer, claim, options);
  // Without conditions: two removals of one checkpoint do the same.
  if (put.code() == Code::kUnsupported) {
    claim.unconditional = true;
    put = PutClaim(writer, claim, {});
  }
  if (put.code() == Code::kAlreadyExists || put.code() == Code::kStale) {
    return Status(Code::kBusy, JoinPath(store, name) + ": another process changes this name");
  }
  TENSORMOUNT_RETURN_IF_ERROR(put);
  return claim;
}

Status KeepRemoval(ObjectWriter& writer, const std::string& store, Claim claim) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<Claim> there, Read(writer, store, claim.name));
  if (there) return {};
  const Status put = PutClaim(writer, claim, {.if_absent = true});
  return put.code() == Code::kAlreadyExists ? Status() : put;
}

Status TakeOverForRemoval(ObjectWriter& writer, Claim& claim) {
  claim.purpose = Purpose::kRemoval;
  const Status renewed = Renew(writer, claim);
  if (renewed.code() != Code::kUnsupported) return renewed;
  claim.unconditional = true;
  return Renew(writer, claim);
}

Status Renew(ObjectWriter& writer, Claim& claim) {
  return PutClaim(writer, claim, {.if_match = claim.etag});
}

Status Release(ObjectWriter& writer, const Claim& claim) {
  // Somebody may have removed the checkpoint meanwhile, which takes the claim over. Servers exist
  // that know no conditions of deletions, so the claim is also looked at.
  for (int turn = 0;; ++turn) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool ours, IsOurs(writer, claim));
    if (!ours) return {};
    const Status deleted =
        writer.Delete(std::vector<ObjectInfo>{{.path = claim.path, .etag = claim.etag}});
    if (deleted.code() == Code::kStale) return {};
    if (deleted.code() != Code::kUnavailable || turn == kReleaseTries) return deleted;
  }
}

Result<bool> IsOurs(ObjectWriter& writer, const Claim& claim) {
  ObjectInfo info;
  const Result<std::string> now = writer.Get(claim.path, kMostClaim, &info);
  if (now.status().code() == Code::kNotFound) return false;
  TENSORMOUNT_RETURN_IF_ERROR(now.status());
  return info.etag == claim.etag;
}

}  // namespace tensormount::bucket
