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

// A communicator over one ByteStream to each other rank: sockets of forked ranks, connections of a
// TCP group, or packets that a host program carries through callbacks. This class has the request
// table and the heartbeat clock; StreamPeer has the protocol of a stream. One mutex protects all
// members. Request numbers start at 1 and are never reused, so that a Test of a finished request is
// an error. Messages of a rank to itself go through an in-memory communicator of one rank, by the
// same rules of tags and order.
//
// Streams are either given to the constructor, and polled in each Progress once they are in use, or
// made on first use by a StreamHub, which then reports the streams to poll. The communicator
// reports changes (HearsChanges) only with a hub.
class StreamCommunicator final : public Communicator {
 public:
  struct Options {
    std::string kind;  // Returned by Communicator::kind.
    // Whether heartbeats go between all pairs of ranks. If not, they go only between rank 0 and the
    // other ranks, and where KeepUp requests them.
    bool beat_all = false;
    // Whether all streams are used from the start, or each one from the first message or heartbeat
    // for its rank.
    bool use_all = false;
    // Time that the destructor gives streams to close in an orderly way (ByteStream::TryClose).
    std::chrono::milliseconds leave_wait{0};
  };
  // streams[r] leads to rank r; streams[rank] is not used.
  StreamCommunicator(int rank, std::vector<std::unique_ptr<ByteStream>> streams, Options options);
  // With a hub, which makes streams on first use; Options::use_all is ignored.
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
    std::unique_ptr<StreamPeer> stream;  // Null for this rank, or, with a hub, if not used yet.
    bool used = false;
    int beats_wanted = 0;  // Number of KeepUp requests.
  };
  // A request that Test has not reported as complete and Cancel has not ended.
  struct Entry {
    StreamPeer* peer = nullptr;  // Null: a message to this rank.
    StreamPeer::MessagePtr message;
    bool is_send = false;
    Request self_request = 0;  // In self_, for a message to this rank.
  };
  class Section;
  Result<Request> Post(int to, std::uint32_t tag, const BufferView& view, bool is_send);
  // Returns the entry of a rank; makes its stream if needed.
  Peer& Use(int rank);
  void CountBeatRequest(int rank, int change);
  void BeginBeats();
  void PollStreams();
  void PollHub();
  void SendDueBeats();

  const int rank_;
  const Options options_;
  const std::chrono::nanoseconds interval_;
  std::atomic<std::uint64_t> changes_{0};
  mutable std::mutex mutex_;
  std::unique_ptr<Communicator> self_;  // Carries the messages of this rank to itself.
  const std::unique_ptr<StreamHub> hub_;
  std::vector<Peer> peers_;
  std::unordered_map<Request, Entry> requests_;
  Request next_ = 1;
  // The following members are used with a hub only.
  const Clock::time_point made_ = Clock::now();
  std::vector<int> ready_;
  Clock::time_point turned_{};
  Clock::time_point beats_looked_at_{};
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_STREAM_COMMUNICATOR_H_
