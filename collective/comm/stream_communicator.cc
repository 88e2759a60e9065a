// SPDX-License-Identifier: Apache-2.0
// A Communicator over one ByteStream to each other rank; StreamPeer moves the messages of a pair of
// ranks.
#include "collective/comm/stream_communicator.h"

#include <poll.h>
#include <span>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "collective/comm/host_bytes.h"

namespace tensormount {
namespace {

// With thousands of ranks, rank 0 sends each of them fewer heartbeats.
std::chrono::nanoseconds StreamBeatInterval(std::size_t ranks) {
  return std::chrono::milliseconds(100) +
         std::chrono::microseconds(100) * static_cast<std::int64_t>(ranks);
}

// A communicator with a hub has callers that never call Progress. For them a Test that finds
// nothing looks at the sockets itself, but at most once in this interval, because callers may test
// a thousand requests in a row.
constexpr std::chrono::microseconds kTurnAgain{50};

}  // namespace

// Locks the communicator during one call. At the end of the call, wakes the threads that wait for
// changes, if the call made any.
class StreamCommunicator::Section {
 public:
  explicit Section(StreamCommunicator& comm) : comm_(comm), lock_(comm.mutex_) {
    before_ = comm.changes_;
  }
  ~Section() {
    const bool changed = comm_.changes_ != before_;
    lock_.unlock();
    if (changed && comm_.hub_) comm_.hub_->Wake();
  }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

 private:
  StreamCommunicator& comm_;
  std::unique_lock<std::mutex> lock_;
  std::uint64_t before_;
};

StreamCommunicator::StreamCommunicator(int rank, std::vector<std::unique_ptr<ByteStream>> streams,
                                       Options options)
    : rank_(rank),
      options_(std::move(options)),
      interval_(StreamBeatInterval(streams.size())),
      self_(MakeSelfCommunicator()),
      peers_(streams.size()) {
  for (std::size_t r = 0; r < streams.size(); ++r) {
    const int peer = static_cast<int>(r);
    if (peer == rank_) continue;
    peers_[r].stream = std::make_unique<StreamPeer>(peer, std::move(streams[r]), changes_);
    peers_[r].used = options_.use_all;
  }
  BeginBeats();
}

StreamCommunicator::StreamCommunicator(int rank, int size, std::unique_ptr<StreamHub> hub,
                                       Options options)
    : rank_(rank),
      options_(std::move(options)),
      interval_(StreamBeatInterval(static_cast<std::size_t>(size))),
      self_(MakeSelfCommunicator()),
      hub_(std::move(hub)),
      peers_(static_cast<std::size_t>(size)) {
  BeginBeats();
}

void StreamCommunicator::BeginBeats() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_ && (options_.beat_all || rank_ == 0 || peer == 0)) CountBeatRequest(peer, 1);
  }
}

StreamCommunicator::~StreamCommunicator() {
  std::lock_guard lock(mutex_);
  const Deadline deadline = Deadline::After(options_.leave_wait);
  while (true) {
    bool left = true;
    for (const Peer& peer : peers_) {
      if (peer.stream && peer.used && !peer.stream->TryClose()) left = false;
    }
    if (left || deadline.Passed()) return;
    if (hub_ == nullptr) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      continue;
    }
    // Not PollHub, because a rank that leaves reads no messages any more.
    ready_.clear();
    hub_->Poll(&ready_);
    if (ready_.empty()) hub_->Wait(std::chrono::milliseconds(1), [] { return false; });
  }
}

StreamCommunicator::Peer& StreamCommunicator::Use(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (hub_ && peer.stream == nullptr) {
    peer.stream = std::make_unique<StreamPeer>(rank, hub_->Open(rank), changes_);
  }
  peer.used = true;
  return peer;
}

void StreamCommunicator::CountBeatRequest(int rank, int change) {
  Peer& peer = change > 0 ? Use(rank) : peers_[static_cast<std::size_t>(rank)];
  peer.beats_wanted += change;
  if (change > 0) peer.stream->RequestOpen();
}

void StreamCommunicator::KeepUp(int rank, bool wanted) {
  const Section section(*this);
  if (rank >= 0 && rank < size() && rank != rank_) CountBeatRequest(rank, wanted ? 1 : -1);
}

Result<Communicator::Request> StreamCommunicator::Send(int to, std::uint32_t tag,
                                                       const BufferView& view) {
  return Post(to, tag, view, /*is_send=*/true);
}

Result<Communicator::Request> StreamCommunicator::Receive(int from, std::uint32_t tag,
                                                          const BufferView& view) {
  return Post(from, tag, view, /*is_send=*/false);
}

Result<Communicator::Request> StreamCommunicator::Post(int to, std::uint32_t tag,
                                                       const BufferView& view, bool is_send) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckEnvelope(*this, to, tag));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, HostBytes(view));
  const Section section(*this);
  Entry e;
  e.is_send = is_send;
  if (to == rank_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        e.self_request, is_send ? self_->Send(0, tag, view) : self_->Receive(0, tag, view));
  } else {
    e.peer = Use(to).stream.get();
    e.peer->RequestOpen();
    e.message = std::make_shared<StreamPeer::Message>();
    e.message->tag = tag;
    e.message->data = bytes.data();
    e.message->size = bytes.size();
    if (is_send) {
      e.peer->Send(e.message);
    } else {
      e.peer->Receive(e.message);
    }
  }
  const Request request = next_++;
  requests_.emplace(request, std::move(e));
  return request;
}

Result<bool> StreamCommunicator::Test(Request request) {
  const Section section(*this);
  const auto it = requests_.find(request);
  if (it == requests_.end()) return NoSuchRequest(request);
  if (it->second.peer == nullptr) {
    Result<bool> done = self_->Test(it->second.self_request);
    if (!done.ok() || done.value()) requests_.erase(it);
    return done;
  }
  if (!it->second.message->done) {
    if (hub_ == nullptr) {
      it->second.peer->Advance();
    } else if (Clock::now() - turned_ >= kTurnAgain) {
      PollHub();
    }
    if (!it->second.message->done) return false;
  }
  const StreamPeer::MessagePtr m = it->second.message;
  requests_.erase(it);
  if (!m->status.ok()) return m->status;
  return true;
}

void StreamCommunicator::Cancel(Request request) {
  const Section section(*this);
  const auto it = requests_.find(request);
  if (it == requests_.end()) return;
  const Entry& e = it->second;
  if (e.peer == nullptr) {
    self_->Cancel(e.self_request);
  } else if (e.is_send) {
    e.peer->CancelSend(e.message);
  } else {
    e.peer->CancelReceive(e.message);
  }
  requests_.erase(it);
}

Status StreamCommunicator::Progress() {
  const Section section(*this);
  if (hub_) {
    PollHub();
    SendDueBeats();
  } else {
    PollStreams();
  }
  return {};
}

void StreamCommunicator::PollHub() {
  ready_.clear();
  hub_->Poll(&ready_);
  for (const int rank : ready_) {
    // The stream to a rank that sent first may not exist yet.
    StreamPeer& stream = *Use(rank).stream;
    if (!stream.closed()) stream.Advance();
  }
  turned_ = Clock::now();
}

void StreamCommunicator::SendDueBeats() {
  if (turned_ - beats_looked_at_ < interval_ / 4) return;
  beats_looked_at_ = turned_;
  for (const Peer& peer : peers_) {
    if (peer.stream && peer.beats_wanted > 0) peer.stream->Beat(interval_);
  }
}

void StreamCommunicator::WaitForChange(std::uint64_t seen, std::chrono::nanoseconds most) {
  if (hub_ == nullptr) return Communicator::WaitForChange(seen, most);
  hub_->Wait(most, [&] { return changes_ != seen; });
}

void StreamCommunicator::PollStreams() {
  std::vector<pollfd> waiting;
  std::vector<StreamPeer*> whose;
  for (const Peer& peer : peers_) {
    if (!peer.stream || !peer.used || peer.stream->closed()) continue;
    if (peer.beats_wanted > 0) peer.stream->Beat(interval_);
    if (peer.stream->fd() < 0) {
      peer.stream->Advance();
      continue;
    }
    const int events = POLLIN | (peer.stream->wants_write() ? POLLOUT : 0);
    waiting.push_back({peer.stream->fd(), static_cast<short>(events), 0});
    whose.push_back(peer.stream.get());
  }
  if (waiting.empty() || ::poll(waiting.data(), waiting.size(), 0) <= 0) return;
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    if (waiting[i].revents != 0) whose[i]->Advance();
  }
}

std::chrono::nanoseconds StreamCommunicator::SilentFor(int rank) const {
  std::lock_guard lock(mutex_);
  if (rank == rank_) return std::chrono::nanoseconds(0);
  const Peer& peer = peers_.at(static_cast<std::size_t>(rank));
  if (!peer.stream) return Clock::now() - made_;  // Nothing was received from `rank` yet.
  return Clock::now() - peer.stream->last_heard();
}

}  // namespace tensormount
