// SPDX-License-Identifier: Apache-2.0
#include "collective/comm/socket_group.h"

#include <algorithm>
#include <cstdio>
#include <errno.h>
#include <exception>
#include <mutex>
#include <poll.h>
#include <signal.h>
#include <string>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <utility>

#include "base/deadline.h"
#include "collective/comm/host_bytes.h"
#include "collective/comm/socket_peer.h"

namespace tensormount {
namespace {

constexpr int kMaxRanks = 64;
constexpr std::chrono::milliseconds kHeartbeat{100};

class SocketCommunicator final : public Communicator {
 public:
  // fds[r] is the connection to rank r; the entry of `rank` itself is not used.
  SocketCommunicator(int rank, const std::vector<int>& fds)
      : rank_(rank), self_(MakeSelfCommunicator()) {
    for (std::size_t r = 0; r < fds.size(); ++r) {
      const int peer = static_cast<int>(r);
      peers_.push_back(peer == rank ? nullptr : std::make_unique<SocketPeer>(peer, fds[r]));
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  std::string kind() const override { return "sockets"; }

  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override {
    return Post(to, tag, view, /*is_send=*/true);
  }
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override {
    return Post(from, tag, view, /*is_send=*/false);
  }

  Result<bool> Test(Request request) override {
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
    const SocketPeer::MessagePtr m = it->second.message;
    requests_.erase(it);
    if (!m->status.ok()) return m->status;
    return true;
  }

  void Cancel(Request request) override {
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

  Status Progress() override {
    std::lock_guard lock(mutex_);
    std::vector<pollfd> waiting;
    std::vector<SocketPeer*> whose;
    for (const auto& peer : peers_) {
      if (!peer || peer->fd() < 0) continue;
      peer->Beat(kHeartbeat);
      const int events = POLLIN | (peer->wants_write() ? POLLOUT : 0);
      waiting.push_back({peer->fd(), static_cast<short>(events), 0});
      whose.push_back(peer.get());
    }
    if (waiting.empty() || ::poll(waiting.data(), waiting.size(), 0) <= 0) return {};
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      if (waiting[i].revents != 0) whose[i]->Advance();
    }
    return {};
  }

  std::chrono::nanoseconds SilentFor(int rank) const override {
    std::lock_guard lock(mutex_);
    const auto& peer = peers_.at(static_cast<std::size_t>(rank));
    if (!peer) return std::chrono::nanoseconds(0);
    return SocketPeer::Clock::now() - peer->heard();
  }

 private:
  struct Entry {
    SocketPeer* peer = nullptr;  // Null: to itself.
    SocketPeer::MessagePtr message;
    bool is_send = false;
    Request self_request = 0;
  };

  Result<Request> Post(int to, std::uint32_t tag, const BufferView& view, bool is_send) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckEnvelope(*this, to, tag));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, HostBytes(view));
    std::lock_guard lock(mutex_);
    Entry e;
    e.is_send = is_send;
    if (to == rank_) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          e.self_request, is_send ? self_->Send(0, tag, view) : self_->Receive(0, tag, view));
    } else {
      e.peer = peers_[static_cast<std::size_t>(to)].get();
      e.message = std::make_shared<SocketPeer::Message>();
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

  const int rank_;
  mutable std::mutex mutex_;
  std::unique_ptr<Communicator> self_;
  std::vector<std::unique_ptr<SocketPeer>> peers_;
  std::unordered_map<Request, Entry> requests_;
  Request next_ = 1;
};

// sockets[a][b] is a's end of the connection with b.
using Sockets = std::vector<std::vector<int>>;

void CloseAll(const Sockets& sockets) {
  for (const auto& row : sockets) {
    for (const int fd : row) {
      if (fd >= 0) ::close(fd);
    }
  }
}

Result<Sockets> Connect(int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  Sockets sockets(n, std::vector<int>(n, -1));
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = a + 1; b < n; ++b) {
      int pair[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
        const int err = errno;
        CloseAll(sockets);
        return Status::FromErrno(err, "connect ranks", std::to_string(a) + "-" + std::to_string(b));
      }
      sockets[a][b] = pair[0];
      sockets[b][a] = pair[1];
    }
  }
  return sockets;
}

[[noreturn]] void RunChild(int rank, Sockets& sockets, pid_t parent,
                           const std::function<int(Communicator&)>& body) {
  // Nobody may outlive the program that started them, stopped ones included.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(125);
  std::vector<int> mine = std::move(sockets[static_cast<std::size_t>(rank)]);
  sockets[static_cast<std::size_t>(rank)].clear();
  CloseAll(sockets);
  int code = 125;
  try {
    SocketCommunicator comm(rank, mine);
    code = body(comm);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tensormount: rank %d: exception: %s\n", rank, e.what());
  } catch (...) {
    std::fprintf(stderr, "tensormount: rank %d: unknown exception\n", rank);
  }
  std::fflush(nullptr);
  ::_exit(code);
}

class Group final : public ForkedGroup {
 public:
  ~Group() override {
    for (std::size_t r = 0; r < pids_.size(); ++r) {
      if (!exits_[r].exited) ::kill(pids_[r], SIGKILL);
    }
    for (std::size_t r = 0; r < pids_.size(); ++r) {
      if (!exits_[r].exited) ::waitpid(pids_[r], nullptr, 0);
    }
  }

  void Add(pid_t pid) {
    pids_.push_back(pid);
    exits_.emplace_back();
  }

  pid_t pid(int rank) const override { return pids_.at(static_cast<std::size_t>(rank)); }

  std::vector<Exit> Wait(std::chrono::milliseconds timeout) override {
    const Deadline deadline = Deadline::After(timeout);
    while (!ReapAll() && !deadline.Passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return exits_;
  }

 private:
  bool ReapAll() {
    bool all = true;
    for (std::size_t r = 0; r < pids_.size(); ++r) {
      Exit& e = exits_[r];
      if (e.exited) continue;
      int status = 0;
      if (::waitpid(pids_[r], &status, WNOHANG) != pids_[r]) {
        all = false;
        continue;
      }
      e.exited = true;
      if (WIFEXITED(status)) e.code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) e.signal = WTERMSIG(status);
    }
    return all;
  }

  std::vector<pid_t> pids_;
  std::vector<Exit> exits_;
};

}  // namespace

Result<std::unique_ptr<ForkedGroup>> ForkedGroup::Start(
    int ranks, const std::function<int(Communicator&)>& body) {
  if (ranks < 1 || ranks > kMaxRanks) {
    return Status(Code::kInvalidArgument,
                  "a forked group has 1 to 64 ranks, not " + std::to_string(ranks));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(Sockets sockets, Connect(ranks));
  auto group = std::make_unique<Group>();
  std::fflush(nullptr);  // Or every child would write the parent's buffered output again.
  const pid_t parent = ::getpid();
  for (int r = 0; r < ranks; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) RunChild(r, sockets, parent, body);
    if (pid < 0) {
      const int err = errno;
      CloseAll(sockets);
      return Status::FromErrno(err, "fork", "rank " + std::to_string(r));
    }
    group->Add(pid);
  }
  CloseAll(sockets);
  return std::unique_ptr<ForkedGroup>(std::move(group));
}

}  // namespace tensormount
