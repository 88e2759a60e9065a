// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/callback_host.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

namespace tensormount {

// One call of one rank: notes where another one of the same rank has not ended.
class CallbackHost::Call {
 public:
  explicit Call(void* context) : seat_(*static_cast<Seat*>(context)) {
    std::lock_guard lock(seat_.host->mutex_);
    if (seat_.busy) seat_.host->Note("two calls of one rank at the same time");
    seat_.busy = true;
  }
  ~Call() {
    std::lock_guard lock(seat_.host->mutex_);
    seat_.busy = false;
  }
  CallbackHost& host() const { return *seat_.host; }
  int rank() const { return seat_.rank; }

 private:
  Seat& seat_;
};

CallbackHost::CallbackHost(int ranks) {
  for (int r = 0; r < ranks; ++r) seats_.push_back({this, r, false});
}

CommunicatorCallbacks CallbackHost::Callbacks(int rank, bool can_cancel) {
  return {.context = &seats_[static_cast<std::size_t>(rank)],
          .send = Send,
          .receive = Receive,
          .test = Test,
          .cancel = can_cancel ? Cancel : nullptr};
}

Result<std::unique_ptr<Communicator>> CallbackHost::Make(int rank, const CallbackOptions& options) {
  return MakeCallbackCommunicator(Callbacks(rank), rank, static_cast<int>(seats_.size()), options);
}

void CallbackHost::Break(int rank, int code) {
  std::lock_guard lock(mutex_);
  broken_[rank] = code;
}

void CallbackHost::DamageNext(int rank) {
  std::lock_guard lock(mutex_);
  damaged_.insert(rank);
}

std::vector<std::string> CallbackHost::violations() {
  std::lock_guard lock(mutex_);
  return {violations_.begin(), violations_.end()};
}

std::size_t CallbackHost::under_way() {
  std::lock_guard lock(mutex_);
  return posts_.size();
}

std::size_t CallbackHost::cancelled() {
  std::lock_guard lock(mutex_);
  return cancelled_;
}

std::uint64_t CallbackHost::tests() {
  std::lock_guard lock(mutex_);
  return tests_;
}

int CallbackHost::Start(void* context, int peer, std::uint32_t tag, void* data, std::uint64_t size,
                        std::uint64_t* request, bool is_send) {
  const Call call(context);
  CallbackHost& host = call.host();
  std::lock_guard lock(host.mutex_);
  if (peer == call.rank()) host.Note("a message to itself");
  if (peer < 0 || peer >= static_cast<int>(host.seats_.size())) host.Note("no such rank");
  if (size < 1 || size > kMaxCallbackMessage) host.Note("size " + std::to_string(size));
  const auto others = std::count_if(host.posts_.begin(), host.posts_.end(), [&](const auto& p) {
    return p.second.owner == call.rank() && p.second.peer == peer && p.second.is_send == is_send;
  });
  if (others >= (is_send ? 9 : 1)) host.Note("too many requests under way");
  *request = host.next_++;
  host.posts_[*request] = {call.rank(), peer, is_send, data, size, false};
  Queue& queue = host.queues_[is_send ? Key{call.rank(), peer, tag} : Key{peer, call.rank(), tag}];
  (is_send ? queue.sends : queue.receives).push_back(*request);
  if (queue.sends.empty() || queue.receives.empty()) return 0;
  Post& send = host.posts_.at(queue.sends.front());
  Post& receive = host.posts_.at(queue.receives.front());
  queue.sends.pop_front();
  queue.receives.pop_front();
  if (send.size != receive.size) {
    host.Note("a receive of " + std::to_string(receive.size) + " bytes meets a message of " +
              std::to_string(send.size));
  }
  std::memcpy(receive.data, send.data, std::min(send.size, receive.size));
  if (host.damaged_.erase(send.owner) != 0) *static_cast<unsigned char*>(receive.data) ^= 0xff;
  send.done = receive.done = true;
  return 0;
}

int CallbackHost::Send(void* context, int to, std::uint32_t tag, const void* data,
                       std::uint64_t size, std::uint64_t* request) {
  return Start(context, to, tag, const_cast<void*>(data), size, request, /*is_send=*/true);
}

int CallbackHost::Receive(void* context, int from, std::uint32_t tag, void* data,
                          std::uint64_t size, std::uint64_t* request) {
  return Start(context, from, tag, data, size, request, /*is_send=*/false);
}

int CallbackHost::Test(void* context, std::uint64_t request) {
  const Call call(context);
  CallbackHost& host = call.host();
  std::lock_guard lock(host.mutex_);
  ++host.tests_;
  const auto it = host.posts_.find(request);
  if (it == host.posts_.end() || it->second.owner != call.rank()) {
    host.Note("a request that is not under way");
    return -1;
  }
  const auto broken = host.broken_.find(it->second.peer);
  if (!it->second.done && broken == host.broken_.end()) return 0;
  const int code = broken == host.broken_.end() ? 1 : broken->second;
  if (!it->second.done) {
    for (auto& [key, queue] : host.queues_) {
      std::erase(queue.sends, request);
      std::erase(queue.receives, request);
    }
  }
  host.posts_.erase(it);
  return code;
}

void CallbackHost::Cancel(void* context, std::uint64_t request) {
  const Call call(context);
  CallbackHost& host = call.host();
  std::lock_guard lock(host.mutex_);
  if (host.posts_.erase(request) == 0) host.Note("cancels a request that is not under way");
  for (auto& [key, queue] : host.queues_) {
    std::erase(queue.sends, request);
    std::erase(queue.receives, request);
  }
  ++host.cancelled_;
}

}  // namespace tensormount
