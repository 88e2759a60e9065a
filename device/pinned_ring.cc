// SPDX-License-Identifier: Apache-2.0
// Pinned memory in a few blocks that all saves and loads of a device share. Pinning gigabytes takes
// seconds and takes memory from other programs; a few blocks used in turn are as fast.
#include "device/pinned_ring.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "base/at_exit.h"
#include "base/log.h"

namespace tensormount {
namespace {

// Polling interval for marks and blocks. Zero at first, because most are reached within a few
// microseconds, and a sleeping thread wakes after 60 microseconds at the earliest; later a
// sixteenth of the time waited so far.
constexpr std::chrono::microseconds kWithoutPause{50};
constexpr std::chrono::microseconds kLongestPause{1000};
std::chrono::nanoseconds PauseAfter(std::chrono::steady_clock::time_point begin) {
  const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - begin;
  if (waited < kWithoutPause) return std::chrono::nanoseconds(0);
  return std::min<std::chrono::nanoseconds>(waited / 16, kLongestPause);
}
// Polling interval while waiting for a block whose return is notified: polling only detects
// cancellation.
constexpr std::chrono::milliseconds kLookAgain{20};

constexpr std::size_t kPage = 4096;

Status Cancelled() { return {Code::kCancelled, "cancelled"}; }

bool IsSet(const std::atomic<bool>* cancel) {
  return cancel != nullptr && cancel->load(std::memory_order_relaxed);
}

}  // namespace

Status AwaitMark(DeviceMark& mark, const Deadline& deadline, const std::atomic<bool>* cancel) {
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool reached, mark.Reached());
    if (reached) return {};
    if (IsSet(cancel)) return Cancelled();
    if (deadline.Passed()) {
      return {Code::kDeadlineExceeded,
              "timeout: the device did not finish its queued work in time"};
    }
    const std::chrono::nanoseconds pause = PauseAfter(begin);
    if (pause.count() == 0) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline.Left()));
    }
  }
}

void LeakToDevice(void* memory) {
  static auto* const mutex = new std::mutex;
  static auto* const left = new std::vector<void*>;
  std::lock_guard lock(*mutex);
  left->push_back(memory);
}

PinnedRing::Block::Block(Block&& other) noexcept
    : ring_(std::move(other.ring_)), data_(std::exchange(other.data_, nullptr)) {}

PinnedRing::Block& PinnedRing::Block::operator=(Block&& other) noexcept {
  if (this == &other) return *this;
  Return();
  ring_ = std::move(other.ring_);
  data_ = std::exchange(other.data_, nullptr);
  return *this;
}

PinnedRing::Block::~Block() { Return(); }

std::size_t PinnedRing::Block::size() const { return ring_->block_bytes(); }

void PinnedRing::Block::Return() {
  if (data_ == nullptr) return;
  {
    std::lock_guard lock(ring_->mutex_);
    ring_->free_.push_back(std::exchange(data_, nullptr));
  }
  ring_->returned_.notify_all();
  ring_.reset();
}

void PinnedRing::Block::ReturnAfter(const Result<std::shared_ptr<DeviceMark>>& mark) {
  if (data_ == nullptr) return;
  std::lock_guard lock(ring_->mutex_);
  ring_->lost_.push_back({std::exchange(data_, nullptr), mark});
}

PinnedRing::PinnedRing(std::shared_ptr<DeviceOps> ops, const PinnedShape& shape)
    : ops_(std::move(ops)), shape_(shape) {
  made_.reserve(shape_.blocks);  // Returning a block must not allocate.
  free_.reserve(shape_.blocks);
  lost_.reserve(shape_.blocks);
}

PinnedRing::~PinnedRing() {
  while (CollectOne()) {
  }
  for (const Memory& memory : made_) {
    const bool lost = std::any_of(lost_.begin(), lost_.end(),
                                  [&](const Lost& l) { return l.data == memory.data; });
    if (lost) {
      LeakToDevice(memory.data);
      // Leaks the device, too, because its destruction would free or unpin the memory.
      LeakToDevice(new std::shared_ptr<DeviceOps>(ops_));
    } else if (memory.pinned) {
      ops_->FreePinned(memory.data);
    } else {
      std::free(memory.data);  // NOLINT(cppcoreguidelines-no-malloc)
    }
  }
}

bool PinnedRing::CollectOne() {
  for (auto lost = lost_.begin(); lost != lost_.end(); ++lost) {
    if (!lost->mark.ok()) continue;
    const Result<bool> reached = lost->mark.value()->Reached();
    if (!reached.ok()) lost->mark = reached.status();
    if (!reached.ok() || !reached.value()) continue;
    free_.push_back(lost->data);
    lost_.erase(lost);
    return true;
  }
  return false;
}

Status PinnedRing::Name(const Status& failure) const {
  return failure.WithContext(ops_->name()).With({.device = ops_->name()});
}

Status PinnedRing::Make() {
  const Result<std::byte*> pinned = ops_->AllocatePinned(shape_.block_bytes);
  if (pinned.ok()) {
    made_.push_back({pinned.value(), true});
    free_.push_back(pinned.value());
    return {};
  }
  if (pinned.status().code() != Code::kResourceExhausted) return pinned.status();
  void* data = nullptr;
  if (posix_memalign(&data, kPage, shape_.block_bytes) != 0) {
    return {Code::kResourceExhausted,
            "cannot allocate a host buffer of " + std::to_string(shape_.block_bytes) + " bytes"};
  }
  const bool first =
      std::none_of(made_.begin(), made_.end(), [](const Memory& memory) { return !memory.pinned; });
  made_.push_back({static_cast<std::byte*>(data), false});
  free_.push_back(static_cast<std::byte*>(data));
  if (first) {
    Log(LogLevel::kWarning, ops_->name() +
                                ": copies use host memory that is not pinned, which is slower: " +
                                pinned.status().message());
  }
  return {};
}

Result<std::byte*> PinnedRing::TakeLocked() {
  if (free_.empty()) CollectOne();
  if (free_.empty() && made_.size() < shape_.blocks) {
    const Status made = Make();
    // If no further block can be made, the caller waits for one of the existing blocks.
    if (made_.empty()) return made.With({.device = ops_->name()});
  }
  const bool all_failed =
      lost_.size() == made_.size() &&
      std::none_of(lost_.begin(), lost_.end(), [](const Lost& lost) { return lost.mark.ok(); });
  if (all_failed) return Name(lost_.front().mark.status());
  if (free_.empty()) return nullptr;
  std::byte* const data = free_.back();
  free_.pop_back();
  return data;
}

Result<PinnedRing::Block> PinnedRing::Take(const Deadline& deadline,
                                           const std::atomic<bool>* cancel) {
  std::unique_lock lock(mutex_);
  const int self = 0;
  waiting_.push_back(&self);
  // Runs while `lock` is still held, because `leave` is destroyed before `lock`.
  const AtExit leave([&] {
    std::erase(waiting_, &self);
    returned_.notify_all();
  });
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    if (waiting_.front() == &self) {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::byte* const data, TakeLocked());
      if (data != nullptr) return Block(shared_from_this(), data);
    }
    if (IsSet(cancel)) return Cancelled();
    if (deadline.Passed()) {
      return Name(Status(Code::kDeadlineExceeded, "timeout: all " + std::to_string(made_.size()) +
                                                      " pinned host buffers are in use, " +
                                                      std::to_string(lost_.size()) +
                                                      " of them by unfinished copies"));
    }
    // Nothing notifies of a block in lost_ that is free again, so the first waiter polls for it.
    // All other waiters only need notifications.
    const bool looks = waiting_.front() == &self && !lost_.empty();
    const std::chrono::nanoseconds most =
        looks ? PauseAfter(begin) : std::chrono::nanoseconds(kLookAgain);
    returned_.wait_for(lock, std::min(most, deadline.Left()));
  }
}

std::optional<PinnedRing::Block> PinnedRing::TryTake() {
  std::lock_guard lock(mutex_);
  if (!waiting_.empty()) return std::nullopt;
  const Result<std::byte*> data = TakeLocked();
  if (!data.ok() || data.value() == nullptr) return std::nullopt;
  return Block(shared_from_this(), data.value());
}

bool PinnedRing::IsWaitedFor() const {
  std::lock_guard lock(mutex_);
  return !waiting_.empty();
}

std::size_t PinnedRing::pinned_bytes() const {
  std::lock_guard lock(mutex_);
  return shape_.block_bytes *
         static_cast<std::size_t>(
             std::count_if(made_.begin(), made_.end(), [](const Memory& m) { return m.pinned; }));
}

std::size_t PinnedRing::pageable_bytes() const {
  std::lock_guard lock(mutex_);
  return shape_.block_bytes *
         static_cast<std::size_t>(
             std::count_if(made_.begin(), made_.end(), [](const Memory& m) { return !m.pinned; }));
}

}  // namespace tensormount
