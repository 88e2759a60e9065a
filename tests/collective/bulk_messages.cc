// SPDX-License-Identifier: Apache-2.0
// MakeMessageTransport of host_transports.h: units as messages of a Communicator, between two ranks
// in the order of the plan, on one tag. Before the first one a greeting, which tells them from what
// an earlier transport on this tag left behind.
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/coding.h"
#include "base/hash.h"
#include "tests/collective/host_transports.h"

namespace tensormount {
namespace {

// Messages of one direction between two ranks that are handed to the communicator at a time. More
// would not be faster, and each holds memory of a kind that copies (MPI).
constexpr std::size_t kMessagesAtATime = 8;
constexpr std::uint32_t kGreetingMagic = 0x684b6c42;

using Greeting = std::array<char, 24>;

Greeting MakeGreeting(std::uint64_t group) {
  Greeting out{};
  StoreLittle(out.data(), kGreetingMagic);
  StoreLittle(out.data() + 8, group);
  StoreLittle(out.data() + 16, Xxh3Low64(std::string_view(out.data(), 16)));
  return out;
}

class MessageMover final : public BulkMover {
 public:
  MessageMover(Communicator& comm, std::uint64_t group)
      : comm_(comm), tag_(BulkNotes::TagOf(comm) + 1), greeting_(MakeGreeting(group)) {
    lanes_.resize(2 * static_cast<std::size_t>(comm.size()));
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      lanes_[i].peer = static_cast<int>(i / 2);
      lanes_[i].sends = i % 2 == 0;
    }
  }
  ~MessageMover() override { Stop(); }

  std::string kind() const override { return "messages"; }
  Status Check(const BulkRange& range) override {
    if (range.device.kind == DeviceKind::kHost) return {};
    return {Code::kUnsupported, "memory of a device by messages of kind \"" + comm_.kind() + "\""};
  }
  Result<bool> Prepare(const Broadcast& /*broadcast*/) override { return true; }

  void Begin(BulkExchange& exchange) override {
    exchange_ = &exchange;
    left_ = exchange.mine.size();
    for (Lane& lane : lanes_) {
      lane.transfers.clear();
      lane.next = 0;
    }
    for (std::size_t i = 0; i < exchange.mine.size(); ++i) {
      const BulkMove& mine = exchange.mine[i];
      if (!mine.sends || !mine.receives) LaneOf(mine).transfers.push_back(i);
    }
    used_.clear();
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      if (!lanes_[i].transfers.empty()) used_.push_back(i);
    }
  }
  void OnPut(const std::vector<std::size_t>& transfers) override {
    for (const std::size_t i : transfers) {
      BulkMove& mine = exchange_->mine[i];
      if (!mine.sends || !mine.receives) continue;
      std::memmove(mine.to, mine.from, mine.bytes);
      mine.done = true;
      --left_;
    }
  }
  Result<bool> Move() override {
    for (const std::size_t i : used_) {
      Lane& lane = lanes_[i];
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool greeted, Greet(lane));
      if (greeted) TENSORMOUNT_RETURN_IF_ERROR(MoveLane(lane));
    }
    return left_ == 0;
  }

  void Stop() override {
    for (Lane& lane : lanes_) {
      if (lane.greeting) comm_.Cancel(*lane.greeting);
      lane.greeting.reset();
      for (const Flight& flight : lane.flights) comm_.Cancel(flight.request);
      lane.flights.clear();
      lane.transfers.clear();
    }
  }
  Result<bool> Settled() override { return true; }
  Result<bool> Release() override { return true; }

 private:
  struct Flight {
    std::size_t transfer = 0;
    Communicator::Request request = 0;
  };
  // One direction between this rank and another one.
  struct Lane {
    int peer = 0;
    bool sends = false;
    bool greeted = false;
    std::optional<Communicator::Request> greeting;
    Greeting heard{};
    std::vector<std::size_t> transfers;  // Of the exchange, in the order of the plan.
    std::size_t next = 0;
    std::vector<Flight> flights;
  };

  Lane& LaneOf(const BulkMove& mine) {
    return lanes_[2 * static_cast<std::size_t>(mine.peer) + (mine.sends ? 0 : 1)];
  }

  Status Named(const Lane& lane, const Status& status) const {
    return status.With({.rank = lane.peer});
  }

  // True once the first message of this transport went, or came: what follows is ours.
  Result<bool> Greet(Lane& lane) {
    while (!lane.greeted) {
      if (!lane.greeting) {
        char* bytes = lane.sends ? greeting_.data() : lane.heard.data();
        const auto view = BufferView::Host(DType::kU8, bytes, Dims{std::ssize(greeting_)});
        const auto asked =
            lane.sends ? comm_.Send(lane.peer, tag_, view) : comm_.Receive(lane.peer, tag_, view);
        if (!asked.ok()) return Named(lane, asked.status());
        lane.greeting = asked.value();
      }
      const Result<bool> done = comm_.Test(*lane.greeting);
      if (done.ok() && !done.value()) return false;
      lane.greeting.reset();
      if (done.ok()) {
        lane.greeted = lane.sends || lane.heard == greeting_;
      } else if (lane.sends || done.status().code() != Code::kDataLoss) {
        return Named(lane, done.status());
      }
    }
    return true;
  }

  Status MoveLane(Lane& lane) {
    for (std::size_t i = 0; i < lane.flights.size();) {
      Flight& flight = lane.flights[i];
      const Result<bool> done = comm_.Test(flight.request);
      if (done.ok() && !done.value()) {
        ++i;
        continue;
      }
      const std::uint64_t unit = exchange_->mine[flight.transfer].unit;
      exchange_->mine[flight.transfer].done = done.ok();
      lane.flights.erase(lane.flights.begin() + static_cast<std::ptrdiff_t>(i));
      if (!done.ok()) {
        return Named(lane, done.status().WithContext("unit " + std::to_string(unit)));
      }
      --left_;
    }
    while (lane.flights.size() < kMessagesAtATime && lane.next < lane.transfers.size()) {
      const std::size_t at = lane.transfers[lane.next];
      const BulkMove& mine = exchange_->mine[at];
      if (!mine.put) break;
      const Dims shape{static_cast<std::int64_t>(mine.bytes)};
      const auto asked =
          lane.sends ? comm_.Send(lane.peer, tag_, BufferView::Host(DType::kU8, mine.from, shape))
                     : comm_.Receive(lane.peer, tag_, BufferView::Host(DType::kU8, mine.to, shape));
      if (!asked.ok()) return Named(lane, asked.status());
      lane.flights.push_back({at, asked.value()});
      ++lane.next;
    }
    return {};
  }

  Communicator& comm_;
  const std::uint32_t tag_;
  Greeting greeting_;
  BulkExchange* exchange_ = nullptr;
  std::vector<Lane> lanes_;        // Two a rank: to it, from it.
  std::vector<std::size_t> used_;  // That have transfers.
  std::size_t left_ = 0;           // Transfers that are not done.
};

}  // namespace

Result<std::unique_ptr<BulkTransport>> MakeMessageTransport(Communicator& control,
                                                            const Timeouts& timeouts) {
  return BulkTransport::Make(
      control, timeouts, [&](std::uint64_t group) -> Result<std::unique_ptr<BulkMover>> {
        return std::unique_ptr<BulkMover>(std::make_unique<MessageMover>(control, group));
      });
}

}  // namespace tensormount
