// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_READ_PREFETCH_H_
#define TENSORMOUNT_INDEX_READ_PREFETCH_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/thread.h"
#include "index/read/checkpoint.h"

namespace tensormount {

// A unit of a file (base/fetch_pages.h) of which reads want at least half.
struct FetchUnit {
  std::uint32_t file = 0;
  std::uint64_t number = 0;
  std::uint64_t first = 0;   // Offset in the file of the first wanted byte.
  std::uint64_t wanted = 0;  // Bytes that the reads want.
  std::size_t read = 0;      // The last read that wants some.
};

// Collects the units of stretches that are added in the order of files.
class FetchUnits {
 public:
  // `files` must outlive the result.
  explicit FetchUnits(const std::vector<FileRecord>& files) : files_(files) {}
  void Add(const OpenedCheckpoint::FileStretch& stretch, std::size_t read);
  // Completes the last unit, to which no more stretches will be added.
  void End();
  // The units so far; the caller may remove some.
  std::deque<FetchUnit>& complete() { return complete_; }

 private:
  const std::vector<FileRecord>& files_;
  FetchUnit last_;
  std::deque<FetchUnit> complete_;
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

  // The reader begins the read with this number. Thread-safe, never waits.
  void Reached(std::size_t read);

 private:
  void StartThread();
  void Work();
  std::optional<FetchUnit> Next();
  bool MayFillWindow() const;
  void FillWindow();
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
  std::vector<FetchUnit> window_;    // Units that are being brought.
  std::size_t taken_ = 0;            // Units of the window that a thread has taken.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_READ_PREFETCH_H_
