// SPDX-License-Identifier: Apache-2.0
// MakeMemoryTransport of host_transports.h: ranks that are threads of one process. Of a unit, the
// rank that comes second copies; the first one learns of it.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/keyed_hash.h"
#include "base/per_process.h"
#include "base/stream_copy.h"
#include "collective/comm/collective.h"
#include "tests/collective/host_transports.h"

namespace tensormount {
namespace {

// A unit of which one side is there.
struct MemoryMeeting {
  enum State : int { kWaiting, kCopying, kDone };
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::atomic<int> state{kWaiting};
};

// Where the ranks of one transport meet. Thread-safe.
class MemoryHub {
 public:
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // Exchange and unit.

  // Copies where the other side is there; returns what stands for the unit.
  std::shared_ptr<MemoryMeeting> Offer(const Key& key, const BulkMove& mine) {
    std::shared_ptr<MemoryMeeting> meeting;
    {
      std::lock_guard lock(mutex_);
      const auto at = waiting_.find(key);
      if (at == waiting_.end()) {
        meeting = std::make_shared<MemoryMeeting>();
        meeting->from = mine.from;
        meeting->to = mine.to;
        waiting_.emplace(key, meeting);
        return meeting;
      }
      meeting = at->second;
      waiting_.erase(at);
      meeting->state = MemoryMeeting::kCopying;
    }
    const std::byte* from = mine.sends ? mine.from : meeting->from;
    std::byte* to = mine.receives ? mine.to : meeting->to;
    StreamBytes(from, to, mine.bytes);
    EndStream();
    meeting->state.store(MemoryMeeting::kDone, std::memory_order_release);
    return meeting;
  }
  // After this nobody touches the memory of the one who offered it.
  void Withdraw(const Key& key, const MemoryMeeting& meeting) {
    {
      std::lock_guard lock(mutex_);
      if (meeting.state == MemoryMeeting::kWaiting) {
        waiting_.erase(key);
        return;
      }
    }
    while (meeting.state != MemoryMeeting::kDone) std::this_thread::yield();  // One copy.
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<MemoryMeeting>> waiting_;
};

// The hubs of this process, by the numbers of their groups.
struct MemoryHubs {
  std::mutex mutex;
  std::map<std::uint64_t, std::weak_ptr<MemoryHub>> hubs;
};

std::shared_ptr<MemoryHub> MemoryHubOf(std::uint64_t group) {
  auto& all = PerProcess<MemoryHubs>();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.hubs, [](const auto& hub) { return hub.second.expired(); });
  std::shared_ptr<MemoryHub> hub = all.hubs[group].lock();
  if (hub == nullptr) all.hubs[group] = hub = std::make_shared<MemoryHub>();
  return hub;
}

class MemoryMover final : public BulkMover {
 public:
  explicit MemoryMover(std::shared_ptr<MemoryHub> hub) : hub_(std::move(hub)) {}
  ~MemoryMover() override { Stop(); }

  std::string kind() const override { return "memory"; }
  Status Check(const BulkRange& range) override {
    if (range.device.kind == DeviceKind::kHost) return {};
    return {Code::kUnsupported, "memory of a device between threads of one process"};
  }
  Result<bool> Prepare(const Broadcast& /*broadcast*/) override { return true; }

  void Begin(BulkExchange& exchange) override {
    exchange_ = &exchange;
    offered_.assign(exchange.mine.size(), nullptr);
    first_ = 0;
  }
  void OnPut(const std::vector<std::size_t>& transfers) override {
    for (const std::size_t i : transfers) {
      BulkMove& mine = exchange_->mine[i];
      if (mine.sends && mine.receives) {
        std::memmove(mine.to, mine.from, mine.bytes);
        mine.done = true;
      } else {
        offered_[i] = hub_->Offer(KeyOf(mine), mine);
      }
    }
  }
  Result<bool> Move() override {
    for (std::size_t i = first_; i < offered_.size(); ++i) {
      BulkMove& mine = exchange_->mine[i];
      if (!mine.done && offered_[i] != nullptr &&
          offered_[i]->state.load(std::memory_order_acquire) == MemoryMeeting::kDone) {
        mine.done = true;
      }
      if (mine.done && first_ == i) ++first_;
    }
    return first_ == offered_.size();
  }

  void Stop() override {
    for (std::size_t i = first_; i < offered_.size(); ++i) {
      const BulkMove& mine = exchange_->mine[i];
      if (!mine.done && offered_[i] != nullptr) hub_->Withdraw(KeyOf(mine), *offered_[i]);
    }
    offered_.clear();
    first_ = 0;
  }
  Result<bool> Settled() override { return true; }
  Result<bool> Release() override { return true; }

 private:
  MemoryHub::Key KeyOf(const BulkMove& mine) const { return {exchange_->number, mine.unit}; }

  const std::shared_ptr<MemoryHub> hub_;
  BulkExchange* exchange_ = nullptr;
  std::vector<std::shared_ptr<MemoryMeeting>> offered_;  // As `mine`.
  std::size_t first_ = 0;                                // Before this all are done.
};

// Of this process: its number is used again, and is the same in two containers.
Result<std::string> NameOfProcess() {
  struct Name {
    std::array<std::uint8_t, 16> bytes{};
    Status filled = FillRandom(bytes);
  };
  const auto& name = PerProcess<Name>();
  TENSORMOUNT_RETURN_IF_ERROR(name.filled);
  return std::string(name.bytes.begin(), name.bytes.end());
}

}  // namespace

Result<std::unique_ptr<BulkTransport>> MakeMemoryTransport(Communicator& control,
                                                           const Timeouts& timeouts) {
  {
    Collective collective(control, timeouts);
    const Result<std::string> name = NameOfProcess();
    TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(name.status(), "name processes"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto names,
                                 collective.AllGather(name.value(), "compare processes"));
    for (std::size_t r = 1; r < names.size(); ++r) {
      if (names[r] != names[0]) {
        return Status(Code::kUnsupported,
                      "ranks that exchange through memory must be threads of "
                      "one process: rank " +
                          std::to_string(r) + " is in another one than rank 0")
            .With({.rank = static_cast<int>(r)});
      }
    }
  }
  return BulkTransport::Make(
      control, timeouts, [](std::uint64_t group) -> Result<std::unique_ptr<BulkMover>> {
        return std::unique_ptr<BulkMover>(std::make_unique<MemoryMover>(MemoryHubOf(group)));
      });
}

}  // namespace tensormount
