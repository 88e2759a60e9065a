// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_TCP_HUB_H_
#define TENSORMOUNT_COLLECTIVE_COMM_TCP_HUB_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "collective/comm/stream_hub.h"
#include "collective/comm/tcp_handshake.h"
#include "collective/comm/tcp_socket.h"
#include "collective/comm/tcp_stream.h"

namespace tensormount {

// One rank's end of all connections of a TCP group. An accepted connection is a pending peer until
// its handshake proves that it is a rank of the group; then its TcpStream takes it over.
//
// Anybody who reaches the listener can be a pending peer. Each one has a deadline for its hello and
// buffers of fixed size; at most kMaxUnauthenticated are without a valid hello, and the oldest of
// these is dropped first. A rank's hello usually arrives with its connection, so ranks are rarely
// dropped.
class TcpHub final : public StreamHub {
 public:
  static constexpr std::size_t kMaxUnauthenticated = 64;

  struct Parts {
    int rank = 0;
    SecretKey token{};
    TcpId group{};
    TcpOptions options;
    TcpAddress own;
    std::vector<std::string> addresses;  // By rank, each one decodable.
    TcpSocket tcp;
    TcpSocket unix_socket;  // If closed, Unix sockets are not used.
  };
  static Result<std::unique_ptr<TcpHub>> Make(Parts parts);
  ~TcpHub() override;

  std::unique_ptr<ByteStream> Open(int peer) override;
  void Poll(std::vector<int>* ready) override;
  void Wait(std::chrono::nanoseconds most, const std::function<bool()>& changed) override;
  void Wake() override;

 private:
  using Clock = TcpGroupContext::Clock;
  struct PendingPeer {
    TcpSocket socket;
    bool is_unix = false;
    bool watched = false;
    Clock::time_point deadline;
    HandshakeFrame hello{};
    std::size_t have = 0;  // Received bytes of the current frame.
    // The following fields are set once the hello was valid.
    int peer = -1;
    HandshakeFrame answer{};
    ConfirmFrame confirm{};
  };
  using PendingPeers = std::map<std::uint32_t, PendingPeer>;  // By id, the oldest first.

  TcpHub(Parts parts, EpollSet epoll, TcpSocket wake);
  Status WatchListeners();
  void Accept(const TcpSocket& listener, bool is_unix, std::vector<int>* ready);
  void Admit(TcpSocket socket, bool is_unix, std::vector<int>* ready);
  bool DropOldestUnauthenticated();
  // Reads from a pending peer. Returns false if the peer is not pending any more.
  bool ReadPendingPeer(PendingPeers::iterator it, std::vector<int>* ready);
  bool OnHello(PendingPeers::iterator it);
  bool OnConfirm(PendingPeers::iterator it, std::vector<int>* ready);
  void DropPendingPeer(PendingPeers::iterator it);
  void ScanSockets(std::vector<int>* ready);
  void LogRejected(const PendingPeer& guest, const std::string& why);
  TcpStream& StreamTo(int peer);

  TcpGroupContext group_;
  const std::vector<std::string> addresses_;
  TcpSocket tcp_;
  TcpSocket unix_;
  // By rank. A StreamPeer owns the stream of a rank that is in use; other streams wait in
  // unclaimed_.
  std::vector<TcpStream*> streams_;
  std::map<int, std::unique_ptr<TcpStream>> unclaimed_;
  std::vector<int> opening_;  // Peers of streams that may not be open yet.
  PendingPeers pending_peers_;
  std::uint32_t next_pending_id_ = 0;
  std::size_t unauthenticated_ = 0;
  std::optional<Clock::time_point> accept_again_;  // No accepts until this time.
  std::chrono::milliseconds accept_pause_{0};
  Clock::time_point check_at_;
  Clock::time_point last_rejection_log_{};
  std::size_t unlogged_rejections_ = 0;

  TcpSocket wake_;
  std::mutex wait_mutex_;
  std::atomic<int> waiters_{0};  // Changed under wait_mutex_.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_TCP_HUB_H_
