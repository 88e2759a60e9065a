// SPDX-License-Identifier: Apache-2.0
// Sockets of a TCP group: listening, dialling and their options.
#include "collective/comm/tcp_socket.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/spare_descriptors.h"

namespace tensormount {
namespace {

// The kernel uses its own limit if that is lower. Thousands of ranks dial rank 0 at once.
constexpr int kBacklog = 4096;

Result<TcpSocket> MakeSocket(int family, const std::string& what) {
  TcpSocket out(OpenDescriptor(
      [&] { return ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }));
  if (!out.is_open()) return Status::FromErrno(errno, "open a socket", what);
  return out;
}

void SetOption(int fd, int level, int name, int value) {
  // Failures are ignored: without the options of TuneTcp a connection works, but is slower or
  // notices a dead peer later; the options of ListenTcp are supported wherever the socket is.
  (void)::setsockopt(fd, level, name, &value, sizeof(value));
}

socklen_t UnixSocketName(const std::string& name, sockaddr_storage* out) {
  sockaddr_un un{};
  un.sun_family = AF_UNIX;
  const std::size_t size = std::min(name.size(), sizeof(un.sun_path));
  std::memcpy(un.sun_path, name.data(), size);
  *out = {};
  std::memcpy(out, &un, sizeof(un));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + size);
}

std::string EndText(const IpAddress& ip, std::uint16_t port) {
  return ip.is_v4() ? ip.ToString() + ":" + std::to_string(port)
                    : "[" + ip.ToString() + "]:" + std::to_string(port);
}

}  // namespace

void TcpSocket::Close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Result<EpollSet> EpollSet::Make() {
  EpollSet out;
  out.epoll_ = TcpSocket(OpenDescriptor([] { return ::epoll_create1(EPOLL_CLOEXEC); }));
  if (!out.epoll_.is_open()) return Status::FromErrno(errno, "make", "an epoll descriptor");
  return out;
}

Status EpollSet::Watch(int fd, std::uint32_t events, std::uint64_t key) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) == 0) return {};
  return Status::FromErrno(errno, "watch", "a connection");
}

void EpollSet::Rewatch(int fd, std::uint32_t events, std::uint64_t key) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  // Cannot fail: the descriptor is watched.
  (void)::epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, fd, &event);
}

void EpollSet::Unwatch(int fd) {
  // Explicit, because a forked child may have the descriptor open, and close() alone would not end
  // its events.
  epoll_event event{};
  (void)::epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, &event);
}

std::span<const epoll_event> EpollSet::Poll(std::span<epoll_event> room) {
  const int n = ::epoll_wait(epoll_.fd(), room.data(), static_cast<int>(room.size()), 0);
  return std::span<const epoll_event>(room).first(static_cast<std::size_t>(std::max(n, 0)));
}

Result<TcpSocket> ListenTcp(const std::vector<IpAddress>& addresses, std::uint16_t first_port,
                            std::uint16_t last_port, std::uint16_t* port) {
  // If there is one address, the socket is bound to it. If there are several, the socket listens on
  // all addresses of the machine, and TcpHub::Admit checks the address of each connection.
  const bool only_v4 =
      std::all_of(addresses.begin(), addresses.end(), [](const IpAddress& a) { return a.is_v4(); });
  IpAddress bound{};
  if (addresses.size() == 1) {
    bound = addresses.front();
  } else if (only_v4) {
    bound = IpAddress::Parse("0.0.0.0").value();
  }
  Status last;
  for (std::uint32_t p = first_port; p <= last_port; ++p) {
    const auto tried = static_cast<std::uint16_t>(p);
    const std::string what = EndText(bound, tried);
    TENSORMOUNT_ASSIGN_OR_RETURN(TcpSocket out,
                                 MakeSocket(bound.is_v4() ? AF_INET : AF_INET6, what));
    SetOption(out.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (!bound.is_v4()) {
      SetOption(out.fd(), IPPROTO_IPV6, IPV6_V6ONLY, addresses.size() == 1 ? 1 : 0);
    }
    sockaddr_storage name{};
    const socklen_t size = bound.ToSocket(tried, &name);
    if (::bind(out.fd(), reinterpret_cast<const sockaddr*>(&name), size) == 0 &&
        ::listen(out.fd(), kBacklog) == 0) {
      sockaddr_storage chosen{};
      socklen_t chosen_size = sizeof(chosen);
      IpAddress ip;
      if (::getsockname(out.fd(), reinterpret_cast<sockaddr*>(&chosen), &chosen_size) != 0 ||
          !IpAddress::FromSocket(chosen, &ip, port)) {
        return Status::FromErrno(errno, "get the port of", what);
      }
      return out;
    }
    const int err = errno;
    last = Status::FromErrno(err, "listen on", what);
    if (err != EADDRINUSE && err != EACCES) return last;
  }
  if (first_port == last_port) return last;
  return last.WithContext("no port from " + std::to_string(first_port) + " to " +
                          std::to_string(last_port) + " is free");
}

Result<TcpSocket> ListenUnix(const std::string& name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(TcpSocket out, MakeSocket(AF_UNIX, "for the ranks on this machine"));
  sockaddr_storage bound{};
  const socklen_t size = UnixSocketName(name, &bound);
  if (::bind(out.fd(), reinterpret_cast<const sockaddr*>(&bound), size) != 0 ||
      ::listen(out.fd(), kBacklog) != 0) {
    return Status::FromErrno(errno, "listen on", "a Unix socket for the ranks on this machine");
  }
  return out;
}

Result<TcpSocket> BeginDial(const TcpRoute& route, const TcpAddress& to, bool* done) {
  const std::string what =
      route.is_unix ? "the Unix socket of that rank" : EndText(route.ip, to.port);
  sockaddr_storage name{};
  const socklen_t size =
      route.is_unix ? UnixSocketName(to.UnixName(), &name) : route.ip.ToSocket(to.port, &name);
  TENSORMOUNT_ASSIGN_OR_RETURN(TcpSocket out, MakeSocket(name.ss_family, what));
  int rc;
  do {
    rc = ::connect(out.fd(), reinterpret_cast<const sockaddr*>(&name), size);
  } while (rc != 0 && errno == EINTR);
  *done = rc == 0;
  if (rc != 0 && errno != EINPROGRESS) return Status::FromErrno(errno, "connect to", what);
  return out;
}

Status DialResult(int fd) {
  int err = 0;
  socklen_t size = sizeof(err);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &size) != 0) err = errno;
  if (err == 0) return {};
  return Status::FromErrno(err, "connect to", "the TCP socket of that rank");
}

bool IsErrorOfPeer(int err) {
  // accept(2): the errors of a connection that failed before it was accepted.
  for (const int harmless : {EINTR, ECONNABORTED, EPROTO, ENETDOWN, ENOPROTOOPT, EHOSTDOWN, ENONET,
                             EHOSTUNREACH, EOPNOTSUPP, ENETUNREACH, EPERM}) {
    if (err == harmless) return true;
  }
  return false;
}

bool IsOutOfDescriptors(int err) {
  return err == EMFILE || err == ENFILE || err == ENOBUFS || err == ENOMEM;
}

bool IsSameUser(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

void TuneTcp(int fd, std::chrono::milliseconds keep_alive) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  if (keep_alive <= std::chrono::milliseconds(0)) return;
  constexpr int kProbes = 4;
  constexpr std::int64_t kLongestIdle = 32767;  // The kernel's limit.
  const auto idle = static_cast<int>(
      std::clamp<std::int64_t>((keep_alive.count() + 999) / 1000, 1, kLongestIdle));
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, idle / kProbes));
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

bool IsPeerResponsive(int fd, std::chrono::milliseconds limit) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return true;
  return info.tcpi_unacked == 0 || info.tcpi_retransmits == 0 ||
         std::chrono::milliseconds(info.tcpi_last_ack_recv) < limit;
}

bool AreAllBytesAcknowledged(int fd) {
  int unsent = 0;
  return ::ioctl(fd, SIOCOUTQ, &unsent) != 0 || unsent == 0;
}

std::string PeerText(int fd) {
  sockaddr_storage name{};
  socklen_t size = sizeof(name);
  IpAddress ip;
  std::uint16_t port = 0;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&name), &size) != 0) {
    return "an unknown address";
  }
  if (IpAddress::FromSocket(name, &ip, &port)) return EndText(ip, port);
  return "a process on this machine";
}

bool LocalAddress(int fd, IpAddress* out) {
  sockaddr_storage name{};
  socklen_t size = sizeof(name);
  std::uint16_t port = 0;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size) == 0 &&
         IpAddress::FromSocket(name, out, &port);
}

}  // namespace tensormount
