// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_PREFETCH_H_
#define TENSORMOUNT_INDEX_READ_PREFETCH_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/byte_range.h"
#include "base/thread.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// A unit of a file (base/fetch_pages.h) that reads want.
struct FetchUnit {
  std::uint32_t file = 0;
  ByteRange bytes;             // Ends at the end of the file, at the latest.
  std::uint64_t wanted = 0;    // Bytes that the reads want.
  std::size_t first_read = 0;  // The first and the last read that want some.
  std::size_t last_read = 0;
};

// Chooses the units that are worth bringing, from stretches that are added in the order of reads.
// After such a unit the kernel reads some megabytes ahead (docs/performance.md, "From storage"), so
// a unit is chosen if nearly all of it is wanted, and the next kFollowingUnits of the file, too, or
// all that follows.
class FetchUnits {
 public:
  static constexpr std::size_t kFollowingUnits = 4;
  // `files` must outlive the result.
  explicit FetchUnits(const std::vector<FileRecord>& files) : files_(files) {}
  void Add(const OpenedCheckpoint::FileStretch& stretch, std::size_t read);
  // Nothing will be added.
  void End();
  // The chosen units so far, by file in order; the caller may remove some.
  std::deque<FetchUnit>& chosen() { return chosen_; }

 private:
  // The last stretch of a file, which may grow.
  struct OpenStretch {
    FetchUnit last;  // Its last unit.
    std::uint64_t end = 0;
    std::deque<FetchUnit> held;  // Units that wait for those that follow.
  };
  void EndUnit(OpenStretch& open);
  void EndStretch(std::uint32_t file, OpenStretch& open);

  const std::vector<FileRecord>& files_;
  std::map<std::uint32_t, OpenStretch> open_;  // By file.
  std::deque<FetchUnit> chosen_;
};

// Brings the data of coming reads from storage into the page cache, in huge pages, on threads of
// its own, while the reader copies and hashes what has arrived. Several processes of one machine
// that read the same files each bring another part of them. Changes only the time that reads take:
// failures are left to them.
class Prefetcher {
 public:
  // A coming ReadPlaced. Referenced objects must outlive the Prefetcher.
  struct Read {
    const TensorEntry* tensor = nullptr;
    std::span<const PlacedBox> want;
    // Whether the processes of this machine together read all of the tensor, as far as is known.
    bool all_here = false;
  };
  struct Options {
    // The number of this process among `readers` processes of this machine that make such reads.
    int reader = 0;
    int readers = 1;
    const std::atomic<bool>* cancel = nullptr;  // Set by another thread; null: never.
    // Bytes that may be brought beyond the read that the reader has reached, before the next window
    // of 64 MiB.
    std::uint64_t lead_bytes = std::uint64_t{128} << 20;
  };

  // Whether some data of these reads are not in the page cache, as far as a few samples show; false
  // if the file system cannot tell.
  static bool LooksCold(const OpenedCheckpoint& checkpoint, std::span<const Read> reads);

  // Starts to bring the data. `reads` are in the order in which they will be made, which is best
  // the order of files; each should want at most some 16 MiB.
  Prefetcher(const OpenedCheckpoint& checkpoint, std::vector<Read> reads, const Options& options);
  // Waits for the storage calls in progress.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Call it before a read. Brings those of its data that no thread brings yet. Thread-safe.
  void Await(std::size_t read);

 private:
  void StartThread();
  void Work();
  void Bring(const FetchUnit& unit);
  std::optional<FetchUnit> Next();
  std::optional<FetchUnit> NextFor(std::size_t read);
  std::optional<FetchUnit> Take(std::size_t first, std::size_t most_read);
  std::size_t OwnStart(std::size_t count) const;
  bool MayFillWindow() const;
  bool FillWindow();
  void PlanAhead(std::size_t read);
  void AddUnitsOf(std::size_t read);
  bool Ends() const;

  const OpenedCheckpoint& checkpoint_;
  const std::vector<Read> reads_;
  const Options options_;
  std::atomic<bool> ended_{false};
  std::atomic<std::size_t> reached_{0};

  std::mutex mutex_;  // Guards what follows.
  std::condition_variable changed_;
  std::vector<Thread> threads_;
  std::size_t planned_ = 0;          // Number of reads whose units are known.
  std::vector<std::uint64_t> ends_;  // By planned read: bytes of all units up to its end.
  std::uint64_t handed_out_ = 0;     // Bytes of the units of all windows so far.
  FetchUnits units_;                 // Those that are in no window yet.
  std::vector<FetchUnit> window_;    // Units that are being brought, in order.
  std::vector<bool> taken_;          // By unit of the window: whether a thread has it.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_PREFETCH_H_
