// SPDX-License-Identifier: Apache-2.0
// Writes to one target, a tensor or a box of one, in any order and overlapping. Each byte has one
// position in a grid; bytes that are rewritten after a sync go to a log, because a recorded byte of
// a data file must never change.
#include "fs/save/target_writer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <set>
#include <tuple>

#include "base/checked.h"
#include "shard/leaf_hash.h"

namespace tensormount::fs {
namespace {

// Unit of hashing and writing, so that a block stays in the second-level cache between the two.
constexpr std::uint64_t kTargetBlockBytes = 256 * 1024;
// Number of contiguous bytes after which writeback starts.
constexpr std::uint64_t kWritebackBytes = std::uint64_t{8} << 20;
constexpr std::uint64_t kWorthWriteback = std::uint64_t{1} << 20;
// The log takes space from the pack in areas as large as the log so far, within these limits.
constexpr std::uint64_t kMinLogBytes = 64 * 1024;
constexpr std::uint64_t kMaxLogBytes = std::uint64_t{4} << 20;

}  // namespace

TargetWriter::TargetWriter(std::shared_ptr<StagedParts> shared, StagedTarget name,
                           TargetGeometry geometry, std::uint32_t owner,
                           std::function<void()> on_first_write)
    : shared_(std::move(shared)),
      name_(std::move(name)),
      geometry_(std::move(geometry)),
      owner_(owner),
      on_first_write_(std::move(on_first_write)) {}

bool TargetWriter::Overlaps(const ByteRange& bytes) const {
  return std::ranges::any_of(writing_,
                             [&](const ByteRange& w) { return !w.Intersect(bytes).empty(); });
}

// Waits for writes of the same bytes: concurrent ones could store a mixture that matches neither
// hash. The wait is limited, because the other write may hang in storage.
Status TargetWriter::BeginWrite(Lock& lock, const ByteRange& bytes) {
  const auto deadline = std::chrono::steady_clock::now() + kStoragePatience;
  const bool free =
      changed_.wait_until(lock, deadline, [&] { return !sync_waiting_ && !Overlaps(bytes); });
  if (!free)
    return Status(Code::kDeadlineExceeded, Name() + ": timed out waiting for another write");
  writing_.push_back(bytes);
  return {};
}

// writing_ has no order, so its last entry takes the place of the removed one.
void TargetWriter::EndWrite(const ByteRange& bytes) {
  const auto at = std::ranges::find(writing_, bytes);
  *at = writing_.back();
  writing_.pop_back();
  changed_.notify_all();
}

void TargetWriter::EraseLeaves(const ByteRange& bytes) {
  leaves_.erase(leaves_.lower_bound(bytes.begin / kLeafBytes),
                leaves_.lower_bound((bytes.end + kLeafBytes - 1) / kLeafBytes));
}

// Bytes may be fresh and synced at once (a rewrite); they count once.
std::uint64_t TargetWriter::KnownBytes(const ByteRange& bytes) const {
  std::uint64_t known = 0;
  fresh_.Walk(
      bytes, [&](const StoredRange& r) { known += r.size(); },
      [&](const ByteRange& gap) { known += synced_.Covered(gap); });
  return known;
}

// ---- Placement --------------------------------------------------------------------------------

// Small targets get an area of their full size, so that each byte has its position at once and
// nothing moves later.
Status TargetWriter::OpenGrid() {
  if (grid_.has_value()) return {};
  Grid grid;
  if (size() < StagedParts::kOwnFileBytes) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const DataFiles::Area area, shared_->files.Allocate(size()));
    grid.file = area.file;
    grid.base = area.offset;
  } else if (geometry_.is_run()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(grid.shared, shared_->files.FileOfTensor(name_.key));
    grid.file = grid.shared->file;
    grid.base = geometry_.run_begin();
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(grid.file, shared_->files.Create('o', Placement::kPack));
  }
  grid_ = std::move(grid);
  return {};
}

void TargetWriter::AddRange(const StoredRange& range, Ranges& plan) {
  if (!plan.empty()) {
    StoredRange& last = plan.back();
    if (last.source == range.source && last.grid == range.grid &&
        last.bytes.end == range.bytes.begin && last.offset + last.size() == range.offset) {
      last.bytes.end = range.bytes.end;
      return;
    }
  }
  plan.push_back(range);
}

// Grid bytes that were ever synced must not be written again, because a journal record has their
// hash until the staging is published.
bool TargetWriter::ClaimGrid(const ByteRange& bytes) {
  if (grid_->file->condemned() || used_.Covered(bytes) > 0) return false;
  if (grid_->shared == nullptr) return true;
  const std::lock_guard lock(grid_->shared->mutex);
  return grid_->shared->claims.Claim({grid_->base + bytes.begin, grid_->base + bytes.end}, owner_);
}

StoredRange TargetWriter::GridRange(const ByteRange& bytes) const {
  return {bytes, grid_->base + bytes.begin, grid_->file->number(), true};
}

bool TargetWriter::IsBesideGrid(const ByteRange& bytes) const {
  for (const RangeMap* map : {&fresh_, &synced_}) {
    const auto before = map->EndingAt(bytes.begin);
    if (before.has_value() && before->grid) return true;
    const auto behind = map->BeginningAt(bytes.end);
    if (behind.has_value() && behind->grid) return true;
  }
  return false;
}

// Areas of the log grow, so that targets that are written in turn do not split each other's runs
// into single writes.
Status TargetWriter::PlanLog(const ByteRange& bytes, Ranges& plan) {
  const std::uint64_t n = bytes.size();
  if (log_.file == nullptr || log_.file->condemned() || log_.size < n) {
    const std::uint64_t more = std::max(n, std::clamp(log_bytes_, kMinLogBytes, kMaxLogBytes));
    if (log_.file == nullptr || log_.file->condemned() || !shared_->files.Extend(log_, more)) {
      TENSORMOUNT_ASSIGN_OR_RETURN(log_, shared_->files.Allocate(more));
    }
    log_bytes_ += more;
  }
  AddRange({bytes, log_.offset, log_.file->number(), false}, plan);
  log_.offset += n;
  log_.size -= n;
  return {};
}

// Places bytes that are not stored yet, or whose place must not be overwritten.
Status TargetWriter::PlanGap(const ByteRange& bytes, bool is_short, Ranges& plan) {
  if (is_short && !IsBesideGrid(bytes)) return PlanLog(bytes, plan);
  TENSORMOUNT_RETURN_IF_ERROR(OpenGrid());
  Status status;
  used_.Walk(
      bytes,
      [&](const StoredRange& used) {
        if (status.ok()) status = PlanLog(used.bytes, plan);
      },
      [&](const ByteRange& free) {
        if (!status.ok()) return;
        if (ClaimGrid(free)) {
          AddRange(GridRange(free), plan);
        } else {
          status = PlanLog(free, plan);
        }
      });
  return status;
}

// Moves a short write together with adjacent log bytes to the grid, if they are then long or
// adjacent to the grid. Adds nothing if there are no such neighbours, or if the grid bytes must not
// be overwritten. Neighbours lie outside of `bytes`, which tells Write to copy them.
Status TargetWriter::PlanGrown(const ByteRange& bytes, Ranges& plan) {
  const auto usable = [&](std::optional<StoredRange>& r) {
    if (r.has_value() && (r->grid || r->size() >= kShortBytes || Overlaps(r->bytes))) r.reset();
  };
  std::optional<StoredRange> before = fresh_.EndingAt(bytes.begin);
  std::optional<StoredRange> behind = fresh_.BeginningAt(bytes.end);
  usable(before);
  usable(behind);
  if (!before.has_value() && !behind.has_value()) return {};
  const ByteRange all{before.has_value() ? before->bytes.begin : bytes.begin,
                      behind.has_value() ? behind->bytes.end : bytes.end};
  if (all.size() < kShortBytes && !IsBesideGrid(all)) return {};
  TENSORMOUNT_RETURN_IF_ERROR(OpenGrid());
  if (!ClaimGrid(all)) return {};
  if (before.has_value()) plan.push_back(GridRange(before->bytes));
  plan.push_back(GridRange(bytes));
  if (behind.has_value()) plan.push_back(GridRange(behind->bytes));
  return {};
}

// Fresh bytes are overwritten in place. All others are gaps: never written, or synced; PlanGap
// distinguishes the two (used_).
//
// Example: a target of 8 MiB, whose first MiB was synced. A write of [512 KiB, 2 MiB) becomes two
// ranges: [512 KiB, 1 MiB) goes to the log, because its grid position is used, and [1 MiB, 2 MiB)
// goes to the grid.
Status TargetWriter::Plan(const ByteRange& bytes, Ranges& plan) {
  const bool is_large = size() >= StagedParts::kOwnFileBytes;
  const bool is_short = is_large && bytes.size() < kShortBytes;
  // Only large targets keep short writes in the log, from which PlanGrown moves them.
  if (is_large && fresh_.Covered(bytes) == 0) {
    TENSORMOUNT_RETURN_IF_ERROR(PlanGrown(bytes, plan));
    if (!plan.empty()) return {};
  }
  Status status;
  fresh_.Walk(
      bytes, [&](const StoredRange& r) { AddRange(r, plan); },
      [&](const ByteRange& gap) {
        if (status.ok()) status = PlanGap(gap, is_short, plan);
      });
  return status;
}

// ---- Writing ----------------------------------------------------------------------------------

Status TargetWriter::WriteRange(const StoredRange& range, const std::byte* data, Leaves& leaves) {
  const std::shared_ptr<DataFile> file = shared_->files.Get(range.source);
  if (!range.grid) return file->Write(range.offset, data, range.size());
  for (std::uint64_t at = range.bytes.begin; at < range.bytes.end;) {
    const std::uint64_t block =
        std::min(range.bytes.end, (at / kTargetBlockBytes + 1) * kTargetBlockBytes);
    // Hashes the leaves that this write covers completely; the sync hashes the others.
    for (std::uint64_t leaf = at; leaf < block;) {
      const std::uint64_t next = std::min(size(), (leaf / kLeafBytes + 1) * kLeafBytes);
      if (leaf % kLeafBytes == 0 && next <= block) {
        const std::byte* bytes = data + (leaf - range.bytes.begin);
        leaves.emplace_hint(
            leaves.end(), leaf / kLeafBytes,
            Leaf{Xxh3(bytes, next - leaf), geometry_.Contribution(leaf, bytes, next - leaf)});
      }
      leaf = next;
    }
    const std::uint64_t done = at - range.bytes.begin;
    TENSORMOUNT_RETURN_IF_ERROR(file->Write(range.offset + done, data + done, block - at));
    at = block;
  }
  return {};
}

// Moves a neighbour from the log to `to`. These bytes are in writing_, so nobody else writes or
// syncs them. But an adjacent write may end now and merge with their range, so they are looked up
// again by their bytes, not by the begin of their range.
Status TargetWriter::CopyRange(const StoredRange& to) {
  Ranges stored;
  {
    const Lock lock(mutex_);
    fresh_.ForEach(to.bytes, [&](const StoredRange& r) { stored.push_back(r); });
  }
  const std::shared_ptr<DataFile> file = shared_->files.Get(to.source);
  std::vector<std::byte> buffer(std::min(kTargetBlockBytes, to.size()));
  for (const StoredRange& from : stored) {
    const std::uint64_t offset = to.offset + (from.bytes.begin - to.bytes.begin);
    for (std::uint64_t done = 0; done < from.size();) {
      const std::size_t n = std::min<std::uint64_t>(buffer.size(), from.size() - done);
      TENSORMOUNT_RETURN_IF_ERROR(
          shared_->files.Get(from.source)->Read(from.offset + done, buffer.data(), n));
      TENSORMOUNT_RETURN_IF_ERROR(file->Write(offset + done, buffer.data(), n));
      done += n;
    }
  }
  return {};
}

// written_ counts each byte once, however often it was written.
void TargetWriter::Install(const StoredRange& range) {
  written_ += range.size() - KnownBytes(range.bytes);
  fresh_.Insert(range);
}

// Starts writeback early, so that the fsync at the end finds little to do. Writeback starts for
// each kWritebackBytes of a contiguous run, and for the rest of a run if it has at least
// kWorthWriteback bytes.
void TargetWriter::StartWriteback(Lock& lock, const StoredRange& range) {
  const ByteRange stored{range.offset, range.offset + range.size()};
  const std::uint32_t file = writeback_file_;
  ByteRange start = writeback_;
  if (file == range.source && writeback_.end == stored.begin) {
    writeback_.end = start.end = stored.end;
    if (start.size() < kWritebackBytes) return;
    writeback_.begin = stored.end;
  } else {
    writeback_file_ = range.source;
    writeback_ = stored;
    if (start.size() < kWorthWriteback) return;
  }
  lock.unlock();
  shared_->files.Get(file)->StartWriteback(start.begin, start.size());
  lock.lock();
}

// After a failure in the middle, the bytes before it are written and the rest is unchanged, like
// write(2) to a full disk.
Status TargetWriter::Write(std::uint64_t offset, const void* data, std::size_t size) {
  if (shared_->files.closed())
    return Status(Code::kStale, Name() + ": its staging directory was published or removed");
  if (!RangeWithin(offset, size, this->size())) return Status::FromErrno(EFBIG, "write", Name());
  if (size == 0) return {};
  const ByteRange bytes{offset, offset + size};
  ByteRange taken = bytes;  // Bytes that nobody else may write meanwhile.
  Lock lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(BeginWrite(lock, taken));
  Status status = failure_;
  if (status.ok() && !began_) {
    status = shared_->files.Open();
    if (status.ok()) {
      began_ = true;
      on_first_write_();
    }
  }
  Ranges plan;
  if (status.ok()) status = Plan(bytes, plan);
  if (status.ok()) {
    // Neighbours that move from the log to the grid are written too, so nobody else may write them
    // meanwhile.
    const ByteRange all{std::min(bytes.begin, plan.front().bytes.begin),
                        std::max(bytes.end, plan.back().bytes.end)};
    *std::ranges::find(writing_, taken) = all;
    taken = all;
    EraseLeaves(taken);
  }
  lock.unlock();

  Leaves leaves;
  std::size_t written = 0;
  if (status.ok()) {
    for (; written < plan.size(); ++written) {
      const StoredRange& range = plan[written];
      status = bytes.Contains(range.bytes)
                   ? WriteRange(range,
                                static_cast<const std::byte*>(data) + (range.bytes.begin - offset),
                                leaves)
                   : CopyRange(range);
      if (!status.ok()) break;
    }
  }

  lock.lock();
  for (std::size_t i = 0; i < written; ++i) Install(plan[i]);
  if (status.ok()) {
    leaves_.merge(leaves);
    shared_->bytes_written.fetch_add(size, std::memory_order_relaxed);
  }
  EndWrite(taken);
  if (written > 0) StartWriteback(lock, plan[written - 1]);
  return status;
}

Result<std::size_t> TargetWriter::Read(std::uint64_t offset, void* out, std::size_t size) {
  if (offset >= this->size()) return std::size_t{0};
  size = static_cast<std::size_t>(std::min<std::uint64_t>(size, this->size() - offset));
  Ranges ranges;
  bool hole = false;
  const auto add = [&](const StoredRange& r) { ranges.push_back(r); };
  {
    const Lock lock(mutex_);
    fresh_.Walk({offset, offset + size}, add, [&](const ByteRange& gap) {
      synced_.Walk(gap, add, [&](const ByteRange&) { hole = true; });
    });
  }
  // Unwritten bytes are an error, because zeros would be mistaken for data.
  if (hole) return Status::FromErrno(ENODATA, "read unwritten bytes of", Name());
  for (const StoredRange& r : ranges) {
    TENSORMOUNT_RETURN_IF_ERROR(shared_->files.Get(r.source)->Read(
        r.offset, static_cast<std::byte*>(out) + (r.bytes.begin - offset),
        static_cast<std::size_t>(r.size())));
  }
  return size;
}

// Appends a kForget record without a sync; it voids earlier records of these bytes.
Status TargetWriter::Forget(ByteRange bytes) {
  if (shared_->files.closed())
    return Status(Code::kStale, Name() + ": its staging directory was published or removed");
  bytes.end = std::min(bytes.end, size());
  if (bytes.begin >= bytes.end) return {};
  // Waits for a running sync, which would otherwise record these bytes after they were discarded.
  const std::lock_guard sync_lock(sync_lock_);
  Lock lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(BeginWrite(lock, bytes));
  // Discarding all bytes clears the failure of a condemned target.
  const bool all = bytes.size() == size();
  if (!failure_.ok() && !all) {
    EndWrite(bytes);
    return failure_;
  }
  written_ -= KnownBytes(bytes);
  fresh_.Erase(bytes);
  synced_.Erase(bytes);
  EraseLeaves(bytes);
  Status status;
  if (number_.has_value()) {
    JournalRecord record;
    record.kind = JournalRecord::Kind::kForget;
    record.number = *number_;
    record.begin = bytes.begin;
    record.end = bytes.end;
    status = shared_->files.journal()->Append(EncodeRecord(record));
  }
  if (all && status.ok()) failure_ = Status();
  EndWrite(bytes);
  return status;
}

std::uint64_t TargetWriter::written_bytes() const {
  const Lock lock(mutex_);
  return written_;
}

// Fresh and synced ranges interleave; adjacent ones are merged.
std::vector<ByteRange> TargetWriter::WrittenRanges() const {
  std::vector<ByteRange> all;
  const auto add = [&](const StoredRange& r) {
    if (!all.empty() && all.back().end == r.bytes.begin) {
      all.back().end = r.bytes.end;
    } else {
      all.push_back(r.bytes);
    }
  };
  const Lock lock(mutex_);
  fresh_.Walk({0, size()}, add, [&](const ByteRange& gap) { synced_.ForEach(gap, add); });
  return all;
}

// ---- Durability -------------------------------------------------------------------------------

Status TargetWriter::AssignNumber() {
  if (number_.has_value()) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(number_, shared_->files.AddTarget(name_, size()));
  return {};
}

// Freezes the written bytes. New writes wait while this waits for running writes, so that it ends
// under a steady load. All bytes are taken in one step, so each write is completely in this sync or
// not at all.
Status TargetWriter::Prepare(PendingPart& pending) {
  pending.sync_lock = std::unique_lock(sync_lock_);
  if (shared_->files.closed())
    return Status(Code::kStale, Name() + ": its staging directory was published or removed");
  Ranges ranges;
  Leaves leaves;
  {
    Lock lock(mutex_);
    TENSORMOUNT_RETURN_IF_ERROR(failure_);
    sync_waiting_ = true;
    const bool over = changed_.wait_until(lock, std::chrono::steady_clock::now() + kStoragePatience,
                                          [&] { return writing_.empty(); });
    sync_waiting_ = false;
    changed_.notify_all();
    if (!over) return Status(Code::kDeadlineExceeded, Name() + ": timed out waiting for a write");
    if (fresh_.empty()) return {};
    TENSORMOUNT_RETURN_IF_ERROR(AssignNumber());
    ranges = fresh_.All();
    leaves = std::move(leaves_);
    leaves_.clear();
    fresh_.Clear();
    for (const StoredRange& r : ranges) {
      synced_.Insert(r);
      if (r.grid) used_.Claim(r.bytes, owner_);
    }
  }

  // A file that was condemned meanwhile fails the sync before anything is hashed.
  std::set<std::uint32_t> files;
  for (const StoredRange& r : ranges) files.insert(r.source);
  for (const std::uint32_t file : files) {
    pending.files.push_back(shared_->files.Get(file));
    if (pending.files.back()->condemned()) return pending.files.back()->Sync();
  }
  Ranges log;
  for (const StoredRange& r : ranges) {
    if (r.grid) {
      TENSORMOUNT_RETURN_IF_ERROR(RecordGrid(r, leaves, pending.records));
    } else {
      log.push_back(r);
    }
  }
  return RecordLog(std::move(log), pending.records);
}

// Makes records of grid bytes. Leaf hashes count from the begin of a record, so a range is cut at
// the begin of the first whole block of the target in it, because the hashes of whole blocks were
// computed during the write.
Status TargetWriter::RecordGrid(const StoredRange& range, const Leaves& leaves,
                                std::string& records) {
  std::vector<std::byte> buffer;
  const std::shared_ptr<DataFile> file = shared_->files.Get(range.source);
  for (std::uint64_t begin = range.bytes.begin; begin < range.bytes.end;) {
    std::uint64_t end = std::min(range.bytes.end, begin + kMaxExtentBytes);
    const std::uint64_t block = (begin + kLeafBytes - 1) / kLeafBytes * kLeafBytes;
    if (block > begin && block < end && end - block >= kLeafBytes) end = block;
    JournalRecord record;
    StagedExtent& extent = record.extent;
    extent.target = *number_;
    extent.begin = begin;
    extent.length = end - begin;
    extent.file = range.source;
    extent.offset = range.offset + (begin - range.bytes.begin);
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t n = std::min(kLeafBytes, end - at);
      const auto known = at % kLeafBytes == 0 ? leaves.find(at / kLeafBytes) : leaves.end();
      if (known != leaves.end() && at + n == std::min(size(), at + kLeafBytes)) {
        extent.leaves.push_back(known->second.hash);
        extent.contribution ^= known->second.contribution;
      } else {
        buffer.resize(kLeafBytes);
        TENSORMOUNT_RETURN_IF_ERROR(file->Read(extent.offset + (at - begin), buffer.data(), n));
        extent.leaves.push_back(Xxh3(buffer.data(), n));
        extent.contribution ^= geometry_.Contribution(at, buffer.data(), n);
      }
      at += n;
    }
    records += EncodeRecord(record);
    begin = end;
  }
  return {};
}

// Makes records of log bytes, in the order of their files: adjacent writes of one length at a fixed
// distance share a record.
Status TargetWriter::RecordLog(Ranges ranges, std::string& records) {
  // Ranges are cut, because records have a maximum size.
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const ByteRange bytes = ranges[i].bytes;
    if (bytes.size() <= kMaxExtentBytes) continue;
    const std::uint64_t cut = bytes.begin + kMaxExtentBytes;
    const StoredRange rest = ranges[i].Cut(cut, bytes.end);
    ranges[i].bytes.end = cut;
    ranges.push_back(rest);
  }
  std::ranges::sort(ranges, {},
                    [](const StoredRange& r) { return std::tuple(r.source, r.offset); });
  for (auto from = ranges.cbegin(); from != ranges.cend();) {
    auto to = from + 1;
    for (; to != ranges.cend(); ++to) {
      const StoredRange& last = *(to - 1);
      if (to->source != last.source || to->size() != from->size() ||
          to->offset != last.offset + last.size() || to->bytes.begin <= last.bytes.end ||
          to->bytes.begin - last.bytes.begin != (from + 1)->bytes.begin - from->bytes.begin ||
          to->offset + to->size() - from->offset > kMaxExtentBytes) {
        break;
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(RecordRuns({from, to}, records));
    from = to;
  }
  return {};
}

// Makes one record of ranges of one length at a fixed distance, which are adjacent in the file.
// Reads them back from the page cache.
Status TargetWriter::RecordRuns(std::span<const StoredRange> runs, std::string& records) {
  JournalRecord record;
  StagedExtent& extent = record.extent;
  extent.target = *number_;
  extent.begin = runs[0].bytes.begin;
  extent.length = runs[0].size();
  extent.runs = runs.size();
  extent.stride = runs.size() > 1 ? runs[1].bytes.begin - runs[0].bytes.begin : 0;
  extent.file = runs[0].source;
  extent.offset = runs[0].offset;
  const std::shared_ptr<DataFile> file = shared_->files.Get(extent.file);
  std::vector<std::byte> buffer(std::min(kLeafBytes, extent.bytes()));
  for (std::uint64_t at = 0; at < extent.bytes();) {
    const std::uint64_t n = std::min(kLeafBytes, extent.bytes() - at);
    TENSORMOUNT_RETURN_IF_ERROR(file->Read(extent.offset + at, buffer.data(), n));
    extent.leaves.push_back(Xxh3(buffer.data(), n));
    for (std::uint64_t part = at; part < at + n;) {
      const std::uint64_t in_run = part % extent.length;
      const std::uint64_t size = std::min(extent.length - in_run, at + n - part);
      extent.contribution ^=
          geometry_.Contribution(extent.begin + part / extent.length * extent.stride + in_run,
                                 buffer.data() + (part - at), size);
      part += size;
    }
    at += n;
  }
  records += EncodeRecord(record);
  return {};
}

// Only the first failure is recorded; it condemns the target.
void TargetWriter::Finish(PendingPart& pending, const Status& status) {
  if (!status.ok()) {
    bool first = false;
    {
      const Lock lock(mutex_);
      first = failure_.ok();
      if (first) failure_ = status.WithContext(Name() + ": an earlier sync failed");
    }
    // Older recorded bytes must not be published in place of the lost ones.
    if (first && status.code() != Code::kStale) Condemn(status.message());
  }
  pending.sync_lock.unlock();
}

Status TargetWriter::Sync() {
  StagedPart* const self = this;
  return SyncParts(*shared_, {&self, 1});
}

// Appends the record and syncs it at once. Failures are ignored: a journal that accepts no more
// records cannot record later bytes either.
void TargetWriter::Condemn(const std::string& reason) {
  JournalRecord record;
  record.kind = JournalRecord::Kind::kCondemn;
  record.file_name = Name();
  record.reason = reason;
  {
    const Lock lock(mutex_);
    if (!AssignNumber().ok()) return;
    record.number = *number_;
  }
  if (!shared_->files.journal()->Append(EncodeRecord(record)).ok()) return;
  (void)shared_->files.journal()->Sync();
}

}  // namespace tensormount::fs
