// SPDX-License-Identifier: Apache-2.0
// Progress, rate, and what a destination has already.
#include "index/store/copy_target.h"

#include <algorithm>
#include <utility>

#include "base/deadline.h"
#include "base/parallel.h"
#include "shard/leaf_hash.h"

namespace tensormount::copies {
namespace {

// Block size for reading, hashing and writing.
constexpr std::size_t kBlockBytes = std::size_t{1} << 20;
constexpr int kLooksAtOnce = 16;
// Checkpoints whose files are remembered for those that are copied after them.
constexpr std::size_t kMostRemembered = 4;

}  // namespace

CopyPace::CopyPace(const CopyOptions& options)
    : options_(options), owner_(std::this_thread::get_id()) {}

void CopyPace::Expect(std::uint64_t total) {
  total_ = total;
  done_ = 0;
}

Status CopyPace::ReportProgress() {
  if (std::this_thread::get_id() == owner_ && options_.watch && !stopped_) {
    Status verdict = options_.watch(done_, total_);
    if (!verdict.ok()) {
      const std::lock_guard lock(mutex_);
      verdict_ = std::move(verdict);
      stopped_ = true;
    }
  }
  if (!stopped_) return {};
  const std::lock_guard lock(mutex_);
  return verdict_;
}

Status CopyPace::Read(std::uint64_t bytes) {
  TENSORMOUNT_RETURN_IF_ERROR(ReportProgress());
  if (options_.limit_rate == 0) return Status();
  using Clock = std::chrono::steady_clock;
  Deadline until = Deadline::At({});
  {
    const std::lock_guard lock(mutex_);
    // After idle time, reads may exceed the rate limit to make up for at most 100 ms.
    next_ = std::max(next_, Clock::now() - std::chrono::milliseconds(100));
    next_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
        static_cast<double>(bytes) / static_cast<double>(options_.limit_rate)));
    until = Deadline::At(next_);
  }
  while (!until.Passed()) {
    const std::chrono::nanoseconds most = std::chrono::milliseconds(100);
    std::this_thread::sleep_for(std::min(most, until.Left()));
    TENSORMOUNT_RETURN_IF_ERROR(ReportProgress());
  }
  return Status();
}

Status CopyPace::Done(std::uint64_t bytes) {
  done_ += bytes;
  return ReportProgress();
}

std::size_t CopyPace::Block() const {
  if (options_.limit_rate == 0) return kBlockBytes;
  return static_cast<std::size_t>(
      std::clamp<std::uint64_t>(options_.limit_rate / 4, kLeafBytes, kBlockBytes));
}

Status CopyTarget::Prepare(Keys keys, std::uint64_t total) {
  pace_.Expect(total);
  keys_ = std::move(keys);
  if (std::exchange(inspected_, true)) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names, store_.Names());
  std::mutex mutex;
  struct Nothing {};
  // In a bucket each look waits for an answer.
  const int threads = store_.fs().object_writer() != nullptr ? kLooksAtOnce : 1;
  return ForEachParallel<Nothing>(names.size(), threads, [&](std::size_t i, Nothing&) -> Status {
    CommitRecord record;
    const CheckpointListing listing = store_.FindListing(names[i], &record);
    if (!listing.problem.ok()) return {};
    const std::lock_guard lock(mutex);
    names_[listing.uuid] = names[i];
    for (const CommitRecord::Entry& entry : record.files) {
      if (!entry.name.starts_with("data/")) continue;
      const Hash128 key = AlikeKey(entry);
      if (keys_.contains(key)) holders_[key] = names[i];
    }
    return {};
  });
}

Status CopyTarget::ReadProven(const OpenedSource& source, const CommitRecord::Entry& entry,
                              File& from, const Sink& sink) {
  FileProof proof(source, entry);
  std::vector<std::byte> buffer(std::min<std::uint64_t>(pace_.Block(), entry.length));
  for (std::uint64_t at = 0; at < entry.length;) {
    const auto n =
        static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), entry.length - at));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got,
                                 from.ReadAtWithin(at, buffer.data(), n, entry.length));
    if (got != n) TENSORMOUNT_RETURN_IF_ERROR(from.ReadExactAt(at, buffer.data(), n));
    TENSORMOUNT_RETURN_IF_ERROR(proof.Add(buffer.data(), n));
    TENSORMOUNT_RETURN_IF_ERROR(sink(at, buffer.data(), n));
    at += n;
    TENSORMOUNT_RETURN_IF_ERROR(pace_.Read(n));
  }
  return proof.Finish();
}

void CopyTarget::RememberCopied(const std::string& name, const CommitRecord& record) {
  auto& [copied, keys] = copied_.emplace_back();
  copied = name;
  for (const CommitRecord::Entry& entry : record.files) {
    if (!entry.name.starts_with("data/")) continue;
    keys.push_back(AlikeKey(entry));
    holders_[keys.back()] = name;
  }
  if (copied_.size() <= kMostRemembered) return;
  for (const Hash128& key : copied_.front().second) {
    const auto holder = holders_.find(key);
    // A later checkpoint may have the file, too.
    if (holder != holders_.end() && holder->second == copied_.front().first) holders_.erase(holder);
  }
  copied_.pop_front();
}

Status CopyTarget::CheckName(const CopyRequest& wanted, CopiedCheckpoint& out) const {
  const std::string path = store_.CheckpointPath(wanted.name);
  const CheckpointListing now = EntryAt(wanted.name);
  if (now.problem.ok()) {
    out.was_there = now.uuid == wanted.uuid;
    if (out.was_there) return Status();
    return Status(Code::kAlreadyExists,
                  path + ": another checkpoint (" + now.uuid.ToString() + ") has this name");
  }
  if (now.problem.code() != Code::kNotFound) {
    if (now.state == CheckpointListing::State::kUnread) return now.problem;
    return Status(Code::kAlreadyExists, path + ": the name is taken: " + now.problem.message());
  }
  const auto named = names_.find(wanted.uuid);
  if (named == names_.end()) return Status();
  const CheckpointListing other = EntryAt(named->second);
  if (!other.problem.ok() || other.uuid != wanted.uuid) return Status();
  return Status(Code::kAlreadyExists,
                store_.CheckpointPath(named->second) +
                    ": the store already has this checkpoint under this other name");
}

}  // namespace tensormount::copies
