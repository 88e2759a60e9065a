// SPDX-License-Identifier: Apache-2.0
#include "tests/support/work_thread.h"

#include <chrono>
#include <utility>

namespace tensormount {

Result<bool> WorkMark::Reached() {
  std::lock_guard lock(mutex_);
  if (!status_.ok()) return status_;
  return reached_;
}

void WorkMark::Reach(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    reached_ = true;
    status_ = status;
  }
  changed_.notify_all();
}

void WorkMark::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_; });
}

WorkThread::WorkThread(std::uint64_t seed, int delay_us) : random_(seed), delay_us_(delay_us) {
  thread_ = std::thread([this] { Work(); });
}

WorkThread::~WorkThread() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WorkThread::Add(std::function<Status()> work) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

std::shared_ptr<WorkMark> WorkThread::Here() {
  auto mark = std::make_shared<WorkMark>();
  Add([this, mark]() -> Status {
    mark->Reach(failure_);
    return {};
  });
  return mark;
}

void WorkThread::Work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::function<Status()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (delay_us_ > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_.Int(0, delay_us_)));
    }
    const Status status = work();
    if (failure_.ok()) failure_ = status;
    lock.lock();
  }
}

}  // namespace tensormount
