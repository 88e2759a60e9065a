// SPDX-License-Identifier: Apache-2.0
// Copies into buckets. The objects of a checkpoint are put at their final keys, under a claim;
// COMMIT is put last, by one put that succeeds only if there is none.
#include "index/store/bucket_copy.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "base/cancel_scope.h"
#include "base/parallel.h"
#include "index/records/store_paths.h"

namespace tensormount::bucket {
namespace {

// Files that go up at the same time. Each may have up to 64 MiB on its way.
constexpr int kFilesAtOnce = 4;
// Before each object, the claim is written again if the last time is longer ago. It must be less
// than the grace period of gc: a process that was suspended may have lost the claim.
constexpr std::chrono::seconds kRenewAfter{20};
// Before COMMIT is put, the claim is written again if the last time is longer ago.
constexpr std::chrono::seconds kFreshClaim{5};
constexpr std::uint64_t kAskForUploads = std::uint64_t{16} << 20;
constexpr int kCommitTries = 6;
constexpr std::chrono::milliseconds kBetweenCommits{300};

// Counts while the machine sleeps, too.
std::chrono::seconds BootTime() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return std::chrono::seconds(now.tv_sec);
}

}  // namespace

// The copy of one checkpoint. Files are numbered as in COMMIT.
struct BucketTarget::Work {
  const copies::CopyRequest& wanted;
  CopiedCheckpoint& out;
  const copies::OpenedSource& source;
  const std::string to;  // STORE/NAME
  Claim claim;
  std::mutex mutex;                               // Guards what follows, `out` and `claim`.
  std::chrono::seconds renewed;                   // By BootTime.
  std::map<std::string, ObjectInfo> there;        // Objects of an earlier copy, by path.
  std::map<std::string, std::string> unfinished;  // Ids of its uploads, by path.
  std::vector<std::string> etags;                 // Of each file that is in place.

  const CommitRecord::Entry& entry(std::size_t number) const { return source.record.files[number]; }
  void Count(std::uint64_t CopiedCheckpoint::*files, std::uint64_t CopiedCheckpoint::*bytes,
             std::uint64_t length) {
    const std::lock_guard lock(mutex);
    ++(out.*files);
    out.*bytes += length;
  }
};

Status BucketTarget::Copy(const copies::CopyRequest& wanted, CopiedCheckpoint& out) {
  const CancelScope scope(cancel_);
  TENSORMOUNT_RETURN_IF_ERROR(wanted.problem);
  TENSORMOUNT_RETURN_IF_ERROR(CheckName(wanted, out));
  if (out.was_there) return pace_.Done(wanted.bytes);
  TENSORMOUNT_ASSIGN_OR_RETURN(const copies::OpenedSource source, copies::OpenSource(wanted));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      Claim claim, TakeForCopy(writer_, store_.path(), wanted.name, wanted.uuid, unconditional_));
  Work work{.wanted = wanted,
            .out = out,
            .source = source,
            .to = store_.CheckpointPath(wanted.name),
            .claim = std::move(claim),
            .renewed = BootTime()};
  const Status copied = CopySteps(work);
  if (!copied.ok()) {
    if ((copied.code() == Code::kDataLoss || copied.code() == Code::kNotFound) &&
        source.Deleted()) {
      return Status(Code::kStale,
                    wanted.directory + ": the checkpoint was deleted while it was copied");
    }
    return copied;
  }
  EndUploads(work);
  const Status released = Release(writer_, work.claim);
  if (!released.ok()) {
    out.warnings.push_back(work.claim.path +
                           ": could not be deleted, gc deletes it: " + released.message());
  }
  names_[wanted.uuid] = wanted.name;
  RememberCopied(wanted.name, source.record);
  return Status();
}

Status BucketTarget::CopySteps(Work& work) {
  // Another copy may have published since the name was checked.
  const Status free = CheckName(work.wanted, work.out);
  if (!free.ok() && work.claim.is_new) (void)Release(writer_, work.claim);
  TENSORMOUNT_RETURN_IF_ERROR(free);
  if (work.out.was_there) return pace_.Done(work.wanted.bytes);
  TENSORMOUNT_RETURN_IF_ERROR(FindEarlier(work));
  if (work.out.was_there) return pace_.Done(work.wanted.bytes);
  const std::size_t count = work.source.record.files.size();
  work.etags.resize(count);
  struct Nothing {};
  TENSORMOUNT_RETURN_IF_ERROR(ForEachParallel<Nothing>(
      count, kFilesAtOnce, [&](std::size_t i, Nothing&) { return Place(work, i); }));
  TENSORMOUNT_RETURN_IF_ERROR(CheckAll(work));
  // If the claim is still ours, nobody may have changed the objects since.
  TENSORMOUNT_RETURN_IF_ERROR(RenewIfDue(work, std::chrono::seconds(0)));
  TENSORMOUNT_RETURN_IF_ERROR(Publish(work));
  work.Count(&CopiedCheckpoint::files_copied, &CopiedCheckpoint::bytes_copied,
             work.source.commit.size());
  return pace_.Done(work.source.commit.size());
}

// Finds what an earlier, interrupted copy has left, and deletes what does not belong here.
Status BucketTarget::FindEarlier(Work& work) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ObjectListing listing, writer_.ListBelow(work.to));
  if (work.claim.is_new) {
    if (listing.objects.empty()) return {};
    (void)Release(writer_, work.claim);
    return Status(Code::kAlreadyExists,
                  work.to + ": the name is taken: there are objects that are no checkpoint (" +
                      listing.objects.front().path + ")");
  }
  std::vector<ObjectInfo> foreign;
  for (const ObjectInfo& object : listing.objects) {
    const std::string below = object.path.substr(work.to.size() + 1);
    if (below == store_paths::kCommitFile) return CompareCommit(work);
    const CommitRecord::Entry* const entry = work.source.record.Find(below);
    if (entry != nullptr && entry->length == object.size) {
      work.there[object.path] = object;
    } else {
      foreign.push_back(object);
    }
  }
  if (!foreign.empty()) {
    TENSORMOUNT_RETURN_IF_ERROR(RenewIfDue(work, std::chrono::seconds(0)));
    TENSORMOUNT_RETURN_IF_ERROR(writer_.Delete(foreign));
  }
  // A server that does not tell: each file begins anew.
  const Result<std::vector<UnfinishedUpload>> unfinished = writer_.Unfinished(work.to);
  if (!unfinished.ok()) return {};
  for (const UnfinishedUpload& one : unfinished.value()) work.unfinished[one.path] = one.id;
  return {};
}

// Ends uploads in parts that nobody continues: of an earlier copy, or begun twice because an answer
// was lost. After the claim is gone nobody would look for them.
void BucketTarget::EndUploads(Work& work) {
  const auto unfinished = writer_.Unfinished(work.to);
  if (!unfinished.ok()) {
    if (unfinished.status().code() == Code::kUnsupported) return;
    return work.out.warnings.push_back("unfinished uploads may be left, which take space: " +
                                       unfinished.status().message());
  }
  for (const UnfinishedUpload& upload : unfinished.value()) {
    const Status aborted = writer_.Abort(upload);
    if (!aborted.ok()) work.out.warnings.push_back(aborted.message());
  }
}

// Another copy has just published under this name.
Status BucketTarget::CompareCommit(Work& work) {
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::string commit,
      writer_.Get(JoinPath(work.to, store_paths::kCommitFile), kMaxCommitBytes, nullptr));
  work.out.was_there = commit == work.source.commit;
  if (work.out.was_there) return {};
  return Status(Code::kAlreadyExists, work.to + ": the name was taken during the copy");
}

// Brings one file into place. Runs on several threads.
Status BucketTarget::Place(Work& work, std::size_t number) {
  const CancelScope scope(cancel_);
  TENSORMOUNT_RETURN_IF_ERROR(RenewIfDue(work, kRenewAfter));
  const CommitRecord::Entry& entry = work.entry(number);
  const std::string to = JoinPath(work.to, entry.name);
  const std::string mark = copies::AlikeKey(entry).ToHex();
  if (work.there.contains(to)) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ObjectInfo> info, writer_.InfoOf(to));
    // The server has checked the bytes with the SHA-256 that they were sent with, and an object
    // appears as a whole.
    if (info && info->mark == mark && info->size == entry.length) {
      work.etags[number] = info->etag;
      work.Count(&CopiedCheckpoint::files_kept, &CopiedCheckpoint::bytes_kept, entry.length);
      return pace_.Done(entry.length);
    }
    if (info) {
      // Only while the claim is ours: another copy may have put the right object meanwhile.
      TENSORMOUNT_RETURN_IF_ERROR(RenewIfDue(work, std::chrono::seconds(0)));
      TENSORMOUNT_RETURN_IF_ERROR(writer_.Delete(std::vector<ObjectInfo>{*info}));
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool copied, CopyInBucket(work, number, to));
  if (copied) return pace_.Done(entry.length);
  TENSORMOUNT_RETURN_IF_ERROR(Send(work, number, to));
  return pace_.Done(entry.length);
}

// Lets the server copy the file from another checkpoint of the store. False: it has to be sent.
Result<bool> BucketTarget::CopyInBucket(Work& work, std::size_t number, const std::string& to) {
  const CommitRecord::Entry& entry = work.entry(number);
  const Hash128 key = copies::AlikeKey(entry);
  const auto holder = holders_.find(key);
  if (holder == holders_.end() || entry.length == 0) return false;
  const std::string from = JoinPath(store_.CheckpointPath(holder->second), entry.name);
  const Result<std::optional<ObjectInfo>> info = writer_.InfoOf(from);
  // A copy by other programs (`aws s3 sync`) has no mark: what it holds is not proven.
  if (!info.ok() || !info.value() || info.value()->mark != key.ToHex() ||
      info.value()->size != entry.length) {
    return false;
  }
  const Result<std::string> etag = writer_.CopyObject(*info.value(), to);
  if (etag.ok()) {
    work.etags[number] = etag.value();
    work.Count(&CopiedCheckpoint::files_linked, &CopiedCheckpoint::bytes_linked, entry.length);
    return true;
  }
  const std::lock_guard lock(work.mutex);
  if (work.out.links_refused++ == 0) work.out.refusal = etag.status().message();
  return false;
}

Status BucketTarget::Send(Work& work, std::size_t number, const std::string& to) {
  const CommitRecord::Entry& entry = work.entry(number);
  FileInfo from_info;
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> from,
                               copies::OpenFile(work.source, entry, &from_info));
  PutOptions options;
  options.if_absent = !unconditional_;
  options.mark = copies::AlikeKey(entry).ToHex();
  // A server may tell unfinished uploads of whole keys only.
  if (!work.claim.is_new && !work.unfinished.contains(to) && entry.length > kAskForUploads) {
    const auto earlier = writer_.UnfinishedOf(to);
    if (earlier.ok() && !earlier.value().empty()) options.continued = earlier.value().front().id;
  }
  if (const auto unfinished = work.unfinished.find(to); unfinished != work.unfinished.end()) {
    options.continued = unfinished->second;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<ObjectUpload> upload,
                               writer_.Upload(to, entry.length, options));
  const auto put = [&](std::uint64_t, const std::byte* data, std::size_t n) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(upload->Add(data, n));
    return RenewIfDue(work, kRenewAfter);
  };
  TENSORMOUNT_RETURN_IF_ERROR(ReadProven(work.source, entry, *from, put));
  Result<std::string> etag = upload->Finish();
  if (etag.status().code() == Code::kAlreadyExists) {
    // An earlier try, or another copy of this checkpoint, has put the same object.
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ObjectInfo> there, writer_.InfoOf(to));
    if (!there || there->mark != options.mark || there->size != entry.length) {
      return Status(Code::kBusy, to + ": somebody else has written this object");
    }
    etag = there->etag;
  }
  TENSORMOUNT_RETURN_IF_ERROR(etag.status());
  work.etags[number] = etag.value();
  const std::uint64_t kept = upload->bytes_kept();
  work.Count(&CopiedCheckpoint::files_copied, &CopiedCheckpoint::bytes_copied, entry.length - kept);
  const std::lock_guard lock(work.mutex);
  work.out.bytes_kept += kept;
  return {};
}

// Before COMMIT: all objects are there as they were put.
Status BucketTarget::CheckAll(Work& work) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ObjectListing listing, writer_.ListBelow(work.to));
  std::map<std::string, const ObjectInfo*> found;
  for (const ObjectInfo& object : listing.objects) found[object.path] = &object;
  for (std::size_t i = 0; i < work.etags.size(); ++i) {
    const CommitRecord::Entry& entry = work.entry(i);
    const std::string path = JoinPath(work.to, entry.name);
    const auto object = found.find(path);
    const bool same = object != found.end() && object->second->size == entry.length &&
                      (object->second->etag.empty() || work.etags[i].empty() ||
                       object->second->etag == work.etags[i]);
    if (same) continue;
    return Status(Code::kStale, path + ": the object was " +
                                    (object == found.end() ? "deleted" : "replaced") +
                                    " by somebody else during the copy; nothing was published");
  }
  return {};
}

// Each request is sent once. Before it is sent again, the claim must still be ours: otherwise an
// earlier try may have published, the checkpoint been removed, and its objects deleted.
Status BucketTarget::Publish(Work& work) {
  const std::string path = JoinPath(work.to, store_paths::kCommitFile);
  Status put;
  for (int turn = 0; turn < kCommitTries; ++turn) {
    if (turn > 0) std::this_thread::sleep_for(kBetweenCommits * turn);
    put = RenewIfDue(work, std::chrono::seconds(turn > 0 ? 0 : kFreshClaim.count()));
    if (!put.ok()) break;
    const Result<std::string> etag =
        writer_.Put(path, work.source.commit, {.if_absent = !unconditional_, .once = true});
    put = etag.status();
    if (put.code() == Code::kAlreadyExists) {
      // By an earlier try, whose answer was lost, or by another copy of the same checkpoint.
      const Result<std::string> now = writer_.Get(path, kMaxCommitBytes, nullptr);
      if (now.ok() && now.value() == work.source.commit) return {};
      if (now.ok()) {
        return Status(Code::kAlreadyExists, work.to + ": the name was taken during the copy");
      }
    }
    if (put.ok()) return CheckPublished(work, path, etag.value());
    if (put.code() == Code::kPermissionDenied || put.code() == Code::kUnsupported) return put;
  }
  return Status(Code::kUnknown, "cannot tell whether " + work.to + " was published: " +
                                    put.message() + "; the same copy again finds out");
}

// After the put of COMMIT: if the claim is not ours any more, the request may have taken so long
// that the objects were deleted meanwhile.
Status BucketTarget::CheckPublished(Work& work, const std::string& path, const std::string& etag) {
  const Result<bool> ours = IsOurs(writer_, work.claim);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ObjectInfo> commit, writer_.InfoOf(path));
  if (!commit && ours.ok() && ours.value()) {
    return Status(Code::kUnknown, path + ": was put, but is not there");
  }
  if (ours.ok() && ours.value()) return {};
  const Status whole = CheckAll(work);
  if (whole.ok()) return {};
  if (whole.code() == Code::kStale) {
    TENSORMOUNT_RETURN_IF_ERROR(
        writer_.Delete(std::vector<ObjectInfo>{{.path = path, .etag = etag}}));
  }
  return whole;
}

// So that gc takes the copy for a running one; fails if somebody else has taken the claim over.
Status BucketTarget::RenewIfDue(Work& work, std::chrono::seconds after) {
  const std::lock_guard lock(work.mutex);
  if (BootTime() - work.renewed < after) return {};
  const Status renewed = Renew(writer_, work.claim);
  if (renewed.code() == Code::kStale) {
    return Status(Code::kBusy, work.to +
                                   ": another copy of this checkpoint has begun, or gc took "
                                   "this one for an interrupted one; this one ends");
  }
  TENSORMOUNT_RETURN_IF_ERROR(renewed);
  work.renewed = BootTime();
  return {};
}

}  // namespace tensormount::bucket
