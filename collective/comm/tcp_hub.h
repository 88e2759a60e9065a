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

// One rank's end of all connections of a TCP group: who connects is a guest until it is known to be
// a rank of the group; then its connection becomes that of its TcpStream.
//
// Guests may be anybody. Each has a deadline and a buffer of one frame; there are at most
// kMostStrangers that have not said a right hello, and the oldest goes first. A rank's hello is
// mostly there when its connection is accepted, so it is hardly ever among them.
class TcpHub final : public StreamHub {
 public:
  static constexpr std::size_t kMostStrangers = 64;

  struct Parts {
    int rank = 0;
    SecretKey token{};
    TcpId group{};
    TcpOptions options;
    TcpAddress own;
    std::vector<std::string> addresses;  // By rank, each one that can be decoded.
    TcpSocket tcp;
    TcpSocket unix_socket;  // Not open: none.
  };
  static Result<std::unique_ptr<TcpHub>> Make(Parts parts);
  ~TcpHub() override;

  std::unique_ptr<ByteStream> Open(int peer) override;
  void Turn(std::vector<int>* ready) override;
  void Wait(std::chrono::nanoseconds most, const std::function<bool()>& changed) override;
  void Wake() override;

 private:
  using Clock = TcpGroupContext::Clock;
  struct Guest {
    TcpSocket socket;
    bool is_unix = false;
    bool watched = false;
    Clock::time_point deadline;
    HandshakeFrame hello{};
    std::size_t have = 0;  // Of the frame that is being read.
    // Once its hello was right.
    int peer = -1;
    HandshakeFrame answer{};
    ConfirmFrame confirm{};
  };
  using Guests = std::map<std::uint32_t, Guest>;  // The oldest first.

  TcpHub(Parts parts, EpollSet epoll, TcpSocket wake);
  Status WatchListeners();
  void Accept(const TcpSocket& listener, bool is_unix, std::vector<int>* ready);
  void Admit(TcpSocket socket, bool is_unix, std::vector<int>* ready);
  bool DropOldestStranger();
  // False: it is no guest any more.
  bool ReadGuest(Guests::iterator it, std::vector<int>* ready);
  bool OnHello(Guests::iterator it);
  bool OnConfirm(Guests::iterator it, std::vector<int>* ready);
  void Dismiss(Guests::iterator it);
  void LookAround(std::vector<int>* ready);
  void Complain(const Guest& guest, const std::string& why);
  TcpStream& StreamTo(int peer);

  TcpGroupContext group_;
  const std::vector<std::string> addresses_;
  TcpSocket tcp_;
  TcpSocket unix_;
  // Of those whom messages are for, the StreamPeer owns the stream; the others wait for it here.
  std::vector<TcpStream*> streams_;
  std::map<int, std::unique_ptr<TcpStream>> unclaimed_;
  std::vector<int> opening_;  // Peers of streams that may not be open yet.
  Guests guests_;
  std::uint32_t next_guest_ = 0;
  std::size_t strangers_ = 0;
  std::optional<Clock::time_point> accept_again_;  // Not accepting until then.
  std::chrono::milliseconds accept_pause_{0};
  Clock::time_point check_at_;
  Clock::time_point complained_at_{};
  std::size_t not_complained_ = 0;

  TcpSocket wake_;
  std::mutex wait_mutex_;
  std::atomic<int> waiters_{0};  // Changed under wait_mutex_.
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_TCP_HUB_H_
