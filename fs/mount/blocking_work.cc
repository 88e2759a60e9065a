// SPDX-License-Identifier: Apache-2.0
// Threads for work that may wait for storage, so that not all threads that receive requests of the
// kernel wait. A watchdog answers requests whose callers are being killed, or during which the
// kernel holds locks; work that has begun goes on.
#include "fs/mount/blocking_work.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <list>
#include <system_error>
#include <utility>
#include <vector>

#include "base/thread.h"

namespace tensormount::fs {

using Clock = std::chrono::steady_clock;

namespace {

// Idle time after which a thread beyond the pool's usual number ends.
constexpr std::chrono::seconds kSpareFor{10};

}  // namespace

bool PendingAnswer::Begin() {
  const std::lock_guard lock(mutex_);
  begun_ = true;
  return !answered_ || early_answer_ == EarlyAnswer::kKeepsWork;
}

bool PendingAnswer::Claim() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(answered_, true);
}

bool PendingAnswer::AnswerLate() {
  // Holds the lock during the call to late_, so that no other thread answers the request meanwhile:
  // libfuse frees an answered request.
  const std::lock_guard lock(mutex_);
  if (answered_ || (begun_ && early_answer_ == EarlyAnswer::kBeforeBegin)) return false;
  answered_ = late_(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since_));
  return answered_;
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
  // Work in progress.
  struct Running {
    std::shared_ptr<PendingAnswer> answer;
    Clock::time_point since;
    bool on_pool;
  };

  mutable std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable ended;
  std::shared_ptr<CallerSlots> callers;
  int on_pool = 1;
  int pool_threads = 0;
  int pool_idle = 0;
  bool stop = false;
  bool watched = false;
  std::function<void()> wake_watchdog;
  std::deque<Item> queue;
  std::list<Running> active;
  std::list<std::shared_ptr<PendingAnswer>> parked;

  // Runs one item. The item is in `active` meanwhile, so that the watchdog can answer its request;
  // work whose answer was given before is dropped. Returns with the lock held again.
  void Execute(std::unique_lock<std::mutex>& lock, Item item, bool is_pool) {
    const auto at = active.insert(active.end(), {item.answer, Clock::now(), is_pool});
    lock.unlock();
    if (item.answer->Begin()) item.work();
    item.work = nullptr;
    lock.lock();
    active.erase(at);
  }

  // `on_pool` threads live as long as the mount; extra threads, which replaced stuck ones, end when
  // they are no longer needed, and free their buffers.
  void PoolLoop() {
    std::unique_lock lock(mutex);
    while (!stop) {
      if (queue.empty()) {
        ++pool_idle;
        const auto called = [&] { return stop || !queue.empty(); };
        bool spare = false;
        if (pool_threads > on_pool) {
          spare = !wake.wait_for(lock, kSpareFor, called) && pool_threads > on_pool;
        } else {
          wake.wait(lock, called);
        }
        --pool_idle;
        if (spare) break;
        continue;
      }
      Item item = std::move(queue.front());
      queue.pop_front();
      Execute(lock, std::move(item), true);
    }
    --pool_threads;
    ended.notify_all();
  }

  // Number of pool threads that are not stuck. Requires the lock.
  int Moving() const {
    const Clock::time_point before = Clock::now() - kStuckAfter;
    return pool_threads - static_cast<int>(std::ranges::count_if(active, [&](const Running& each) {
             return each.on_pool && each.since < before;
           }));
  }

  // Whether the waiting work, plus `more` items, needs another thread and the limits allow one.
  // Requires the lock.
  bool WantsThread(std::size_t more) const {
    return pool_idle < static_cast<int>(queue.size() + more) && pool_threads < kMostThreads &&
           (pool_threads < on_pool || Moving() < on_pool);
  }

  // False if a limit of the process is reached; the existing threads or the caller then do the
  // work. Requires the lock.
  bool AddThread() {
    try {
      Thread([core = shared_from_this()] { core->PoolLoop(); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    ++pool_threads;
    return true;
  }
};

BlockingWork::BlockingWork(std::shared_ptr<CallerSlots> callers, int on_pool)
    : core_(std::make_shared<Core>()) {
  core_->callers = std::move(callers);
  core_->on_pool = on_pool;
}

// Waiting work is dropped unanswered: the mount is gone, and its callers with it.
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
  const bool slot = core_->callers && core_->callers->Take();
  if (!slot && ((core_->WantsThread(1) && core_->AddThread()) || core_->pool_threads > 0)) {
    if (before_queueing) {
      lock.unlock();
      // Called without the lock, because this copies up to a megabyte.
      before_queueing();
      lock.lock();
    }
    core_->queue.push_back(std::move(item));
    lock.unlock();
    core_->wake.notify_one();
    return;
  }
  core_->Execute(lock, std::move(item), false);
  if (slot) core_->callers->GiveBack();
}

std::shared_ptr<void> BlockingWork::Park(std::shared_ptr<PendingAnswer> answer) {
  // The request is still in `active` here, so the watchdog runs already.
  const std::lock_guard lock(core_->mutex);
  const auto at = core_->parked.insert(core_->parked.end(), std::move(answer));
  return std::shared_ptr<void>(nullptr, [core = core_, at](void*) {
    const std::lock_guard ended(core->mutex);
    core->parked.erase(at);
  });
}

// Candidates are collected under the lock but answered without it: a late answer may take libfuse's
// own lock and read a file of /proc.
int BlockingWork::Watch() {
  std::vector<std::shared_ptr<PendingAnswer>> late;
  {
    const std::lock_guard lock(core_->mutex);
    const Clock::time_point before = Clock::now() - kStuckAfter;
    for (const Core::Running& each : core_->active) {
      if (each.answer->since() < before) late.push_back(each.answer);
    }
    for (const auto& answer : core_->parked) {
      if (answer->since() < before) late.push_back(answer);
    }
    for (const Core::Item& item : core_->queue) {
      if (item.answer->since() < before) late.push_back(item.answer);
    }
    for (std::size_t n = core_->queue.size(); n > 0 && core_->WantsThread(0); --n) {
      if (!core_->AddThread()) break;
    }
  }
  int given_up = 0;
  for (const auto& answer : late) given_up += answer->AnswerLate() ? 1 : 0;
  return given_up;
}

void BlockingWork::SetWake(std::function<void()> wake) {
  const std::lock_guard lock(core_->mutex);
  core_->wake_watchdog = std::move(wake);
}

// `watched` is cleared under the lock that Run takes, so no work can arrive unnoticed between the
// check and the return.
bool BlockingWork::StopWatchIfIdle() {
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
  for (const Core::Running& each : core_->active) oldest = std::min(oldest, each.answer->since());
  for (const Core::Item& item : core_->queue) oldest = std::min(oldest, item.answer->since());
  load.oldest = std::chrono::duration_cast<std::chrono::milliseconds>(now - oldest);
  return load;
}

bool BlockingWork::idle() const {
  const std::lock_guard lock(core_->mutex);
  return core_->active.empty() && core_->queue.empty();
}

}  // namespace tensormount::fs
