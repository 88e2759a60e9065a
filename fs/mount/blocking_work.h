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

// The answer to one request that may wait for storage, given exactly once: by the thread that did
// the work or, if that takes too long, by the watchdog. States: waiting, begun, answered. Claim and
// AnswerLate both move to "answered" under the lock, and the one that did so replies. So a request
// is never replied to twice, nor used after libfuse freed it.
class PendingAnswer {
 public:
  // Whether the watchdog may answer while the work is in progress.
  // kBeforeBegin is for work that changes something: when a caller's process has ended, its
  // launcher may start the next program, and a late write would corrupt that program's data. A
  // write(2) to a disk holds a dying process in the same way.
  enum class EarlyAnswer {
    kAllowed,
    kBeforeBegin,  // The watchdog may answer only until the work begins.
    // The watchdog may answer at any time, and the work is done even if it was answered first.
    kKeepsWork,
  };
  // Tries to answer the request late, and returns whether it did. Called repeatedly with the time
  // waited so far, never after the answer was given. Must not wait for storage.
  using Late = std::function<bool(std::chrono::milliseconds waited)>;
  PendingAnswer(EarlyAnswer once_begun, Late late)
      : early_answer_(once_begun), late_(std::move(late)) {}

  // Marks the work as begun. False: the answer was already given, and the work must not be done
  // (never with kKeepsWork).
  bool Begin();
  // True once, for the caller that must answer.
  bool Claim();
  // Calls `late` with the lock held, if a late answer is allowed. True if this call answered.
  bool AnswerLate();
  bool answered() const;
  std::chrono::steady_clock::time_point since() const { return since_; }

 private:
  const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  const EarlyAnswer early_answer_;
  mutable std::mutex mutex_;
  bool begun_ = false;
  bool answered_ = false;
  Late late_;
};

// Limits how many of the threads that receive requests do work themselves at a time, over all kinds
// of work. The limit is below the number of threads, so that one always receives: otherwise a slow
// disk would block interrupts, unmounts and reads from memory. Thread-safe.
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
// for storage: some of it on the calling thread, which saves a handover, the rest on threads of its
// own. Thread-safe.
// Stuck work does not hold up other work: a thread that is busy with one request for kStuckAfter no
// longer counts, and waiting work gets another thread, up to kMostThreads. Work that takes long
// (syncs) has its own BlockingWork, because a burst of it would delay a read until kStuckAfter has
// passed.
class BlockingWork {
 public:
  // Far above the response time of healthy storage, far below what a person notices.
  static constexpr std::chrono::milliseconds kStuckAfter{20};
  // Limit of pool threads. Each serves one request of one client thread; further requests wait in
  // the queue.
  static constexpr int kMostThreads = 512;

  // Runs work on calling threads while `callers` (shared with other kinds) has a free slot, and on
  // at most `on_pool` pool threads that are not stuck. A null `callers`: pool threads only, unless
  // none can be started.
  BlockingWork(std::shared_ptr<CallerSlots> callers, int on_pool);
  // Leaves pool threads behind that are stuck in storage.
  ~BlockingWork();

  // Runs `work` now or later; `work` must Claim `answer` before it answers. Work whose answer was
  // given before it begins is dropped (not with kKeepsWork). If the work does not finish within
  // this call, `before_queueing` is called first on this thread: afterwards `work` must not use the
  // caller's memory.
  void Run(std::shared_ptr<PendingAnswer> answer, std::function<void()> work,
           const std::function<void()>& before_queueing = {});
  // Returns a token. While it lives, the watchdog also watches `answer`, whose work waits for other
  // work without a thread. Parked answers count as work for StopWatchIfIdle(), not for idle().
  std::shared_ptr<void> Park(std::shared_ptr<PendingAnswer> answer);
  // Gives late answers (PendingAnswer::AnswerLate), and starts threads for work that waits behind
  // stuck work. Returns the number of answers given. To be called about every kStuckAfter while
  // StopWatchIfIdle() is false.
  int Watch();
  // Sets a callback that is called, without a lock, when work arrives while the watchdog is
  // stopped, so that an idle mount needs no timer. Set before the first Run(); `wake` must return
  // soon.
  void SetWake(std::function<void()> wake);
  // Returns whether there is no work. If true, the watchdog need not call Watch() again before
  // `wake` is called.
  bool StopWatchIfIdle();

  struct Load {
    int running = 0;
    std::size_t waiting = 0;
    std::chrono::milliseconds oldest{0};
  };
  Load load() const;
  bool idle() const;

 private:
  // Shared with the pool threads, which may outlive this object while storage blocks them.
  struct Core;
  std::shared_ptr<Core> core_;
};

// One queue for each kind of work, so that no kind waits behind another.
struct Queues {
  // Limit of threads that are not stuck, for each queue. The threads of `opens` also verify files
  // at their first open.
  static constexpr int kThreads = 8;
  // `callers`: how many of the threads that receive requests may read and write themselves.
  explicit Queues(int callers)
      : slots(std::make_shared<CallerSlots>(callers)),
        reads(slots, kThreads),
        writes(slots, kThreads),
        syncs(nullptr, kThreads),
        opens(nullptr, kThreads) {}
  bool idle() const { return reads.idle() && writes.idle() && syncs.idle() && opens.idle(); }
  std::array<BlockingWork*, 4> all() { return {&reads, &writes, &syncs, &opens}; }

  std::shared_ptr<CallerSlots> slots;
  BlockingWork reads;   // Reads of published and staged files.
  BlockingWork writes;  // Writes of staged files.
  BlockingWork syncs;   // close(2), fsync(2) and publishing, which take long.
  BlockingWork opens;   // All else: names, attributes, listings, first opens.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_BLOCKING_WORK_H_
