// SPDX-License-Identifier: Apache-2.0
// Prefetcher of prefetch.h.
//
// Units are brought window by window. Within a window each process begins at another unit, so that
// processes that want the same data ask storage for different ones, and find the others in the page
// cache when they come to them. Processes that want different data lose nothing by it.
#include "index/read/prefetch.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "base/cancel_scope.h"
#include "base/checked.h"
#include "base/fetch_pages.h"
#include "index/read/file_cache.h"
#include "index/read/planned_read.h"
#include "index/read/stored_range_reader.h"

namespace tensormount {
namespace {

constexpr std::size_t kWindowUnits = 32;
// Gaps up to this size between wanted bytes are in pages that are wanted.
constexpr std::uint64_t kPageGap = 4096;
// Runs of a read with larger gaps that are listed one by one; more of them are left out.
constexpr std::uint64_t kMostRuns = 1024;
// Reads that are planned beyond the one that the reader has reached: tiny ones may want no unit.
constexpr std::size_t kMostPlannedAhead = 4096;
constexpr std::size_t kFetchSamples = 8;
// A unit that takes longer is worth another thread: storage answers slowly, and serves many.
constexpr std::chrono::milliseconds kSlowUnit{2};
// Largest number of threads of all processes of a machine, and of one of them.
constexpr int kMostFetchersHere = 32;
constexpr int kMostFetchers = 8;
constexpr int kFewestFetchers = 1;
constexpr std::chrono::milliseconds kFetchPoll{20};

}  // namespace

void FetchUnits::Add(const OpenedCheckpoint::FileStretch& stretch, std::size_t read) {
  const std::uint64_t length = files_[stretch.file].length;
  // A damaged index may have any offset; the read reports it.
  if (stretch.bytes.size() == 0 ||
      !RangeWithin(stretch.bytes.begin, stretch.bytes.size(), length)) {
    return;
  }
  OpenStretch& open = open_[stretch.file];
  if (stretch.bytes.begin < open.end || stretch.bytes.begin - open.end > kPageGap) {
    EndStretch(stretch.file, open);
  }
  for (std::uint64_t at = stretch.bytes.begin; at < stretch.bytes.end;) {
    const std::uint64_t begin = at / kFetchUnitBytes * kFetchUnitBytes;
    const ByteRange unit{begin, begin + std::min(kFetchUnitBytes, length - begin)};
    const std::uint64_t end = std::min(stretch.bytes.end, unit.end);
    if (open.last.wanted == 0 || open.last.bytes.begin != begin) {
      EndUnit(open);
      open.last = {stretch.file, unit, 0, read, read};
    }
    open.last.wanted += end - at;
    open.last.last_read = read;
    at = end;
  }
  open.end = stretch.bytes.end;
}

void FetchUnits::EndUnit(OpenStretch& open) {
  const std::uint64_t size = open.last.bytes.size();
  if (open.last.wanted > 0 && open.last.wanted >= size - size / 8) {
    open.held.push_back(open.last);
    if (open.held.size() > kFollowingUnits) {
      chosen_.push_back(open.held.front());
      open.held.pop_front();
    }
  }
  open.last = {};
}

void FetchUnits::EndStretch(std::uint32_t file, OpenStretch& open) {
  EndUnit(open);
  if (files_[file].length - open.end <= kPageGap) {
    chosen_.insert(chosen_.end(), open.held.begin(), open.held.end());
  }
  open.held.clear();
}

void FetchUnits::End() {
  for (auto& [file, open] : open_) EndStretch(file, open);
  open_.clear();
}

// Runs with small gaps are one stretch; other runs are stretches of their own.
Result<std::vector<OpenedCheckpoint::FileStretch>> OpenedCheckpoint::StretchesOf(
    const TensorEntry& tensor, std::span<const PlacedBox> want, int readers) const {
  std::vector<FileStretch> stretches;
  if (want.empty()) return stretches;
  TENSORMOUNT_ASSIGN_OR_RETURN(const PlannedRead planned, PlanRead(tensor, want));
  const auto add = [&](std::uint32_t file, std::uint64_t begin, std::uint64_t size) {
    if (!stretches.empty() && stretches.back().file == file &&
        begin >= stretches.back().bytes.begin && begin <= stretches.back().bytes.end + kPageGap) {
      stretches.back().bytes.end = std::max(stretches.back().bytes.end, begin + size);
    } else {
      stretches.push_back({file, {begin, begin + size}});
    }
  };
  for (const CopyPlan::Part& part : planned.parts) {
    const std::uint32_t file = planned.chunks[part.chunk].file;
    const StridedCopy& copy = part.copy;
    if (copy.bytes() == 0) continue;
    // The other readers fill gaps of as many runs as they are.
    const std::uint64_t gap =
        std::max(kPageGap, copy.run * static_cast<std::uint64_t>(std::max(readers - 1, 0)));
    if (TouchesEach(copy, gap + 1)) {
      add(file, static_cast<std::uint64_t>(copy.src_offset), copy.src_span());
    } else if (copy.runs() <= kMostRuns) {
      copy.ForEachRun([&](std::int64_t src, std::int64_t, std::uint64_t size) {
        add(file, static_cast<std::uint64_t>(src), size);
      });
    }
  }
  return stretches;
}

std::optional<bool> OpenedCheckpoint::IsCached(std::uint32_t file, std::uint64_t offset) const {
  if (source_) return source_->IsCached(file, offset);
  const auto open = files_->Open(*this, file);
  return open.ok() ? open.value()->file().IsCached(offset) : std::nullopt;
}

bool OpenedCheckpoint::Fetch(std::uint32_t file, ByteRange unit) const {
  if (source_) return source_->Fetch(file, unit);
  const auto open = files_->Open(*this, file);
  return open.ok() && open.value()->file().Fetch(unit.begin, unit.size());
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
    const auto stretches = checkpoint.StretchesOf(*read.tensor, read.want, 1);
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

bool Prefetcher::Ends() const {
  return ended_.load() || (options_.cancel != nullptr && options_.cancel->load());
}

// Called with mutex_ locked. Without another thread the others do the work.
void Prefetcher::StartThread() {
  try {
    threads_.emplace_back([this, cancel = CancelScope::Current()] {
      const CancelScope scope(cancel);
      Work();
    });
  } catch (const std::exception&) {
  }
}

void Prefetcher::Work() {
  const int most =
      std::clamp(kMostFetchersHere / std::max(options_.readers, 1), kFewestFetchers, kMostFetchers);
  try {
    while (const std::optional<FetchUnit> unit = Next()) {
      const auto begin = std::chrono::steady_clock::now();
      Bring(*unit);
      if (std::chrono::steady_clock::now() - begin <= kSlowUnit) continue;
      const std::lock_guard lock(mutex_);
      if (!Ends() && threads_.size() < static_cast<std::size_t>(most)) StartThread();
    }
  } catch (const std::exception&) {
    // Out of memory: the reads go on alone.
  }
}

void Prefetcher::Await(std::size_t read) {
  std::size_t before = reached_.load(std::memory_order_relaxed);
  while (before < read && !reached_.compare_exchange_weak(before, read)) {
  }
  while (const std::optional<FetchUnit> unit = NextFor(read)) Bring(*unit);
}

// Where the kernel or the file system does not do what FetchPages expects, nothing more is brought:
// not even the read-ahead that serves the reads then should be disturbed.
void Prefetcher::Bring(const FetchUnit& unit) {
  const auto is_cached = [&](std::uint64_t offset) {
    return checkpoint_.IsCached(unit.file, offset);
  };
  if (is_cached(unit.bytes.begin).value_or(false) && is_cached(unit.bytes.end - 1).value_or(false))
    return;
  if (!checkpoint_.Fetch(unit.file, unit.bytes) || !is_cached(unit.bytes.begin).value_or(true)) {
    ended_ = true;
  }
}

// The next unit for a thread of this object; waits until the reader is near enough.
std::optional<FetchUnit> Prefetcher::Next() {
  std::unique_lock lock(mutex_);
  while (!Ends()) {
    if (std::optional<FetchUnit> unit = Take(OwnStart(window_.size()), reads_.size())) return unit;
    if (units_.chosen().empty() && planned_ == reads_.size()) break;
    // No window: the reads that may be planned now want no units.
    if (MayFillWindow() && FillWindow()) continue;
    changed_.wait_for(lock, kFetchPoll);
  }
  return std::nullopt;
}

// A unit that `read` wants and no thread has. Never waits.
std::optional<FetchUnit> Prefetcher::NextFor(std::size_t read) {
  const std::lock_guard lock(mutex_);
  if (Ends()) return std::nullopt;
  std::size_t wanted = 0;
  while (wanted < window_.size() && window_[wanted].first_read <= read) ++wanted;
  if (std::optional<FetchUnit> unit = Take(OwnStart(wanted), read)) return unit;
  PlanAhead(read);
  std::deque<FetchUnit>& chosen = units_.chosen();
  for (wanted = 0; wanted < chosen.size() && chosen[wanted].first_read <= read;) ++wanted;
  if (wanted == 0) return std::nullopt;
  const auto at = chosen.begin() + static_cast<std::ptrdiff_t>(OwnStart(wanted));
  const FetchUnit unit = *at;
  chosen.erase(at);
  handed_out_ += kFetchUnitBytes;
  return unit;
}

// The position at which this process begins with `count` units: processes that want the same units
// begin with different ones.
std::size_t Prefetcher::OwnStart(std::size_t count) const {
  return count * static_cast<std::size_t>(options_.reader) /
         static_cast<std::size_t>(options_.readers);
}

// Takes a unit of the window, from number `first` on and then from the begin, whose first read is
// at most `most_read`, and which is not read already.
std::optional<FetchUnit> Prefetcher::Take(std::size_t first, std::size_t most_read) {
  for (std::size_t i = 0; i < window_.size(); ++i) {
    const std::size_t at = (first + i) % window_.size();
    if (taken_[at] || window_[at].first_read > most_read) continue;
    taken_[at] = true;
    if (window_[at].last_read >= reached_.load()) return window_[at];
  }
  return std::nullopt;
}

// Whether the next window is near enough to what the reader reads now.
bool Prefetcher::MayFillWindow() const {
  const std::size_t reached = reached_.load();
  return reached >= planned_ || handed_out_ < ends_[reached] + options_.lead_bytes;
}

bool Prefetcher::FillWindow() {
  PlanAhead(reached_.load());
  std::deque<FetchUnit>& chosen = units_.chosen();
  const auto count = static_cast<std::ptrdiff_t>(std::min(chosen.size(), kWindowUnits));
  window_.assign(chosen.begin(), chosen.begin() + count);
  taken_.assign(window_.size(), false);
  chosen.erase(chosen.begin(), chosen.begin() + count);
  handed_out_ += kFetchUnitBytes * window_.size();
  return !window_.empty();
}

// Plans reads up to number `read`, and some more until the units of a window are known.
void Prefetcher::PlanAhead(std::size_t read) {
  const std::deque<FetchUnit>& chosen = units_.chosen();
  while (planned_ < reads_.size() && (planned_ <= read || (chosen.size() < kWindowUnits &&
                                                           planned_ - read < kMostPlannedAhead))) {
    AddUnitsOf(planned_);
    if (++planned_ == reads_.size()) units_.End();
    ends_.push_back(handed_out_ + kFetchUnitBytes * chosen.size());
  }
}

// Adds the units of a read. Data that only other processes want are brought if they lie in a file
// that this process reads, too: another file may be one that cannot be read.
void Prefetcher::AddUnitsOf(std::size_t number) {
  const Read& read = reads_[number];
  const auto wanted = checkpoint_.StretchesOf(*read.tensor, read.want, options_.readers);
  if (!wanted.ok()) return;
  if (!read.all_here) {
    for (const auto& stretch : wanted.value()) units_.Add(stretch, number);
    return;
  }
  // Several reads of one process may want parts of a tensor.
  if (number > 0 && reads_[number - 1].all_here && reads_[number - 1].tensor == read.tensor) return;
  std::set<std::uint32_t> files;
  for (const auto& stretch : wanted.value()) files.insert(stretch.file);
  const Dims byte_shape = ByteShape(read.tensor->meta.dtype(), read.tensor->meta.shape());
  const std::vector<PlacedBox> whole = PlacePacked(Region(Box::Whole(byte_shape)), 0);
  const auto all = checkpoint_.StretchesOf(*read.tensor, whole, options_.readers);
  if (!all.ok()) return;
  for (const auto& stretch : all.value()) {
    if (files.contains(stretch.file)) units_.Add(stretch, number);
  }
}

}  // namespace tensormount
