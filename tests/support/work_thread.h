// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_WORK_THREAD_H_
#define TENSORMOUNT_TESTS_SUPPORT_WORK_THREAD_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "tensormount/status.h"

#include "device/device_ops.h"
#include "tests/support/random.h"

// What plays a stream of a device in tests.

namespace tensormount {

// A moment of a WorkThread.
class WorkMark : public DeviceMark {
 public:
  Result<bool> Reached() override;
  void Reach(const Status& status);
  void Wait();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Status status_;
};

// A thread that does what it is given, in order, each after a while.
class WorkThread {
 public:
  // `delay_us`: at most, before each; 0: none.
  WorkThread(std::uint64_t seed, int delay_us);
  // Does all that is left.
  ~WorkThread();
  WorkThread(const WorkThread&) = delete;
  WorkThread& operator=(const WorkThread&) = delete;

  void Add(std::function<Status()> work);
  // Reached behind all that it was given; with what failed first, which stays, as on a device.
  std::shared_ptr<WorkMark> Here();

 private:
  void Work();

  Random random_;
  const int delay_us_;
  Status failure_;  // Of the thread.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<Status()>> queue_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_WORK_THREAD_H_
