// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_DISTURBED_COMMUNICATOR_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_DISTURBED_COMMUNICATOR_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensormount/communicator.h"

namespace tensormount {

// A connection that does to what this rank sends what it must not: for each message `choose` says
// what. Everything goes through another communicator, which outlives this one. Thread-safe.
class DisturbedCommunicator final : public Communicator {
 public:
  enum class Fault {
    kNone,
    kFlip,   // One bit is another.
    kTwice,  // It comes twice.
    kCut,    // Its last byte is missing.
    kHold,   // It comes when Release is called.
  };
  using Choose = std::function<Fault(int to, std::uint32_t tag, std::size_t size)>;

  explicit DisturbedCommunicator(Communicator& inner) : inner_(inner) {}
  ~DisturbedCommunicator() override {
    for (const Owned& owned : extra_) inner_.Cancel(owned.request);
  }

  void SetFaults(Choose choose) {
    std::lock_guard lock(mutex_);
    choose_ = std::move(choose);
  }
  // Sends what was held back.
  void Release() {
    std::lock_guard lock(mutex_);
    for (Held& held : std::exchange(held_, {})) {
      (void)SendExtra(held.to, held.tag, std::move(held.bytes));
    }
  }
  std::uint64_t faults() const {
    std::lock_guard lock(mutex_);
    return faults_;
  }

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string kind() const override { return inner_.kind(); }
  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override {
    std::lock_guard lock(mutex_);
    const auto size = static_cast<std::size_t>(CheckedProduct(view.shape).value());
    const Fault fault = choose_ && size != 0 ? choose_(to, tag, size) : Fault::kNone;
    if (fault == Fault::kNone) return inner_.Send(to, tag, view);
    ++faults_;
    const auto* begin = static_cast<const std::byte*>(view.data);
    Bytes bytes = std::make_shared<std::vector<std::byte>>(begin, begin + size);
    switch (fault) {
      case Fault::kHold: {
        held_.push_back({to, tag, std::move(bytes)});
        return kTaken | held_.size();
      }
      case Fault::kFlip:
        (*bytes)[faults_ * 7919 % size] ^= std::byte{1} << (faults_ % 8);
        break;
      case Fault::kTwice:
        (void)SendExtra(to, tag, bytes);
        break;
      case Fault::kCut:
        bytes->pop_back();
        break;
      case Fault::kNone:
        break;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Request request, inner_.Send(to, tag, View(*bytes)));
    owned_.emplace(request, std::move(bytes));
    return request;
  }
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override {
    return inner_.Receive(from, tag, view);
  }
  Result<bool> Test(Request request) override {
    if ((request & kTaken) != 0) return true;
    Result<bool> done = inner_.Test(request);
    if (!done.ok() || done.value()) Forget(request);
    return done;
  }
  void Cancel(Request request) override {
    if ((request & kTaken) != 0) return;
    inner_.Cancel(request);
    Forget(request);
  }
  Status Progress() override { return inner_.Progress(); }
  std::chrono::nanoseconds SilentFor(int rank) const override { return inner_.SilentFor(rank); }

 private:
  using Bytes = std::shared_ptr<std::vector<std::byte>>;
  struct Held {
    int to = 0;
    std::uint32_t tag = 0;
    Bytes bytes;
  };
  struct Owned {
    Request request = 0;
    Bytes bytes;
  };
  static constexpr Request kTaken = Request{1} << 63;

  static BufferView View(const std::vector<std::byte>& bytes) {
    return BufferView::Host(DType::kU8, static_cast<const void*>(bytes.data()),
                            Dims{static_cast<std::int64_t>(bytes.size())});
  }
  Status SendExtra(int to, std::uint32_t tag, Bytes bytes) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Request request, inner_.Send(to, tag, View(*bytes)));
    extra_.push_back({request, std::move(bytes)});
    return {};
  }
  void Forget(Request request) {
    std::lock_guard lock(mutex_);
    owned_.erase(request);
  }

  Communicator& inner_;
  mutable std::mutex mutex_;
  Choose choose_;
  std::uint64_t faults_ = 0;
  std::vector<Held> held_;
  std::vector<Owned> extra_;
  std::map<Request, Bytes> owned_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_DISTURBED_COMMUNICATOR_H_
