// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_BLOCKING_WORK_H_
#define TENSORMOUNT_FS_MOUNT_BLOCKING_WORK_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

namespace tensormount::fs {

// The answer to one request that may have to wait for storage. Exactly one party gives it: whoever
// did the work, or, where that takes long, the watchdog. States: waiting, begun, answered. Claim
// and AnswerLate both move to "answered" under the lock, and the one that did it replies; so a
// request is never replied to twice, and never used after libfuse has freed it.
class PendingAnswer {
 public:
  // Whether the watchdog may answer while the work is under way. Who waits for a caller's end (a
  // launcher, a shell) takes its calls for over: a write that lands after the next program's would
  // be wrong bytes. So what changes something is given up only while it waits for its turn, as a
  // process in a write(2) to a disk does not die before the write is over.
  enum class Work {
    kMayBeGivenUp,
    kIsFinished,    // Given up only while it waits for its turn.
    kIsDoneAnyway,  // The answer and the work have nothing to do with each other.
  };
  // `late`: answers now, or returns false: called again and again with the time that it has waited,
  // never after the answer was given. It must not wait for storage.
  using Late = std::function<bool(std::chrono::milliseconds waited)>;
  PendingAnswer(Work once_begun, Late late) : once_begun_(once_begun), late_(std::move(late)) {}

  // The work begins now. False: it was given up, and must not be done.
  bool Begin();
  // True once, for the one who shall answer.
  bool Claim();
  // True where the watchdog's answer was given now. Calls `late` with the lock held.
  bool AnswerLate();
  bool answered() const;
  std::chrono::steady_clock::time_point since() const { return since_; }

 private:
  const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  const Work once_begun_;
  mutable std::mutex mutex_;
  bool begun_ = false;
  bool answered_ = false;
  Late late_;
};

// How many of the threads that receive requests may do work themselves at a time, over all kinds
// of work. Fewer than there are: the rest listens, always. With all of them at the disk nobody
// would answer an interrupt, an unmount, or a read of what is in memory. Thread-safe.
class CallerSlots {
 public:
  explicit CallerSlots(int count) : free_(count) {}
  bool Take() {
    if (free_.fetch_sub(1, std::memory_order_acquire) > 0) return true;
    free_.fetch_add(1, std::memory_order_release);
    return false;
  }
  void GiveBack() { free_.fetch_add(1, std::memory_order_release); }

 private:
  std::atomic<int> free_;
};

// Runs work of one kind that may block, so that the threads that receive requests never all wait
// for storage: some of it on the calling thread, which saves handing it over, the rest on threads
// of its own. Thread-safe. Work that hangs holds no other work: a thread that has been at one
// request for kStuckAfter no longer counts, and what waits gets another, up to kMostThreads. So one
// disk that hangs, or a file that takes minutes to verify, costs a thread and not the others'
// turns. Kinds with work that is long by nature (a sync) stand apart all the same: a burst of those
// would have to become stuck, one handful after the other, before a read behind them had its turn.
class BlockingWork {
 public:
  // Far above what storage that answers takes, far below what a person notices.
  static constexpr std::chrono::milliseconds kStuckAfter{20};
  // Each waits for one request of one client thread; what is beyond waits in the queue.
  static constexpr int kMostThreads = 512;

  // On calling threads where `callers` (not null; shared with other kinds) has a slot, and at most
  // `on_pool` that are not stuck on the pool's; the rest waits. A null `callers`: the pool's only.
  BlockingWork(std::shared_ptr<CallerSlots> callers, int on_pool);
  // Abandons pool threads that are stuck.
  ~BlockingWork();

  // Runs `work` now or later; it must Claim `answer` before it answers. Work whose answer was
  // given up before it begins is dropped. `before_queueing` is called here where the work is not
  // done before this returns: it then must not use what is the caller's.
  void Run(std::shared_ptr<PendingAnswer> answer, std::function<void()> work,
           const std::function<void()>& before_queueing = {});
  // While the token lives, an answer that waits for other work, on no thread, is watched as well.
  // Parked answers count as work for the watchdog, not for idle().
  std::shared_ptr<void> Park(std::shared_ptr<PendingAnswer> answer);
  // Gives the answers that are late (PendingAnswer::AnswerLate), and what waits behind work that is
  // stuck threads of its own; returns how many. To be called every kStuckAfter or so while
  // Unwatched() is false.
  int Watch();
  // Calls `wake`, under no lock, when work comes and nobody watches: nothing else must happen for
  // a mount that nobody uses. Set before the first Run(); `wake` must return soon.
  void SetWake(std::function<void()> wake);
  // Whether there is no work; if so nobody watches from now on, until `wake` was called again.
  bool Unwatched();

  struct Load {
    int running = 0;
    std::size_t waiting = 0;
    std::chrono::milliseconds oldest{0};
  };
  Load load() const;
  bool idle() const;

 private:
  // Shared with the pool's threads, which may outlive this where storage holds them.
  struct Core;
  std::shared_ptr<Core> core_;
};

// One queue for each kind of work, so that no kind waits behind another.
struct Queues {
  // Threads for each that are not stuck; those of `opens` also verify files at their first open.
  static constexpr int kThreads = 8;
  // `callers`: of the threads that receive requests, how many may read and write themselves.
  explicit Queues(int callers)
      : slots(std::make_shared<CallerSlots>(callers)),
        reads(slots, kThreads),
        writes(slots, kThreads),
        syncs(nullptr, kThreads),
        opens(nullptr, kThreads) {}
  bool idle() const { return reads.idle() && writes.idle() && syncs.idle() && opens.idle(); }
  std::array<BlockingWork*, 4> all() { return {&reads, &writes, &syncs, &opens}; }

  std::shared_ptr<CallerSlots> slots;
  BlockingWork reads;   // Of published and staged files.
  BlockingWork writes;  // To staged files.
  BlockingWork syncs;   // close(2), fsync(2) and what publishes: long by nature.
  BlockingWork opens;   // All else: names, attributes, listings, first opens.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_BLOCKING_WORK_H_
