// SPDX-License-Identifier: Apache-2.0
// Which bytes of which files were compared with their hashes since the process started: ranges of
// whole leaves, for each file with the state (inode, size, change time) that it was in. A file that
// was replaced, or written to, has proved nothing.
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

bool ProvenRanges::Hold(std::uint32_t file, const FileStamp& now, std::uint64_t begin,
                        std::uint64_t end) const {
  const std::shared_lock lock(mutex_);
  const auto known = files_.find(file);
  if (known == files_.end() || known->second.stamp != now) return false;
  const auto& ranges = known->second.ranges;
  auto after = ranges.upper_bound(begin);
  return after != ranges.begin() && std::prev(after)->second >= end;
}

void ProvenRanges::Add(std::uint32_t file, const FileStamp& then, std::uint64_t begin,
                       std::uint64_t end) {
  if (begin >= end) return;
  const std::lock_guard lock(mutex_);
  File& known = files_[file];
  if (known.stamp != then) {
    ranges_ -= known.ranges.size();
    known = File{.stamp = then, .ranges = {}};
  }
  auto& ranges = known.ranges;
  // The first that touches or meets [begin, end).
  auto at = ranges.upper_bound(begin);
  if (at != ranges.begin() && std::prev(at)->second >= begin) --at;
  const bool touches = at != ranges.end() && at->first <= end;
  if (!touches && ranges_ >= kMaxRanges) return;
  while (at != ranges.end() && at->first <= end) {
    begin = std::min(begin, at->first);
    end = std::max(end, at->second);
    known.bytes -= at->second - at->first;
    at = ranges.erase(at);
    --ranges_;
  }
  ranges.emplace_hint(at, begin, end);
  known.bytes += end - begin;
  ++ranges_;
}

std::uint64_t ProvenRanges::Bytes(std::uint32_t file, const FileStamp& now) const {
  const std::shared_lock lock(mutex_);
  const auto known = files_.find(file);
  return known != files_.end() && known->second.stamp == now ? known->second.bytes : 0;
}

void ProvingRead::Enter(std::uint32_t number, std::shared_ptr<OpenDataFile> file) {
  if (file_ == file && number_ == number) return;
  Leave();
  const Result<FileInfo> info = file->file().Stat();
  if (!info.ok()) return;
  number_ = number;
  file_ = std::move(file);
  stamp_ = FileStamp::Of(info.value());
  settled_ = stamp_.Settled();
}

bool ProvingRead::Hold(std::uint64_t begin, std::uint64_t end) const {
  return file_ && proven_.Hold(number_, stamp_, begin, end);
}

void ProvingRead::Found(std::uint64_t begin, std::uint64_t end) {
  if (!found_.empty() && found_.back().second == begin) {
    found_.back().second = end;
  } else {
    found_.emplace_back(begin, end);
  }
}

void ProvingRead::Leave() {
  if (file_) {
    const Result<FileInfo> info = file_->file().Stat();
    if (!info.ok() || FileStamp::Of(info.value()) != stamp_) {
      changed_ = true;
    } else if (settled_) {
      for (const auto& [begin, end] : found_) proven_.Add(number_, stamp_, begin, end);
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
