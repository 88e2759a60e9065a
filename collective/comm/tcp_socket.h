// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_TCP_SOCKET_H_
#define TENSORMOUNT_COLLECTIVE_COMM_TCP_SOCKET_H_

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <sys/epoll.h>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "collective/comm/tcp_address.h"

namespace tensormount {

// The system calls of a TCP group. None of them waits; all descriptors end with exec.

// A descriptor that is closed on the way out. What is still to be sent goes on being sent.
class TcpSocket {
 public:
  TcpSocket() = default;
  explicit TcpSocket(int fd) : fd_(fd) {}
  TcpSocket(TcpSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  TcpSocket& operator=(TcpSocket&& other) noexcept {
    Close();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  ~TcpSocket() { Close(); }
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void Close();

 private:
  int fd_ = -1;
};

// Which of many descriptors have something. Keys are the caller's.
class EpollSet {
 public:
  static Result<EpollSet> Make();
  // Of a descriptor that is not (any more) watched, Unwatch does nothing.
  Status Watch(int fd, std::uint32_t events, std::uint64_t key);
  void Rewatch(int fd, std::uint32_t events, std::uint64_t key);
  void Unwatch(int fd);
  std::span<const epoll_event> Poll(std::span<epoll_event> room);
  // To be polled itself.
  int fd() const { return epoll_.fd(); }

 private:
  TcpSocket epoll_;
};

// On one of the ports, at all of `addresses`. kInvalidArgument, kResourceExhausted, or what the
// system says, by address and port.
Result<TcpSocket> ListenTcp(const std::vector<IpAddress>& addresses, std::uint16_t first_port,
                            std::uint16_t last_port, std::uint16_t* port);
Result<TcpSocket> ListenUnix(const std::string& name);

// A way to a peer.
struct TcpRoute {
  bool is_unix = false;
  IpAddress ip;  // Otherwise.
};
// Begins to connect; `done` where that took no time. ToErrno of a failure is the system's.
Result<TcpSocket> BeginDial(const TcpRoute& route, const TcpAddress& to, bool* done);
// How a dial that was under way ended.
Status DialEnded(int fd);

// What accept gave is one of the errors after which the next may succeed.
bool IsErrorOfPeer(int err);
bool IsOutOfDescriptors(int err);
// The other end of a Unix socket belongs to this user.
bool IsSameUser(int fd);
// Sends what is small at once; asks a peer that is silent for long whether it is there.
void TuneTcp(int fd, std::chrono::milliseconds keep_alive);
// False: bytes were sent again and again for `limit`, and its machine did not say a word. Not
// TCP_USER_TIMEOUT, which also ends connections whose peer lives and does not read for long.
bool IsAnswered(int fd, std::chrono::milliseconds limit);
// Whether all that was written has reached the peer's machine.
bool AllArrived(int fd);
// "127.0.0.1:4711" of the other end, or what it is instead.
std::string PeerText(int fd);
// The address at which a connection came in.
bool LocalAddress(int fd, IpAddress* out);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_TCP_SOCKET_H_
