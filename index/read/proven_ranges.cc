// SPDX-License-Identifier: Apache-2.0
// Which bytes of which files were compared with their hashes since the process started: ranges of
// whole leaves or pages, for each file with the state (inode, size, change time) that it was in. A
// file that was replaced, or written to, has proved nothing.
//
// Why a state and not a number of bytes read: what is in the page cache may be replaced under a
// reader. A range counts only while device, inode, size, mtime and change time are those under
// which it was compared, and only where a write in between would have changed one of these
// (Settled). A hard link changes the change time of a file, too, and later saves link files of
// ours; so there another change time is no change where the number of names differs.
#include "index/read/proven_ranges.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <mutex>

#include "index/read/file_cache.h"

namespace tensormount {

FileStamp FileStamp::Of(const FileInfo& info) {
  return {.device = info.device,
          .inode = info.inode,
          .size = info.size,
          .modified_seconds = info.mtime_seconds,
          .modified_nanoseconds = info.mtime_nanoseconds,
          .changed_seconds = info.ctime_seconds,
          .changed_nanoseconds = info.ctime_nanoseconds};
}

FileStamp FileStamp::OfOurs(const FileInfo& info) {
  FileStamp stamp = Of(info);
  stamp.links = info.links;
  return stamp;
}

bool FileStamp::SameBytes(const FileStamp& before) const {
  FileStamp then = before;
  if (links != 0 && then.links != 0 && links != then.links) {
    then.links = links;
    then.changed_seconds = changed_seconds;
    then.changed_nanoseconds = changed_nanoseconds;
  }
  return then == *this;
}

// A file that was changed within the grain of its timestamps could be changed again without another
// time. 50 ms are more than a tick of any kernel configuration (10 ms at most); whole seconds in
// the change time hint at a filesystem that keeps no more, where 2 s are taken.
bool FileStamp::Settled() const {
  using std::chrono::nanoseconds;
  using std::chrono::seconds;
  // Linux's own file systems keep the time of the last tick, the oldest ones whole seconds.
  const nanoseconds grain = changed_nanoseconds == 0 ? nanoseconds(seconds(2))
                                                     : nanoseconds(std::chrono::milliseconds(50));
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  std::int64_t apart = 0;
  if (__builtin_sub_overflow(std::int64_t{now.tv_sec}, changed_seconds, &apart)) return true;
  if (apart > 3600 || apart < -3600) return true;
  const nanoseconds age = seconds(apart) + nanoseconds(now.tv_nsec - changed_nanoseconds);
  // One of the future would be changed to the present.
  return age > grain || age < -grain;
}

// Ranges are apart from each other and merged when they meet, so a range that is known is within
// one run. O(log runs), under a shared lock: every read asks.
bool ProvenRanges::Hold(std::uint32_t file, const FileStamp& now, ByteRange bytes) const {
  {
    const std::shared_lock lock(mutex_);
    const auto known = files_.find(file);
    if (known == files_.end()) return false;
    if (known->second.stamp == now) return Holds(known->second, bytes);
    if (!now.SameBytes(known->second.stamp)) return false;
  }
  const std::lock_guard lock(mutex_);
  File& known = files_[file];
  return Follow(known, now) && Holds(known, bytes);
}

bool ProvenRanges::Holds(const File& known, ByteRange bytes) {
  auto after = known.ranges.upper_bound(bytes.begin);
  return after != known.ranges.begin() && std::prev(after)->second >= bytes.end;
}

// A thread that looked before the link must not lead the state back to where it was: with the
// number of names of then, a change that came after the link would look like another link.
bool ProvenRanges::Follow(File& known, const FileStamp& now) {
  if (known.stamp == now || known.before == now) return true;
  if (!now.SameBytes(known.stamp)) return false;
  known.before = known.stamp;
  known.stamp = now;
  return true;
}

// A file in another state forgets all that was known of it. Where the limit is reached, ranges that
// touch a known one are still merged, which never adds a run.
void ProvenRanges::Add(std::uint32_t file, const FileStamp& then, ByteRange bytes) {
  if (bytes.begin >= bytes.end) return;
  const std::lock_guard lock(mutex_);
  File& known = files_[file];
  if (!Follow(known, then)) {
    ranges_ -= known.ranges.size();
    known = File{.stamp = then, .before = then, .ranges = {}};
  }
  auto& ranges = known.ranges;
  // The first that touches or meets these bytes.
  auto at = ranges.upper_bound(bytes.begin);
  if (at != ranges.begin() && std::prev(at)->second >= bytes.begin) --at;
  const bool touches = at != ranges.end() && at->first <= bytes.end;
  if (!touches && ranges_ >= kMaxRanges) return;
  while (at != ranges.end() && at->first <= bytes.end) {
    bytes.begin = std::min(bytes.begin, at->first);
    bytes.end = std::max(bytes.end, at->second);
    known.bytes -= at->second - at->first;
    at = ranges.erase(at);
    --ranges_;
  }
  ranges.emplace_hint(at, bytes.begin, bytes.end);
  known.bytes += bytes.size();
  ++ranges_;
}

std::uint64_t ProvenRanges::Bytes(std::uint32_t file, const FileStamp& now) const {
  const std::shared_lock lock(mutex_);
  const auto known = files_.find(file);
  return known != files_.end() && now.SameBytes(known->second.stamp) ? known->second.bytes : 0;
}

void ProvingRead::Enter(std::uint32_t number, std::shared_ptr<OpenDataFile> file) {
  if (file_ == file && number_ == number) return;
  Leave();
  const Result<FileInfo> info = file->file().Stat();
  if (!info.ok()) return;
  number_ = number;
  file_ = std::move(file);
  stamp_ = file_->StampOf(info.value());
  settled_ = stamp_.Settled();
}

bool ProvingRead::Hold(ByteRange bytes) const {
  return file_ && proven_.Hold(number_, stamp_, bytes);
}

void ProvingRead::Found(ByteRange bytes) {
  if (!found_.empty() && found_.back().end == bytes.begin) {
    found_.back().end = bytes.end;
  } else {
    found_.push_back(bytes);
  }
}

// Stat after the bytes were read: the same state before and after means that what was compared is
// what the file holds.
void ProvingRead::Leave() {
  if (file_) {
    const Result<FileInfo> info = file_->file().Stat();
    const FileStamp now = info.ok() ? file_->StampOf(info.value()) : FileStamp();
    if (!info.ok() || !now.SameBytes(stamp_)) {
      changed_ = true;
    } else if (settled_) {
      for (const ByteRange& bytes : found_) proven_.Add(number_, now, bytes);
    }
  }
  file_.reset();
  found_.clear();
}

bool ProvingRead::End() {
  Leave();
  return !changed_;
}

}  // namespace tensormount
