// SPDX-License-Identifier: Apache-2.0
// RunOnThreads and MakeThreadGroup of tensormount/communicator.h.
//
// Ranks as threads of one process. Each rank has a mailbox; the side that arrives second copies the
// bytes, from the sender's memory (or the mailbox's copy of a small message) to the receiver's.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensormount/communicator.h"

#include "base/stream_copy.h"
#include "collective/comm/host_bytes.h"

namespace tensormount {
namespace {

using Clock = std::chrono::steady_clock;

// Messages up to kEagerMessage are copied into the mailbox if no receive is posted yet, as long as
// one sender has at most kEagerTotal bytes in one mailbox.
constexpr std::size_t kEagerMessage = 4096;
constexpr std::size_t kEagerTotal = 1 << 20;
constexpr std::size_t kEagerOverhead = 64;

// Size in bytes from which a copy bypasses this core's caches, because a thread on another core
// reads the result.
constexpr std::size_t kBulkMessage = 64 * 1024;

void CopyMessage(std::byte* to, const std::byte* from, std::size_t size) {
  if (size < kBulkMessage) {
    std::memcpy(to, from, size);
    return;
  }
  StreamBytes(from, to, size);
  EndStream();
}

// One side of a message: a send or a receive.
struct Op {
  enum State : int { kPending, kCopying, kDone };

  int from = 0;
  int to = 0;
  std::uint32_t tag = 0;
  bool is_send = false;
  std::byte* data = nullptr;
  std::size_t size = 0;
  std::vector<std::byte> owned;  // The bytes of an eager send.
  bool eager = false;
  Status status;  // Written before `state` becomes kDone, read only afterwards.
  std::atomic<int> state{kPending};

  void Finish(Status s) {
    status = std::move(s);
    state.store(kDone, std::memory_order_release);
  }
  bool done() const { return state.load(std::memory_order_acquire) == kDone; }
};
using OpPtr = std::shared_ptr<Op>;

struct Queue {
  std::deque<OpPtr> sends;
  std::deque<OpPtr> receives;
};

// Messages and receives that wait for one rank.
struct Mailbox {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, Queue> queues;  // By sender and tag.
  std::vector<std::size_t> eager_bytes;             // By sender.
};

std::uint64_t KeyOf(int from, std::uint32_t tag) {
  return static_cast<std::uint64_t>(from) << 32 | tag;
}

// Wakes the threads of one rank when another rank finishes one of its requests. The threads sleep
// meanwhile, because a thousand polling ranks take the time of ranks that work.
class WakeEvent {
 public:
  std::uint64_t rung() const { return rung_.load(std::memory_order_acquire); }
  void Notify() {
    rung_.fetch_add(1, std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst) == 0) return;
    // Waits for threads that have checked rung_ but do not sleep yet.
    { std::lock_guard lock(mutex_); }
    changed_.notify_all();
  }
  void Wait(std::uint64_t seen, std::chrono::nanoseconds most) {
    waiting_.fetch_add(1, std::memory_order_seq_cst);
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, most, [&] { return rung_.load(std::memory_order_seq_cst) != seen; });
    }
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> rung_{0};
  std::atomic<int> waiting_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

struct ThreadGroup {
  explicit ThreadGroup(int ranks)
      : boxes(static_cast<std::size_t>(ranks)),
        bells(static_cast<std::size_t>(ranks)),
        last_heard(static_cast<std::size_t>(ranks)),
        gone(static_cast<std::size_t>(ranks)) {
    for (Mailbox& box : boxes) box.eager_bytes.resize(static_cast<std::size_t>(ranks));
    for (auto& h : last_heard) h.store(Clock::now().time_since_epoch().count());
    for (auto& g : gone) g.store(false);
  }
  void Finish(Op& op, Status status) {
    const int whose = op.is_send ? op.from : op.to;
    op.Finish(std::move(status));
    bells[static_cast<std::size_t>(whose)].Notify();
  }

  std::vector<Mailbox> boxes;
  std::vector<WakeEvent> bells;
  std::vector<std::atomic<Clock::rep>> last_heard;
  std::vector<std::atomic<bool>> gone;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank, std::string kind)
      : group_(std::move(group)), rank_(rank), kind_(std::move(kind)) {}

  ~ThreadCommunicator() override {
    std::vector<OpPtr> mine;
    {
      std::lock_guard lock(mutex_);
      for (auto& [request, op] : requests_) mine.push_back(op);
      requests_.clear();
    }
    for (const OpPtr& op : mine) Withdraw(op);
    Disconnect();
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->boxes.size()); }
  std::string kind() const override { return kind_; }

  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override {
    return Post(rank_, to, tag, view, /*is_send=*/true);
  }
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override {
    return Post(from, rank_, tag, view, /*is_send=*/false);
  }

  Result<bool> Test(Request request) override {
    Beat();
    std::lock_guard lock(mutex_);
    const auto it = requests_.find(request);
    if (it == requests_.end()) return NoSuchRequest(request);
    if (!it->second->done()) return false;
    const OpPtr op = std::move(it->second);
    requests_.erase(it);
    if (!op->status.ok()) return op->status;
    return true;
  }

  void Cancel(Request request) override {
    OpPtr op;
    {
      std::lock_guard lock(mutex_);
      const auto it = requests_.find(request);
      if (it == requests_.end()) return;
      op = std::move(it->second);
      requests_.erase(it);
    }
    Withdraw(op);
  }

  Status Progress() override {
    Beat();
    return {};
  }

  std::chrono::nanoseconds SilentFor(int rank) const override {
    const Clock::duration at(group_->last_heard.at(static_cast<std::size_t>(rank)).load());
    return std::max(std::chrono::nanoseconds(0),
                    std::chrono::nanoseconds(Clock::now().time_since_epoch() - at));
  }

  std::uint64_t Changes() const override { return group_->bells[Index(rank_)].rung(); }
  bool HearsChanges() const override { return true; }
  void WaitForChange(std::uint64_t seen, std::chrono::nanoseconds most) override {
    group_->bells[Index(rank_)].Wait(seen, most);
  }

 private:
  Mailbox& BoxOf(int to) const { return group_->boxes[static_cast<std::size_t>(to)]; }
  bool HasLeft(int rank) const { return group_->gone[static_cast<std::size_t>(rank)].load(); }

  void Beat() {
    group_->last_heard[static_cast<std::size_t>(rank_)].store(
        Clock::now().time_since_epoch().count());
  }

  Result<Request> Post(int from, int to, std::uint32_t tag, const BufferView& view, bool is_send) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckEnvelope(*this, is_send ? to : from, tag));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, HostBytes(view));
    Beat();
    auto op = std::make_shared<Op>();
    op->from = from;
    op->to = to;
    op->tag = tag;
    op->is_send = is_send;
    op->data = bytes.data();
    op->size = bytes.size();
    Request request;
    {
      std::lock_guard lock(mutex_);
      request = next_++;
      requests_.emplace(request, op);
    }
    Deliver(op);
    return request;
  }

  // Completes `op` if the other side of the message is in the mailbox; if not, queues `op` there.
  void Deliver(const OpPtr& op) {
    Mailbox& box = BoxOf(op->to);
    OpPtr other;
    {
      std::lock_guard lock(box.mutex);
      const std::uint64_t key = KeyOf(op->from, op->tag);
      Queue& queue = box.queues[key];
      std::deque<OpPtr>& others = op->is_send ? queue.receives : queue.sends;
      if (others.empty()) {
        // A rank that leaves sets its flag before it looks through the mailboxes: either it finds
        // `op`, or this call finds the flag.
        if (HasLeft(op->is_send ? op->to : op->from)) {
          op->Finish(PeerGone(op->is_send ? op->to : op->from));
        } else if (op->is_send) {
          queue.sends.push_back(MakeEager(box, op));
        } else {
          queue.receives.push_back(op);
        }
        DropIfEmpty(box, key, queue);
        return;
      }
      other = std::move(others.front());
      others.pop_front();
      DropIfEmpty(box, key, queue);
      const OpPtr& send = op->is_send ? op : other;
      if (send->eager) box.eager_bytes[Index(send->from)] -= send->size + kEagerOverhead;
      op->state.store(Op::kCopying, std::memory_order_relaxed);
      other->state.store(Op::kCopying, std::memory_order_relaxed);
    }
    const OpPtr& send = op->is_send ? op : other;
    const OpPtr& receive = op->is_send ? other : op;
    if (send->size != receive->size) {
      group_->Finish(*receive, SizeDiffers(op->from, op->tag, send->size, receive->size));
    } else {
      if (send->size != 0) {
        CopyMessage(receive->data, send->eager ? send->owned.data() : send->data, send->size);
      }
      group_->Finish(*receive, {});
    }
    group_->Finish(*send, {});
  }

  // Returns the entry to queue for a send: the send itself or, if it is small, a copy of its bytes,
  // and then the send is finished.
  static OpPtr MakeEager(Mailbox& box, const OpPtr& op) {
    std::size_t& used = box.eager_bytes[Index(op->from)];
    if (op->size > kEagerMessage || used + op->size + kEagerOverhead > kEagerTotal) return op;
    used += op->size + kEagerOverhead;
    auto copy = std::make_shared<Op>();
    copy->from = op->from;
    copy->to = op->to;
    copy->tag = op->tag;
    copy->is_send = true;
    copy->size = op->size;
    copy->eager = true;
    copy->owned.assign(op->data, op->data + op->size);
    op->Finish({});
    return copy;
  }

  // Ends a request. Afterwards no other thread accesses the memory of `op`.
  void Withdraw(const OpPtr& op) {
    {
      Mailbox& box = BoxOf(op->to);
      std::lock_guard lock(box.mutex);
      if (op->state.load() == Op::kPending) {
        const std::uint64_t key = KeyOf(op->from, op->tag);
        const auto it = box.queues.find(key);
        if (it != box.queues.end()) {
          std::erase(op->is_send ? it->second.sends : it->second.receives, op);
          DropIfEmpty(box, key, it->second);
        }
        op->Finish(Status(Code::kCancelled, "cancelled"));
        return;
      }
    }
    // Waits for at most one memcpy of another thread.
    while (!op->done()) std::this_thread::yield();
  }

  // Fails other ranks' requests that wait for this rank or send to it. Eager sends of this rank
  // stay available.
  void Disconnect() {
    group_->gone[Index(rank_)].store(true);
    for (std::size_t r = 0; r < group_->boxes.size(); ++r) {
      Mailbox& box = group_->boxes[r];
      std::lock_guard lock(box.mutex);
      for (auto it = box.queues.begin(); it != box.queues.end();) {
        Queue& queue = it->second;
        if (static_cast<int>(r) == rank_) {
          for (const OpPtr& op : queue.sends) group_->Finish(*op, PeerGone(rank_));
          queue.sends.clear();
        }
        if (static_cast<int>(it->first >> 32) == rank_) {
          for (const OpPtr& op : queue.receives) group_->Finish(*op, PeerGone(rank_));
          queue.receives.clear();
        }
        const bool empty = queue.sends.empty() && queue.receives.empty();
        it = empty ? box.queues.erase(it) : std::next(it);
      }
    }
  }

  static void DropIfEmpty(Mailbox& box, std::uint64_t key, const Queue& queue) {
    if (queue.sends.empty() && queue.receives.empty()) box.queues.erase(key);
  }
  static std::size_t Index(int rank) { return static_cast<std::size_t>(rank); }

  const std::shared_ptr<ThreadGroup> group_;
  const int rank_;
  const std::string kind_;
  std::mutex mutex_;  // Never locked while a mailbox is locked.
  std::unordered_map<Request, OpPtr> requests_;
  Request next_ = 1;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> MakeThreadGroup(int ranks) {
  auto group = std::make_shared<ThreadGroup>(std::max(ranks, 0));
  std::vector<std::unique_ptr<Communicator>> out;
  for (int r = 0; r < ranks; ++r) {
    out.push_back(std::make_unique<ThreadCommunicator>(group, r, "threads"));
  }
  return out;
}

std::unique_ptr<Communicator> MakeSelfCommunicator() {
  return std::make_unique<ThreadCommunicator>(std::make_shared<ThreadGroup>(1), 0, "self");
}

Status RunOnThreads(int ranks, const std::function<Status(Communicator&)>& body) {
  if (ranks < 1) return {Code::kInvalidArgument, "a group needs at least one rank"};
  std::vector<std::unique_ptr<Communicator>> group = MakeThreadGroup(ranks);
  std::vector<Status> results(static_cast<std::size_t>(ranks));
  // Not Thread of base/thread.h: `body` is the caller's code, which may rely on signals and starts
  // child processes that would inherit the mask.
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < results.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        results[r] = body(*group[r]);
      } catch (const std::exception& e) {
        results[r] = Status(Code::kInternal, std::string("exception: ") + e.what());
      } catch (...) {
        results[r] =
            Status(Code::kInternal, "internal error: an exception of an unknown type was thrown");
      }
      group[r].reset();  // Fails requests that still wait for this rank.
    });
  }
  for (std::thread& t : threads) t.join();
  for (const Status& result : results) {
    if (!result.ok()) return result;
  }
  return {};
}

}  // namespace tensormount
