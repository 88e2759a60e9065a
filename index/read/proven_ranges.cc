// SPDX-License-Identifier: Apache-2.0
// Records which bytes of a checkpoint's data files were compared with their hashes: ranges of whole
// leaves or pages, with the state of the file.
//
// A file may be rewritten while it is read. A range is therefore valid only while device, inode,
// size, mtime and change time are the same as when it was compared, and only if a write in between
// would have changed one of them (IsSettled). A hard link also changes the change time, and later
// saves link our files, so a new change time together with a new link count is not a write.
#include "index/read/proven_ranges.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <mutex>

#include "index/read/file_cache.h"

namespace tensormount {

FileStamp FileStamp::OfForeignFile(const FileInfo& info) {
  return {.device = info.device,
          .inode = info.inode,
          .size = info.size,
          .modified_seconds = info.mtime_seconds,
          .modified_nanoseconds = info.mtime_nanoseconds,
          .changed_seconds = info.ctime_seconds,
          .changed_nanoseconds = info.ctime_nanoseconds};
}

FileStamp FileStamp::OfStoreFile(const FileInfo& info) {
  FileStamp stamp = OfForeignFile(info);
  stamp.links = info.links;
  return stamp;
}

bool FileStamp::IsUnwrittenSince(const FileStamp& before) const {
  FileStamp then = before;
  if (links != 0 && then.links != 0 && links != then.links) {
    then.links = links;
    then.changed_seconds = changed_seconds;
    then.changed_nanoseconds = changed_nanoseconds;
  }
  return then == *this;
}

// Whether the file's change time is old enough. A file that was changed within the granularity of
// its timestamps may be changed again with the same time. 50 ms exceed a tick of any kernel
// configuration (at most 10 ms). A change time in whole seconds suggests a file system without
// fractions, for which 2 s are used.
bool FileStamp::IsSettled() const {
  if (inode == 0) return false;  // Without Ability::kStamps the stamp does not show writes.
  using std::chrono::nanoseconds;
  using std::chrono::seconds;
  // Linux's file systems store the time of the last tick; the oldest store only whole seconds.
  const nanoseconds grain = changed_nanoseconds == 0 ? nanoseconds(seconds(2))
                                                     : nanoseconds(std::chrono::milliseconds(50));
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  std::int64_t apart = 0;
  if (__builtin_sub_overflow(std::int64_t{now.tv_sec}, changed_seconds, &apart)) return true;
  if (apart > 3600 || apart < -3600) return true;
  const nanoseconds age = seconds(apart) + nanoseconds(now.tv_nsec - changed_nanoseconds);
  // If the time is in the future, a write now would set another time.
  return age > grain || age < -grain;
}

// Ranges are disjoint and merged when they meet, so proven bytes are in one range. O(log n) in the
// number of ranges, usually under a shared lock, because every read calls this function.
bool ProvenRanges::AreProven(std::uint32_t file, const FileStamp& now, ByteRange bytes) const {
  {
    const std::shared_lock lock(mutex_);
    const auto known = files_.find(file);
    if (known == files_.end()) return false;
    if (known->second.stamp == now) return Holds(known->second, bytes);
    if (!now.IsUnwrittenSince(known->second.stamp)) return false;
  }
  const std::lock_guard lock(mutex_);
  File& known = files_[file];
  return Follow(known, now) && Holds(known, bytes);
}

bool ProvenRanges::Holds(const File& known, ByteRange bytes) {
  auto after = known.ranges.upper_bound(bytes.begin);
  return after != known.ranges.begin() && std::prev(after)->second >= bytes.end;
}

// A thread may have taken its stamp before the link: that stamp equals `before`. It is accepted
// without moving the state back, because with the old link count a write after the link would look
// like another link.
bool ProvenRanges::Follow(File& known, const FileStamp& now) {
  if (known.stamp == now || known.before == now) return true;
  if (!now.IsUnwrittenSince(known.stamp)) return false;
  known.before = known.stamp;
  known.stamp = now;
  return true;
}

// If the state is new, the file's ranges are discarded. At the limit, bytes that touch a known
// range are still merged, which never adds a range.
void ProvenRanges::Add(std::uint32_t file, const FileStamp& then, ByteRange bytes) {
  if (bytes.begin >= bytes.end) return;
  const std::lock_guard lock(mutex_);
  File& known = files_[file];
  if (!Follow(known, then)) {
    ranges_ -= known.ranges.size();
    known = File{.stamp = then, .before = then, .ranges = {}};
  }
  auto& ranges = known.ranges;
  // The first range that overlaps or adjoins the new bytes.
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
  return known != files_.end() && now.IsUnwrittenSince(known->second.stamp) ? known->second.bytes
                                                                            : 0;
}

void ProvingRead::BeginFile(std::uint32_t number, std::shared_ptr<OpenDataFile> file) {
  if (file_ == file && number_ == number) return;
  EndFile();
  const Result<FileInfo> info = file->file().Stat();
  if (!info.ok()) return;
  number_ = number;
  file_ = std::move(file);
  stamp_ = file_->StampOf(info.value());
  settled_ = stamp_.IsSettled();
}

bool ProvingRead::AreProven(ByteRange bytes) const {
  return file_ && proven_.AreProven(number_, stamp_, bytes);
}

void ProvingRead::AddProven(ByteRange bytes) {
  if (!found_.empty() && found_.back().end == bytes.begin) {
    found_.back().end = bytes.end;
  } else {
    found_.push_back(bytes);
  }
}

// Takes the file's state after the bytes were read. Equal states before and after mean that the
// compared bytes are those of the file.
void ProvingRead::EndFile() {
  if (file_) {
    const Result<FileInfo> info = file_->file().Stat();
    const FileStamp now = info.ok() ? file_->StampOf(info.value()) : FileStamp();
    if (!info.ok() || !now.IsUnwrittenSince(stamp_)) {
      changed_ = true;
    } else if (settled_) {
      for (const ByteRange& bytes : found_) proven_.Add(number_, now, bytes);
    }
  }
  file_.reset();
  found_.clear();
}

bool ProvingRead::End() {
  EndFile();
  return !changed_;
}

}  // namespace tensormount
