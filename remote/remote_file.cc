// SPDX-License-Identifier: Apache-2.0
// Turns reads of an open object into requests.
#include "remote/remote_file.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/hash.h"

namespace tensormount {
namespace {

// A run of this size or more is a request of its own.
constexpr std::uint64_t kDirectBytes = std::uint64_t{1} << 20;
// Runs with smaller gaps are one request.
constexpr std::uint64_t kJoinedGap = std::uint64_t{1} << 20;
// Of memory for joined runs at a time.
constexpr std::uint64_t kMostScratch = std::uint64_t{64} << 20;
// Read-ahead of short reads one after the other: begins after kBeforeAhead bytes.
constexpr std::uint64_t kBeforeAhead = std::uint64_t{2} << 20;
constexpr std::uint64_t kMostAhead = std::uint64_t{32} << 20;
// The first short read of an object brings kBlockBytes, the next ones more: who looks around in an
// index or in hashes comes again.
constexpr std::uint64_t kMostAround = std::uint64_t{1} << 20;

// Runs that one request brings, into memory of its own.
struct JoinedRuns {
  ByteRange range;
  std::size_t first = 0;  // Of the small runs.
  std::size_t last = 0;
  std::vector<std::byte> bytes;
};

Status AwaitAll(const RemoteObject& object, std::vector<HttpRequest> requests,
                const ReadLimits& limits) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto calls,
                               HttpClient::Get().Run(std::move(requests), limits));
  for (const auto& call : calls) TENSORMOUNT_RETURN_IF_ERROR(CheckAnswer(object, *call));
  return {};
}

}  // namespace

FileInfo RemoteFile::InfoOf(const RemoteObject& object) {
  FileInfo info;
  info.kind = FileKind::kFile;
  info.size = object.size;
  info.mode = 0444;
  info.mtime_seconds = object.modified_seconds;
  const std::string& identity = object.linked_etag.empty() ? object.etag : object.linked_etag;
  if (!identity.empty()) {
    // Equal ETags of one URL mean equal bytes, as device, inode and times do of a file.
    const auto number = [](const std::string& text) { return Xxh3Low64(text) | 1; };
    info.device = number(object.url);
    info.inode = number(identity);
  }
  return info;
}

Status RemoteFile::ReadSmall(ByteRange range, std::byte* out, std::uint64_t end,
                             const ReadLimits& limits) {
  if (range.end <= object_->begin.size()) {
    std::memcpy(out, object_->begin.data() + range.begin, range.size());
    return {};
  }
  BlockCache& cache = BlockCache::Get();
  std::uint64_t ahead = 0;
  if (last_end_.exchange(range.end) == range.begin) {
    const std::uint64_t row = in_a_row_.fetch_add(range.size()) + range.size();
    if (row >= kBeforeAhead && end > range.end) {
      ahead = std::min({row, kMostAhead, end - range.end});
    }
  } else {
    in_a_row_ = range.size();
  }
  if (ahead == 0 && !cache.HasAll(*object_, range)) {
    const int misses = std::min(misses_.fetch_add(1), 2);
    const std::uint64_t around = std::min(BlockCache::kBlockBytes << (2 * misses), kMostAround);
    if (misses > 0) {
      const ByteRange wider = {range.begin / around * around, range.end};
      TENSORMOUNT_RETURN_IF_ERROR(
          cache.Start(object_, {wider.begin, std::max(range.end, wider.begin + around)}, false));
    }
  }
  return cache.Read(object_, range, out, ahead, limits);
}

Result<std::size_t> RemoteFile::ReadAtWithin(std::uint64_t offset, void* out, std::size_t size,
                                             std::uint64_t end) {
  if (offset >= object_->size || size == 0) return std::size_t{0};
  const std::uint64_t n = std::min<std::uint64_t>(size, object_->size - offset);
  auto* const to = static_cast<std::byte*>(out);
  const bool goes_on =
      end > offset + n && n < BlockCache::kRequestBytes && last_end_.load() == offset;
  if (n < kDirectBytes || goes_on || BlockCache::Get().HasAll(*object_, {offset, offset + n})) {
    TENSORMOUNT_RETURN_IF_ERROR(ReadSmall({offset, offset + n}, to, end, {}));
  } else {
    const ReadRun run{offset, {to, static_cast<std::size_t>(n)}};
    TENSORMOUNT_RETURN_IF_ERROR(ReadMany({&run, 1}, {}));
    last_end_ = offset + n;
    in_a_row_ = n;
  }
  return static_cast<std::size_t>(n);
}

Status RemoteFile::ReadMany(std::span<const ReadRun> runs, const ReadLimits& limits) {
  if (object_->prepare) object_->prepare();
  std::vector<HttpRequest> direct;
  std::vector<ReadRun> small;
  BlockCache& cache = BlockCache::Get();
  for (const ReadRun& run : runs) {
    if (run.out.empty()) continue;
    const std::uint64_t size = run.out.size();
    if (run.offset > object_->size || size > object_->size - run.offset) {
      return {Code::kDataLoss, path() + ": " + std::to_string(size) + " bytes expected at byte " +
                                   std::to_string(run.offset) + ", but the file ends at byte " +
                                   std::to_string(object_->size)};
    }
    const ByteRange range{run.offset, run.offset + size};
    if (range.end <= object_->begin.size() || cache.HasAll(*object_, range)) {
      TENSORMOUNT_RETURN_IF_ERROR(ReadSmall(range, run.out.data(), 0, limits));
    } else if (size >= kDirectBytes) {
      for (std::uint64_t done = 0; done < size; done += BlockCache::kRequestBytes) {
        const std::uint64_t n = std::min(size - done, BlockCache::kRequestBytes);
        direct.push_back(object_->RequestFor({range.begin + done, range.begin + done + n},
                                             run.out.subspan(done, n)));
      }
    } else {
      small.push_back(run);
    }
  }
  std::stable_sort(small.begin(), small.end(),
                   [](const ReadRun& a, const ReadRun& b) { return a.offset < b.offset; });
  std::vector<JoinedRuns> joined;
  for (std::size_t i = 0; i < small.size() || !direct.empty();) {
    joined.clear();
    std::uint64_t scratch = 0;
    for (; i < small.size() && scratch < kMostScratch; ++i) {
      const ByteRange range{small[i].offset, small[i].offset + small[i].out.size()};
      if (!joined.empty() && range.begin <= joined.back().range.end + kJoinedGap &&
          range.end <= joined.back().range.begin + BlockCache::kRequestBytes) {
        JoinedRuns& with = joined.back();
        scratch -= with.range.size();
        with.range.end = std::max(with.range.end, range.end);
        with.last = i;
      } else {
        joined.push_back({range, i, i, {}});
      }
      scratch += joined.back().range.size();
    }
    std::vector<HttpRequest> requests = std::exchange(direct, {});
    for (JoinedRuns& part : joined) {
      part.bytes.resize(part.range.size());
      requests.push_back(object_->RequestFor(part.range, part.bytes));
    }
    TENSORMOUNT_RETURN_IF_ERROR(AwaitAll(*object_, std::move(requests), limits));
    for (const JoinedRuns& part : joined) {
      for (std::size_t run = part.first; run <= part.last; ++run) {
        std::memcpy(small[run].out.data(),
                    part.bytes.data() + (small[run].offset - part.range.begin),
                    small[run].out.size());
      }
    }
  }
  return {};
}

void RemoteFile::StartReading(std::uint64_t offset, std::uint64_t size) {
  if (offset >= object_->size) return;
  const std::uint64_t end = offset + std::min(size, object_->size - offset);
  if (end <= object_->begin.size()) return;
  // A long stretch is read by a read that goes straight to memory; a hint may fail.
  if (end - offset > 2 * BlockCache::kRequestBytes) return;
  (void)BlockCache::Get().Start(object_, {offset, end}, false);
}

std::optional<bool> RemoteFile::IsCached(std::uint64_t offset) {
  return offset < object_->begin.size() || BlockCache::Get().Has(*object_, offset);
}

bool RemoteFile::Fetch(std::uint64_t offset, std::uint64_t size) {
  if (offset >= object_->size) return false;
  const std::uint64_t end = offset + std::min(size, object_->size - offset);
  return BlockCache::Get().Start(object_, {offset, end}, true).ok();
}

}  // namespace tensormount
