// SPDX-License-Identifier: Apache-2.0
// Threads for work that may wait for storage, so that those that receive requests of the kernel
// never do. A caller that is interrupted is answered; the work ends when it ends.
#include "fs/mount/blocking_work.h"

#include <condition_variable>
#include <deque>
#include <list>
#include <system_error>
#include <thread>
#include <vector>

namespace tensormount::fs {

using Clock = std::chrono::steady_clock;

bool PendingAnswer::Begin() {
  const std::lock_guard lock(mutex_);
  begun_ = true;
  return !answered_;
}

bool PendingAnswer::Claim() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(answered_, true);
}

bool PendingAnswer::GiveUpIfInterrupted() {
  // Held over the calls: the request must not be answered, and so freed, meanwhile.
  const std::lock_guard lock(mutex_);
  if (answered_ || (begun_ && once_begun_ == Work::kIsFinished)) return false;
  if (!interrupted_()) return false;
  answered_ = true;
  give_up_();
  return true;
}

bool PendingAnswer::answered() const {
  const std::lock_guard lock(mutex_);
  return answered_;
}

struct BlockingWork::Core : std::enable_shared_from_this<BlockingWork::Core> {
  struct Item {
    std::shared_ptr<PendingAnswer> answer;
    std::function<void()> work;
  };
  using Active = std::list<std::shared_ptr<PendingAnswer>>;

  mutable std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable ended;
  int on_caller = 1;
  int on_pool = 1;
  std::chrono::milliseconds give_up_after{};
  int callers = 0;  // Running work now.
  int pool_threads = 0;
  int pool_idle = 0;
  bool stop = false;
  bool watched = false;
  std::function<void()> wake_watchdog;
  std::deque<Item> queue;
  Active active;  // Of work that runs.
  Active parked;

  // In `active` while it runs, so that the watchdog can answer for it. Work that was given up
  // before it began is dropped here.
  // Returns with the lock held again.
  void Execute(std::unique_lock<std::mutex>& lock, Item item) {
    const auto at = active.insert(active.end(), item.answer);
    lock.unlock();
    if (item.answer->Begin()) item.work();
    item.work = nullptr;
    lock.lock();
    active.erase(at);
  }

  // Threads are never ended while the mount lives: at most on_pool of them, and they sleep.
  void PoolLoop() {
    std::unique_lock lock(mutex);
    while (!stop) {
      if (queue.empty()) {
        ++pool_idle;
        wake.wait(lock, [&] { return stop || !queue.empty(); });
        --pool_idle;
        continue;
      }
      Item item = std::move(queue.front());
      queue.pop_front();
      Execute(lock, std::move(item));
    }
    --pool_threads;
    ended.notify_all();
  }

  // With the lock held. False: there is no thread at all that could do it.
  // Where no thread can be made (a limit of the process) those that there are will do it, or else
  // the caller.
  bool EnsureThread() {
    if (pool_idle > static_cast<int>(queue.size()) || pool_threads >= on_pool) return true;
    try {
      std::thread([core = shared_from_this()] { core->PoolLoop(); }).detach();
      ++pool_threads;
    } catch (const std::system_error&) {
      return pool_threads > 0;
    }
    return true;
  }
};

BlockingWork::BlockingWork(int on_caller, int on_pool, std::chrono::milliseconds give_up_after)
    : core_(std::make_shared<Core>()) {
  core_->give_up_after = give_up_after;
  core_->on_caller = on_caller;
  core_->on_pool = on_pool;
}

// Work that waits is dropped unanswered: the mount is gone, and so are those who asked.
BlockingWork::~BlockingWork() {
  constexpr std::chrono::seconds kPatience{2};
  std::unique_lock lock(core_->mutex);
  core_->stop = true;
  core_->queue.clear();
  core_->wake.notify_all();
  core_->ended.wait_for(lock, kPatience, [&] { return core_->pool_threads == 0; });
}

void BlockingWork::Run(std::shared_ptr<PendingAnswer> answer, std::function<void()> work,
                       const std::function<void()>& before_queueing) {
  std::unique_lock lock(core_->mutex);
  if (!core_->watched && core_->wake_watchdog) {
    core_->watched = true;
    lock.unlock();
    core_->wake_watchdog();
    lock.lock();
  }
  Core::Item item{std::move(answer), std::move(work)};
  const bool here = core_->callers < core_->on_caller;
  if (!here && core_->EnsureThread()) {
    if (before_queueing) {
      lock.unlock();
      // Without the lock: it copies up to a megabyte.
      before_queueing();
      lock.lock();
    }
    core_->queue.push_back(std::move(item));
    lock.unlock();
    core_->wake.notify_one();
    return;
  }
  ++core_->callers;
  core_->Execute(lock, std::move(item));
  --core_->callers;
}

std::shared_ptr<void> BlockingWork::Park(std::shared_ptr<PendingAnswer> answer) {
  // Still active, so that there is a watchdog that looks.
  const std::lock_guard lock(core_->mutex);
  const auto at = core_->parked.insert(core_->parked.end(), std::move(answer));
  return std::shared_ptr<void>(nullptr, [core = core_, at](void*) {
    const std::lock_guard ended(core->mutex);
    core->parked.erase(at);
  });
}

// Candidates are collected under the lock and asked without it: asking whether a caller was
// interrupted takes libfuse's own lock.
int BlockingWork::Watch() {
  std::vector<std::shared_ptr<PendingAnswer>> late;
  {
    const std::lock_guard lock(core_->mutex);
    const Clock::time_point before = Clock::now() - core_->give_up_after;
    for (const auto& answer : core_->active) {
      if (answer->since() < before) late.push_back(answer);
    }
    for (const auto& answer : core_->parked) {
      if (answer->since() < before) late.push_back(answer);
    }
    for (const Core::Item& item : core_->queue) {
      if (item.answer->since() < before) late.push_back(item.answer);
    }
  }
  int given_up = 0;
  for (const auto& answer : late) given_up += answer->GiveUpIfInterrupted() ? 1 : 0;
  return given_up;
}

void BlockingWork::SetWake(std::function<void()> wake) {
  const std::lock_guard lock(core_->mutex);
  core_->wake_watchdog = std::move(wake);
}

// Set to false under the lock that Run takes: no work can come between the question and the answer
// without ringing.
bool BlockingWork::Unwatched() {
  const std::lock_guard lock(core_->mutex);
  const bool none = core_->active.empty() && core_->queue.empty() && core_->parked.empty();
  if (none) core_->watched = false;
  return none;
}

BlockingWork::Load BlockingWork::load() const {
  const std::lock_guard lock(core_->mutex);
  Load load;
  load.running = static_cast<int>(core_->active.size());
  load.waiting = core_->queue.size() + core_->parked.size();
  Clock::time_point oldest = Clock::now();
  const Clock::time_point now = oldest;
  for (const auto& answer : core_->active) oldest = std::min(oldest, answer->since());
  for (const Core::Item& item : core_->queue) oldest = std::min(oldest, item.answer->since());
  load.oldest = std::chrono::duration_cast<std::chrono::milliseconds>(now - oldest);
  return load;
}

bool BlockingWork::idle() const {
  const std::lock_guard lock(core_->mutex);
  return core_->active.empty() && core_->queue.empty();
}

}  // namespace tensormount::fs
