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

// State that the streams of a group share. Owned by the TcpHub.
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
  // A forked child that destroys its copy must not end the connections, which it shares with its
  // parent.
  const pid_t process = ::getpid();
  bool IsInChild() const { return ::getpid() != process; }
  // Time of the next Tick that no socket event announces; streams only make it earlier. Waiting
  // threads read it without the lock.
  std::atomic<Clock::time_point> next_tick{Clock::time_point::max()};
  void ScheduleTick(Clock::time_point t) {
    if (t < next_tick.load()) next_tick = t;
  }
  // Peers whose streams hold bytes that were read ahead but not taken; no socket event announces
  // these.
  std::vector<int> unread;
  // Keys of epoll events: the kind in the upper half, an index in the lower.
  enum Key : std::uint32_t { kListenTcp, kListenUnix, kStream, kPendingPeer };
  static std::uint64_t KeyOf(Key key, std::uint32_t which) {
    return std::uint64_t{key} << 32 | which;
  }
};

// The stream to one peer. Either side may open it:
//
//   from                                 event                           to
//   kIdle                                RequestOpen                     kWaiting
//   kWaiting                             Tick: time to dial              kConnecting
//   kConnecting                          connected                       kHelloSent
//   kHelloSent                           accepted and confirmed          kOpen
//   any of these before kOpen            Adopt: the peer dialled         kOpen
//   kConnecting, kHelloSent              failed: next address, or later  kWaiting
//   any                                  the connection ended or failed  kEnded
//
// The higher rank of a pair dials at once. The lower rank dials when it has something to send, or
// after kGrace, to find a peer that died before it dialled. Rank 0 always waits for kGrace, because
// every other rank dials it. If both dial at the same time, a side that accepts a hello gives up
// its own dial. A side whose own hello is unanswered does not accept the hello of a lower rank, but
// answers kBusy (AnswerToHello). So both sides use the same one of the two connections.
class TcpStream final : public ByteStream {
 public:
  using Clock = TcpGroupContext::Clock;
  // `group` must outlive this object.
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
  bool TryClose() override;
  void RequestOpen() override;
  bool open() const override { return state_ == State::kOpen; }
  std::string peer_suffix() const override { return peer_suffix_; }

  // Used by the hub. Handles epoll events of the socket. Returns true if the stream is open or has
  // ended, and so must be advanced.
  bool OnEvents(std::uint32_t events);
  // Does the work that is due and requests the next Tick (ScheduleTick). Returns true if the stream
  // has ended.
  bool Tick(Clock::time_point now);
  bool waits() const { return state_ != State::kIdle && state_ != State::kOpen && !ended(); }
  TcpAnswer AnswerToHello(Clock::time_point now) const;
  // Call Yield when a hello of the peer was accepted: this side stops dialling for a while. Call
  // Resume if that connection ended before it was confirmed.
  void Yield(Clock::time_point now);
  void Resume();
  // Takes over a connection of the peer after its handshake.
  void Adopt(TcpSocket socket, bool is_unix);
  // Whether the peer's machine still responds; ends the stream if not.
  bool CheckResponsive();

 private:
  enum class State { kIdle, kWaiting, kConnecting, kHelloSent, kOpen, kEnded };
  bool ended() const { return state_ == State::kEnded; }
  bool DialsFirst() const { return group_.rank > peer_; }
  std::uint64_t key() const;
  void Dial(Clock::time_point now);
  void SendHello(Clock::time_point now);
  void OnAnswer(Clock::time_point now);
  void OnDialFailed(const Status& why, Clock::time_point now);
  void Retry(Clock::time_point at);
  void End(const Status& why);
  void Opened();
  void Drop();
  void FlushKept();
  Result<std::size_t> TransferResult(ssize_t n, int err);

  TcpGroupContext& group_;
  const int peer_;
  const TcpAddress address_;
  const std::string peer_suffix_;
  State state_ = State::kIdle;
  Status why_;  // Why the stream ended; set in state kEnded.
  TcpSocket socket_;
  bool is_unix_ = false;

  // State before the stream is open.
  std::vector<TcpRoute> routes_;
  std::size_t route_ = 0;
  Clock::time_point next_{};  // When to dial (kWaiting) or give up (kConnecting).
  bool tried_ = false;
  std::optional<Clock::time_point> missed_since_;
  std::optional<Clock::time_point> no_descriptor_since_;
  std::optional<Clock::time_point> yielded_until_;
  std::chrono::milliseconds pause_{0};
  std::size_t refused_ = 0;  // Number of routes that refused since route 0 was tried.
  int refused_rounds_ = 0;
  int unanswered_ = 0;  // Number of hellos without a valid answer.
  Clock::time_point hello_at_{};
  HandshakeFrame hello_{};
  HandshakeFrame answer_{};
  std::size_t answer_have_ = 0;

  // Bytes written before the stream was open, not sent yet.
  std::vector<char> kept_;
  std::size_t kept_sent_ = 0;
  bool write_watched_ = false;
  bool drained_ = false;  // Nothing to read until an epoll event.
  bool shut_ = false;     // TryClose has ended writing.
  // Read-ahead buffer: headers and small messages are read together.
  std::vector<char> ahead_;
  std::size_t ahead_at_ = 0;
  std::size_t ahead_end_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_TCP_STREAM_H_
