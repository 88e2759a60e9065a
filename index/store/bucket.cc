// SPDX-License-Identifier: Apache-2.0
// Removal from stores in buckets. A checkpoint goes as it came: its COMMIT first, by one request,
// then the other objects, under a claim.
#include "index/store/bucket.h"

#include <algorithm>
#include <ctime>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "index/records/commit_record.h"
#include "index/records/store_paths.h"
#include "index/store/bucket_claim.h"

namespace tensormount::bucket {
namespace {

// How long a claim beside a COMMIT may be at work.
constexpr std::chrono::seconds kLastRequest{60};

constexpr int kDeleteTries = 5;
constexpr std::chrono::milliseconds kBetweenDeletes{300};
// Objects that gc deletes before it writes its claim again.
constexpr std::size_t kDeletesAtOnce = 256;

std::string CommitPath(const std::string& store, const std::string& name) {
  return JoinPath(JoinPath(store, name), store_paths::kCommitFile);
}

// One name of a store that has a claim.
class ClaimedName {
 public:
  ClaimedName(ObjectWriter& writer, const std::string& store, std::string name,
              const Store::GcOptions& options, Store::GcReport& report)
      : writer_(writer),
        store_(store),
        name_(std::move(name)),
        options_(options),
        report_(report) {}

  void Collect() {
    const Status done = CollectSteps();
    if (!done.ok()) report_.failed.push_back(Below() + ": " + done.message());
  }

 private:
  std::string Below() const { return std::string(store_paths::kClaimsFolder) + "/" + name_; }

  Status CollectSteps() {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::optional<Claim> claim, Read(writer_, store_, name_));
    if (!claim) return {};
    const std::string folder = JoinPath(store_, name_);
    TENSORMOUNT_ASSIGN_OR_RETURN(const ObjectListing listing, writer_.ListBelow(folder));
    const bool commit =
        std::any_of(listing.objects.begin(), listing.objects.end(),
                    [&](const auto& one) { return one.path == CommitPath(store_, name_); });
    std::vector<UnfinishedUpload> uploads;
    auto unfinished = writer_.Unfinished(folder);
    if (unfinished.ok()) {
      uploads = std::move(unfinished).value();
    } else if (unfinished.status().code() != Code::kUnsupported) {
      return unfinished.status();
    }
    const bool removal = claim->purpose == Purpose::kRemoval;
    const std::int64_t now = listing.now != 0 ? listing.now : std::time(nullptr);
    std::int64_t newest = 0;
    const auto consider = [&](std::int64_t time) {
      newest = std::max(newest, time != 0 ? time : now);  // An unknown time counts as now.
    };
    consider(claim->renewed_seconds);
    if (!removal) {
      for (const ObjectInfo& object : listing.objects) consider(object.modified_seconds);
      for (const UnfinishedUpload& upload : uploads) consider(upload.begun_seconds);
    }
    // Beside a COMMIT, a copy or a removal may be at its last request.
    const std::chrono::seconds least = commit    ? kLastRequest
                                       : removal ? options_.grace
                                                 : options_.staging_age;
    if (now - newest < least.count()) {
      report_.kept.push_back(
          Below() + ": " +
          (removal ? "a checkpoint that was removed; may still be being read"
                   : "a copy that is running or was interrupted, " + Describe(*claim, now)));
      return {};
    }
    // The copy has published, or the removal was cut short before it removed anything.
    if (commit) {
      report_.removed.push_back(Below());
      return options_.dry_run ? Status() : Release(writer_, *claim);
    }
    report_.removed.push_back(name_);
    for (const ObjectInfo& object : listing.objects) report_.bytes_freed += object.size;
    if (options_.dry_run) return {};
    // From now on no copy can take the name up again.
    const Status taken = TakeOverForRemoval(writer_, *claim);
    if (taken.code() == Code::kStale) {
      report_.removed.pop_back();
      return {};
    }
    TENSORMOUNT_RETURN_IF_ERROR(taken);
    // A copy may have published just before.
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ObjectInfo> published,
                                 writer_.InfoOf(CommitPath(store_, name_)));
    if (published) {
      report_.removed.pop_back();
      return Release(writer_, *claim);
    }
    // Another gc must not take the claim over while objects are deleted by this list.
    for (std::size_t at = 0; at < listing.objects.size(); at += kDeletesAtOnce) {
      TENSORMOUNT_RETURN_IF_ERROR(Renew(writer_, *claim));
      const std::size_t count = std::min(listing.objects.size() - at, kDeletesAtOnce);
      TENSORMOUNT_RETURN_IF_ERROR(writer_.Delete(std::span(listing.objects).subspan(at, count)));
    }
    for (const UnfinishedUpload& upload : uploads) {
      TENSORMOUNT_RETURN_IF_ERROR(writer_.Abort(upload));
    }
    return Release(writer_, *claim);
  }

  ObjectWriter& writer_;
  const std::string& store_;
  const std::string name_;
  const Store::GcOptions& options_;
  Store::GcReport& report_;
};

}  // namespace

Status CheckStorePath(const std::string& path) {
  const std::size_t scheme = path.find("://");
  const std::string below = WithoutTrailingSlashes(path.substr(scheme + 3));
  for (std::size_t at = 0; at <= below.size();) {
    const std::size_t end = std::min(below.find('/', at), below.size());
    const std::string part = below.substr(at, end - at);
    if (part.empty() || part == "." || part == "..") {
      return InvalidArgument(path +
                             ": empty parts, \".\" and \"..\" are no directories in a bucket");
    }
    at = end + 1;
  }
  return {};
}

Status CreateSuperblock(ObjectWriter& writer, const std::string& path, std::string text) {
  const std::string at = JoinPath(path, store_paths::kSuperblockFile);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ObjectInfo> there, writer.InfoOf(at));
  if (there) return {};
  Status put = writer.Put(at, text, {.if_absent = true}).status();
  // A server without conditions: whether it may be written to is decided where it matters.
  if (put.code() == Code::kUnsupported) put = writer.Put(at, std::move(text), {}).status();
  return put.code() == Code::kAlreadyExists ? Status() : put;
}

Result<std::string> MoveAway(FileSystem& fs, const std::string& store, const std::string& name,
                             const std::optional<Uuid>& only) {
  ObjectWriter& writer = *fs.object_writer();
  const std::string path = CommitPath(store, name);
  const Result<std::string> read = writer.Get(path, kMaxCommitBytes, nullptr);
  if (read.status().code() == Code::kNotFound) {
    return Status(Code::kNotFound, JoinPath(store, name) + ": no such checkpoint");
  }
  TENSORMOUNT_RETURN_IF_ERROR(read.status());
  const std::string& commit = read.value();
  // Without `only`, a checkpoint whose COMMIT is damaged can be removed, too.
  const Result<DecodedCommit> decoded = DecodeCommit(commit, path);
  if (only) {
    TENSORMOUNT_RETURN_IF_ERROR(decoded.status());
    if (decoded.value().record.uuid != *only) {
      return Status(Code::kStale,
                    JoinPath(store, name) + ": the checkpoint was replaced by another one");
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Claim claim,
      TakeForRemoval(writer, store, name, decoded.ok() ? decoded.value().record.uuid : Uuid(),
                     commit));
  // Each request is sent once: an answer that comes late must not lead to the deletion of a
  // checkpoint that was published meanwhile.
  Status deleted;
  for (int turn = 0; turn < kDeleteTries; ++turn) {
    if (turn > 0) std::this_thread::sleep_for(kBetweenDeletes * turn);
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool ours, IsOurs(writer, claim));
    if (!ours) {
      deleted = Status(Code::kBusy, "another process changes this name");
      break;
    }
    ObjectInfo info;
    info.path = path;
    const Result<std::string> now = writer.Get(path, kMaxCommitBytes, &info);
    if (now.ok() && now.value() != commit) {
      (void)Release(writer, claim);
      return Status(Code::kStale,
                    JoinPath(store, name) + ": the checkpoint was replaced by another one");
    }
    deleted = now.status().code() == Code::kNotFound ? Status()
              : now.ok()                             ? writer.Delete(std::vector<ObjectInfo>{info})
                                                     : now.status();
    if (deleted.ok()) {
      TENSORMOUNT_RETURN_IF_ERROR(KeepRemoval(writer, store, claim));
      return claim.path;
    }
    if (deleted.code() == Code::kPermissionDenied) {
      (void)Release(writer, claim);
      return deleted;
    }
  }
  return Status(Code::kUnknown, "cannot tell whether " + JoinPath(store, name) + " was removed: " +
                                    deleted.message() + "; remove it again to find out");
}

Status PutBack(FileSystem& fs, const std::string& store, const std::string& name) {
  ObjectWriter& writer = *fs.object_writer();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<Claim> claim, Read(writer, store, name));
  if (!claim || claim->purpose != Purpose::kRemoval || claim->commit.empty()) {
    return Status(Code::kNotFound, JoinPath(store, name) + ": is not being removed");
  }
  TENSORMOUNT_RETURN_IF_ERROR(
      writer.Put(CommitPath(store, name), claim->commit, {.if_absent = true}).status());
  return Release(writer, *claim);
}

Result<std::uint64_t> BytesBelow(FileSystem& fs, const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ObjectListing listing, fs.object_writer()->ListBelow(path));
  std::uint64_t bytes = 0;
  for (const ObjectInfo& object : listing.objects) bytes += object.size;
  return bytes;
}

void Collect(FileSystem& fs, const std::string& store, const Store::GcOptions& options,
             const std::vector<std::string>& names, Store::GcReport& report) {
  ObjectWriter& writer = *fs.object_writer();
  Result<std::vector<std::string>> claimed = names;
  if (names.empty()) claimed = ClaimedNames(writer, store);
  if (!claimed.ok()) {
    report.failed.push_back(std::string(store_paths::kClaimsFolder) + ": " +
                            claimed.status().message());
    return;
  }
  for (const std::string& name : claimed.value()) {
    ClaimedName(writer, store, name, options, report).Collect();
  }
}

Result<std::vector<Store::FsckFinding>> FindLeftovers(FileSystem& fs, const Store& store) {
  ObjectWriter& writer = *fs.object_writer();
  std::vector<Store::FsckFinding> out;
  const auto note = [&](std::string object, std::string problem, std::string remedy, bool damage) {
    Store::FsckFinding& finding = out.emplace_back();
    finding.object = std::move(object);
    finding.problem = std::move(problem);
    finding.remedy = std::move(remedy);
    finding.damage = damage;
  };
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> claimed,
                               ClaimedNames(writer, store.path()));
  for (const std::string& name : claimed) {
    const std::string object = std::string(store_paths::kClaimsFolder) + "/" + name;
    const Result<std::optional<Claim>> claim = Read(writer, store.path(), name);
    if (!claim.ok()) {
      note(object, claim.status().message(), "", false);
      continue;
    }
    if (!claim.value()) continue;
    std::string uploads;
    if (const auto unfinished = writer.Unfinished(store.CheckpointPath(name));
        unfinished.ok() && !unfinished.value().empty()) {
      uploads = "; unfinished uploads: " + std::to_string(unfinished.value().size());
    }
    const std::string when = Describe(*claim.value(), std::time(nullptr)) + uploads;
    const Result<std::optional<ObjectInfo>> commit = writer.InfoOf(CommitPath(store.path(), name));
    if (commit.ok() && commit.value()) {
      note(object, "left beside a checkpoint by a copy or a removal, " + when, "gc deletes it",
           false);
    } else if (claim.value()->purpose == Purpose::kCopy) {
      note(object, "a copy that is running or was interrupted, " + when,
           "run the copy again to continue it, or gc removes it after a day", false);
    } else {
      note(object, "a checkpoint that was removed, " + when, "gc deletes its objects", false);
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names, store.Names());
  for (const std::string& name : names) {
    if (std::binary_search(claimed.begin(), claimed.end(), name)) continue;
    const CheckpointListing listing = store.FindListing(name);
    if (listing.problem.code() != Code::kNotFound) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const ObjectListing below,
                                 writer.ListBelow(store.CheckpointPath(name)));
    const auto has = [&](std::string_view folder) {
      const std::string begin = JoinPath(store.CheckpointPath(name), folder) + "/";
      return std::any_of(below.objects.begin(), below.objects.end(),
                         [&](const ObjectInfo& object) { return object.path.starts_with(begin); });
    };
    // A copy or a removal may have begun since the claims were listed.
    const Result<std::optional<Claim>> claim = Read(writer, store.path(), name);
    if (below.objects.empty() || (claim.ok() && claim.value())) continue;
    if (has("manifest") && has("data")) {
      note(name, "the checkpoint has no COMMIT: COMMIT was lost, or other programs copied a part",
           "copy the checkpoint again, after the objects were deleted", true);
    } else {
      note(name, "objects that are no checkpoint: there is no COMMIT", "", false);
    }
  }
  return out;
}

}  // namespace tensormount::bucket
