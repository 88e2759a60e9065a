// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_STREAM_COMMUNICATOR_H_
#define TENSORMOUNT_COLLECTIVE_COMM_STREAM_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensormount/communicator.h"

#include "collective/comm/byte_stream.h"
#include "collective/comm/stream_hub.h"
#include "collective/comm/stream_peer.h"

namespace tensormount {

// A communicator over one ByteStream to every other rank: sockets of forked ranks, connections of a
// TCP group, and what a host carries for us through callbacks. It has the tables of requests and
// the clock of heartbeats; what goes over a stream is StreamPeer's. One mutex: streams are never
// used by two threads at a time. Requests are numbers from 1 on that are never used again, so that
// a Test of one that is done with is an error and not somebody else's. What a rank sends to itself
// goes through a communicator of one rank in memory, by the same rules of tags and order.
//
// Streams are given when it is made, all of which are looked at in each Progress; or made by a
// StreamHub when they are first used, which then says which to look at. Only with a hub can it
// hear of changes.
class StreamCommunicator final : public Communicator {
 public:
  struct Options {
    std::string kind;  // Communicator::kind.
    // Whether all pairs keep up SilentFor; otherwise rank 0 and every other, and who asks.
    bool beat_all = false;
    // False: a stream is used once a message for its rank is sent or asked for, or heartbeats are.
    bool use_all = false;
    // How long the destructor lets streams take their leave.
    std::chrono::milliseconds leave_wait{0};
  };
  // streams[r] leads to rank r; that of `rank` itself is not used.
  StreamCommunicator(int rank, std::vector<std::unique_ptr<ByteStream>> streams, Options options);
  // `use_all` is of no meaning.
  StreamCommunicator(int rank, int size, std::unique_ptr<StreamHub> hub, Options options);
  ~StreamCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  std::string kind() const override { return options_.kind; }
  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override;
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override;
  Result<bool> Test(Request request) override;
  void Cancel(Request request) override;
  Status Progress() override;
  std::chrono::nanoseconds SilentFor(int rank) const override;
  void KeepUp(int rank, bool wanted) override;
  std::uint64_t Changes() const override { return changes_; }
  bool HearsChanges() const override { return hub_ != nullptr; }
  void WaitForChange(std::uint64_t seen, std::chrono::nanoseconds most) override;

 private:
  using Clock = StreamPeer::Clock;
  struct Peer {
    std::unique_ptr<StreamPeer> stream;  // Null: this rank, or not used yet.
    bool used = false;
    int beats_wanted = 0;  // By how many KeepUp calls.
  };
  // A request that is neither done nor cancelled.
  struct Entry {
    StreamPeer* peer = nullptr;  // Null: to itself.
    StreamPeer::MessagePtr message;
    bool is_send = false;
    Request self_request = 0;  // In self_, where it is to this rank.
  };
  class Section;
  Result<Request> Post(int to, std::uint32_t tag, const BufferView& view, bool is_send);
  // The peer, with its stream.
  Peer& Use(int rank);
  void WantBeats(int rank, int change);
  void BeginBeats();
  void PollStreams();
  void TurnHub();
  void BeatWhereDue();

  const int rank_;
  const Options options_;
  const std::chrono::nanoseconds interval_;
  std::atomic<std::uint64_t> changes_{0};
  mutable std::mutex mutex_;
  std::unique_ptr<Communicator> self_;  // Carries what this rank sends to itself.
  const std::unique_ptr<StreamHub> hub_;
  std::vector<Peer> peers_;
  std::unordered_map<Request, Entry> requests_;
  Request next_ = 1;
  // With a hub.
  const Clock::time_point made_ = Clock::now();
  std::vector<int> ready_;
  Clock::time_point turned_{};
  Clock::time_point beats_looked_at_{};
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_STREAM_COMMUNICATOR_H_
