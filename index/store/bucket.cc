// SPDX-License-Identifier: Apache-2.0
// Removal from stores in buckets. A checkpoint goes as it came: its COMMIT first, by one request,
// then the other objects, under a claim.
#include "index/store/bucket.h"

#include <algorithm>
#include <ctime>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "index/records/commit_record.h"
#include "index/records/store_paths.h"
#include "index/store/bucket_claim.h"

namespace tensormount::bucket {
namespace {

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
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ObjectInfo> commit,
                                 writer_.InfoOf(CommitPath(store_, name_)));
    // The copy has published, or the removal ended before it removed anything.
    if (commit) {
      report_.removed.push_back(Below());
      return options_.dry_run ? Status() : Release(writer_, *claim);
    }
    const std::string folder = JoinPath(store_, name_);
    TENSORMOUNT_ASSIGN_OR_RETURN(const ObjectListing listing, writer_.ListBelow(folder));
    std::vector<UnfinishedUpload> uploads;
    if (auto unfinished = writer_.Unfinished(folder); unfinished.ok()) {
      uploads = std::move(unfinished).value();
    }
    const bool removal = claim->purpose == Purpose::kRemoval;
    std::int64_t newest = claim->renewed_seconds;
    if (!removal) {
      for (const ObjectInfo& object : listing.objects) {
        newest = std::max(newest, object.modified_seconds);
      }
      for (const UnfinishedUpload& upload : uploads) {
        newest = std::max(newest, upload.begun_seconds);
      }
    }
    const std::int64_t now = listing.now != 0 ? listing.now : std::time(nullptr);
    const std::chrono::seconds least = removal ? options_.grace : options_.staging_age;
    if (now - newest < least.count()) {
      report_.kept.push_back(
          Below() + ": " +
          (removal ? "a checkpoint that was removed; may still be being read"
                   : "a copy that is running or was interrupted, " + Describe(*claim, now)));
      return {};
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
    std::vector<std::string> paths;
    for (const ObjectInfo& object : listing.objects) paths.push_back(object.path);
    TENSORMOUNT_RETURN_IF_ERROR(writer_.Delete(paths));
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
                             const Uuid& uuid) {
  ObjectWriter& writer = *fs.object_writer();
  const std::string path = CommitPath(store, name);
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string commit, writer.Get(path, kMaxCommitBytes, nullptr));
  TENSORMOUNT_ASSIGN_OR_RETURN(const DecodedCommit decoded, DecodeCommit(commit, path));
  if (decoded.record.uuid != uuid) {
    return Status(Code::kStale,
                  JoinPath(store, name) + ": the checkpoint was replaced by another one");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Claim claim,
                               TakeForRemoval(writer, store, name, uuid, std::move(commit)));
  const Status deleted = writer.Delete(std::vector<std::string>{path});
  if (deleted.ok()) return claim.path;
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
    const bool copy = claim.value()->purpose == Purpose::kCopy;
    note(
        object,
        (copy ? "a copy that is running or was interrupted, " : "a checkpoint that was removed, ") +
            Describe(*claim.value(), std::time(nullptr)) + uploads,
        copy ? "run the copy again to continue it, or gc removes it after a day"
             : "gc deletes its objects",
        false);
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
    if (below.objects.empty()) continue;
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
