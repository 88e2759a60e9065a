// SPDX-License-Identifier: Apache-2.0
// Writes to one target, a tensor or a box of one, in any order and overlapping. Bytes go to their
// position in a grid, one place for each, until they are written again; rewritten bytes go to a log
// behind it, because no byte of a data file that a journal vouches for may change.
#include "fs/save/target_writer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/checked.h"
#include "shard/leaf_hash.h"

namespace tensormount::fs {
namespace {

constexpr std::chrono::minutes kTargetPatience{10};
// Hashed and written block by block: a block stays in the second-level cache meanwhile.
constexpr std::uint64_t kTargetBlockBytes = 256 * 1024;
// The device begins when so much follows each other.
constexpr std::uint64_t kWritebackBytes = std::uint64_t{8} << 20;
constexpr std::uint64_t kWorthWriteback = std::uint64_t{1} << 20;
// What a target takes of the pack at a time for its log: as much as it has, within these.
constexpr std::uint64_t kMinLogBytes = 64 * 1024;
constexpr std::uint64_t kMaxLogBytes = std::uint64_t{4} << 20;

}  // namespace

TargetWriter::TargetWriter(std::shared_ptr<StagedParts> shared, StagedTarget name,
                           TargetGeometry geometry, std::uint64_t owner,
                           std::function<void()> on_first_write)
    : shared_(std::move(shared)),
      name_(std::move(name)),
      geometry_(std::move(geometry)),
      owner_(owner),
      on_first_write_(std::move(on_first_write)) {}

bool TargetWriter::Overlaps(std::uint64_t begin, std::uint64_t end) const {
  return std::ranges::any_of(writing_,
                             [&](const auto& w) { return begin < w.second && w.first < end; });
}

Status TargetWriter::Enter(Lock& lock, std::uint64_t begin, std::uint64_t end) {
  const auto deadline = std::chrono::steady_clock::now() + kTargetPatience;
  const bool free =
      changed_.wait_until(lock, deadline, [&] { return !taking_ && !Overlaps(begin, end); });
  if (!free) return Status(Code::kDeadlineExceeded, Name() + ": another write does not return");
  writing_.emplace_back(begin, end);
  return {};
}

void TargetWriter::Leave(std::uint64_t begin, std::uint64_t end) {
  const auto at = std::ranges::find(writing_, std::pair(begin, end));
  *at = writing_.back();
  writing_.pop_back();
  changed_.notify_all();
}

void TargetWriter::EraseLeaves(std::uint64_t begin, std::uint64_t end) {
  leaves_.erase(leaves_.lower_bound(begin / kLeafBytes),
                leaves_.lower_bound((end + kLeafBytes - 1) / kLeafBytes));
}

std::uint64_t TargetWriter::KnownBytes(std::uint64_t begin, std::uint64_t end) const {
  std::uint64_t bytes = 0;
  fresh_.Walk(
      begin, end, [&](const PlacedRange& r) { bytes += r.place.length; },
      [&](std::uint64_t b, std::uint64_t e) { bytes += synced_.Covered(b, e); });
  return bytes;
}

// ---- Where bytes go ---------------------------------------------------------------------------

Status TargetWriter::OpenGrid() {
  if (grid_.has_value()) return {};
  Grid grid;
  if (size() < StagingWriter::kOwnFileBytes) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const DataFiles::Area area, shared_->files.Allocate(size()));
    grid.file = area.file;
    grid.base = area.offset;
  } else if (geometry_.is_run()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(grid.shared, shared_->files.OfTensor(name_.key));
    grid.file = grid.shared->file;
    grid.base = geometry_.run_begin();
  } else {
    TENSORMOUNT_ASSIGN_OR_RETURN(grid.file, shared_->files.Create('o', Placement::kPack));
  }
  grid_ = std::move(grid);
  return {};
}

void TargetWriter::AddPiece(std::uint64_t begin, std::uint64_t end,
                            const std::shared_ptr<DataFile>& file, std::uint64_t offset, bool grid,
                            WriteRuns& pieces) const {
  if (!pieces.empty()) {
    WriteRun& last = pieces.back();
    if (!last.copied && last.file == file && last.range.place.grid == grid &&
        last.range.end() == begin && last.range.place.offset + last.range.place.length == offset) {
      last.range.place.length += end - begin;
      return;
    }
  }
  pieces.push_back({{begin, {end - begin, offset, file->number(), grid}}, file, std::nullopt});
}

// Whether all of [begin, end) may be written at its place in the grid.
bool TargetWriter::ClaimGrid(std::uint64_t begin, std::uint64_t end) {
  if (grid_->file->condemned()) return false;
  bool free = true;
  used_.Split(begin, end, [&](std::uint64_t, std::uint64_t, bool used) { free = free && !used; });
  if (!free || grid_->shared == nullptr) return free;
  const std::lock_guard lock(grid_->shared->mutex);
  return grid_->shared->claims.Claim(grid_->base + begin, grid_->base + end, owner_);
}

bool TargetWriter::BesideGrid(std::uint64_t begin, std::uint64_t end) const {
  for (const RangeMap* map : {&fresh_, &synced_}) {
    const auto before = map->EndingAt(begin);
    if (before.has_value() && before->place.grid) return true;
    const auto behind = map->BeginningAt(end);
    if (behind.has_value() && behind->place.grid) return true;
  }
  return false;
}

Status TargetWriter::PlanLog(std::uint64_t begin, std::uint64_t end, WriteRuns& pieces) {
  const std::uint64_t n = end - begin;
  if (log_.file == nullptr || log_.file->condemned() || log_.size < n) {
    const std::uint64_t more = std::max(n, std::clamp(log_bytes_, kMinLogBytes, kMaxLogBytes));
    if (log_.file == nullptr || log_.file->condemned() || !shared_->files.Extend(log_, more)) {
      TENSORMOUNT_ASSIGN_OR_RETURN(log_, shared_->files.Allocate(more));
    }
    log_bytes_ += more;
  }
  AddPiece(begin, end, log_.file, log_.offset, false, pieces);
  log_.offset += n;
  log_.size -= n;
  return {};
}

// Bytes that have no place yet, or one that may not be written again.
Status TargetWriter::PlanGap(std::uint64_t begin, std::uint64_t end, bool is_short,
                             WriteRuns& pieces) {
  if (is_short && !BesideGrid(begin, end)) return PlanLog(begin, end, pieces);
  TENSORMOUNT_RETURN_IF_ERROR(OpenGrid());
  Status status;
  used_.Split(begin, end, [&](std::uint64_t b, std::uint64_t e, bool used) {
    if (!status.ok()) return;
    if (!used && ClaimGrid(b, e)) {
      AddPiece(b, e, grid_->file, grid_->base + b, true, pieces);
    } else {
      status = PlanLog(b, e, pieces);
    }
  });
  return status;
}

// A write with neighbours in the log that, with them, is long or beside the grid: all of them go to
// the grid. Adds nothing where there are none, or where they may not.
Status TargetWriter::PlanGrown(std::uint64_t begin, std::uint64_t end, WriteRuns& pieces) {
  const auto usable = [&](std::optional<PlacedRange>& r) {
    if (r.has_value() &&
        (r->place.grid || r->place.length >= kShortBytes || Overlaps(r->begin, r->end()))) {
      r.reset();
    }
  };
  std::optional<PlacedRange> before = fresh_.EndingAt(begin);
  std::optional<PlacedRange> behind = fresh_.BeginningAt(end);
  usable(before);
  usable(behind);
  const std::uint64_t from = before.has_value() ? before->begin : begin;
  const std::uint64_t to = behind.has_value() ? behind->end() : end;
  if (!before.has_value() && !behind.has_value()) return {};
  if (to - from < kShortBytes && !BesideGrid(from, to)) return {};
  TENSORMOUNT_RETURN_IF_ERROR(OpenGrid());
  if (!ClaimGrid(from, to)) return {};
  const auto add = [&](std::uint64_t b, std::uint64_t e, std::optional<PlacedRange> copied) {
    pieces.push_back(
        {{b, {e - b, grid_->base + b, grid_->file->number(), true}}, grid_->file, copied});
  };
  if (before.has_value()) add(from, begin, before);
  add(begin, end, std::nullopt);
  if (behind.has_value()) add(end, to, behind);
  return {};
}

Status TargetWriter::Plan(std::uint64_t begin, std::uint64_t end, WriteRuns& pieces) {
  const bool is_large = size() >= StagingWriter::kOwnFileBytes;
  const bool is_short = is_large && end - begin < kShortBytes;
  if (is_large && fresh_.Covered(begin, end) == 0) {
    TENSORMOUNT_RETURN_IF_ERROR(PlanGrown(begin, end, pieces));
    if (!pieces.empty()) return {};
  }
  Status status;
  fresh_.Walk(
      begin, end,
      [&](const PlacedRange& r) {
        AddPiece(r.begin, r.end(), shared_->files.Get(r.place.file), r.place.offset, r.place.grid,
                 pieces);
      },
      [&](std::uint64_t b, std::uint64_t e) {
        if (status.ok()) status = PlanGap(b, e, is_short, pieces);
      });
  return status;
}

// ---- Writing ----------------------------------------------------------------------------------

Status TargetWriter::WritePiece(const WriteRun& piece, const std::byte* data, Leaves& leaves) {
  const PlacedRange& range = piece.range;
  if (!range.place.grid) return piece.file->Write(range.place.offset, data, range.place.length);
  for (std::uint64_t at = range.begin; at < range.end();) {
    const std::uint64_t block =
        std::min(range.end(), (at / kTargetBlockBytes + 1) * kTargetBlockBytes);
    for (std::uint64_t leaf = at; leaf < block;) {
      const std::uint64_t next = std::min(size(), (leaf / kLeafBytes + 1) * kLeafBytes);
      if (leaf % kLeafBytes == 0 && next <= block) {
        const std::byte* bytes = data + (leaf - range.begin);
        leaves.emplace_hint(
            leaves.end(), leaf / kLeafBytes,
            Leaf{Xxh3(bytes, next - leaf), geometry_.Contribution(leaf, bytes, next - leaf)});
      }
      leaf = next;
    }
    TENSORMOUNT_RETURN_IF_ERROR(piece.file->Write(range.place.offset + (at - range.begin),
                                                  data + (at - range.begin), block - at));
    at = block;
  }
  return {};
}

Status TargetWriter::CopyPiece(const WriteRun& piece) {
  const std::shared_ptr<DataFile> from = shared_->files.Get(piece.copied->place.file);
  std::vector<std::byte> buffer(std::min(kTargetBlockBytes, piece.range.place.length));
  for (std::uint64_t done = 0; done < piece.range.place.length;) {
    const std::size_t n = std::min<std::uint64_t>(buffer.size(), piece.range.place.length - done);
    TENSORMOUNT_RETURN_IF_ERROR(from->Read(piece.copied->place.offset + done, buffer.data(), n));
    TENSORMOUNT_RETURN_IF_ERROR(
        piece.file->Write(piece.range.place.offset + done, buffer.data(), n));
    done += n;
  }
  return {};
}

void TargetWriter::Install(const WriteRun& piece) {
  const PlacedRange& r = piece.range;
  written_ += r.place.length - KnownBytes(r.begin, r.end());
  fresh_.Insert(r);
}

void TargetWriter::StartWriteback(Lock& lock, const WriteRun& piece) {
  const std::uint64_t begin = piece.range.place.offset;
  const std::uint64_t end = begin + piece.range.place.length;
  std::shared_ptr<DataFile> file = writeback_;
  std::uint64_t from = writeback_begin_;
  std::uint64_t to = writeback_end_;
  if (writeback_ == piece.file && writeback_end_ == begin) {
    writeback_end_ = to = end;
    if (to - from < kWritebackBytes) return;
    writeback_begin_ = end;
  } else {
    writeback_ = piece.file;
    writeback_begin_ = begin;
    writeback_end_ = end;
    if (file == nullptr || to - from < kWorthWriteback) return;
  }
  lock.unlock();
  file->StartWriteback(from, to - from);
  lock.lock();
}

Status TargetWriter::Write(std::uint64_t offset, const void* data, std::size_t size) {
  if (shared_->files.closed()) return Status(Code::kStale, Name() + ": no longer written");
  if (!RangeWithin(offset, size, this->size())) return Status::FromErrno(EFBIG, "write", Name());
  if (size == 0) return {};
  std::uint64_t begin = offset;
  std::uint64_t end = offset + size;
  Lock lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(Enter(lock, begin, end));
  Status status = failure_;
  if (status.ok() && !began_) {
    status = shared_->files.Open();
    if (status.ok()) {
      began_ = true;
      on_first_write_();
    }
  }
  WriteRuns pieces;
  if (status.ok()) status = Plan(begin, end, pieces);
  if (status.ok()) {
    // Neighbours that move are written, too.
    const std::uint64_t from = std::min(begin, pieces.front().range.begin);
    const std::uint64_t to = std::max(end, pieces.back().range.end());
    *std::ranges::find(writing_, std::pair(begin, end)) = {from, to};
    begin = from;
    end = to;
    EraseLeaves(begin, end);
  }
  lock.unlock();

  Leaves leaves;
  std::size_t written = 0;
  if (status.ok()) {
    for (; written < pieces.size(); ++written) {
      const WriteRun& piece = pieces[written];
      status = piece.copied.has_value()
                   ? CopyPiece(piece)
                   : WritePiece(piece,
                                static_cast<const std::byte*>(data) + (piece.range.begin - offset),
                                leaves);
      if (!status.ok()) break;
    }
  }

  lock.lock();
  for (std::size_t i = 0; i < written; ++i) Install(pieces[i]);
  if (status.ok()) {
    leaves_.merge(leaves);
    shared_->bytes_written.fetch_add(size, std::memory_order_relaxed);
  }
  Leave(begin, end);
  if (written > 0) StartWriteback(lock, pieces[written - 1]);
  return status;
}

Result<std::size_t> TargetWriter::Read(std::uint64_t offset, void* out, std::size_t size) {
  if (offset >= this->size()) return std::size_t{0};
  size = static_cast<std::size_t>(std::min<std::uint64_t>(size, this->size() - offset));
  std::vector<PlacedRange> ranges;
  bool hole = false;
  const auto add = [&](const PlacedRange& r) { ranges.push_back(r); };
  {
    const Lock lock(mutex_);
    fresh_.Walk(offset, offset + size, add, [&](std::uint64_t b, std::uint64_t e) {
      synced_.Walk(b, e, add, [&](std::uint64_t, std::uint64_t) { hole = true; });
    });
  }
  if (hole) return Status::FromErrno(ENODATA, "read what was not written of", Name());
  for (const PlacedRange& r : ranges) {
    TENSORMOUNT_RETURN_IF_ERROR(shared_->files.Get(r.place.file)
                                    ->Read(r.place.offset,
                                           static_cast<std::byte*>(out) + (r.begin - offset),
                                           static_cast<std::size_t>(r.place.length)));
  }
  return size;
}

Status TargetWriter::Forget(std::uint64_t begin, std::uint64_t end) {
  if (shared_->files.closed()) return Status(Code::kStale, Name() + ": no longer written");
  end = std::min(end, size());
  if (begin >= end) return {};
  // Not between a sync's taking of these bytes and its records of them.
  const std::lock_guard turn(turn_);
  Lock lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(Enter(lock, begin, end));
  // All of it: then nothing is left that could be wrong, and it may be written anew.
  const bool all = begin == 0 && end == size();
  if (!failure_.ok() && !all) {
    Leave(begin, end);
    return failure_;
  }
  written_ -= KnownBytes(begin, end);
  fresh_.Erase(begin, end);
  synced_.Erase(begin, end);
  EraseLeaves(begin, end);
  Status status;
  if (number_.has_value()) {
    JournalRecord record;
    record.kind = JournalRecord::Kind::kForget;
    record.number = *number_;
    record.begin = begin;
    record.end = end;
    status = shared_->files.journal()->Append(EncodeRecord(record));
  }
  if (all && status.ok()) failure_ = Status();
  Leave(begin, end);
  return status;
}

std::uint64_t TargetWriter::written_bytes() const {
  const Lock lock(mutex_);
  return written_;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> TargetWriter::Written() const {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all;
  const auto add = [&](std::uint64_t begin, std::uint64_t end) {
    if (!all.empty() && all.back().second == begin) {
      all.back().second = end;
    } else {
      all.emplace_back(begin, end);
    }
  };
  const auto known = [&](const PlacedRange& r) { add(r.begin, r.end()); };
  const Lock lock(mutex_);
  fresh_.Walk(0, size(), known, [&](std::uint64_t b, std::uint64_t e) {
    synced_.Walk(b, e, known, [](std::uint64_t, std::uint64_t) {});
  });
  return all;
}

}  // namespace tensormount::fs
