// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_TCP_STREAM_H_
#define TENSORMOUNT_COLLECTIVE_COMM_TCP_STREAM_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unistd.h>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/tcp_group.h"

#include "base/keyed_hash.h"
#include "collective/comm/byte_stream.h"
#include "collective/comm/tcp_address.h"
#include "collective/comm/tcp_handshake.h"
#include "collective/comm/tcp_socket.h"

namespace tensormount {

// What the streams of a group have in common. Belongs to its TcpHub.
struct TcpGroupContext {
  using Clock = std::chrono::steady_clock;
  int rank = 0;
  int size = 0;
  SecretKey token{};
  TcpId group{};
  TcpOptions options;
  TcpAddress own;
  std::vector<IpAddress> own_ips;
  EpollSet epoll;
  // A child of a fork that destroys its copy must not end the connections, which are shared.
  const pid_t process = ::getpid();
  bool IsInChild() const { return ::getpid() != process; }
  // When something is due though no socket says so (TcpStream::Tick); streams only ever make it
  // earlier. Read by those who wait, without the lock.
  std::atomic<Clock::time_point> look_at{Clock::time_point::max()};
  void LookAt(Clock::time_point t) {
    if (t < look_at.load()) look_at = t;
  }
  // Peers of streams with bytes that were read ahead and not taken, of which no socket says so.
  std::vector<int> unread;
  // Keys of epoll: what kind in the upper half, which in the lower.
  enum Key : std::uint32_t { kListenTcp, kListenUnix, kStream, kGuest };
  static std::uint64_t KeyOf(Key key, std::uint32_t which) {
    return std::uint64_t{key} << 32 | which;
  }
};

// The stream to one peer. It is opened by whichever side comes first:
//
//   kIdle -- Want --> kWaiting -- Tick: time to dial --> kConnecting --> kHelloSent --> kOpen
//                        ^  |                                 |              |            |
//                        |  +---- Adopt: the peer dialled ----+--------------+--> kOpen   v
//                        +------- failed: next route, later --+--------------+         kEnded
//
// The higher rank of a pair dials at once. The lower one dials where it has something to send, or
// after a while (kGrace): a peer that died before it dialled is found so. Rank 0 always gives the
// others that while, because each of them dials it.
// Both may dial at the same time. Who answers a hello gives its own dial up, and does not answer
// where the peer's rank is the lower one and its own hello is out (Judge): so one of the two
// connections is used by both.
class TcpStream final : public ByteStream {
 public:
  using Clock = TcpGroupContext::Clock;
  // `group` outlives this.
  TcpStream(TcpGroupContext& group, int peer, TcpAddress address);
  ~TcpStream() override { Drop(); }
  TcpStream(const TcpStream&) = delete;
  TcpStream& operator=(const TcpStream&) = delete;

  Result<std::size_t> Write(const void* head, std::size_t head_size, const void* body,
                            std::size_t body_size) override;
  void WantWrite() override;
  void WantRead() override;
  Result<std::size_t> Read(void* to, std::size_t size) override;
  void Shut() override;
  bool Leave() override;
  void Want() override;
  bool open() const override { return state_ == State::kOpen; }
  std::string who() const override { return who_; }

  // For the hub.
  // Epoll says something of its socket. True: it is open, or has ended, and is to be advanced.
  bool OnEvents(std::uint32_t events);
  // Does what is due, and asks to be looked at again (LookAt). True: it has ended.
  bool Tick(Clock::time_point now);
  bool waits() const { return state_ != State::kIdle && state_ != State::kOpen && !ended(); }
  // What a hello of the peer is to be answered with.
  TcpAnswer Judge(Clock::time_point now) const;
  // A hello of the peer was answered, or that connection has ended before it was confirmed.
  void Yield(Clock::time_point now);
  void Resume();
  // The peer's connection, introduced.
  void Adopt(TcpSocket socket, bool is_unix);
  // Whether the peer's machine is still there; ends the stream where it is not.
  bool CheckAnswered();

 private:
  enum class State { kIdle, kWaiting, kConnecting, kHelloSent, kOpen, kEnded };
  bool ended() const { return state_ == State::kEnded; }
  bool DialsFirst() const { return group_.rank > peer_; }
  std::uint64_t key() const;
  void Dial(Clock::time_point now);
  void SayHello(Clock::time_point now);
  void OnAnswer(Clock::time_point now);
  // This route does not lead there now.
  void Missed(const Status& why, Clock::time_point now);
  void Retry(Clock::time_point at);
  void End(const Status& why);
  void Opened();
  void Drop();
  void FlushKept();
  Result<std::size_t> Moved(ssize_t n, int err);

  TcpGroupContext& group_;
  const int peer_;
  const TcpAddress address_;
  const std::string who_;
  State state_ = State::kIdle;
  Status why_;  // Once kEnded.
  TcpSocket socket_;
  bool is_unix_ = false;

  // While it is not open.
  std::vector<TcpRoute> routes_;
  std::size_t route_ = 0;
  Clock::time_point next_{};  // kWaiting: when to dial. kConnecting: until when.
  bool tried_ = false;
  std::optional<Clock::time_point> missed_since_;
  std::optional<Clock::time_point> no_descriptor_since_;
  std::optional<Clock::time_point> yielded_until_;
  std::chrono::milliseconds pause_{0};
  std::size_t refused_ = 0;  // Routes of this round.
  int refused_rounds_ = 0;
  int unanswered_ = 0;  // Hellos after which the connection ended.
  Clock::time_point hello_at_{};
  HandshakeFrame hello_{};
  HandshakeFrame answer_{};
  std::size_t answer_have_ = 0;

  // What was taken before it was open, and is not sent yet.
  std::vector<char> kept_;
  std::size_t kept_sent_ = 0;
  bool write_watched_ = false;
  bool drained_ = false;  // Nothing more is there until epoll says so.
  bool shut_ = false;     // Leave: no more is written.
  // Headers and what is small are read together.
  std::vector<char> ahead_;
  std::size_t ahead_at_ = 0;
  std::size_t ahead_end_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_TCP_STREAM_H_
