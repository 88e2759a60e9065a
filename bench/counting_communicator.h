// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BENCH_COUNTING_COMMUNICATOR_H_
#define TENSORMOUNT_BENCH_COUNTING_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "tensormount/communicator.h"

namespace tensormount {

// Counts what this rank sends through another communicator, which outlives it: bytes, messages, and
// to whom. `before` is called before each Send and each Receive, by whichever thread makes it.
class CountingCommunicator final : public Communicator {
 public:
  explicit CountingCommunicator(Communicator& inner, std::function<void()> before = {})
      : inner_(inner), before_(std::move(before)) {}

  // Bytes since it was made; since the last call.
  std::uint64_t sent() const { return sent_; }
  std::uint64_t TakeSent() { return sent_.exchange(0); }
  // Messages since it was made or since the last call; the ranks that got any since it was made.
  std::uint64_t TakeMessages() { return messages_.exchange(0); }
  std::set<int> peers() const {
    std::lock_guard lock(mutex_);
    return peers_;
  }

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string kind() const override { return inner_.kind(); }
  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override {
    if (before_) before_();
    sent_ += static_cast<std::uint64_t>(CheckedProduct(view.shape).value());
    ++messages_;
    {
      std::lock_guard lock(mutex_);
      peers_.insert(to);
    }
    return inner_.Send(to, tag, view);
  }
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override {
    if (before_) before_();
    return inner_.Receive(from, tag, view);
  }
  Result<bool> Test(Request request) override { return inner_.Test(request); }
  void Cancel(Request request) override { inner_.Cancel(request); }
  Status Progress() override { return inner_.Progress(); }
  std::chrono::nanoseconds SilentFor(int rank) const override { return inner_.SilentFor(rank); }
  void KeepUp(int rank, bool wanted) override { inner_.KeepUp(rank, wanted); }
  std::uint64_t Changes() const override { return inner_.Changes(); }
  bool HearsChanges() const override { return inner_.HearsChanges(); }
  void WaitForChange(std::uint64_t seen, std::chrono::nanoseconds most) override {
    inner_.WaitForChange(seen, most);
  }

 private:
  Communicator& inner_;
  const std::function<void()> before_;
  std::atomic<std::uint64_t> sent_{0};
  std::atomic<std::uint64_t> messages_{0};
  mutable std::mutex mutex_;
  std::set<int> peers_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BENCH_COUNTING_COMMUNICATOR_H_
