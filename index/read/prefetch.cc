// SPDX-License-Identifier: Apache-2.0
// Prefetcher of prefetch.h.
//
// Data are brought in units of a huge page: by each read for itself (FetchCold), and ahead of the
// reads by a Prefetcher, window by window. Within a window each process begins
// at another unit, so that processes that want the same data ask storage for different ones, and
// find the others in the page cache when they come to them. Processes that want different data lose
// nothing by it. A unit is brought whole if the reads want half of it; the other half is mostly
// wanted by another process. What is wanted of other units is left to the reads.
#include "index/read/prefetch.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/fetch_pages.h"
#include "index/read/file_cache.h"
#include "index/read/planned_read.h"
#include "index/read/stored_range_reader.h"

namespace tensormount {
namespace {

constexpr std::size_t kWindowUnits = 32;
// Gaps up to this size between wanted bytes are brought, too.
constexpr std::uint64_t kMostGap = 64 * 1024;
// Runs of a read with larger gaps that are brought one by one; more of them are left to the read.
constexpr std::uint64_t kMostRuns = 1024;
constexpr std::size_t kFetchSamples = 8;
// A unit that takes longer is worth another thread: storage answers slowly, and serves many.
constexpr std::chrono::milliseconds kSlowUnit{2};
// Size of a read that brings its own data before it begins. Larger ones would bring all of them
// before they use the first; their callers split them if it matters.
constexpr std::uint64_t kFewestFetched = kFetchUnitBytes / 8;
constexpr std::uint64_t kMostFetched = 16 * kFetchUnitBytes;
constexpr std::size_t kFetchBufferBytes = std::size_t{1} << 20;
// Largest number of threads of all processes of a machine, and of one of them.
constexpr int kMostFetchersHere = 32;
constexpr int kMostFetchers = 8;
constexpr int kFewestFetchers = 2;
constexpr std::chrono::milliseconds kFetchPoll{20};

}  // namespace

void FetchUnits::Add(const OpenedCheckpoint::FileStretch& stretch, std::size_t read) {
  for (std::uint64_t at = stretch.bytes.begin; at < stretch.bytes.end;) {
    const std::uint64_t number = at / kFetchUnitBytes;
    const std::uint64_t end = std::min(stretch.bytes.end, (number + 1) * kFetchUnitBytes);
    if (last_.wanted == 0 || last_.file != stretch.file || last_.number != number) {
      End();
      last_ = {stretch.file, number, at, 0, read};
    }
    last_.wanted += end - at;
    last_.read = read;
    at = end;
  }
}

void FetchUnits::End() {
  if (last_.wanted == 0) return;
  const std::uint64_t length = files_[last_.file].length;
  const std::uint64_t begin = last_.number * kFetchUnitBytes;
  const std::uint64_t bytes = std::min(kFetchUnitBytes, length - std::min(begin, length));
  if (last_.wanted >= bytes / 2) complete_.push_back(last_);
  last_ = {};
}

// Runs with small gaps are one stretch; other runs are stretches of their own.
std::vector<OpenedCheckpoint::FileStretch> OpenedCheckpoint::StretchesOf(
    const PlannedRead& planned) {
  std::vector<FileStretch> stretches;
  const auto add = [&](std::uint32_t file, std::uint64_t begin, std::uint64_t size) {
    if (!stretches.empty() && stretches.back().file == file &&
        begin >= stretches.back().bytes.begin && begin <= stretches.back().bytes.end + kMostGap) {
      stretches.back().bytes.end = std::max(stretches.back().bytes.end, begin + size);
    } else {
      stretches.push_back({file, {begin, begin + size}});
    }
  };
  for (const CopyPlan::Part& part : planned.parts) {
    const std::uint32_t file = planned.chunks[part.chunk].file;
    const StridedCopy& copy = part.copy;
    if (copy.bytes() == 0) continue;
    if (TouchesEach(copy, kMostGap)) {
      add(file, static_cast<std::uint64_t>(copy.src_offset), copy.src_span());
    } else if (copy.runs() <= kMostRuns) {
      copy.ForEachRun([&](std::int64_t src, std::int64_t, std::uint64_t size) {
        add(file, static_cast<std::uint64_t>(src), size);
      });
    }
  }
  return stretches;
}

Result<std::vector<OpenedCheckpoint::FileStretch>> OpenedCheckpoint::StretchesOf(
    const TensorEntry& tensor, std::span<const PlacedBox> want) const {
  if (want.empty()) return std::vector<FileStretch>();
  TENSORMOUNT_ASSIGN_OR_RETURN(const PlannedRead planned, PlanRead(tensor, want));
  return StretchesOf(planned);
}

void OpenedCheckpoint::FetchCold(const PlannedRead& planned) const {
  if (planned.bytes < kFewestFetched || planned.bytes > kMostFetched) return;
  FetchUnits units(index_->files());
  for (const FileStretch& stretch : StretchesOf(planned)) units.Add(stretch, 0);
  units.End();
  std::vector<std::byte> scratch;
  for (const FetchUnit& unit : units.complete()) {
    if (!IsCached(unit.file, unit.first).value_or(true)) Fetch(unit.file, unit.number, scratch);
  }
}

std::optional<bool> OpenedCheckpoint::IsCached(std::uint32_t file, std::uint64_t offset) const {
  if (source_) return source_->IsCached(file, offset);
  const auto open = files_->Open(*this, file);
  return open.ok() ? open.value()->file().IsCached(offset) : std::nullopt;
}

void OpenedCheckpoint::Fetch(std::uint32_t file, std::uint64_t unit,
                             std::vector<std::byte>& scratch) const {
  if (source_) return source_->Fetch(file, unit, scratch);
  const auto open = files_->Open(*this, file);
  if (!open.ok()) return;
  std::uint64_t at = unit * kFetchUnitBytes;
  const std::uint64_t end = std::min(at + kFetchUnitBytes, index_->files()[file].length);
  if (at >= end || open.value()->file().Fetch(at, end - at)) return;
  scratch.resize(kFetchBufferBytes);
  for (; at < end; at += kFetchBufferBytes) {
    const std::uint64_t size = std::min<std::uint64_t>(end - at, kFetchBufferBytes);
    if (!open.value()->file().ReadAt(at, scratch.data(), size).ok()) return;
  }
}

Prefetcher::Prefetcher(const OpenedCheckpoint& checkpoint, std::vector<Read> reads,
                       const Options& options)
    : checkpoint_(checkpoint),
      reads_(std::move(reads)),
      options_(options),
      units_(checkpoint.stored_index().files()) {
  const std::lock_guard lock(mutex_);
  StartThread();
}

Prefetcher::~Prefetcher() {
  ended_ = true;
  std::vector<Thread> threads;
  {
    const std::lock_guard lock(mutex_);
    threads.swap(threads_);
  }
  changed_.notify_all();
  for (Thread& thread : threads) thread.join();
}

bool Prefetcher::LooksCold(const OpenedCheckpoint& checkpoint, std::span<const Read> reads) {
  const std::size_t samples = std::min(kFetchSamples, reads.size());
  for (std::size_t i = 0; i < samples; ++i) {
    const Read& read = reads[i * reads.size() / samples];
    const auto stretches = checkpoint.StretchesOf(*read.tensor, read.want);
    if (!stretches.ok() || stretches.value().empty()) continue;
    const auto& stretch = stretches.value()[stretches.value().size() / 2];
    const std::uint64_t middle = stretch.bytes.begin + stretch.bytes.size() / 2;
    const std::optional<bool> cached = checkpoint.IsCached(stretch.file, middle);
    if (cached && !*cached) return true;
    if (cached) continue;
    // A read that may not wait starts the kernel's read-ahead, so it is made for samples only: its
    // single pages keep out the huge one.
    const auto file = checkpoint.SharedFile(stretch.file);
    std::byte byte;
    if (file.ok() && file.value()->ReadCached(middle, &byte, 1) == std::size_t{0}) return true;
  }
  return false;
}

void Prefetcher::Reached(std::size_t read) {
  std::size_t before = reached_.load(std::memory_order_relaxed);
  while (before < read && !reached_.compare_exchange_weak(before, read)) {
  }
  changed_.notify_all();
}

bool Prefetcher::Ends() const {
  return ended_.load() || (options_.cancel != nullptr && options_.cancel->load());
}

// Called with mutex_ locked. Without another thread the others do the work.
void Prefetcher::StartThread() {
  try {
    threads_.emplace_back([this] { Work(); });
  } catch (const std::exception&) {
  }
}

void Prefetcher::Work() {
  const int most =
      std::clamp(kMostFetchersHere / std::max(options_.readers, 1), kFewestFetchers, kMostFetchers);
  try {
    std::vector<std::byte> scratch;
    while (const std::optional<FetchUnit> unit = Next()) {
      if (checkpoint_.IsCached(unit->file, unit->first).value_or(false)) continue;
      const auto begin = std::chrono::steady_clock::now();
      checkpoint_.Fetch(unit->file, unit->number, scratch);
      if (std::chrono::steady_clock::now() - begin <= kSlowUnit) continue;
      const std::lock_guard lock(mutex_);
      if (!Ends() && threads_.size() < static_cast<std::size_t>(most)) StartThread();
    }
  } catch (const std::exception&) {
    // Out of memory: the reads go on alone.
  }
}

std::optional<FetchUnit> Prefetcher::Next() {
  std::unique_lock lock(mutex_);
  while (!Ends()) {
    if (taken_ < window_.size()) {
      const std::size_t first = window_.size() * static_cast<std::size_t>(options_.reader) /
                                static_cast<std::size_t>(options_.readers);
      const FetchUnit& unit = window_[(first + taken_++) % window_.size()];
      if (unit.read >= reached_.load()) return unit;
    } else if (units_.complete().empty() && planned_ == reads_.size()) {
      break;
    } else if (MayFillWindow()) {
      FillWindow();
    } else {
      changed_.wait_for(lock, kFetchPoll);
    }
  }
  return std::nullopt;
}

// Whether the next window is near enough to what the reader reads now.
bool Prefetcher::MayFillWindow() const {
  const std::size_t reached = reached_.load();
  return reached >= planned_ || handed_out_ < ends_[reached] + options_.lead_bytes;
}

void Prefetcher::FillWindow() {
  window_.clear();
  taken_ = 0;
  std::deque<FetchUnit>& pending = units_.complete();
  while (window_.size() < kWindowUnits) {
    while (pending.empty() && planned_ < reads_.size()) {
      const Read& read = reads_[planned_];
      const auto stretches = checkpoint_.StretchesOf(*read.tensor, read.want);
      if (stretches.ok()) {
        for (const auto& stretch : stretches.value()) units_.Add(stretch, planned_);
      }
      if (++planned_ == reads_.size()) units_.End();
      ends_.push_back(handed_out_ + kFetchUnitBytes * pending.size());
    }
    if (pending.empty()) break;
    handed_out_ += kFetchUnitBytes;
    window_.push_back(pending.front());
    pending.pop_front();
  }
}

}  // namespace tensormount
