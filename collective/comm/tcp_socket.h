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

// The system calls of a TCP group. None of them waits; all descriptors are close-on-exec.

// Owns a descriptor. After Close the kernel still sends bytes that were written.
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

// An epoll instance. The caller chooses a key for each watched descriptor.
class EpollSet {
 public:
  static Result<EpollSet> Make();
  Status Watch(int fd, std::uint32_t events, std::uint64_t key);
  void Rewatch(int fd, std::uint32_t events, std::uint64_t key);
  // Does nothing for a descriptor that is not watched.
  void Unwatch(int fd);
  std::span<const epoll_event> Poll(std::span<epoll_event> room);
  // The epoll descriptor, which is readable if a watched descriptor has an event.
  int fd() const { return epoll_.fd(); }

 private:
  TcpSocket epoll_;
};

// Listens on one of the ports, at all of `addresses` (if there are several, at all addresses of the
// machine). Fails with the system's error, which names address and port.
Result<TcpSocket> ListenTcp(const std::vector<IpAddress>& addresses, std::uint16_t first_port,
                            std::uint16_t last_port, std::uint16_t* port);
Result<TcpSocket> ListenUnix(const std::string& name);

// One address of a peer.
struct TcpRoute {
  bool is_unix = false;
  IpAddress ip;  // The IP address, unless is_unix.
};
// Begins to connect; sets `done` if it connected at once. ToErrno() of a failure gives the system's
// error.
Result<TcpSocket> BeginDial(const TcpRoute& route, const TcpAddress& to, bool* done);
// The error of a dial in progress (SO_ERROR); ok if there is none.
Status DialResult(int fd);

// Whether accept failed for this connection only, and may succeed for the next one.
bool IsErrorOfPeer(int err);
bool IsOutOfDescriptors(int err);
// Whether the other end of a Unix socket belongs to this user.
bool IsSameUser(int fd);
// Disables delays of small messages, and sends keep-alive probes to a silent peer.
void TuneTcp(int fd, std::chrono::milliseconds keep_alive);
// False if sent bytes were retransmitted and are still unacknowledged, and the last acknowledgement
// of the peer's machine is at least `limit` old. TCP_USER_TIMEOUT is not used, because it also ends
// connections whose peer lives and does not read for long.
bool IsPeerResponsive(int fd, std::chrono::milliseconds limit);
// Whether the peer's machine has acknowledged all written bytes.
bool AreAllBytesAcknowledged(int fd);
// "127.0.0.1:4711" of the other end, or a description if it has no such address.
std::string PeerText(int fd);
bool LocalAddress(int fd, IpAddress* out);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_TCP_SOCKET_H_
