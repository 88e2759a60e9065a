// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_MOUNT_BLOCKING_WORK_H_
#define TENSORMOUNT_FS_MOUNT_BLOCKING_WORK_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

namespace tensormount::fs {

// The answer to one request that may have to wait for storage. Exactly one party gives it: whoever
// did the work, or, where the caller was interrupted and storage does not answer, the watchdog.
// States: waiting, begun, answered. Claim and GiveUpIfInterrupted both move to "answered" under the
// lock, and the one that did it replies; so a request is never replied to twice, and never used
// after libfuse has freed it.
class PendingAnswer {
 public:
  // What an interrupted caller may be told while the work is under way. Programs make a call again
  // that was interrupted: an append would be done twice, a rename fail that has succeeded. So what
  // changes something is given up only while it waits for its turn.
  enum class Work { kMayBeGivenUp, kIsFinished };
  // `interrupted`: whether the caller gave up. `give_up`: answers so. Neither is called after the
  // answer was given.
  PendingAnswer(Work once_begun, std::function<bool()> interrupted, std::function<void()> give_up)
      : once_begun_(once_begun),
        interrupted_(std::move(interrupted)),
        give_up_(std::move(give_up)) {}

  // The work begins now. False: it was given up, and must not.
  bool Begin();
  // True once, for the one who shall answer.
  bool Claim();
  // Answers for a caller that was interrupted. True where it did.
  // Calls `interrupted` and `give_up` with the lock held; neither may wait.
  bool GiveUpIfInterrupted();
  bool answered() const;
  std::chrono::steady_clock::time_point since() const { return since_; }

 private:
  const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  const Work once_begun_;
  mutable std::mutex mutex_;
  bool begun_ = false;
  bool answered_ = false;
  std::function<bool()> interrupted_;
  std::function<void()> give_up_;
};

// Runs work that may block so that the threads that receive requests never all wait for storage:
// some of it on the calling thread, the rest on a few threads of its own. Thread-safe.
// A thread that received a request does the work itself while fewer than `on_caller` others do:
// that saves handing it to another thread. But one thread more receives than may do so, and that
// one always listens: with all of them at the disk nobody would answer an interrupt, an unmount, or
// a read of what is in memory.
class BlockingWork {
 public:
  // A caller that was interrupted is answered by the watchdog after this long; before, storage may.
  static constexpr std::chrono::milliseconds kGiveUpAfter{2000};

  // At most `on_caller` at a time on calling threads and `on_pool` on the pool's; the rest waits.
  BlockingWork(int on_caller, int on_pool, std::chrono::milliseconds give_up_after = kGiveUpAfter);
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
  // Answers for interrupted callers whose storage does not; returns how many. To be called now and
  // then while Unwatched() is false.
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

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_MOUNT_BLOCKING_WORK_H_
