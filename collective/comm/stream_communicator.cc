// SPDX-License-Identifier: Apache-2.0
// A Communicator over one ByteStream to each other rank; messages of a pair are StreamPeer's.
#include "collective/comm/stream_communicator.h"

#include <poll.h>
#include <span>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "collective/comm/host_bytes.h"

namespace tensormount {

StreamCommunicator::StreamCommunicator(int rank, std::vector<std::unique_ptr<ByteStream>> streams,
                                       Options options)
    : rank_(rank),
      options_(std::move(options)),
      // With thousands of ranks, rank 0 tells each of them less often.
      interval_(std::chrono::milliseconds(100) +
                std::chrono::microseconds(100) * static_cast<int>(streams.size())),
      self_(MakeSelfCommunicator()),
      peers_(streams.size()) {
  for (std::size_t r = 0; r < streams.size(); ++r) {
    const int peer = static_cast<int>(r);
    if (peer == rank_) continue;
    peers_[r].stream = std::make_unique<StreamPeer>(peer, std::move(streams[r]), changes_);
    peers_[r].used = options_.use_all;
    if (options_.beat_all || rank_ == 0 || peer == 0) WantBeats(peer, 1);
  }
}

StreamCommunicator::~StreamCommunicator() {
  std::lock_guard lock(mutex_);
  const Deadline deadline = Deadline::After(options_.leave_wait);
  while (true) {
    bool left = true;
    for (const Peer& peer : peers_) {
      if (peer.stream && peer.used && !peer.stream->Leave()) left = false;
    }
    if (left || deadline.Passed()) return;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void StreamCommunicator::WantBeats(int rank, int change) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.beats_wanted += change;
  if (change > 0) peer.used = true;
}

void StreamCommunicator::KeepUp(int rank, bool wanted) {
  std::lock_guard lock(mutex_);
  if (rank >= 0 && rank < size() && rank != rank_) WantBeats(rank, wanted ? 1 : -1);
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
  std::lock_guard lock(mutex_);
  Entry e;
  e.is_send = is_send;
  if (to == rank_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(
        e.self_request, is_send ? self_->Send(0, tag, view) : self_->Receive(0, tag, view));
  } else {
    Peer& peer = peers_[static_cast<std::size_t>(to)];
    peer.used = true;
    e.peer = peer.stream.get();
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
  std::lock_guard lock(mutex_);
  const auto it = requests_.find(request);
  if (it == requests_.end()) return NoSuchRequest(request);
  if (it->second.peer == nullptr) {
    Result<bool> done = self_->Test(it->second.self_request);
    if (!done.ok() || done.value()) requests_.erase(it);
    return done;
  }
  if (!it->second.message->done) it->second.peer->Advance();
  if (!it->second.message->done) return false;
  const StreamPeer::MessagePtr m = it->second.message;
  requests_.erase(it);
  if (!m->status.ok()) return m->status;
  return true;
}

void StreamCommunicator::Cancel(Request request) {
  std::lock_guard lock(mutex_);
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
  std::lock_guard lock(mutex_);
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
  if (waiting.empty() || ::poll(waiting.data(), waiting.size(), 0) <= 0) return {};
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    if (waiting[i].revents != 0) whose[i]->Advance();
  }
  return {};
}

std::chrono::nanoseconds StreamCommunicator::SilentFor(int rank) const {
  std::lock_guard lock(mutex_);
  const Peer& peer = peers_.at(static_cast<std::size_t>(rank));
  if (!peer.stream) return std::chrono::nanoseconds(0);
  return StreamPeer::Clock::now() - peer.stream->heard();
}

}  // namespace tensormount
