// SPDX-License-Identifier: Apache-2.0
// Ranks as processes that were forked, connected by sockets: how tests and benchmarks kill, stop
// and slow ranks down one by one.
#include "bench/forked_group.h"

#include <cstdio>
#include <errno.h>
#include <exception>
#include <signal.h>
#include <string>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "base/deadline.h"
#include "collective/comm/host_bytes.h"
#include "collective/comm/stream_communicator.h"

namespace tensormount {
namespace {

constexpr int kMaxRanks = 64;

class SocketStream final : public ByteStream {
 public:
  // Takes the descriptor over.
  SocketStream(int peer, int fd) : peer_(peer), fd_(fd) {}
  ~SocketStream() override { Shut(); }
  SocketStream(const SocketStream&) = delete;
  SocketStream& operator=(const SocketStream&) = delete;

  Result<std::size_t> Write(const void* head, std::size_t head_size, const void* body,
                            std::size_t body_size) override {
    iovec iov[2] = {{const_cast<void*>(head), head_size}, {const_cast<void*>(body), body_size}};
    msghdr msg{};
    msg.msg_iov = iov;
    msg.msg_iovlen = 2;
    return Moved([&] { return ::sendmsg(fd_, &msg, MSG_DONTWAIT | MSG_NOSIGNAL); });
  }

  Result<std::size_t> Read(void* to, std::size_t size) override {
    bool ended = false;
    const Result<std::size_t> got = Moved([&] {
      const ssize_t n = ::recv(fd_, to, size, MSG_DONTWAIT);
      ended = n == 0;
      return n;
    });
    if (ended) return PeerGone(peer_);
    return got;
  }

  void Shut() override {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  int fd() const override { return fd_; }

 private:
  template <typename Call>
  Result<std::size_t> Moved(Call call) const {
    ssize_t n;
    do {
      n = call();
    } while (n < 0 && errno == EINTR);
    if (n >= 0) return static_cast<std::size_t>(n);
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return std::size_t{0};
    return PeerGone(peer_);
  }

  const int peer_;
  int fd_;
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

[[noreturn]] void RunChild(int rank, pid_t parent, const ForkedGroup::Maker& make,
                           const std::function<int(Communicator&)>& body) {
  // Nobody may outlive the program that started them, stopped ones included.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(125);
  int code = 125;
  try {
    const Result<std::unique_ptr<Communicator>> comm = make(rank);
    if (comm.ok()) {
      code = body(*comm.value());
    } else {
      std::fprintf(stderr, "tensormount: rank %d: %s\n", rank, comm.status().ToString().c_str());
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tensormount: rank %d: exception: %s\n", rank, e.what());
  } catch (...) {
    std::fprintf(stderr, "tensormount: rank %d: unknown exception\n", rank);
  }
  std::fflush(nullptr);
  ::_exit(code);
}

Status CheckForkedRanks(int ranks) {
  if (ranks >= 1 && ranks <= kMaxRanks) return {};
  return {Code::kInvalidArgument, "a forked group has 1 to 64 ranks, not " + std::to_string(ranks)};
}

class SocketGroup final : public ForkedGroup {
 public:
  ~SocketGroup() override {
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
  TENSORMOUNT_RETURN_IF_ERROR(CheckForkedRanks(ranks));
  TENSORMOUNT_ASSIGN_OR_RETURN(Sockets sockets, Connect(ranks));
  const auto make = [&](int rank) -> Result<std::unique_ptr<Communicator>> {
    const std::vector<int> mine = std::move(sockets[static_cast<std::size_t>(rank)]);
    sockets[static_cast<std::size_t>(rank)].clear();
    CloseAll(sockets);
    std::vector<std::unique_ptr<ByteStream>> streams;
    for (std::size_t r = 0; r < mine.size(); ++r) {
      streams.push_back(std::make_unique<SocketStream>(static_cast<int>(r), mine[r]));
    }
    return std::unique_ptr<Communicator>(std::make_unique<StreamCommunicator>(
        rank, std::move(streams),
        StreamCommunicator::Options{.kind = "sockets", .beat_all = true, .use_all = true}));
  };
  Result<std::unique_ptr<ForkedGroup>> group = Start(ranks, make, body);
  CloseAll(sockets);
  return group;
}

Result<std::unique_ptr<ForkedGroup>> ForkedGroup::Start(
    int ranks, const Maker& make, const std::function<int(Communicator&)>& body) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckForkedRanks(ranks));
  auto group = std::make_unique<SocketGroup>();
  std::fflush(nullptr);  // Or every child would write the parent's buffered output again.
  const pid_t parent = ::getpid();
  for (int r = 0; r < ranks; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) RunChild(r, parent, make, body);
    if (pid < 0) return Status::FromErrno(errno, "fork", "rank " + std::to_string(r));
    group->Add(pid);
  }
  return std::unique_ptr<ForkedGroup>(std::move(group));
}

}  // namespace tensormount
