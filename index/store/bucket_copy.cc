// SPDX-License-Identifier: Apache-2.0
// Copies into buckets. The objects of a checkpoint are put at their final keys, under a claim;
// COMMIT is put last, by one put that succeeds only if there is none.
#include "index/store/bucket_copy.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/coding.h"
#include "base/counted.h"
#include "base/errors.h"
#include "base/parallel.h"
#include "index/records/store_paths.h"

namespace tensormount::bucket {
namespace {

// Files that go up at the same time. Each may have up to 64 MiB on its way.
constexpr int kFilesAtOnce = 4;
// Gc leaves a claim alone for a day.
constexpr std::chrono::minutes kRenewAfter{10};
// COMMIT is not put if the last renewal is older: the process may have been suspended.
constexpr std::chrono::minutes kFreshClaim{30};

}  // namespace

// The copy of one checkpoint. Files are numbered as in COMMIT.
struct BucketTarget::Work {
  const copies::CopyRequest& wanted;
  CopiedCheckpoint& out;
  const copies::OpenedSource& source;
  const std::string to;  // STORE/NAME
  Claim claim;
  std::mutex mutex;  // Guards what follows, `out` and `claim`.
  std::chrono::steady_clock::time_point renewed;
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
            .renewed = std::chrono::steady_clock::now()};
  const Status copied = CopySteps(work);
  if (!copied.ok()) {
    if ((copied.code() == Code::kDataLoss || copied.code() == Code::kNotFound) &&
        source.Deleted()) {
      return Status(Code::kStale,
                    wanted.directory + ": the checkpoint was deleted while it was copied");
    }
    return copied;
  }
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
  TENSORMOUNT_RETURN_IF_ERROR(CheckName(work.wanted, work.out));
  if (work.out.was_there) return pace_.Done(work.wanted.bytes);
  TENSORMOUNT_RETURN_IF_ERROR(FindEarlier(work));
  const std::size_t count = work.source.record.files.size();
  work.etags.resize(count);
  struct Nothing {};
  TENSORMOUNT_RETURN_IF_ERROR(ForEachParallel<Nothing>(
      count, kFilesAtOnce, [&](std::size_t i, Nothing&) { return Place(work, i); }));
  {
    const std::lock_guard lock(work.mutex);
    TENSORMOUNT_RETURN_IF_ERROR(Renew(writer_, work.claim));
    work.renewed = std::chrono::steady_clock::now();
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckAll(work));
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
  std::vector<std::string> foreign;
  for (const ObjectInfo& object : listing.objects) {
    const std::string below = object.path.substr(work.to.size() + 1);
    const CommitRecord::Entry* const entry = work.source.record.Find(below);
    if (entry != nullptr && entry->length == object.size) {
      work.there[object.path] = object;
    } else {
      foreign.push_back(object.path);
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(writer_.Delete(foreign));
  // A server that does not tell: each file begins anew.
  const Result<std::vector<UnfinishedUpload>> unfinished = writer_.Unfinished(work.to);
  if (!unfinished.ok()) return {};
  for (const UnfinishedUpload& one : unfinished.value()) work.unfinished[one.path] = one.id;
  return {};
}

// Brings one file into place. Runs on several threads.
Status BucketTarget::Place(Work& work, std::size_t number) {
  TENSORMOUNT_RETURN_IF_ERROR(RenewIfDue(work));
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
    TENSORMOUNT_RETURN_IF_ERROR(writer_.Delete(std::vector<std::string>{to}));
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
  options.cancel = &pace_.stopped();
  if (const auto unfinished = work.unfinished.find(to); unfinished != work.unfinished.end()) {
    options.continued = unfinished->second;
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<ObjectUpload> upload,
                               writer_.Upload(to, entry.length, options));
  copies::FileProof proof(work.source, entry);
  std::vector<std::byte> buffer(pace_.Block());
  for (std::uint64_t at = 0; at < entry.length;) {
    const auto n =
        static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), entry.length - at));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got,
                                 from->ReadAtWithin(at, buffer.data(), n, entry.length));
    if (got != n) TENSORMOUNT_RETURN_IF_ERROR(from->ReadExactAt(at, buffer.data(), n));
    TENSORMOUNT_RETURN_IF_ERROR(proof.Add(buffer.data(), n));
    TENSORMOUNT_RETURN_IF_ERROR(upload->Add(buffer.data(), n));
    at += n;
    TENSORMOUNT_RETURN_IF_ERROR(pace_.Read(n));
    TENSORMOUNT_RETURN_IF_ERROR(RenewIfDue(work));
  }
  TENSORMOUNT_RETURN_IF_ERROR(proof.Finish());
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

Status BucketTarget::Publish(Work& work) {
  if (std::chrono::steady_clock::now() - work.renewed > kFreshClaim) {
    return Status(Code::kStale, work.to + ": the copy stood still for too long");
  }
  const std::string path = JoinPath(work.to, store_paths::kCommitFile);
  const Status put = writer_.Put(path, work.source.commit, {.if_absent = !unconditional_}).status();
  if (put.ok()) return {};
  // An earlier try may have succeeded, and its answer been lost; or another copy of the same
  // checkpoint was first.
  const Result<std::string> now = writer_.Get(path, kMaxCommitBytes, nullptr);
  if (now.ok() && now.value() == work.source.commit) return {};
  if (now.ok()) {
    return Status(Code::kAlreadyExists, work.to + ": the name was taken during the copy");
  }
  // The server has answered that it refuses: nothing can come of the put any more.
  const bool refused = put.code() == Code::kPermissionDenied || put.code() == Code::kUnsupported;
  if (refused && now.status().code() == Code::kNotFound) return put;
  return Status(Code::kUnknown, "cannot tell whether " + work.to + " was published: " +
                                    put.message() + "; the same copy again finds out");
}

// So that gc takes the copy for a running one.
Status BucketTarget::RenewIfDue(Work& work) {
  const std::lock_guard lock(work.mutex);
  const auto now = std::chrono::steady_clock::now();
  if (now - work.renewed < kRenewAfter) return {};
  work.renewed = now;
  return Renew(writer_, work.claim);
}

}  // namespace tensormount::bucket
