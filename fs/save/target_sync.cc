// SPDX-License-Identifier: Apache-2.0
// How what was written to a target becomes durable: data files synced first, then records of them
// in the journal, then the journal. TargetWriter is declared in target_writer.h; syncing is apart
// from writing because it runs when writers have stopped.
#include <algorithm>
#include <chrono>
#include <set>
#include <tuple>

#include "fs/save/target_writer.h"
#include "shard/leaf_hash.h"

namespace tensormount::fs {
namespace {

constexpr std::chrono::minutes kTargetSyncPatience{10};

}  // namespace

Status TargetWriter::Number() {
  if (number_.has_value()) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(number_, shared_->files.AddTarget(name_, size()));
  return {};
}

Status TargetWriter::Prepare(PendingPart& pending) {
  pending.turn = std::unique_lock(turn_);
  if (shared_->files.closed()) return Status(Code::kStale, Name() + ": no longer written");
  std::vector<PlacedRange> ranges;
  Leaves leaves;
  {
    Lock lock(mutex_);
    TENSORMOUNT_RETURN_IF_ERROR(failure_);
    // New writes wait until those that run are over, so that this comes to an end.
    taking_ = true;
    const bool over =
        changed_.wait_until(lock, std::chrono::steady_clock::now() + kTargetSyncPatience,
                            [&] { return writing_.empty(); });
    taking_ = false;
    changed_.notify_all();
    if (!over) return Status(Code::kDeadlineExceeded, Name() + ": a write does not return");
    if (fresh_.empty()) return {};
    TENSORMOUNT_RETURN_IF_ERROR(Number());
    ranges = fresh_.All();
    leaves = std::move(leaves_);
    leaves_.clear();
    fresh_.Clear();
    for (const PlacedRange& r : ranges) {
      synced_.Insert(r);
      if (r.place.grid) used_.Claim(r.begin, r.end(), owner_);
    }
  }

  std::set<std::uint32_t> files;
  for (const PlacedRange& r : ranges) files.insert(r.place.file);
  for (const std::uint32_t file : files) {
    pending.files.push_back(shared_->files.Get(file));
    if (pending.files.back()->condemned()) return pending.files.back()->Sync();
  }
  std::vector<PlacedRange> log;
  for (const PlacedRange& r : ranges) {
    if (r.place.grid) {
      TENSORMOUNT_RETURN_IF_ERROR(RecordGrid(r, leaves, pending.records));
    } else {
      log.push_back(r);
    }
  }
  return RecordLog(std::move(log), pending.records);
}

// Records of grid bytes. Cut where a block of the target begins, if there is a whole one: its hash
// was taken while it was written, and the leaves of a record count from where it begins.
Status TargetWriter::RecordGrid(const PlacedRange& range, const Leaves& leaves,
                                std::string& records) {
  std::vector<std::byte> buffer;
  const std::shared_ptr<DataFile> file = shared_->files.Get(range.place.file);
  for (std::uint64_t begin = range.begin; begin < range.end();) {
    std::uint64_t end = std::min(range.end(), begin + kMaxExtentBytes);
    const std::uint64_t block = (begin + kLeafBytes - 1) / kLeafBytes * kLeafBytes;
    if (block > begin && block < end && end - block >= kLeafBytes) end = block;
    JournalRecord record;
    StagedExtent& extent = record.extent;
    extent.target = *number_;
    extent.begin = begin;
    extent.length = end - begin;
    extent.file = range.place.file;
    extent.offset = range.place.offset + (begin - range.begin);
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

// Records of log bytes in the order in which they lie in their files: writes of one length that
// followed each other at one distance are one record.
Status TargetWriter::RecordLog(std::vector<PlacedRange> ranges, std::string& records) {
  // No record is longer than it may be.
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].place.length <= kMaxExtentBytes) continue;
    PlacedRange rest = ranges[i];
    rest.begin += kMaxExtentBytes;
    rest.place.offset += kMaxExtentBytes;
    rest.place.length -= kMaxExtentBytes;
    ranges[i].place.length = kMaxExtentBytes;
    ranges.push_back(rest);
  }
  std::ranges::sort(ranges, {},
                    [](const PlacedRange& r) { return std::tuple(r.place.file, r.place.offset); });
  for (auto from = ranges.cbegin(); from != ranges.cend();) {
    auto to = from + 1;
    for (; to != ranges.cend(); ++to) {
      const PlacedRange& last = *(to - 1);
      if (to->place.file != last.place.file || to->place.length != from->place.length ||
          to->place.offset != last.place.offset + last.place.length || to->begin <= last.end() ||
          to->begin - last.begin != (from + 1)->begin - from->begin ||
          to->place.offset + to->place.length - from->place.offset > kMaxExtentBytes) {
        break;
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(RecordRuns(from, to, records));
    from = to;
  }
  return {};
}

Status TargetWriter::RecordRuns(std::vector<PlacedRange>::const_iterator from,
                                std::vector<PlacedRange>::const_iterator to, std::string& records) {
  JournalRecord record;
  StagedExtent& extent = record.extent;
  extent.target = *number_;
  extent.begin = from->begin;
  extent.length = from->place.length;
  extent.runs = static_cast<std::uint64_t>(to - from);
  extent.stride = extent.runs > 1 ? (from + 1)->begin - from->begin : 0;
  extent.file = from->place.file;
  extent.offset = from->place.offset;
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

void TargetWriter::Finish(PendingPart& pending, const Status& status) {
  if (!status.ok()) {
    bool first = false;
    {
      const Lock lock(mutex_);
      first = failure_.ok();
      if (first) failure_ = status.WithContext(Name() + ": an earlier sync failed");
    }
    // Older bytes of it that were recorded must not pass for what was meant to be there.
    if (first && status.code() != Code::kStale) Condemn(status.message());
  }
  pending.turn.unlock();
}

Status TargetWriter::Sync() {
  StagedPart* const self = this;
  return SyncParts(*shared_, {&self, 1});
}

void TargetWriter::Condemn(const std::string& reason) {
  JournalRecord record;
  record.kind = JournalRecord::Kind::kCondemn;
  record.file_name = Name();
  record.reason = reason;
  {
    const Lock lock(mutex_);
    if (!Number().ok()) return;
    record.number = *number_;
  }
  // Where the journal takes nothing more, nothing that is written from now on is ever recorded.
  if (!shared_->files.journal()->Append(EncodeRecord(record)).ok()) return;
  (void)shared_->files.journal()->Sync();
}

Status SyncParts(StagedParts& shared, std::span<StagedPart* const> parts) {
  std::vector<PendingPart> pending(parts.size());
  std::vector<Status> status(parts.size());
  std::map<std::uint32_t, std::shared_ptr<DataFile>> files;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    status[i] = parts[i]->Prepare(pending[i]);
    if (!status[i].ok()) continue;
    for (const auto& file : pending[i].files) files.emplace(file->number(), file);
  }
  std::map<std::uint32_t, Status> outcome;
  for (const auto& [number, file] : files) outcome[number] = file->Sync();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (const auto& file : pending[i].files) {
      if (status[i].ok()) status[i] = outcome[file->number()];
    }
    if (status[i].ok() && !pending[i].records.empty()) {
      status[i] = shared.files.journal()->Append(pending[i].records);
    }
    pending[i].records = {};
  }
  // Also what was appended without a sync before: what was forgotten or removed.
  const Status journal =
      shared.files.journal() != nullptr ? shared.files.journal()->Sync() : Status();
  Status first;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (status[i].ok()) status[i] = journal;
    parts[i]->Finish(pending[i], status[i]);
    if (first.ok()) first = status[i];
  }
  for (const auto& [number, file] : files) shared.files.CloseIdle(*file);
  shared.syncs.fetch_add(1, std::memory_order_relaxed);
  return first;
}

}  // namespace tensormount::fs
