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
// Of the cache on disk: the kernel reads so many of them before they are asked for.
constexpr std::uint64_t kBlocksAhead = 4;

// Runs that one request brings, into memory of its own.
struct JoinedRuns {
  ByteRange range;
  std::size_t first = 0;  // Of the small runs.
  std::size_t last = 0;
  std::vector<std::byte> bytes;
};

Status CheckLimits(const std::string& path, const ReadLimits& limits) {
  if (limits.cancel != nullptr && limits.cancel->load()) {
    return {Code::kCancelled, "the read was cancelled"};
  }
  if (limits.deadline && limits.deadline->Passed()) {
    return {Code::kDeadlineExceeded, path + ": not read in time"};
  }
  return {};
}

ByteRange RangeOf(const ReadRun& run) { return {run.offset, run.offset + run.out.size()}; }

// Calls fn(run) for the parts of a run that lie in one block each of the cache on disk.
template <typename Fn>
Status ForEachBlock(const ReadRun& run, const Fn& fn) {
  for (std::uint64_t done = 0; done < run.out.size();) {
    const std::uint64_t at = run.offset + done;
    const std::uint64_t n =
        std::min(DiskCache::kBlockBytes - at % DiskCache::kBlockBytes, run.out.size() - done);
    TENSORMOUNT_RETURN_IF_ERROR(fn(ReadRun{at, run.out.subspan(done, n)}));
    done += n;
  }
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
  const ReadRun run{range.begin, {out, static_cast<std::size_t>(range.size())}};
  std::uint64_t ahead = 0;
  if (last_end_.exchange(range.end) == range.begin) {
    const std::uint64_t row = in_a_row_.fetch_add(range.size()) + range.size();
    if (row >= kBeforeAhead && end > range.end) {
      ahead = std::min({row, kMostAhead, end - range.end});
    }
  } else {
    in_a_row_ = range.size();
  }
  if (object_->disk != nullptr) {
    // Once for each block, at its begin or end.
    const bool next = range.begin % DiskCache::kBlockBytes == 0 ||
                      range.begin / DiskCache::kBlockBytes != range.end / DiskCache::kBlockBytes;
    if (ahead > 0 && next) {
      TENSORMOUNT_RETURN_IF_ERROR(StartMissing({range.begin, range.end + ahead}, false));
      const std::uint64_t later = range.end + kBlocksAhead * DiskCache::kBlockBytes;
      if (later < object_->size) object_->disk->StartReading(later);
    }
    return ReadBlocks({&run, 1}, limits);
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

Status RemoteFile::StartMissing(ByteRange range, bool wait) {
  BlockCache& cache = BlockCache::Get();
  if (object_->disk == nullptr) return cache.Start(object_, range, wait);
  for (const ByteRange& missing : object_->disk->Missing(range)) {
    TENSORMOUNT_RETURN_IF_ERROR(cache.Start(object_, missing, wait));
  }
  return {};
}

Status RemoteFile::ReadBlocks(std::span<const ReadRun> runs, const ReadLimits& limits) {
  BlockCache& cache = BlockCache::Get();
  const CachedObject& disk = *object_->disk;
  std::vector<ReadRun> missing;
  std::vector<ReadRun> stored;
  for (std::size_t i = 0; i < runs.size();) {
    missing.clear();
    stored.clear();
    for (std::uint64_t bytes = 0; i < runs.size() && bytes < kMostScratch; ++i) {
      bytes += runs[i].out.size();
      TENSORMOUNT_RETURN_IF_ERROR(ForEachBlock(runs[i], [&](const ReadRun& part) {
        const bool on_disk = !cache.HasAll(*object_, RangeOf(part)) && disk.Has(part.offset);
        (on_disk ? stored : missing).push_back(part);
        return Status();
      }));
    }
    // What is not on disk is on its way while the rest is read; neighbours are one request.
    std::vector<ByteRange> requested;
    for (const ReadRun& part : missing) {
      const std::uint64_t begin = part.offset / DiskCache::kBlockBytes * DiskCache::kBlockBytes;
      if (requested.empty() || requested.back().end < begin) requested.push_back({begin, begin});
      requested.back().end = begin + DiskCache::kBlockBytes;
    }
    for (const ByteRange& range : requested) {
      TENSORMOUNT_RETURN_IF_ERROR(cache.Start(object_, range, false));
    }
    for (std::size_t n = 0; n < stored.size(); ++n) {
      TENSORMOUNT_RETURN_IF_ERROR(CheckLimits(path(), limits));
      if (n + kBlocksAhead < stored.size()) disk.StartReading(stored[n + kBlocksAhead].offset);
      if (disk.Read(RangeOf(stored[n]), stored[n].out.data())) continue;
      missing.push_back(stored[n]);
      TENSORMOUNT_RETURN_IF_ERROR(cache.Start(object_, RangeOf(stored[n]), false));
    }
    for (const ReadRun& part : missing) {
      TENSORMOUNT_RETURN_IF_ERROR(cache.Read(object_, RangeOf(part), part.out.data(), 0, limits));
    }
  }
  return {};
}

Status RemoteFile::ReadMany(std::span<const ReadRun> runs, const ReadLimits& limits) {
  if (object_->prepare) object_->prepare();
  const CachedObject* const disk = object_->disk.get();
  BlockCache& cache = BlockCache::Get();
  std::vector<JoinedRuns> joined;
  HttpBatch batch(limits);  // Destroyed before `joined`, to which its requests write.
  const auto arrived = [&](const std::shared_ptr<HttpCall>& call) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckAnswer(*object_, *call));
    if (disk != nullptr) {
      disk->Keep(*call->request().range, call->request().into.data(), nullptr);
    }
    return {};
  };
  ReadRun direct;  // What is asked for straight into the caller's memory, as far as it was joined.
  const auto start_direct = [&]() -> Status {
    const ReadRun run = std::exchange(direct, {});
    if (run.out.empty()) return {};
    return batch.Start(object_->RequestFor(RangeOf(run), run.out));
  };
  std::vector<ReadRun> small;
  for (const ReadRun& run : runs) {
    if (run.out.empty()) continue;
    const std::uint64_t size = run.out.size();
    if (run.offset > object_->size || size > object_->size - run.offset) {
      return {Code::kDataLoss, path() + ": " + std::to_string(size) + " bytes expected at byte " +
                                   std::to_string(run.offset) + ", but the file ends at byte " +
                                   std::to_string(object_->size)};
    }
    const ByteRange range = RangeOf(run);
    if (range.end <= object_->begin.size() || cache.HasAll(*object_, range)) {
      TENSORMOUNT_RETURN_IF_ERROR(ReadSmall(range, run.out.data(), 0, limits));
    } else if (size < kDirectBytes) {
      small.push_back(run);
    } else if (disk == nullptr) {
      for (std::uint64_t done = 0; done < size; done += BlockCache::kRequestBytes) {
        direct = {run.offset + done,
                  run.out.subspan(done, std::min(size - done, BlockCache::kRequestBytes))};
        TENSORMOUNT_RETURN_IF_ERROR(start_direct());
      }
    } else {
      // Whole blocks that are not on disk go straight to the caller's memory.
      const auto plan = [&](const ReadRun& part) -> Status {
        const std::uint64_t end = part.offset + part.out.size();
        const bool whole = part.offset % DiskCache::kBlockBytes == 0 &&
                           (end % DiskCache::kBlockBytes == 0 || end == object_->size);
        if (!whole || disk->Has(part.offset)) {
          small.push_back(part);
          return start_direct();
        }
        if (direct.out.size() >= BlockCache::kRequestBytes) {
          TENSORMOUNT_RETURN_IF_ERROR(start_direct());
        }
        if (direct.out.empty()) direct.offset = part.offset;
        direct.out = {direct.out.empty() ? part.out.data() : direct.out.data(),
                      direct.out.size() + part.out.size()};
        return {};
      };
      TENSORMOUNT_RETURN_IF_ERROR(ForEachBlock(run, plan));
      TENSORMOUNT_RETURN_IF_ERROR(start_direct());
    }
  }
  std::stable_sort(small.begin(), small.end(),
                   [](const ReadRun& a, const ReadRun& b) { return a.offset < b.offset; });
  if (disk != nullptr) {
    TENSORMOUNT_RETURN_IF_ERROR(ReadBlocks(small, limits));
    return batch.Await(arrived);
  }
  for (std::size_t i = 0; i < small.size();) {
    joined.clear();
    std::uint64_t scratch = 0;
    for (; i < small.size() && scratch < kMostScratch; ++i) {
      const ByteRange range = RangeOf(small[i]);
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
    for (JoinedRuns& part : joined) {
      part.bytes.resize(part.range.size());
      TENSORMOUNT_RETURN_IF_ERROR(batch.Start(object_->RequestFor(part.range, part.bytes)));
    }
    TENSORMOUNT_RETURN_IF_ERROR(batch.Await(arrived));
    for (const JoinedRuns& part : joined) {
      for (std::size_t run = part.first; run <= part.last; ++run) {
        std::memcpy(small[run].out.data(),
                    part.bytes.data() + (small[run].offset - part.range.begin),
                    small[run].out.size());
      }
    }
  }
  return batch.Await(arrived);
}

void RemoteFile::StartReading(std::uint64_t offset, std::uint64_t size) {
  if (offset >= object_->size) return;
  const std::uint64_t end = offset + std::min(size, object_->size - offset);
  if (end <= object_->begin.size()) return;
  // A long stretch is read by a read that goes straight to memory; a hint may fail.
  if (end - offset > 2 * BlockCache::kRequestBytes) return;
  (void)StartMissing({offset, end}, false);
}

std::optional<bool> RemoteFile::IsCached(std::uint64_t offset) {
  return offset < object_->begin.size() || BlockCache::Get().Has(*object_, offset) ||
         (offset < object_->size && object_->disk != nullptr && object_->disk->Has(offset));
}

bool RemoteFile::Fetch(std::uint64_t offset, std::uint64_t size) {
  if (offset >= object_->size) return false;
  const std::uint64_t end = offset + std::min(size, object_->size - offset);
  return StartMissing({offset, end}, true).ok();
}

}  // namespace tensormount
